"""Suites of `cudafuture.bench` for this package: entry points, so that `cudafuture` does not know it."""

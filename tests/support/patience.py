"""The time limit of tests."""

from __future__ import annotations

PATIENCE = 60.0  # seconds that a test waits for an operation; it waits so long only if the operation hangs

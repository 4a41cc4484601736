"""Quantiles of latencies, next to the exact ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_ext._C import Histogram

DURATIONS = st.integers(8, 1 << 49)  # of which a float has every nanosecond


def histogram_of(durations: list[int]) -> Histogram:
    histogram = Histogram()
    for ns in durations:
        histogram.add(ns)
    return histogram


@settings(deadline=None)
@given(st.lists(DURATIONS, min_size=1, max_size=200), st.floats(0, 1))
def test_quantile_exceeds_by_one_bucket_at_most(durations: list[int], q: float) -> None:
    exact = sorted(durations)[max(0, math.ceil(q * len(durations)) - 1)] * 1e-9
    found = histogram_of(durations).quantile(q)
    assert exact <= found * (1 + 1e-9)
    assert found <= exact * (1 + 1 / 8) * (1 + 1e-9) + 1e-9  # a bucket is an eighth of a power of two wide


@settings(deadline=None)
@given(st.lists(DURATIONS, max_size=100))
def test_buckets_are_ordered_and_not_empty(durations: list[int]) -> None:
    histogram = histogram_of(durations)
    buckets = histogram.buckets()
    assert sum(count for _, count in buckets) == histogram.total == len(durations)
    assert all(count for _, count in buckets)
    uppers = [upper for upper, _ in buckets]
    assert uppers == sorted(set(uppers))
    for upper, _ in buckets:  # a value below a bucket's end is in it or in an earlier one
        below = sum(count for end, count in buckets if end <= upper)
        assert below == sum(ns < round(upper * 1e9) for ns in durations)


@settings(deadline=None)
@given(st.lists(DURATIONS, min_size=1, max_size=50))
def test_quantiles_grow(durations: list[int]) -> None:
    histogram = histogram_of(durations)
    quantiles = [histogram.quantile(i / 20) for i in range(21)]
    assert quantiles == sorted(quantiles)


def test_none_is_not_number() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert Histogram().buckets() == []


@pytest.mark.parametrize("ns", [-5, 0, 1, 7])
def test_shortest_values_use_first_bucket(ns: int) -> None:
    assert histogram_of([ns]).buckets() == [(pytest.approx(9e-9), 1)]  # type: ignore[comparison-overlap]


def test_p99_of_hundred_is_second_largest() -> None:
    durations = [1000] * 98 + [1_000_000, 1_000_000_000]
    histogram = histogram_of(durations)
    assert 1e-6 <= histogram.quantile(0.98) < 1.2e-6
    assert 1e-3 <= histogram.quantile(0.99) < 1.2e-3
    assert 1 <= histogram.quantile(1) < 1.2

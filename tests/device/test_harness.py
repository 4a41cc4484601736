"""Calibration of a device's speed, which must not begin before the device's clock has risen."""

from __future__ import annotations

from collections.abc import Callable

from support.harness import settle


def figures(*of_calls: float) -> tuple[Callable[[], float], list[float]]:
    """Return a function that returns these figures one by one, and the list of those that it has not returned."""
    left = list(of_calls)
    return lambda: left.pop(0), left


def test_measuring_ends_when_figure_repeats() -> None:
    measure, left = figures(30.0, 17.0, 9.0, 5.05, 5.0, 4.0)
    assert settle(measure) == 5.0
    assert left == [4.0]


def test_figures_before_clock_rise_do_not_count() -> None:
    measure, left = figures(30.0, 30.0, 30.0, 8.0, 5.0, 5.0, 4.0)
    assert settle(measure, warm_up=95.0) == 5.0
    assert left == [4.0]


def test_one_figure_after_warm_up_is_insufficient() -> None:
    measure, left = figures(100.0, 5.0, 5.0)
    assert settle(measure, warm_up=50.0) == 5.0
    assert left == []


def test_disturbed_figure_does_not_count() -> None:
    measure, left = figures(5.0, 9.0, 9.0, 5.0)
    assert settle(measure) == 5.0
    assert left == []


def test_unstable_figures_return_least() -> None:
    measure, left = figures(16.0, 4.0, 2.0, 8.0, 1.0)
    assert settle(measure, at_most=4) == 2.0
    assert left == [1.0]

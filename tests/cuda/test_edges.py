"""Each sync edge is cut in turn on a real GPU, and the data must be wrong where the hardware can show it.

The scenarios are those of the other accelerators (``device/scenarios.py``). Those accelerators find the reason by
themselves; a GPU has only the data. Each scenario passes as it is. With its edge cut it fails at least once, or the
edge is skipped and named: the hardware has then run the work in the right order by chance, or cannot run it in another.

On fake devices a few edges run that always show there, so that the logic of the test is exercised.
``fakecuda/test_mutation.py`` has them all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from cudafuture.testing import fakecuda
from device.scenarios import SCENARIOS, Scenario, process_group, run
from support.harness import Cuda

pytestmark = pytest.mark.cuda

TIMES = 3  # that a scenario runs with its edge cut, unless it fails earlier
ON_FAKE_DEVICES = ("wait.stream", "event.synchronize", "copy.source_wait", "io.target_copied")
SEEN_AS = (AssertionError, torch.AcceleratorError, fakecuda.RaceError)
HAS_GPU = torch.cuda.is_available() and not fakecuda.is_active()
EDGES = list(SCENARIOS) if HAS_GPU else ON_FAKE_DEVICES


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with process_group():
        yield


def why_invisible(edge: str, device: Cuda) -> str | None:
    """Return the reason why no data can be wrong when the edge is missing, or None."""
    if edge.startswith("guard."):
        return "without it a context is made on another device, and the data are right"
    if "pair" in SCENARIOS[edge].test.__annotations__ and device.count < 2:
        return "its scenario needs two devices"
    return None


def error_of(device: Cuda, scenario: Scenario, edge: str | None) -> Exception | None:
    """Run the scenario on an idle device with the edge cut, and return the error that its test raised."""
    gc.collect()
    torch.cuda.empty_cache()
    device.rest()
    try:
        return run(scenario, edge, device)
    finally:
        device.finish()
        device.rest()


@pytest.mark.parametrize("edge", EDGES)
def test_missing_edge_gives_wrong_data(cuda: Cuda, edge: str) -> None:
    scenario = SCENARIOS[edge]
    if reason := why_invisible(edge, cuda):
        pytest.skip(f"{edge} does not show: {reason}")
    assert error_of(cuda, scenario, None) is None
    if not any(isinstance(error_of(cuda, scenario, edge), SEEN_AS) for _ in range(TIMES)):
        assert HAS_GPU, "fake devices show these"
        pytest.skip(f"{edge} does not show: {TIMES} runs without it had the right data on this device")


def test_device_shows_missing_order_of_held_value(cuda: Cuda) -> None:
    error = error_of(cuda, SCENARIOS["event.synchronize"], "event.synchronize")
    assert isinstance(error, AssertionError)

"""Each sync edge is cut in turn on torch's own CUDA code, and the device suite must notice.

The scenarios are those of the simulated accelerator. Each runs once as it is, without a finding, and once with its edge
cut. How the missing edge is noticed depends on the finding that the simulated accelerator makes of it:

=================  ====================================================================================================
there              here
=================  ====================================================================================================
``race``           A report of kind ``race``. The stacks of its two sides show the lines that are to blame.
``reuse``          The same. torch's caching allocator does not tell the runtime that it hands memory out again, so the
                   later side is the first operation that uses the memory again, and not its allocation.
``host_race``      The scenario's test fails: the runtime does not see what the host does with pinned memory.
``wrong_data``     The scenario's test fails: no device sees what a disk does.
``wrong_device``   The scenario's test fails, or a thread makes a context on a device that the program does not use.
                   Torch selects the device of each call by itself and afterwards the thread's own device again; from
                   CUDA 12 on that makes a context there (pytorch#94864).
=================  ====================================================================================================

INVISIBLE lists the edges whose absence CUDA forgives.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cudafuture import _C, CUDAFuture
from cudafuture.testing import fakecuda
from device.scenarios import SCENARIOS, Scenario, cut, process_group, run, shows
from support.harness import Cuda, Device, empty_caches

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("race_detection", "lazy_schedule")]

Call = Callable[[], object]
UNUSED = 0  # the device that no scenario uses; it is the current one of a new thread
MANY = 1100  # more events than the pool keeps for a device

NOTICED_BY = {"race": "race", "reuse": "race", "host_race": "failure", "wrong_data": "failure"}


def completing(device: Device) -> Call:
    x, stream = device.produce(1.0), device.stream()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    return lambda: future.set_result(x, stream=stream)


def waiting(device: Device) -> Call:
    future = device.complete(1.0)
    return lambda: future.wait(non_blocking=True)


def querying(device: Device) -> Call:
    return device.complete(1.0).events[device.at()].query


def synchronizing(device: Device) -> Call:
    return device.complete(1.0).events[device.at()].synchronize


def destroying(device: Device) -> Call:
    x = device.produce(1.0)
    futures: list[CUDAFuture[torch.Tensor]] = [CUDAFuture() for _ in range(MANY)]
    for future in futures:
        future.set_result(x)
    return futures.clear


def converting(device: Device) -> Call:
    view, events = device.complete(1.0).events[device.at()], list[Any]()
    return lambda: events.append(view.to_torch_event())


# For each edge that selects an event's device for a call: the call, which a thread makes that has selected no device.
GUARDED: dict[str, Callable[[Device], Call]] = {
    "guard.record": completing,
    "guard.block": waiting,
    "guard.query": querying,
    "guard.synchronize": synchronizing,
    "guard.destroy": destroying,
    "guard.to_torch": converting,
}
ANY_DEVICE = (
    "CUDA allows the call whichever device is current (CUDA C++ Programming Guide, 'Stream and Event Behavior'), and "
    "torch's CUDA guard makes it without selecting a device. So no context is made, and the answer is right. "
    "Accelerators whose guards ask for the event's device, such as the simulated one, need the edge."
)
INVISIBLE: dict[str, str] = {"guard.query": ANY_DEVICE, "guard.synchronize": ANY_DEVICE}

FAILING = ("scope.device", "caller.device")  # tests of the device suite that look at the current device
REPORTED = [edge for edge, s in SCENARIOS.items() if NOTICED_BY.get(s.kind) == "race"]
FAILED = [edge for edge, s in SCENARIOS.items() if NOTICED_BY.get(s.kind) == "failure" or edge in FAILING]
WITH_CONTEXT = [edge for edge in GUARDED if edge not in INVISIBLE]


@pytest.fixture(scope="module")
def cuda() -> Iterator[Cuda]:
    """Give the devices of the suite, with a device beside them that no scenario uses, and a process group."""
    if torch.cuda.device_count() < 3:
        pytest.skip("needs three devices, of which scenarios use two; run with --devices 4")
    with process_group(), torch.cuda.device(torch.cuda.current_device()):
        yield Cuda(spares_device_0=True)


def findings(scenario: Scenario, edge: str | None, device: Cuda) -> tuple[list[fakecuda.Report], Exception | None]:
    """Run the test with the edge cut; return the races, and the error that the test raised."""
    gc.collect()
    empty_caches()  # new memory is poisoned
    fakecuda.races()
    device.rest()
    try:
        error = run(scenario, edge, device)
    finally:
        device.finish()
        device.rest()
    return fakecuda.races(), error


def contexts_of_a_thread(call: Call, edge: str | None) -> tuple[int, ...]:
    """Make the call in a new thread with the edge cut, and return the devices that then have a context."""
    errors: list[Exception] = []

    def make_call() -> None:
        try:
            call()
        except Exception as e:
            errors.append(e)

    fakecuda.reset_context(UNUSED)
    with cut(edge):
        thread = threading.Thread(target=make_call)
        thread.start()
        thread.join()
    assert errors == []
    return fakecuda.contexts()


@pytest.mark.parametrize("edge", REPORTED)
def test_missing_edge_is_reported_as_race(cuda: Cuda, edge: str) -> None:
    scenario = SCENARIOS[edge]
    assert findings(scenario, None, cuda) == ([], None)
    reports, error = findings(scenario, edge, cuda)
    assert {report.kind for report in reports} == {"race"}
    assert any(shows(report, scenario) for report in reports), [error, *map(str, reports)]


@pytest.mark.parametrize("edge", FAILED)
def test_invisible_missing_edge_fails_its_test(cuda: Cuda, edge: str) -> None:
    scenario = SCENARIOS[edge]
    assert findings(scenario, None, cuda) == ([], None)
    reports, error = findings(scenario, edge, cuda)
    assert reports == []  # else the detector sees it, and REPORTED should have it
    assert isinstance(error, AssertionError)


@pytest.mark.parametrize("edge", WITH_CONTEXT)
def test_missing_guard_makes_context(cuda: Cuda, edge: str) -> None:
    cuda.rest()
    assert UNUSED not in contexts_of_a_thread(GUARDED[edge](cuda), None)
    assert UNUSED in contexts_of_a_thread(GUARDED[edge](cuda), edge)
    cuda.finish()
    fakecuda.reset_context(UNUSED)


@pytest.mark.parametrize("edge", INVISIBLE)
def test_listed_invisible_edge_is_not_seen(cuda: Cuda, edge: str) -> None:
    assert findings(SCENARIOS[edge], edge, cuda) == ([], None)
    assert UNUSED not in contexts_of_a_thread(GUARDED[edge](cuda), edge)
    cuda.finish()


def test_each_edge_is_noticed_or_listed() -> None:
    assert sorted([*REPORTED, *FAILED, *WITH_CONTEXT, *INVISIBLE]) == sorted(_C.sync_edges())

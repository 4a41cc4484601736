"""Calls of one worker to itself, with tensors on simulated devices: the race detector sees both ends."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rpc_ext
from cudafuture import _C
from cudafuture.testing import sim
from rpc_ext import remote, rpc_async, rpc_sync
from support import device_calls
from support.device_calls import LONG, calling, double, only, start_fill
from support.simulated import SCHEDULES
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-sim")]

on_each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    return tmp_path / "meeting"


@on_each_schedule
@pytest.mark.parametrize("scenario", device_calls.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_schedule_shows_race(meeting: Path, scenario: Callable[[str], None], schedule: str) -> None:
    with calling(schedule, meeting) as me:
        scenario(me.name)


@pytest.mark.soak
@pytest.mark.slow
def test_no_seed_shows_race(tmp_path: Path) -> None:
    scenarios = [s for s in device_calls.SCENARIOS if s is not device_calls.many_in_a_row]
    for seed in range(soak_count(100)):
        random.Random(seed).shuffle(scenarios)
        with calling("jitter", tmp_path / str(seed), seed=seed) as me:
            for scenario in scenarios:
                scenario(me.name)


# ---- what is ordered by what


@contextlib.contextmanager
def cut(edge: str) -> Iterator[None]:
    _C.cut_sync_edge(edge)
    try:
        yield
    finally:
        _C.cut_sync_edge(None)


def findings(scenario: Callable[[str], None], edge: str, meeting: Path) -> tuple[bool, bool]:
    """Return whether a race was found with the edge cut, and whether the values were wrong."""
    wrong = raced = False
    try:
        with calling("lazy", meeting) as me:
            try:
                with cut(edge):
                    scenario(me.name)
            except AssertionError:
                wrong = True
    except sim.RaceError:
        raced = True
    return raced, wrong


@pytest.mark.parametrize("edge", ["copy.source_wait", "copy.done_record", "result.record", "wait.stream"])
def test_missing_edge_is_found(meeting: Path, edge: str) -> None:
    assert findings(device_calls.arguments_and_results, edge, meeting) == (True, True)


@pytest.mark.parametrize("edge", ["then_async.events", "gather.events", "then.stream"])
def test_missing_edge_of_method_is_found(meeting: Path, edge: str) -> None:
    assert findings(device_calls.methods_of_references, edge, meeting)[0]


def test_message_sent_early_has_wrong_values(meeting: Path) -> None:
    """Show the missing edge by wrong values: the detector does not see the reads of TensorPipe."""
    assert findings(device_calls.arguments_and_results, "host.query", meeting)[1]


@on_each_schedule
def test_caller_without_wait_is_found(meeting: Path, schedule: str) -> None:
    with calling(schedule, meeting) as me:
        future = rpc_async(me.name, double, (start_fill(1.0),))
        done = threading.Event()  # wait() would order this thread's streams, too
        future.add_done_callback(lambda _: done.set())
        assert done.wait(LONG)
        with pytest.raises(sim.RaceError, match="copy_"), sim.detect_races(), torch.Stream("sim:0"):
            future.value() * 2
        sim.finish()


# ---- devices that fail


@pytest.mark.parametrize("call", ["rpc_async", "batch"])
def test_device_lost_before_sending_fails_call(meeting: Path, call: str) -> None:
    with calling("lazy", meeting, devices=2) as me:
        x = start_fill(1.0)
        sim.fail("a broken bit")
        if call == "batch":
            with rpc_ext.batch(me.name):
                future = rpc_async(me.name, double, (x,))
        else:
            future = rpc_async(me.name, double, (x,))
        with pytest.raises(RuntimeError, match="a broken bit"):
            future.wait(timeout=LONG)
        sim.clear_error()
        assert rpc_sync(me.name, divmod, (7, 2)) == (3, 1)
        assert only(rpc_sync(me.name, double, (start_fill(2.0, 1),))) == 4.0


@pytest.mark.parametrize("in_batch", [False, True])
def test_call_with_busy_device_times_out(meeting: Path, in_batch: bool) -> None:
    with calling("lazy", meeting) as me:
        with sim.hold():
            with rpc_ext.batch(me.name) if in_batch else contextlib.nullcontext():
                stuck = rpc_async(me.name, double, (start_fill(1.0),), timeout=0.05)
            with pytest.raises(TimeoutError, match=r"double on worker 'worker0' has not answered within 0\.05 s"):
                stuck.wait(timeout=LONG)
        assert only(rpc_sync(me.name, double, (start_fill(2.0),))) == 4.0
        assert me.statistics().destinations[me.name].in_flight == 0


def test_remote_refuses_tensors_through_host(meeting: Path) -> None:
    with calling("lazy", meeting) as me:
        register = remote(me.name, device_calls.Register, (1.0,))
        for call in (lambda x: remote(me.name, double, (x,)), register.remote().add):
            with pytest.raises(
                ValueError, match=r"a tensor on sim:0 cannot be sent to worker 'worker0'.*copy it to the host first"
            ):
                call(start_fill(1.0))
        assert only(register.remote().add_number(2.0).to_here()) == 3.0
        assert only(register.rpc_sync().add(start_fill(2.0))) == 5.0

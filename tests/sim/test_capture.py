"""Stream captures: the host calls that end them in each mode, and the numbers that tell captures apart."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch

from cudafuture.testing import sim
from cudafuture.testing.sim import _C

pytestmark = pytest.mark.sim(devices=2, schedule="lazy")

RELAXED = 2  # cudaStreamCaptureModeRelaxed


def record_event() -> torch.Event:
    event = torch.Event("sim")
    event.record(torch.Stream("sim:0"))
    return event


UNSAFE: dict[str, Callable[[], Any]] = {
    "a query of an event": lambda: record_event().query(),
    "a synchronization with an event": lambda: record_event().synchronize(),
    "a query of a stream": lambda: torch.Stream("sim:0").query(),
    "a synchronization with a stream": lambda: torch.Stream("sim:0").synchronize(),
    "a synchronization with another device": lambda: sim.synchronize("sim:1"),
    "an allocation of pinned memory": lambda: torch.empty(4, pin_memory=True),
    "a copy to pinned memory": lambda: torch.ones(4).pin_memory(),
    "a copy to pageable memory": lambda: torch.empty(4, device="sim:1").cpu(),
}
PINNED = {"an allocation of pinned memory", "a copy to pinned memory"}
# Modes of captures, and threads to which they forbid unsafe calls.
FORBIDDEN = {("global", "other"), ("global", "own"), ("thread_local", "own")}


def function(capsule: Any, name: bytes, result: Any, *arguments: Any) -> Any:
    """Return the C function in a capsule."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(result, *arguments)(pointer_of(capsule, name))


@contextmanager
def relax_capture() -> Iterator[None]:
    """Put the calling thread into relaxed capture mode for a scope."""
    capsule = _C.device_functions()["exchange_capture_mode"]
    exchange = function(capsule, b"exchange_capture_mode", ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def capture_of(stream: torch.Stream) -> int:
    number = function(_C.device_functions()["capture_of"], b"capture_of", ctypes.c_uint64, ctypes.c_int, ctypes.c_int64)
    return int(number(stream.device_index, stream.stream_id))


def error_of(call: Callable[[], Any], thread: str) -> str:
    """Make a call in this thread or another one, and return the message of its error; "" if there is none."""
    messages = [""]

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))

    if thread == "own":
        run()
    else:
        other = threading.Thread(target=run)
        other.start()
        other.join()
    return messages[-1]


def errors_of(call: Callable[[], Any], thread: str, mode: Any) -> tuple[str, str]:
    """Make a call beside a capture; return the messages of the call and of the end of the capture."""
    message = ""
    with pytest.raises(RuntimeError) as ended, torch.Stream("sim:0") as captured:  # noqa: PT012
        with sim.capture(captured, mode):
            message = error_of(call, thread)
        raise RuntimeError("")
    return message, str(ended.value)


@pytest.mark.parametrize("thread", ["own", "other"])
@pytest.mark.parametrize("mode", get_args(sim.CaptureMode))
@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_call_ends_forbidding_capture(name: str, mode: str, thread: str) -> None:
    called, ended = errors_of(UNSAFE[name], thread, mode)
    if (mode, thread) in FORBIDDEN and not (thread == "own" and name in PINNED):
        assert "cudaErrorStreamCaptureUnsupported" in called
        assert "cudaErrorStreamCaptureUnsupported" in ended
    else:
        assert (called, ended) == ("", "")


@pytest.mark.parametrize("name", UNSAFE)
def test_relaxed_thread_makes_unsafe_calls(name: str) -> None:
    def call() -> None:
        with relax_capture():
            UNSAFE[name]()

    assert errors_of(call, "other", "global") == ("", "")


@pytest.mark.parametrize("mode", get_args(sim.CaptureMode))
def test_every_mode_forbids_device_wait(mode: str) -> None:
    def call() -> None:
        with relax_capture():
            sim.synchronize("sim:0")

    called, ended = errors_of(call, "other", mode)
    assert "every capture mode" in called
    assert "a synchronization with its device" in ended


@pytest.mark.parametrize("mode", get_args(sim.CaptureMode))
@pytest.mark.parametrize("ask", [torch.Stream.query, torch.Stream.synchronize])
def test_every_mode_forbids_stream_query(ask: Callable[[torch.Stream], Any], mode: str) -> None:
    called, ended = errors_of(lambda: ask(torch.accelerator.current_stream()), "own", mode)
    assert "cudaErrorCapturedEvent" in called
    assert "recorded inside it" in ended


def test_only_own_mode_ends_capture() -> None:
    lenient, strict = torch.Stream("sim:0"), torch.Stream("sim:0")
    with (
        sim.capture(lenient, "thread_local"),
        pytest.raises(RuntimeError, match="a query of an event"),
        sim.capture(strict),
    ):
        assert error_of(UNSAFE["a query of an event"], "other")


def test_capture_allows_allocations_of_others() -> None:
    captured = torch.Stream("sim:0")

    def allocate() -> None:
        with captured:
            torch.empty(4, pin_memory=True)

    with sim.capture(captured):
        assert not error_of(allocate, "other")


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="global, thread_local, relaxed"), sim.capture(mode="strict"):  # type: ignore[arg-type]
        pass


def test_each_capture_has_unique_number() -> None:
    stream, other = torch.Stream("sim:0"), torch.Stream("sim:0")
    numbers = [capture_of(stream)]
    for _ in range(2):
        with sim.capture(stream):
            numbers.append(capture_of(stream))
            assert capture_of(other) == 0
        assert capture_of(stream) == 0
    sim.enable()
    with sim.capture(stream):
        numbers.append(capture_of(stream))
    assert numbers[0] == 0
    assert len(set(numbers)) == 4


def test_joining_stream_has_capture_number() -> None:
    stream, joined, elsewhere = torch.Stream("sim:0"), torch.Stream("sim:0"), torch.Stream("sim:1")
    with sim.capture(stream):
        joined.wait_stream(stream)
        assert capture_of(joined) == capture_of(stream) != 0
        with sim.capture(elsewhere):
            assert capture_of(elsewhere) not in (0, capture_of(stream))
    assert capture_of(joined) == 0

"""Controls of streams for tests: hold, delay, capture and failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from cudafuture.testing.machine._hold import StreamHold, open_all
from cudafuture.testing.sim import _C as _native
from cudafuture.testing.sim._accelerator import synchronize
from cudafuture.testing.sim._virtual_time import name_of, seconds

__all__ = ["CaptureMode", "Hold", "capture", "fail", "finish", "hold", "priority", "release", "sleep"]

CaptureMode = Literal["global", "thread_local", "relaxed"]


class Hold(StreamHold):
    """Hold of a stream: work enqueued after it stays pending until ``open()``, or until its ``with`` block ends."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self._gate = gate

    def open(self) -> None:
        """Let the stream continue. Further calls do nothing.

        >>> sim.enable()
        >>> held = sim.hold()
        >>> held.open()
        """
        _native.open(self._gate)


def release() -> None:
    """Open every Hold.

    >>> sim.enable(schedule="lazy")
    >>> held = sim.hold()
    >>> sim.release()
    >>> sim.synchronize()
    """
    open_all(Hold)


def finish() -> None:
    """Open every Hold, and block until all work has run. The pytest fixture ends each test with it.

    Raises:
        DeviceError: some of it failed.

    >>> sim.enable(schedule="lazy")
    >>> held = sim.hold()
    >>> sim.finish()
    >>> torch.accelerator.current_stream().query()
    True
    """
    release()
    synchronize()


def sleep(ms: float, stream: torch.Stream | None = None) -> None:
    """Enqueue a delay of `ms` virtual milliseconds on a stream (default: the current one). It takes no real time.

    >>> sim.enable()
    >>> sim.sleep(ms=2.5)
    >>> sim.synchronize()
    >>> sim.clock()
    0.0025
    """
    _native.sleep(name_of(stream), seconds(ms))


def priority(stream: torch.Stream | None = None) -> int:
    """Return the priority of a stream (default: the current one): lower is more urgent, 0 is the default.

    >>> sim.enable()
    >>> sim.priority(torch.Stream("sim", priority=-1))
    -1
    """
    value: int = _native.priority(name_of(stream))
    return value


def hold(stream: torch.Stream | None = None) -> Hold:
    """Hold a stream (default: the current one) here until ``open()`` of the result, or the end of its ``with``.

    It keeps device work pending for a test. A host thread that synchronises with the stream meanwhile blocks.

    >>> sim.enable()
    >>> with sim.hold():
    ...     sim.sleep(ms=1)
    ...     torch.accelerator.current_stream().query()
    False
    """
    return Hold(_native.hold(name_of(stream)))


@contextlib.contextmanager
def capture(stream: torch.Stream | None = None, mode: CaptureMode = "global") -> Iterator[None]:
    """Capture a stream (default: the current one) for a scope, as far as host calls can break a capture.

    Work that is enqueued on the stream is recorded and never runs, since there are no graphs to launch. A stream that
    waits for an event of the capture joins it. These calls end the capture, as on CUDA:

    - a query of, or a synchronization with, an event that was recorded inside it, or a stream that is in it;
    - a synchronization with a device that has a stream in it;
    - a wait of a capturing stream for work outside of the capture;
    - an unsafe call, by a thread to which the mode forbids such calls. Unsafe calls are queries of other events and
      streams, synchronizations with them and with other devices, and allocations of pinned memory. torch's pinned
      allocator for CUDA queries events. It may do so on a stream that is in the capture.

    Args:
        stream: the stream.
        mode: the threads that may make no unsafe calls, as ``capture_error_mode`` of ``torch.cuda.graph``: all threads
            that are not in relaxed mode themselves ("global", the default), the thread that captures ("thread_local"),
            or none ("relaxed"). cudaThreadExchangeStreamCaptureMode sets the mode of a thread. cudafuture's own threads
            are in relaxed mode.

    Raises:
        RuntimeError: at such a call, and at the end of the scope, with the name of the call.
        ValueError: the mode does not exist.

    >>> sim.enable()
    >>> event = torch.Event("sim")
    >>> with sim.capture():
    ...     event.record()
    ...     event.query()
    Traceback (most recent call last):
        ...
    RuntimeError: a query of an event that was recorded inside a stream capture: CUDA refuses it ...
    """
    modes = get_args(CaptureMode)
    if mode not in modes:
        raise ValueError(f"mode={mode!r} does not exist; use one of {', '.join(modes)}")
    captured = name_of(stream)
    _native.begin_capture(captured, modes.index(mode))
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the call that broke the capture has raised already
            _native.end_capture(captured)
        raise
    _native.end_capture(captured)


def fail(message: str, stream: torch.Stream | None = None) -> None:
    """Enqueue work that fails. After it the device is broken, as after a CUDA error, until ``clear_error``.

    >>> sim.enable()
    >>> sim.fail("a broken bit")
    >>> sim.synchronize()
    Traceback (most recent call last):
        ...
    cudafuture.testing.sim.DeviceError: a broken bit
    """
    _native.fail(name_of(stream), message)

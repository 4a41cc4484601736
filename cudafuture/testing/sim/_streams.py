"""Controls of streams for tests: hold, delay, capture and failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from cudafuture.testing import _sim as _native
from cudafuture.testing._hold import StreamHold, open_all
from cudafuture.testing.sim._accelerator import synchronize
from cudafuture.testing.sim._virtual_time import name_of, seconds

__all__ = ["Hold", "capture", "fail", "finish", "hold", "priority", "release", "sleep"]


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
def capture(stream: torch.Stream | None = None) -> Iterator[None]:
    """Capture a stream (default: the current one) for a scope, as far as host calls can break a capture.

    Work that is enqueued on the stream is recorded and never runs, since there are no graphs to launch. A stream that
    waits for an event of the capture joins it. These calls end the capture, as in CUDA's default mode (global):

    - a query of, or a synchronization with, an event that was recorded inside it;
    - a query of, or a synchronization with, any other event, by a thread that is not in relaxed capture mode;
    - a wait of a capturing stream for work outside of the capture.

    Raises:
        RuntimeError: at such a call, and at the end of the scope, with the name of the call.

    >>> sim.enable()
    >>> event = torch.Event("sim")
    >>> with sim.capture():
    ...     event.record()
    ...     event.query()
    Traceback (most recent call last):
        ...
    RuntimeError: a query of an event that was recorded inside a stream capture: CUDA refuses it ...
    """
    captured = name_of(stream)
    _native.begin_capture(captured)
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

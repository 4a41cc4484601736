"""Link that transfers tensors from one stage to another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.future import copy

__all__ = ["Link", "LinkClosedError", "LocalLink"]


class LinkClosedError(Exception):
    """Error of a cell that waits for a message, after the step has failed in another cell."""


class Link(Protocol):
    """Transfer of tensors between the stages of a pipeline. A pipeline creates one for each step.

    A key, which is hashable, names a message; each is sent once and received once.
    """

    def send(self, key: Any, leaves: Sequence[Any], device: torch.device, header: Any) -> None:
        """Begin to transfer tensors to a device, after the work enqueued on the current stream. Do not block."""

    def receive(self, key: Any) -> tuple[list[Any], Any]:
        """Return the leaves and the header of a message; the current stream waits for the tensors.

        Block until the message was sent. Raise LinkClosedError after ``close``.
        """

    def close(self) -> None:
        """Make all waiting calls, and all later ones, raise LinkClosedError."""


class LocalLink:
    """Link between the devices of one process: copies concurrent with the work of both stages.

    A tensor that is on the device already is passed on; the others are copied by ``cudafuture.copy``, whose streams
    wait for the sender, and the receiver waits for them.

    >>> link = LocalLink()
    >>> link.send(("F", 1, 0), [torch.ones(2)], torch.device("cpu"), "header")
    >>> link.receive(("F", 1, 0))
    ([tensor([1., 1.])], 'header')
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the fields below; a finalizer may close the link under it
        self._sent: dict[Any, tuple[CUDAFuture[list[Any]], torch.device, Any]] = {}
        self._awaited: dict[Any, CUDAFuture[None]] = {}  # complete when the message was sent, or the link was closed
        self._is_closed = False

    def send(self, key: Any, leaves: Sequence[Any], device: torch.device, header: Any) -> None:
        """Begin to transfer tensors to a device; see ``Link``.

        >>> LocalLink().send(("B", 0, 3), [torch.ones(2), None], torch.device("cpu"), None)
        """
        if all(not isinstance(leaf, torch.Tensor) or leaf.device == device for leaf in leaves):
            future = CUDAFuture.completed(list(leaves))  # with events of the current streams
        else:
            future = copy(list(leaves), device)
        with self._lock:
            if self._is_closed:
                raise LinkClosedError
            self._sent[key] = (future, device, header)
            awaited = self._awaited.pop(key, None)
        if awaited is not None:
            awaited.set_result(None)

    def receive(self, key: Any) -> tuple[list[Any], Any]:
        """Return a message; see ``Link``.

        >>> link = LocalLink()
        >>> link.send("key", [1, 2], torch.device("cpu"), "header")
        >>> link.receive("key")
        ([1, 2], 'header')
        """
        while True:
            with self._lock:
                if self._is_closed:
                    raise LinkClosedError
                if key in self._sent:
                    future, device, header = self._sent.pop(key)
                    break
                awaited = self._awaited.get(key)
                if awaited is None:
                    awaited = self._awaited[key] = CUDAFuture(name=f"message {key}")
                    _C.register(awaited)
            awaited.wait()
        return future.wait(non_blocking=device.type != "cpu"), header

    def close(self) -> None:
        """Make receivers raise; see ``Link``.

        >>> link = LocalLink()
        >>> link.close()
        >>> link.receive("key")
        Traceback (most recent call last):
            ...
        cudafuture.pipeline.link.LinkClosedError
        """
        with self._lock:
            self._is_closed = True
            self._sent.clear()
            awaited, self._awaited = self._awaited, {}
        for one in awaited.values():
            one.set_result(None)


MakeLink = Callable[[], Link]

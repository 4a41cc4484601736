"""Trackers of skip tensors: a stashed tensor waits there for its pop, under a name and a namespace."""

from __future__ import annotations

import threading
import uuid
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import total_ordering
from typing import Any

from torch import Tensor

__all__ = ["SkipNamespace", "SkipTracker", "current_skip_tracker", "use_skip_tracker"]


@total_ordering
class SkipNamespace(metaclass=ABCMeta):  # noqa: B024 - a type that None can be registered with
    """Namespace of skip names, for ``isolate``. A copy of one is equal to it. ``None`` is the default namespace.

    >>> SkipNamespace() == SkipNamespace()
    False
    >>> isinstance(None, SkipNamespace)
    True
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()  # not the address, so that a deep copy of a model keeps its skips

    def __repr__(self) -> str:
        return f"<SkipNamespace {self.id}>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if type(other) is SkipNamespace else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self.id < other.id if type(other) is SkipNamespace else NotImplemented


SkipNamespace.register(type(None))

Key = tuple[SkipNamespace | None, str]


class SkipTracker:
    """Store of the tensors that have been stashed and not yet popped, for one micro-batch.

    A pipeline subclasses it, and makes it current with ``use_skip_tracker`` while a stage runs. `batch` is the result
    of ``batch_of`` for the module's argument in ``load``, and for its result in ``save``.

    >>> import torch
    >>> tracker = SkipTracker()
    >>> tracker.save(None, None, "skip", torch.ones(2))
    >>> tracker.load(None, None, "skip")
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor | None] = {}

    def batch_of(self, value: Any) -> Any:
        """Return an object whose `tensor_or_tensors` replaces the argument or result of a module; None: nothing does.

        >>> SkipTracker().batch_of(torch.ones(2))
        """
        return None

    def save(self, batch: Any, ns: SkipNamespace | None, name: str, tensor: Tensor | None) -> None:
        """Keep a stashed tensor.

        >>> SkipTracker().save(None, None, "skip", None)
        """
        self.tensors[ns, name] = tensor

    def load(self, batch: Any, ns: SkipNamespace | None, name: str) -> Tensor | None:
        """Return a stashed tensor and remove it.

        Raises:
            KeyError: nothing is stashed under the name.

        >>> SkipTracker().load(None, None, "skip")
        Traceback (most recent call last):
            ...
        KeyError: (None, 'skip')
        """
        return self.tensors.pop((ns, name))


class _CurrentTracker(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _CurrentTracker()


def current_skip_tracker() -> SkipTracker:
    """Return this thread's skip tracker: that of ``use_skip_tracker``, or the thread's own one.

    >>> current_skip_tracker() is current_skip_tracker()
    True
    """
    return _current.tracker


def use_skip_tracker(tracker: SkipTracker) -> AbstractContextManager[None]:
    """Return a context manager that makes a skip tracker this thread's current one.

    >>> tracker = SkipTracker()
    >>> with use_skip_tracker(tracker):
    ...     current_skip_tracker() is tracker
    True
    """
    return _use(tracker)


@contextmanager
def _use(tracker: SkipTracker) -> Iterator[None]:
    before = _current.tracker
    _current.tracker = tracker
    try:
        yield
    finally:
        _current.tracker = before

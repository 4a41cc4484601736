"""TensorNVMe's DiskOffloader: tensors whose memory is given back while they are on disk."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.executors import callback_thread
from cudafuture.storage._completions import Completions, Operation
from cudafuture.storage._tensor_store import Read, TensorStore, Write
from cudafuture.storage.backends import engine_of
from cudafuture.storage.engine import Engine
from cudafuture.storage.offloader import Offloader
from cudafuture.storage.store import OffloaderStatistics

__all__ = ["DiskOffloader"]

_logger = logging.getLogger("cudafuture.storage")

Callback = Callable[[], object]


class DiskOffloader:
    """Keeps tensors on disk and gives their memory back until they are read again: TensorNVMe's API.

    A written tensor has no memory: its storage has size 0, for all its views. Reading it gives the memory and the
    values back, once: then it has to be written again. What is stored belongs to the memory, not to the tensor object:
    ``p`` can be read after ``p.data`` was written. When the last tensor over it is gone, so is what was stored. A view
    of a part of a storage is stored for itself, and the storage keeps its memory; so does one that cannot be resized.

    ``sync_*`` wait until they are done. ``async_*`` return a CUDAFuture, and may be given a callback without arguments,
    which is called when the operation has succeeded. Callbacks only run in threads that are inside a call of this
    class: each ``async_*`` runs those of what has ended, and one with a callback returns when that has run. They may
    call anything here. Use the futures where work is to overlap. An exception of a callback comes out of the call that
    has run it.

    The error of an operation comes out of its future, and of the next call that synchronizes it, with its type. A
    tensor whose write has failed keeps its memory; one whose read has failed remains on disk, and can be read again.

    Operations on one storage follow each other in the order of the calls. An operation holds what it needs: the tensors
    may be dropped. Any thread may call; after a fork, the child may not.

    Args:
        dir_name: a folder, which is made if there is none. A folder in it is the offloader's own, and vanishes with it.
        n_entries: operations that may be with the disk at a time; one more waits for the oldest. The default is 16.
        backend: ``"uring"``, the default, ``"aio"`` or ``"pthread"``; see ``get_backends()``. Where there is no
            io_uring, threads do its work.
        engine: what reads and writes instead of the backend's.

    Raises:
        StorageError: the folder cannot be used.
        ValueError: there is no such backend, or `n_entries` is less than 1.
    """

    def __init__(
        self,
        dir_name: str | os.PathLike[str],
        n_entries: int = 16,
        backend: str = "uring",
        *,
        engine: Engine | None = None,
    ) -> None:
        serving, is_new = engine_of(backend, n_entries, engine)
        store = Offloader(dir_name, engine=serving)
        self._store = TensorStore(store)
        self._completions = Completions(n_entries, self._store.lock)
        self._process = os.getpid()
        self._closed = False
        failed, own = self._completions.failed, serving if is_new else None
        self._end = weakref.finalize(self, _end, self._process, failed, store, own)

    # ---- one after the other

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Write a tensor to disk and give its memory back.

        What was stored of it before is replaced.

        Raises:
            RuntimeError: it is not contiguous, or has no memory, being on disk already.
            StorageError: the disk refuses.
            InvalidStateError: the offloader is closed.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> x.untyped_storage().size()
        0
        """
        self._run(Write(self._store, tensor, reported=True))

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Give a tensor its memory and its values back; nothing of it is stored then.

        Raises:
            RuntimeError: nothing is stored of it, or of another size.
            StorageError: the disk refuses, or (ChecksumError) gives something else.
            InvalidStateError: the offloader is closed.

        >>> x = torch.arange(3)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> offloader.sync_read(x)
        >>> x
        tensor([0, 1, 2])
        """
        self._run(Read(self._store, tensor, reported=True))

    def sync_writev(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write tensors to disk, as a list that is read as a whole, and give their memory back. See ``sync_write``.

        >>> x, y = torch.ones(4), torch.zeros(2)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_writev([x, y])
        """
        self._run(Write(self._store, _listed(tensors), reported=True))

    def sync_readv(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the tensors of a list back what they had, which were written together in this order. See ``sync_read``.

        >>> x, y = torch.ones(1), torch.zeros(1)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_writev([x, y])
        >>> offloader.sync_readv([x, y])
        >>> x, y
        (tensor([1.]), tensor([0.]))
        """
        self._run(Read(self._store, _listed(tensors), reported=True))

    # ---- side by side

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> CUDAFuture[int]:
        """Begin to write a tensor to disk. Do not change it until that is done; then it has no memory.

        Args:
            tensor: contiguous, on the host or on a device.
            callback: called without arguments when the memory has been given back.

        The future completes with the bytes that were written, when the memory has been given back. For errors see
        ``sync_write``; what the disk has to say comes out of the future, and of ``synchronize``.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.async_write(x).wait()
        16
        """
        return self._start(Write(self._store, tensor, callback))

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> CUDAFuture[torch.Tensor]:
        """Begin to read a tensor, which has memory at once. The future completes with the tensor. See ``async_write``.

        >>> x = torch.arange(3)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> offloader.async_read(x, callback=lambda: x.mul_(2)).wait()
        tensor([0, 2, 4])
        """
        return self._start(Read(self._store, tensor, callback))

    def async_writev(self, tensors: Iterable[torch.Tensor], callback: Callback | None = None) -> CUDAFuture[int]:
        """Begin to write tensors as a list. See ``async_write``.

        >>> x, y = torch.ones(4), torch.zeros(2)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.async_writev([x, y]).wait()
        24
        """
        return self._start(Write(self._store, _listed(tensors), callback))

    def async_readv(
        self, tensors: Iterable[torch.Tensor], callback: Callback | None = None
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Begin to read the tensors of a list. The future completes with the list. See ``async_read``.

        >>> x, y = torch.ones(1), torch.zeros(1)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_writev([x, y])
        >>> offloader.async_readv([x, y]).wait()
        [tensor([1.]), tensor([0.])]
        """
        return self._start(Read(self._store, _listed(tensors), callback))

    def synchronize(self) -> None:
        """Wait until nothing is pending, also of what callbacks submit meanwhile, and raise the first error.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> future = offloader.async_write(x)
        >>> offloader.synchronize()
        >>> future.done()
        True
        """
        self._drain(None)

    def sync_write_events(self) -> None:
        """Wait until no write is pending, and raise the first error of one.

        >>> DiskOffloader("offload").sync_write_events()
        """
        self._drain(False)

    def sync_read_events(self) -> None:
        """Wait until no read is pending, and raise the first error of one.

        >>> DiskOffloader("offload").sync_read_events()
        """
        self._drain(True)

    # ---- the whole

    def statistics(self) -> OffloaderStatistics:
        """Return what the store below has done so far; a list has a key for each of its tensors.

        >>> DiskOffloader("offload").statistics().keys
        0
        """
        return self._store.store.statistics()

    def close(self) -> None:
        """Synchronize, and remove what is on disk: tensors that are there then remain without memory.

        >>> DiskOffloader("offload").close()
        """
        if self._closed:
            return
        try:
            self.synchronize()
        finally:
            self._closed = True
            self._end()

    def __enter__(self) -> DiskOffloader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- how

    def _start(self, operation: Operation) -> CUDAFuture[Any]:
        callback = operation.callback
        if callback is not None and not callable(callback):
            raise TypeError(f"a callback is called without arguments; {callback!r} cannot be called")
        name = f"{'read' if operation.reads else 'write'} {self._store.store.dir}"
        future: CUDAFuture[Any] = CUDAFuture(name=name, executor=callback_thread)
        future.add_done_callback(self._look)
        operation.future = future
        self._submit(operation)
        future.set_running_or_notify_cancel()  # the engine has the memory: nobody can cancel that
        if operation.transfer.released is not None:
            future.released = operation.transfer.released
        self._completions.collect(operation)
        return future

    def _look(self, future: CUDAFuture[Any]) -> None:
        """Keep an error from being logged: who synchronizes is told. And keep the offloader until then."""
        future.exception()

    def _run(self, operation: Operation) -> None:
        self._submit(operation)
        try:
            self._completions.end(operation)
        except BaseException:  # Ctrl-C, say
            operation.reported = False
            raise
        if operation.error is not None:
            raise operation.error

    def _submit(self, operation: Operation) -> None:
        self._expect_own_process()
        if self._closed:
            raise InvalidStateError("the offloader is closed: what it had is gone")
        self._completions.submit(operation)

    def _drain(self, reads: bool | None) -> None:
        self._expect_own_process()
        self._completions.drain(reads=reads)

    def _expect_own_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidStateError("an offloader belongs to the process that has made it: make one after the fork")


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise RuntimeError("a list of tensors is wanted, not one tensor, which is no list of its rows")
    return list(tensors)


def _end(process: int, failed: list[tuple[bool, Exception]], store: Offloader, engine: Engine | None) -> None:
    """End an offloader that is closed, or that nobody holds any more, or whose process ends."""
    if os.getpid() != process:
        return
    for _, error in failed:
        _logger.error("%s: an offloader was dropped before anyone was told: %s", store.dir, error, exc_info=error)
    store.close()
    if engine is not None:
        engine.close()

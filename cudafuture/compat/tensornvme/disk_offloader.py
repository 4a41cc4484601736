"""TensorNVMe's DiskOffloader: tensors whose memory is freed while they are on disk."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.compat.tensornvme._completions import Completions, PendingOperation
from cudafuture.compat.tensornvme._tensor_store import PendingRead, PendingWrite, TensorStore
from cudafuture.compat.tensornvme.backends import engine_of
from cudafuture.errors import InvalidStateError
from cudafuture.executors import callback_thread, inline
from cudafuture.io.engine import Engine
from cudafuture.store.disk_store import DiskStore
from cudafuture.store.protocol import DiskStoreStatistics

__all__ = ["DiskOffloader"]

_logger = logging.getLogger("cudafuture.compat.tensornvme")

Callback = Callable[[], object]


class DiskOffloader:
    """Tensors on disk whose memory is freed until they are read again: TensorNVMe's API.

    A written tensor has no memory: its storage has size 0, for all its views. Reading restores the memory and the
    values once; after that it must be written again. The stored data belongs to the memory, not to the tensor object:
    ``p`` can be read after ``p.data`` was written. When the last tensor of the memory is freed, the data is deleted. A
    view of a part of a storage is stored separately, and the storage keeps its memory, as does one that cannot be
    resized.

    ``sync_*`` block until they are done. ``async_*`` return a CUDAFuture, and accept a callback without arguments,
    which runs after the operation has succeeded. Callbacks only run in threads that are inside a call of this class:
    each ``async_*`` runs the callbacks of operations that have ended, and one with a callback returns when that has
    run. Callbacks may call any method here. To overlap work, use the futures. The call that runs a callback raises the
    callback's exception.

    The future of an operation raises its error, and so does the next call that synchronizes it, with its type. A
    tensor whose write has failed keeps its memory; one whose read has failed remains on disk, and can be read again.

    Operations on one storage run in the order of the calls. An operation keeps its tensors alive. Any thread may call;
    after a fork, the child may not.

    Args:
        dir_name: a folder, which is created if it does not exist. The offloader has its own folder in it, which is
            removed with the offloader.
        n_entries: limit of operations in flight; the next operation waits for the oldest. The default is 16.
        backend: ``"uring"``, the default, ``"aio"`` or ``"pthread"``; see ``get_backends()``. Without io_uring, threads
            are used.
        engine: reads and writes instead of the backend's engine.

    Raises:
        StorageError: the folder cannot be used.
        TypeError: `n_entries` is not an int.
        ValueError: the backend does not exist, or `n_entries` is less than 1.
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
        store = DiskStore(dir_name, engine=serving)
        self._store = TensorStore(store)
        self._completions = Completions(n_entries, self._store.lock)
        self._process = os.getpid()
        self._closed = False
        failed, own = self._completions.failed, serving if is_new else None
        self._end = weakref.finalize(self, _end, self._process, failed, store, own)

    # ---- synchronous operations

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Write a tensor to disk and free its memory.

        This replaces data that was stored for it before.

        Raises:
            TensorError: the tensor has no memory: it is on disk already, was freed or shrunk, or has none of its own.
            RuntimeError: it is not contiguous.
            StorageError: the write failed.
            InvalidStateError: the offloader is closed.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> x.untyped_storage().size()
        0
        """
        self._run(PendingWrite(self._store, tensor, reported=True))

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Restore the memory and the values of a tensor, and delete the stored data.

        Raises:
            RuntimeError: nothing is stored for the tensor, or data of another size.
            StorageError: the read failed, or (ChecksumError) the bytes changed.
            InvalidStateError: the offloader is closed.

        >>> x = torch.arange(3)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> offloader.sync_read(x)
        >>> x
        tensor([0, 1, 2])
        """
        self._run(PendingRead(self._store, tensor, reported=True))

    def sync_writev(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write tensors to disk, as a list that is read as a whole, and free their memory. See ``sync_write``.

        >>> x, y = torch.ones(4), torch.zeros(2)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_writev([x, y])
        """
        self._run(PendingWrite(self._store, _listed(tensors), reported=True))

    def sync_readv(self, tensors: Iterable[torch.Tensor]) -> None:
        """Restore the tensors of a list, which were written together in this order. See ``sync_read``.

        >>> x, y = torch.ones(1), torch.zeros(1)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_writev([x, y])
        >>> offloader.sync_readv([x, y])
        >>> x, y
        (tensor([1.]), tensor([0.]))
        """
        self._run(PendingRead(self._store, _listed(tensors), reported=True))

    # ---- asynchronous operations

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> CUDAFuture[int]:
        """Begin to write a tensor to disk. Do not change it until the future is done; then it has no memory.

        Args:
            tensor: contiguous, on the host or on a device.
            callback: called without arguments when the memory has been freed.

        The future completes with the number of bytes written, when the memory has been freed. For errors see
        ``sync_write``; the future and ``synchronize`` raise the errors of the disk.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.async_write(x).wait()
        16
        """
        return self._start(PendingWrite(self._store, tensor, callback))

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> CUDAFuture[torch.Tensor]:
        """Begin to read a tensor, which has memory at once. The future completes with the tensor. See ``async_write``.

        >>> x = torch.arange(3)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.sync_write(x)
        >>> offloader.async_read(x, callback=lambda: x.mul_(2)).wait()
        tensor([0, 2, 4])
        """
        return self._start(PendingRead(self._store, tensor, callback))

    def async_writev(self, tensors: Iterable[torch.Tensor], callback: Callback | None = None) -> CUDAFuture[int]:
        """Begin to write tensors as a list. See ``async_write``.

        >>> x, y = torch.ones(4), torch.zeros(2)
        >>> offloader = DiskOffloader("offload")
        >>> offloader.async_writev([x, y]).wait()
        24
        """
        return self._start(PendingWrite(self._store, _listed(tensors), callback))

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
        return self._start(PendingRead(self._store, _listed(tensors), callback))

    def synchronize(self) -> None:
        """Wait until nothing is pending, including the operations that callbacks submit, and raise the first error.

        >>> x = torch.ones(4)
        >>> offloader = DiskOffloader("offload")
        >>> future = offloader.async_write(x)
        >>> offloader.synchronize()
        >>> future.done()
        True
        """
        self._drain(None)

    def sync_write_events(self) -> None:
        """Wait until no write is pending, and raise the first error of a write.

        >>> DiskOffloader("offload").sync_write_events()
        """
        self._drain(False)

    def sync_read_events(self) -> None:
        """Wait until no read is pending, and raise the first error of a read.

        >>> DiskOffloader("offload").sync_read_events()
        """
        self._drain(True)

    # ---- the offloader itself

    def statistics(self) -> DiskStoreStatistics:
        """Return counts of the underlying store, in which a list has a key for each of its tensors.

        >>> DiskOffloader("offload").statistics().keys
        0
        """
        return self._store.store.statistics()

    def close(self) -> None:
        """Synchronize, and delete the data on disk: tensors that are on disk then remain without memory.

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

    # ---- implementation

    def _start(self, operation: PendingOperation) -> CUDAFuture[Any]:
        callback = operation.callback
        if callback is not None and not callable(callback):
            raise TypeError(f"a callback must be callable without arguments, but {callback!r} is not callable")
        name = f"{'read' if operation.reads else 'write'} {self._store.store.dir}"
        future: CUDAFuture[Any] = CUDAFuture(name=name, executor=callback_thread)
        future.add_done_callback(self._retrieve_error, executor=inline)
        operation.future = future
        self._submit(operation)
        future.set_running_or_notify_cancel()  # the engine uses the memory, so it cannot be cancelled
        if operation.transfer.released is not None:
            future.released = operation.transfer.released
        self._completions.collect(operation)
        return future

    def _retrieve_error(self, future: CUDAFuture[Any]) -> None:
        """Retrieve the error, so that it is not logged: synchronizing raises it. Keep the offloader until then."""
        future.exception()

    def _run(self, operation: PendingOperation) -> None:
        self._submit(operation)
        try:
            self._completions.end(operation)
        except BaseException:  # such as Ctrl-C
            operation.reported = False
            raise
        if operation.error is not None:
            raise operation.error

    def _submit(self, operation: PendingOperation) -> None:
        self._expect_own_process()
        if self._closed:
            raise InvalidStateError("the offloader is closed, and its data is deleted")
        self._completions.submit(operation)

    def _drain(self, reads: bool | None) -> None:
        self._expect_own_process()
        self._completions.drain(reads=reads)

    def _expect_own_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidStateError("an offloader belongs to the process that created it: create one after the fork")


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise RuntimeError("expected a list of tensors, not one tensor: its rows are not taken as a list")
    return list(tensors)


def _end(process: int, failed: list[tuple[bool, Exception]], store: DiskStore, engine: Engine | None) -> None:
    """End an offloader that is closed or freed, or whose process exits."""
    if os.getpid() != process:
        return
    for _, error in failed:
        _logger.error("%s: an offloader was freed before a call raised its error: %s", store.dir, error, exc_info=error)
    store.close()
    if engine is not None:
        engine.close()

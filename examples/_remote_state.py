"""Adam's state on the disk of another worker, read ahead of the update that wants it and written after it."""

from __future__ import annotations

import secrets
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rpc_ext
from cudafuture import CUDAFuture, gather, wait_all
from cudafuture.config import config

MIB = 1 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state of each number, beside its counter of steps


class Bucket(Protocol):
    """Bucket of parameters: one flat tensor, and Adam for that."""

    index: int
    layers: Mapping[str, nn.Module]
    parameters: list[nn.Parameter]
    values: nn.Parameter
    optimizer: torch.optim.Optimizer

    def update(self) -> None:
        """Apply the gradients, with the state that the optimizer has."""


def key(bucket: Bucket) -> str:
    """Return the key of a bucket's state: one tensor with a row for each moment."""
    return f"{'+'.join(bucket.layers)}/moments"


def write_first(store: rpc_ext.RemoteStore, bucket: Bucket) -> CUDAFuture[int]:
    """Write the state with which Adam begins."""
    bucket.optimizer.state[bucket.values]["step"] = torch.tensor(0.0)
    return store.write(key(bucket), torch.zeros(len(MOMENTS), bucket.values.numel()))


def set_moments(bucket: Bucket, moments: Tensor) -> None:
    """Give a bucket's Adam its state."""
    bucket.optimizer.state[bucket.values].update(zip(MOMENTS, moments, strict=True))


def drop_moments(bucket: Bucket) -> None:
    """Take the state from a bucket's Adam."""
    for moment in MOMENTS:
        del bucket.optimizer.state[bucket.values][moment]


def update_blocking(store: rpc_ext.RemoteStore, bucket: Bucket) -> None:
    """Read the state of a bucket, update the bucket, and write the state; wait after each call."""
    moments = store.read(key(bucket)).wait()
    set_moments(bucket, moments)
    bucket.update()
    drop_moments(bucket)
    store.write(key(bucket), moments).wait()


class RemoteState:
    """The state of all buckets, of which no more than that of `ahead` buckets is in memory at a time.

    The buckets take turns, always in the same order. A turn is a chain of futures, and no thread waits for any of them:

        what was read, and the all_reduce -> update -> write -> read for the turn that comes `ahead` later

    So memory is taken again only when the disk has what was in it. When anything fails, all that follows fails with the
    same error, up to the update that a forward waits for.
    """

    def __init__(self, store: rpc_ext.RemoteStore, buckets: Sequence[Bucket], ahead: int) -> None:
        if not 1 <= ahead <= len(buckets):
            raise ValueError(f"ahead={ahead}: from 1 to {len(buckets)}, the number of buckets")
        self.store = store
        self._turns = cycle(buckets)  # the bucket that reads next
        self._reads: deque[CUDAFuture[Tensor]] = deque()  # for the turns to come
        self._updated: dict[int, Tensor] = {}  # to be written, by bucket
        self._written: list[CUDAFuture[int]] = []  # by bucket, the last one
        for bucket in buckets:
            self._written.append(write_first(store, bucket))
        for bucket in islice(self._turns, ahead):
            self._reads.append(self._written[bucket.index].then_async(partial(self._read, bucket)))

    def update(self, bucket: Bucket, reduced: CUDAFuture[Tensor]) -> CUDAFuture[list[nn.Parameter]]:
        """Update a bucket when its gradients and its state are there. Buckets have to come in their order."""
        updated = gather(reduced, self._reads.popleft()).then(partial(self._update, bucket))
        self._written[bucket.index] = written = updated.then_async(partial(self._write, bucket))
        following = next(self._turns)
        # Room comes with the write of this turn. What is read was written in another one, which may be slower.
        may_read = gather(written, self._written[following.index])
        self._reads.append(may_read.then_async(partial(self._read, following)))
        return updated

    def wait(self) -> None:
        """Wait until all is written, and read ahead."""
        wait_all(self._written)
        wait_all(self._reads)

    def finish(self) -> None:
        """Wait until all is written; discard the tensors read ahead."""
        self.wait()
        self._reads.clear()

    def _read(self, bucket: Bucket, may_read: CUDAFuture[Any]) -> CUDAFuture[Tensor]:
        may_read.value()  # raises what a write failed with
        return self.store.read(key(bucket))

    def _update(self, bucket: Bucket, ready: CUDAFuture[list[Tensor]]) -> list[nn.Parameter]:
        _, moments = ready.value()
        set_moments(bucket, moments)
        bucket.update()
        self._updated[bucket.index] = moments
        return bucket.parameters  # so that on a device a waiter is ordered after the kernels that wrote them

    def _write(self, bucket: Bucket, updated: CUDAFuture[Any]) -> CUDAFuture[int]:
        updated.value()
        drop_moments(bucket)
        moments = self._updated.pop(bucket.index)  # only the write holds its memory now
        return self.store.write(key(bucket), moments)


@dataclass
class Disk:
    """The disk of the next worker, and this one's, which the worker before uses."""

    store: rpc_ext.RemoteStore
    service: rpc_ext.StoreService

    def statistics(self) -> dict[str, Any]:
        """Return the work of this worker's disk for the other, and the number of messages refused here."""
        served = self.service.statistics()
        refused = served.refused + sum(rpc_ext.statistics().refused.values())
        return {
            "requests": served.requests,
            "mib_written": served.bytes_written / MIB,
            "mib_read": served.bytes_read / MIB,
            "refused": refused,
        }


@contextmanager
def next_workers_disk(folder: Path | None) -> Iterator[Disk]:
    """Serve a folder to the worker before this one, and use that of the next one, by signed calls."""
    with (
        nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory(prefix="states-") as own,
        rpc_ext.init_rpc(secret=share_secret(), transports=["uv"]) as session,  # which leaves the cores to training
    ):
        service = rpc_ext.serve_store(own)  # until RPC ends, which is when all workers are done
        dist.barrier()
        with rpc_ext.RemoteStore((session.rank + 1) % dist.get_world_size()) as store:
            yield Disk(store, service)


def share_secret() -> bytes | None:
    """Return the same new secret on every rank, or None where CUDAFUTURE_RPC_SECRET_FILE names one.

    It travels by the process group, whose network can be read: name a file when the ranks are on several machines.
    """
    if config.rpc_secret_file is not None:
        return None
    secret = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)
    dist.broadcast(secret, 0)
    return bytes(secret.tolist())


def read_states(store: rpc_ext.RemoteStore, buckets: Sequence[Bucket]) -> list[Tensor]:
    """Read the moments of each bucket from the store."""
    return store.readv([key(bucket) for bucket in buckets]).wait()


def differing_states(read: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[str]:
    """Name what was read and is not, to the last bit, what these buckets' optimizers have in memory."""
    return [
        key(bucket)
        for bucket, moments in zip(buckets, read, strict=True)
        if not torch.equal(moments, torch.stack([bucket.optimizer.state[bucket.values][name] for name in MOMENTS]))
    ]

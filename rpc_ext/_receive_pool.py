"""The pool that tensors of other workers are received into.

TensorPipe allocates on a thread that serves all connections and must not wait. When the pool is exhausted, its
allocator returns memory outside of the pool, and counts that. The kernel provides the pool's memory when it is first
used.
"""

from __future__ import annotations

from cudafuture.storage import BufferPool
from rpc_ext._C import receive_into

__all__ = ["DEFAULT_BYTES", "receive_into_pool", "received_outside"]

DEFAULT_BYTES = 512 << 20
"""bytes of the pool, unless ``init_rpc(receive_memory=...)`` says otherwise"""

# Smaller tensors are cheap to allocate and to copy. TensorPipe is fastest with messages of the largest size.
_SMALLEST_TENSOR, _LARGEST_TENSOR = 1 << 20, 16 << 20

# By size. C++ keeps each allocator until the process ends, so a later session of the same size uses the same pool.
_pools: dict[int, BufferPool] = {}


def receive_into_pool(nbytes: int) -> None:
    """Receive tensors of 1 to 16 MiB from other workers into a pool of this size; 0: into memory of torch's."""
    if not nbytes:
        receive_into(None, _SMALLEST_TENSOR, _LARGEST_TENSOR)
        return
    if nbytes not in _pools:
        _pools[nbytes] = BufferPool(nbytes, pin=False)
    receive_into(_pools[nbytes].allocator(), _SMALLEST_TENSOR, _LARGEST_TENSOR)


def received_outside() -> int:
    """Return the bytes that this process has received outside of its pools because they were exhausted."""
    return sum(pool.outside for pool in _pools.values())

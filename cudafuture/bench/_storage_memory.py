"""The memory that writing tensors to a store takes beside them, at its peak: run in a process of its own.

    python -m cudafuture.bench._storage_memory FOLDER SHAPE

Prints bytes: the largest resident set while all tensors are written and read, one by one and all at once, less what was
resident before there was a store.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from cudafuture.bench._storage_peers import SHAPES
from cudafuture.combine import wait_all
from cudafuture.store import DiskStore


def resident(what: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(what))


def peak(folder: str, shape_name: str) -> int:
    shape = SHAPES[shape_name]
    tensors = {str(i): tensor for i, tensor in enumerate(shape.tensors())}
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = resident("VmRSS")
    with DiskStore(folder) as store:
        for _ in range(2):
            wait_all([store.write(key, tensor) for key, tensor in tensors.items()])
            store.writev(tensors).wait()
            wait_all([store.read(key, tensor) for key, tensor in tensors.items()])
            store.readv(list(tensors), list(tensors.values())).wait()
    return resident("VmHWM") - before


if __name__ == "__main__":
    sys.stdout.write(f"{peak(*sys.argv[1:])}\n")

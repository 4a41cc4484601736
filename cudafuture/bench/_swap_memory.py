"""The memory that steps take whose optimizer state is in a store: run in a process of its own.

    python -m cudafuture.bench._swap_memory FOLDER BUFFER_BYTES

Prints bytes: the largest resident set during three steps of Adam for one parameter of 1 GiB, less what was resident
before there was this optimizer.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from cudafuture.bench._storage_memory import resident
from cudafuture.swap import offload


def peak(folder: str, buffer_bytes: int) -> int:
    parameter = torch.nn.Parameter(torch.ones(1 << 28))
    parameter.grad = torch.ones_like(parameter)
    warm = torch.nn.Parameter(torch.ones(1 << 21))  # so that torch and the store have loaded their code
    warm.grad = torch.ones_like(warm)
    with offload(torch.optim.Adam([warm]), f"{folder}/warm") as optimizer:
        optimizer.step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = resident("VmRSS")
    with offload(torch.optim.Adam([parameter]), f"{folder}/state", buffer_bytes=buffer_bytes) as optimizer:
        for _ in range(3):
            optimizer.step()
    return resident("VmHWM") - before


if __name__ == "__main__":
    sys.stdout.write(f"{peak(sys.argv[1], int(sys.argv[2]))}\n")

"""Measurement in the ranks of a process group."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["Measure", "on_ranks"]

Measure = Callable[[int], list[list[float]]]  # rounds -> the figures of each variant, by round


def rank_main(rank: int, size: int, folder: str, measure: Measure, rounds: int, backend: str) -> None:
    """Run one of the ranks, and write its figures to a file."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    took = measure(rounds)
    Path(folder, str(rank)).write_text(json.dumps(took))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(measure: Measure, rounds: int, backend: str = "gloo", size: int = 2) -> list[list[float]]:
    """Return the figures of each variant, of all ranks and all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (size, folder, measure, rounds, backend), nprocs=size)
        took = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]
    return [list(chain.from_iterable(figures)) for figures in zip(*took, strict=True)]

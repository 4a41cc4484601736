"""Ranks as processes, for the tests of the library in the place of NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.child import Child

START = """
import ctypes, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
def start(**options):
    dist.init_process_group("nccl", store=dist.FileStore(path, world), rank=rank, world_size=world, **options)
def equal(actual, expected):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    assert torch.equal(actual.cpu(), expected), f"{actual.cpu()} is not {expected}"
"""


def on_fake_runtime() -> bool:
    """Return whether this process runs on the fake CUDA runtime."""
    try:
        return torch.cuda.is_available() and hasattr(ctypes.CDLL("libcudart.so.13"), "fakecuda_launch")
    except OSError:
        return False


needs_fake_runtime = pytest.mark.skipif(
    not on_fake_runtime(), reason="The test runs on the fake CUDA runtime only: there are no devices, or real ones."
)


class Rank(NamedTuple):
    """Rank that has ended: its process ID, its exit code, and what it wrote to stdout and stderr."""

    pid: int
    code: int
    output: str


def end_of_ranks(program: str, world: int, folder: Path, **environment: str) -> list[Rank]:
    """Run a program on each rank, and return the ranks when all have ended."""
    source = START + textwrap.dedent(program)
    settings = {"FAKECUDA_DEVICES": "4", **environment}
    with contextlib.ExitStack() as scope:
        ranks = [
            scope.enter_context(Child(source, str(rank), str(world), str(folder / "store"), environment=settings))
            for rank in range(world)
        ]
        return [Rank(each.process.pid, each.end(240), each.output() + each.errors()) for each in ranks]


def run_ranks(program: str, world: int, folder: Path, **environment: str) -> list[str]:
    """Run a program on each rank, expect success, and return the outputs."""
    ranks = end_of_ranks(program, world, folder, **environment)
    for number, rank in enumerate(ranks):
        assert rank.code == 0, f"rank {number} of {world} ended with status {rank.code}:\n{rank.output}"
    return [rank.output for rank in ranks]

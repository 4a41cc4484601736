"""Ranks as processes, for the tests of the library in the place of NCCL."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

START = """
import ctypes, os, sys, time
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


def start_ranks(program: str, world: int, folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Start a program on each rank."""
    source = START + textwrap.dedent(program)
    settings = {**os.environ, "FAKECUDA_DEVICES": "4", **environment}
    command = [sys.executable, "-W", "ignore", "-c", source]
    return [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / "store")],
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def finish_ranks(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return each rank's exit status and output."""
    results = []
    for process in ranks:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            output, _ = process.communicate()
        results.append((process.returncode, output))
    return results


def run_ranks(program: str, world: int, folder: Path, **environment: str) -> list[str]:
    """Run a program on each rank, expect success, and return the outputs."""
    results = finish_ranks(start_ranks(program, world, folder, **environment))
    for rank, (status, output) in enumerate(results):
        assert status == 0, f"rank {rank} of {world} ended with status {status}:\n{output}"
    return [output for _, output in results]

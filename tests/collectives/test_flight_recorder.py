"""Files of the last collectives, as torch's own tool reads them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture.testing import World


def trace(folder: Path) -> str:
    """Return what torch's command says about the files of a folder."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def issue(folder: str, is_late: bool) -> None:
    """Issue collectives of several kinds, then one that rank 1 issues after it has written its file."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    ones = torch.ones(4)
    cfd.all_reduce(ones).wait()
    cfd.broadcast(ones, 0).wait()
    cfd.all_gather([torch.ones(4), torch.ones(4)], ones).wait()
    cfd.all_gather_into_tensor(torch.ones(8), ones).wait()
    cfd.reduce_scatter_single(torch.ones(2), ones).wait()
    cfd.barrier().wait()
    last = cfd.all_reduce(ones) if rank == 0 or not is_late else None
    if not is_late:
        assert last is not None
        last.wait()
    cfd.dump_flight_recorder(f"{folder}/rank_")
    if is_late:
        store.set(f"written {rank}", "")
        store.wait([f"written {1 - rank}"])
    (last or cfd.all_reduce(ones)).wait()


@pytest.mark.world(2)
def test_collectives_of_ranks_match(world: World, tmp_path: Path) -> None:
    world.run(issue, str(tmp_path), False)
    said = trace(tmp_path)
    assert "mismatch" not in said.lower()
    assert "missing" not in said.lower()
    entries = pickle.loads((tmp_path / "rank_1").read_bytes())["entries"]
    assert {entry["state"] for entry in entries} == {"completed"}
    last = entries[-1]
    assert (last["profiling_name"], last["collective_seq_id"]) == ("gloo:all_reduce", len(entries))
    assert last["input_sizes"] == last["output_sizes"] == [[4]]


@pytest.mark.world(2)
def test_collective_that_rank_has_not_issued_is_named(world: World, tmp_path: Path) -> None:
    world.run(issue, str(tmp_path), True)
    entries = pickle.loads((tmp_path / "rank_0").read_bytes())["entries"]
    assert entries[-1]["state"] == "scheduled"
    assert "missing ranks: {1}" in trace(tmp_path).lower()

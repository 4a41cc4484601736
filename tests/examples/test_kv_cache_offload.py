"""The KV cache example: blocks that were evicted come back to the bit, and it notices when they do not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import StorageError
from cudafuture.testing import Finished, torchrun
from support.soak import in_soak_alone

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLES = Path(__file__).parents[2] / "examples"
LITTLE = ["--block-kib", "64", "--turns", "60"]

AN_EVICTION_THAT_DROPS_WHAT_HAS_CHANGED = """
import sys, kv_cache_offload
from cudafuture import CUDAFuture

class Stale(kv_cache_offload.Pool):
    def write(self, block, content):
        if block in self.writes:
            return CUDAFuture.completed(None)
        return super().write(block, content)

kv_cache_offload.Pool = Stale
sys.exit(kv_cache_offload.main())
"""

AN_EVICTION_THAT_WRITES_NOTHING = """
import sys, kv_cache_offload
from cudafuture import CUDAFuture

class Forgetful(kv_cache_offload.Pool):
    def write(self, block, content):
        self.writes[block] = CUDAFuture.completed(0)
        return self.writes[block]

kv_cache_offload.Pool = Forgetful
sys.exit(kv_cache_offload.main())
"""


def decode(tmp_path: Path, *args: str, script: Path = EXAMPLES / "kv_cache_offload.py") -> Finished:
    """Run the example on two ranks, with little blocks."""
    args = (*LITTLE, "--folder", str(tmp_path / "store"), "--json", str(tmp_path / "results.json"), *args)
    env = {"PYTHONPATH": str(EXAMPLES)}
    return torchrun(script, 2, *args, timeout=100, env=env, check=False)


def results(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "results.json").read_text())


def test_blocks_return_from_both_disks(tmp_path: Path) -> None:
    finished = decode(tmp_path, "--block-kib", "64", "96")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = results(tmp_path)
    assert len(written["checks"]) == 2 * len(written["runs"]) == 8
    assert all(written["checks"].values())
    assert [(run["block_kib"], run["store"]) for run in written["runs"]] == [
        (64, "local"),
        (64, "remote"),
        (96, "local"),
        (96, "remote"),
    ]
    moved = {
        tuple(run["counts"][name] for name in ("in_pool", "written", "unchanged", "read")) for run in written["runs"]
    }
    assert len(moved) == 1, "what is evicted does not depend on what a block is, nor on where it goes"
    in_pool, _, unchanged, read = moved.pop()
    assert in_pool > read > 0, "most of what a turn wants is there"
    assert unchanged > 0, "what is on the disk already is not written again"
    assert all(run["counts"]["in_time"] <= read for run in written["runs"])
    assert "Warning" not in finished.stderr
    assert [path.name for path in (tmp_path / "store").iterdir()] == []


def test_own_disk_is_used_without_launcher(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "store"), "--json", str(tmp_path / "results.json"), "--ahead", "0"]
    command = [sys.executable, str(EXAMPLES / "kv_cache_offload.py"), *LITTLE, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [run["store"] for run in results(tmp_path)["runs"]] == ["local"]
    assert all(results(tmp_path)["checks"].values())


@in_soak_alone
def test_pool_with_enough_room_is_refused(tmp_path: Path) -> None:
    finished = decode(tmp_path, "--pool", "1000")
    assert finished.returncode != 0
    assert results(tmp_path)["checks"] == {
        "64 KiB, local: same as without eviction": True,
        "64 KiB, local: blocks went and came back": False,
        "64 KiB, remote: same as without eviction": True,
        "64 KiB, remote: blocks went and came back": False,
    }


@in_soak_alone
def test_stale_block_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(AN_EVICTION_THAT_DROPS_WHAT_HAS_CHANGED)
    finished = decode(tmp_path, script=script)
    assert finished.returncode != 0
    for store in ("local", "remote"):
        assert not results(tmp_path)["checks"][f"64 KiB, {store}: same as without eviction"]
        assert f"FAILED  64 KiB, {store}: same as without eviction" in finished.stdout


@in_soak_alone
def test_unwritten_block_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(AN_EVICTION_THAT_WRITES_NOTHING)
    finished = decode(tmp_path, script=script)
    assert finished.returncode != 0
    assert not (tmp_path / "results.json").exists()
    assert "NotFoundError" in finished.stderr


class Held:
    """A store whose writes are done when the test says so."""

    def __init__(self) -> None:
        self.writes: dict[str, tuple[CUDAFuture[int], torch.Tensor]] = {}
        self.reads: list[str] = []

    def write(self, key: str, content: torch.Tensor) -> CUDAFuture[int]:
        self.writes[key] = CUDAFuture(), content
        return self.writes[key][0]

    def read(self, key: str, out: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        self.reads.append(key)
        return CUDAFuture.completed(out)


def test_place_is_reused_after_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("kv_cache_offload")
    store = Held()
    pool = example.Pool(store, 1, (2,))
    first, second = (example.Turn((block,), 0, 1, 1) for block in range(2))
    pool.expect([first])
    pool.put(0, torch.ones(2))
    pool.expect([second])
    assert not pool.slots[1].ready.done(), "its memory is still being written"
    written, content = store.writes["0"]
    assert torch.equal(content, torch.ones(2))
    written.set_result(8)
    pool.put(1, torch.zeros(2))
    pool.expect([example.Turn((0,), 1, 1, 1)])
    assert store.reads == [], "block 1 is still being written from there"
    store.writes["1"][0].set_result(8)
    assert store.reads == ["0"]
    assert pool.slots[0].ready.done()
    assert pool.counts == example.Counts(written=2, read=1, waited=pool.counts.waited)


def test_failed_write_reaches_its_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("kv_cache_offload")
    store = Held()
    pool = example.Pool(store, 1, (2,))
    pool.expect([example.Turn((0,), 0, 1, 1)])
    pool.put(0, torch.ones(2))
    pool.expect([example.Turn((1,), 0, 1, 1)])
    store.writes["0"][0].set_exception(StorageError("the disk is gone"))
    with pytest.raises(StorageError, match="the disk is gone"):
        pool.put(1, torch.zeros(2))
    with pytest.raises(StorageError, match="the disk is gone"):
        pool.finish()

"""Secrets: their distribution, a start with different ones, and calls under one."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture.testing import World
from rpc_ext import _listeners, rpc_sync
from support import attacker
from support.patience import PATIENCE
from support.rpc_callees import ME, add, alone, raises, rank_of_callee, same, working
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-secrets")]

SECRET = "a secret that nobody else knows"
ANOTHER = "a secret that somebody else knows"
ONES = torch.ones(2, 2)
rpc: Any = torch_rpc


# ---- the start


def begin(file: str, secrets: list[str | None]) -> tuple[str, str]:
    """Return how a start has failed."""
    rank = dist.get_rank()
    try:
        with working(f"w{rank}", rank, len(secrets), file, secret=secrets[rank], start_timeout=PATIENCE):
            pass
    except Exception as e:
        assert not torch_rpc.api._is_current_rpc_agent_set()
        return type(e).__name__, str(e)
    return "", ""


@pytest.mark.world(2)
@pytest.mark.parametrize("other", [ANOTHER, None], ids=["another", "none"])
def test_workers_with_different_secrets_do_not_connect(world: World, tmp_path: Path, other: str | None) -> None:
    for rank, (kind, message) in enumerate(world.run(begin, str(tmp_path / "file"), [SECRET, other])):
        assert kind == "AuthenticationError", message
        assert f"worker {1 - rank} of 2 has not proven" in message
        assert "secret" in message


@pytest.mark.world(3)
def test_worker_with_other_secret_is_named(world: World, tmp_path: Path) -> None:
    outcomes = world.run(begin, str(tmp_path / "file"), [SECRET, SECRET, ANOTHER])
    assert [kind for kind, _ in outcomes] == ["AuthenticationError"] * 3
    assert all("worker 2 of 3 has not proven" in message for _, message in outcomes[:2])
    assert "worker 0, 1 of 3 has not proven" in outcomes[2][1]


@pytest.mark.world(2)
def test_process_restarts_after_failed_start(world: World, tmp_path: Path) -> None:
    def run() -> int:
        rank = dist.get_rank()
        assert begin(str(tmp_path / "file"), [SECRET, ANOTHER])[0] == "AuthenticationError"
        dist.barrier()
        with working(f"w{rank}", rank, 2, tmp_path / "file", secret=SECRET):
            total: int = rpc_sync(1 - rank, add, (rank, 1))
            return total

    assert world.run(run) == [1, 2]


@pytest.mark.soak
@pytest.mark.world(3, timeout=soak_count(3000))
def test_forged_addresses_misdirect_no_message(world: World, tmp_path: Path) -> None:
    """The agents of torch take addresses from the store as they are: a process that writes them gets all calls.

    The third rank writes them, before the start and during it, for this session and for later ones.
    """
    file, times = tmp_path / "file", soak_count(200)

    def run() -> list[dict[str, int]]:
        rank, found = dist.get_rank(), []
        relay = socket.create_server(("127.0.0.1", 0))
        address = f"uv://127.0.0.1:{relay.getsockname()[1]}"
        store = dist.FileStore(str(file), -1) if rank == 2 else None
        for i in range(times):
            if store is not None:
                for number in range(i + 1, i + 4):
                    lies = dist.PrefixStore(f"cudafuture_rpc/2/{number}/agent", store)
                    for worker in range(2):
                        lies.set(f"names/{worker}", f"w{1 - worker}")
                        lies.set(f"addrs/w{worker}", address)
                    shown = dist.PrefixStore(f"cudafuture_rpc/2/{number}/handshake", store)
                    for worker in range(2):
                        shown.set(f"address/{worker}", f"unsigned {json.dumps({'value': address})}")
            dist.barrier()
            if rank < 2:
                with working(f"w{rank}", rank, 2, file, secret=SECRET):
                    assert rpc_sync(f"w{1 - rank}", rank_of_callee) == 1 - rank
                    found.append(dict(rpc_ext.statistics().refused))
            dist.barrier()
        relay.setblocking(False)
        with pytest.raises(BlockingIOError):
            relay.accept()
        relay.close()
        return found

    w0, w1, _ = world.run(run)
    assert w0 == w1 == [{}] * times


# ---- what goes on working


def fail_in_torchs_engine() -> None:
    """Check that errors of torch's own engine have the text that they have without a secret."""
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(2\) must match the size of tensor b \(3\)"):
        rpc.rpc_sync("w1", torch.add, (torch.ones(2), torch.ones(3)))
    with pytest.raises(RuntimeError, match="No module named 'nowhere'"):
        rpc.rpc_sync("w1", same, (FromNowhere(),))
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        rpc_sync("w1", same, (FromNowhere(),))


class FromNowhere:
    """Unpickled, it asks for a module that is not there."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("nowhere",)


def backward() -> None:
    """Let gradients flow through a call."""
    with dist_autograd.context() as context:
        weight = torch.full((2, 2), 3.0, requires_grad=True)
        product = rpc.rpc_sync("w1", torch.mul, (weight, weight))
        dist_autograd.backward(context, [product.sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[weight], torch.full((2, 2), 6.0))


def references() -> None:
    """Make references, hand them on, and fetch what they refer to."""
    made = rpc.remote("w1", add, (ONES, 1))
    assert torch.equal(made.to_here(), ONES + 1)
    assert torch.equal(rpc.rpc_sync("w1", attacker.fetch, (made,)), ONES + 1)
    mine = rpc.RRef(ONES)
    assert torch.equal(rpc.rpc_sync("w1", attacker.fetch, (mine,)), ONES)
    by_script = rpc.remote("w1", attacker.script_that_adds(), (ONES, ONES))
    assert torch.equal(by_script.to_here(), 2 * ONES)
    assert torch.equal(rpc_ext.remote("w1", add, (ONES, 1)).to_here(), ONES + 1)


def calls() -> None:
    assert rpc.rpc_sync("w1", add, (1, 2)) == 3
    assert torch.equal(rpc.rpc_sync("w1", torch.add, (ONES, ONES)), 2 * ONES)
    assert torch.equal(rpc.rpc_async("w1", attacker.script_that_adds(), (ONES, ONES)).wait(), 2 * ONES)
    with pytest.raises(ValueError, match="expected"):
        rpc.rpc_sync("w1", raises, (ValueError("expected"),))
    with pytest.raises(RuntimeError, match="size of tensor"):
        rpc.rpc_sync("w1", torch.add, (torch.ones(2), torch.ones(3)))
    assert rpc.get_worker_info("w1").id == 1


@pytest.mark.world(2)
@pytest.mark.parametrize("uses", [calls, references, backward, fail_in_torchs_engine])
def test_torchs_own_calls_go_on_working(world: World, tmp_path: Path, uses: Callable[[], None]) -> None:
    def run() -> dict[str, int]:
        rank = dist.get_rank()
        attacker.script_that_adds()
        with working(f"w{rank}", rank, 2, tmp_path / "file", secret=SECRET):
            if rank == 0:
                uses()
            dist.barrier()
            return dict(rpc_ext.statistics().refused)

    assert world.run(run) == [{}, {}]


# ---- no secret


def test_worker_without_secret_warns_once(tmp_path: Path) -> None:
    address = mock.patch.object(_listeners, "host", return_value="192.0.2.1")
    with mock.patch.object(_listeners, "_warned", False), address:
        with pytest.warns(RuntimeWarning, match=r"listens on 192\.0\.2\.1 and has no secret") as warned:
            rpc_ext.init_rpc(ME, rank=0, world_size=1, init_method=f"file://{tmp_path}/one")
        assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
        rpc_ext.shutdown()
        with alone(tmp_path / "two"):
            pass


@pytest.mark.parametrize(
    ("host", "secret"), [("127.0.0.1", None), ("::1", None), ("192.0.2.1", SECRET), ("fe80::1%eth0", SECRET)]
)
def test_loopback_or_secret_gives_no_warning(tmp_path: Path, host: str, secret: str | None) -> None:
    address = mock.patch.object(_listeners, "host", return_value=host)
    with mock.patch.object(_listeners, "_warned", False), address, alone(tmp_path / "file", secret=secret):
        pass

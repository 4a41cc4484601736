"""A namespace of a store service: its keys, its quota, and its state after failures and crashes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import wait_all
from cudafuture.errors import NotFoundError, QuotaError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from remote_store.seams import put_of, release_at_end, send
from rpc_ext import RemoteStore, serve_store
from rpc_ext.store._session import names_by_prefix, prefix_of
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

pytestmark = pytest.mark.world


@pytest.fixture(autouse=True)
def session(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path / "rendezvous"):
        yield


@pytest.mark.parametrize("wrong", [{"namespace": 7}, {"namespace": b"n"}, {"name": None}, {"timeout": "5"}], ids=str)
def test_wrong_argument_type_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with serve_store(tmp_path / "store"), pytest.raises(TypeError, match=rf"{name} is .*{re.escape(repr(value))}"):
        RemoteStore(ME, **wrong)


def test_next_service_lists_keys_in_order(tmp_path: Path) -> None:
    with serve_store(tmp_path / "store", durable=True), RemoteStore(ME, namespace="n") as remote:
        remote.writev({"a": torch.ones(2), "b": torch.ones(3)}).wait(timeout=PATIENCE)
        remote.write("c", torch.empty(0)).wait(timeout=PATIENCE)
        remote.write("a", torch.ones(4)).wait(timeout=PATIENCE)
        assert remote.keys() == ["b", "c", "a"]
    with serve_store(tmp_path / "store", durable=True), RemoteStore(ME, namespace="n") as remote:
        assert remote.keys() == ["b", "c", "a"]
        assert (remote.stat("a").key, remote.stat("a").nbytes) == ("a", 16)
        with pytest.raises(NotFoundError, match="no key 'x'"):
            remote.stat("x")


def test_namespaces_are_isolated(tmp_path: Path) -> None:
    with serve_store(tmp_path / "store") as service:
        mine, other = RemoteStore(ME, namespace="mine"), RemoteStore(ME)
        wait_all([mine.write("x", torch.ones(1)), other.writev({"x": torch.zeros(1), "y": torch.zeros(1)})])
        prefix = prefix_of("mine", is_private=False)
        for tried in ("x", f"../{prefix}x", f"{prefix}x"):
            assert (tried in other) is (tried == "x")
        other.close()
        wait_for(lambda: len(service.store) == 1)
        assert mine.keys() == ["x"]
        mine.close()


def test_store_with_foreign_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="keys of another program, such as 'mine'"):
        names_by_prefix([f"{prefix_of('a namespace', is_private=False)}x", "mine"])
    with DiskStore(tmp_path / "store", durable=True) as store:
        store.write("mine", torch.ones(1)).wait(timeout=PATIENCE)
    with pytest.raises(StorageError, match="keys of another program"):
        serve_store(tmp_path / "store", durable=True)


def test_private_keys_end_with_service(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store", durable=True) as store:  # as a service leaves them that was killed
        store.write(f"{prefix_of('a token', is_private=True)}x", torch.ones(1)).wait(timeout=PATIENCE)
    with serve_store(tmp_path / "store", durable=True) as service:
        service.store.flush().wait(timeout=PATIENCE)
        assert len(service.store) == 0


def test_late_private_writes_are_deleted(tmp_path: Path) -> None:
    with (
        Engine("threads", block_size=1 << 18, _faults={"held": True}) as engine,
        release_at_end(engine),
        serve_store(tmp_path / "store", engine=engine) as service,
    ):
        remote = RemoteStore(ME)
        entry, data = put_of("x", torch.zeros(64, dtype=torch.uint8))
        written = send(remote, 1, [entry], data)
        wait_for(lambda: service.store.statistics().pending == 1)
        remote.close()
        engine._native.release_held()
        written.wait(timeout=PATIENCE)
        wait_for(lambda: len(service.store) == 0 and service.store.statistics().pending == 0)


def test_quota_counts_both_tensors_during_replacement(tmp_path: Path) -> None:
    with (
        serve_store(tmp_path / "store", namespace_capacity=1000),
        RemoteStore(ME, namespace="n") as remote,
    ):
        remote.write("x", torch.ones(100)).wait(timeout=PATIENCE)
        error = remote.write("y", torch.zeros(601, dtype=torch.uint8)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert "601 bytes in the namespace: 400 of 1000" in str(error)
        remote.write("x", torch.ones(150)).wait(timeout=PATIENCE)
        assert "600 of 1000" in str(remote.write("x", torch.ones(101)).exception(timeout=PATIENCE))
        remote.delete("x").wait(timeout=PATIENCE)
        assert isinstance(remote.delete("x").exception(timeout=PATIENCE), NotFoundError)
        remote.write("y", torch.ones(250)).wait(timeout=PATIENCE)


def test_quota_counts_earlier_tensors(tmp_path: Path) -> None:
    with serve_store(tmp_path / "store", durable=True), RemoteStore(ME, namespace="n") as remote:
        remote.write("x", torch.ones(100)).wait(timeout=PATIENCE)
    with (
        serve_store(tmp_path / "store", durable=True, namespace_capacity=500),
        RemoteStore(ME, namespace="n") as remote,
    ):
        error = remote.write("y", torch.zeros(101, dtype=torch.uint8)).exception(timeout=PATIENCE)
        assert "400 of 500" in str(error)


def test_wrong_digest_fails_its_key_alone(tmp_path: Path) -> None:
    with (
        serve_store(tmp_path / "store", namespace_capacity=1000) as service,
        RemoteStore(ME, namespace="n") as remote,
    ):
        puts = [put_of(f"{i}", torch.full((8,), i, dtype=torch.uint8), at=64 * i) for i in range(3)]
        entries = [entry._replace(digest=entry.digest ^ (i == 1)) for i, (entry, _) in enumerate(puts)]
        data = torch.zeros(64 * 2 + 8, dtype=torch.uint8)
        for entry, (_, own) in zip(entries, puts, strict=True):
            data[entry.at : entry.at + 8] = own
        answer = send(remote, 1, entries, data).wait(timeout=PATIENCE)
        assert {i: type(error).__name__ for i, error in answer.errors.items()} == {1: "ChecksumError"}
        assert "the 8 bytes received are not those that were sent" in str(answer.errors[1])
        assert (sorted(remote.keys()), service.statistics().refused) == (["0", "2"], 1)
        assert "16 of 1000" in str(remote.write("3", torch.ones(250)).exception(timeout=PATIENCE))


def test_failed_write_changes_nothing(tmp_path: Path) -> None:
    with serve_store(tmp_path / "store", durable=True), RemoteStore(ME, namespace="n") as remote:
        remote.write("x", torch.ones(2)).wait(timeout=PATIENCE)
    with (
        Engine("threads", _faults={"no_space": 1.0}) as engine,
        serve_store(tmp_path / "store", durable=True, engine=engine),
        RemoteStore(ME, namespace="n") as remote,
    ):
        for key in ("x", "new"):
            error = remote.write(key, torch.zeros(5)).exception(timeout=PATIENCE)
            assert isinstance(error, StorageError)
        assert remote.keys() == ["x"]
    with serve_store(tmp_path / "store", durable=True), RemoteStore(ME, namespace="n") as remote:
        assert remote.read("x").wait(timeout=PATIENCE).tolist() == [1, 1]

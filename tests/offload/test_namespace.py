"""A namespace of an offload service: its keys, its quota, and what failures and crashes leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import NotFoundError, QuotaError, StorageError
from cudafuture.storage import Engine, Offloader, digest
from rpc_ext.offload._namespace import Namespace, names_by_prefix, prefix_of
from rpc_ext.offload._wire import Put
from unit.storing import PATIENCE

PREFIX = prefix_of("a namespace", is_private=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Offloader]:
    with Offloader(tmp_path / "store", durable=True) as store:
        yield store


def again(store: Offloader, prefix: str = PREFIX) -> Namespace:
    """Return the namespace as the next service finds it."""
    wait_all([store.flush()], timeout=PATIENCE)
    return Namespace(store, prefix, None, names_by_prefix(store.keys()).get(prefix, []))


def put(namespace: Namespace, *things: tuple[str, torch.Tensor]) -> list[BaseException | None]:
    """Write tensors together; return the error of each."""
    done: CUDAFuture[list[BaseException | None]] = CUDAFuture()
    entries = []
    for i, (key, tensor) in enumerate(things):
        namespace.take(tensor.nbytes)
        shape = tuple(tensor.shape)
        entries.append(Put(i + 1, 0, 0.0, key, tensor.dtype, shape, tensor.nbytes, 0, 0, tensor.nbytes, digest(tensor)))
    namespace.write(entries, [tensor for _, tensor in things], done.set_result)
    return done.wait(timeout=PATIENCE)


def delete(namespace: Namespace, key: str) -> BaseException | None:
    done: CUDAFuture[BaseException | None] = CUDAFuture()
    namespace.delete(key, done.set_result)
    return done.wait(timeout=PATIENCE)


def test_keys_are_listed_in_the_order_of_writing_also_by_the_next_service(store: Offloader) -> None:
    namespace = Namespace(store, PREFIX, 1000)
    assert put(namespace, ("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.empty(0))) == [None] * 3
    assert put(namespace, ("a", torch.ones(4))) == [None]
    assert namespace.keys() == ["b", "c", "a"]
    assert again(store).keys() == ["b", "c", "a"]
    assert (namespace.stat("a").key, namespace.stat("a").nbytes) == ("a", 16)
    with pytest.raises(NotFoundError, match="no key 'x'"):
        namespace.stat("x")


def test_namespaces_do_not_see_each_other(store: Offloader) -> None:
    namespace, other = Namespace(store, PREFIX, None), Namespace(store, prefix_of("other", is_private=False), None)
    put(namespace, ("x", torch.ones(1)))
    put(other, ("x", torch.zeros(1)), ("y", torch.zeros(1)))
    for tried in ("y", f"../{other.prefix}y", f"{other.prefix}y"):
        with pytest.raises(NotFoundError):
            namespace.stat(tried)
    assert store.read(namespace.name_of("x")).wait(timeout=PATIENCE).item() == 1
    other.clear()
    wait_all([store.flush()], timeout=PATIENCE)
    assert (namespace.keys(), other.keys(), len(store)) == (["x"], [], 1)


def test_a_store_with_keys_of_another_program_is_refused() -> None:
    with pytest.raises(StorageError, match="keys of another program, such as 'mine'"):
        names_by_prefix([f"{PREFIX}x", "mine"])


def test_private_keys_are_gone_with_the_service(store: Offloader) -> None:
    private = prefix_of("a token", is_private=True)
    put(Namespace(store, private, None), ("x", torch.ones(1)))
    there = again(store, private)
    wait_all([store.flush()], timeout=PATIENCE)
    assert (there.is_private, there.keys(), there.is_empty, len(store)) == (True, [], True, 0)


def test_writes_that_end_after_a_namespace_was_cleared_are_deleted(tmp_path: Path) -> None:
    with (
        Engine("threads", block_size=1 << 18, _faults={"held": True}) as engine,
        Offloader(tmp_path / "store", engine=engine) as store,
    ):
        namespace = Namespace(store, prefix_of("a token", is_private=True), None)
        done: CUDAFuture[list[BaseException | None]] = CUDAFuture()
        tensor = torch.zeros(64, dtype=torch.uint8)
        namespace.take(64)
        namespace.write(
            [Put(1, 0, 0.0, "x", torch.uint8, (64,), 64, 0, 0, 64, digest(tensor))], [tensor], done.set_result
        )
        namespace.clear()
        engine._native.let_go()
        done.wait(timeout=PATIENCE)
        store.flush().wait(timeout=PATIENCE)
        assert (len(store), namespace.is_empty) == (0, True)


def test_the_quota_counts_the_old_and_the_new_tensor_until_the_write_ends(store: Offloader) -> None:
    namespace = Namespace(store, PREFIX, 1000)
    put(namespace, ("x", torch.ones(100)))
    with pytest.raises(QuotaError, match="601 bytes in the namespace: 400 of 1000"):
        namespace.take(601)
    put(namespace, ("x", torch.ones(150)))
    with pytest.raises(QuotaError, match="600 of 1000"):
        namespace.take(401)
    assert delete(namespace, "x") is None
    assert isinstance(delete(namespace, "x"), NotFoundError)
    namespace.take(1000)


def test_the_tensors_of_an_earlier_service_count(store: Offloader) -> None:
    put(Namespace(store, PREFIX, None), ("x", torch.ones(100)))
    namespace = Namespace(store, PREFIX, 500, names_by_prefix(store.keys())[PREFIX])
    with pytest.raises(QuotaError, match="400 of 500"):
        namespace.take(101)


def test_a_wrong_digest_fails_its_own_tensor_alone(store: Offloader) -> None:
    namespace = Namespace(store, PREFIX, 1000)
    done: CUDAFuture[list[BaseException | None]] = CUDAFuture()
    tensors = [torch.full((8,), i, dtype=torch.uint8) for i in range(3)]
    namespace.take(8), namespace.take(8), namespace.take(8)
    entries = [
        Put(i + 1, 0, 0.0, f"{i}", torch.uint8, (8,), 8, 0, 0, 8, digest(tensor) ^ (i == 1))
        for i, tensor in enumerate(tensors)
    ]
    namespace.write(entries, tensors, done.set_result)
    errors = done.wait(timeout=PATIENCE)
    assert [type(error).__name__ for error in errors] == ["NoneType", "ChecksumError", "NoneType"]
    assert sorted(namespace.keys()) == ["0", "2"]
    with pytest.raises(QuotaError, match="16 of 1000"):
        namespace.take(1000)


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with Offloader(tmp_path / "store", durable=True) as store:
        put(Namespace(store, PREFIX, None), ("x", torch.ones(2)))
    with (
        Engine("threads", _faults={"no_space": 1.0}) as engine,
        Offloader(tmp_path / "store", durable=True, engine=engine) as store,
    ):
        namespace = again(store)
        for key in ("x", "new"):
            (error,) = put(namespace, (key, torch.zeros(5)))
            assert isinstance(error, StorageError)
        assert namespace.keys() == ["x"]
    with Offloader(tmp_path / "store", durable=True) as store:
        assert store.read(again(store).name_of("x")).wait(timeout=PATIENCE).tolist() == [1, 1]

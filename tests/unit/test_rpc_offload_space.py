"""A namespace of an offload service: tensors of one piece and of many under one key, quota, and what a crash leaves."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, gather, wait_all
from cudafuture.errors import NotFoundError, QuotaError, StorageError
from cudafuture.storage import Engine, Offloader
from rpc_ext._offload_space import Space, by_prefix, prefix_of
from rpc_ext._offload_wire import PIECE, WHOLE, Header, Wanted, piece_of, pieces_of
from soak import soak_count
from unit.storing import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")

LONG = "k" * 1024
PREFIX = prefix_of("a namespace", is_private=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Offloader]:
    with Offloader(tmp_path / "store", durable=True) as store:
        yield store


@pytest.fixture
def space(store: Offloader) -> Space:
    return Space(store, PREFIX, 1 << 30)


def again(store: Offloader) -> Space:
    """Return the namespace as the next service finds it."""
    wait_all([store.flush()], timeout=PATIENCE)
    return Space(store, PREFIX, 1 << 30, by_prefix(store.keys()).get(PREFIX, []))


def put(space: Space, *things: tuple[str, torch.Tensor]) -> list[BaseException | None]:
    """Write tensors of one piece each."""
    end, headers, parts = 0, [], []
    for key, tensor in things:
        space.index.take(tensor.nbytes)
        headers.append(Header(key, tensor.dtype, tuple(tensor.shape), tensor.nbytes, at=end, length=tensor.nbytes))
        parts.append(torch.nn.functional.pad(tensor.reshape(-1).view(torch.uint8), (0, -tensor.nbytes % 64)))
        end += parts[-1].numel()
    return space.write(headers, torch.cat(parts)).wait(timeout=PATIENCE)


def put_large(space: Space, key: str, nbytes: int, seed: int) -> torch.Tensor:
    """Write a tensor in pieces."""
    tensor = bytes_of(nbytes, seed)
    space.index.take(nbytes)
    upload = bytes([seed + 1]) * 16
    header = Header(key, torch.uint8, (nbytes,), nbytes, upload, pieces=pieces_of(nbytes))
    headers = [header._replace(piece=i, length=min(PIECE, nbytes - i * PIECE)) for i in range(header.pieces)]
    pieces = [space.write_piece(h, tensor[h.piece * PIECE : h.piece * PIECE + h.length]) for h in headers]
    gather(*pieces).wait(timeout=PATIENCE)
    space.put_together(header).wait(timeout=PATIENCE)
    return tensor


def bytes_of(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def get(space: Space, store: Offloader, key: str) -> torch.Tensor:
    """Read a tensor piece by piece."""
    first = space.stat(key)
    parts = []
    for piece in range(first.pieces):
        name, header = space.place_of(Wanted(key, first.upload, piece))
        assert header.piece == piece
        parts.append(store.read(name).wait(timeout=PATIENCE).reshape(-1).view(torch.uint8))
    return torch.cat(parts).view(first.dtype).reshape(first.shape)


@pytest.mark.parametrize("key", ["x", LONG], ids=["short", "long"])
@pytest.mark.parametrize("tensor", [torch.randn(3, 4), torch.tensor(7), torch.empty(0, 2), torch.ones(5).bfloat16()])
def test_a_tensor_comes_back(space: Space, store: Offloader, key: str, tensor: torch.Tensor) -> None:
    assert put(space, (key, tensor)) == [None]
    for there in (space, again(store)):
        back = get(there, store, key)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back, tensor)
        assert there.keys() == [key]
        assert there.index.used == tensor.nbytes


def test_many_at_once(space: Space, store: Offloader) -> None:
    tensors = {f"{i}": torch.full((i,), float(i)) for i in range(50)} | {LONG: torch.ones(3)}
    assert put(space, *tensors.items()) == [None] * 51
    assert sorted(space.keys()) == sorted(tensors)
    assert all(torch.equal(get(space, store, key), tensor) for key, tensor in tensors.items())
    assert space.index.used == sum(tensor.nbytes for tensor in tensors.values())


def test_a_key_changes_its_kind_and_nothing_of_the_old_is_left(space: Space, store: Offloader) -> None:
    size = 2 * PIECE + 100
    for turn in range(3):
        large = put_large(space, "x", size + turn, turn)
        assert torch.equal(get(space, store, "x"), large)
        small = torch.full((100,), float(turn))
        assert put(space, ("x", small)) == [None]
        assert torch.equal(get(space, store, "x"), small)
    last = put_large(space, "x", size, 8)
    last = put_large(space, "x", size, 9)
    there = again(store)
    assert torch.equal(get(there, store, "x"), last)
    assert there.keys() == ["x"]
    assert there.index.used == space.index.used == size
    wait_all([store.flush()], timeout=PATIENCE)
    assert len(store) == 4  # three pieces, and the list of them
    there.delete("x").wait(timeout=PATIENCE)
    wait_all([store.flush()], timeout=PATIENCE)
    assert (len(store), there.index.used, there.keys()) == (0, 0, [])


def test_of_a_key_that_a_crash_left_twice_the_last_counts(space: Space, store: Offloader, tmp_path: Path) -> None:
    """As it is when the process dies before the old one is removed."""
    large = put_large(space, "x", PIECE + 1, 1)
    other = Space(store, prefix_of("other", is_private=False), None)  # does not know of it, and removes nothing
    small = torch.ones(3)
    store.write(f"k{PREFIX}x", small).wait(timeout=PATIENCE)
    there = again(store)
    assert torch.equal(get(there, store, "x"), small)
    wait_all([store.flush()], timeout=PATIENCE)
    assert store.keys() == [f"k{PREFIX}x"]
    put_large(there, "x", PIECE + 1, 1)
    store.write(f"k{PREFIX}x", small).wait(timeout=PATIENCE)
    put_large(other, "x", PIECE + 1, 2)
    list_name = next(name for name in store.keys() if name.startswith(f"l{PREFIX}"))  # noqa: SIM118
    store.write(list_name, store.read(list_name).wait(timeout=PATIENCE)).wait(timeout=PATIENCE)
    there = again(store)
    assert torch.equal(get(there, store, "x"), large)
    assert there.index.used == PIECE + 1


def test_pieces_of_no_tensor_are_removed(space: Space, store: Offloader) -> None:
    header = Header("x", torch.uint8, (2 * PIECE,), 2 * PIECE, b"u" * 16, pieces=2, length=PIECE)
    space.write_piece(header, bytes_of(PIECE, 1)).wait(timeout=PATIENCE)
    assert space.keys() == []
    assert again(store).index.used == 0
    wait_all([store.flush()], timeout=PATIENCE)
    assert len(store) == 0


def test_who_reads_pieces_that_are_gone_is_told(space: Space, store: Offloader) -> None:
    put_large(space, "x", PIECE + 1, 1)
    old = space.stat("x").upload
    put_large(space, "x", PIECE + 1, 2)
    with pytest.raises(NotFoundError, match="written again"):
        space.place_of(Wanted("x", old, 1))
    with pytest.raises(ValueError, match="has 2 pieces"):
        space.place_of(Wanted("x", WHOLE, 2))
    with pytest.raises(NotFoundError, match="no key 'y'"):
        space.place_of(Wanted("y"))


def test_namespaces_do_not_see_each_other(space: Space, store: Offloader) -> None:
    other = Space(store, prefix_of("other", is_private=False), None)
    put(space, ("x", torch.ones(1)))
    put(other, ("x", torch.zeros(1)), ("y", torch.zeros(1)))
    for tried in ("y", f"../{other.prefix}y", f"{other.prefix}y", f"k{other.prefix}y"):
        with pytest.raises(NotFoundError):
            space.place_of(Wanted(tried))
    assert float(get(space, store, "x")) == 1
    assert (space.keys(), other.keys()) == (["x"], ["x", "y"])
    other.clear()
    wait_all([store.flush()], timeout=PATIENCE)
    assert (space.keys(), other.keys()) == (["x"], [])


def test_what_was_private_is_gone_with_the_service(store: Offloader) -> None:
    private = prefix_of("a token", is_private=True)
    put(Space(store, private, None), ("x", torch.ones(1)))
    there = Space(store, private, None, by_prefix(store.keys())[private])
    wait_all([store.flush()], timeout=PATIENCE)
    assert (there.is_private, there.keys(), len(store)) == (True, [], 0)


@pytest.mark.parametrize("kind", ["plain", "long", "pieces"])
def test_what_is_written_when_a_space_is_cleared_is_forgotten_too(tmp_path: Path, kind: str) -> None:
    with (
        Engine("threads", block_size=1 << 18, _faults={"held": True}) as engine,
        Offloader(tmp_path / "store", engine=engine) as store,
    ):
        space = Space(store, prefix_of("a token", is_private=True), None)
        if kind == "pieces":
            header = Header("x", torch.uint8, (PIECE + 1,), PIECE + 1, b"n" * 16, pieces=2, length=PIECE)
            space.write_piece(header, bytes_of(PIECE, 1))
            ended: CUDAFuture[Any] = space.put_together(header)
        else:
            key = LONG if kind == "long" else "x"
            ended = space.write([Header(key, torch.uint8, (64,), 64, length=64)], bytes_of(64, 1))
        space.clear()
        engine._native.let_go()
        ended.exception(timeout=PATIENCE)
        while len(store):  # what is removed, nobody waits for
            store.flush().exception(timeout=PATIENCE)


def test_the_quota_is_kept(store: Offloader) -> None:
    space = Space(store, PREFIX, 1000)
    put(space, ("x", torch.ones(100)))
    with pytest.raises(QuotaError, match="601 bytes in the namespace: 400 of 1000"):
        space.index.take(601)
    put(space, ("x", torch.ones(150)))
    assert space.index.used == 600
    space.delete("x").wait(timeout=PATIENCE)
    assert isinstance(space.delete("x").exception(timeout=PATIENCE), NotFoundError)
    space.index.take(1000)


def test_what_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with Offloader(tmp_path / "store", durable=True) as store:
        space = Space(store, PREFIX, None)
        old = put_large(space, "large", PIECE + 1, 1)
        put(space, ("small", torch.ones(2)), (LONG, torch.ones(3)))
    with (
        Engine("threads", _faults={"no_space": 1.0}) as engine,
        Offloader(tmp_path / "store", durable=True, engine=engine) as store,
    ):
        space = again(store)
        used = space.index.used
        for key in ("large", "small", LONG, "new"):
            (error,) = put(space, (key, torch.zeros(5)))
            assert isinstance(error, StorageError)
        space.index.take(PIECE + 1)
        header = Header("large", torch.uint8, (PIECE + 1,), PIECE + 1, b"n" * 16, pieces=2, length=PIECE)
        assert isinstance(space.put_together(header).exception(timeout=PATIENCE), StorageError)
        assert space.index.used == used
        assert sorted(space.keys()) == sorted(["large", "small", LONG])
    with Offloader(tmp_path / "store", durable=True) as store:
        space = again(store)
        assert torch.equal(get(space, store, "large"), old)
        assert get(space, store, "small").tolist() == [1, 1]
        assert get(space, store, LONG).tolist() == [1, 1, 1]


def test_the_write_that_came_last_wins(space: Space, store: Offloader) -> None:
    numbers = random.Random(1)
    for _ in range(soak_count(100)):
        kinds = [numbers.choice(["plain", "delete", "list"]) for _ in range(8)]
        ended = []
        for i, kind in enumerate(kinds):
            if kind == "delete":
                ended.append(space.delete("x"))
            elif kind == "plain":
                space.index.take(8)
                header = Header("x", torch.int64, (), 8, length=8)
                ended.append(space.write([header], torch.tensor([i]).view(torch.uint8)))
            else:
                space.index.take(PIECE + 8)
                header = Header("x", torch.uint8, (PIECE + 8,), PIECE + 8, numbers.randbytes(16), pieces=2)
                last = header._replace(piece=1, length=8)
                space.write_piece(last, torch.tensor([i]).view(torch.uint8)).wait(timeout=PATIENCE)
                ended.append(space.put_together(header))
        for future in ended:
            future.exception(timeout=PATIENCE)
        if kinds[-1] == "delete":
            assert space.keys() == []
            assert space.index.used == 0
        else:
            header = space.stat("x")
            name, _ = space.place_of(Wanted("x", header.upload, header.pieces - 1))
            assert int(store.read(name).wait(timeout=PATIENCE).reshape(-1).view(torch.int64)) == 7
            assert space.index.used == (8 if kinds[-1] == "plain" else PIECE + 8)


def test_a_copy_of_the_files_at_any_moment_has_the_old_or_the_new(tmp_path: Path) -> None:
    folder, crashed = tmp_path / "store", tmp_path / "crashed"
    numbers = random.Random(2)
    with Offloader(folder, durable=True) as store:
        space = Space(store, PREFIX, None)
        put(space, ("x", torch.full((9,), -1)))
        for turn in range(soak_count(50)):
            space.index.take(PIECE + 1)
            header = Header("x", torch.uint8, (PIECE + 1,), PIECE + 1, numbers.randbytes(16), pieces=2)
            parts = [
                space.write_piece(header._replace(piece=i, length=n), torch.full((n,), turn, dtype=torch.uint8))
                for i, n in enumerate((PIECE, 1))
            ]
            gather(*parts).wait(timeout=PATIENCE)
            space.put_together(header).wait(timeout=PATIENCE)
            space.index.take(72)
            small = torch.full((9,), turn)
            write = space.write([Header("x", torch.int64, (9,), 72, length=72)], small.view(torch.uint8))
            shutil.rmtree(crashed, ignore_errors=True)
            crashed.mkdir()
            shutil.copy(folder / "journal", crashed)  # before the slabs: what it names is in them then
            for slab in folder.glob("slab-*"):
                shutil.copy(slab, crashed)
            write.wait(timeout=PATIENCE)
            with Offloader(crashed, durable=True) as left:
                there = again(left)
                assert there.keys() == ["x"]
                found = get(there, left, "x")
                assert found.unique().tolist() == [turn]
                assert found.numel() in (9, PIECE + 1)


def test_a_part_of_what_has_come() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    assert piece_of(data, Header("x", at=64, length=3)).tolist() == [64, 65, 66]

"""Links, which are second keys for stored tensors; and tensors that are mapped instead of read."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import ChecksumError, InvalidStateError, NotFoundError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.child import Child
from support.patience import PATIENCE
from support.storing import MIB, contents, error_number, flip, get, slabs

pytestmark = pytest.mark.usefixtures("on_the_host")

TENSORS = {
    "empty": torch.zeros(0, 3),
    "tiny": contents(10, 1),
    "small": torch.arange(3000, dtype=torch.float64),
    "large": contents(3 * MIB + 5, 3).view(-1, 1),
}


def expect_all(store: DiskStore, expected: dict[str, torch.Tensor], used: int) -> None:
    """Check that the store has exactly these tensors, and that linked keys share their bytes."""
    assert sorted(store.keys()) == sorted(expected)
    for key, got in zip(expected, store.readv(expected).wait(timeout=PATIENCE), strict=True):
        assert torch.equal(got, expected[key]), key
        assert torch.equal(store.map(key, verify=True), expected[key]), key
        assert torch.equal(get(store, key), expected[key]), key
    found = store.statistics()
    assert (found.keys, found.pending) == (len(expected), 0)
    assert (found.bytes, found.used) == (sum(t.nbytes for t in expected.values()), used)


def test_linked_keys_share_bytes(engine: Engine, durable: bool, tmp_path: Path) -> None:
    used = sum(tensor.nbytes for tensor in TENSORS.values())
    both = TENSORS | {f"best {key}": tensor for key, tensor in TENSORS.items()}
    third = both | {f"third {key}": tensor for key, tensor in TENSORS.items()}
    with DiskStore(tmp_path, engine=engine, durable=durable, capacity=4 * MIB) as store:
        store.writev(TENSORS).wait(timeout=PATIENCE)
        assert store.link({f"best {key}": key for key in TENSORS}).wait(timeout=PATIENCE) is None
        expect_all(store, both, used)
        store.link({f"third {key}": f"best {key}" for key in TENSORS}).wait(timeout=PATIENCE)
        expect_all(store, third, used)
        assert store.stat("third small").shape == (3000,)
    if durable:
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            expect_all(store, third, used)


@pytest.mark.parametrize("goes", ["the first", "the link"])
@pytest.mark.parametrize("how", ["deleted", "written again", "linked to another"])
def test_linked_keys_change_independently(engine: Engine, durable: bool, goes: str, how: str, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev({"first": contents(MIB, 1), "other": contents(10)}).wait(timeout=PATIENCE)
        store.link({"link": "first"}).wait(timeout=PATIENCE)
        changed, kept = ("first", "link") if goes == "the first" else ("link", "first")
        expected = {kept: contents(MIB, 1), "other": contents(10)}
        if how == "deleted":
            store.delete(changed).wait(timeout=PATIENCE)
        elif how == "written again":
            expected[changed] = contents(MIB, 2)
            store.write(changed, expected[changed]).wait(timeout=PATIENCE)
        else:
            expected[changed] = contents(10)
            store.link({changed: "other"}).wait(timeout=PATIENCE)
        used = MIB + 10 + (MIB if how == "written again" else 0)
        expect_all(store, expected, used)
    if not durable:
        return
    for _ in range(2):  # the journal has been made anew the second time
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            expect_all(store, expected, used)
            store.write("later", contents(MIB, 9)).wait(timeout=PATIENCE)  # takes no place that a key has
            expect_all(store, expected | {"later": contents(MIB, 9)}, used + MIB)
            store.delete("later").wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.deletev([kept]).wait(timeout=PATIENCE)
        if changed in store:
            store.delete(changed).wait(timeout=PATIENCE)
        assert store.statistics().used == 10


def test_swapped_links_take_effect_together(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev({"a": contents(1000, 1), "b": contents(1000, 2)}).wait(timeout=PATIENCE)
        store.link({"a": "b", "b": "a", "c": "a"}).wait(timeout=PATIENCE)
        swapped = {"a": contents(1000, 2), "b": contents(1000, 1), "c": contents(1000, 1)}
        expect_all(store, swapped, 2000)
    if durable:
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            expect_all(store, swapped, 2000)


def test_one_invalid_link_cancels_all(store: DiskStore) -> None:
    store.write("there", contents(10)).wait(timeout=PATIENCE)
    with pytest.raises(NotFoundError, match="'nowhere'"):
        store.link({"a": "there", "b": "nowhere"}).wait(timeout=PATIENCE)
    with pytest.raises(NotFoundError, match="'nowhere'"):
        store.map("nowhere")
    with pytest.raises(ValueError, match="key"):
        store.link({"": "there"})
    with pytest.raises(TypeError, match="a key is a str"):
        store.link({"a": 3})  # type: ignore[dict-item]
    store.link({}).wait(timeout=PATIENCE)
    assert store.keys() == ["there"]
    assert store.statistics().pending == 0
    store.close()
    for call in (lambda: store.link({"a": "there"}), lambda: store.map("there")):
        with pytest.raises(InvalidStateError, match="closed"):
            call()


def test_last_change_in_flight_wins(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.write("old", contents(100, 1)).wait(timeout=PATIENCE)
        for number in range(50):
            calls: list[CUDAFuture[Any]] = [
                store.write("key", contents(200_000, number)),
                store.link({"key": "old"}),
                store.delete("key") if number % 3 == 1 else store.link({"key": "old"}),
                store.write("key", contents(300, number)) if number % 3 == 2 else store.link({"other": "old"}),
            ]
            for call in calls:
                call.wait(timeout=PATIENCE)
            if number % 3 == 1:
                assert "key" not in store
            else:
                expected = contents(300, number) if number % 3 == 2 else contents(100, 1)
                assert torch.equal(get(store, "key"), expected), number


def test_damage_fails_all_linked_keys(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.write("first", contents(5000)).wait(timeout=PATIENCE)
        store.link({"link": "first"}).wait(timeout=PATIENCE)
        (slab,) = slabs(tmp_path)
        flip(slab, slab.read_bytes().find(contents(5000)[:100].numpy().tobytes()))
        for key in ("first", "link"):
            with pytest.raises(ChecksumError, match=f"key '{key}'"):
                get(store, key)
            with pytest.raises(ChecksumError, match=f"key '{key}'"):
                store.map(key, verify=True)
    with DiskStore.salvage(tmp_path, engine=engine) as salvaged:
        assert salvaged.keys() == []
        assert salvaged.lost.keys() == {"first", "link"}


def test_damaged_journal_keeps_salvageable_links(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.write("first", contents(5000)).wait(timeout=PATIENCE)
        before = store.statistics().journal_bytes
        store.link({"link": "first"}).wait(timeout=PATIENCE)
        store.write("last", contents(10)).wait(timeout=PATIENCE)
    flip(tmp_path / "journal", before - 3)  # of the record of the first
    with DiskStore.salvage(tmp_path, engine=engine) as salvaged:
        assert salvaged.keys() == ["link", "last"]
        assert torch.equal(get(salvaged, "link"), contents(5000))
        assert not salvaged.uncertain


def test_torn_link_is_dropped(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        store.writev({"a": contents(1000, 1), "b": contents(1000, 2)}).wait(timeout=PATIENCE)
        before = store.statistics().journal_bytes
        store.link({"c": "a", "b": "a"}).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", tmp_path / "store")
    journal = tmp_path / "store" / "journal"
    content = journal.read_bytes()
    for size in range(before, len(content), 5):
        journal.write_bytes(content[:size])
        with DiskStore(tmp_path / "store", engine=engine, durable=True, read_only=True) as store:
            expect_all(store, {"a": contents(1000, 1), "b": contents(1000, 2)}, 2000)


# ---- mapped tensors


def test_mapped_tensor_keeps_its_content(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev(TENSORS).wait(timeout=PATIENCE)
        mapped = {key: store.map(key) for key in TENSORS}
        for i in range(3):  # other tensors take the places of those that are gone, but not of these
            store.writev({key: torch.full_like(tensor, i) for key, tensor in TENSORS.items()}).wait(timeout=PATIENCE)
        store.deletev(TENSORS).wait(timeout=PATIENCE)
        store.write("more", contents(8 * MIB)).wait(timeout=PATIENCE)
        for key, tensor in mapped.items():
            assert torch.equal(tensor, TENSORS[key])
            assert (tensor.dtype, tensor.shape) == (TENSORS[key].dtype, TENSORS[key].shape)
        assert store.statistics().used == 8 * MIB + sum(t.nbytes for t in TENSORS.values())
        del mapped, tensor
        assert store.statistics().used == 8 * MIB


def test_mapped_tensor_changes_stay_private(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev(TENSORS).wait(timeout=PATIENCE)
        for key in TENSORS:
            store.map(key).fill_(7)
        expect_all(store, TENSORS, sum(t.nbytes for t in TENSORS.values()))


def test_several_tensors_can_be_mapped(engine: Engine, durable: bool, tmp_path: Path) -> None:
    whole = contents(5 * MIB + 4)
    parts = {f"{i}": whole[i << 20 : (i + 1) << 20] for i in range(6)}  # the last one has four bytes
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev({key: parts[key] for key in reversed(parts)}).wait(timeout=PATIENCE)
        mapped = store.map(list(parts), verify=True)
        assert torch.equal(mapped, whole)
        store.deletev(parts).wait(timeout=PATIENCE)
        store.write("more", contents(8 * MIB)).wait(timeout=PATIENCE)
        assert torch.equal(mapped, whole)
        mapped.fill_(7)
        store.writev({"odd": whole[:5000], "float": torch.ones(1024), "none": torch.ones(0)}).wait(timeout=PATIENCE)
        for keys, error in (
            (["odd", "more"], "key 'odd' of 5000 bytes is not a whole number of pages"),
            (["more", "float"], "key 'float' has another dtype"),
            (["float", "none"], "key 'none' of 0 bytes"),
            ([], "there are no keys"),
        ):
            with pytest.raises(ValueError, match=error):
                store.map(keys)
        with pytest.raises(NotFoundError, match="nowhere"):
            store.map(["more", "nowhere"])


def test_mapped_tensor_outlives_store(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.write("large", TENSORS["large"]).wait(timeout=PATIENCE)
        mapped = store.map("large")
    del store
    assert torch.equal(mapped, TENSORS["large"])


def test_read_only_store_maps_but_refuses_links(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(TENSORS).wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        expect_all(store, TENSORS, sum(t.nbytes for t in TENSORS.values()))
        assert error_number(store.link({"a": "tiny"})) == errno.EROFS
    (slab,) = slabs(tmp_path)
    with slab.open("r+b") as file:
        file.truncate(4096)
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        with pytest.raises(StorageError, match="ends before"):  # and no SIGBUS
            store.map("large")
        slab.unlink()
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        with pytest.raises(StorageError) as caught:
            store.map("large")
        assert caught.value.errno == errno.ENOENT


def test_store_closes_while_threads_map(engine: Engine, tmp_path: Path) -> None:
    """In a separate process, which an error of the mapping would end."""
    with Child(MAPS_AND_CLOSES, str(tmp_path)) as child:
        assert child.hear() == "closed"
        assert (child.end(), child.errors()) == (0, "")


MAPS_AND_CLOSES = """
import sys, threading, torch
from cudafuture.errors import InvalidStateError, StorageError
from cudafuture.store import DiskStore
for number in range(100):
    store = DiskStore(sys.argv[1])
    store.write("key", torch.ones(1 << 16)).wait()
    mapping = threading.Barrier(5)

    def maps():
        mapping.wait()
        try:
            while True:
                store.map("key", verify=number % 2 == 0)
        except (InvalidStateError, StorageError):
            pass

    threads = [threading.Thread(target=maps) for _ in range(4)]
    for thread in threads:
        thread.start()
    mapping.wait()
    store.close()
    for thread in threads:
        thread.join()
say("closed")
"""

"""Arguments of wrong types: the error names the argument and the type to pass."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cudafuture
from cudafuture import CUDAFuture
from cudafuture.compat.deepspeed import OptimizerSwapper
from cudafuture.compat.tensornvme import AsyncFileWriter, DiskOffloader
from cudafuture.errors import NotFoundError, StorageError
from cudafuture.io import BufferPool, Digest, Engine, File, digest, digests, empty
from cudafuture.store import DiskStore, MultipartWrite, ShardedStore
from cudafuture.swap import OffloadedOptimizer, offload
from support.child import run_script


class Things(NamedTuple):
    store: DiskStore
    sharded: ShardedStore
    file: File
    put: MultipartWrite
    folder: Path
    tensor: torch.Tensor
    parameter: torch.nn.Parameter
    offloaded: OffloadedOptimizer
    swapper: OptimizerSwapper
    future: CUDAFuture[int]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Things:
    folder = tmp_path_factory.mktemp("arguments")
    store = DiskStore(folder / "store")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.Adam([torch.nn.Parameter(torch.ones(3))]) for _ in range(2)]
    store.write("a", torch.ones(3)).wait()
    return Things(
        store,
        ShardedStore({"one": DiskStore(folder / "one"), "two": DiskStore(folder / "two")}),
        File(folder / "file", "w+"),
        store.begin_write("parts", torch.float32, [3]),
        folder,
        torch.ones(3),
        parameter,
        offload(optimizers[0], store, name="offloaded"),
        OptimizerSwapper(optimizers[1], store, name="swapper"),
        CUDAFuture.completed(1),
    )


ADAM: Any = torch.optim.Adam
CALLS: dict[str, list[Callable[[Any], object]]] = {
    "n_entries is an int, not 'x'": [
        lambda t: DiskOffloader(t.folder / "disk", n_entries="x"),  # type: ignore[arg-type]
        lambda t: AsyncFileWriter(t.folder / "written", n_entries="x"),  # type: ignore[arg-type]
    ],
    "path is a str, an os.PathLike of one, or an open file, not 5": [lambda t: AsyncFileWriter(5)],  # type: ignore[arg-type]
    "key is a key, or a list of keys, not 5": [lambda t: t.store.map(5)],
    "a key is a str, not None": [
        lambda t: t.store.stat(None),
        lambda t: None in t.store,
        lambda t: t.store.find([None]),
        lambda t: t.sharded.stat(None),
    ],
    "at is an int, not '0'": [lambda t: t.put.put("0", t.tensor)],
    "at is an int, not None": [lambda t: t.put.put(None, t.tensor)],
    "at is an int, not 2.0": [lambda t: t.put.put(2.0, t.tensor)],
    r"tensors is a mapping, \{key: tensor\}, not": [
        lambda t: t.store.writev([t.tensor]),
        lambda t: t.store.writev("a"),
        lambda t: t.sharded.writev(t.tensor),
    ],
    r"the tensor of key 'b': expected a torch\.Tensor, not \[1\.0\]: convert it": [
        lambda t: t.store.writev({"a": t.tensor, "b": [1.0]}),
    ],
    r"^tensor: expected a torch\.Tensor, not": [
        lambda t: t.store.write("a", None),
        lambda t: t.sharded.write("a", [1]),
        lambda t: t.file.write("a"),
        lambda t: t.file.read(None),
        lambda t: t.put.put(0, 5),
        lambda t: digest("a"),  # type: ignore[arg-type]
        lambda t: digests([1], [(0, 1)]),  # type: ignore[arg-type]
    ],
    r"tensors\[1\]: expected a torch\.Tensor, not 5": [lambda t: t.file.writev([t.tensor, 5])],
    r"out is a torch\.Tensor, not 'cpu': pass a device by name, device='cpu'": [lambda t: t.store.read("a", "cpu")],
    r"^out: expected a torch\.Tensor, not 5": [
        lambda t: t.store.read("a", 5),
        lambda t: t.store.readv(["a"], [5]),
    ],
    "outs is a list of tensors, not a tensor of shape": [
        lambda t: t.store.readv(["a"], t.tensor),
        lambda t: t.sharded.readv(["a"], t.tensor),
    ],
    "keys is a list of keys, not ('abc'|5|None): for a single one pass a list of one": [
        lambda t: t.store.readv("abc"),
        lambda t: t.store.readv(None),
        lambda t: t.store.deletev("abc"),
        lambda t: t.store.find("abc"),
        lambda t: t.store.snapshots(5),
        lambda t: t.sharded.readv("abc"),
        lambda t: t.sharded.deletev("abc"),
        lambda t: t.sharded.find(5),
    ],
    "a key is a str, not": [
        lambda t: t.store.write(1, t.tensor),
        lambda t: t.store.stat(1),
        lambda t: t.store.begin_write(1, torch.float32, [3]),
        lambda t: t.sharded.where(None),
    ],
    r"links is a mapping, \{new key: key\}": [lambda t: t.store.link("b")],
    r"digests is a mapping, \{key: digest\}": [lambda t: t.store.writev({"a": t.tensor}, digests=[1])],
    r"written: expected a torch\.Tensor": [
        lambda t: t.store.writev({"a": t.tensor}, written=[True]),
        lambda t: t.sharded.writev({"a": t.tensor}, written=[True]),
    ],
    "priority is an int, not 'high'": [
        lambda t: t.store.write("a", t.tensor, priority="high"),
        lambda t: t.store.read("a", priority="high"),
        lambda t: t.store.begin_write("b", torch.float32, [3], priority="high"),
        lambda t: t.file.write(t.tensor, priority="high"),
    ],
    "is True or False, not 'yes'": [
        lambda t: t.store.writev({"a": t.tensor}, atomic="yes"),
        lambda t: t.store.map("a", verify="yes"),
        lambda t: DiskStore(t.folder / "other", durable="yes"),  # type: ignore[arg-type]
        lambda t: offload(ADAM([t.parameter]), t.store, master_weights="yes"),  # type: ignore[arg-type]
    ],
    "device='cuda:77' is not usable in this process; use 'cpu'": [
        lambda t: t.store.read("a", device="cuda:77"),
        lambda t: t.store.readv(["a"], device="cuda:77"),
        lambda t: t.sharded.read("a", device="cuda:77"),
    ],
    "device is a torch.device, a str such as 'cuda:0' or an int, not": [
        lambda t: t.store.read("a", device="nonsense"),
        lambda t: t.store.read("a", device=1.5),
    ],
    "dtype is a torch.dtype": [
        lambda t: t.store.begin_write("b", "float32", [3]),
        lambda t: empty(3, "float32"),  # type: ignore[arg-type]
        lambda t: t.swapper.swappable(3, "float32"),
    ],
    "(path|dir) is a str or an os.PathLike of one, not": [
        lambda t: File(5),  # type: ignore[arg-type]
        lambda t: DiskStore(None),  # type: ignore[arg-type]
        lambda t: DiskStore.salvage(b"x"),  # type: ignore[arg-type]
    ],
    r"engine is an Engine, such as Engine\('threads'\), not": [
        lambda t: File(t.folder / "f", "w", engine="threads"),  # type: ignore[arg-type]
        lambda t: DiskStore(t.folder / "other", engine=5),  # type: ignore[arg-type]
    ],
    "capacity is an int, not '5'": [lambda t: DiskStore(t.folder / "other", capacity="5")],  # type: ignore[arg-type]
    "(offset|size|queue_depth|nbytes|seed|at) is an int, not": [
        lambda t: t.file.write(t.tensor, "0"),
        lambda t: t.file.allocate(1.5),
        lambda t: t.file.truncate("5"),
        lambda t: Engine(queue_depth="8"),  # type: ignore[arg-type]
        lambda t: BufferPool("1M"),  # type: ignore[arg-type]
        lambda t: BufferPool(4096).take(1.5),  # type: ignore[arg-type]
        lambda t: empty("5"),  # type: ignore[arg-type]
        lambda t: Digest("5"),  # type: ignore[arg-type]
        lambda t: Digest(0).value("x"),  # type: ignore[arg-type]
    ],
    "(size|offset)=-1 is negative": [
        lambda t: t.file.allocate(-1),
        lambda t: t.file.truncate(-1),
        lambda t: t.file.read(t.tensor, -1),
    ],
    "shards are stores, such as DiskStore": [
        lambda t: ShardedStore(["x", "y"]),  # type: ignore[list-item]
        lambda t: ShardedStore({"a": 5}),  # type: ignore[dict-item]
    ],
    "stores is a list of stores, or a mapping": [lambda t: ShardedStore(t.store)],
    r"weights is a mapping, \{name of a shard: share\}": [
        lambda t: ShardedStore([t.store], weights=[1]),  # type: ignore[arg-type]
    ],
    "optimizer is a torch.optim.Optimizer, or a function": [
        lambda t: offload(torch.nn.Linear(2, 2), t.store),
        lambda t: offload(None, t.store),  # type: ignore[arg-type]
    ],
    "store is a store or the path of a folder": [
        lambda t: offload(ADAM([t.parameter]), 5),  # type: ignore[arg-type]
        lambda t: OptimizerSwapper(ADAM([t.parameter]), {}),  # type: ignore[arg-type]
    ],
    "params is a list of parameters or groups": [
        lambda t: offload(ADAM, t.store, params=5),  # type: ignore[arg-type]
        lambda t: offload(ADAM, t.store, params=t.parameter),
        lambda t: offload(ADAM, t.store, params=torch.nn.Linear(2, 2)),  # type: ignore[arg-type]
    ],
    "(min_bytes|memory|prefetch|buffer_bytes) is an int, not": [
        lambda t: offload(ADAM([t.parameter]), t.store, min_bytes="1M"),  # type: ignore[arg-type]
        lambda t: offload(ADAM([t.parameter]), t.store, prefetch=1.5),  # type: ignore[arg-type]
        lambda t: offload(ADAM([t.parameter]), t.store, memory=None),  # type: ignore[arg-type]
        lambda t: OptimizerSwapper(ADAM([t.parameter]), t.store, buffer_bytes="1M"),  # type: ignore[arg-type]
    ],
    r"parameter: expected a torch\.Tensor, not 5": [
        lambda t: t.offloaded.state_of(5),
        lambda t: t.offloaded.gradient_of(5),
        lambda t: t.swapper.swap_in_optimizer_state(5),
        lambda t: t.swapper.swap_out_gradients(5, [0], [t.tensor]),
    ],
    r"(each of )?(parameters|gradient_offsets|gradient_tensors)(:| is) (expected|a list)": [
        lambda t: t.swapper.initialize_parameters(t.parameter),
        lambda t: t.swapper.initialize_parameters([5]),
        lambda t: t.swapper.swap_out_gradients(t.parameter, 0, [t.tensor]),
        lambda t: t.swapper.swap_out_gradients(t.parameter, [0], [5]),
    ],
    "timeout is .*, not '5'": [
        lambda t: t.future.wait(timeout="5"),
        lambda t: t.future.result("5"),
        lambda t: t.future.exception("5"),
        lambda t: cudafuture.wait([t.future], timeout="5"),  # type: ignore[arg-type]
        lambda t: cudafuture.as_completed([t.future], timeout="5"),  # type: ignore[arg-type]
    ],
}


@pytest.mark.parametrize("message", CALLS)
def test_error_names_argument_and_remedy(message: str, things: Things) -> None:
    for call in CALLS[message]:
        with pytest.raises((TypeError, ValueError), match=message):
            call(things)


def test_error_names_non_utf8_key(things: Things) -> None:
    calls: list[Callable[[], object]] = [
        lambda: things.store.write("a\udcff", things.tensor),
        lambda: things.store.writev({"a": things.tensor, "a\udcff": things.tensor}),
        lambda: things.store.read("a\udcff"),
        lambda: things.sharded.write("a\udcff", things.tensor),
        lambda: things.sharded.delete("a\udcff"),
        lambda: things.store.delete("a\udcff"),
        lambda: things.store.stat("a\udcff"),
        lambda: "a\udcff" in things.store,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"the key 'a\\udcff' is not UTF-8"):
            call()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="0 is a device of CUDA")
def test_device_number_without_devices_raises_no_type_error(tmp_path: Path) -> None:
    script = """
        import sys
        import torch
        from cudafuture.store import DiskStore
        with DiskStore(sys.argv[1]) as store:
            store.write("a", torch.ones(1)).wait()
            try:
                store.read("a", device=0)
            except ValueError as e:
                print(e)
        """
    told = run_script(textwrap.dedent(script), str(tmp_path / "store")).stdout
    assert "device=0 is not usable in this process; use 'cpu'" in told


def test_missing_key_error_suggests_durable(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "a") as store:
        store.write("weight", torch.ones(3)).wait()
    with DiskStore(tmp_path / "a") as store:
        calls: list[Callable[[], object]] = [
            lambda: store.read("weight").wait(),
            lambda: store.readv(["weight"]).wait(),
            lambda: store.stat("weight"),
            lambda: store.map("weight"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError, match=r"no key 'weight'; this store began empty: .*durable=True"):
                call()
    with (
        DiskStore(tmp_path / "b", durable=True) as store,
        pytest.raises(NotFoundError, match=r"there is no key 'weight'$"),
    ):
        store.stat("weight")


def test_error_names_own_process_as_owner(tmp_path: Path) -> None:
    with (
        DiskStore(tmp_path, durable=True),
        pytest.raises(StorageError, match="that this process has open: use that DiskStore, or close it first"),
    ):
        DiskStore(tmp_path, durable=True)

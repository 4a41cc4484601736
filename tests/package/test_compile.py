"""Public entries in functions that torch.compile compiles, and tensors that have no memory."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import cudafuture
from cudafuture import CUDAFuture
from cudafuture import distributed as cd
from cudafuture.distributed import ProcessGroup, new_group
from cudafuture.store import DiskStore
from cudafuture.swap import OffloadedOptimizer, offload
from package.test_docs import CLASSES, METHODS, NAMES
from support.soak import in_soak_alone, soak_cases

# Dynamo traces these: tools of tests, and layers of a stage, which a program may compile.
TRACED = (
    "cudafuture.config.",
    "cudafuture.graph_breaks.",
    "cudafuture.ownership.",
    "cudafuture.pipeline.batchnorm.",
    "cudafuture.compat.torchgpipe.skip.",
    "cudafuture.pipeline.skip.",
    "cudafuture.testing.",
)
NATIVE = (types.MethodDescriptorType, property, type(CUDAFuture.completed))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of the compiler

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"when": "backward"}, {"swap_gradients": True})


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield new_group([0])
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def find_unmarked() -> Iterator[str]:
    """Yield the public functions and methods that Dynamo would trace."""
    for name, entry in {**{name: entry for name, (entry, _) in NAMES.items()}, **METHODS}.items():
        cls = CLASSES.get(name.rpartition(".")[0])
        if name.startswith(TRACED) or (cls is not None and issubclass(cls, (tuple, BaseException))):
            continue
        if getattr(cls, "_is_protocol", False):
            continue
        for function in (entry, getattr(entry, "__func__", None), getattr(entry, "fget", None)):
            if isinstance(function, types.FunctionType) and not function.__dict__.get("_torchdynamo_disable"):
                yield name


def test_every_public_entry_breaks_graph() -> None:
    assert list(find_unmarked()) == []


def test_native_methods_have_dynamo_types() -> None:
    native = {name: entry for name, entry in METHODS.items() if name.startswith("cudafuture.future.CUDAFuture.")}
    assert "cudafuture.future.CUDAFuture.wait" in native
    assert [name for name, entry in native.items() if not isinstance(entry, NATIVE)] == []


def test_importing_does_not_load_compiler() -> None:
    rooms = ["distributed", "swap", "pipeline", "compat.tensornvme", "compat.deepspeed"]
    modules = ", ".join([*(f"cudafuture.{room}" for room in rooms), "rpc_ext"])
    script = f"import sys, {modules}; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


DONE = CUDAFuture.completed(1)
STORE: Any = None  # it is not called
FULL_GRAPHS: dict[str, Callable[[torch.Tensor], object]] = {
    "cudafuture.distributed.collectives.all_reduce": lambda x: cd.all_reduce(x),
    "cudafuture.future.copy": lambda x: cudafuture.copy(x, "cpu"),
    "cudafuture.future.submit": lambda x: cudafuture.submit(torch.neg, x),
    "cudafuture.prefetch.prefetcher.prefetch": lambda x: cudafuture.prefetch([x], "cpu"),
    "cudafuture.store.disk_store.DiskStore.write runs as Python": lambda x: DiskStore.write(STORE, "key", x),
    "`wait` of class `CUDAFuture`": lambda x: DONE.wait(),
    "class 'cudafuture._C.CUDAFuture'": lambda x: CUDAFuture(),
}


@pytest.mark.parametrize("name", FULL_GRAPHS)
def test_full_graph_refusal_names_entry(name: str) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(FULL_GRAPHS[name], backend="eager", fullgraph=True)(torch.ones(2))
    assert name in str(raised.value).partition("from user code")[0]  # which quotes the line above, with the name


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=in_soak_alone)])
def test_code_around_entry_is_compiled(group: ProcessGroup, backend: str) -> None:
    compiled: list[str] = []

    def program(group: ProcessGroup, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        future = group.all_reduce(x * 2)
        total = future.then(lambda f: f.value() + 1).wait()
        return total * 3 + x, future.done()

    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    try:
        value, done = torch.compile(program, backend=backend)(group, torch.ones(2))
    finally:
        hook.remove()
    assert (value.tolist(), done) == ([10.0, 10.0], True)
    assert len(compiled) > 1
    assert set(compiled) == {__file__}


@pytest.mark.soak
@pytest.mark.parametrize(("backend", "options"), soak_cases(product(["eager", "aot_eager"], OPTIONS), 2), ids=str)
def test_compiled_step_updates_like_plain_one(tmp_path: Path, backend: str, options: dict[str, Any]) -> None:
    compiled: list[str] = []

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train(run: Callable[..., torch.Tensor], offloads: bool) -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        if offloads:
            optimizer = offload(optimizer, tmp_path, min_bytes=0, **options)
        losses = [run(model, optimizer, torch.ones(3)).item() for _ in range(3)]
        if isinstance(optimizer, OffloadedOptimizer):
            optimizer.close()
        return [losses, *(p.flatten().tolist() for p in model.parameters())]

    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    try:
        found = train(torch.compile(step, backend=backend), offloads=True)
    finally:
        hook.remove()
    assert found == train(step, offloads=False)
    assert __file__ in compiled
    assert not [file for file in compiled if file.startswith(str(Path(cudafuture.__file__).parent))]


ENTRIES: dict[str, Callable[[torch.Tensor, DiskStore], object]] = {
    "all_reduce": lambda x, store: cd.all_reduce(x).wait(),
    "all_gather_into_tensor": lambda x, store: cd.all_gather_into_tensor(torch.empty_like(x), x).wait(),
    "reduce_scatter_tensor": lambda x, store: cd.reduce_scatter_tensor(torch.empty_like(x), x).wait(),
    "all_gather_object": lambda x, store: cd.all_gather_object([None], x).wait(),
    "copy": lambda x, store: cudafuture.copy(x, "cpu").wait(),
    "then": lambda x, store: CUDAFuture.completed(x).then(lambda f: f.value() + 1).wait(),
    "submit": lambda x, store: cudafuture.submit(torch.neg, x).wait(),
    "write": lambda x, store: store.write("x", x).wait(),
    "read": lambda x, store: store.read("known", out=torch.empty_like(x)).wait(),
    "prefetch": lambda x, store: [*cudafuture.prefetch([x], "cpu")],
}


def outcome(entry: Callable[[torch.Tensor, DiskStore], object], x: torch.Tensor, store: DiskStore) -> str:
    try:
        return f"returned {type(entry(x, store)).__name__}"
    except (TypeError, RuntimeError, AttributeError) as e:
        return f"raised {type(e).__name__}"


@pytest.mark.parametrize("name", ENTRIES)
def test_tensors_without_memory_pass_or_fail(name: str, group: ProcessGroup, tmp_path: Path) -> None:
    store, seen = DiskStore(tmp_path), []
    store.write("known", torch.ones(2)).wait()

    def call_entry(x: torch.Tensor) -> torch.Tensor:
        seen.append(outcome(ENTRIES[name], x, store))
        return x.sum()

    with FakeTensorMode():
        call_entry(torch.ones(2))
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        transform(call_entry)(torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2))
    # Torch pickles a tensor of a device that it does not know as an array of the host.
    refused = name in ("read", "write") or (name == "all_gather_object" and torch.get_default_device().type == "cpu")
    assert len(seen) == 4
    assert not refused or all(text.startswith("raised") for text in seen)
    assert store.read("known").wait().tolist() == [1, 1]
    assert store.keys() == ["known"]

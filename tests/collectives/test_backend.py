"""The c10d backend "cudafuture": torch's own functions return Works that have futures."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather, wait
from cudafuture._c10d import FutureBackend
from cudafuture.errors import CollectiveError
from cudafuture.testing import World
from support.operations import issue_each
from support.patience import PATIENCE
from support.ranks import run_ranks, short_group

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_host")]
WORLD = [pytest.mark.world(2, backend="cudafuture"), pytest.mark.xdist_group("world")]


def world_of_two(test: Callable[..., None]) -> Callable[..., None]:
    for mark in WORLD:
        test = mark(test)
    return test


def ones() -> torch.Tensor:
    return torch.ones(2)


def everyone() -> Any:
    return dist.group.WORLD


@world_of_two
def test_works_are_torchs_and_have_futures(world: World) -> None:
    def run() -> None:
        first = dist.all_reduce(ones(), async_op=True)
        assert first is not None
        works = issue_each(dist.get_rank())
        for place, (name, (work, value)) in enumerate(works.items(), first.sequence + 1):
            assert isinstance(work, cfd.FutureWork)
            assert isinstance(work, dist.Work)
            assert (work.name, work.sequence, work.group) == (name, place, dist.group.WORLD)
            assert work.future is work.future
            got = work.future.wait(timeout=PATIENCE)
            work.wait()
            assert work.done()
            assert work.ready()
            same = zip(got, value, strict=True) if isinstance(value, (list, tuple)) else [(got, value)]
            assert all(a is b for a, b in same), name

    world.run(run)


@world_of_two
def test_work_is_chained_and_awaited(world: World) -> None:
    def run() -> None:
        tensor = ones()
        work = dist.all_reduce(tensor, async_op=True)
        assert work.then(lambda f: f.value().tolist()).wait(timeout=PATIENCE) == [2.0, 2.0]
        chained = work.then_async(lambda f: dist.all_reduce(f.value(), async_op=True).future)
        assert chained.wait(timeout=PATIENCE).tolist() == [4.0, 4.0]
        both = [dist.all_reduce(ones(), async_op=True) for _ in range(2)]
        assert [t.tolist() for t in gather(*both).wait(timeout=PATIENCE)] == [[2.0, 2.0]] * 2
        assert wait(both, timeout=PATIENCE) == ({work.future for work in both}, set())
        chained = work.then_async(lambda _: dist.all_reduce(ones(), async_op=True))
        assert chained.wait(timeout=PATIENCE).tolist() == [2.0, 2.0]
        seen: CUDAFuture[Any] = CUDAFuture()
        work.add_done_callback(lambda f: seen.set_result(f.value()))
        assert seen.wait(timeout=PATIENCE) is tensor

        async def main() -> torch.Tensor:
            result: torch.Tensor = await dist.all_reduce(ones(), async_op=True)
            return result

        assert asyncio.run(main()).tolist() == [2.0, 2.0]

    world.run(run)


@world_of_two
def test_callbacks_issue_in_the_same_order_on_every_rank(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        for _ in range(30):
            results = []
            for size, mark in ((200_000 if rank else 2, 10.0), (2 if rank else 200_000, 20.0)):
                # Each rank waits for the other before one of the two, so they complete in different orders.
                work = dist.all_reduce(torch.ones(200_000), async_op=True)
                torch.ones(size).sum()
                marked = torch.full((1,), mark)
                results.append(work.then_async(lambda _, marked=marked: dist.all_reduce(marked, async_op=True).future))
            assert [r.wait(timeout=PATIENCE).item() for r in results] == [20.0, 40.0]

    world.run(run)


@world_of_two
def test_functions_of_cudafuture_accept_the_group(world: World) -> None:
    def run() -> None:
        group = dist.new_group(backend="cudafuture")
        assert cfd.all_reduce(ones(), group=group).wait(timeout=PATIENCE).tolist() == [2.0, 2.0]
        chained = cfd.all_reduce(ones()).then_async(lambda f: cfd.all_reduce(f.value()))
        assert chained.wait(timeout=PATIENCE).tolist() == [4.0, 4.0]
        assert cfd.all_gather_object([None, None], dist.get_rank()).wait(timeout=PATIENCE) == [0, 1]
        cfd.monitored_barrier().wait(timeout=PATIENCE)
        followed = CUDAFuture.from_torch(dist.all_reduce(ones(), async_op=True))
        assert [t.tolist() for t in followed.wait(timeout=PATIENCE)] == [[2.0, 2.0]]  # as for Works of torch
        half = cfd.new_group([dist.get_rank()], backend="cudafuture", use_local_synchronization=True)
        assert half.all_reduce(ones()).wait(timeout=PATIENCE).tolist() == [1.0, 1.0]

    world.run(run)


@world_of_two
def test_timeout_names_group_number_and_tensors(world: World) -> None:
    def run() -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        if rank == 0:
            for work in (dist.all_reduce(ones(), async_op=True), cfd.broadcast(ones(), 0)):
                future = work.future if isinstance(work, cfd.FutureWork) else work
                operation = r"(all_reduce|broadcast) #\d+"
                shown = rf"{operation} of group '0' \(8 B\), [\d.e-]+ s old"
                with pytest.raises(TimeoutError, match=f"It is {shown}"):
                    future.wait(timeout=0)
                described = rf" pending, {operation} on group '0', rank 0 of 2 of float32\[2\], "
                assert re.search(described, repr(future))
                with pytest.raises(TimeoutError, match=f"It waits for {shown}"):
                    gather(future).wait(timeout=0)
            store.set("asked", "")
        else:
            store.wait(["asked"])
            dist.all_reduce(ones())
            cfd.broadcast(ones(), 0).wait()

    world.run(run)


@world_of_two
def test_recv_from_any_rank_names_the_sender(world: World) -> None:
    def run() -> None:
        rank, into = dist.get_rank(), ones()
        sent: Any = dist.isend(ones() * rank, 1 - rank, tag=3)
        received: Any = dist.irecv(into, tag=3)
        assert received.future.wait(timeout=PATIENCE) == (into, 1 - rank)
        received.wait()
        sent.wait()

    world.run(run)


@world_of_two
def test_callers_in_cpp_get_the_work(world: World) -> None:
    def run() -> None:
        summed = functional.all_reduce(ones(), "sum", everyone())
        assert functional.wait_tensor(summed).tolist() == [2.0, 2.0]
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
        grad = model.module.weight.grad
        assert grad is not None
        assert grad.tolist() == [[1.0, 1.0, 1.0]]

    world.run(run)


@world_of_two
def test_compiled_collectives_break_no_graph(world: World) -> None:
    def run() -> None:
        def twice(tensor: torch.Tensor) -> torch.Tensor:
            summed = functional.all_reduce(tensor * 2, "sum", everyone())
            result: torch.Tensor = functional.wait_tensor(summed) + 1
            return result

        compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
        assert compiled(ones()).tolist() == [5.0, 5.0]

    world.run(run)


LEAVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("cudafuture", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(1))
if sys.argv[2] == "0":
    work = dist.all_reduce(torch.ones(1), async_op=True)  # in which the other rank takes no part
    chained = work.then(lambda f: f.value())
    if os.fork() == 0:  # a child that drops its parent's Work
        del work, chained
        os._exit(0)
    os.wait()
else:
    sys.stdin.read()  # until it is killed
"""


def test_process_exits_with_work_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVE, str(tmp_path / "store")]
    other = subprocess.Popen([*command, "1"], stdin=subprocess.PIPE)
    try:
        done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    finally:
        other.kill()
        other.communicate()


def lose_peer(rank: int) -> None:
    group = short_group()
    if rank == 1:
        return
    work = dist.all_reduce(ones(), group=group.group, async_op=True)
    error = work.future.exception(timeout=PATIENCE)
    assert isinstance(error, CollectiveError)
    assert error.operation == "all_reduce"
    assert error.shapes == ((2,),)
    with pytest.raises(RuntimeError):
        work.wait()


def test_lost_peer_fails_future_and_work() -> None:
    run_ranks(2, lose_peer, backend="cudafuture")


def check_debug_wrapper(rank: int) -> None:
    work = dist.all_reduce(ones(), async_op=True)
    assert work.then(lambda f: f.value().tolist()).wait(timeout=PATIENCE) == [2.0, 2.0]
    assert cfd.all_reduce(ones()).wait(timeout=PATIENCE).tolist() == [2.0, 2.0]
    group = cfd.wrap(dist.new_group(backend="gloo"))
    work = dist.all_reduce(ones(), group=group, async_op=True)
    assert isinstance(work, cfd.FutureWork)
    assert work.future.wait(timeout=PATIENCE).tolist() == [2.0, 2.0]


def test_checks_of_torch_wrap_the_backend() -> None:
    run_ranks(2, check_debug_wrapper, backend="cudafuture", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


@pytest.mark.world(2, backend="gloo")
@pytest.mark.xdist_group("world")
def test_wrap_gives_futures_to_a_group_that_exists(world: World) -> None:
    def run() -> None:
        group = dist.new_group()
        name = group.group_name
        assert cfd.wrap(group) is group
        assert cfd.wrap(cfd.ProcessGroup(group)) is group
        summed = functional.all_reduce(ones(), "sum", group)
        assert functional.wait_tensor(summed).tolist() == [2.0, 2.0]
        work = dist.all_reduce(ones(), group=group, async_op=True)
        assert isinstance(work, cfd.FutureWork)
        assert work.group is group
        assert work.then(lambda f: f.value().tolist()).wait(timeout=PATIENCE) == [2.0, 2.0]
        assert (dist.get_backend(group), group.name(), group.group_name) == ("gloo", "gloo", name)
        dist.monitored_barrier(group)
        assert not isinstance(dist.all_reduce(ones(), async_op=True), cfd.FutureWork)
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="was destroyed"):
            cfd.wrap(group)
        assert work.future.value().tolist() == [2.0, 2.0]

    world.run(run)


def start(**options: Any) -> None:
    dist.init_process_group("cudafuture", store=dist.HashStore(), rank=0, world_size=1, **options)


@pytest.fixture
def alone() -> Any:
    """End a group of this process after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_group_begins_again_and_again(alone: None) -> None:
    for _ in range(50):
        start()
        work = dist.all_reduce(ones(), async_op=True)
        assert work.sequence == 0
        assert work.future.wait(timeout=PATIENCE).tolist() == [1.0, 1.0]
        dist.destroy_process_group()


ASKED = """
import torch
import torch.distributed as dist
import cudafuture.distributed as cfd
dist.init_process_group("cudafuture", store=dist.HashStore(), rank=0, world_size=1)
cfd.all_reduce(torch.ones(2)).wait()
dist.all_reduce(torch.ones(2), async_op=True).future.wait()
cfd.all_reduce(torch.ones(2), group=dist.new_group([0], backend="gloo")).wait()
dist.destroy_process_group()
"""


def test_no_error_is_raised_to_ask_gloo_for_failures() -> None:
    """Torch symbolizes each C++ error with this variable, which takes seconds, and says so."""
    environment = os.environ | {"TORCH_SHOW_CPP_STACKTRACES": "1"}  # torch reads it once
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "symboliz" not in done.stderr


def test_work_outlives_its_group(alone: None) -> None:
    start()
    work = dist.all_reduce(ones(), async_op=True)
    work.wait()
    dist.destroy_process_group()
    assert work.future.wait(timeout=PATIENCE).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="process group '0' was destroyed"):
        _ = work.group
    start()  # a group with the same name
    with pytest.raises(RuntimeError, match="process group '0' was destroyed"):
        _ = work.group


def describe(rank: int) -> None:
    described = dist.new_group(backend="cudafuture", group_desc="of my layers")
    dist.all_reduce(ones(), group=described)
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    assert recorded["entries"][-1]["process_group"] == [described.group_name, "of my layers"]


def test_flight_recorder_of_the_wrapped_backend_knows_the_description() -> None:
    run_ranks(1, describe, environment={"TORCH_FR_BUFFER_SIZE": "16"})


def test_options_choose_the_wrapped_backends(alone: None) -> None:
    import torch.testing._internal.distributed.fake_pg  # registers it

    start(pg_options=cfd.BackendOptions(cpu="fake"))
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, FutureBackend)
    assert type(backend.inner("cpu")).__name__ == "FakeProcessGroup"
    assert isinstance(backend.inner("cuda"), dist.ProcessGroupGloo)
    backend._set_default_timeout(timedelta(seconds=5))  # the fake backend has none
    assert backend.inner("cuda").options._timeout == timedelta(seconds=5)
    with pytest.raises(RuntimeError, match=r"wraps none for it; name one in BackendOptions\(xpu=\.\.\.\)"):
        backend.inner("xpu")


def test_group_of_an_extension_cannot_be_wrapped(alone: None) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="was registered with torch by an extension"):
        cfd.wrap()


def test_methods_of_the_wrapped_backend_are_found(alone: None) -> None:
    start()
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options.group_name == group.group_name
    assert not hasattr(backend, "none_of_its_methods")
    with pytest.raises(RuntimeError, match="ProcessGroupGloo::allreduce"):  # the error of the wrapped backend
        backend.allreduce([])


def test_threads_get_the_same_future(alone: None) -> None:
    start()
    for _ in range(50):
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None
        ready = threading.Barrier(3)

        def ask(work: Any = work, ready: threading.Barrier = ready) -> CUDAFuture[Any]:
            ready.wait()
            future: CUDAFuture[Any] = work.future
            return future

        with ThreadPoolExecutor(3) as pool:
            futures = [asked.result() for asked in [pool.submit(ask) for _ in range(3)]]
        assert all(future is work.future for future in futures)


@pytest.mark.parametrize(
    ("choice", "error", "match"),
    [
        ("cudafuture", ValueError, "cannot wrap 'cudafuture'"),
        ("none_of_these", ValueError, "cannot wrap 'none_of_these'"),
    ],
)
def test_unknown_wrapped_backend_is_refused(alone: None, choice: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        start(pg_options=cfd.BackendOptions(cpu=choice))


def test_wrong_options_are_refused(alone: None) -> None:
    with pytest.raises(TypeError, match="cpu is the name of a backend, or its options, not 3"):
        cfd.BackendOptions(cpu=3)
    with pytest.raises(TypeError, match=r"pg_options of the backend cudafuture are BackendOptions, not \{\}"):
        start(pg_options={})


def test_torch_knows_the_backend_without_importing_cudafuture() -> None:
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "assert 'cudafuture' in dist.Backend.backend_list and 'cudafuture' not in sys.modules\n"
        "assert dist.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
        "dist.init_process_group('cudafuture', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(dist.all_reduce(torch.ones(1), async_op=True).future.wait())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensor([1.])\n"


VIRTUAL = re.compile(r"virtual\s+[^;{(]*?(\w+)\(")


@pytest.mark.parametrize(("header", "ours"), [("Backend.hpp", "backend.h"), ("Work.hpp", "work.h")])
def test_every_virtual_function_is_forwarded(header: str, ours: str) -> None:
    folder = Path(inspect.getfile(torch)).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    theirs = VIRTUAL.findall((folder / header).read_text(encoding="utf-8"))
    assert len(theirs) > 12
    text = (ROOT / "cudafuture" / "_c10d" / ours).read_text(encoding="utf-8")
    missing = [name for name in theirs if not re.search(rf"\b{name}\(", text)]
    assert missing == [], "torch calls these on the wrapper: forward them"

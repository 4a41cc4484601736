"""Every collective over NCCL, a GPU for each rank: the values are torch's own, and the futures know their device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather
from cudafuture.testing import World

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("nccl-collectives")]

LONG = 60.0  # seconds; much more than anything takes


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    pytest.importorskip("cloudpickle")
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL, which this build of torch does not have")
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, one for each rank, and there are {torch.cuda.device_count()}")
    with World(request.param, backend="nccl", timeout=120) as world:
        yield world


# Each takes the functions of torch.distributed, or ours, and the input of a rank; `pieces` has a piece for each rank.
# It returns the outputs, and what the call returned.
Outputs = tuple[list[Tensor], Any]
Case = Callable[[Any, Tensor, list[Tensor], dict[str, Any]], Outputs]


def all_reduce(op: Any) -> Case:
    return lambda d, x, _, more: ([x], d.all_reduce(x, op, **more))


def with_outputs(call: Callable[[Any, list[Tensor], Tensor, list[Tensor], dict[str, Any]], Any]) -> Case:
    """Return a case whose outputs are as many as there are ranks."""

    def run(d: Any, x: Tensor, pieces: list[Tensor], more: dict[str, Any]) -> Outputs:
        outputs = [torch.zeros_like(x) for _ in pieces]
        return outputs, call(d, outputs, x, pieces, more)

    return run


def with_output(call: Callable[[Any, Tensor, Tensor, list[Tensor], dict[str, Any]], Any], per_rank: bool) -> Case:
    """Return a case with one output, which holds a piece of each rank or one piece."""

    def run(d: Any, x: Tensor, pieces: list[Tensor], more: dict[str, Any]) -> Outputs:
        output = torch.zeros(len(pieces) * x.numel() if per_rank else x.numel(), dtype=x.dtype, device=x.device)
        return [output], call(d, output, x, pieces, more)

    return run


def uneven_all_to_all(d: Any, x: Tensor, pieces: list[Tensor], more: dict[str, Any]) -> Outputs:
    rank = dist.get_rank()
    sends, receives = [r + 1 for r in range(len(pieces))], [rank + 1] * len(pieces)
    source = torch.arange(float(sum(sends)), device=x.device) + 100 * rank
    output = torch.zeros(sum(receives), device=x.device)
    return [output], d.all_to_all_single(output, source, receives, sends, **more)


def is_root() -> bool:
    return dist.get_rank() == 1


Op = dist.ReduceOp
CASES: dict[str, Case] = {
    "all_reduce sum": all_reduce(Op.SUM),
    "all_reduce average": all_reduce(Op.AVG),
    "all_reduce maximum": all_reduce(Op.MAX),
    "all_reduce product": all_reduce(Op.PRODUCT),
    "broadcast": lambda d, x, _, more: ([x], d.broadcast(x, src=1, **more)),
    "reduce": lambda d, x, _, more: ([x] if is_root() else [], d.reduce(x, dst=1, **more)),
    "all_gather": with_outputs(lambda d, outs, x, _, more: d.all_gather(outs, x, **more)),
    "all_gather_into_tensor": with_output(lambda d, out, x, _, m: d.all_gather_into_tensor(out, x, **m), True),
    "reduce_scatter": with_output(lambda d, out, _, pieces, more: d.reduce_scatter(out, pieces, **more), False),
    "reduce_scatter_tensor": with_output(
        lambda d, out, _, pieces, more: d.reduce_scatter_tensor(out, torch.cat(pieces), **more), False
    ),
    "all_to_all": with_outputs(lambda d, outs, _, pieces, more: d.all_to_all(outs, pieces, **more)),
    "all_to_all_single": with_output(
        lambda d, out, _, pieces, more: d.all_to_all_single(out, torch.cat(pieces), **more), True
    ),
    "all_to_all_single uneven": uneven_all_to_all,
    "gather": with_outputs(lambda d, outs, x, _, more: d.gather(x, outs if is_root() else None, dst=1, **more)),
    "scatter": with_output(
        lambda d, out, _, pieces, more: d.scatter(out, pieces if is_root() else None, src=1, **more), False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_match_torch(ranks: World, name: str) -> None:
    def run() -> None:
        rank, size, case = dist.get_rank(), dist.get_world_size(), CASES[name]
        torch.cuda.set_device(rank)

        def inputs() -> tuple[Tensor, list[Tensor]]:
            x = torch.arange(1.0, 1001.0, device="cuda").remainder(7) + rank
            return x, [x * (r + 1) for r in range(size)]

        expected, work = case(dist, *inputs(), {"async_op": True})
        work.wait()
        with torch.cuda.stream(torch.cuda.Stream()):  # where the inputs are made
            outputs, future = case(cfd, *inputs(), {})
        with torch.cuda.stream(torch.cuda.Stream()):
            future.wait(non_blocking=True, timeout=LONG)
            seen = [output.clone() for output in outputs]
        future.wait(timeout=LONG)
        assert future.ready()
        assert list(future.events) in ([torch.device("cuda", rank)], [])
        torch.cuda.synchronize()
        assert [x.tolist() for x in seen] == [x.tolist() for x in expected]

    ranks.run(run)


def test_many_chained_collectives_keep_order(ranks: World) -> None:
    def run() -> None:
        torch.cuda.set_device(dist.get_rank())
        size = dist.get_world_size()
        futures = [cfd.all_reduce(torch.full((64,), float(i), device="cuda")) for i in range(20)]
        doubled = [future.then(lambda f: f.value() * 2) for future in futures]
        chained = [future.then_async(lambda f: cfd.broadcast(f.value() + 1, src=0)) for future in doubled]
        values = [x[0].item() for x in gather(*chained).wait(timeout=LONG)]
        assert values == [i * size * 2.0 + 1 for i in range(20)]

    ranks.run(run)


def test_sends_and_receives_between_neighbours(ranks: World) -> None:
    def run() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)
        x, out = torch.full((16,), float(rank), device="cuda"), torch.zeros(16, device="cuda")
        following, before = (rank + 1) % size, (rank - 1) % size
        operations = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, out, before)]
        cfd.batch_isend_irecv(operations).wait(timeout=LONG)
        assert out.tolist() == [float(before)] * 16

    ranks.run(run)


def test_objects_barrier_and_subgroup_work(ranks: World) -> None:
    def run() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)
        objects: list[Any] = [None] * size
        cfd.all_gather_object(objects, {"rank": rank}).wait(timeout=LONG)
        assert objects == [{"rank": r} for r in range(size)]
        for batched in (False, True):  # messages over NCCL itself, with a collective behind them
            if rank == 0:
                sent = [cfd.send_object_list([i, "x" * i], 1, use_batch=batched) for i in range(3)]
            elif rank == 1:
                lists: list[list[Any]] = [[None, None] for _ in range(3)]
                received = [cfd.recv_object_list(one, 0, use_batch=batched) for one in lists]
            assert cfd.all_reduce(torch.ones(1, device="cuda")).wait(timeout=LONG).item() == size
            if rank == 0:
                gather(*sent).wait(timeout=LONG)
            elif rank == 1:
                assert gather(*received).wait(timeout=LONG) == [0, 0, 0]
                assert lists == [[i, "x" * i] for i in range(3)]
        cfd.barrier().wait(timeout=LONG)
        pair = cfd.new_group([0, 1])
        if rank < 2:
            assert pair.all_reduce(torch.ones(4, device="cuda")).wait(timeout=LONG).tolist() == [2.0] * 4

    ranks.run(run)


def test_unsupported_dtype_fails_only_its_call(ranks: World) -> None:
    def run() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)
        pieces = [torch.zeros(4, dtype=torch.int16, device="cuda") for _ in range(size)]
        with pytest.raises(cfd.CollectiveError, match=r"NCCL has no type for torch\.int16"):
            cfd.all_to_all([torch.empty_like(p) for p in pieces], pieces).wait(timeout=LONG)
        whole = torch.zeros(size, device="cuda")
        gathered = cfd.all_gather_into_tensor(whole, torch.full((1,), rank + 1.0, device="cuda"))
        assert gathered.wait(timeout=LONG).tolist() == [r + 1.0 for r in range(size)]

    ranks.run(run)


def average(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return cfd.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group)


def compress(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    buffer = bucket.buffer()
    halved = buffer.double().div_(dist.get_world_size(group))
    return cfd.all_reduce(halved, group=group).then(lambda reduced: buffer.copy_(reduced.value()))


def scatter_then_gather(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    size, buffer = dist.get_world_size(group), bucket.buffer()
    padded = nn.functional.pad(buffer / size, (0, -buffer.numel() % size))
    shard = torch.empty(padded.numel() // size, device=buffer.device)
    reduced = cfd.reduce_scatter_tensor(shard, padded, group=group)
    whole = reduced.then_async(lambda part: cfd.all_gather_into_tensor(padded, part.value(), group=group))
    return whole.then(lambda gathered: buffer.copy_(gathered.value()[: buffer.numel()]))


@pytest.mark.parametrize("hook", [average, compress, scatter_then_gather], ids=lambda hook: hook.__name__)
def test_ddp_hook_trains_like_plain_ddp(ranks: World, hook: Any) -> None:
    def run() -> None:
        rank = dist.get_rank()
        torch.cuda.set_device(rank)

        def train(with_hook: bool) -> list[Tensor]:
            torch.manual_seed(0)
            layers = [nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5)]
            model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[rank], bucket_cap_mb=0.001)
            if with_hook:
                model.register_comm_hook(None, cfd.ddp_comm_hook(hook))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.arange(17.0, device="cuda").add(rank + step).remainder(5)[None]
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            return [parameter.detach().cpu() for parameter in model.parameters()]

        for ours, theirs in zip(train(True), train(False), strict=True):
            torch.testing.assert_close(ours, theirs)

    ranks.run(run)

"""Replicas of a pipeline: the average of their plain gradients on each, and one end of each step on all."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cudafuture.errors import CUDAFutureError, InvalidStateError, RemoteError, WorkerLostError
from cudafuture.pipeline import Pipeline
from cudafuture.testing import World
from pipeline.reference import gradients_in_order, model_of, without_races
from support.ranks import run_ranks

WIDTH = 6
ROWS = 7
LOOPED = ["looped_bfs", "zbv"]  # two stages on each device


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sum_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch_of(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return x, y


def plain_gradients(
    pipeline: Pipeline, model: nn.Sequential, balance: list[int], seed: int, loss: Any = loss_of
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch, and its gradients by name, of the plain model."""
    batch, target = batch_of(seed)
    count = pipeline.schedule.microbatches
    parts = list(zip(batch.tensor_split(count), target.tensor_split(count), strict=True))
    weights = [1.0 if loss is sum_of else len(x) / ROWS for x, _ in parts]
    return gradients_in_order(model, balance, pipeline.schedule, parts, loss, weights)


def expect_gradients(pipeline: Pipeline, expected: dict[str, Tensor]) -> None:
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.cpu(), expected[name]), name


def average(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(each[name] for each in gradients) / len(gradients) for name in gradients[0]}  # type: ignore[misc]


def train_replicas(devices: list[Any], schedule: str) -> None:
    rank = dist.get_rank()
    stages = len(devices) * (2 if schedule in LOOPED else 1)
    balance = [1] * stages
    model = model_of(stages, seed=rank)  # each replica gets the parameters of the first
    pipeline = Pipeline(
        model,
        devices,
        balance=balance,
        microbatches=3,
        schedule=schedule,
        loss=loss_of,
        replicas=dist.group.WORLD,
    )
    plain = model_of(stages, seed=0)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        found = [plain_gradients(pipeline, plain, balance, seed=10 * step + r) for r in range(2)]
        expected = average([gradients for _, gradients in found])
        optimizer.zero_grad()
        loss = pipeline.step(*batch_of(10 * step + rank))
        assert torch.equal(loss.cpu(), found[rank][0])
        expect_gradients(pipeline, expected)
        optimizer.step()
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        of_plain.step()
    pipeline.close()


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", *LOOPED])
def test_replicas_have_average_of_gradients(schedule: str, world: World) -> None:
    world.run(train_replicas, ["cpu", "cpu"], schedule)


def train_on_simulator(rank: int, schedule: Any) -> None:
    with without_races(devices=2, seed=rank, schedule=schedule):
        train_replicas(["sim:0", "sim:1"], "1f1b")


@pytest.mark.world
@pytest.mark.parametrize("schedule", ["lazy", "jitter"])
def test_reductions_are_ordered_after_cells(schedule: str) -> None:
    run_ranks(2, train_on_simulator, schedule)


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_mesh_of_replicas_and_ranks(schedule: str, world: World) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        replica, row = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        balance = [1] * (4 if schedule == "zbv" else 2)
        model = model_of(len(balance))
        pipeline = Pipeline(
            copy.deepcopy(model),
            balance=balance,
            microbatches=3,
            schedule=schedule,
            loss=loss_of,
            group=mesh.get_group("pp"),
            replicas=mesh.get_group("dp"),
        )
        device_of = pipeline.schedule.device_of
        for step in range(2):
            pipeline.zero_grad()
            x, y = batch_of(10 * step + replica)
            pipeline.step(x if device_of[0] == row else None, y if device_of[-1] == row else None)
            found = [plain_gradients(pipeline, model, balance, seed=10 * step + r)[1] for r in range(2)]
            expect_gradients(pipeline, average(found))
        norm = pipeline.clip_grad_norm_(1e-3)
        whole = torch.nn.utils.get_total_norm(list(average(found).values()))
        torch.testing.assert_close(norm, whole)
        pipeline.close()

    world.run(run)


@pytest.mark.world(2)
def test_sums_are_added_and_steps_accumulate(world: World) -> None:
    def run() -> None:
        rank, balance, model = dist.get_rank(), [1, 1], model_of(2)
        settings: dict[str, Any] = {"balance": balance, "microbatches": 2, "replicas": dist.group.WORLD}
        added = Pipeline(copy.deepcopy(model), ["cpu"] * 2, loss=sum_of, loss_reduction="sum", **settings)
        found = [plain_gradients(added, model, balance, seed, sum_of) for seed in range(2)]
        for times in (1, 2):  # a second step adds to the gradients of the first
            assert torch.equal(added.step(*batch_of(rank)), found[rank][0])
            for name, parameter in added.named_parameters():
                expected = times * (found[0][1][name] + found[1][1][name])
                torch.testing.assert_close(parameter.grad, expected)
        averaged = Pipeline(copy.deepcopy(model), ["cpu"] * 2, loss=loss_of, **settings)
        averaged.step(*batch_of(rank), average=False)
        expect_gradients(averaged, plain_gradients(averaged, model, balance, rank)[1])
        averaged.step(*batch_of(rank + 2))
        of_seeds = [plain_gradients(averaged, model, balance, seed)[1] for seed in range(4)]
        for name, parameter in averaged.named_parameters():
            torch.testing.assert_close(parameter.grad, sum(each[name] for each in of_seeds) / 2)

    world.run(run)


class Branch(nn.Module):
    """Uses one of two layers of different dtypes, as the batch says; another has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x) if x.sum() > 0 else self.second(x.double()).float()
        return result


@pytest.mark.world(2)
def test_parameter_that_some_replicas_use(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        branch = Branch()
        branch.get_buffer("count").fill_(7 - rank)
        pipeline = Pipeline([branch, nn.Tanh()], ["cpu"] * 2, microbatches=1, loss=loss_of, replicas=dist.group.WORLD)
        assert branch.get_buffer("count") == 7
        x, y = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
        pipeline.step(x if rank == 0 else -x, y)
        assert branch.never.grad is not None
        assert branch.never.grad.tolist() == [0, 0]
        assert branch.frozen.grad is None
        for layer, sign in ((branch.first, 1), (branch.second, -1)):
            plain = copy.deepcopy(layer)
            plain.zero_grad()
            loss_of(plain((sign * x).to(plain.weight.dtype)).float().tanh(), y).backward()
            assert plain.weight.grad is not None
            torch.testing.assert_close(layer.weight.grad, plain.weight.grad / 2)

    world.run(run)


class Break(nn.Module):
    """Fails in forward or backward where a row is 7."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kind = "forward"

    def forward(self, x: Tensor) -> Tensor:
        is_bad = bool((x == 7).any())
        y: Tensor = self.layer(x)
        if is_bad and self.kind == "forward":
            raise ZeroDivisionError("the stage broke")
        if is_bad:
            y.register_hook(_fail)
        return y


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError("the stage broke")


def run_into_errors() -> None:
    """In each step another rank of a mesh fails; the next step has the right gradients all the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, row = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    torch.manual_seed(0)
    stages = [Break(), Break()]
    plain = nn.Sequential(*copy.deepcopy(stages))
    pipeline = Pipeline(stages, microbatches=2, loss=loss_of, group=mesh.get_group("pp"), replicas=mesh.get_group("dp"))
    for kind in ("forward", "backward"):
        stages[0].kind = kind
        for bad in (0, 1):
            x, y = batch_of(replica, rows=4)
            if replica == bad:
                x[3] = 7  # seen by the first stage
            culprit = replica == bad and row == 0
            with pytest.raises(ZeroDivisionError if culprit else RemoteError, match="the stage broke") as caught:
                pipeline.step(x, y)
            if row == 0 and not culprit:
                assert isinstance(caught.value, RemoteError)
                assert caught.value.worker == f"replica {bad}"
            pipeline.zero_grad()
            pipeline.step(*batch_of(replica, rows=4))
            plain.zero_grad()
            for seed in range(2):
                x, y = batch_of(seed, rows=4)
                (loss_of(plain(x), y) / 2).backward()
            expected = dict(plain.named_parameters())
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name].grad)
            pipeline.zero_grad()
    with pytest.raises(ValueError if (replica, row) == (1, 1) else RemoteError, match="rows"):
        pipeline.step(x, y[:3] if (replica, row) == (1, 1) else y)  # before any cell
    pipeline.step(x, y)
    pipeline.close()


@pytest.mark.world(2)
def test_error_of_any_class_leaves_replicas_in_step(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        text = "of the stage"
        for error in (TimeoutError(text), WorkerLostError(text, worker="w1"), MemoryError(text)):

            def loss(output: Tensor, target: Tensor, error: BaseException = error) -> Tensor:
                if rank == 0 and (target == 7).any():
                    raise error
                return loss_of(output, target)

            pipeline = Pipeline(
                model_of(2), ["cpu"] * 2, balance=[1, 1], microbatches=2, loss=loss, replicas=dist.group.WORLD
            )
            x, y = batch_of(rank)
            y[0] = 7
            with pytest.raises((type(error), RemoteError), match=text):
                pipeline.step(x, y)
            pipeline.zero_grad()
            pipeline.step(*batch_of(rank))
            found = [plain_gradients(pipeline, model_of(2), [1, 1], seed)[1] for seed in range(2)]
            expect_gradients(pipeline, average(found))
            with pytest.raises(RuntimeError, match="is trained by step"):
                pipeline(x)
            if rank == 0:
                pipeline.step(x, x, average=False)
            with pytest.raises(ValueError, match=r"replica 0 makes the average of its step 4\s.*replica 1 .* step 3"):
                pipeline.step(x, x)
            pipeline.close()

    world.run(run)


def lose_one_of_mesh(rank: int, kind: str) -> None:
    """Rank 0 of a mesh of 2 x 2 dies: all others know at once, also the one that has no connection to it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipeline = Pipeline(
        model_of(2),
        balance=[1, 1],
        microbatches=2,
        loss=loss_of,
        group=mesh.get_group("pp"),
        replicas=mesh.get_group("dp"),
    )
    pipeline.step(*batch_of(0))
    if rank == 0 and kind == "between steps":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        pipeline.stages[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerLostError):
        pipeline.step(*batch_of(0))
    with pytest.raises((WorkerLostError, InvalidStateError)):
        pipeline.step(*batch_of(0))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} knows", "")
    store.wait([f"rank {other} knows" for other in (1, 2, 3)])  # not of each other's exit


@pytest.mark.world
@pytest.mark.parametrize("kind", ["between steps", "in a cell"])
def test_process_lost_in_mesh_is_known_to_all(kind: str) -> None:
    run_ranks(4, lose_one_of_mesh, kind, lost=[0])


@pytest.mark.world(4)
def test_error_of_replica_is_raised_on_all(world: World) -> None:
    world.run(run_into_errors)


@pytest.mark.world(2)
def test_replicas_make_same_pipeline(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with pytest.raises(ValueError, match="replica 0 makes a pipeline of"):
            Pipeline([nn.Linear(2, 2 + rank)], microbatches=1, loss=loss_of, replicas=dist.group.WORLD)
        embedding = nn.Embedding(3, WIDTH, sparse=rank == 1)
        pipeline = Pipeline([embedding], microbatches=1, loss=loss_of, replicas=dist.group.WORLD)
        indices, target = torch.arange(3), torch.zeros(3, WIDTH)
        with pytest.raises(TypeError if rank else RemoteError, match="has a sparse gradient"):
            pipeline.step(indices, target)
        embedding.sparse = False
        pipeline.zero_grad()
        pipeline.step(indices, target)

    world.run(run)


def be_killed(rank: int, kind: str) -> None:
    stages = [Break(), Break()]
    pipeline = Pipeline(stages, ["cpu"] * 2, microbatches=2, loss=loss_of, replicas=dist.group.WORLD)
    pipeline.step(*batch_of(0))
    if rank == 1 and kind == "between steps":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        stages[1].layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CUDAFutureError) as caught:
        pipeline.step(*batch_of(0))
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert isinstance(caught.value, WorkerLostError), text
    assert "replica 1" in text


@pytest.mark.world
@pytest.mark.parametrize("kind", ["between steps", "in a cell"])
def test_killed_replica_is_named(kind: str) -> None:
    run_ranks(2, be_killed, kind, lost=[1])

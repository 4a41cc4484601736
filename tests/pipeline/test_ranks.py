"""Pipelines over several processes: the gradients of the plain model on every rank, and one end of each step on all."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cudafuture.distributed import ProcessGroup
from cudafuture.errors import InvalidStateError, RemoteError, WorkerLostError
from cudafuture.pipeline import Pipeline, pop, skippable, stash
from cudafuture.testing import World
from pipeline.reference import gradients_in_order, model_of, without_races
from pipeline.tables import random_table, torch_table
from support.child import Child
from support.patience import PATIENCE
from support.ranks import run_ranks, short_group
from support.soak import SOAK, soak_count

LOOPED = ["interleaved_1f1b", "interleaved_zero_bubble", "zbv"]  # two stages on each rank
TABLES = ["gpipe", "1f1b", "zb1p", *LOOPED]
WIDTH = 6


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return x, y


def expect_plain(pipeline: Pipeline, model: nn.Sequential, balance: list[int], rows: int) -> None:
    """Compare the gradients of this rank with those of the plain model, bit for bit."""
    batch, target = batch_of(rows)
    count = pipeline.schedule.microbatches
    parts = list(zip(batch.tensor_split(count), target.tensor_split(count), strict=True))
    weights = [len(x) / rows for x, _ in parts]
    loss, expected = gradients_in_order(model, balance, pipeline.schedule, parts, loss_of, weights)
    first, last = (pipeline.schedule.device_of[s] == dist.get_rank() for s in (0, -1))
    got = pipeline.step(batch if first else None, target if last else None)
    assert (got is None) != last
    if last:
        assert torch.equal(got.cpu(), loss)
    own = {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}
    assert own.keys() == {name for name in expected if name in dict(pipeline.named_parameters())}
    for name, gradient in own.items():
        assert torch.equal(gradient, expected[name]), name


def run_tables(device: str, checkpoints: list[Any], tables: list[str]) -> None:
    size = dist.get_world_size()
    for table in tables:
        stages = 2 * size if table in LOOPED else size
        balance = [1] * (stages - 1) + [2]
        for mode in checkpoints:
            for microbatches in (1, size, 5):
                model = model_of(stages + 1)
                pipeline = Pipeline(
                    copy.deepcopy(model),
                    device,
                    balance=balance,
                    microbatches=microbatches,
                    schedule=table,
                    checkpoint=mode,
                    loss=loss_of,
                    group=dist.group.WORLD,
                )
                for rows in (2 * microbatches + 1, microbatches):
                    pipeline.zero_grad()
                    expect_plain(pipeline, model, balance, rows)
                pipeline.close()


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.world(n)) for n in (1, 2, 3)])
def test_gradients_equal_plain_model(size: int, world: World) -> None:
    assert world.size == size
    modes = ["never", "except_last", "always"] if SOAK or size == 2 else ["except_last"]
    world.run(run_tables, "cpu", modes, TABLES)


def run_tables_on_simulator(rank: int, schedule: Any) -> None:
    with without_races(devices=1, seed=rank, schedule=schedule):
        run_tables("sim:0", ["never", "always"] if SOAK else ["always"], ["1f1b", "zb1p"])


@pytest.mark.world
@pytest.mark.parametrize("schedule", ["lazy", "jitter"])
def test_devices_are_ordered_after_messages(schedule: str) -> None:
    run_ranks(2, run_tables_on_simulator, schedule)


def run_random_tables(seeds: range) -> None:
    size = dist.get_world_size()
    for seed in seeds:
        stages, microbatches = 2 + seed % 4, 1 + seed // 4 % 5
        table = random_table(seed, stages, microbatches, size)
        if len(table.rows) != size or not all(any(row) for row in table.rows):
            continue
        model = model_of(stages)
        pipeline = Pipeline(
            copy.deepcopy(model),
            balance=[1] * stages,
            microbatches=microbatches,
            schedule=table,
            loss=loss_of,
            group=dist.group.WORLD,
        )
        expect_plain(pipeline, model, [1] * stages, 2 * microbatches + 1)
        pipeline.close()


@pytest.mark.world(3)
def test_random_tables_have_plain_gradients(world: World) -> None:
    world.run(run_random_tables, range(soak_count(1000, 20)))


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_tables_of_torch_run(name: str, world: World) -> None:
    def run() -> None:
        model = model_of(4)
        table = torch_table(name, devices=2, stages_per_device=2, microbatches=4)
        pipeline = Pipeline(
            copy.deepcopy(model),
            balance=[1] * 4,
            microbatches=4,
            schedule=table,
            loss=loss_of,
            group=dist.group.WORLD,
        )
        expect_plain(pipeline, model, [1] * 4, 9)
        assert pipeline.peak_activations == (table.check().peak_activations[dist.get_rank()],)

    world.run(run)


# ---- values


def expect_one_process(layers: list[nn.Module], balance: list[int], schedule: str) -> None:
    """Compare the gradients of this rank with those of a pipeline in one process.

    Sums may differ in their last bits, because a tensor with gaps loses them on its way to another rank.
    """
    settings: dict[str, Any] = {"balance": balance, "microbatches": 3, "schedule": schedule, "loss": loss_of}
    pipeline = Pipeline(copy.deepcopy(nn.Sequential(*layers)), group=dist.group.WORLD, **settings)
    one = Pipeline(copy.deepcopy(nn.Sequential(*layers)), ["cpu"] * len(balance), **settings)
    pipeline.step(*batch_of(8))
    one.step(*batch_of(8))
    expected = dict(one.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


class Pack(nn.Module):
    """Returns a value of many kinds of leaves, and a tensor in two of its places."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        wide = torch.stack([x, 2 * x])
        return {
            "twice": (x, x),
            "transposed": wide.transpose(0, 2),
            "half": wide[:, :, ::2],
            "bfloat16": x.bfloat16(),
            "complex": torch.complex(x, x).conj(),
            "bool": x > 0,
            "empty": x[:0],
            "scalar": x.sum(),
            "expanded": x[:1].expand(3, WIDTH),
            "none": None,
            "text": "rows",
            "count": len(x),
            "truth": True,
        }


class Unpack(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        assert given["twice"][0] is given["twice"][1]
        assert given["transposed"].stride() == (1, WIDTH, given["count"] * WIDTH)
        assert given["none"] is None
        assert (given["text"], given["truth"]) == ("rows", True)
        assert given["complex"].dtype == torch.complex64
        assert given["empty"].shape == (0, WIDTH)
        parts = [given["twice"][0], given["bfloat16"].float(), given["complex"].real, given["complex"].imag]
        wide = given["transposed"].transpose(0, 2)[1] * given["bool"]
        rest = given["half"].sum() + given["scalar"] + given["expanded"].sum()
        result: Tensor = torch.stack([*parts, wide]).sum(0) * given["count"] + rest
        return result


@pytest.mark.world(2)
def test_values_of_any_nesting_arrive(world: World) -> None:
    def run() -> None:
        torch.manual_seed(0)
        expect_one_process([nn.Linear(WIDTH, WIDTH), Pack(), Unpack(), nn.Linear(WIDTH, WIDTH)], [2, 2], "1f1b")

    world.run(run)


@skippable(stash=["early"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x * 2)
        return x + 1


@skippable(pop=["early"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early: Tensor = yield pop("early")
        return x * early


@pytest.mark.world(3)
def test_skips_pass_over_ranks(world: World) -> None:
    def run() -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), Stash(), nn.Linear(WIDTH, WIDTH), Pop(), nn.Linear(WIDTH, WIDTH)]
        for schedule in ("1f1b", "gpipe"):
            expect_one_process(layers, [2, 1, 2], schedule)

    world.run(run)


@pytest.mark.world(2)
def test_each_rank_makes_only_its_stages(world: World) -> None:
    def run() -> None:
        rank, source = dist.get_rank(), model_of(4)
        with torch.device("meta"):
            model = model_of(4)
        state = source.state_dict()
        pipeline = Pipeline(
            model,
            balance=[2, 2],
            microbatches=2,
            loss=loss_of,
            group=dist.group.WORLD,
            initialize=lambda stage: stage.load_state_dict({name: state[name] for name in stage.state_dict()}),
        )
        assert [parameter.is_meta for parameter in model.parameters()] == [
            int(name[0]) // 2 != rank for name, _ in model.named_parameters()
        ]
        expect_plain(pipeline, source, [2, 2], 5)

    world.run(run)


@pytest.mark.world(2)
def test_evaluation_returns_output_on_last_rank(world: World) -> None:
    def run() -> None:
        model = model_of(4)
        pipeline = Pipeline(
            copy.deepcopy(model), balance=[2, 2], microbatches=3, loss=loss_of, group=dist.group.WORLD
        ).eval()
        rank = dist.get_rank()
        with torch.no_grad():
            for rows in (7, 2):
                x, _ = batch_of(rows)
                output = pipeline(x if rank == 0 else None)
                assert (output is None) == (rank == 0)
                if rank == 1:
                    torch.testing.assert_close(output, model(x))
        loss, output = pipeline.step(*batch_of(7), return_outputs=True)
        assert (loss is None, output is None) == (rank == 0, rank == 0)
        with pytest.raises(RuntimeError, match="is trained by step"):
            pipeline(batch_of(7)[0])

    world.run(run)


# ---- training


def clip(layers: int) -> None:
    for norm_type in (2.0, 1.0, math.inf):
        for limit in (1e-3, 1e3):
            plain = model_of(layers)
            pipeline = Pipeline(
                copy.deepcopy(plain), balance=[1] * layers, microbatches=2, loss=loss_of, group=dist.group.WORLD
            )
            x, y = batch_of(4)
            pipeline.step(x, y)
            loss_of(plain(x), y).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
            torch.testing.assert_close(pipeline.clip_grad_norm_(limit, norm_type), expected)
            gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, gradients[name])
            pipeline.close()


@pytest.mark.world(2)
def test_clipping_takes_norm_of_all_ranks(world: World) -> None:
    world.run(clip, 2)


@pytest.mark.world(2)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_scaler_skips_step_on_all_ranks(world: World) -> None:
    def run() -> None:
        rank, plain = dist.get_rank(), model_of(2)
        pipeline = Pipeline(copy.deepcopy(plain), balance=[1, 1], microbatches=2, loss=loss_of, group=dist.group.WORLD)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        x, y = batch_of(4)
        loss = pipeline.step(x, y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
        expected = loss_of(plain(x), y)
        expected.backward()
        of_plain.step()
        if rank == 1:
            torch.testing.assert_close(loss, expected.detach())
        trained = {name: value.clone() for name, value in pipeline.state_dict().items()}
        for name, value in trained.items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        optimizer.zero_grad()
        if rank == 1:
            next(pipeline.parameters()).register_hook(lambda gradient: gradient / 0)
        pipeline.step(x, y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        for name, value in pipeline.state_dict().items():
            assert torch.equal(value, trained[name])

    world.run(run)


def train_and_save(folder: str, microbatches: int) -> None:
    pipeline = Pipeline(model_of(4), balance=[1, 3], microbatches=microbatches, loss=loss_of, group=dist.group.WORLD)
    optimizer = torch.optim.Adam(pipeline.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        pipeline.step(*batch_of(4, seed))
        optimizer.step()
    model, state = get_state_dict(pipeline, optimizer)
    checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def load_and_train(folder: str) -> None:
    """Compare with training without a break: with another number of ranks, and other stages."""
    plain, model = model_of(4), model_of(4, seed=1)
    pipeline = Pipeline(model, balance=[2, 1, 1], microbatches=2, loss=loss_of, group=dist.group.WORLD)
    optimizer = torch.optim.Adam(pipeline.parameters())
    of_model, state = get_state_dict(pipeline, optimizer)
    checkpoint.load({"model": of_model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(pipeline, optimizer, model_state_dict=of_model, optim_state_dict=state)
    pipeline.step(*batch_of(4, 3))
    optimizer.step()
    of_plain = torch.optim.Adam(plain.parameters())
    for seed in range(4):
        of_plain.zero_grad()
        x, y = batch_of(4, seed)
        loss_of(plain(x), y).backward()
        of_plain.step()
    expected = plain.state_dict()
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.world
def test_checkpoint_is_loaded_with_other_ranks(tmp_path: Path) -> None:
    with World(2) as world:
        world.run(train_and_save, str(tmp_path), 2)
    with World(3) as world:
        world.run(load_and_train, str(tmp_path))


# ---- errors


class BreakingError(Exception):
    pass


class Breaking(nn.Module):
    """Raises in forward or in backward where a micro-batch has the number 7 in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        is_bad = bool((x == 7).any())
        if is_bad and self.kind == "forward":
            raise BreakingError("forward broke")
        y: Tensor = self.layer(x)
        if is_bad and self.kind == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> None:
        raise BreakingError("backward broke")


class Keep(nn.Module):
    """Passes its input on, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def run_into_error(kind: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for at in range(size):
        stages = [Breaking(kind) if s == at else Keep() for s in range(size)]
        pipeline = Pipeline(stages, microbatches=4, loss=loss_of, group=dist.group.WORLD)
        for bad in range(4):
            x, y = batch_of(8)
            x[2 * bad] = 7
            if rank == at:
                with pytest.raises(BreakingError, match=f"{kind} broke"):
                    pipeline.step(x, y)
            else:
                with pytest.raises(RemoteError, match=f"(?s)rank {at} .*BreakingError: {kind} broke") as caught:
                    pipeline.step(x, y)
                assert caught.value.worker == f"rank {at}"
                assert "in _fail" in caught.value.remote_traceback or kind == "forward"
            pipeline.zero_grad()
            pipeline.step(*batch_of(8))
            assert all(parameter.grad is not None for parameter in pipeline.parameters())
        pipeline.close()


@pytest.mark.world(3)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_error_of_rank_is_raised_on_all(kind: str, world: World) -> None:
    world.run(run_into_error, kind)


@pytest.mark.world(2)
def test_bad_argument_of_rank_is_raised_on_all(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        pipeline = Pipeline([Keep(), Keep()], microbatches=2, loss=loss_of, group=dist.group.WORLD)
        x, y = batch_of(4)
        for batch, target, culprit in ((x[0, 0], y, 0), (x, y[:3], 1)):
            with pytest.raises(ValueError if rank == culprit else RemoteError, match=r"rows|dimension"):
                pipeline.step(batch, target)
        with pytest.raises(ValueError, match="has 0 rows"):
            pipeline.step(x[:0], y)
        if rank == 0:
            with torch.no_grad(), pytest.raises(RemoteError, match=r"rank 1 .* in a step .* stage 0 in a call"):
                pipeline(x)
        else:
            with pytest.raises(InvalidStateError, match="in a step of the pipeline"):
                pipeline.step(x, y)
        pipeline.step(x, y)

    world.run(run)


@pytest.mark.world(2)
def test_ranks_make_same_pipeline(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        for settings in ({"microbatches": 2 + rank}, {"microbatches": 2, "checkpoint": ["never", "always"][rank]}):
            with pytest.raises(ValueError, match="rank 0 makes a pipeline of"):
                Pipeline([Keep(), Keep()], loss=loss_of, group=dist.group.WORLD, **settings)
        with pytest.raises(ValueError, match="does not divide" if rank else "rank 1 .* does not divide"):
            Pipeline(model_of(3), balance=[2, 1 + rank], microbatches=2, loss=loss_of, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="2 devices, but each rank of a group runs one row"):
            Pipeline([Keep(), Keep()], ["cpu"] * 2, microbatches=2, loss=loss_of, group=dist.group.WORLD)
        Pipeline([Keep(), Keep()], microbatches=2, loss=loss_of, group=dist.group.WORLD).step(*batch_of(4))

    world.run(run)


class Send(nn.Module):
    """Sends a value of a kind that cannot go to another process in its first call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        kind, self.kind = self.kind, ""
        y = x + self.bias
        values: dict[str, Callable[[], Any]] = {
            "": lambda: (y, None),
            "lambda": lambda: (y, lambda: None),
            "sparse": lambda: (y, torch.eye(2).to_sparse()),
            "quantized": lambda: (y, torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)),
            "subclass": lambda: (y, Marked(x)),
            "meta": lambda: (y, torch.ones(2, device="meta")),
        }
        return values[kind]()


class Marked(torch.Tensor):
    pass


class Take(nn.Module):
    """Takes the first tensor of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = Keep()

    def forward(self, given: tuple[Tensor, Any]) -> Tensor:
        taken: Tensor = self.keep(given[0])
        return taken


@pytest.mark.world(2)
@pytest.mark.filterwarnings("ignore")
def test_value_that_cannot_be_sent_is_error_on_all(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        for kind in ("lambda", "sparse", "quantized", "subclass", "meta"):
            pipeline = Pipeline([Send(kind), Take()], microbatches=2, loss=loss_of, group=dist.group.WORLD)
            with pytest.raises(
                RemoteError if rank else (TypeError, AttributeError), match=r"lambda|cannot go to a stage"
            ):
                pipeline.step(*batch_of(4))
            pipeline.zero_grad()
            pipeline.step(*batch_of(4))
            pipeline.close()
            with pytest.raises(InvalidStateError, match="is closed"):
                pipeline.step(*batch_of(4))

    world.run(run)


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.cat([x, x], 1)
        return wide, wide[:, 1::2], wide[:, ::2]


class Change(nn.Module):
    """Changes one of the tensors in place."""

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        wide, odd, even = given
        return (even.mul_(2).sum(1) + odd.sum(1) + wide.sum(1))[:, None]


@pytest.mark.world(2)
def test_tensors_that_share_memory_share_it_on_other_ranks(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        pipeline = Pipeline([Views(), Change()], microbatches=2, loss=loss_of, group=dist.group.WORLD)
        with pytest.raises(RuntimeError, match="changes a tensor in place that shares memory"):
            pipeline.step(*batch_of(4))
        assert rank in (0, 1)

    world.run(run)


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.world(2)
def test_error_without_text_is_raised_on_all(world: World) -> None:
    def run() -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            raise SilentError

        rank = dist.get_rank()
        pipeline = Pipeline([Keep(), Keep()], microbatches=2, loss=loss, group=dist.group.WORLD)
        for _ in range(2):
            with pytest.raises(SilentError if rank else RemoteError):
                pipeline.step(*batch_of(4))

    world.run(run)


@pytest.mark.world(2)
def test_arguments_are_refused_on_all(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        modes: list[Any] = ["never", "sometimes"]
        with pytest.raises(ValueError, match="sometimes"):
            Pipeline([Keep(), Keep()], microbatches=2, loss=loss_of, checkpoint=modes[rank], group=dist.group.WORLD)
        pipeline = Pipeline([Keep(), Keep()], microbatches=2, loss=loss_of, group=dist.group.WORLD)
        with torch.set_grad_enabled(rank == 0), pytest.raises(RuntimeError, match=r"outside of no_grad"):
            pipeline.step(*batch_of(4))
        with pytest.raises(RemoteError if rank else ValueError, match="timeout"):
            pipeline.step(*batch_of(4), timeout=5.0 if rank else -1.0)
        pipeline.step(*batch_of(4), timeout=30.0)

    world.run(run)


FORKING = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from cudafuture import InvalidStateError
from cudafuture.pipeline import Pipeline

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
pipeline = Pipeline(stages, microbatches=2, loss=nn.functional.mse_loss, group=dist.group.WORLD)
pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
child = os.fork()
if child == 0:
    try:
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
    except InvalidStateError:
        pipeline.close()
        del pipeline
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
pipeline.close()
"""


@pytest.mark.slow
def test_forked_process_leaves_pipeline_alone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as scope:
        ranks = [scope.enter_context(Child(FORKING, str(rank), str(tmp_path / "store"))) for rank in range(2)]
        for rank in ranks:
            assert (rank.end(), rank.errors()) == (0, "")


@pytest.mark.world(2)
def test_closed_pipelines_leave_no_connection(world: World) -> None:
    def run() -> None:
        def count() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        for turn in range(12):
            pipeline = Pipeline([Keep(), Keep()], microbatches=2, loss=loss_of, group=dist.group.WORLD)
            pipeline.step(*batch_of(4))
            pipeline.close()
            del pipeline
            if turn == 1:
                before = count()
        deadline = time.monotonic() + PATIENCE  # the threads that receive end after the other rank has closed
        while count() > before + 12 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert count() <= before + 12

    world.run(run)


ENDING = """
import sys, torch, torch.distributed as dist
from torch import nn
from cudafuture.pipeline import Pipeline

rank, size, store, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
stages = [nn.Linear(64, 64) for _ in range(size)]
pipeline = Pipeline(stages, microbatches=4, loss=nn.functional.mse_loss, group=dist.group.WORLD)
for _ in range(2):
    pipeline.step(torch.ones(8, 64), torch.ones(8, 64))
if how == "close":
    pipeline.close()
if how != "nothing":
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "destroy", "nothing"])
def test_ranks_exit_without_a_word(how: str, tmp_path: Path) -> None:
    for turn in range(soak_count(20)):
        with contextlib.ExitStack() as scope:
            arguments = ["3", str(tmp_path / str(turn)), how]
            ranks = [scope.enter_context(Child(ENDING, str(rank), *arguments)) for rank in range(3)]
            for rank in ranks:
                assert (rank.end(), rank.errors()) == (0, "")


# ---- lost ranks


class Lose(nn.Module):
    """Sends a signal to its own process in one cell of the second step."""

    def __init__(self, cell: str, sent: signal.Signals) -> None:
        super().__init__()
        self.cell, self.sent = cell, sent
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        if self.calls == 6:
            if self.cell == "forward":
                self._send()
            else:
                y.register_hook(lambda _: self._send())
        return y

    def _send(self) -> None:
        os.kill(os.getpid(), self.sent)


def lose_one(rank: int, lost: int, cell: str, sent: signal.Signals, timeout: float) -> str:
    size = dist.get_world_size()
    group = short_group(timeout)
    stages = [Lose(cell, sent) if s == lost else Keep() for s in range(size)]
    pipeline = Pipeline(stages, microbatches=4, loss=loss_of, group=group)
    pipeline.step(*batch_of(8))
    dist.barrier()
    try:
        pipeline.step(*batch_of(8))
    except (WorkerLostError, TimeoutError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("the step ended")
    with pytest.raises(InvalidStateError, match="cannot go on together"):
        pipeline.step(*batch_of(8))
    pipeline.close()
    survivors = [r for r in range(size) if r != lost]
    others = ProcessGroup().new_group(survivors)
    again = Pipeline([Keep() for _ in survivors], microbatches=2, loss=loss_of, group=others)
    assert (again.step(*batch_of(8)) is None) == (rank != survivors[-1])
    again.close()
    return text


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("cell", ["forward", "backward"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_killed_rank_is_named_on_all(lost: int, cell: str) -> None:
    results = run_ranks(3, lose_one, lost, cell, signal.SIGKILL, 40.0, lost=[lost])
    assert [result for rank, result in enumerate(results) if rank != lost and f"rank {lost}" not in result] == []
    assert {result.split(":")[0] for rank, result in enumerate(results) if rank != lost} == {"WorkerLostError"}


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_stopped_rank_is_named_on_all(lost: int) -> None:
    results = run_ranks(3, lose_one, lost, "backward", signal.SIGSTOP, 6.0, lost=[lost])
    for rank, result in enumerate(results):
        if rank != lost:
            assert f"rank {lost} does not answer: it is stopped, or dead" in result

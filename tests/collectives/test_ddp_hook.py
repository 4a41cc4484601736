"""ddp_comm_hook: it gives the gradients that torch's own hooks give, and errors come out of backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.testing import World

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

Function = Callable[[Any, dist.GradBucket], CUDAFuture[Tensor]]
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]

STEPS = 4


class OwnError(Exception):
    """Of the function that makes the hook."""


def average(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return cfd.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group)


def compress(dtype: torch.dtype, group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    buffer = bucket.buffer()
    compressed = buffer.to(dtype).div_(dist.get_world_size(group))
    return cfd.all_reduce(compressed, group=group).then(lambda reduced: buffer.copy_(reduced.value()))


def scatter_then_gather(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    size = dist.get_world_size(group)
    buffer = bucket.buffer().div_(size)
    padded = nn.functional.pad(buffer, (0, -buffer.numel() % size))
    shard = torch.empty(padded.numel() // size)
    reduced = cfd.reduce_scatter_tensor(shard, padded, group=group)
    whole = reduced.then_async(lambda part: cfd.all_gather_into_tensor(padded, part.value(), group=group))
    return whole.then(lambda gathered: buffer.copy_(gathered.value()[: buffer.numel()]))


def bf16_of_torch(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Compress like torch's hook, under this name: DDP refuses one that is called bf16_compress_hook without NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def make_model(hook: Hook | None, state: Any = None, **options: Any) -> DistributedDataParallel:
    """Make a model of several buckets, the last of which has an odd number of elements."""
    torch.manual_seed(0)
    sizes = [17, 31, 32, 32, 3]
    layers = [nn.Sequential(nn.Linear(i, o, bias=i != 17), nn.Tanh()) for i, o in itertools.pairwise(sizes)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return a loss that differs on every rank, and in every step."""
    images = torch.randn(5, 17, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    loss: Tensor = model(images).square().sum()
    return loss


def gradients(hook: Hook | None, state: Any = None, **options: Any) -> list[list[Tensor]]:
    """Train; return the gradients of all parameters in all steps."""
    model = make_model(hook, state, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    assert len(buckets) == 3, buckets
    return seen


def expect_equal(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(other) == 7
        assert all(map(torch.equal, mine, other)), f"in step {step}"


def expect_the_group_to_be_usable() -> None:
    """Check that nothing is left in flight for the next collective to meet, and that DDP can start again."""
    total = torch.full((3,), float(dist.get_rank()))
    assert cfd.all_reduce(total).wait().tolist() == [sum(range(dist.get_world_size()))] * 3
    expect_equal(gradients(cfd.ddp_comm_hook(scatter_then_gather)), gradients(default_hooks.allreduce_hook))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("fn", "theirs"),
    [
        pytest.param(average, default_hooks.allreduce_hook, id="average"),
        pytest.param(average, None, id="average-no-hook"),
        pytest.param(scatter_then_gather, default_hooks.allreduce_hook, id="two-steps"),
        pytest.param(functools.partial(compress, torch.float16), default_hooks.fp16_compress_hook, id="fp16"),
        pytest.param(functools.partial(compress, torch.bfloat16), bf16_of_torch, id="bf16"),
    ],
)
def test_gradients_equal_torch_hook_bitwise(world: World, fn: Function, theirs: Hook | None) -> None:
    def check() -> None:
        expect_equal(gradients(cfd.ddp_comm_hook(fn)), gradients(theirs))

    world.run(check)


@pytest.mark.world(2)
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_hook_works_with_ddp_options(world: World, option: str) -> None:
    def check() -> None:
        ours = gradients(cfd.ddp_comm_hook(scatter_then_gather), **{option: True})
        expect_equal(ours, gradients(default_hooks.allreduce_hook, **{option: True}))

    world.run(check)


@pytest.mark.world(3)
def test_padded_shards_match_up_to_summation(world: World) -> None:
    def check() -> None:
        sizes = set()

        def noting(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
            sizes.add(bucket.buffer().numel() % 3)
            return scatter_then_gather(group, bucket)

        ours = gradients(cfd.ddp_comm_hook(noting))
        torch.testing.assert_close(ours, gradients(default_hooks.allreduce_hook))
        assert sizes & {1, 2}, "nothing was padded"

    world.run(check)


@pytest.mark.world(2)
def test_hook_gets_registered_state(world: World) -> None:
    def check() -> None:
        group = cfd.new_group()
        seen = []

        def noting(state: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
            seen.append(state)
            return average(state, bucket)

        expect_equal(gradients(cfd.ddp_comm_hook(noting), group.group), gradients(default_hooks.allreduce_hook))
        assert seen
        assert all(state is group.group for state in seen)

    world.run(check)


class Averaging:
    """A function that has no name."""

    def __call__(self, state: Any, grads: Any) -> Any:
        return average(state, grads)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (average, "average"),
        (lambda state, grads: average(state, grads), "<lambda>"),
        (functools.partial(compress, torch.float16), "hook"),
        (Averaging(), "hook"),
    ],
)
def test_register_comm_hook_accepts_any_function(world: World, fn: Function, name: str) -> None:
    def check() -> str:
        model = make_model(cfd.ddp_comm_hook(fn))
        loss_of(model, 0).backward()
        hook_name: str = model._get_ddp_logging_data()["comm_hook"]
        return hook_name

    assert world.run(check) == [name]


def test_decorator_keeps_name_and_docstring() -> None:
    @cfd.ddp_comm_hook
    def sum_bucket(state: None, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
        """Return a future."""
        raise NotImplementedError

    assert (sum_bucket.__name__, sum_bucket.__qualname__, sum_bucket.__doc__) == (
        "sum_bucket",
        "sum_bucket",
        "Return a future.",
    )


def fail(done: CUDAFuture[Any]) -> Any:
    done.value()
    raise OwnError("the original message")


def failing_callback(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return average(group, bucket).then(fail)


def failing_second_step(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return average(group, bucket).then_async(fail)


def failing_after_the_second_step(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return scatter_then_gather(group, bucket).then(fail)


def failing_function(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    raise OwnError("the original message")


def return_failed(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
    return CUDAFuture.failed(OwnError("the original message"))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "fn",
    [failing_callback, failing_second_step, failing_after_the_second_step, failing_function, return_failed],
)
def test_backward_raises_original_error(world: World, fn: Function) -> None:
    def check() -> None:
        model = make_model(cfd.ddp_comm_hook(fn))
        with pytest.raises(OwnError, match=r"^the original message"):
            loss_of(model, 0).backward()
        expect_the_group_to_be_usable()

    world.run(check)


@pytest.mark.world(2)
def test_backward_suggests_then_async(world: World) -> None:
    def nest(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Any]:
        return average(group, bucket).then(lambda done: average(group, bucket))

    def check() -> None:
        model = make_model(cfd.ddp_comm_hook(nest))
        with pytest.raises(TypeError, match=r"use then_async\(\)"):
            loss_of(model, 0).backward()

    world.run(check)


@pytest.mark.world(2)
def test_one_bucket_may_fail_later(world: World) -> None:
    def check() -> None:
        step = 0

        def fail_later(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
            averaged = average(group, bucket)
            return averaged.then(fail) if step == 2 and bucket.index() == 1 else averaged

        model = make_model(cfd.ddp_comm_hook(fail_later))
        for step in range(2):
            loss_of(model, step).backward()
        step = 2
        with pytest.raises(OwnError, match=r"^the original message"):
            loss_of(model, step).backward()
        expect_the_group_to_be_usable()

    world.run(check)


@pytest.mark.world(2)
def test_one_rank_may_fail_alone(world: World) -> None:
    def check() -> None:
        model = make_model(cfd.ddp_comm_hook(failing_callback if dist.get_rank() == 1 else average))
        if dist.get_rank() == 1:
            with pytest.raises(OwnError):
                loss_of(model, 0).backward()
        else:
            loss_of(model, 0).backward()
        expect_the_group_to_be_usable()

    world.run(check)


@pytest.mark.world(2)
def test_backward_names_refused_collective(world: World) -> None:
    def reduce_bits(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
        return cfd.all_reduce(bucket.buffer(), dist.ReduceOp.BAND, group)  # of bits, which floats have not

    def check() -> None:
        model = make_model(cfd.ddp_comm_hook(reduce_bits))
        with pytest.raises(cfd.CollectiveError, match=r"^all_reduce #\d+ on group '0', rank \d of 2 of float32") as e:
            loss_of(model, 0).backward()
        assert "BAND" in str(e.value)
        expect_the_group_to_be_usable()

    world.run(check)


@pytest.mark.world(2)
@pytest.mark.parametrize("what", ["None", "a tensor", "a future of torch's"])
def test_hook_without_future_is_type_error(world: World, what: str) -> None:
    def returning(group: Any, bucket: dist.GradBucket) -> Any:
        if what == "None":
            return None
        return bucket.buffer() if what == "a tensor" else default_hooks.allreduce_hook(group, bucket)

    def check() -> None:
        model = make_model(cfd.ddp_comm_hook(returning))
        with pytest.raises(TypeError, match=r"the function of ddp_comm_hook\(\) returns a CUDAFuture, not "):
            loss_of(model, 0).backward()
        expect_the_group_to_be_usable()

    world.run(check)

"""GPipe: gradients of the plain model under every setting, errors, and what torchgpipe's programs rely on."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import importlib
import inspect
import io
import itertools
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudafuture.compat import torchgpipe
from cudafuture.compat.torchgpipe.batchnorm import DeferredBatchNorm
from cudafuture.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from cudafuture.compat.torchgpipe.gpipe import BalanceError, GPipe
from cudafuture.compat.torchgpipe.skip import Namespace, pop, skippable, stash
from cudafuture.testing import sim

MODES = ["always", "except_last", "never"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Module that stashes a product of its parameter, whose gradient then shows the order of backward passes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.linear(x))
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


class Split(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.sin(), torch.arange(len(x), device=x.device), x.cos()


class Merge(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        sin, numbers, cos = parts
        return sin * cos + (numbers >= 0).to(sin.dtype).unsqueeze(1)


def with_skips() -> nn.Sequential:
    ns = Namespace()
    return nn.Sequential(
        Stash(4),
        nn.Linear(4, 5),
        Stash(5).isolate(ns),  # type: ignore[operator]
        nn.Tanh(),
        Pop().isolate(ns),  # type: ignore[operator]
        nn.Linear(5, 4),
        Pop(),
        nn.Linear(4, 2),
    )


def with_tuples() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), Split(), Merge(), nn.ReLU(inplace=True), nn.Linear(6, 2))


def with_nothing_but_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


BALANCES = {5: [[5], [2, 3], [1, 2, 2]], 6: [[6], [3, 3], [1, 2, 3]], 8: [[8], [4, 4], [1, 3, 4]]}


def compare_with_plain(
    make: Callable[[], nn.Sequential],
    devices: list[str],
    *,
    balance: list[int],
    chunks: int,
    checkpoint: str,
    dtype: torch.dtype,
    needs_gradient: bool,
    rows: tuple[int, ...] = (7, 8),
) -> None:
    torch.manual_seed(chunks)
    plain = make().to(dtype)
    model = GPipe(copy.deepcopy(plain), balance, devices, chunks=chunks, checkpoint=checkpoint)
    for number in rows:
        x, weight = torch.randn(number, 4, dtype=dtype), torch.randn(number, 2, dtype=dtype)
        mine = x.clone().to(devices[0]).requires_grad_(needs_gradient)
        theirs = x.detach().clone().requires_grad_(needs_gradient)
        model.zero_grad()
        plain.zero_grad()
        output = model(mine)
        (output * weight.to(output.device)).sum().backward()
        expected = torch.cat([plain(chunk) for chunk in theirs.chunk(chunks)])
        (expected * weight).sum().backward()
        assert output.device == model.devices[-1]
        assert torch.equal(output.cpu(), expected)
        for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert torch.equal(parameter.grad.cpu(), reference.grad)
        if needs_gradient:
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad.cpu(), theirs.grad)


def expect_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert torch.equal(parameter.grad, reference.grad)


SETTINGS = list(itertools.product(MODES, [1, 2, 3, 4], [1, 2, 3]))


@pytest.mark.parametrize("make", [with_nothing_but_layers, with_skips, with_tuples])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpu_gradients_equal_plain_model_bitwise(make: Callable[[], nn.Sequential], dtype: torch.dtype) -> None:
    for number, (checkpoint, chunks, partitions) in enumerate(SETTINGS):
        compare_with_plain(
            make,
            ["cpu"] * partitions,
            balance=BALANCES[len(make())][partitions - 1],
            chunks=chunks,
            checkpoint=checkpoint,
            dtype=dtype,
            needs_gradient=(number % 2 == 0) == (dtype == torch.float32),
        )


@pytest.mark.parametrize("make", [with_nothing_but_layers, with_skips, with_tuples])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.sim(devices=3, seed=0)
def test_accelerator_gradients_equal_plain_model_bitwise(make: Callable[[], nn.Sequential], turn: int) -> None:
    for number, (checkpoint, chunks, partitions) in enumerate(SETTINGS):
        sim.enable(devices=3, seed=number, schedule="lazy" if (number + turn) % 2 else "jitter", detect=True)
        compare_with_plain(
            make,
            ["sim:2", "sim:0", "sim:1"][:partitions],
            balance=BALANCES[len(make())][partitions - 1],
            chunks=chunks,
            checkpoint=checkpoint,
            dtype=torch.float32 if turn else torch.float64,
            needs_gradient=number % 3 == 0,
            rows=(7 + turn,),
        )
        sim.synchronize()
        assert not sim.races()


@pytest.mark.parametrize("devices", [["sim:0", "sim:0", "sim:1"], ["sim:0", "sim:1", "sim:0"], ["cpu", "sim:1", "cpu"]])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.sim(devices=2, schedule="lazy", seed=1)
def test_partitions_may_share_device_or_cpu(devices: list[str], checkpoint: str) -> None:
    compare_with_plain(
        with_skips,
        devices,
        balance=[1, 3, 4],
        chunks=3,
        checkpoint=checkpoint,
        dtype=torch.float64,
        needs_gradient=True,
    )
    sim.synchronize()
    assert not sim.races()


class Delay(nn.Module):
    """A layer whose device takes its time, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _Delay.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sim.sleep(ms=1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        sim.sleep(ms=1)
        return grad * 1


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.sim(devices=2, schedule="free")
def test_partitions_work_side_by_side(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Delay(), Delay(), nn.Linear(4, 4))
    model = GPipe(layers, [2, 2], ["sim:0", "sim:1"], chunks=8, checkpoint=checkpoint)
    x = torch.ones(16, 4, device="sim:0")
    sim.synchronize()
    begin = sim.clock()
    model(x).sum().backward()
    sim.synchronize()
    milliseconds = (sim.clock() - begin) * 1e3
    # Nine cycles forward and nine back. Seven or eight micro-batches are computed again on the last device, while the
    # gradients of the ones before cross. A cycle takes a millisecond; what is computed twice and the rest 0.5 together.
    assert milliseconds < {"never": 18, "except_last": 18 + 7, "always": 18 + 8}[checkpoint] + 0.9


@pytest.mark.sim(devices=2, schedule="lazy")
def test_work_of_caller_is_ordered() -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], ["sim:0", "sim:1"], chunks=2)
    side = [torch.Stream(device="sim:0"), torch.Stream(device="sim:1")]
    for index, stream in enumerate(side):
        stream.wait_stream(torch.accelerator.current_stream(index))
    with side[0], side[1]:
        sim.sleep(ms=5, stream=side[0])
        x = torch.ones(4, 4, device="sim:0")
        output = model(x)
        output.sum().backward()
        assert torch.isfinite(output).all().item()
        assert all(torch.isfinite(p.grad).all().item() for p in model.parameters())  # type: ignore[arg-type]
    sim.synchronize()
    assert not sim.races()


@pytest.mark.sim
def test_input_is_copied_to_first_partition(sim: Any) -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], ["sim:0"], chunks=2)
    x = torch.ones(4, 2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "cpu"


# ---- errors


class FailError(Exception):
    pass


class Fails(nn.Module):
    def __init__(self, message: str = "forward", in_backward: bool = False) -> None:
        super().__init__()
        self.message, self.in_backward, self.is_on = message, in_backward, True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and not self.in_backward:
            raise FailError(self.message)
        return _Fails.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fails) -> Tensor:
        ctx.layer = layer
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.layer.is_on:
            raise FailError(ctx.layer.message)
        return grad, None


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.sim(devices=3, schedule="jitter")
def test_error_keeps_traceback_and_next_step_works(device: str, place: int, in_backward: bool, checkpoint: str) -> None:
    layers: list[Any] = [nn.Linear(4, 4) for _ in range(3)]
    layers.insert(place + 1, Fails(in_backward=in_backward))
    balance = [2 if j == place else 1 for j in range(3)]
    devices = [f"sim:{j}" for j in range(3)] if device == "sim" else ["cpu"] * 3
    model = GPipe(nn.Sequential(*layers), balance, devices, chunks=3, checkpoint=checkpoint)
    x = torch.ones(6, 4, device=devices[0])
    with pytest.raises(FailError) as caught:
        model(x).sum().backward()
    functions = [entry.name for entry in caught.traceback]
    assert functions[-1] == ("backward" if in_backward else "forward")
    assert Path(caught.traceback[-1].path).name == "test_gpipe.py"
    layers[place + 1].is_on = False
    model.zero_grad()
    plain = nn.Sequential(*copy.deepcopy(layers)).cpu()
    model(x).sum().backward()
    torch.cat([plain(chunk) for chunk in x.cpu().chunk(3)]).sum().backward()
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert torch.equal(parameter.grad.cpu(), reference.grad)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes are of Python 3.11")
def test_further_errors_of_cycle_are_notes() -> None:
    layers = nn.Sequential(Fails("one"), Fails("two"))
    layers[0].is_on = False  # type: ignore[assignment]
    turn_on = layers[0].register_forward_hook(lambda *_: setattr(layers[0], "is_on", True))
    model = GPipe(layers, [1, 1], ["cpu", "cpu"], chunks=2)
    with pytest.raises(FailError, match="one") as caught:
        model(torch.ones(2))
    assert caught.value.__notes__ == ["also in partition 1, micro-batch 0: FailError: two"]  # type: ignore[attr-defined]
    turn_on.remove()


def test_base_exception_in_partition_is_raised() -> None:
    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        GPipe(nn.Sequential(Exits()), [1], ["cpu"])(torch.ones(1))


def test_interrupt_ends_step_only() -> None:
    main = threading.main_thread()
    assert main.ident is not None

    class Interrupts(nn.Module):
        is_on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.is_on:
                signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]
            return x * 1

    layer = Interrupts()
    model = GPipe(nn.Sequential(layer, nn.ReLU()), [1, 1], ["cpu"] * 2, chunks=3)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(3))
    layer.is_on = False
    assert model(torch.ones(3)).tolist() == [1, 1, 1]


def test_partition_without_tensors_is_type_error() -> None:
    class Lists(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x]

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return ()

    with pytest.raises(TypeError, match="expected Tensor, but got list"):
        GPipe(nn.Sequential(Lists()), [1], ["cpu"])(torch.ones(1))
    with pytest.raises(ValueError, match="partition 0, micro-batch 0 returned no tensor"):
        GPipe(nn.Sequential(Nothing()), [1], ["cpu"])(torch.ones(1))


def test_failed_step_leaves_no_activations() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(weakref.ref(y))
            return y

    model = GPipe(nn.Sequential(nn.Linear(1, 1), Look(), Fails()), [2, 1], ["cpu", "cpu"], chunks=2)
    with pytest.raises(FailError):
        model(torch.ones(2, 1))
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


# ---- checkpoints


class Record(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((is_checkpointing(), is_recomputing()))
        return x * 1


@pytest.mark.parametrize(("checkpoint", "computed_again"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_mode_selects_recomputed_micro_batches(checkpoint: str, computed_again: int) -> None:
    record = Record()
    model = GPipe(nn.Sequential(nn.Linear(1, 1), record), [1, 1], ["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    output = model(torch.ones(3, 1))
    assert record.calls == [(True, False)] * computed_again + [(False, False)] * (3 - computed_again)
    output.sum().backward()
    assert record.calls[3:] == [(False, True)] * computed_again


def test_except_last_spares_last_of_fewer_chunks() -> None:
    record = Record()
    model = GPipe(nn.Sequential(nn.Linear(1, 1), record), [2], ["cpu"], chunks=4)
    model(torch.ones(5, 1)).sum().backward()  # three micro-batches
    assert record.calls.count((False, True)) == 2


@pytest.mark.parametrize("without", ["eval", "no_grad", "frozen"])
def test_forward_without_backward_skips_checkpoints(without: str) -> None:
    record = Record()
    model = GPipe(nn.Sequential(nn.Linear(1, 1), record), [2], ["cpu"], chunks=2, checkpoint="always")
    model.train(without != "eval")
    model.requires_grad_(without != "frozen")
    with torch.set_grad_enabled(without != "no_grad"):
        output = model(torch.ones(2, 1))
    assert record.calls == [(False, False)] * 2
    assert output.requires_grad == (without == "eval")


def test_backward_ends_before_next_recomputation() -> None:
    events: list[str] = []

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                events.append(f"again {x[0].item():.0f}")
            y = x * 1
            if y.requires_grad:
                number = x[0].item()
                y.register_hook(lambda _: events.append(f"backward {number:.0f}"))
            return y

    x = torch.arange(3.0, requires_grad=True)
    GPipe(nn.Sequential(Log()), [1], ["cpu"], chunks=3, checkpoint="always")(x).sum().backward()
    assert events == ["again 2", "backward 2", "again 1", "backward 1", "again 0", "backward 0"]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.sim(devices=2)
def test_partitions_run_backward_in_reverse(device: str, checkpoint: str) -> None:
    devices = ["sim:0", "sim:1"] if device == "sim" else ["cpu", "cpu"]
    events: list[tuple[str, int]] = []

    class Log(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            number = int(x.flatten()[0].item())
            weight = self.weight * 1
            if weight.requires_grad:
                weight.register_hook(lambda _: events.append((self.name, number)))
            return x * 1 * weight

    model = GPipe(nn.Sequential(Log("a"), Log("b"), Log("c")), [2, 1], devices, chunks=4, checkpoint=checkpoint)
    model(torch.arange(4.0, device=devices[0])).sum().backward()
    for name in "abc":
        assert [number for who, number in events if who == name] == [3, 2, 1, 0]


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: dict[bool, list[list[bool]]] = {False: [], True: []}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(x)
        self.masks[is_recomputing()].append((y != 0).flatten().tolist())
        return y


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.sim(devices=2, schedule="jitter")
def test_recomputed_dropout_has_same_mask(device: str) -> None:
    devices = ["sim:0", "sim:1"] if device == "sim" else ["cpu", "cpu"]
    masks = [Masks(), Masks()]
    model = GPipe(nn.Sequential(*masks), [1, 1], devices, chunks=4, checkpoint="always")
    x = torch.ones(16, 64, device=devices[0], requires_grad=True)
    output = model(x)
    output.sum().backward()
    for each in masks:
        assert each.masks[True][::-1] == each.masks[False]
        assert len(set(map(tuple, each.masks[False]))) == 4
    assert x.grad is not None
    assert torch.equal(x.grad.cpu() != 0, output.cpu() != 0)


def test_recomputation_keeps_autocast() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return x * 1

    model = GPipe(nn.Sequential(nn.Linear(2, 2), Look()), [2], ["cpu"], checkpoint="always")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.ones(2, 2))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert seen == [(True, torch.bfloat16)] * 2


def test_in_place_partition_can_be_checkpointed() -> None:
    for checkpoint in MODES:
        layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
        plain = copy.deepcopy(layers)
        model = GPipe(layers, [1, 2], ["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            x = torch.randn(4, 2)
            model(x).sum().backward()
            torch.cat([plain(chunk) for chunk in x.chunk(2)]).sum().backward()
            expect_equal_gradients(model, plain)


def test_retained_graph_runs_twice() -> None:
    for checkpoint in MODES:
        model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1], ["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        loss = model(torch.ones(4, 2)).sum()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        loss.backward()
        for parameter, gradient in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)


# ---- BatchNorm


@pytest.mark.parametrize("checkpoint", MODES)
def test_deferred_batch_norm_covers_mini_batch(checkpoint: str) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    model = GPipe(copy.deepcopy(plain), [1, 1], ["cpu"] * 2, chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    assert isinstance(model[0], DeferredBatchNorm)
    for rows in (8, 10, 5):  # five rows are three micro-batches, the last one of a single row
        x = torch.randn(rows, 3, 2)
        model(x).sum().backward()
        plain(x)
    torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(model[0].running_var, plain[0].running_var)
    assert model[0].num_batches_tracked == 3


def test_failed_mini_batch_spares_statistics() -> None:
    fails = Fails()
    model = GPipe(nn.Sequential(nn.BatchNorm1d(3), fails), [1, 1], ["cpu"] * 2, chunks=4, deferred_batch_norm=True)
    with pytest.raises(FailError):
        model(torch.randn(8, 3))
    fails.is_on = False
    model(torch.randn(8, 3))
    assert model[0].num_batches_tracked == 1
    assert model[0].tracked == 0


# ---- what programs rely on


def test_model_behaves_like_sequence() -> None:
    layers = [nn.Linear(1, 1), nn.ReLU(), nn.Tanh()]
    model = GPipe(nn.Sequential(*layers), [1, 2], ["cpu", "cpu", "cpu"])
    assert len(model) == 3
    assert list(model) == layers
    assert [model[i] for i in range(-3, 3)] == layers * 2
    for index in (3, -4):
        with pytest.raises(IndexError):
            model[index]
    assert model.balance == [1, 2]
    assert model.devices == [torch.device("cpu")] * 2
    assert (model.chunks, model.checkpoint) == (1, "except_last")
    assert [len(partition) for partition in model.partitions] == [1, 2]  # type: ignore[arg-type]


def test_empty_model_returns_its_input() -> None:
    x = torch.ones(1)
    assert GPipe(nn.Sequential(), [])(x) is x


def test_state_names_match_torchgpipe() -> None:
    names = {"a": nn.Linear(1, 1, bias=False), "b": nn.ReLU(), "c": nn.Linear(1, 1, bias=False)}
    layers = nn.Sequential()
    for name, layer in names.items():
        layers.add_module(name, layer)
    model = GPipe(layers, [2, 1], ["cpu"] * 2)
    assert list(model.state_dict()) == ["partitions.0.a.weight", "partitions.1.c.weight"]


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("gpipe", "GPipe", "module balance devices chunks checkpoint deferred_batch_norm"),
        ("batchnorm", "DeferredBatchNorm", "num_features eps momentum affine chunks"),
        ("balance", "balance_by_time", "partitions module sample timeout device"),
        ("balance", "balance_by_size", "partitions module input chunks param_scale device"),
        ("checkpoint", "is_checkpointing", ""),
        ("checkpoint", "is_recomputing", ""),
        ("skip", "skippable", "stash pop"),
        ("skip", "stash", "name tensor"),
        ("skip", "pop", "name"),
        ("skip", "verify_skippables", "module"),
        ("skip", "Namespace", ""),
        ("microbatch", "Batch", "value index"),
        ("microbatch", "check", "input"),
        ("microbatch", "scatter", "input chunks"),
        ("microbatch", "gather", "outputs"),
        ("worker", "Task", "stream compute finalize"),
        ("worker", "worker", "in_queue out_queue device grad_mode"),
        ("worker", "spawn_workers", "devices"),
        ("worker", "create_workers", "devices"),
        ("worker", "join_workers", "in_queues out_queues"),
        ("stream", "new_stream", "device"),
        ("stream", "current_stream", "device"),
        ("stream", "default_stream", "device"),
        ("stream", "use_device", "device"),
        ("stream", "use_stream", "stream"),
        ("stream", "get_device", "stream"),
        ("stream", "wait_stream", "source target"),
        ("stream", "record_stream", "tensor stream"),
        ("stream", "is_cuda", "stream"),
        ("stream", "as_cuda", "stream"),
    ],
)
def test_names_and_arguments_match_peers(module: str, name: str, arguments: str) -> None:
    found = getattr(importlib.import_module(f"cudafuture.compat.torchgpipe.{module}"), name)
    assert list(inspect.signature(found).parameters) == arguments.split()


def test_page_lists_names_of_each_module() -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from-torchgpipe.md"
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    found = {module.rpartition(".")[2]: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    package = torchgpipe.__name__
    modules = [
        torchgpipe,
        *(importlib.import_module(f"{package}.{each.name}") for each in iter_modules(torchgpipe.__path__)),
    ]
    names = {
        module.__name__.rpartition(".")[2]: {
            n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)
        }
        for module in modules
    }
    assert {module: listed for module, listed in found.items() if module in names} == names


def test_model_copies_and_pickles_after_step() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ["cpu"] * 2, chunks=2)
    x = torch.ones(2, 2)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


@pytest.mark.sim(devices=2)
def test_accelerator_model_copies_after_step() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    assert model.devices == [torch.device("sim", 0), torch.device("sim", 1)]
    x = torch.ones(2, 2, device="sim:0")
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x).cpu(), expected.cpu())


@pytest.mark.sim
def test_devices_may_be_numbers(sim: Any) -> None:
    assert GPipe(nn.Sequential(nn.ReLU()), [1], [0]).devices == [torch.device("sim", 0)]
    assert GPipe(nn.Sequential(nn.ReLU()), [1], ["sim"]).devices == [torch.device("sim", 0)]


def test_cpu_is_default_without_accelerator() -> None:
    assert GPipe(nn.Sequential(nn.ReLU()), [1]).devices == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "a balance is required"),
        ({"balance": [2]}, BalanceError, r"the balance \[2\] is for 2 layers; the model has 1.*balance_by_time"),
        ({"balance": [0, 1]}, BalanceError, "at least one layer"),
        ({"balance": [1], "devices": []}, IndexError, "1 partitions need as many devices; there are 0"),
        ({"balance": [1], "chunks": 0}, ValueError, "chunks must be at least 1, not 0"),
        ({"balance": [1], "chunks": -1}, ValueError, "chunks must be at least 1"),
        ({"balance": [1], "checkpoint": "sometimes"}, ValueError, "'except_last', 'never', not 'sometimes'"),
    ],
)
def test_wrong_argument_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GPipe(nn.Sequential(nn.ReLU()), **arguments)


def test_unsplittable_model_is_refused() -> None:
    shared = nn.Linear(1, 1)
    tied = nn.Linear(1, 1)
    tied.weight = shared.weight
    with pytest.raises(TypeError, match=r"an nn\.Sequential, not a ModuleList"):
        GPipe(nn.ModuleList([shared]), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a layer is in the model twice"):
        GPipe(nn.Sequential(shared, shared), [1, 1])
    with pytest.raises(ValueError, match="'0' and '1' share a parameter or a buffer, which cannot lie on two devices"):
        GPipe(nn.Sequential(shared, tied), [1, 1], ["cpu", "meta"])
    with pytest.raises(TypeError, match="stashes and pops do not match"):
        GPipe(nn.Sequential(Pop()), [1])


@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2]])
@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_on_device_may_share_parameter(balance: list[int], checkpoint: str) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).double()
    plain[2].weight = plain[0].weight
    model = GPipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), chunks=2, checkpoint=checkpoint)
    assert model[0].weight is model[2].weight
    x = torch.randn(5, 3, dtype=torch.float64)
    plain(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_model_refuses_move_but_changes_dtype() -> None:
    model = GPipe(nn.Sequential(nn.Linear(1, 1)), [1], ["cpu"])
    moves: list[Callable[[], object]] = [
        model.cuda,
        model.cpu,
        lambda: model.to("cpu"),
        lambda: model.to(0),
        lambda: model.to(device="cpu"),
        lambda: model.to(torch.device("cpu"), torch.float64),
        lambda: model.to(torch.ones(1)),
    ]
    for move in moves:
        with pytest.raises(TypeError, match="a GPipe is not moved"):
            move()
    assert model.to(torch.float64) is model
    assert model[0].weight.dtype == torch.float64
    assert model.half()[0].weight.dtype == torch.float16


@pytest.mark.parametrize("input", [[torch.ones(1)], {"a": torch.ones(1)}, (torch.ones(1), 2)])
def test_non_tensor_input_is_refused(input: Any) -> None:
    with pytest.raises(TypeError, match="expected Tensor"):
        GPipe(nn.Sequential(nn.ReLU()), [1], ["cpu"])(input)


def test_empty_or_uneven_input_is_refused() -> None:
    model = GPipe(nn.Sequential(nn.Identity()), [1], ["cpu"], chunks=2)
    with pytest.raises(ValueError, match="at least one tensor"):
        model(())
    with pytest.raises(ValueError, match="same number of rows"):
        model((torch.ones(2), torch.ones(1)))


def test_chunks_and_checkpoint_may_change() -> None:
    record = Record()
    model = GPipe(nn.Sequential(nn.Linear(1, 1), record), [1, 1], ["cpu"] * 2)
    model.chunks, model.checkpoint = 4, "always"
    model(torch.ones(4, 1))
    assert record.calls == [(True, False)] * 4


def test_integers_can_be_input() -> None:
    for checkpoint in MODES:
        plain = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
        model = GPipe(copy.deepcopy(plain), [1, 1], ["cpu"] * 2, chunks=3, checkpoint=checkpoint)
        ids = torch.arange(9)
        model(ids).sum().backward()
        torch.cat([plain(chunk) for chunk in ids.chunk(3)]).sum().backward()
        expect_equal_gradients(model, plain)


def test_inference_mode_runs() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), Stash(2), Pop()), [1, 1, 1], ["cpu"] * 3, chunks=2)
    with torch.inference_mode():
        assert model(torch.ones(4, 2)).is_inference()


# ---- several at once


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_pipeline_may_be_layer_of_another(outer: str, inner: str) -> None:
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))
    plain: Any = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(parts), nn.Tanh()).double()
    nested = GPipe(copy.deepcopy(plain[1]), [1, 2], ["cpu"] * 2, chunks=2, checkpoint=inner)
    layers = nn.Sequential(copy.deepcopy(plain[0]), nested, nn.Tanh())
    model = GPipe(layers, [1, 2], ["cpu"] * 2, chunks=2, checkpoint=outer)
    x = torch.randn(8, 4, dtype=torch.float64)
    model(x).sum().backward()
    plain(x).sum().backward()
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)


def test_two_pipelines_run_at_once() -> None:
    barrier = threading.Barrier(2, timeout=30)
    results: dict[int, list[bool]] = {}

    def train(seed: int) -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model = GPipe(copy.deepcopy(plain), [1, 1, 1], ["cpu"] * 3, chunks=3, checkpoint="always")
        x = torch.randn(6, 4)
        barrier.wait()
        model(x).sum().backward()
        torch.cat([plain(chunk) for chunk in x.chunk(3)]).sum().backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        results[seed] = [torch.equal(a.grad, b.grad) for a, b in pairs]  # type: ignore[arg-type]

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [True] * 4, 1: [True] * 4}


@pytest.mark.sim(devices=2, schedule="jitter")
def test_two_pipelines_share_devices() -> None:
    models = [GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2) for _ in range(2)]
    x = torch.ones(4, 4, device="sim:0")
    loss = models[0](x).sum() + models[1](x).sum()
    loss.backward()
    sim.synchronize()
    assert not sim.races()
    assert all(torch.isfinite(p.grad).all().item() for model in models for p in model.parameters())  # type: ignore[arg-type]


def test_step_is_freed_with_output() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(weakref.ref(y))
            return y

    gc.collect()
    gc.disable()
    try:
        for checkpoint in MODES:
            model = GPipe(nn.Sequential(nn.Linear(1, 1), Look(), nn.Tanh()), [2, 1], ["cpu"] * 2, 2, checkpoint)
            output = model(torch.ones(2, 1))
            output.sum().backward()
            del output
            assert [ref() for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.sim(devices=2)
def test_cells_record_only_events_of_copies() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ["sim:0", "sim:1"], chunks=8)
    model.eval()
    x = torch.ones(16, 2, device="sim:0")
    with torch.no_grad():
        model(x)
        sim.synchronize()
        before = sim.statistics()
        model(x)
    # A copy records one on its source, when the tensor may be read, and one on its target, when it may be used.
    assert sim.statistics().recorded - before.recorded == 2 * 2 * 8


def test_model_in_coroutine_does_not_warn() -> None:
    async def call() -> Tensor:
        result: Tensor = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], ["cpu"], chunks=2)(torch.ones(4, 2))
        return result

    assert asyncio.run(call()).shape == (4, 2)  # warnings are errors


def test_inner_cells_have_contextvars_of_their_own() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(variable.get())
            variable.set(variable.get() + 1)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPipe(nn.Sequential(Count()), [1], ["cpu"], chunks=2)

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = self.inner(x)
            return inner

    outer = GPipe(nn.Sequential(Outer()), [1], ["cpu"], chunks=1, checkpoint="always")
    outer(torch.ones(4, 2, requires_grad=True)).sum().backward()
    assert seen == [0, 0, 0, 0]

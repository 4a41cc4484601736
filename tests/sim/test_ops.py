"""Operators on a simulated device: the time at which they run, refusals, copies, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cudafuture.testing import sim

pytestmark = pytest.mark.sim(devices=2, schedule="lazy")

X = torch.arange(12.0).reshape(3, 4) - 5


def runs_later(operation: Callable[[], object]) -> bool:
    """Return whether the operation returns before any work has run: under ``lazy``, whether it waits for nothing."""
    before = sim.statistics()
    operation()
    after = sim.statistics()
    assert after.submitted > before.submitted
    return after.executed == before.executed


# ---- when they run


ASYNCHRONOUS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "a number": lambda x: x * 2.5,
    "a reduction": lambda x: x.sum(dim=1),
    "a product": lambda x: x @ x.t(),
    "two results": lambda x: x.topk(2),
    "a list of results": lambda x: torch.split_copy(x, 2),
    "a list of arguments": lambda x: torch.cat([x, x]),
    "indices": lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)],
    "a mask that chooses": lambda x: torch.where(x > 0, x, 0.0),
    "random": lambda x: x.normal_(),
    "a factory": lambda x: torch.arange(5, device=x.device),
    "a factory of the host's": lambda x: torch.tril_indices(3, 3, device=x.device),
    "layer norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(0),
    "convolution": lambda x: nn.functional.conv1d(x.view(1, 3, 4), torch.ones(2, 3, 3, device=x.device)),
    "many at once": lambda x: torch._foreach_add_([x, x], 1),
    "copy": lambda x: x.clone(),
    "other type": lambda x: x.to(torch.float16),
    "numpy's cumulative maximum": lambda x: x.cummax(0),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_operation_returns_before_it_runs(name: str) -> None:
    x = X.to("sim")
    assert runs_later(lambda: ASYNCHRONOUS[name](x))
    assert runs_later(lambda: ASYNCHRONOUS[name](x))


@pytest.mark.parametrize("operation", [torch.nonzero, torch.unique, lambda x: x[x > 0], lambda x: x[0, 0].item()])
def test_unknown_result_size_is_waited_for(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = X.to("sim").add_(1)
    assert not runs_later(lambda: operation(x))
    torch.testing.assert_close(operation(x), operation(X + 1), check_device=False)


def test_views_are_no_work() -> None:
    x = X.to("sim")
    before = sim.statistics().submitted
    views = [
        x.view(4, 3),
        x.t(),
        x[1:, ::2],
        x.unsqueeze(0).expand(5, 3, 4),
        x.unfold(1, 2, 1),
        x.flatten(),
        x.as_strided((2, 2), (1, 4), 3),
        x.view(torch.int32),
        torch.view_as_complex(x.view(3, 2, 2)),
        x.diagonal(),
        x.detach(),
    ]
    assert sim.statistics().submitted == before
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)
    assert torch.equal(views[2].cpu(), X[1:, ::2])


def test_number_is_read_at_call() -> None:
    x = X.to("sim")
    number = torch.tensor(2.0)
    y = x * number
    number.fill_(3.0)
    assert torch.equal(y.cpu(), X * 2)


def test_host_indices_are_read_at_call() -> None:
    x = X.to("sim")
    rows = torch.tensor([2, 0])
    y = x[rows]
    x[rows] = 7.0
    rows.fill_(1)
    assert torch.equal(y.cpu(), X[[2, 0]])
    assert x.cpu()[:, 0].tolist() == [7.0, -1.0, 7.0]


# ---- what they refuse


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_are_refused(other: str) -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        X.to("sim:0") + X.to(other)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.cat([X.to("sim:0"), X.to(other)])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.add_(torch.ones(7, device=x.device)),
        lambda x: x @ x,
        lambda x: x.index_add_(0, torch.tensor([0], device=x.device), torch.ones(1, 3, device=x.device)),
        lambda x: x.index_put_((torch.zeros(2, dtype=torch.long, device=x.device),), torch.ones(3, device=x.device)),
        lambda x: torch.nn.functional.conv2d(x, x),
    ],
)
def test_mismatched_shapes_are_refused_immediately(operation: Callable[[torch.Tensor], object]) -> None:
    x = X.to("sim")
    with pytest.raises(RuntimeError):
        operation(x)
    sim.synchronize()
    assert torch.equal(x.cpu(), X)


def test_index_out_of_range_breaks_device() -> None:
    x = X.to("sim")
    y = torch.take(x, torch.tensor([100], device="sim"))
    with pytest.raises(Exception, match="out of range"):
        y.cpu()
    assert [report.kind for report in sim.races()] == ["error"]
    sim.clear_error()


def test_result_type_follows_default_type() -> None:
    whole = torch.ones(3, dtype=torch.int64, device="sim")
    assert (whole / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_missing_kernel_is_named() -> None:
    with pytest.raises(NotImplementedError, match="Sparse"):
        X.to("sim").to_sparse()
    with pytest.raises(IndexError, match="there is no sim:2"):
        torch.empty(3, device="sim:2")
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="sim", pin_memory=True)


# ---- results that are given


def test_empty_out_takes_result_size() -> None:
    x = X.to("sim")
    out = torch.empty(0, device="sim")
    assert runs_later(lambda: torch.add(x, 1, out=out))
    assert torch.equal(out.cpu(), X + 1)
    values, indices = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.long, device="sim")
    torch.max(x, 1, out=(values, indices))
    assert values.tolist() == [-2.0, 2.0, 6.0]
    assert indices.tolist() == [3, 3, 3]


def test_other_out_size_warns_each_time() -> None:
    x = X.to("sim")
    for _ in range(2):
        out = torch.ones(2, device="sim")
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            torch.mul(x, 2, out=out)
        assert torch.equal(out.cpu(), X * 2)


@pytest.mark.parametrize("size", [0, 1])
def test_out_of_unknown_size_is_resized(size: int) -> None:
    x = X.to("sim")
    out = torch.empty(0, 2, dtype=torch.long, device="sim")
    assert torch.nonzero(x > 5, out=out) is out
    assert out.tolist() == [[2, 3]]
    out = torch.empty(size, device="sim")
    if size:
        with pytest.warns(UserWarning, match="resized"):
            torch.masked_select(x, x > 3, out=out)
    else:
        torch.masked_select(x, x > 3, out=out)
    assert out.tolist() == [4.0, 5.0, 6.0]


def test_out_may_be_part_of_tensor() -> None:
    x = X.to("sim")
    whole = torch.zeros(3, 8, device="sim")
    torch.neg(x, out=whole[:, ::2])
    assert torch.equal(whole.cpu()[:, ::2], -X)
    assert whole.cpu()[:, 1::2].abs().sum() == 0


# ---- copies


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_convert_and_broadcast_like_cpu(dtype: torch.dtype, pinned: bool, non_blocking: bool) -> None:
    source = X[0].pin_memory() if pinned else X[0]
    target = torch.empty(4, 3, device="sim", dtype=dtype).t()
    target.copy_(source, non_blocking=non_blocking)
    assert torch.equal(target.cpu(), torch.empty(3, 4, dtype=dtype).copy_(X[0]))
    back = torch.empty(3, 4, dtype=torch.float32, pin_memory=pinned)
    back.copy_(target, non_blocking=non_blocking)
    sim.synchronize()
    assert torch.equal(back, X[0].to(dtype).to(torch.float32).expand(3, 4))


def test_pinned_source_is_read_at_run() -> None:
    pinned = X.clone().pin_memory()
    x = torch.empty(3, 4, device="sim")
    assert runs_later(lambda: x.copy_(pinned, non_blocking=True))
    pinned.numpy()[:] = 0  # no operator: the detector misses it
    assert x.cpu().abs().sum() == 0


NOT_BYTE_FOR_BYTE: dict[str, tuple[torch.Tensor, torch.Tensor]] = {  # the source, and a tensor like the destination
    "converts": (X, X.double()),
    "truncates": (X, X.to(torch.uint8)),
    "to every other column": (X, torch.zeros(3, 8)[:, ::2]),
    "from every other column": (torch.arange(24.0).reshape(3, 8)[:, ::2], X),
    "transposes": (X, torch.zeros(4, 3).t()),
    "from a transposed tensor": (X.t(), torch.zeros(4, 3)),
    "converts and transposes": (X.t(), torch.zeros(4, 3, dtype=torch.int64)),
    "conjugates": (torch.complex(X, X + 1).conj(), torch.complex(X, X)),
}


@pytest.mark.parametrize("name", NOT_BYTE_FOR_BYTE)
def test_converting_copy_reads_pinned_memory_late(name: str) -> None:
    source, like = NOT_BYTE_FOR_BYTE[name]
    pinned = source.contiguous().resolve_conj().pin_memory()
    expected = like.clone().copy_(pinned)
    targets = [like.to("sim"), like.to("sim")]
    sim.synchronize()
    assert runs_later(lambda: targets[0].copy_(pinned, non_blocking=True))
    assert torch.equal(targets[0].cpu(), expected)
    assert sim.races() == []
    targets[1].copy_(pinned, non_blocking=True)
    pinned.fill_(0)
    assert [report.kind for report in sim.races()] == ["host_race"]
    assert targets[1].cpu().abs().sum() == 0  # the effect of the bug


@pytest.mark.parametrize("name", NOT_BYTE_FOR_BYTE)
def test_converting_copy_writes_pinned_memory_late(name: str) -> None:
    source, like = NOT_BYTE_FOR_BYTE[name]
    x = source.to("sim")
    pinned = torch.zeros(like.shape, dtype=like.dtype).pin_memory()
    assert runs_later(lambda: pinned.copy_(x, non_blocking=True))
    assert not pinned.numpy().any()  # no operator: the detector misses it
    assert sim.races() == []
    pinned.sum()
    assert [report.kind for report in sim.races()] == ["host_race"]
    sim.synchronize()
    assert torch.equal(pinned, torch.zeros_like(pinned).copy_(source))


def test_new_tensor_of_other_type_fills_late() -> None:
    pinned = torch.arange(5, dtype=torch.uint8).pin_memory()
    x = pinned.to("sim", torch.float32, non_blocking=True)
    pinned.fill_(9)
    assert [report.kind for report in sim.races()] == ["host_race"]
    assert x.tolist() == [9.0] * 5


def test_part_is_written_at_run() -> None:
    x = torch.zeros(2, 5, device="sim")
    pinned = torch.ones(2, 3).pin_memory()
    x[:, :3].copy_(pinned, non_blocking=True)
    pinned.fill_(3)
    assert [report.kind for report in sim.races()] == ["host_race"]
    assert x.cpu().sum() == 18


def test_host_copies_noncontiguous_pinned_memory() -> None:
    pinned = torch.zeros(4, 3).pin_memory().t()
    x = torch.empty(3, 4, device="sim")
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(1)
    assert x.cpu().sum() == 0
    x.fill_(2)
    pinned.copy_(x, non_blocking=True)
    assert pinned.sum() == 24
    assert sim.races() == []


def test_blocking_conversion_leaves_pinned_memory() -> None:
    pinned = X.clone().pin_memory()
    x = torch.empty(3, 4, device="sim", dtype=torch.float64)
    x.copy_(pinned)
    pinned.fill_(0)
    assert torch.equal(x.cpu(), X.double())
    pinned.copy_(x)
    assert torch.equal(pinned, X)
    assert sim.races() == []


def test_pinned_target_is_written_at_run() -> None:
    x = X.to("sim")
    pinned = torch.zeros(3, 4).pin_memory()
    assert runs_later(lambda: pinned.copy_(x, non_blocking=True))
    assert pinned.numpy().sum() == 0
    sim.synchronize()
    assert torch.equal(pinned, X)


@pytest.mark.parametrize("pinned", [False, True])
def test_blocking_copy_waits_for_stream(pinned: bool) -> None:
    source = X.pin_memory() if pinned else X
    x = torch.empty(3, 4, device="sim")
    assert not runs_later(lambda: x.copy_(source))
    assert not runs_later(lambda: source.copy_(x))


def test_conjugates_and_negatives_copy_by_value() -> None:
    z = torch.complex(X, X + 1)
    on_device = z.to("sim")
    assert torch.equal(on_device.conj().cpu(), z.conj())
    assert torch.equal(on_device.conj().imag.cpu(), z.conj().imag)
    assert torch.equal((on_device.conj() @ on_device.t()).cpu(), z.conj() @ z.t())
    assert torch.equal(z.conj().to("sim").resolve_conj().cpu(), z.conj().resolve_conj())
    assert torch.equal(on_device.conj().to("sim:1").cpu(), z.conj())


def test_device_copy_uses_source_stream() -> None:
    x = torch.zeros(4, device="sim:0")
    y = torch.ones(4, device="sim:1")
    sim.synchronize()
    with sim.hold(torch.accelerator.current_stream("sim:0")):
        x.fill_(7)
        y.copy_(x)
        sim.sleep(1)
        with torch.Stream("sim:1"):
            torch.ones(4, device="sim:1").cpu()  # another stream of the target is not held
    assert y.tolist() == [7.0] * 4


# ---- shapes and storages


def test_resized_tensor_keeps_content() -> None:
    x = torch.arange(4.0).to("sim")
    x.resize_(6)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    x.resize_(1, 2, 1, 2, memory_format=torch.channels_last)
    assert x.stride() == (4, 1, 4, 2)
    x.resize_(0)
    assert x.numel() == 0
    y = torch.empty(0, device="sim").set_(x.untyped_storage(), 1, (2, 2))  # type: ignore[call-overload]
    assert y.storage_offset() == 1
    assert y.tolist() == [[1.0, 2.0], [3.0, y[1, 1].item()]] or y[1, 1].isnan()
    assert y.set_().numel() == 0
    assert torch.empty(0, device="sim").set_(x.untyped_storage()).shape == (6,)


def test_empty_tensors() -> None:
    x = torch.empty(0, 3, device="sim")
    assert (x + 1).shape == (0, 3)
    assert x.sum().item() == 0.0
    assert torch.cat([x, torch.ones(2, 3, device="sim")]).shape == (2, 3)
    assert x.cpu().shape == (0, 3)


def test_printing_and_comparing() -> None:
    x = X.to("sim")
    assert repr(x).replace(", device='sim:0'", "") == repr(X)
    assert torch.equal(x, X.to("sim"))
    assert not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    assert bool((x == X.to("sim")).all())
    assert sorted(x.flatten().tolist(), reverse=True) == x.flatten().sort(descending=True).values.tolist()


# ---- random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(9, device="sim"),
        lambda: torch.randperm(9, device="sim"),
        lambda: torch.empty(9, device="sim").bernoulli_(0.5),
        lambda: nn.functional.dropout(torch.ones(9, device="sim")),
        lambda: torch.multinomial(torch.ones(9, device="sim"), 5),
    ],
)
def test_seed_repeats_numbers(draw: Callable[[], torch.Tensor]) -> None:
    drawn = []
    for schedule in ("free", "lazy"):
        sim.enable(schedule=schedule)
        torch.manual_seed(5)
        host = torch.random.get_rng_state()
        first, second = draw(), draw()
        drawn += [(first.tolist(), second.tolist())]
        assert torch.equal(torch.random.get_rng_state(), host)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_own_generator_works() -> None:
    one, other = torch.Generator("sim").manual_seed(1), torch.Generator("sim").manual_seed(1)
    assert torch.equal(torch.randn(5, device="sim", generator=one), torch.randn(5, device="sim", generator=other))
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.empty(5, device="sim").normal_(generator=torch.Generator())


# ---- accesses that the detector records


def test_batch_norm_statistics_are_written() -> None:
    norm = nn.BatchNorm1d(4).to("sim")
    sim.races()
    assert norm.running_mean is not None
    with torch.Stream("sim"):
        norm.running_mean.add(1)
    norm(torch.zeros(3, 4, device="sim"))
    assert any("batch_norm" in report.later.operation for report in sim.races() if report.later is not None)


def test_host_may_inspect_shape_in_flight() -> None:
    pinned = X.clone().pin_memory()
    x = torch.empty(3, 4, device="sim")
    pinned.copy_(x, non_blocking=True)
    pinned.view(4, 3).t().unsqueeze(0).expand(2, 3, 4)
    torch.empty_like(pinned)
    pinned.is_pinned()
    assert sim.races() == []
    pinned.reshape(-1)  # a view
    assert sim.races() == []


@pytest.mark.parametrize(
    ("touch", "name"),
    [
        (lambda pinned: pinned.fill_(0), "aten::fill_"),
        (lambda pinned: pinned + 1, "aten::add"),
        (lambda pinned: pinned.clone(), "aten::copy_"),
        (lambda pinned: pinned[1:].sum(), "aten::sum"),
        (lambda pinned: torch.cat([pinned, pinned]), "aten::cat"),
        (lambda pinned: pinned.to(torch.float64), "aten::copy_"),
        (lambda pinned: pinned.to("sim", torch.float64), "aten::copy_"),
    ],
)
def test_host_operation_in_flight_is_race(touch: Callable[[torch.Tensor], object], name: str) -> None:
    pinned = X.clone().pin_memory()
    pinned.copy_(torch.empty(3, 4, device="sim"), non_blocking=True)
    touch(pinned)
    (report,) = sim.races()
    assert report.kind == "host_race"
    assert report.later is not None
    assert report.later.operation == name


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda x, number: x * number, "aten::mul"),
        (lambda x, number: torch.where(x > 0, x, number), "aten::where"),
        (lambda x, number: torch._foreach_mul_([x], number), "aten::mul"),
        (lambda x, number: x.masked_fill_(x > 0, number), "aten::masked_fill_"),
    ],
)
def test_number_in_flight_is_race(use: Callable[..., object], name: str) -> None:
    x = X.to("sim")
    number = torch.empty((), pin_memory=True)
    number.copy_(torch.ones((), device="sim"), non_blocking=True)
    use(x, number)
    (report,) = sim.races()
    assert report.kind == "host_race"
    assert report.later is not None
    assert report.later.operation == name


def test_pinned_indices_copy_in_stream() -> None:
    x = X.to("sim")
    rows = torch.zeros(2, dtype=torch.long).pin_memory()
    rows.copy_(torch.ones(2, dtype=torch.long, device="sim"), non_blocking=True)
    assert torch.equal(x[rows].cpu(), X[[1, 1]])
    assert sim.races() == []


def test_waiting_returns_number_to_host() -> None:
    x = X.to("sim")
    number = torch.empty((), pin_memory=True)
    number.copy_(torch.full((), 2.0, device="sim"), non_blocking=True)
    sim.synchronize()
    assert torch.equal((x * number).cpu(), X * 2)
    number.to("sim", non_blocking=True)
    x * number  # two readers
    assert sim.races() == []


def test_pinned_copy_is_no_host_access() -> None:
    pinned = X.clone().pin_memory()
    x, y = torch.empty(3, 4, device="sim"), torch.empty(3, 4, device="sim")
    x.copy_(pinned, non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    pinned.to("sim", non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    assert sim.races() == []


# ---- what is made of them


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), (3, 2, 4)),
    "gru": (lambda: nn.GRU(4, 5, 2), (3, 2, 4)),
    "gru without bias": (lambda: nn.GRU(4, 5, bias=False), (3, 2, 4)),
    "rnn": (lambda: nn.RNN(4, 5), (3, 2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, bias=False), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (2, 4, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)), (3, 4, 8, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 2, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_gradients_match_cpu(name: str) -> None:
    make, size = MODULES[name]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours).to("sim")
    x = torch.randn(size)
    results = []
    for module, inputs in ((ours, x.clone().requires_grad_()), (theirs, x.to("sim").requires_grad_())):
        out = module(inputs)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        buffers = [buffer.cpu() for buffer in module.buffers()]
        results.append([out.cpu(), inputs.grad.cpu(), *(p.grad.cpu() for p in module.parameters()), *buffers])  # type: ignore[union-attr]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_adam_steps_match_cpu(fused: bool) -> None:
    weights = []
    for device in ("cpu", "sim"):
        weight = X.clone().to(device).requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
        weights.append(weight.detach().cpu())
    torch.testing.assert_close(weights[1], weights[0])


def test_embedding_bag_and_gradient_match_cpu() -> None:
    bag = nn.EmbeddingBag(10, 3, mode="max")
    ours = copy.deepcopy(bag).to("sim")
    words = torch.tensor([[1, 2, 3], [4, 5, 1]])
    out, expected = ours(words.to("sim")), bag(words)
    torch.testing.assert_close(out.cpu(), expected)
    out.sum().backward()
    expected.sum().backward()
    assert ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad.cpu(), bag.weight.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_derivatives() -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(X.to("sim"), torch.ones(3, 4, device="sim"))
        y = x * x + torch.zeros(3, 4, device="sim")
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent.cpu(), 2 * X)


# ---- where they are called


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.native_layer_norm(x.relu_(), [4], None, None, 1e-5)[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize("schedule", ["free", "lazy"])
def test_torchscript_threads_run_operators(schedule: sim.Schedule) -> None:
    sim.enable(schedule=schedule)
    scripted = torch.jit.script(layer_norm)
    inputs = [(X + i).to("sim") for i in range(8)]
    futures = [torch.jit.fork(scripted, x) for x in inputs]
    results = [torch.jit.wait(future) for future in futures]
    for i, result in enumerate(results):
        torch.testing.assert_close(result.cpu(), layer_norm(X + i))


def test_caller_modes_do_not_reach_kernels() -> None:
    x = X.to("sim")
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
    with torch.device("sim"):
        z = nn.functional.gelu(x).pow(3.0) + torch.ones(4)
    assert torch.equal(y.cpu(), X * 2 + 1)
    torch.testing.assert_close(z.cpu(), nn.functional.gelu(X).pow(3.0) + 1)


def test_autocast_changes_nothing() -> None:
    x = X.to("sim")
    layer = nn.Linear(4, 2).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = nn.functional.softmax(layer(x @ x.t() @ x), dim=1)
    assert y.dtype == torch.float32
    assert torch.equal(y, nn.functional.softmax(layer(x @ x.t() @ x), dim=1))


def test_external_cpu_operator_works() -> None:
    @torch.library.custom_op("sim_test::twice", mutates_args=(), device_types="cpu")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    x = X.to("sim")
    results: list[torch.Tensor] = []
    assert runs_later(lambda: results.append(twice(x)))
    assert torch.equal(results[0].cpu(), X * 2)


def test_ctrl_c_in_meta_kernel_is_raised() -> None:
    @torch.library.custom_op("sim_test::interrupt", mutates_args=(), device_types="cpu")
    def interrupt(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    impatient = [KeyboardInterrupt("now")]

    @interrupt.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if impatient:
            raise impatient.pop()
        return torch.empty_like(x)

    x = X.to("sim")
    with pytest.raises(KeyboardInterrupt, match="now"):
        interrupt(x)
    results: list[torch.Tensor] = []
    assert runs_later(lambda: results.append(interrupt(x)))
    assert torch.equal(results[0].cpu(), X)


def test_host_is_watched_after_long_pause() -> None:
    for _ in range(2):
        pinned = X.clone().pin_memory()
        pinned.copy_(torch.empty(3, 4, device="sim"), non_blocking=True)
        pinned.fill_(0)
        assert [report.kind for report in sim.races()] == ["host_race"]
        sim.synchronize()
        for _ in range(100):
            X + 1

"""DeferredBatchNorm: running statistics of the mini-batch, and the conversion of models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cudafuture.compat.torchgpipe import GPipe
from cudafuture.pipeline import Pipeline
from cudafuture.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from cudafuture.pipeline.checkpoint import RandomState, recomputing


def input_of(layer: nn.Module, rows: int = 8) -> Tensor:
    torch.manual_seed(0)
    size = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 3), nn.BatchNorm3d: (2, 2, 2)}[type(layer)]  # type: ignore[index]
    return 3 * torch.randn(rows, 5, *size) + 100  # far from zero, where a sum of squares would cancel


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_running_statistics_cover_mini_batch(kind: Any, momentum: float | None) -> None:
    plain = kind(5, momentum=momentum)
    deferred = convert_deferred_batch_norm(copy.deepcopy(plain), chunks=3)
    for step in range(3):
        x = input_of(plain) + step
        plain(x)
        for chunk in x.chunk(3):
            deferred(chunk)
    assert_close(deferred.running_mean, plain.running_mean)
    assert_close(deferred.running_var, plain.running_var, rtol=1e-4, atol=1e-4)
    assert deferred.num_batches_tracked == plain.num_batches_tracked == 3
    plain.eval(), deferred.eval()
    assert_close(deferred(x), plain(x), rtol=1e-3, atol=1e-3)


def test_micro_batch_is_normalised_like_plain_layer() -> None:
    plain = nn.BatchNorm2d(5)
    deferred = convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)
    x, y = (input_of(plain).requires_grad_() for _ in range(2))
    expected, result = plain(x), deferred(y)
    expected.square().sum().backward()
    result.square().sum().backward()
    assert torch.equal(result, expected)
    assert y.grad is not None
    assert x.grad is not None
    assert torch.equal(y.grad, x.grad)
    assert deferred.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(deferred.weight.grad, plain.weight.grad)


def test_statistics_change_with_last_micro_batch() -> None:
    norm = DeferredBatchNorm(5, chunks=2)
    norm(input_of(nn.BatchNorm1d(5)))
    assert norm.running_mean is not None
    assert norm.running_mean.count_nonzero() == 0
    norm(input_of(nn.BatchNorm1d(5)))
    assert norm.running_mean.count_nonzero() == 5


def test_recomputed_micro_batch_does_not_count() -> None:
    norm, x = DeferredBatchNorm(5, chunks=2), input_of(nn.BatchNorm1d(5))
    norm(x)
    with recomputing(RandomState.capture(torch.device("cpu"))):
        norm(x)
    assert norm.tracked == 1
    assert norm.num_batches_tracked == 0


def test_unfinished_mini_batch_is_forgotten() -> None:
    norm, reference = (DeferredBatchNorm(5, chunks=2) for _ in range(2))
    x = input_of(nn.BatchNorm1d(5))
    norm(1000 * x)
    norm.set_chunks(3)
    reference.set_chunks(3)
    for chunk in x.chunk(3):
        norm(chunk)
        reference(chunk)
    assert norm.running_mean is not None
    assert reference.running_mean is not None
    assert torch.equal(norm.running_mean, reference.running_mean)
    assert norm.num_batches_tracked == 1


def test_evaluation_counts_nothing() -> None:
    norm = DeferredBatchNorm(5).eval()
    norm(input_of(nn.BatchNorm1d(5)))
    assert norm.num_batches_tracked == 0


def test_half_precision_sums_in_single() -> None:
    norm = DeferredBatchNorm(2, momentum=1.0, chunks=2).half()
    for _ in range(2):
        norm(torch.full((4096, 2), 30.0, dtype=torch.float16))  # the sum is more than a float16 can be
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [30.0, 30.0]


def test_converted_model_keeps_parameters_and_hooks() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5, eps=0.5)), nn.BatchNorm1d(5))
    model[1][0].register_parameter("bias", None)  # as bias=False does, where torch has it
    state, parameters, calls = model.state_dict(), list(model.parameters()), []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    model[2].eval()
    converted = convert_deferred_batch_norm(model, chunks=4)
    assert converted is model
    assert isinstance(model[1][0], DeferredBatchNorm)
    assert model[1][0].eps == 0.5
    assert not model[2].training
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(torch.ones(2, 5))
    assert calls == [1]


def test_pipeline_converts_containers_of_model() -> None:
    for make in (
        lambda model: GPipe(model, [1], ["cpu"], deferred_batch_norm=True),
        lambda model: Pipeline(model, ["cpu"], balance=[1], microbatches=1, deferred_batch_norm=True),
    ):
        model: Any = nn.Sequential(nn.Sequential(nn.BatchNorm1d(5)))
        make(model)
        assert isinstance(model[0][0], DeferredBatchNorm)


def test_repeated_layer_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(5)
    model: Any = convert_deferred_batch_norm(nn.Sequential(norm, nn.Sequential(norm)), chunks=2)
    assert isinstance(model[0], DeferredBatchNorm)
    assert model[0] is model[1][0]


def test_layers_without_statistics_stay_unconverted() -> None:
    model = convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False)), chunks=2)
    assert type(model[0]) is nn.BatchNorm1d


def test_second_conversion_changes_micro_batches() -> None:
    given: Any = convert_deferred_batch_norm(nn.BatchNorm1d(5), 2)
    norm: Any = DeferredBatchNorm.convert_deferred_batch_norm(given, 3)
    assert (given.chunks, norm.chunks) == (2, 3)
    assert norm.weight is given.weight
    assert norm.running_var is given.running_var
    assert convert_deferred_batch_norm(norm, 3) is norm


def test_sync_batch_norm_is_refused() -> None:
    with pytest.raises(TypeError, match=r"1\.0 is a SyncBatchNorm"):
        convert_deferred_batch_norm(nn.Sequential(nn.ReLU(), nn.Sequential(nn.SyncBatchNorm(5))), chunks=2)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="0 is lazy"):
        convert_deferred_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()), chunks=2)


def test_torchgpipe_state_can_be_loaded() -> None:
    state = {**nn.BatchNorm1d(5).state_dict(), "sum": torch.zeros(5), "sum_squares": torch.zeros(5)}
    state["running_mean"] = torch.full((5,), 3.0)
    alone, inside = DeferredBatchNorm(5), nn.Sequential(DeferredBatchNorm(5))
    alone.load_state_dict(state)
    inside.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert alone.running_mean is not None
    assert alone.running_mean.tolist() == inside.state_dict()["0.running_mean"].tolist() == [3] * 5


def test_input_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two dimensions"):
        DeferredBatchNorm(5)(torch.ones(5))

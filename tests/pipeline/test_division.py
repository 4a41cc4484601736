"""The division of a model into stages, and of a target into those of the micro-batches."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudafuture.compat.torchgpipe import GPipe
from cudafuture.pipeline import Pipeline
from cudafuture.pipeline._division import divide, layers_of, refuse_shared, route_of
from cudafuture.pipeline._minibatch import split, split_target
from cudafuture.pipeline.skip import skippable, stash

# ---- a layer in several places


def test_repeated_layer_is_in_each_place() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    layers, parts = divide(model, [2, 2])
    assert [name for name, _ in layers] == ["0", "1", "2", "3"]
    assert [[layer for _, layer in layers_of(part)] for part in parts] == [[model[0], relu], [model[2], relu]]
    refuse_shared(parts)
    x = torch.ones(3, 2)
    assert torch.equal(parts[1](parts[0](x)), model(x))


def test_layer_repeated_in_list_is_two_stages() -> None:
    relu = nn.ReLU()
    layers, parts = divide([relu, nn.Linear(2, 2), relu], None)
    assert [name for name, _ in layers] == ["0", "1", "2"]
    assert [layers_of(part) for part in parts] == [[layer] for layer in layers]


def test_layer_repeated_in_stage_is_named_twice() -> None:
    tied = nn.Linear(2, 2)
    _, (part,) = divide(nn.Sequential(tied, nn.ReLU(), tied), [3])
    assert layers_of(part) == [("0", tied), ("1", part[1]), ("2", tied)]
    refuse_shared([part])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_shared_activation_has_plain_gradients(checkpoint: Any) -> None:
    torch.manual_seed(0)
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), tanh, nn.Linear(2, 2), tanh)
    x, target = torch.randn(6, 2), torch.randn(6, 2)
    expected = torch.autograd.grad(nn.functional.mse_loss(model(x), target), list(model.parameters()))
    pipeline = Pipeline(
        model, ["cpu"] * 2, balance=[2, 2], microbatches=2, loss=nn.functional.mse_loss, checkpoint=checkpoint
    )
    pipeline.step(x, target)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("layer", "kind", "name"),
    [
        (nn.Linear(2, 2), "parameter", "weight"),
        (nn.BatchNorm1d(2), "parameter", "weight"),
        (nn.BatchNorm1d(2, affine=False), "buffer", "running_mean"),
    ],
)
def test_layer_with_state_is_in_one_stage(layer: nn.Module, kind: str, name: str) -> None:
    _, parts = divide(nn.Sequential(layer, nn.ReLU(), layer), [2, 1])
    with pytest.raises(ValueError, match=rf"stage 0 and stage 1 share a {kind}, 0\.{name} and 2\.{name}"):
        refuse_shared(parts)
    with pytest.raises(ValueError, match="Two stages cannot share one, even on one device: put its layers into one"):
        Pipeline([layer, layer], ["cpu"] * 2, microbatches=1, deferred_batch_norm=True)


@pytest.mark.sim(devices=2)
def test_shared_tensors_stay_shared_on_device() -> None:
    layers: Any = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.ReLU())
    layers[1].weight, layers[1].running_mean = layers[0].weight, layers[0].running_mean
    for made in (GPipe(copy.deepcopy(layers), [2, 1]), Pipeline(layers, balance=[2, 1], microbatches=1)):
        first, second, _ = made
        assert first.weight is second.weight
        assert first.running_mean is second.running_mean
        assert second.running_mean.device == torch.device("sim", 0)


def test_stashing_module_has_one_place() -> None:
    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            return x

    twice = Stash()
    _, parts = divide([twice, nn.ReLU(), twice], None)
    with pytest.raises(TypeError, match="layers 0 and 2 are one module with skips"):
        route_of(parts)


# ---- what a stage would not run


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def test_sequential_with_own_forward_is_one_stage() -> None:
    with pytest.raises(TypeError, match="Doubled has a forward of its own"):
        divide(Doubled(nn.ReLU()), [1])
    patched = nn.Sequential(nn.ReLU())
    patched.forward = lambda x: 2 * x  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="Sequential has a forward of its own"):
        divide(patched, [1])
    _, (part,) = divide([Doubled(nn.ReLU())], None)
    assert part(torch.ones(1)) == 2


def test_plain_sequential_subclass_is_divided() -> None:
    class Named(nn.Sequential):
        pass

    layers, _ = divide(Named(nn.ReLU(), nn.ReLU()), [1, 1])
    assert len(layers) == 2


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ],
    ids=["forward", "before forward", "backward", "before backward"],
)
def test_sequential_with_hooks_is_refused(
    register: Callable[[nn.Module], Any],
) -> None:
    model = nn.Sequential(nn.ReLU())
    register(model[0])
    divide(model, [1])
    handle = register(model)
    with pytest.raises(TypeError, match="has hooks on itself"):
        divide(model, [1])
    handle.remove()
    divide(model, [1])


def test_reserved_name_is_refused_with_layer() -> None:
    model = nn.Sequential(OrderedDict(first=nn.ReLU(), devices=nn.ReLU()))
    assert [name for name, _ in divide(model, [1, 1])[0]] == ["first", "devices"]
    with pytest.raises(ValueError, match="a layer is named 'devices'"):
        divide(model, [1, 1], {"stages", "devices"})


# ---- targets


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_target_is_divided_with_mini_batch(count: int, times: int) -> None:
    batch = torch.arange(7)
    parts = split_target(batch.repeat_interleave(times), 7, count)
    expected = [part.repeat_interleave(times) for part in split(batch, count)]
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_target_tensors_may_have_different_multiples() -> None:
    scale, tokens, weights = torch.tensor(2.0), torch.arange(6), torch.arange(3)
    first, last = split_target({"tokens": tokens, "rest": (weights, scale, "mean", None)}, 3, 2)
    assert first["tokens"].tolist() == [0, 1, 2, 3]
    assert last["tokens"].tolist() == [4, 5]
    assert [part["rest"][0].tolist() for part in (first, last)] == [[0, 1], [2]]
    assert first["rest"][1:] == last["rest"][1:] == (scale, "mean", None)


@pytest.mark.parametrize("rows", [0, 2, 3, 5, 7])
def test_mismatched_target_rows_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"a target has {rows} rows for a mini-batch of 4"):
        split_target((torch.ones(4), torch.ones(rows, 2)), 4, 2)


def test_no_target_is_none_everywhere() -> None:
    assert split_target(None, 4, 2) == []

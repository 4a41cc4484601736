"""Tests of skip connections: stash and pop, mistakes that are found, the layout over partitions."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudafuture.compat.torchgpipe.skip import SkipTracker
from cudafuture.pipeline.skip import (
    SkipLayout,
    SkipNamespace,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
    verify_skippables,
)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Any) -> Any:
        yield stash("skip", x)
        return 2 * x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Any) -> Any:
        skip = yield pop("skip")
        return x + skip


def test_skips_work_without_pipeline() -> None:
    model = nn.Sequential(Stash(), nn.ReLU(), Pop())
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.tolist() == [-1.0, 6.0]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 3.0]


def test_skip_can_be_none() -> None:
    @skippable(stash=["skip"])
    class StashNone(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", None)
            return x

    @skippable(pop=["skip"])
    class PopNone(nn.Module):
        def forward(self, x: Tensor) -> Any:
            assert (yield pop("skip")) is None
            return x

    assert nn.Sequential(StashNone(), PopNone())(torch.ones(1)).item() == 1


def test_module_uses_names_in_any_order() -> None:
    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", x + 1)
            yield stash("a", x + 2)
            return x

    @skippable(pop=["a", "b"])
    class Difference(nn.Module):
        def forward(self, x: Tensor) -> Any:
            a = yield pop("a")
            b = yield pop("b")
            return x + 10 * a + 100 * b

    assert nn.Sequential(Two(), Difference())(torch.zeros(1)).item() == 120


def test_namespaces_separate_equal_names() -> None:
    one, two = SkipNamespace(), SkipNamespace()
    model = nn.Sequential(Stash().isolate(one), Stash().isolate(two), Pop().isolate(two), Pop().isolate(one))  # type: ignore[operator]
    verify_skippables(model)
    assert model(torch.ones(1)).item() == 4 + 2 + 1
    assert copy.deepcopy(model)(torch.ones(1)).item() == 7


def test_isolate_moves_only_given_names() -> None:
    ns = SkipNamespace()
    layer = skippable(stash=["a"], pop=["b"])(nn.Identity)().isolate(ns, only=["b"])
    assert list(layer.stashable()) == [(None, "a")]
    assert list(layer.poppable()) == [(ns, "b")]


def test_namespaces_equal_only_their_copies() -> None:
    one, two = SkipNamespace(), SkipNamespace()
    assert one != two
    assert copy.deepcopy(one) == one
    assert (one < two) != (two < one)
    assert isinstance(None, SkipNamespace)
    assert one != "one"


def test_parameter_names_match_torchgpipe() -> None:
    layer = skippable()(nn.Linear)(1, 1)
    assert list(layer.state_dict()) == ["module.weight", "module.bias"]
    assert repr(layer).startswith("@skippable(Linear(")
    assert type(layer).__name__ == "Linear"


def test_string_instead_of_names_is_refused() -> None:
    with pytest.raises(TypeError, match="lists of names"):
        skippable(stash="skip")


def run_with(commands: list[Any], *, stashes: list[str] = [], pops: list[str] = []) -> None:  # noqa: B006
    @skippable(stash=stashes, pop=pops)
    class Commands(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield from (command for command in commands)
            return x

    tracker = SkipTracker()
    tracker.tensors[None, "there"] = torch.ones(1)
    with use_skip_tracker(tracker):
        Commands()(torch.ones(1))


@pytest.mark.parametrize(
    ("commands", "names", "message"),
    [
        ([stash("x", None)], {}, "did not declare that it stashes 'x'"),
        ([pop("x")], {}, "did not declare that it pops 'x'; declared: none"),
        ([], {"stashes": ["x"]}, "Commands declares that it stashes 'x' but did not"),
        ([], {"pops": ["there"]}, "Commands declares that it pops 'there' but did not"),
        ([], {"pops": ["x"]}, "Commands pops 'x', which has not been stashed"),
        ([pop("there"), pop("there")], {"pops": ["there"]}, "pops 'there' twice"),
    ],
)
def test_undeclared_behaviour_raises(commands: list[Any], names: dict[str, list[str]], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_with(commands, **names)


def test_module_yielding_other_objects_raises() -> None:
    with pytest.raises(TypeError, match=r"yields stash\(...\) or pop\(...\), not 5"):
        run_with([5])


def test_one_error_lists_all_mistakes() -> None:
    both = skippable(stash=["both"], pop=["both"])(nn.Identity)
    alone = skippable(stash=["alone"])(nn.Identity)
    early = skippable(pop=["early"])(nn.Identity)
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(Stash(), Stash(), Pop(), Pop(), both(), alone(), early()))
    assert [line[:2] for line in str(caught.value).splitlines()[1:]] == ["* "] * 5
    for words in (
        "'1' stashes 'skip' again",
        "'3' pops 'skip' again",
        "'4' both stashes and pops 'both'",
        "'5' stashes 'alone', which no module pops",
        "'6' pops 'early', which no module before it stashes",
    ):
        assert words in str(caught.value)


def test_layout_knows_target_of_skip() -> None:
    ns = SkipNamespace()
    partitions = [
        nn.Sequential(Stash(), Stash().isolate(ns)),  # type: ignore[operator]
        nn.Sequential(nn.ReLU(), Pop().isolate(ns)),  # type: ignore[operator]
        nn.Sequential(Pop()),
    ]
    layout = inspect_skip_layout(partitions)
    assert layout.by_ns_name == {(None, "skip"): (0, 2), (ns, "skip"): (0, 1)}
    assert list(layout.copy_policy(1)) == [(0, ns, "skip")]
    assert list(layout.copy_policy(0)) == []
    assert layout.requires_copy(None, "skip")


def test_skip_within_partition_is_not_copied() -> None:
    layout = inspect_skip_layout([nn.Sequential(Stash(), Pop()), nn.Sequential(nn.ReLU())])
    assert layout.by_ns_name == {(None, "skip"): (0, 0)}
    assert list(layout.copy_policy(0)) == []
    assert not layout.requires_copy(None, "skip")
    assert not layout.requires_copy(None, "unknown")
    assert isinstance(layout, SkipLayout)


def test_nested_skippable_modules_are_found() -> None:
    block = nn.Sequential(nn.Sequential(Stash()))
    assert inspect_skip_layout([block, Pop()]).by_ns_name == {(None, "skip"): (0, 1)}


def test_partition_may_reuse_name() -> None:
    twice = nn.Sequential(Stash(), Pop(), Stash(), Pop())
    assert inspect_skip_layout([twice]).by_ns_name == {(None, "skip"): (0, 0)}


class Spy(SkipTracker):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def save(self, batch: Any, ns: Any, name: str, tensor: Tensor | None) -> None:
        self.batches.append(batch)
        super().save(batch, ns, name, tensor)

    def load(self, batch: Any, ns: Any, name: str) -> Tensor | None:
        self.batches.append(batch)
        return super().load(batch, ns, name)


def test_tracker_sees_inputs_and_outputs() -> None:
    spy, x = Spy(), torch.ones(1)
    with use_skip_tracker(spy):
        middle = Stash()(x)
        Pop()(middle)
    assert [batch.tensor for batch in spy.batches] == [2, middle]


def test_tracker_gets_no_batch_without_tensors() -> None:
    @skippable(stash=["skip"])
    class OfDict(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> Any:
            yield stash("skip", x["a"])
            return x

    spy = Spy()
    with use_skip_tracker(spy):
        OfDict()({"a": torch.ones(1)})
    assert spy.batches == [None]


def test_each_thread_has_its_own_tracker() -> None:
    seen = []
    with use_skip_tracker(SkipTracker()) as _:
        mine = current_skip_tracker()
        thread = threading.Thread(target=lambda: seen.append(current_skip_tracker()))
        thread.start()
        thread.join()
    assert seen[0] is not mine
    assert current_skip_tracker() is not mine


def test_error_restores_tracker() -> None:
    before = current_skip_tracker()
    with pytest.raises(RuntimeError), use_skip_tracker(SkipTracker()):
        Pop()(torch.ones(1))
    assert current_skip_tracker() is before

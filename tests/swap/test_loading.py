"""Saved state of other dtypes, of an older torch and of other classes; loads that fail; parameters added too late."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture.errors import InvalidStateError, NotFoundError, StorageError, SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from cudafuture.testing import FaultyEngine
from support.child import Child
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((200, 201), (77,))


@pytest.fixture
def pair(store: DiskStore) -> Pair:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, chunk_bytes=1 << 16)
    pair.step()
    return pair


def states(pair: Pair) -> list[dict[str, Any]]:
    return [pair.offloaded.state_of(parameter) for parameter in pair.swapped]


def expect_same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(same(value, other[name]) for name, value in one.items())


def test_checkpoint_without_tensor_changes_nothing(pair: Pair, store: DiskStore) -> None:
    pair.offloaded.save("damaged")
    store.delete([key for key in store.list_keys().wait() if "/saved/" in key][-1]).wait()
    pair.step()
    pair.offloaded.param_groups[0]["lr"] = 0.5
    before = states(pair)
    with pytest.raises(NotFoundError, match=r"'damaged' lacks 1 of its \d+ tensors"):
        pair.offloaded.load("damaged")
    expect_same_states(states(pair), before)
    assert pair.offloaded.param_groups[0]["lr"] == 0.5


def train_with_checkpoint(store: DiskStore) -> tuple[Pair, list[list[dict[str, Any]]]]:
    """Return a pair with a checkpoint of its first step, and the states after both of its steps."""
    pair, found = Pair(OPTIMIZERS["Adam"], store, ((400, 420), (256, 255)), chunk_bytes=1 << 18), []
    for number in range(2):
        pair.step()
        found.append(states(pair))
        if number == 0:
            pair.offloaded.save("first")
    pair.offloaded.param_groups[0]["lr"] = 0.5
    return pair, found


def test_failed_load_leaves_parameters_whole_and_can_be_repeated(tmp_path: Path) -> None:
    """The options are those of the checkpoint only when all states are."""
    with FaultyEngine("threads", block_size=1 << 18) as engine, DiskStore(tmp_path / "count", engine=engine) as store:
        pair, _ = train_with_checkpoint(store)
        before = engine.statistics().blocks
        pair.offloaded.load("first")
        numbers = range(before + 1, engine.statistics().blocks + 1)
    steps = set()
    for number in numbers:
        engine = FaultyEngine("threads", at={number: errno.EIO}, block_size=1 << 18)
        with engine, DiskStore(tmp_path / f"{number}", engine=engine) as store:
            pair, (first, second) = train_with_checkpoint(store)
            with pytest.raises((StorageError, SwapError)):
                pair.offloaded.load("first")
            found = states(pair)
            steps.add(tuple(int(state["step"]) for state in found))
            expect_same_states(found, [(first if state["step"] == 1 else second)[i] for i, state in enumerate(found)])
            assert pair.offloaded.param_groups[0]["lr"] == 0.5
            pair.offloaded.load("first")
            expect_same_states(states(pair), first)
            assert pair.offloaded.param_groups[0]["lr"] == 0.001
    assert steps == {(2, 2), (1, 2), (1, 1)}


@pytest.mark.parametrize("masters", [False, True])
def test_state_of_other_dtype_is_cast_like_torch(masters: bool, store: DiskStore) -> None:
    saved = Pair(OPTIMIZERS["Adam"], store, SHAPES, torch.float32 if not masters else torch.bfloat16, name="saved")
    saved.step()
    loaded = Pair(OPTIMIZERS["Adam"], store, SHAPES, torch.bfloat16, name="loaded", master_weights=masters)
    expected = torch.float32 if masters else torch.bfloat16
    loaded.offloaded.load_state_dict(saved.offloaded.state_dict())
    for parameter, source in zip(loaded.swapped, saved.swapped, strict=True):
        state, original = loaded.offloaded.state_of(parameter), saved.offloaded.state_of(source)
        assert same(state["exp_avg"], original["exp_avg"].to(expected))
        assert state["step"].dtype == torch.float32
    loaded.step()
    assert all(parameter.isfinite().all() for parameter in loaded.swapped)


@pytest.mark.parametrize(
    ("dtypes", "masters"), [((torch.float32, torch.bfloat16), False), ((torch.bfloat16,) * 2, True)]
)
def test_checkpoint_of_other_dtype_is_cast(
    dtypes: tuple[torch.dtype, torch.dtype], masters: bool, store: DiskStore
) -> None:
    saved = Pair(OPTIMIZERS["NAdam"], store, SHAPES, dtypes[0], name="optimizer")
    saved.step()
    original = states(saved)
    saved.offloaded.save("there")
    saved.offloaded.close()
    loaded = Pair(OPTIMIZERS["NAdam"], store, SHAPES, torch.bfloat16, master_weights=masters)
    loaded.offloaded.load("there")
    expected = torch.float32 if masters else torch.bfloat16
    for state, source in zip(states(loaded), original, strict=True):
        assert same(state["exp_avg"], source["exp_avg"].to(expected))
        assert same(state["step"], source["step"])
        assert same(state["mu_product"], source["mu_product"])
    loaded.step()


@pytest.mark.parametrize("masters", [False, True])
def test_state_dict_of_older_torch_is_completed(masters: bool, store: DiskStore) -> None:
    """It lacks options that came later, and its steps are numbers."""
    dtype = torch.bfloat16 if masters else torch.float32
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, dtype, master_weights=masters)
    pair.step()
    old = copy.deepcopy(pair.offloaded.state_dict())
    for option in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        del old["param_groups"][0][option]
    for state in old["state"].values():
        state["step"] = int(state["step"])
    before = states(pair)
    pair.offloaded.load_state_dict(old)
    expect_same_states(states(pair), before)
    assert pair.offloaded.param_groups[0]["maximize"] is False
    pair.step()
    if not masters:
        pair.expect_same()


def test_checkpoint_of_unrelated_class_is_refused(pair: Pair, store: DiskStore) -> None:
    pair.offloaded.save("of Adam")
    pair.offloaded.close()
    parameters = copy.deepcopy(pair.swapped)
    with offload(torch.optim.SGD(parameters, momentum=0.9), store, min_bytes=0) as other:
        with pytest.raises(ValueError, match="'of Adam' is of Adam, but the optimizer is SGD"):
            other.load("of Adam")
        assert len(other.state) == 0
    with offload(torch.optim.AdamW(parameters), store, min_bytes=0) as other:
        other.load("of Adam")
        assert other.state_of(parameters[0])["step"] == 1
        other.save("of AdamW")
    with offload(torch.optim.Adam(parameters), store, min_bytes=0) as other:
        other.load("of AdamW")


def test_replaced_state_releases_memory(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((100,), (100,)), memory=2 * 4 * 100)
    pair.step(missing=[1])
    assert pair.offloaded.statistics().resident_bytes == 800
    pair.offloaded.set_state(pair.swapped[0], {})
    pair.optimizer.state[pair.plain[0]].clear()
    assert pair.offloaded.statistics().resident_bytes == 0
    pair.step(missing=[0])
    assert pair.offloaded.statistics().resident_bytes == 800
    assert pair.offloaded.statistics().stored_bytes == 0
    pair.step()
    pair.expect_same()


def test_wrong_shape_is_refused_for_chunked_parameter(pair: Pair) -> None:
    before = states(pair)
    wrong = {**before[0], "exp_avg": torch.ones(201, 200)}
    with pytest.raises(ValueError, match=r"'exp_avg' has the shape \(201, 200\), but the parameter has \(200, 201\)"):
        pair.offloaded.set_state(pair.swapped[0], wrong)
    expect_same_states(states(pair), before)


def test_replaced_state_drops_unwritten_state(tmp_path: Path) -> None:
    with FaultyEngine("threads", at={1: errno.EIO}) as engine, DiskStore(tmp_path, engine=engine) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, ((77,),))
        pair.give_gradients()
        with pytest.raises(SwapError, match="written"):
            pair.offloaded.step()
        pair.optimizer.step()
        pair.offloaded.set_state(pair.swapped[0], {})
        pair.optimizer.state[pair.plain[0]].clear()
        pair.step()
        pair.expect_same()


def test_parameter_with_unwritable_state_is_not_added(tmp_path: Path) -> None:
    with FaultyEngine("threads", at={2: errno.EIO}) as engine, DiskStore(tmp_path, engine=engine) as store:
        first, second = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
        optimizer = offload(torch.optim.Adagrad, store, params=[first], min_bytes=0)
        with pytest.raises(SwapError, match="parameter 0 of group 1 cannot be written"):
            optimizer.add_param_group({"params": [second]})
        assert (len(optimizer.param_groups), list(optimizer.state)) == (1, [first])
        optimizer.add_param_group({"params": [second]})
        assert optimizer.state_of(second).keys() == {"step", "sum"}


def test_closed_optimizer_takes_no_parameters(pair: Pair) -> None:
    pair.offloaded.close()
    with pytest.raises(InvalidStateError, match="closed"):
        pair.offloaded.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(pair.offloaded.param_groups) == 1


def test_step_in_forked_child_is_refused(tmp_path: Path) -> None:
    with Child(STEPS_IN_A_FORKED_CHILD, str(tmp_path)) as child:
        assert "before it forked" in child.hear()
        assert child.hear() == "2.0 in the parent"


STEPS_IN_A_FORKED_CHILD = """
import os, sys, torch
from cudafuture import InvalidStateError
from cudafuture.swap import offload

weight = torch.nn.Parameter(torch.ones(300))
optimizer = offload(torch.optim.Adam([weight]), sys.argv[1], min_bytes=0)
weight.sum().backward()
optimizer.step()
pid = os.fork()
if pid == 0:
    try:
        optimizer.step()
    except InvalidStateError as e:
        say(str(e))
    os._exit(0)
os.waitpid(pid, 0)
optimizer.step()
say(f"{optimizer.state_of(weight)['step']} in the parent")
"""

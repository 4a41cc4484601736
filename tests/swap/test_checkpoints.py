"""Checkpoints of optimizer state: names, replacement, crashes, failures, values, and other chunk sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.child import Child
from support.soak import SOAK
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair(store: DiskStore) -> Pair:
    return Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,), (3,)), chunk_bytes=1 << 16, memory=1000)


def test_checkpoint_restores_state_and_options(pair: Pair, store: DiskStore) -> None:
    pair.offloaded.save("empty")
    for _ in range(3):
        pair.step()
    used = store.statistics().used
    pair.offloaded.save("third step")
    assert store.statistics().used < used + 8192, "the checkpoint copies tensors"
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer.param_groups[0]["lr"] = pair.offloaded.param_groups[0]["lr"] = 0.9
    for _ in range(2):
        pair.step()
    assert pair.offloaded.checkpoints() == ["empty", "third step"]
    pair.optimizer.load_state_dict(saved)
    pair.offloaded.load("third step")
    assert pair.offloaded.param_groups[0]["lr"] == 0.001
    pair.expect_same()
    for _ in range(3):
        pair.step()
    pair.expect_same()
    pair.offloaded.load("empty")
    assert len(pair.offloaded.state) == 0


def test_checkpoint_loads_with_other_chunks_and_buffers(pair: Pair, store: DiskStore) -> None:
    for _ in range(3):
        pair.step()
    pair.offloaded.save("here")
    pair.offloaded.close()
    ways: list[dict[str, Any]] = [{"chunk_bytes": 1 << 20}, {"chunk_bytes": 70_000, "prefetch": 0}, {"memory": 1 << 20}]
    for options in ways:
        other = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,), (3,)), name="optimizer", **options)
        other.offloaded.load("here")
        for i, parameter in enumerate(other.swapped):
            expected = pair.optimizer.state[pair.plain[i]]
            found = other.offloaded.state_of(parameter)
            assert all(same(value, found[name]) for name, value in expected.items())
        other.offloaded.close()


def test_checkpoint_is_replaced_and_deleted(pair: Pair, store: DiskStore) -> None:
    pair.step()
    pair.offloaded.save("latest")
    keys = len(store.keys())
    for _ in range(3):
        pair.step()
        pair.offloaded.save("latest")
    assert len(store.keys()) == keys
    pair.offloaded.load("latest")
    pair.expect_same()
    pair.offloaded.delete_checkpoint("latest")
    assert pair.offloaded.checkpoints() == []
    pair.offloaded.close()
    assert store.keys() == []


@pytest.mark.parametrize("is_replaced", [True, False])
def test_checkpoints_without_tensors_have_own_numbers(is_replaced: bool, store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store)
    pair.offloaded.save("before the first step")
    pair.step()
    pair.offloaded.save("first step")
    if is_replaced:
        pair.offloaded.save("before the first step")
    else:
        pair.offloaded.delete_checkpoint("before the first step")
    pair.offloaded.load("first step")
    pair.expect_same()


class Interrupted:
    """A future of a write, the wait for which is interrupted."""

    def wait(self) -> int:
        raise KeyboardInterrupt


def saved_keys(store: DiskStore) -> set[str]:
    return {key for key in store.list_keys().wait() if "/state/" not in key}


@pytest.fixture
def two_steps(pair: Pair, store: DiskStore) -> tuple[Pair, dict[str, Any]]:
    """Give a pair with a checkpoint of its first step, and the state of that, after its second step."""
    pair.step()
    pair.offloaded.save("latest")
    state = copy.deepcopy(pair.optimizer.state_dict())
    pair.step()
    return pair, state


def expect_loads(pair: Pair, state: dict[str, Any]) -> None:
    pair.optimizer.load_state_dict(state)
    pair.offloaded.load("latest")
    pair.expect_same()


def test_interrupt_after_manifest_leaves_whole_checkpoint(
    two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, _ = two_steps
    second = copy.deepcopy(pair.optimizer.state_dict())
    write = store.write
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lambda key, tensor: write(key, tensor).wait() and Interrupted())
        with pytest.raises(KeyboardInterrupt):
            pair.offloaded.save("latest")
    pair.step()
    expect_loads(pair, second)


@pytest.mark.parametrize("call", ["save", "load", "delete_checkpoint"])
def test_call_waits_for_manifest_of_interrupted_save(
    call: str, two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is in flight until the store is flushed."""
    pair, _ = two_steps
    pair.offloaded.save("other")
    second = copy.deepcopy(pair.optimizer.state_dict())
    write, in_flight = store.write, []
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lambda key, tensor: in_flight.append((key, tensor)) or Interrupted())  # type: ignore[func-returns-value]
        with pytest.raises(KeyboardInterrupt):
            pair.offloaded.save("latest")
    with monkeypatch.context() as patch:
        patch.setattr(store, "flush", lambda: write(*in_flight.pop()))
        getattr(pair.offloaded, call)("other")
    assert not in_flight
    pair.step()
    expect_loads(pair, second)


def test_failed_manifest_leaves_older_checkpoint_and_no_tensors(
    two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, first = two_steps
    before = saved_keys(store)

    def fail(key: str, tensor: torch.Tensor) -> CUDAFuture[int]:
        future = CUDAFuture[int]()
        future.set_exception(StorageError("the disk is full"))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", fail)
        with pytest.raises(StorageError, match="full"):
            pair.offloaded.save("latest")
    assert saved_keys(store) == before
    expect_loads(pair, first)


@pytest.mark.parametrize("checkpoint", ["latest", "other"])
def test_next_checkpoint_deletes_tensors_without_manifest(
    checkpoint: str, two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, first = two_steps
    pair.offloaded.save("other")
    before = saved_keys(store)
    for name in ("latest", "never complete"):
        with monkeypatch.context() as patch:
            patch.setattr(store, "write", lambda key, tensor: Interrupted())
            with pytest.raises(KeyboardInterrupt):
                pair.offloaded.save(name)
    assert len(saved_keys(store)) > len(before)
    expect_loads(pair, first)
    pair.offloaded.save(checkpoint)
    assert len(saved_keys(store)) == len(before)
    expect_loads(pair, first)


@pytest.mark.parametrize("checkpoint", ["latest", "other"])
def test_last_of_two_manifests_counts_after_crash(
    checkpoint: str, two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, _ = two_steps
    before = len(saved_keys(store))
    second = copy.deepcopy(pair.optimizer.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(store, "deletev", lambda keys: CUDAFuture.completed(None))
        pair.offloaded.save("latest")
        assert len(saved_keys(store)) == 2 * before
    pair.step()
    assert pair.offloaded.checkpoints() == ["latest"]
    expect_loads(pair, second)
    pair.offloaded.save(checkpoint)
    assert len(saved_keys(store)) == before * len(pair.offloaded.checkpoints())
    expect_loads(pair, second)


def test_all_manifests_of_checkpoint_are_deleted(
    two_steps: tuple[Pair, dict[str, Any]], store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, _ = two_steps
    with monkeypatch.context() as patch:
        patch.setattr(store, "deletev", lambda keys: CUDAFuture.completed(None))
        pair.offloaded.save("latest")
    pair.offloaded.delete_checkpoint("latest")
    assert saved_keys(store) == set()


def test_numpy_numbers_are_saved_as_python_numbers(pair: Pair) -> None:
    pair.step()
    options = pair.offloaded.param_groups[0]
    options["lr"], options["betas"] = np.float64(0.25), (np.float32(0.5), 0.75)
    pair.offloaded.set_state(pair.swapped[1], {**pair.offloaded.state_of(pair.swapped[1]), "count": np.int64(3)})
    pair.offloaded.save("here")
    options["lr"] = 1.0
    pair.offloaded.load("here")
    loaded = pair.offloaded.param_groups[0]
    assert (type(loaded["lr"]), loaded["lr"], loaded["betas"]) == (float, 0.25, (0.5, 0.75))
    assert pair.offloaded.state_of(pair.swapped[1])["count"] == 3


def test_unloadable_values_are_not_saved(pair: Pair, store: DiskStore) -> None:
    pair.step()
    pair.offloaded.save("here")
    before = saved_keys(store)
    pair.offloaded.param_groups[0]["folder"] = {"of": [Path("here")]}
    with pytest.raises(TypeError, match=r"option 'folder' of group 0 .*pathlib.*which a checkpoint cannot store"):
        pair.offloaded.save("here")
    del pair.offloaded.param_groups[0]["folder"]
    state = pair.offloaded.state_of(pair.swapped[1])
    pair.offloaded.set_state(pair.swapped[1], {**state, "scale": lambda: 1})
    with pytest.raises(TypeError, match=r"'scale' of the state of parameter 1 .*function"):
        pair.offloaded.save("here")
    assert saved_keys(store) == before
    pair.offloaded.set_state(pair.swapped[1], state)
    pair.offloaded.save("here")


def test_manifest_has_no_large_tensors(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,)), chunk_bytes=1 << 16, memory=1 << 20)
    pair.step()
    assert pair.offloaded.statistics().stored_bytes == 0
    part = torch.ones(1 << 16)[:3]  # a manifest has all of the memory of a tensor
    pair.offloaded.param_groups[0]["part"] = part
    pair.offloaded.save("latest")
    (manifest,) = [key for key in store.list_keys().wait() if "/checkpoints/" in key]
    assert store.stat(manifest).nbytes < 1 << 14
    first = copy.deepcopy(pair.optimizer.state_dict())
    pair.step()
    del pair.offloaded.param_groups[0]["part"]
    expect_loads(pair, first)
    assert same(pair.offloaded.param_groups[0]["part"], part)
    pair.offloaded.close()
    other = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,)), chunk_bytes=1 << 16)
    other.offloaded.load("latest")
    for plain, swapped in zip(pair.plain, other.swapped, strict=True):
        found = other.offloaded.state_of(swapped)
        assert all(same(value, found[name]) for name, value in pair.optimizer.state[plain].items())


def test_unknown_checkpoints_are_refused(pair: Pair, store: DiskStore) -> None:
    pair.offloaded.save("there")
    with pytest.raises(NotFoundError, match="no checkpoint 'elsewhere'; there are: 'there'"):
        pair.offloaded.load("elsewhere")
    with pytest.raises(NotFoundError):
        pair.offloaded.delete_checkpoint("elsewhere")
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="checkpoint"):
            pair.offloaded.save(name)
    calls: list[Callable[[Any], None]] = [pair.offloaded.save, pair.offloaded.load, pair.offloaded.delete_checkpoint]
    for call in calls:
        with pytest.raises(TypeError, match="checkpoint is a str, not 5"):
            call(5)
    pair.offloaded.close()
    other = Pair(OPTIMIZERS["Adam"], store, ((5, 5),))
    with pytest.raises(ValueError, match=r"\(200, 201\)"):
        other.offloaded.load("there")


def test_kill_during_step_and_save(tmp_path: Path) -> None:
    """The last checkpoint whose save() has returned can be loaded, and is whole."""
    for number in range(100 if SOAK else 2):
        folder = tmp_path / f"{number}"
        with Child(TRAINS_FOR_EVER, str(folder)) as child:
            while (said := int(child.hear())) < number % 7 + 1:
                pass
            child.process.kill()
            child.process.wait()
        with DiskStore(folder, durable=True) as store:
            pair = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,)), chunk_bytes=1 << 16)
            steps = sorted(pair.offloaded.checkpoints())
            assert steps == ["latest"]
            pair.offloaded.load("latest")
            state = pair.offloaded.state_of(pair.swapped[0])
            assert state["step"] >= said
            assert all(torch.equal(state["exp_avg"].view(-1)[0].expand(200, 201), state["exp_avg"]) for _ in range(1))
            weights = 1 - 0.9 ** state["step"].item()
            assert torch.allclose(state["exp_avg"], torch.full((200, 201), weights), rtol=1e-4)
            pair.offloaded.close()


TRAINS_FOR_EVER = """
import sys, torch
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from cudafuture.swap import offload
parameters = [torch.nn.Parameter(torch.ones(200, 201)), torch.nn.Parameter(torch.ones(77))]
store = DiskStore(sys.argv[1], durable=True)
optimizer = offload(torch.optim.Adam(parameters), store, min_bytes=0, chunk_bytes=1 << 16)
step = 0
while True:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    step += 1
    optimizer.save("latest")
    say(step)
"""


def test_state_dict_reads_tensors_on_use(tmp_path: Path) -> None:
    with Engine() as engine, DiskStore(tmp_path, engine=engine) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (70_001,), (2 * 16_384 + 100,)), chunk_bytes=1 << 16)
        pair.step()
        before = engine.statistics().blocks
        states = pair.offloaded.state_dict()["state"]
        assert engine.statistics().blocks == before
        for number, plain in enumerate(pair.plain):
            assert all(same(states[number][name], value) for name, value in pair.optimizer.state[plain].items())
        pair.step()  # the mapped tensors keep the old values
        assert states[1]["exp_avg"].shape == (70_001,)
        assert not same(states[1]["exp_avg"], pair.optimizer.state[pair.plain[1]]["exp_avg"])

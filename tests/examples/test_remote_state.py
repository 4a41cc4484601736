"""Adam's state in the memory of another worker: its order of reads and writes, and the buckets in memory."""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_digits")


class Store:
    """Store whose writes and reads end when the test says so."""

    worker = "other"

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.in_flight: dict[tuple[str, str], tuple[CUDAFuture[Any], torch.Tensor | None]] = {}

    def write(self, key: str, tensor: torch.Tensor) -> CUDAFuture[int]:
        future: CUDAFuture[int] = CUDAFuture(name=f"write {key}")
        self.in_flight["write", key] = future, tensor
        return future

    def read(self, key: str) -> CUDAFuture[torch.Tensor]:
        future: CUDAFuture[torch.Tensor] = CUDAFuture(name=f"read {key}")
        self.in_flight["read", key] = future, None
        return future

    def finish(self, what: str, key: str) -> Any:
        """Let one of them be done; a weak reference to the tensor that it was about."""
        future, tensor = self.in_flight.pop((what, key))
        if tensor is None:
            tensor = self.kept[key].clone()
            future.set_result(tensor)
        else:
            self.kept[key] = tensor.clone()
            future.set_result(tensor.nbytes)
        return weakref.ref(tensor)


@pytest.fixture
def state(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Store, list[Any]]:
    """Return the state of three buckets, of which two are in memory at a time."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    remote_state = importlib.import_module("_remote_state")
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in "abc"))
    buckets = [example.Bucket(i, {name: layer}) for i, (name, layer) in enumerate(zip("abc", model, strict=True))]
    store = Store()
    states = remote_state.RemoteState(store, buckets, ahead=2)
    for name in "abc":
        store.finish("write", f"{name}/moments")
    return states, store, buckets


def test_memory_is_reused_after_its_write(state: tuple[Any, Store, list[Any]]) -> None:
    states, store, (a, *_) = state
    assert set(store.in_flight) == {("read", "a/moments"), ("read", "b/moments")}, "two at a time"
    reduced: CUDAFuture[torch.Tensor] = CUDAFuture()
    updated = states.update(a, reduced)
    moments = store.finish("read", "a/moments")
    assert not updated.done(), "the gradients are not there yet"
    reduced.set_result(a.gradients)
    assert updated.wait() == a.parameters
    assert set(store.in_flight) == {("read", "b/moments"), ("write", "a/moments")}
    assert moments() is not None
    store.finish("write", "a/moments")
    assert moments() is None, "nobody holds what the disk has"
    assert set(store.in_flight) == {("read", "b/moments"), ("read", "c/moments")}


def test_state_is_read_after_its_write(state: tuple[Any, Store, list[Any]]) -> None:
    states, store, (a, b, _) = state
    for bucket in (a, b):
        store.finish("read", f"{'ab'[bucket.index]}/moments")
        states.update(bucket, CUDAFuture.completed(bucket.gradients)).wait()
    store.finish("write", "b/moments")  # which makes room for a; but a itself is still being written
    assert set(store.in_flight) == {("write", "a/moments")}
    store.finish("write", "a/moments")
    assert set(store.in_flight) == {("read", "a/moments"), ("read", "c/moments")}


def test_failed_write_fails_later_updates(state: tuple[Any, Store, list[Any]]) -> None:
    states, store, (a, b, c) = state
    for bucket in (a, b):
        store.finish("read", f"{'ab'[bucket.index]}/moments")
        states.update(bucket, CUDAFuture.completed(bucket.gradients)).wait()
    error = OSError("the disk is full")
    store.in_flight.pop(("write", "a/moments"))[0].set_exception(error)
    store.finish("write", "b/moments")
    assert states.update(c, CUDAFuture.completed(c.gradients)).exception(timeout=10) is error
    assert states.update(a, CUDAFuture.completed(a.gradients)).exception(timeout=10) is error
    with pytest.raises(OSError, match="full"):
        states.finish()


def test_state_differing_by_bit_is_named(state: tuple[Any, Store, list[Any]]) -> None:
    remote_state = importlib.import_module("_remote_state")
    _, store, buckets = state
    for bucket in buckets:
        bucket.optimizer.state[bucket.values].update(exp_avg=torch.zeros(6), exp_avg_sq=torch.zeros(6))
    read = [store.kept[remote_state.key(bucket)] for bucket in buckets]
    assert remote_state.differing_states(read, buckets) == []
    read[1][1, 3].nextafter_(torch.tensor(1.0))
    assert remote_state.differing_states(read, buckets) == ["b/moments"]

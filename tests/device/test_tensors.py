"""The search for tensors in Python objects: where it gives up, what it does then, and how often it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, TensorSearchError, _tensors, collect_all, collect_any, gather
from support.harness import Device, Simulated
from support.patience import PATIENCE


class Counted:
    """An object that counts the searches of it."""

    attributes: dict[str, Any]

    def __init__(self, x: torch.Tensor) -> None:
        object.__setattr__(self, "attributes", {"x": x})
        self.searches = 0

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        self.searches += 1
        attributes: dict[str, Any] = object.__getattribute__(self, "attributes")
        return attributes

    __slots__ = ("attributes", "searches")


@dataclass
class Link:
    """A link of a chain of objects, which has a tensor at its end."""

    next: object


class Broken:
    """An object whose attributes cannot be read."""

    error: type[BaseException] = ZeroDivisionError

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise self.error("no attributes")


class Interrupted(Broken):
    error = KeyboardInterrupt


def chain(x: torch.Tensor, length: int) -> Any:
    value: Any = x
    for _ in range(length):
        value = Link(value)
    return value


def end_of(value: Any) -> torch.Tensor:
    while isinstance(value, Link):
        value = value.next
    assert isinstance(value, torch.Tensor)
    return value


def complete_counted(device: Device) -> tuple[CUDAFuture[list[Counted]], Counted]:
    future: CUDAFuture[list[Counted]] = CUDAFuture()
    with device.on(device.stream()):
        value = Counted(device.produce(3.0))
        future.set_result([value])
    return future, value


@pytest.fixture
def three_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search give up after three objects."""
    monkeypatch.setattr(_tensors, "_MAX_OBJECTS", 3)


# ---- bounds


@pytest.mark.parametrize("length", [40, 2_000])
def test_deeply_hidden_tensor_is_ordered(device: Device, length: int) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(device.stream()):
        future.set_result(chain(device.produce(3.0), length))
    with device.on(device.stream()):
        assert device.read(end_of(future.wait(non_blocking=True))) == 3.0


def test_tensor_after_many_objects_is_ordered(device: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(device.stream()):
        future.set_result([*[Link(None) for _ in range(150_000)], device.produce(3.0)])
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)[-1]) == 3.0


def test_deep_containers_are_searched(device: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(device.stream()):
        value: Any = device.produce(3.0)
        for _ in range(5_000):
            value = [value]
        future.set_result(value)
    with device.on(device.stream()):
        value = future.wait(non_blocking=True)
        while isinstance(value, list):
            value = value[0]
        assert device.read(value) == 3.0


def test_shared_containers_are_walked_once(device: Device) -> None:
    value: Any = device.produce(3.0)
    for _ in range(60):  # 2 ** 60 paths lead to the tensor
        value = [value, value]
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(value)
    assert future.wait(timeout=PATIENCE) is value


@pytest.mark.usefixtures("three_objects")
def test_unsearchable_size_fails_future(accelerator: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(chain(accelerator.produce(3.0), 4))
    with pytest.raises(TensorSearchError, match=r"test_tensors\.Link' gave up after 3 objects.*tensors=\[") as caught:
        future.wait(timeout=PATIENCE)
    assert isinstance(caught.value, ValueError)


@pytest.mark.usefixtures("three_objects")
def test_unsearchable_result_fails_child(accelerator: Device) -> None:
    child = accelerator.complete(3.0).then(lambda done: chain(done.value(), 4))
    assert isinstance(child.exception(timeout=PATIENCE), TensorSearchError)


@pytest.mark.usefixtures("three_objects")
def test_unsearchable_completed_value_fails(accelerator: Device) -> None:
    future = CUDAFuture.completed(chain(accelerator.produce(3.0), 4))
    assert isinstance(future.exception(timeout=PATIENCE), TensorSearchError)


@pytest.mark.usefixtures("three_objects")
def test_named_tensors_replace_search(device: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    producer, consumer = device.stream(), device.stream()
    with device.on(producer):
        x = device.produce(3.0)
        future.set_result(chain(x, 4), tensors=[x])
        del x
    with device.on(consumer):
        y = end_of(future.wait(non_blocking=True)) * 2
    del future
    with device.on(producer):
        device.produce(-1.0)
    with device.on(consumer):
        assert device.read(y) == 6.0


@pytest.mark.usefixtures("three_objects")
def test_empty_name_list_means_no_tensors(accelerator: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(value := chain(accelerator.produce(3.0), 4), tensors=[])
    assert future.wait(timeout=PATIENCE) is value
    assert not future.events
    whole = gather(future, accelerator.complete(3.0))
    assert whole.wait(timeout=PATIENCE)[0] is value


def test_unsearchable_object_fails_future(accelerator: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result([accelerator.produce(3.0), Broken()])
    with pytest.raises(ZeroDivisionError, match="no attributes"):
        future.wait(timeout=PATIENCE)


def test_interrupted_search_fails_and_raises(accelerator: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with pytest.raises(KeyboardInterrupt):
        future.set_result([accelerator.produce(3.0), Interrupted()])
    assert isinstance(future.exception(timeout=PATIENCE), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        CUDAFuture.completed([accelerator.produce(3.0), Interrupted()])


def test_unsearchable_object_may_name_tensors(device: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(device.stream()):
        x = device.produce(3.0)
        future.set_result([Broken(), x], tensors=[x])
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)[1]) == 3.0


def test_modules_are_not_searched(accelerator: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "_MAX_OBJECTS", 100)
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(Link(torch))
    assert future.exception(timeout=PATIENCE) is None


# ---- one search


def test_several_waits_and_callbacks_search_once(accelerator: Device) -> None:
    future, value = complete_counted(accelerator)
    for _ in range(3):
        with accelerator.stream():
            assert future.wait(non_blocking=True) == [value]
        future.then(lambda done: None).wait(timeout=PATIENCE)
    assert value.searches == 1


COMBINED: dict[str, Callable[[CUDAFuture[Any]], CUDAFuture[Any]]] = {
    "gather": lambda part: gather(part, CUDAFuture.completed(None)),
    "gather of gathers": lambda part: gather(gather(part)),
    "collect_all": lambda part: collect_all([part]),
    "collect_any": lambda part: collect_any([part]),
    "then_async": lambda part: CUDAFuture.completed(None).then_async(lambda _: part),
}


@pytest.mark.parametrize("combined", COMBINED)
def test_combined_futures_reuse_search(accelerator: Device, combined: str) -> None:
    producer, consumer = accelerator.stream(), accelerator.stream()
    with producer:
        value = Counted(accelerator.produce(3.0))
        part: CUDAFuture[Any] = CUDAFuture()
        part.set_result([value])
    whole = COMBINED[combined](part)
    with consumer:
        for _ in range(3):
            whole.wait(non_blocking=True)
        y = value.attributes["x"] * 2
    assert value.searches == 1
    del value, part, whole
    with producer:
        accelerator.produce(-1.0)
    with consumer:
        assert accelerator.read(y) == 6.0


def test_futures_in_value_are_not_searched(accelerator: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect_all([accelerator.complete(float(i)) for i in range(3)])
    monkeypatch.setattr(_tensors, "search_objects", lambda *_: pytest.fail("a search in Python"))
    with accelerator.stream():
        assert [accelerator.read(part.value()) for part in whole.wait(non_blocking=True)] == [0.0, 1.0, 2.0]


def test_found_memory_is_kept_per_stream(device: Device) -> None:
    producer, consumers = device.stream(), [device.stream(), device.stream(-1)]
    future: CUDAFuture[Link] = CUDAFuture()
    with device.on(producer):
        future.set_result(Link(device.produce(2.0)))
    results = []
    for consumer in consumers:
        with device.on(consumer):
            results.append(end_of(future.wait(non_blocking=True)) * 3)
    del future
    with device.on(producer):
        device.produce(-1.0)
    for consumer, y in zip(consumers, results, strict=True):
        with device.on(consumer):
            assert device.read(y) == 6.0


# ---- values that change


def count_deferred(accelerator: Device) -> int:
    assert isinstance(accelerator, Simulated)
    count: int = accelerator.sim.statistics().deferred_blocks
    return count


def replace(value: list[Link], x: torch.Tensor) -> torch.Tensor:
    """Put another tensor in the place of the first, which dies."""
    value[0].next = x
    return x


def append(value: list[Link], x: torch.Tensor) -> torch.Tensor:
    value.append(Link(x))
    return x


@pytest.mark.parametrize("change", [replace, append])
def test_changed_value_is_searched_again(accelerator: Device, change: Callable[..., torch.Tensor]) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("the allocator does not say what it holds back")
    future: CUDAFuture[list[Link]] = CUDAFuture()
    with accelerator.stream() as producer:
        value = [Link(accelerator.produce(2.0))]
        future.set_result(value)
        future.wait(non_blocking=True)
        change(value, accelerator.produce(3.0))
    before = count_deferred(accelerator)
    with accelerator.stream() as consumer, accelerator.hold(consumer):
        consumer.wait_stream(producer)
        future.wait(non_blocking=True)
        last = value.pop()
        del last
        assert count_deferred(accelerator) == before + 1


def test_cached_search_keeps_no_memory(accelerator: Device) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("the allocator does not say what it holds")
    future: CUDAFuture[list[Link]] = CUDAFuture()
    value = [Link(accelerator.produce(2.0))]
    future.set_result(value)
    accelerator.finish()
    before = accelerator.sim.statistics().allocated_bytes
    value.clear()
    assert accelerator.sim.statistics().allocated_bytes < before

"""prefetch(): batches are read ahead, and are on the device in the order in which the iterable gives them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from cudafuture import _C, CUDAFuture, current_streams, prefetch
from cudafuture.prefetch import Prefetcher
from support.harness import SIZE, Device

Tensor = torch.Tensor
LONG = 60.0  # seconds, for what happens at once


def make_tensors(values: Iterable[float]) -> list[Tensor]:
    return [torch.full((SIZE,), float(value)) for value in values]


def ones(batches: Iterable[Tensor]) -> list[float]:
    """Return the value of each batch, which is read by the current stream before the next one is taken."""
    return [x.double().mean() for x in batches]  # type: ignore[misc]


def values(means: list[Any]) -> list[float]:
    return [mean.item() for mean in means]


class Remade:
    """An iterable that calls a function for each iterator."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


# ---- what arrives


class Named(NamedTuple):
    inputs: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    note: str = "note"


class Moving:
    """A class that moves itself, as batches of tokenizers and graphs do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.was_pinned = False

    def pin_memory(self) -> Moving:
        pinned = Moving(self.x.pin_memory())
        pinned.was_pinned = True
        return pinned

    def to(self, device: torch.device) -> Moving:  # without non_blocking=
        moved = Moving(self.x.to(device))
        moved.was_pinned = self.was_pinned
        return moved


class Opaque:
    """A class that is passed on."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """A mapping that is a dataclass, too, as the outputs of transformers are: fields that are not None are keys."""

    x: Any = None
    y: Any = None

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


X = torch.arange(6.0).reshape(2, 3)
STRUCTURES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "tensor": (X, lambda b: b),
    "list": ([X, 1], lambda b: b[0]),
    "tuple": ((X, None), lambda b: b[0]),
    "dict": ({"x": {"y": X}, "z": "z"}, lambda b: b["x"]["y"]),
    "ordered dict": (OrderedDict(x=X), lambda b: b["x"]),
    "read-only mapping": (Frozen(OrderedDict(x=X)), lambda b: b.x["x"]),
    "named tuple": (Named([X], "labels"), lambda b: b.inputs[0]),
    "frozen dataclass": (Frozen([X]), lambda b: b.x[0]),
    "dataclass that is a mapping": (Output(X), lambda b: b["x"]),
    "attribute of a dataclass that is a mapping": (Output(X), lambda b: b.x),
    "return type of torch": (torch.max(X, dim=0), lambda b: b.values),
    "no contiguous memory": (X.t()[::2], lambda b: b),
    "no elements": (torch.empty(0, 3), lambda b: b),
    "parameter": (torch.nn.Parameter(X), lambda b: b),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batch_keeps_its_structure(device: Device, structure: str) -> None:
    batch, tensor_of = STRUCTURES[structure]
    for arrived in prefetch([batch, batch], device.at()):
        assert type(arrived) is type(batch) or structure == "parameter"
        x = tensor_of(arrived)
        assert x.device == device.at()
        assert torch.equal(x.detach().cpu(), tensor_of(batch).detach())
    assert tensor_of(batch).device.type == "cpu"  # the given one is not changed


def test_other_objects_are_passed_on(device: Device) -> None:
    note, proxy = object(), types.MappingProxyType({"x": 1})
    (arrived,) = prefetch([[note, None, "text", 3, int, proxy]], device.at())
    assert arrived[0] is note
    assert arrived[1:5] == [None, "text", 3, int]
    assert arrived[5] == proxy


def test_movable_object_is_pinned_and_moved(accelerator: Device) -> None:
    for moved in prefetch([Moving(torch.ones(3)), Moving(torch.ones(3))], accelerator.at()):
        assert moved.was_pinned
        assert moved.x.device == accelerator.at()
        assert moved.x.tolist() == [1] * 3


def test_movable_object_type_error_is_raised(accelerator: Device) -> None:
    calls = []

    class Broken:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            calls.append(non_blocking)
            raise TypeError("cannot be moved")

    with pytest.raises(TypeError, match="cannot be moved"):
        list(prefetch([Broken()], accelerator.at()))
    assert calls == [True]


def test_device_batch_passes_unchanged(accelerator: Device) -> None:
    there = torch.ones(3, device=accelerator.at())
    for x, y in prefetch([(there, torch.zeros(2))] * 3, accelerator.at()):
        assert x is there
        assert y.tolist() == [0, 0]


def test_batches_of_another_device_are_copied(pair: Device) -> None:
    with pair.select(1):
        batches = [torch.full((SIZE,), float(i), device=pair.at(1)) for i in range(3)]
    assert values(ones(prefetch(batches, pair.at(0)))) == [0, 1, 2]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("pin", [True, False, "auto"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_batches_arrive_in_order(device: Device, depth: int, pin: Any, pack: bool) -> None:
    batches = prefetch(make_tensors(range(10)), device.at(), depth=depth, pin=pin, pack=pack)
    for _epoch in range(2):
        assert values(ones(batches)) == list(range(10))


def test_batches_of_all_sizes_arrive(device: Device) -> None:
    sizes = [3, 100_000, 0, 5, 200_000, 1, 100_000, 7]
    batches = [torch.arange(float(size)) for size in sizes]
    for wanted, arrived in zip(batches, prefetch(batches, device.at(), depth=3), strict=True):
        assert torch.equal(arrived.cpu(), wanted)


def test_pinned_batches_arrive(accelerator: Device) -> None:
    batches = [torch.full((100_000,), float(i)).pin_memory() for i in range(5)]
    assert values(ones(prefetch(batches, accelerator.at()))) == list(range(5))


def test_batches_may_be_kept(device: Device) -> None:
    kept = list(prefetch(make_tensors(range(12)), device.at(), depth=3))
    assert [device.read(x) for x in kept] == list(range(12))


def test_empty_iterable_is_empty_epoch(device: Device) -> None:
    batches = prefetch([], device.at())
    assert list(batches) == list(batches) == []


def test_length_is_that_of_iterable(device: Device) -> None:
    assert len(prefetch([1, 2, 3], device.at())) == 3
    with pytest.raises(TypeError):
        len(prefetch(Remade(lambda: iter([])), device.at()))


def test_current_accelerator_is_default(accelerator: Device) -> None:
    assert prefetch([]).device.type == accelerator.name


def test_exhausted_iterator_stays_exhausted(device: Device) -> None:
    epoch = iter(prefetch([1], device.at()))
    assert next(epoch) == 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(epoch)


def test_wrong_arguments_are_refused(device: Device) -> None:
    for iterable in (3, None):
        with pytest.raises(TypeError, match="prefetch\\(\\) takes an iterable, not"):
            prefetch(iterable, device.at())  # type: ignore[arg-type]
    for wrong in ({"depth": 0}, {"bytes": 0}, {"priority": 1}, {"pin": "maybe"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            prefetch([], device.at(), **wrong)
    with pytest.raises(ValueError, match="no streams on meta"):
        prefetch([], "meta")


# ---- how far ahead


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_limits_batches_ahead(device: Device, depth: int) -> None:
    requested, ahead = [0], []

    def read() -> Iterator[Tensor]:
        for i, batch in enumerate(make_tensors(range(20))):
            ahead.append(i - requested[0])
            yield batch

    epoch = iter(prefetch(Remade(read), device.at(), depth=depth))
    for _ in range(20):
        requested[0] += 1
        next(epoch)
    assert max(ahead) < depth


@pytest.mark.parametrize("wrap", [lambda x: x, Moving, Opaque], ids=["bare", "moving", "opaque"])
def test_bytes_limit_batches_ahead(device: Device, wrap: Any) -> None:
    requested, ahead = [0], []

    def read() -> Iterator[Tensor]:
        for i, batch in enumerate(make_tensors(range(20))):
            ahead.append(i - requested[0])
            yield wrap(batch)

    epoch = iter(prefetch(Remade(read), device.at(), depth=8, bytes=2 * SIZE * 4, pin=False))
    for _ in range(20):
        requested[0] += 1
        next(epoch)
    assert max(ahead) < 2
    assert values(ones(prefetch(make_tensors(range(3)), device.at(), bytes=1))) == [0, 1, 2]


def test_batches_are_read_ahead(device: Device) -> None:
    read_all = threading.Event()

    def read() -> Iterator[Tensor]:
        yield from make_tensors(range(3))
        read_all.set()

    epoch = iter(prefetch(Remade(read), device.at(), depth=4))
    assert read_all.wait(LONG)
    assert values(ones(epoch)) == [0, 1, 2]


def test_iterator_is_made_by_caller(device: Device) -> None:
    made, pulled = [], []

    def read() -> Iterator[int]:
        for i in range(5):
            pulled.append(threading.current_thread())
            yield i

    def make() -> Iterator[int]:
        made.append(threading.current_thread())
        return read()

    assert list(prefetch(Remade(make), device.at())) == list(range(5))
    assert made == [threading.current_thread()]
    assert len(set(pulled)) == 1
    assert pulled[0] is not threading.current_thread()


# ---- streams


def test_current_stream_and_device_stay(pair: Device) -> None:
    with pair.select(1):
        before = current_streams([pair.at(0), pair.at(1)])
        for _ in prefetch(make_tensors(range(3)), pair.at(0), transform=lambda x: x + 1):
            assert current_streams([pair.at(0), pair.at(1)]) == before
            assert pair.current_index() == 1


def test_epochs_share_one_copy_stream(accelerator: Device) -> None:
    seen = []

    def note(batch: Tensor) -> Tensor:
        seen.append(current_streams([accelerator.at()])[0])
        return batch

    batches = prefetch(make_tensors(range(3)), accelerator.at(), transform=note)
    for _epoch in range(3):
        list(batches)
    assert len({stream.stream_id for stream in seen}) == 1
    assert seen[0] != current_streams([accelerator.at()])[0]


def test_consumer_follows_copy(accelerator: Device) -> None:
    for i, batch in enumerate(prefetch(make_tensors(range(4)), accelerator.at())):
        assert accelerator.read(batch) == i


def test_copy_waits_for_consumer_of_memory(accelerator: Device) -> None:
    doubled = []
    for batch in prefetch(make_tensors(range(12)), accelerator.at(), depth=1):
        accelerator.delay()
        doubled.append((batch * 2).mean())
        del batch
    assert values(doubled) == [2 * i for i in range(12)]


def test_copy_runs_beside_consumer(accelerator: Device) -> None:
    epoch = iter(prefetch(make_tensors(range(4)), accelerator.at(), depth=2))
    first, _second = next(epoch), next(epoch)
    with accelerator.hold():
        doubled = first * 2  # held back
        third = next(epoch)  # whose copy is enqueued; nothing here waits for the held stream
    assert accelerator.read(doubled) == 0
    assert accelerator.read(third) == 2


def test_several_streams_may_take_batches(accelerator: Device) -> None:
    streams = [accelerator.stream() for _ in range(3)]
    epoch = iter(prefetch(make_tensors(range(12)), accelerator.at(), depth=2))
    means = []
    for i in range(12):
        with accelerator.on(streams[i % 3]):
            batch = next(epoch)
            accelerator.delay()
            means.append(batch.mean())
            del batch
    for stream in streams:
        stream.synchronize()
    assert values(means) == list(range(12))


def test_reader_polls_without_blocking_driver(accelerator: Device) -> None:
    """A driver's own wait keeps a core busy. Here it returns at once, so that only polling holds the reader back."""
    read: list[int] = []

    def loader() -> Iterator[Tensor]:
        for i, batch in enumerate(make_tensors(range(8))):
            read.append(i)
            yield batch

    batches = prefetch(loader(), accelerator.at(), depth=2, futures=True)
    assert batches._sender is not None
    _C.cut_sync_edge("event.synchronize")
    try:
        with accelerator.hold(batches._sender.stream):
            epoch = iter(batches)
            futures = [next(epoch) for _ in range(4)]  # after three copies the reader waits for the first
            with pytest.raises(TimeoutError):
                futures[3].wait(timeout=0.3, non_blocking=True)
        assert [accelerator.read(future.wait(non_blocking=True)) for future in [*futures, *epoch]] == list(range(8))
    finally:
        _C.cut_sync_edge(None)


def test_transform_runs_behind_copy(device: Device) -> None:
    batches = prefetch(make_tensors(range(6)), device.at(), transform=lambda x: {"half": x / 2, "same": x})
    for i, batch in enumerate(batches):
        assert device.read(batch["half"]) == i / 2
        assert device.read(batch["same"]) == i


def test_transform_memory_lives_during_use(accelerator: Device) -> None:
    sent, used = threading.Event(), threading.Event()
    results: list[None] = []

    def transform(x: Tensor) -> Tensor:  # the second one allocates after the consumer has dropped the first result
        results.append(None)
        if len(results) == 2:
            sent.set()
            assert used.wait(LONG)
        return x + 1

    epoch = iter(prefetch(make_tensors(range(2)), accelerator.at(), depth=1, transform=transform))
    batch = next(epoch)
    assert sent.wait(LONG)
    accelerator.delay()
    means = [batch.mean()]
    del batch
    used.set()
    means += ones(epoch)
    assert values(means) == [1, 2]


def test_transform_has_grad_mode_of_caller(device: Device) -> None:
    modes = []
    batches = prefetch(make_tensors(range(2)), device.at(), transform=lambda x: modes.append(torch.is_grad_enabled()))
    with torch.no_grad():
        list(batches)
    list(batches)
    assert modes == [False, False, True, True]


@pytest.mark.parametrize("wrap", [lambda x: x, Moving, Opaque], ids=["bare", "moving", "opaque"])
def test_batch_follows_work_of_loader(accelerator: Device, wrap: Any) -> None:
    def read() -> Iterator[Any]:  # on the default stream
        for i in range(4):
            yield {"there": wrap(accelerator.produce(float(i))), "here": torch.zeros(1)}

    with accelerator.on(accelerator.stream()):
        for i, batch in enumerate(prefetch(Remade(read), accelerator.at(), pin=False)):
            assert accelerator.read(getattr(batch["there"], "x", batch["there"])) == i


def test_abandoned_batches_are_freed(accelerator: Device) -> None:
    sent = threading.Event()
    means: list[Tensor] = []

    def transform(batch: Tensor) -> Tensor:
        accelerator.delay()
        means.append(batch.mean())
        if len(means) == 2:
            sent.set()
        return batch

    epoch = iter(prefetch(make_tensors(range(4)), accelerator.at(), depth=2, transform=transform))
    assert sent.wait(LONG)
    epoch.close()
    others = [accelerator.empty().fill_(9.0) for _ in range(8)]
    accelerator.finish()
    assert [accelerator.read(x) for x in others] == [9.0] * 8
    assert values(means) == [0, 1]


# ---- errors and endings


class LoaderError(Exception):
    pass


def test_iterable_error_arrives_at_its_batch(device: Device) -> None:
    def fail_at_2() -> Iterator[Tensor]:
        yield from make_tensors(range(2))
        raise LoaderError("no third batch")

    batches = prefetch(Remade(fail_at_2), device.at(), depth=8)
    for _epoch in range(2):
        epoch = iter(batches)
        assert device.read(next(epoch)) == 0
        assert device.read(next(epoch)) == 1
        with pytest.raises(LoaderError, match="no third batch") as raised:
            next(epoch)
        assert "fail_at_2" in [entry.name for entry in raised.traceback]
        with pytest.raises(StopIteration):
            next(epoch)


def test_transform_error_arrives_at_its_batch(device: Device) -> None:
    def fail_at_1(batch: Tensor) -> Tensor:
        if batch.max() == 1:
            raise LoaderError("a transform")
        return batch

    batches = prefetch(make_tensors(range(4)), device.at(), transform=fail_at_1)
    for _epoch in range(2):
        epoch = iter(batches)
        assert device.read(next(epoch)) == 0
        with pytest.raises(LoaderError, match="a transform"):
            next(epoch)


def test_transform_stop_iteration_is_error(device: Device) -> None:
    batches = prefetch(make_tensors(range(4)), device.at(), transform=lambda batch: next(iter(())))
    with pytest.raises(RuntimeError, match=r"a transform of prefetch\(\) raised StopIteration"):
        list(batches)


def test_iterator_is_dropped_after_epoch(device: Device) -> None:
    dropped = threading.Event()

    class Source:
        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Tensor:
            raise StopIteration

        def state_dict(self) -> dict[str, int]:
            return {}

        def __del__(self) -> None:
            dropped.set()

    batches = prefetch(Remade(Source), device.at())
    assert list(batches) == []
    assert dropped.wait(LONG)


def test_forked_child_dropping_epoch_ends(device: Device) -> None:
    epoch = iter(prefetch(make_tensors(range(4)), device.at()))
    next(epoch)
    reader = weakref.ref(epoch._reader)
    child = os.fork()
    if child == 0:
        del epoch
        os._exit(0 if reader() is not None else 1)  # freed memory of a device would take the lock of its allocator
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(epoch)) == 3


def test_failed_batch_frees_memory_immediately(device: Device) -> None:
    class Fragile:
        def __init__(self) -> None:
            self.x = torch.ones(3)

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            raise LoaderError("cannot be moved")

    if not device.has_streams:
        pytest.skip("nothing is moved on the host")
    gc.collect()
    gc.disable()
    try:
        gone = threading.Event()
        batch = Fragile()
        import weakref

        weakref.finalize(batch, gone.set)
        epoch = iter(prefetch(iter([batch]), device.at()))
        del batch
        with pytest.raises(LoaderError):
            next(epoch)
        del epoch
        assert gone.wait(LONG)
    finally:
        gc.enable()


def test_abandoned_epoch_closes_iterator(device: Device) -> None:
    closed = threading.Event()

    def read() -> Iterator[Tensor]:
        try:
            yield from make_tensors(range(100))
        finally:
            closed.set()

    batches = prefetch(Remade(read), device.at())
    for _batch in batches:
        break
    assert closed.wait(LONG)
    assert values(ones(batches)) == list(range(100))


def test_new_epoch_waits_for_previous_reader(device: Device) -> None:
    inside, go_on = threading.Event(), threading.Event()
    running = []

    def read() -> Iterator[int]:
        running.append(1)
        yield 0
        inside.set()
        assert go_on.wait(LONG)
        running.pop()
        yield 1

    batches = prefetch(Remade(read), device.at())
    for _batch in batches:
        assert inside.wait(LONG)  # the reader is in the iterable when the loop ends
        break
    batches.close()
    threading.Timer(0, go_on.set).start()
    epoch = iter(batches)
    assert len(running) <= 1
    assert next(epoch) == 0
    assert next(epoch) == 1


def test_ctrl_c_leaves_prefetcher_usable(device: Device) -> None:
    go_on = threading.Event()

    def read() -> Iterator[int]:
        if not go_on.is_set():
            signal.raise_signal(signal.SIGINT)
            assert go_on.wait(LONG)
        yield from range(3)

    batches = prefetch(Remade(read), device.at())
    with pytest.raises(KeyboardInterrupt):
        list(batches)
    go_on.set()
    assert list(batches) == [0, 1, 2]


def test_two_prefetchers_beside_each_other(device: Device) -> None:
    left, right = prefetch(make_tensors(range(5)), device.at()), prefetch(make_tensors(range(5, 10)), device.at())
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert device.read(a) == i
        assert device.read(b) == i + 5


def test_prefetchers_can_be_chained(device: Device) -> None:
    assert values(ones(prefetch(prefetch(make_tensors(range(5)), device.at()), device.at()))) == list(range(5))


# ---- DataLoader


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((SIZE,), float(index))


def test_data_loader_workers_deliver_batches(device: Device) -> None:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=3, num_workers=2, multiprocessing_context="fork")
    batches = prefetch(loader, device.at())
    for _epoch in range(2):
        assert values(ones(batches)) == [1, 4, 7, 10]


# ---- state


class Stateful:
    """An iterable that can be resumed, as StatefulDataLoader is."""

    def __init__(self, count: int = 8) -> None:
        self.count = count
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.position = self.position, 0
        for self.position in range(start + 1, self.count + 1):  # noqa: B020
            yield torch.full((SIZE,), float(self.position - 1))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("taken", range(9))
def test_resume_delivers_remaining_batches(device: Device, taken: int, depth: int) -> None:
    batches = prefetch(Stateful(), device.at(), depth=depth)
    epoch = iter(batches)
    for _ in range(taken):
        next(epoch)
    state = batches.state_dict()
    again = prefetch(Stateful(), device.at(), depth=depth)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert values(ones(again)) == list(range(taken, 8))
    batches.load_state_dict(state)
    assert values(ones(batches)) == list(range(taken, 8))
    assert values(ones(batches)) == list(range(8))


def test_stateless_iterable_refuses_resume(device: Device) -> None:
    with pytest.raises(TypeError, match="list has no state_dict"):
        prefetch([], device.at()).state_dict()
    with pytest.raises(TypeError, match="list has no load_state_dict"):
        prefetch([], device.at()).load_state_dict({})


# ---- across epochs


def test_next_epoch_is_read_ahead(device: Device) -> None:
    epochs: list[threading.Thread] = []
    second_was_read = threading.Event()

    def make() -> Iterator[Tensor]:
        epochs.append(threading.current_thread())
        return read(len(epochs))

    def read(number: int) -> Iterator[Tensor]:
        for i, batch in enumerate(make_tensors(range(4))):
            if number == 2 and i == 1:
                second_was_read.set()
            yield batch

    batches = prefetch(Remade(make), device.at(), depth=2, across_epochs=True)
    assert values(ones(batches)) == list(range(4))
    assert second_was_read.wait(LONG)  # before the second `for`
    assert values(ones(batches)) == list(range(4))
    assert set(epochs) == {threading.current_thread()}
    batches.close()


def test_set_epoch_precedes_each_epoch(device: Device) -> None:
    numbers: list[int] = []
    batches = prefetch(Remade(lambda: iter([numbers[-1]] * 2)), device.at(), across_epochs=numbers.append)
    assert [list(batches) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    batches.close()
    assert numbers == [0, 1, 2, 3]


def test_error_stops_following_epochs(device: Device) -> None:
    made: list[int] = []

    def make() -> Iterator[int]:
        made.append(len(made))
        yield 0
        raise LoaderError

    batches = prefetch(Remade(make), device.at(), across_epochs=True)
    with pytest.raises(LoaderError):
        list(batches)
    assert made == [0]


# ---- futures


def test_futures_of_batches_are_yielded(device: Device) -> None:
    futures = list(prefetch(make_tensors(range(6)), device.at(), depth=2, futures=True))
    assert all(isinstance(future, CUDAFuture) for future in futures)
    assert [device.read(future.wait(non_blocking=True)) for future in futures] == list(range(6))


def test_future_precedes_its_batch(device: Device) -> None:
    go_on = threading.Event()

    def transform(batch: Tensor) -> Tensor:
        assert go_on.wait(LONG)
        return batch

    epoch = iter(prefetch(make_tensors(range(2)), device.at(), futures=True, transform=transform))
    first = next(epoch)
    assert not first.done()
    go_on.set()
    assert device.read(first.wait(non_blocking=True)) == 0


def test_futures_may_be_dropped(accelerator: Device) -> None:
    for _future in prefetch(make_tensors(range(20)), accelerator.at(), futures=True):
        pass
    del _future
    others = [accelerator.empty().fill_(9.0) for _ in range(8)]
    accelerator.finish()
    assert [accelerator.read(x) for x in others] == [9.0] * 8


def test_error_fails_future_of_batch(device: Device) -> None:
    def read() -> Iterator[Tensor]:
        yield from make_tensors(range(1))
        raise LoaderError("no second batch")

    first, second = prefetch(Remade(read), device.at(), futures=True)
    assert device.read(first.wait(non_blocking=True)) == 0
    assert isinstance(second.exception(), LoaderError)


# ---- async


class Asynchronous:
    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[Tensor]:
        try:
            for i in range(self.count):
                await asyncio.sleep(0)
                yield torch.full((SIZE,), float(i))
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def collect(batches: Prefetcher) -> list[Any]:
    return [x.double().mean() async for x in batches]


def test_async_iterable_runs_in_caller_loop(device: Device) -> None:
    async def main() -> None:
        batches = prefetch(Asynchronous(6), device.at())
        for _epoch in range(2):
            assert values(await collect(batches)) == list(range(6))

    asyncio.run(main())


def test_any_iterable_can_be_awaited(device: Device) -> None:
    async def main() -> None:
        batches = prefetch(make_tensors(range(6)), device.at())
        for _epoch in range(2):
            assert values(await collect(batches)) == list(range(6))

    asyncio.run(main())


def test_async_iterable_error_arrives_at_batch(device: Device) -> None:
    async def main() -> None:
        batches = prefetch(Asynchronous(2, LoaderError("no third batch")), device.at())
        for _epoch in range(2):
            with pytest.raises(LoaderError, match="no third batch"):
                await collect(batches)

    asyncio.run(main())


def test_async_epoch_can_be_left(device: Device) -> None:
    async def main() -> None:
        source = Asynchronous(100)
        batches = prefetch(source, device.at())
        async for _batch in batches:
            break
        batches.close()
        while not source.closed:
            await asyncio.sleep(0)
        assert values(await collect(batches)) == list(range(100))

    asyncio.run(main())


def test_plain_loop_refuses_async_iterable(device: Device) -> None:
    with pytest.raises(TypeError, match="async for"):
        iter(prefetch(Asynchronous(1), device.at()))


# ---- statistics


@pytest.mark.parametrize("futures", [False, True])
def test_batches_and_bytes_are_counted(device: Device, futures: bool) -> None:
    five = [(x, Moving(x), Opaque(x)) for x in make_tensors(range(5))]
    batches = prefetch(five, device.at(), pin=False, futures=futures)
    list(batches)
    counted = batches.statistics()
    assert counted.batches == 5
    assert counted.bytes == (5 * 2 * SIZE * 4 if device.has_streams else 0)
    list(batches)
    assert batches.statistics().batches == 10


def test_wait_for_loader_is_counted(device: Device) -> None:
    go_on = threading.Event()

    def read() -> Iterator[int]:
        assert go_on.wait(LONG)
        yield 0

    async def main() -> None:
        batches = prefetch(Remade(read), device.at())
        waiting = asyncio.ensure_future(anext(aiter(batches)))
        await asyncio.sleep(0)
        go_on.set()
        assert await waiting == 0
        assert batches.statistics().waited_for_loader > 0

    asyncio.run(main())


def test_wait_for_packing_is_counted(device: Device) -> None:
    go_on = threading.Event()

    def transform(batch: Tensor) -> Tensor:
        assert go_on.wait(LONG)
        return batch

    async def main() -> None:
        batches = prefetch(make_tensors(range(1)), device.at(), transform=transform)
        waiting = asyncio.ensure_future(anext(aiter(batches)))
        await asyncio.sleep(0)
        go_on.set()
        await waiting
        counted = batches.statistics()
        assert counted.waited_for_packing > 0
        assert counted.waited == pytest.approx(
            counted.waited_for_loader + counted.waited_for_packing + counted.waited_for_device
        )

    asyncio.run(main())

"""The modules of torchgpipe's and fairscale's names: streams, micro-batches and workers with queues."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture.compat.torchgpipe import worker as worker_module
from cudafuture.compat.torchgpipe.microbatch import Batch, check, gather, scatter
from cudafuture.compat.torchgpipe.stream import (
    AbstractStream,
    CPUStream,
    CPUStreamType,
    as_cuda,
    current_stream,
    default_stream,
    get_device,
    is_cuda,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)
from cudafuture.compat.torchgpipe.worker import (
    ExcInfo,
    InQueue,
    OutQueue,
    Task,
    create_workers,
    join_workers,
    spawn_workers,
    worker,
)
from cudafuture.pipeline.stream import normalize_device

CPU = torch.device("cpu")


class FakeDevice:
    """Every one is a device of its own."""

    type = "fake"
    index = None


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("cudafuture-worker")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() <= before


def batch(value: float = 1.0) -> Batch:
    return Batch(torch.tensor([value]), 0)


def run_one(device: Any, task: Task) -> tuple[bool, Any]:
    with spawn_workers([device]) as (in_queues, out_queues):
        in_queues[0].put(task)
        return out_queues[0].get()


# ---- streams


def test_cpu_has_one_inert_stream() -> None:
    assert new_stream(CPU) is current_stream(CPU) is default_stream(CPU) is CPUStream
    assert isinstance(CPUStream, CPUStreamType)
    assert not is_cuda(CPUStream)
    assert not is_cuda(None)
    assert get_device(CPUStream) == CPU
    with use_device(CPU), use_stream(CPUStream), use_stream(None):
        wait_stream(CPUStream, CPUStream)
        record_stream(torch.ones(1), CPUStream)


def test_unknown_device_type_has_no_streams() -> None:
    assert new_stream(FakeDevice()) is CPUStream
    with use_device(FakeDevice()):
        assert current_stream(FakeDevice()) is CPUStream


@pytest.mark.sim(devices=2)
def test_known_device_type_has_streams(sim: ModuleType) -> None:
    class Double:
        type = "sim"
        index = 1

    assert get_device(new_stream(Double())) == torch.device("sim:1")


@pytest.mark.sim(devices=2)
def test_accelerator_has_streams(sim: ModuleType) -> None:
    device = torch.device("sim:1")
    stream = new_stream(device)
    assert is_cuda(stream)
    assert as_cuda(stream) is stream
    assert get_device(stream) == device
    assert default_stream(device) == current_stream(device) != stream
    assert normalize_device(torch.device("sim")) == torch.device("sim:0")
    with use_device(device):
        assert normalize_device(torch.device("sim")) == device


@pytest.mark.sim
def test_live_streams_are_not_shared(sim: ModuleType) -> None:
    streams = [as_cuda(new_stream(torch.device("sim:0"))) for _ in range(40)]
    assert len({stream.stream_id for stream in streams}) == 40  # more than a pool has


@pytest.mark.sim(devices=2)
def test_use_stream_sets_stream_and_device(sim: ModuleType) -> None:
    device = torch.device("sim:1")
    stream = new_stream(device)
    barrier = threading.Barrier(2)

    def use_twice() -> None:
        for _ in range(10):
            barrier.wait()
            with use_stream(stream), use_stream(stream):
                barrier.wait()
                assert current_stream(torch.device("sim")) == stream
                with use_stream(None), use_stream(CPUStream):
                    assert current_stream(torch.device("sim")) == stream
            assert current_stream(device) == default_stream(device)
            assert torch.accelerator.current_device_index() == 0

    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: collect(errors, use_twice))
    thread.start()
    use_twice()
    thread.join()
    assert not errors


def collect(errors: list[BaseException], function: Callable[[], object]) -> None:
    try:
        function()
    except BaseException as error:
        errors.append(error)


@pytest.mark.sim(schedule="lazy")
def test_wait_stream_orders_streams_or_cpu(sim: ModuleType) -> None:
    device = torch.device("sim:0")
    first, second = as_cuda(new_stream(device)), as_cuda(new_stream(device))
    with use_stream(first):
        sim.sleep(ms=5)
        x = torch.ones(4, device=device)
    wait_stream(second, first)
    with use_stream(second):
        y = x + 1
    wait_stream(CPUStream, second)
    assert second.query()
    wait_stream(second, CPUStream)
    wait_stream(current_stream(device), second)
    assert y.sum().item() == 8


@pytest.mark.sim(schedule="lazy")
@pytest.mark.parametrize(
    "part", [lambda x: x, lambda x: x[2000:], lambda x: torch.view_as_complex(x.view(-1, 2)).conj()]
)
def test_record_stream_keeps_storage_of_view(part: Callable[[Any], Any], sim: ModuleType) -> None:
    device = torch.device("sim:0")
    side = new_stream(device)
    x = torch.ones(4096, device=device)
    wait_stream(side, current_stream(device))
    address = x.data_ptr()
    with use_stream(side):
        sim.sleep(ms=5)
        y = x.sum()
    record_stream(part(x), side)
    del x
    again = torch.zeros(4096, device=device)
    assert again.data_ptr() != address
    wait_stream(current_stream(device), side)
    assert y.item() == 4096


@pytest.mark.sim
def test_record_stream_ignores_cpu_tensor(sim: ModuleType) -> None:
    record_stream(torch.ones(2), new_stream(torch.device("sim:0")))


# ---- micro-batches


def test_batch_may_be_atomic() -> None:
    x = Batch(torch.tensor([42]), 7)
    assert x.atomic
    assert x.index == 7
    assert x.tensor is x.tensor_or_tensors is x[0]
    assert [tensor.item() for tensor in x] == [42]
    assert len(x) == 1
    assert x.call(lambda y: (y, y)).index == 7  # type: ignore[arg-type, return-value]
    assert repr(x) == "Batch[atomic=True](tensor([42]))"
    with pytest.raises(AttributeError, match="atomic"):
        _ = x.tensors
    with pytest.raises(IndexError):
        _ = x[1]
    with pytest.raises(AttributeError):
        x.index = 3  # type: ignore[misc]


def test_batch_may_have_several_tensors() -> None:
    a, b = torch.tensor([1]), torch.tensor([2])
    x = Batch((a, b))
    assert not x.atomic
    assert x.index == 0
    assert x.tensors == (a, b)
    assert list(x) == [a, b]
    assert len(x) == 2
    assert x[-1] is b
    with pytest.raises(AttributeError, match="atomic"):
        _ = x.tensor
    assert x.call(lambda pair: pair[0] + pair[1]).tensor.item() == 3


def test_batch_assignment_replaces_tensors() -> None:
    a, b, c = (torch.tensor([i]) for i in range(3))
    one, two = Batch(a), Batch((a, b))
    one[0] = b
    assert one.tensor is b
    one[:] = (c,)
    assert one.tensor is c
    two[1] = c
    two[-2] = b
    assert two.tensors == (b, c)
    two[:] = (a,)
    assert two.tensors == (a,)  # type: ignore[comparison-overlap]
    with pytest.raises(IndexError):
        one[1] = a
    with pytest.raises(IndexError, match="2"):
        one[:] = (a, b)
    with pytest.raises(NotImplementedError):
        two[0:1] = (a,)
    with pytest.raises(IndexError):
        two[5] = a


def test_check_takes_only_tensors_and_tuples() -> None:
    check(torch.ones(1))
    check((torch.ones(1), torch.ones(1)))
    for wrong in (42, "str", [torch.ones(1)], (torch.ones(1), 42)):
        with pytest.raises(TypeError, match="expected Tensor"):
            check(wrong)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 9])
def test_gather_inverts_scatter(chunks: int) -> None:
    x, y = torch.arange(5), torch.arange(10).view(5, 2)
    batches = scatter(x, chunks)
    assert [b.index for b in batches] == list(range(len(x.chunk(chunks))))
    assert torch.equal(gather(batches), x)  # type: ignore[arg-type]
    pairs = scatter((x, y), chunks)
    assert all(not b.atomic for b in pairs)
    together = gather(pairs)
    assert isinstance(together, tuple)
    assert torch.equal(together[0], x)
    assert torch.equal(together[1], y)


def test_scatter_refuses_uneven_chunk_counts() -> None:
    with pytest.raises(ValueError, match=r"\[4, 2\]"):
        scatter((torch.ones(4), torch.ones(2)), 4)


# ---- workers


def test_computes_run_in_worker_threads() -> None:
    where: list[int] = []
    task = Task(CPUStream, compute=lambda: where.append(threading.get_ident()) or batch(5), finalize=None)  # type: ignore[func-returns-value]
    with spawn_workers([CPU]) as (in_queues, out_queues):
        assert isinstance(in_queues[0], InQueue)  # type: ignore[misc]
        assert isinstance(out_queues[0], OutQueue)  # type: ignore[misc]
        in_queues[0].put(task)
        ok, payload = out_queues[0].get()
        assert ok is True
        assert payload[0] is task  # type: ignore[index]
        assert payload[1].tensor.item() == 5  # type: ignore[index, union-attr]
    assert where[0] != threading.get_ident()
    assert out_queues[0].empty()


def test_tasks_of_two_devices_overlap() -> None:
    barrier = threading.Barrier(2)
    with spawn_workers([FakeDevice(), FakeDevice()]) as (in_queues, out_queues):
        for in_queue in in_queues:
            in_queue.put(Task(None, compute=lambda: Batch(torch.tensor([barrier.wait(10)])), finalize=None))
        assert all(out_queue.get()[0] for out_queue in out_queues)


@pytest.mark.sim(devices=2)
def test_requests_for_device_share_queues(sim: ModuleType) -> None:
    names = ["cpu", "cpu:0", "sim", "sim:0", "sim:1", "cpu"]
    with spawn_workers([torch.device(name) for name in names]) as (in_queues, out_queues):
        for queues in (in_queues, out_queues):
            assert len(queues) == 6
            assert queues[0] is queues[1] is queues[5]
            assert queues[2] is queues[3]
            assert len(set(queues)) == 3


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_compute_error_is_returned_and_worker_lives(error: type[BaseException]) -> None:
    def explode() -> Batch:
        raise error("in compute")

    with spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(Task(CPUStream, compute=explode, finalize=None))
        in_queues[0].put(Task(CPUStream, compute=batch, finalize=None))
        ok, payload = out_queues[0].get()
        assert ok is False
        exc_info: ExcInfo = payload  # type: ignore[assignment]
        assert exc_info[0] is error
        with pytest.raises(error, match="in compute") as raised:
            raise exc_info[0].with_traceback(exc_info[1], exc_info[2])
        assert raised.traceback[-1].name == "explode"
        assert out_queues[0].get()[0] is True


def test_error_in_block_follows_waiting_tasks() -> None:
    ran: list[int] = []

    def compute(i: int) -> Batch:
        ran.append(i)
        return batch()

    def program() -> None:
        with spawn_workers([CPU]) as (in_queues, _):
            for i in range(5):
                in_queues[0].put(Task(None, compute=lambda i=i: compute(i), finalize=None))  # type: ignore[misc]
            raise LookupError("in the block")

    with pytest.raises(LookupError, match="in the block"):
        program()
    assert ran == [0, 1, 2, 3, 4]


def test_failing_create_workers_leaves_no_thread() -> None:
    def devices() -> Iterator[torch.device]:
        yield CPU
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"), spawn_workers(devices()):
        pass
    with pytest.raises(OSError, match="no such device"):
        create_workers(devices())
    assert not threads()


@pytest.mark.sim(devices=1)
def test_create_workers_refuses_absent_device(sim: ModuleType) -> None:
    with pytest.raises(Exception, match=r".+"):
        create_workers([CPU, torch.device("sim:5")])
    assert not threads()


def test_join_workers_may_repeat() -> None:
    queues = create_workers([CPU, FakeDevice()])
    assert len(threads()) == 2
    assert all(thread.daemon for thread in threads())
    queues[0][0].put(Task(None, compute=batch, finalize=None))
    join_workers(*queues)
    assert not threads()
    join_workers(*queues)


def test_join_workers_ends_caller_worker() -> None:
    in_queue, out_queue = InQueue(), OutQueue()
    thread = threading.Thread(target=worker, args=(in_queue, out_queue, CPU, True))
    thread.start()
    join_workers([in_queue], [out_queue])
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("grad_mode", [True, False])
def test_grad_mode_reaches_compute_and_finalize(grad_mode: bool) -> None:
    seen: list[bool] = []

    def compute() -> Batch:
        seen.append(torch.is_grad_enabled())
        return batch()

    with torch.set_grad_enabled(grad_mode):
        task = Task(CPUStream, compute=compute, finalize=lambda _: seen.append(torch.is_grad_enabled()))
    with torch.set_grad_enabled(not grad_mode):
        ok, payload = run_one(CPU, task)
        assert ok
        task.finalize(payload[1])
        assert torch.is_grad_enabled() is not grad_mode
    assert seen == [grad_mode, grad_mode]


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def test_modes_and_contextvars_reach_both_parts() -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            variable.get(),
        )

    seen: list[tuple[object, ...]] = []

    def compute() -> Batch:
        seen.append(settings())
        return batch()

    outside = settings()
    token = variable.set("of the task")
    with torch.inference_mode(), torch.autocast("cpu", torch.float16, cache_enabled=False):
        task = Task(None, compute=compute, finalize=lambda _: seen.append(settings()))
        inside = settings()
    variable.reset(token)
    plain = Task(None, compute=compute, finalize=lambda _: seen.append(settings()))
    assert outside != inside
    run_one(CPU, task)
    task.finalize(batch())
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        plain.finalize(plain.compute())
        assert torch.is_autocast_enabled("cpu")
    assert seen == [inside, inside, outside, outside]
    assert settings() == outside


def test_task_without_finalize_runs() -> None:
    Task(None, compute=batch, finalize=None).finalize(batch())


@pytest.mark.sim(devices=2, schedule="lazy")
def test_stream_and_device_are_current_in_task(sim: ModuleType) -> None:
    device = torch.device("sim:1")
    stream: AbstractStream = new_stream(device)
    seen: list[AbstractStream] = []

    def compute() -> Batch:
        seen.append(current_stream(torch.device("sim")))
        return batch()

    task = Task(stream, compute=compute, finalize=lambda _: seen.append(current_stream(torch.device("sim"))))
    assert task.stream is stream
    ok, payload = run_one(device, task)
    assert ok
    task.finalize(payload[1])
    run_one(device, Task(None, compute=compute, finalize=None))
    assert seen == [stream, stream, default_stream(device)]


def test_several_threads_may_run_task() -> None:
    barrier = threading.Barrier(2)
    task = Task(None, compute=lambda: Batch(torch.tensor([barrier.wait(10)])), finalize=None)
    with spawn_workers([FakeDevice(), FakeDevice()]) as (in_queues, out_queues):
        for in_queue in in_queues:
            in_queue.put(task)
        assert all(out_queue.get()[0] for out_queue in out_queues)


def test_waiting_worker_keeps_no_task() -> None:
    class Value:
        pass

    value = Value()
    kept = weakref.ref(value)
    with spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(Task(None, compute=lambda value=value: value and batch(), finalize=None))  # type: ignore[misc]
        del value
        with suppress(Exception):
            out_queues[0].get()
        in_queues[0].put(Task(None, compute=batch, finalize=None))
        out_queues[0].get()
        assert kept() is None


def test_peer_names_exist() -> None:
    for name in ("ExcInfo", "InQueue", "OutQueue", "Task", "create_workers", "join_workers", "spawn_workers", "worker"):
        assert hasattr(worker_module, name)

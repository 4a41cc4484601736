"""Controls and counters of the fake devices, and the rules of CUDA that they follow."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from cudafuture.testing import fakecuda
from support.soak import soak_count

pytestmark = pytest.mark.cuda

SECONDS = 60.0  # much more than anything takes


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> Iterator[None]:
    yield
    fakecuda.release()
    torch.cuda.synchronize()


def test_hold_keeps_work_pending() -> None:
    x = torch.zeros(4, device="cuda")
    with fakecuda.hold():
        x.fill_(1.0)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert done.query()
    assert x.tolist() == [1.0] * 4


def test_hold_stops_only_dependent_streams() -> None:
    held, other, third = (torch.cuda.Stream() for _ in range(3))
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with fakecuda.hold(held):
        third.wait_stream(held)
        with torch.cuda.stream(other):
            y = x + 1
        other.synchronize()
        with torch.cuda.stream(third):
            x.add_(1)
        assert y.tolist() == [1.0] * 4
        assert not third.query()
    third.synchronize()


def test_opened_hold_wakes_synchronizing_thread() -> None:
    held = fakecuda.hold()
    x = torch.ones(4, device="cuda")
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(x.sum().item()))
    thread.start()
    held.open()
    thread.join(SECONDS)
    assert seen == [4.0]


def test_dropped_hold_opens() -> None:
    fakecuda.hold()
    torch.cuda.current_stream().synchronize()


def test_counters_count() -> None:
    torch.cuda.synchronize()
    before = fakecuda.statistics()
    event = torch.cuda.Event()
    x = torch.ones(4, device="cuda") + 1
    event.record()
    x.cpu()
    after = fakecuda.statistics()
    assert after.kernels_run - before.kernels_run == 2
    assert after.kernels_skipped == before.kernels_skipped
    assert after.copies - before.copies == 1
    assert after.events_created - before.events_created == 1
    assert after.events_alive - before.events_alive == 1
    del event
    assert fakecuda.statistics().events_alive == before.events_alive


def test_pinned_bytes_match_pinned_memory(alone: Callable[..., str]) -> None:
    alone("""
    before = fakecuda.statistics().pinned_bytes
    x = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert fakecuda.statistics().pinned_bytes - before == 1 << 20
    """)


def test_foreign_kernel_is_skipped_and_named(alone: Callable[..., str]) -> None:
    alone("""
    sparse = torch.eye(3).to_sparse().cuda()
    sparse.to_dense()
    assert fakecuda.statistics().kernels_skipped > 0
    assert any("sparse" in name for name in fakecuda.skipped_kernels()), fakecuda.skipped_kernels()
    """)


def test_selecting_device_makes_its_context(alone: Callable[..., str]) -> None:
    alone("""
    assert fakecuda.contexts() == ()
    torch.cuda.set_device(1)
    assert fakecuda.contexts() == (1,)
    fakecuda.reset_context(1)
    assert fakecuda.contexts() == ()
    """)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("assert", "device-side assert triggered"),
        ("illegal address", "an illegal memory access was encountered"),
        ("launch failure", "unspecified launch failure"),
    ],
)
def test_injected_error_is_sticky(alone: Callable[..., str], error: str, message: str) -> None:
    alone(f"""
    x = torch.ones(4, device="cuda")
    fakecuda.fail({error!r})
    for call in (torch.cuda.synchronize, x.sum, lambda: torch.empty(1 << 24, device="cuda:1")):
        with pytest.raises(RuntimeError, match={message!r}):
            call()
            torch.cuda.synchronize()
    """)


def test_unknown_error_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'flood' is not an error that a kernel can fail with; use one of illegal address"
    ):
        fakecuda.fail("flood")


def test_allocations_fail_as_often_as_set(alone: Callable[..., str]) -> None:
    alone("""
    torch.ones(1, device="cuda")
    fakecuda.fail_allocations(2)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 26, device="cuda")
    assert torch.empty(1 << 26, device="cuda").numel() == 1 << 26
    """)


def test_exceeding_device_memory_is_refused(alone: Callable[..., str]) -> None:
    alone("""
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    """)


def test_fresh_memory_is_poisoned(alone: Callable[..., str]) -> None:
    alone("assert torch.empty(64, device='cuda').isnan().all().item()")


def test_host_cannot_read_device_memory(alone: Callable[..., str]) -> None:
    alone("""
    import subprocess, sys, signal
    program = "import ctypes, torch; ctypes.string_at(torch.ones(4, device='cuda').data_ptr(), 4)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGSEGV
    """)


def test_kernel_refuses_stream_of_other_device() -> None:
    class Dimensions(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint) for name in ("x", "y", "z")]

    runtime, one = ctypes.CDLL(None), Dimensions(1, 1, 1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.device(0):
        handle = ctypes.c_void_p(stream.cuda_stream)
        error = runtime.cudaLaunchKernel(None, one, one, None, ctypes.c_size_t(0), handle)
    assert error == 400  # cudaErrorInvalidResourceHandle
    runtime.cudaGetLastError()


def test_event_records_only_on_own_device() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream("cuda:0"))
    with pytest.raises(RuntimeError, match=r"invalid resource handle|device"):
        event.record(torch.cuda.current_stream("cuda:1"))


def test_legacy_stream_waits_for_blocking_streams() -> None:
    """CUDA runtime API, "Stream synchronization behavior"."""
    runtime, handle = ctypes.CDLL(None), ctypes.c_void_p()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    blocking = torch.cuda.ExternalStream(handle.value)
    with fakecuda.hold(blocking):
        x.add_(1)  # on the default stream
        assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert runtime.cudaStreamDestroy(handle) == 0
    assert x.tolist() == [1.0] * 4


def test_blocking_host_function_delays_own_stream() -> None:
    runtime, opened = ctypes.CDLL(None), threading.Event()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait(SECONDS) and None)
    blocked, free = torch.cuda.Stream(), torch.cuda.Stream()
    assert runtime.cudaLaunchHostFunc(ctypes.c_void_p(blocked.cuda_stream), function, None) == 0
    with torch.cuda.stream(free):
        x = torch.ones(4, device="cuda")
    free.synchronize()
    assert not blocked.query()
    opened.set()
    blocked.synchronize()
    assert x.tolist() == [1.0] * 4


def test_unjoined_stream_ends_capture_with_error() -> None:
    side = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="unjoined work"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())


def test_forked_child_refuses_cuda(alone: Callable[..., str]) -> None:
    alone("""
    import os, threading
    cudart = ctypes.CDLL(None)
    runs, may_end = threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def block(_):
        runs.set()
        may_end.wait()

    torch.ones(1, device="cuda")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert cudart.cudaLaunchHostFunc(stream, block, None) == 0
    runs.wait()
    child = os.fork()
    if child == 0:
        os._exit(cudart.cudaDeviceSynchronize())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # cudaErrorInitializationError
    may_end.set()
    torch.cuda.synchronize()
    """)


@pytest.mark.soak
def test_process_ends_with_work_queued(alone: Callable[..., str]) -> None:
    for _ in range(soak_count(50)):
        alone("""
        torch.cuda._sleep(1_000_000_000)
        streams = [torch.cuda.Stream() for _ in range(4)]
        held = fakecuda.hold(streams[0])
        for stream in streams:
            with torch.cuda.stream(stream):
                x = torch.ones(1 << 16, device="cuda").mul_(2)
                future = CUDAFuture.completed(x)
                child = future.then(lambda f: f.value(), non_blocking=False)
        """)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_device_wait_ends_capture_in_every_mode(mode: str) -> None:
    errors: list[str] = []

    def wait() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(str(error))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode=mode)
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
    assert "not permitted when stream is capturing" in errors[0]


def test_each_capture_has_unique_id() -> None:
    runtime, ids = ctypes.CDLL(None), []
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            handle = ctypes.c_void_p(stream.cuda_stream)
            arguments = (handle, ctypes.byref(status), ctypes.byref(number), None, None, None, None)
            assert runtime.cudaStreamGetCaptureInfo(*arguments) == 0
            assert status.value == 1  # cudaStreamCaptureStatusActive
            ids.append(number.value)
            torch.zeros(1, device="cuda").add_(1)
            graph.capture_end()
    assert 0 not in ids
    assert len(set(ids)) == 2

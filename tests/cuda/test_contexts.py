"""Contexts and memory of CUDA: none is made where nothing was asked for, and other allocators do as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.cuda

CONTEXTS = """
    import torch
    from ctypes import CDLL, byref, c_int, c_uint
    from cudafuture import CUDAFuture, gather

    driver = CDLL("libcuda.so.1")

    def contexts():
        found = []
        for device in range(torch.cuda.device_count()):
            flags, active = c_uint(), c_int()
            assert driver.cuDevicePrimaryCtxGetState(device, byref(flags), byref(active)) == 0
            if active.value:
                found.append(device)
        return found
"""


def test_import_and_host_futures_make_no_context(alone: Callable[..., str]) -> None:
    alone(
        CONTEXTS
        + """
    assert driver.cuInit(0) == 0
    CUDAFuture.completed([torch.ones(2)]).then(lambda f: f.value()).wait()
    CUDAFuture(devices=["cuda:0"]).cancel()
    gather(CUDAFuture.completed(1), CUDAFuture.completed(torch.ones(1))).wait()
    assert contexts() == [], contexts()
    """
    )


def test_host_futures_allow_fork_before_cuda(alone: Callable[..., str]) -> None:
    alone(
        CONTEXTS
        + """
    import os
    from cudafuture import submit

    assert driver.cuDeviceGetCount(byref(c_int())) == 3  # CUDA_ERROR_NOT_INITIALIZED
    submit(lambda: torch.ones(2)).then(lambda f: f.value() + 1).wait()
    gather(CUDAFuture.completed([torch.ones(2)]), submit(lambda: 1)).wait()
    CUDAFuture().to_torch()
    CUDAFuture().then(print, stream="caller")
    assert driver.cuDeviceGetCount(byref(c_int())) == 3
    child = os.fork()
    if child == 0:
        os._exit(int(torch.ones(2, device="cuda").sum().item()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    """
    )


def test_default_stream_precedes_first_use(alone: Callable[..., str]) -> None:
    alone(
        """
    import torch
    from cudafuture import CUDAFuture

    future = CUDAFuture()
    stream = future.then(lambda f: torch.cuda.current_stream(), stream="caller")
    future.set_result(torch.ones(2, device="cuda"))
    assert stream.wait() == torch.cuda.default_stream()
    """
    )


def test_futures_leave_other_devices_alone(alone: Callable[..., str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    alone(
        CONTEXTS
        + """
    import threading
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    x = torch.ones(4, device=f"cuda:{last}")

    def use():  # in a thread whose current device is 0, as that of every new thread
        future = CUDAFuture()
        blocking = future.then(lambda f: f.value() + 1, non_blocking=False)
        child = future.then(lambda f: f.value() * 2, priority=-1)
        future.set_result(x)
        assert gather(future, child, blocking).wait()[1].sum().item() == 8
        assert future.ready()

    for _ in range(3):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    futures = [CUDAFuture.completed(x) for _ in range(2000)]  # more events than the pool keeps
    del futures
    assert contexts() == [last], contexts()
    """
    )


def test_expandable_segments_allocator_sees_streams(alone: Callable[..., str]) -> None:
    alone(
        """
    import torch
    from cudafuture import CUDAFuture

    for _ in range(20):
        future = CUDAFuture()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            x = torch.full((1 << 22,), 3.0, device="cuda")
            future.set_result(x)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = future.wait(non_blocking=True)
            torch.cuda._sleep(10_000_000)
            total = y.sum()
        del x, y, future  # the memory must not be handed out before `side` has got there
        other = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(4)]
        side.synchronize()
        assert total.item() == 3.0 * (1 << 22)
    """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )


def test_process_exits_cleanly_with_busy_device(alone: Callable[..., str]) -> None:
    alone("""
    import torch
    from cudafuture import CUDAFuture

    torch.cuda._sleep(1_000_000_000)
    future = CUDAFuture.completed(torch.ones(1, device="cuda"))
    child = future.then(lambda f: f.value(), non_blocking=False)
    keep = [future, child, child.then(print)]
    """)

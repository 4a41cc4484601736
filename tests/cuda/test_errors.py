"""Errors that a device reports after completion, each in a process of its own: a broken context stays broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.cuda

BROKEN = """
    import torch
    from cudafuture import CUDAFuture, gather

    def break_device():
        values, index = torch.zeros(4, device="cuda"), torch.tensor([100], device="cuda")
        torch.cuda._sleep(100_000_000)
        return values[index]  # a device-side assertion, found when the kernel runs

    def expect_error(call):
        try:
            call()
        except RuntimeError as e:
            assert "device-side assert" in str(e), e
            return e
        raise AssertionError("no error")

    torch.zeros(4, device="cuda")[torch.tensor([1], device="cuda")].cpu()  # kernels are loaded
"""


@pytest.mark.parametrize(
    "look",
    [
        "expect_error(future.wait)",
        "expect_error(future.wait)\n    expect_error(future.ready)",
        "child = future.then(lambda f: f.late_error, non_blocking=False)\n    assert 'assert' in str(child.wait())",
        "child = future.then(lambda f: 5, non_blocking=False)\n    assert child.wait() == 5\n"
        "    assert future.done() and 'assert' in str(future.late_error)",
    ],
    ids=["wait", "again", "callback", "watcher"],
)
def test_device_error_is_late_error(alone: Callable[..., str], look: str) -> None:
    alone(
        BROKEN
        + f"""
    future = CUDAFuture.completed(break_device())
    {look}
    """
    )


def test_watcher_survives_broken_device(alone: Callable[..., str]) -> None:
    alone(
        BROKEN
        + """
    x = break_device()
    futures = [CUDAFuture.completed(x) for _ in range(10)]
    children = [f.then(lambda f: f.late_error is not None, non_blocking=False) for f in futures]
    assert [c.wait(timeout=30) for c in children] == [True] * 10
    assert CUDAFuture.completed(3).then(lambda f: f.value(), non_blocking=False).wait(timeout=30) == 3
    """
    )


@pytest.mark.parametrize("see", ["pass", "expect_error(torch.cuda.synchronize)"], ids=["pending", "known"])
def test_program_failure_is_not_hidden(alone: Callable[..., str], see: str) -> None:
    alone(
        BROKEN
        + f"""
    future = CUDAFuture(devices=["cuda:0"])
    break_device()
    {see}
    future.set_exception(ValueError("of the program"))
    for call in (future.wait, lambda: future.wait(non_blocking=True), future.value):
        try:
            call()
        except ValueError as e:
            assert "of the program" in str(e)
        else:
            raise AssertionError("no error")
    """
    )

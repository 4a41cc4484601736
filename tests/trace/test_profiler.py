"""torch.profiler sees what callbacks do, and the callbacks and waits themselves."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from cudafuture import CUDAFuture, submit
from support.child import Child

pytestmark = pytest.mark.usefixtures("on_the_host")


def names(profiled: profile) -> set[str]:
    """Return the names of the events of a profile."""
    return {event.name for event in profiled.events()}


def test_callback_and_its_operators_are_in_the_profile() -> None:
    a = torch.ones(4, 4)
    with profile() as profiled:
        done = submit(lambda: a).then(lambda f: torch.mm(f.value(), a))
        done.wait()
    found = names(profiled)
    assert "aten::mm" in found
    assert any(name.startswith("cudafuture::callback test_callback_and_its") for name in found)


def test_function_of_submit_is_in_the_profile() -> None:
    a = torch.ones(4, 4)
    with profile() as profiled:
        submit(torch.mm, a, a).wait()
    assert "aten::mm" in names(profiled)


def test_wait_is_in_the_profile() -> None:
    future = CUDAFuture[None](name="late")
    with profile() as profiled, pytest.raises(TimeoutError):
        future.wait(timeout=0.001)
    assert "cudafuture::wait late" in names(profiled)


def test_late_callback_runs_without_the_profile() -> None:
    a = torch.ones(4, 4)
    future = CUDAFuture[torch.Tensor](name="late")
    with profile() as profiled:
        child = future.then(lambda f: (torch.mm(f.value(), a), torch.autograd._profiler_enabled()))
    future.set_result(a)
    assert child.wait()[1] is False
    assert "aten::mm" not in names(profiled)


def test_thread_of_a_callback_is_not_profiled_afterwards() -> None:
    a = torch.ones(4, 4)
    with profile():
        submit(torch.mm, a, a).wait()
        enabled = submit(torch.autograd._profiler_enabled).wait()
    assert enabled
    assert not any(submit(torch.autograd._profiler_enabled).wait() for _ in range(64))


def test_profile_needs_no_accelerator_that_was_disabled() -> None:
    script = """
from torch.profiler import profile
from cudafuture.testing import sim
sim.enable()
sim.disable()
with profile():
    pass
say("profiled")
"""
    with Child(script) as child:
        assert child.hear() == "profiled"

"""Beginning, exit with work queued, fork, and many threads."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch

from cudafuture.testing import sim
from support.child import run_script
from support.soak import soak_count

EXITS = {
    "queued": "held = sim.hold(); x.add_(1)",
    "queued on a side stream": "s = torch.Stream('sim'); held = sim.hold(s)\nwith s: y = torch.ones(4, device='sim')",
    "pinned in flight": "p = x.cpu().pin_memory(); y = p.to('sim', non_blocking=True)",
    # It has to be waiting when Python ends: Python ends threads as they come back to it, and torch does not bear that.
    "behind a thread": "import threading; held = sim.hold(); before = sim.statistics().submitted\n"
    "threading.Thread(target=x.tolist, daemon=True).start()\n"
    "while sim.statistics().submitted == before: pass",
    "after a gradient": "x.requires_grad_().sum().backward()",
    "broken": "sim.fail('gone'); x.add_(1)",
}


@pytest.mark.parametrize("how", EXITS)
def test_process_exits_with_work_queued(how: str) -> None:
    for _ in range(soak_count(10)):
        code = f"""if True:
            import torch
            from cudafuture.testing import sim
            sim.enable(devices=2, schedule="{random.choice(["free", "jitter", "lazy"])}")
            x = torch.ones(1000, device="sim")
""" + "\n".join(f"            {line}" for line in EXITS[how].splitlines())
        done = run_script(code)
        assert (done.returncode, done.stderr) == (0, ""), code


def test_backward_forbids_later_enable() -> None:
    done = run_script("""if True:
        import torch
        from cudafuture.testing import sim
        torch.ones(1, requires_grad=True).sum().backward()
        try:
            sim.enable()
        except RuntimeError as error:
            assert "before the first backward()" in str(error), error
        else:
            raise AssertionError
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_backend_is_refused() -> None:
    done = run_script("""if True:
        import torch
        from torch.utils.backend_registration import rename_privateuse1_backend
        from cudafuture.testing import sim
        rename_privateuse1_backend("npu")
        try:
            sim.prepare()
        except RuntimeError as error:
            assert "'npu'" in str(error), error
        else:
            raise AssertionError
    """)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sim(schedule="lazy")
def test_forked_child_is_refused_and_exits() -> None:
    x = torch.ones(4, device="sim")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (lambda: x.add_(1), x.tolist, lambda: torch.ones(1, device="sim"), sim.enable):
                with pytest.raises(RuntimeError, match="fork"):
                    use()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert x.sum().item() == 4


def hammer(seed: int, rounds: int, failures: list[BaseException]) -> None:
    """Do everything at once, in an order that the seed chooses, and check what comes out."""
    chooser = random.Random(seed)
    try:
        for _ in range(rounds):
            device = f"sim:{chooser.randrange(2)}"
            size = chooser.choice([1, 100, 5000])
            stream = torch.Stream(device, priority=chooser.choice([0, -1]))
            pinned = torch.full((size,), 2.0).pin_memory()
            x = torch.ones(size, device=device)
            stream.wait_stream(torch.accelerator.current_stream(torch.device(device)))
            with stream:
                x.add_(pinned.to(device, non_blocking=True))
                back = torch.empty(size, pin_memory=True)
                back.copy_(x, non_blocking=True)
            x.record_stream(stream)
            event = torch.Event(device)
            event.record(stream)
            del x
            if chooser.random() < 0.5:
                event.synchronize()
            else:
                while not event.query():
                    pass
            assert back.sum().item() == 3 * size
    except BaseException as error:
        failures.append(error)


@pytest.mark.slow
@pytest.mark.sim(devices=2)
@pytest.mark.parametrize("schedule", ["free", "jitter", "lazy"])
def test_eight_threads(schedule: sim.Schedule) -> None:
    sim.enable(devices=2, schedule=schedule, seed=random.randrange(1000))
    failures: list[BaseException] = []
    threads = [threading.Thread(target=hammer, args=(seed, soak_count(1000), failures)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]

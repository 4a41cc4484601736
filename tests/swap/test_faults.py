"""I/O that fails in a step: each parameter is old or new as a whole, and the step can be called again."""

from __future__ import annotations

import contextlib
import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture.errors import QuotaError, StorageError, SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import OffloadedOptimizer, offload
from cudafuture.testing import FaultyEngine
from support.child import run_script
from support.training import OPTIMIZERS, Pair, same

SHAPES = ((400, 420), (256, 255), (400, 424))  # three chunks, one, and three
CHUNK = 1 << 18  # bytes: a block of the engine, so that each read and write of a tensor is one I/O
BUFFERS = 4 << 20  # bytes: each chunk is read, updated and written by itself
STEPS = 2  # before the step that fails

pytestmark = pytest.mark.usefixtures("one_thread")


def train_pair(store: DiskStore, **options: Any) -> Pair:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, **{"chunk_bytes": CHUNK, "buffer_bytes": BUFFERS, **options})
    for _ in range(STEPS):
        pair.step()
    return pair


def ios_of_a_step(folder: Path, options: dict[str, Any]) -> range:
    """Return the numbers of the I/Os of the third step."""
    with FaultyEngine("threads", block_size=CHUNK) as engine, DiskStore(folder, engine=engine) as store:
        pair = train_pair(store, **options)
        before = engine.statistics().blocks
        pair.step()
        return range(before + 1, engine.statistics().blocks + 1)


def expect_whole(pair: Pair, old: list[torch.Tensor], old_states: list[dict[str, Any]]) -> int:
    """Expect of each parameter that it and its state are old, or that both are new; return how many are new."""
    new = 0
    for i, (plain, swapped) in enumerate(zip(pair.plain, pair.swapped, strict=True)):
        is_new = not same(swapped, old[i])
        new += is_new
        assert same(swapped, plain if is_new else old[i])
        expected = pair.optimizer.state[plain] if is_new else old_states[i]
        found = pair.offloaded.state_of(swapped)
        assert all(same(value, found[name]) for name, value in expected.items()), (i, is_new)
    return new


OPTIONS: dict[str, dict[str, Any]] = {
    "swapped": {},
    "one in memory": {"memory": 2 * 4 * 256 * 255},
    "gradients": {"swap_gradients": True},
    "old values in memory": {"buffer_bytes": 2 * BUFFERS, "prefetch": 6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_step_can_be_repeated_after_any_failed_io(
    code: int, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = 0
    numbers = ios_of_a_step(tmp_path / "count", options)
    for number in numbers:
        engine = FaultyEngine("threads", at={number: code}, block_size=CHUNK)
        with engine, DiskStore(tmp_path / f"{number}", engine=engine) as store:
            pair = train_pair(store, **options)
            old = [parameter.detach().clone() for parameter in pair.swapped]
            old_states = [copy.deepcopy(pair.optimizer.state[parameter]) for parameter in pair.plain]
            pair.give_gradients()
            pair.optimizer.step()
            try:
                pair.offloaded.step()
            except SwapError as e:
                failed += 1
                assert "group 0" in str(e)  # noqa: PT017 (it need not fail: the numbers are not those of every run)
                assert isinstance(e.__cause__, StorageError)  # noqa: PT017
                assert e.__cause__.errno == code  # noqa: PT017
                assert any(e.parameter is parameter for parameter in pair.swapped)  # noqa: PT017
                expect_whole(pair, old, old_states)
                pair.offloaded.step()
            pair.expect_same()
            pair.step()
            pair.expect_same()
    kept = [record for record in caplog.records if "a gradient stays in memory" in record.getMessage()]
    assert failed + len(kept) == len(numbers) >= 24


def train_with_masters(store: DiskStore) -> tuple[list[torch.nn.Parameter], OffloadedOptimizer]:
    """Return trained parameters whose old values are read from master weights: the buffers leave no memory for them."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=numbers).bfloat16()) for size in (168_000, 100_000)]
    adam = torch.optim.Adam(parameters, lr=0.1)
    options: dict[str, Any] = {"chunk_bytes": CHUNK // 2, "buffer_bytes": 1 << 20, "prefetch": 0}
    optimizer = offload(adam, store, master_weights=True, min_bytes=0, **options)
    for _ in range(STEPS):
        step_from_values(parameters, optimizer)
    return parameters, optimizer


def step_from_values(parameters: list[torch.nn.Parameter], optimizer: OffloadedOptimizer) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def test_master_weights_are_whole_after_any_failed_io(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "reference") as store:
        new, optimizer = train_with_masters(store)
        old, old_state = [p.detach().clone() for p in new], [optimizer.state_of(p) for p in new]
        step_from_values(new, optimizer)
        new_state = [optimizer.state_of(p) for p in new]
    with FaultyEngine("threads", block_size=CHUNK) as engine, DiskStore(tmp_path / "count", engine=engine) as store:
        parameters, optimizer = train_with_masters(store)
        before = engine.statistics().blocks
        step_from_values(parameters, optimizer)
        numbers = range(before + 1, engine.statistics().blocks + 1)
    failed = 0
    for number in numbers:
        engine = FaultyEngine("threads", at={number: errno.EIO}, block_size=CHUNK)
        with engine, DiskStore(tmp_path / f"{number}", engine=engine) as store:
            parameters, optimizer = train_with_masters(store)
            try:
                step_from_values(parameters, optimizer)
            except SwapError:
                failed += 1
                for i, parameter in enumerate(parameters):
                    is_new = not same(parameter.detach(), old[i])
                    assert not is_new or same(parameter.detach(), new[i].detach())
                    expected, found = (new_state if is_new else old_state)[i], optimizer.state_of(parameter)
                    assert all(same(value, found[name]) for name, value in expected.items()), (i, is_new)
                optimizer.step()
            assert all(same(a.detach(), b.detach()) for a, b in zip(parameters, new, strict=True))
    assert failed == len(numbers) >= 24


def test_state_stays_in_memory_while_store_is_full(tmp_path: Path) -> None:
    needed = 4 * 2 * sum(a * b for a, b in SHAPES)
    with DiskStore(tmp_path, capacity=8 * needed // 5) as store:  # a tensor that is written again needs room for both
        pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, chunk_bytes=CHUNK, buffer_bytes=BUFFERS)
        pair.step()
        others: list[str] = []
        while store.write(f"other {len(others)}", torch.zeros(8192)).exception() is None:
            others.append(f"other {len(others)}")
        for _ in range(3):
            pair.give_gradients()
            pair.optimizer.step()
            with pytest.raises(SwapError, match="cannot be written") as caught:
                pair.offloaded.step()
            assert isinstance(caught.value.__cause__, QuotaError)
            pair.expect_same()
        store.deletev(others).wait()
        for _ in range(3):
            pair.give_gradients()
            pair.optimizer.step()
            with contextlib.suppress(SwapError):
                pair.offloaded.step()
            pair.expect_same()


def test_second_step_uses_gradients_again(store: DiskStore) -> None:
    """As torch does; also where a gradient was changed behind autograd's back."""
    pair = train_pair(store)
    pair.give_gradients()
    for _ in range(3):
        pair.optimizer.step()
        pair.offloaded.step()
    pair.expect_same()
    for parameter in (*pair.plain, *pair.swapped):
        assert parameter.grad is not None
        parameter.grad.data.fill_(0.5)
    pair.optimizer.step()
    pair.offloaded.step()
    pair.expect_same()


@pytest.mark.parametrize("when", ["step", "backward"])
def test_state_is_whole_while_writes_are_in_flight(when: str, store: DiskStore) -> None:
    """Each step writes keys that the one before it has replaced; what has gone from the store then stays gone."""
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, when=when, chunk_bytes=1 << 16, prefetch=4)
    for step in range(6):
        pair.step()
        pair.offloaded.zero_grad()
        if step % 3 == 2:
            pair.offloaded.flush()
            assert len(pair.offloaded.state_of(pair.swapped[0])) == 3
    pair.offloaded.save("latest")
    pair.expect_same()
    tensors = 2 * sum(-(-4 * a * b // (1 << 16)) for a, b in SHAPES)
    pair.offloaded.flush()
    assert len([key for key in store.list_keys().wait() if "/state/" in key]) <= tensors


def test_batch_dropped_after_error_loses_no_state(tmp_path: Path) -> None:
    numbers = ios_of_a_step(tmp_path / "count", {})
    for number in numbers[:: len(numbers) // 6]:
        engine = FaultyEngine("threads", at={number: errno.EIO}, block_size=CHUNK)
        with engine, DiskStore(tmp_path / f"{number}", engine=engine) as store:
            pair = train_pair(store)
            pair.give_gradients()
            with contextlib.suppress(SwapError):
                pair.offloaded.step()
            pair.give_gradients()  # of the next batch
            pair.offloaded.step()
            for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
                steps = int(pair.offloaded.state_of(swapped)["step"]) - STEPS
                assert steps in (1, 2)
                pair.offloaded.set_state(swapped, pair.optimizer.state[plain])
            pair.offloaded.flush()
            for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
                found = pair.offloaded.state_of(swapped)
                assert all(same(value, found[name]) for name, value in pair.optimizer.state[plain].items())


@pytest.mark.parametrize("options", [{"when": "backward"}, {"swap_gradients": True}], ids=["updates", "gradients"])
def test_failed_io_during_backward_keeps_all_gradients(options: dict[str, Any], tmp_path: Path) -> None:
    """The error comes out of the next step; a further step updates what is left."""

    def train(pair: Pair) -> None:
        """Accumulate over two backward passes, where gradients are in the store."""
        pair.give_gradients()
        if "swap_gradients" in options:
            for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
                gradient = pair.random(tuple(plain.shape), plain.dtype)
                for parameter in (plain, swapped):
                    (parameter * gradient).sum().backward()
        pair.optimizer.step()

    def step(pair: Pair) -> None:
        train(pair)
        pair.offloaded.step()
        pair.offloaded.zero_grad()

    with FaultyEngine("threads", block_size=CHUNK) as engine, DiskStore(tmp_path / "count", engine=engine) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, chunk_bytes=CHUNK, buffer_bytes=BUFFERS, **options)
        for _ in range(STEPS):
            step(pair)
        before = engine.statistics().blocks
        step(pair)
        numbers = range(before + 1, engine.statistics().blocks + 1)
    failed = 0
    for number in numbers:
        engine = FaultyEngine("threads", at={number: errno.EIO}, block_size=CHUNK)
        with engine, DiskStore(tmp_path / f"{number}", engine=engine) as store:
            pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, chunk_bytes=CHUNK, buffer_bytes=BUFFERS, **options)
            for _ in range(STEPS):
                step(pair)
            train(pair)
            try:
                pair.offloaded.step()
            except SwapError:
                failed += 1
                with contextlib.suppress(SwapError):  # a write of the step before
                    pair.offloaded.step()
            with contextlib.suppress(SwapError):  # a write of this step, whose tensors stay in memory
                pair.offloaded.flush()
            pair.expect_same()
    assert failed > len(numbers) // 4


INTERRUPTED = """
import signal, sys
import torch
from cudafuture.swap import offload

signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts = iter([False, True, False, True, False, False, False])

class Interrupted(torch.optim.SGD):
    def step(self, closure=None):
        interrupted = self.param_groups[0]["params"][0].numel() == 100_000 and next(interrupts, False)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        super().step()
        if interrupted:
            signal.raise_signal(signal.SIGINT)

plain, swapped = ([torch.nn.Parameter(torch.ones(100_000)) for _ in range(3)] for _ in range(2))
sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
adopted = Interrupted(swapped, lr=0.1, momentum=0.9)
caught = 0
with offload(adopted, sys.argv[1], min_bytes=0, prefetch=0, buffer_bytes=1 << 20, memory=int(sys.argv[2])) as optimizer:
    for _ in range(3):
        for parameter in (*plain, *swapped):
            parameter.grad = torch.ones_like(parameter)
        sgd.step()
        while True:
            try:
                optimizer.step()
                break
            except KeyboardInterrupt:
                caught += 1
    for a, b in zip(plain, swapped, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(sgd.state[a]["momentum_buffer"], optimizer.state_of(b)["momentum_buffer"])
print(caught)
"""


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_interrupted_step_can_be_repeated(memory: int, tmp_path: Path) -> None:
    """Ctrl-C takes effect when a parameter has been updated and its write has begun."""
    done = run_script(INTERRUPTED, str(tmp_path), str(memory))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_kept_exception_does_not_delay_next_step(tmp_path: Path) -> None:
    """Its frames have tensors of the buffers; debuggers and notebooks keep the last one."""
    kept: list[SwapError] = []
    engine = FaultyEngine("threads", seed=1, io_error=0.2, block_size=CHUNK)
    with engine, DiskStore(tmp_path, engine=engine) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, chunk_bytes=CHUNK, buffer_bytes=2 << 20, prefetch=0)
        for _ in range(3):
            pair.give_gradients()
            pair.optimizer.step()
            while True:
                try:
                    pair.offloaded.step()
                    break
                except SwapError as e:
                    kept.append(e)
        assert len(kept) > 3
        for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
            assert same(plain.detach(), swapped.detach())

"""Parameters swapped in and out one by one, with DeepSpeed's methods."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture import CUDAFuture
from cudafuture.compat.deepspeed import OptimizerSwapper
from cudafuture.errors import InvalidStateError, StorageError, SwapError
from cudafuture.io import File
from cudafuture.store import DiskStore
from cudafuture.swap import SwapStatistics
from cudafuture.testing import FaultyEngine
from support.executed_lines import count_lines
from support.training import same

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [5000, 4096, 1, 70_001, 4095]


class Training:
    """The same parameters for an Adam in memory, and for one whose parameters are swapped one by one."""

    def __init__(
        self, store: DiskStore | Path, sizes: list[int] = SIZES, initialize: bool = True, **options: Any
    ) -> None:
        self.numbers = torch.Generator().manual_seed(0)
        self.sizes = sizes
        self.plain = [nn.Parameter(torch.randn(size, generator=self.numbers)) for size in sizes]
        self.swapped = [nn.Parameter(torch.empty(0)) for _ in sizes]
        self.optimizer = torch.optim.Adam(self.plain, foreach=False)
        self.other = torch.optim.Adam([torch.zeros(0)], foreach=False)
        self.swapper = OptimizerSwapper(self.other, store, **{"min_bytes": 64, **options})
        if initialize:
            self.initialize()

    def initialize(self) -> None:
        self.swapper.initialize_parameters(self.swapped, [p.detach() for p in self.plain])

    def give_gradients(self) -> None:
        for plain, swapped in zip(self.plain, self.swapped, strict=True):
            plain.grad = torch.randn(plain.shape, generator=self.numbers)
            cut = plain.numel() // 3
            self.swapper.swap_out_gradients(swapped, [cut, 0], [plain.grad[cut:], plain.grad[:cut]])

    def update(self, parameter: nn.Parameter) -> None:
        self.other.param_groups[0]["params"] = [parameter]
        self.other.step()

    def step(self) -> None:
        self.give_gradients()
        self.optimizer.step()
        for parameter in self.swapped:
            self.swapper.swap_in_optimizer_state(parameter)
            self.update(parameter)
            self.swapper.swap_out_optimizer_state(parameter)

    def expect_same(self) -> None:
        """Compare all values and states, bit for bit."""
        for plain, swapped in zip(self.plain, self.swapped, strict=True):
            self.swapper.swap_in_optimizer_state(swapped)
            assert same(plain.detach(), swapped.detach())
            expected, found = self.optimizer.state[plain], self.other.state[swapped]
            assert found.keys() == expected.keys()
            assert all(same(value, found[name]) for name, value in expected.items())
            self.swapper.release_swap_buffers(swapped)


OPTIONS: dict[str, dict[str, Any]] = {
    "read ahead": {},
    "nothing read ahead": {"prefetch": 0},
    "far ahead": {"prefetch": 10},
    "buffers of one parameter": {"buffer_bytes": 4 * (4 * 70_001 + 4096)},
    "small ones in memory": {"min_bytes": 1 << 15},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_updates_equal_plain_optimizer(store: DiskStore, options: dict[str, Any]) -> None:
    training = Training(store, **options)
    for _ in range(4):
        training.step()
    training.expect_same()
    assert all(p.numel() == 0 for p, n in zip(training.swapped, SIZES, strict=True) if training.swapper.swappable(n))


def test_swapped_out_parameters_are_empty(store: DiskStore) -> None:
    training = Training(store, [5000])
    (parameter,) = training.swapped
    assert parameter.numel() == 0
    training.step()
    state = training.other.state[parameter]
    moment = state["exp_avg"]
    assert [parameter.numel(), moment.numel(), state["exp_avg_sq"].numel(), state["step"].item()] == [0, 0, 0, 1]
    training.swapper.swap_in_optimizer_state(parameter)
    assert training.other.state[parameter]["exp_avg"] is moment
    assert [parameter.numel(), moment.numel()] == [5000, 5000]


def test_parameters_are_swapped_in_any_order(store: DiskStore) -> None:
    training = Training(store)
    for order in ([4, 2, 0, 1, 3], [4, 2, 0, 1, 3], [0, 3], [1, 2, 3, 4]):
        training.give_gradients()
        for i in order:
            following = training.swapped[order[-1]]
            training.swapper.swap_in_optimizer_state(training.swapped[i], async_parameter=following)
            training.update(training.swapped[i])
            training.swapper.swap_out_optimizer_state(training.swapped[i], async_swap=False)
        for i, plain in enumerate(training.plain):
            plain.grad = plain.grad if i in order else None
        training.optimizer.step()
    for i, swapped in enumerate(training.swapped):  # parameter 0 was not updated, and keeps its gradient
        training.swapper.swap_in_optimizer_state(swapped)
        assert same(swapped.detach(), training.plain[i].detach())
        assert (swapped.grad is not None) == (i == 0)
        training.swapper.release_swap_buffers(swapped)


def test_gradient_pieces_are_put_together(store: DiskStore) -> None:
    """Pieces lie anywhere, replace those that begin at the same element, and are copies."""
    training = Training(store, [1000])
    (parameter,) = training.swapped
    swapper = training.swapper
    expected = torch.zeros(1000)
    for begin, length, value in ((3, 501, 1.0), (504, 1, 2.0), (900, 100, 3.0), (3, 501, 4.0), (700, 5, 5.0)):
        piece = torch.full((length,), value)
        swapper.swap_out_gradients(parameter, [begin], [piece])
        piece.zero_()
        expected[begin : begin + length] = value
    swapper.flush_gradients()
    with pytest.raises(ValueError, match="elements 600 to 800 overlaps one of elements 700 to 705"):
        swapper.swap_out_gradients(parameter, [600], [torch.ones(200)])
    with pytest.raises(ValueError, match="lies outside parameter 0 of 1000"):
        swapper.swap_out_gradients(parameter, [999], [torch.ones(2)])
    swapper.swap_in_optimizer_state(parameter)
    assert same(parameter.grad, expected)


def test_unknown_parameters_are_ignored(store: DiskStore) -> None:
    swapper = Training(store).swapper
    unknown = nn.Parameter(torch.ones(100))
    swapper.swap_out_gradients(unknown, [0], [torch.ones(100)]).wait()
    swapper.swap_in_optimizer_state(unknown)
    swapper.swap_out_optimizer_state(unknown).wait()
    swapper.release_swap_buffers(unknown)
    assert same(unknown.detach(), torch.ones(100))


def test_misuse_raises_clear_errors(store: DiskStore) -> None:
    training = Training(store, buffer_bytes=4 * (4 * 70_001 + 4096))
    swapper, swapped = training.swapper, training.swapped
    with pytest.raises(ValueError, match="parameter 1 is registered already"):
        swapper.initialize_parameters([swapped[1]], [torch.ones(3)])
    with pytest.raises(ValueError, match="given twice"):
        swapper.initialize_parameters([again := nn.Parameter(torch.ones(3)), again])
    with pytest.raises(ValueError, match=r"buffer_bytes=\d+ is less than one parameter needs: \d+"):
        swapper.initialize_parameters([nn.Parameter(torch.ones(80_000))])
    with pytest.raises(InvalidStateError, match="parameter 0 is not swapped in"):
        swapper.swap_out_optimizer_state(swapped[0])
    training.step()
    swapper.swap_in_optimizer_state(swapped[3])
    with pytest.raises(InvalidStateError, match="parameter 3 is swapped in"):
        swapper.swap_in_optimizer_state(swapped[3])
    swapper.swap_in_optimizer_state(swapped[0])
    swapper.swap_in_optimizer_state(swapped[1])
    with pytest.raises(InvalidStateError, match="is swapped in; swap it out first"):
        swapper.save("now")
    swapper.close()
    with pytest.raises(InvalidStateError, match="closed"):
        swapper.swap_in_optimizer_state(swapped[0])


def test_swapped_in_parameters_hold_buffers(tmp_path: Path) -> None:
    training = Training(tmp_path, [50_000] * 3, buffer_bytes=4 * (4 * 50_000 + 4096))
    training.step()
    training.swapper.swap_in_optimizer_state(training.swapped[0])
    with pytest.raises(ValueError, match=r"parameter 2 needs .* swapped in are: parameter 0\. Swap some out"):
        training.swapper.swap_in_optimizer_state(training.swapped[2])
    training.swapper.swap_out_optimizer_state(training.swapped[0])
    training.expect_same()
    training.swapper.close()


def test_changed_state_is_written_back_or_dropped(store: DiskStore) -> None:
    training = Training(store, [5000])
    (parameter,), swapper = training.swapped, training.swapper
    training.step()
    value = training.plain[0].detach()
    swapper.swap_out_gradients(parameter, [0, 4990], [torch.ones(4990), torch.ones(10)])
    for write_state, write_gradients in ((False, True), (True, False), (False, False)):
        swapper.swap_in_optimizer_state(parameter)
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(1)
            parameter.grad.add_(1)
        swapper.writeback_optimizer_state_and_gradients(parameter, write_state, write_gradients)
    swapper.swap_in_optimizer_state(parameter)
    assert same(parameter.detach(), value + 1)
    assert same(parameter.grad, torch.full((5000,), 2.0))
    assert training.other.state[parameter]["exp_avg"].numel() == 5000


def test_waiting_call_leaves_no_pending_future(store: DiskStore) -> None:
    """The futures are done when the call returns, also those of earlier calls, and also if the writes have failed."""
    training = Training(store)
    swapper, first = training.swapper, training.swapped[0]
    for _ in range(20):
        pieces = [
            swapper.swap_out_gradients(p, [0], [torch.ones(n)]) for p, n in zip(training.swapped, SIZES, strict=True)
        ]
        swapper.flush_gradients()
        assert all(future.done() for future in pieces)
        earlier = []
        for parameter in training.swapped[1:]:
            swapper.swap_in_optimizer_state(parameter)
            earlier.append(swapper.swap_out_optimizer_state(parameter))
        swapper.swap_in_optimizer_state(first)
        assert swapper.swap_out_optimizer_state(first, async_swap=False).done()
        assert all(future.done() for future in earlier)


@pytest.mark.parametrize("name", ["save", "load", "purge_state", "close"])
def test_waiting_call_waits_for_callbacks(name: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    has_returned = threading.Event()
    write = store.writev

    def write_slowly(tensors: Mapping[str, torch.Tensor], **options: Any) -> CUDAFuture[int]:
        future = write(tensors, **options)
        future.add_done_callback(lambda _: has_returned.wait(0.2))
        return future

    training = Training(store, [5000])
    swapper, parameter = training.swapper, training.swapped[0]
    swapper.save("saved")
    swapper.swap_in_optimizer_state(parameter)
    monkeypatch.setattr(store, "writev", write_slowly)
    written = swapper.swap_out_optimizer_state(parameter)
    monkeypatch.undo()
    getattr(swapper, name)(*(["saved"] if name in {"save", "load"} else []))
    assert written.done()
    has_returned.set()


def test_failed_write_raises_in_waiting_call(tmp_path: Path) -> None:
    with FaultyEngine("threads", at={3: errno.EIO}) as engine, DiskStore(tmp_path, engine=engine) as store:
        training = Training(store, [5000])
        training.swapper.swap_in_optimizer_state(training.swapped[0])
        with pytest.raises(SwapError, match="optimizer state of parameter 0 cannot be written"):
            training.swapper.swap_out_optimizer_state(training.swapped[0], async_swap=False)
        training.step()
        training.expect_same()


def test_purged_states_begin_anew(store: DiskStore) -> None:
    training = Training(store)
    training.step()
    training.give_gradients()
    training.swapper.purge_state()
    training.optimizer.state.clear()
    training.other.state.clear()
    training.step()
    training.expect_same()


def test_checkpoint_restores_all_parameters(store: DiskStore) -> None:
    training = Training(store, min_bytes=1 << 14)
    training.step()
    training.give_gradients()
    training.swapper.save("first")
    values = [p.detach().clone() for p in training.plain]
    training.step()
    assert training.swapper.checkpoints() == ["first"]
    training.swapper.load("first")
    for value, swapped in zip(values, training.swapped, strict=True):
        training.swapper.swap_in_optimizer_state(swapped)
        assert same(swapped.detach(), value)
        assert training.other.state[swapped]["step"].item() == 1
        training.swapper.release_swap_buffers(swapped)


def test_stages_are_timed_and_tensors_logged(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    calls: Counter[tuple[str, str]] = Counter()
    logged: list[list[str]] = []

    class Timers:
        name = ""

        def __call__(self, name: str) -> Any:
            timer = Timers()
            timer.name = name
            return timer

        def start(self) -> None:
            calls[self.name, "start"] += 1

        def stop(self) -> None:
            calls[self.name, "stop"] += 1

        def log(self, names: list[str]) -> None:
            logged.append(names)

    caplog.set_level(logging.DEBUG, "cudafuture.compat.deepspeed")
    training = Training(store, timers=Timers())
    training.swapper.pre_backward()
    training.step()
    training.swapper.post_backward()
    training.swapper.log_timers()
    stages = ["async_swap_gradient_wait", "swap_in_state", "swap_out_gradient", "swap_out_state"]
    assert logged == [stages]
    assert {name for name, _ in calls} == {*stages, "swap_init_write"}
    assert all(calls[name, "start"] == calls[name, "stop"] == len(SIZES) for name in stages[1:])
    assert "swapped out: 'exp_avg' of parameter 3, 280004 bytes" in caplog.text
    statistics: SwapStatistics = training.swapper.statistics()
    assert statistics.swap_in_gradient_bytes > 4 * 70_001


def test_call_can_be_repeated_after_any_failed_io(tmp_path: Path) -> None:
    seen = 0
    for failing in range(1, 200):
        engine, told = FaultyEngine("threads", at={failing: 5}), 0
        with engine, DiskStore(tmp_path / f"{failing}", engine=engine) as store:
            training = Training(store, [40_000, 50_000], initialize=False, min_bytes=1 << 15, prefetch=1)
            try:
                training.initialize()
            except StorageError:
                told += 1
                training.initialize()
            futures = []
            for _ in range(2):
                training.give_gradients()
                training.optimizer.step()
                try:
                    training.swapper.flush_gradients()
                except SwapError as e:
                    told += 1
                    assert "stays in memory" in str(e)  # noqa: PT017 (not every number is one of a gradient)
                for parameter in training.swapped:
                    told += swap_in(training, parameter)
                    training.update(parameter)
                    futures.append(training.swapper.swap_out_optimizer_state(parameter))
            for parameter in training.swapped:
                told += swap_in(training, parameter)
                training.swapper.release_swap_buffers(parameter)
            if engine.statistics().blocks < failing:
                break
            failed = [str(f.exception()) for f in futures if f.exception() is not None]
            assert all("optimizer state of parameter" in text for text in failed)
            assert len(failed) <= told <= 1  # a read of several tensors that fails is repeated for each of them
            seen += told
            training.expect_same()
    assert seen > 20


def swap_in(training: Training, parameter: nn.Parameter) -> int:
    """Swap in a parameter, a second time after an error; return how many there were."""
    try:
        training.swapper.swap_in_optimizer_state(parameter)
    except SwapError as e:
        assert isinstance(e.__cause__, StorageError)  # noqa: PT017
        training.swapper.swap_in_optimizer_state(parameter)
        return 1
    return 0


# ---- parameters from partitions of half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("buffers", [None, [3000, 9000], [16_384]])
def test_parameters_are_assembled_from_partitions(
    store: DiskStore, tmp_path: Path, dtype: torch.dtype, buffers: list[int] | None
) -> None:
    numbers = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=numbers).to(dtype) for size in (1, 4097, 7000, 0, 999)]
    swapper = OptimizerSwapper(torch.optim.Adam([torch.zeros(0)]), store, min_bytes=64)
    infos: list[list[tuple[torch.Tensor | None, int, Any]]] = []
    for i, value in enumerate(values):
        a, b, c = value.tensor_split(3)
        store.write(f"part {i}", b).wait()
        with File(tmp_path / f"part {i}", "w") as file:
            file.write(torch.cat([c, torch.zeros(100, dtype=dtype)])).wait()  # padded, as DeepSpeed's are
        infos.append([(a, a.numel(), None), (None, b.numel(), f"part {i}"), (c[:0], c.numel(), tmp_path / f"part {i}")])
    parameters = [nn.Parameter(torch.empty(0)) for _ in values]
    pinned = None if buffers is None else [torch.empty(n, dtype=dtype) for n in buffers]
    if pinned is not None and buffers == [3000, 9000]:
        with pytest.raises(ValueError, match="parameter 2 have 9332 bytes to read, but the largest buffer has 6000"):
            swapper.initialize_from_swapped_fp16_params(infos, [v.numel() for v in values], pinned[:1], parameters)
    swapper.initialize_from_swapped_fp16_params(infos, [v.numel() for v in values], pinned, parameters)
    for value, parameter in zip(values, parameters, strict=True):
        swapper.swap_in_optimizer_state(parameter)
        assert same(parameter.detach(), value.float())
        swapper.swap_out_optimizer_state(parameter)


def test_missing_partition_registers_no_parameter(store: DiskStore, tmp_path: Path) -> None:
    swapper = OptimizerSwapper(torch.optim.Adam([torch.zeros(0)]), store, min_bytes=64)
    parameters = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    here = [(torch.ones(500).half(), 500, None)]
    with pytest.raises(StorageError, match="missing"):
        swapper.initialize_from_swapped_fp16_params(
            [here, [(None, 500, tmp_path / "missing")]], [500, 500], None, parameters
        )
    with pytest.raises(ValueError, match=r"\[500\] elements are not a parameter of 501"):
        swapper.initialize_from_swapped_fp16_params([here], [501], None, parameters[:1])
    with pytest.raises(ValueError, match="parameter 0 have 1000 bytes to read, but the largest buffer has 0"):
        swapper.initialize_from_swapped_fp16_params([[(None, 500, tmp_path)]], [500], [], parameters[:1])
    swapper.initialize_from_swapped_fp16_params([here, here], [500, 500], None, parameters)
    swapper.swap_in_optimizer_state(parameters[1])
    assert same(parameters[1].detach(), torch.ones(500))


@pytest.mark.parametrize("places", [["memory"], ["file"], ["store"], ["file", "memory", "store", "file"]])
@pytest.mark.parametrize("numel", [300_000, 4097, 7])
def test_buffer_of_deepspeed_size_has_room(store: DiskStore, tmp_path: Path, places: list[str], numel: int) -> None:
    """DeepSpeed rounds a buffer up to 1,024 bytes, and the partitions in it are adjacent."""
    value = torch.randn(numel, generator=torch.Generator().manual_seed(0)).half()
    info: list[tuple[torch.Tensor | None, int, Any]] = []
    for i, (part, place) in enumerate(zip(value.tensor_split(len(places)), places, strict=True)):
        if place == "memory":
            info.append((part, part.numel(), None))
        elif place == "store":
            store.write(f"part {i}", part).wait()
            info.append((None, part.numel(), f"part {i}"))
        else:
            with File(tmp_path / f"part {i}", "w") as file:
                file.write(part).wait()
            info.append((None, part.numel(), tmp_path / f"part {i}"))
    halves = torch.empty(-(-numel // 512) * 512, dtype=torch.float16)
    floats = 4 * 4 * -(-numel // 256) * 256  # four tensors: the parameter, its gradient and Adam's state
    parameter = nn.Parameter(torch.empty(0))
    plain = nn.Parameter(value.float())
    other, optimizer = torch.optim.Adam([parameter], foreach=False), torch.optim.Adam([plain], foreach=False)
    swapper = OptimizerSwapper(other, store, min_bytes=0, buffer_bytes=floats)
    swapper.initialize_from_swapped_fp16_params([info], [numel], [halves], [parameter])
    for _ in range(2):
        plain.grad = torch.randn(numel)
        swapper.swap_out_gradients(parameter, [0], [plain.grad])
        swapper.swap_in_optimizer_state(parameter)
        assert same(parameter.detach(), plain.detach())
        other.param_groups[0]["params"] = [parameter]
        other.step()
        optimizer.step()
        swapper.swap_out_optimizer_state(parameter)


def test_partitions_in_memory_need_no_buffer(store: DiskStore) -> None:
    swapper = OptimizerSwapper(torch.optim.Adam([torch.zeros(0)]), store, min_bytes=64)
    parameters = [nn.Parameter(torch.empty(0)) for _ in range(5)]
    for some, buffers in (([0, 1], []), ([2, 3, 4], [torch.empty(2000, dtype=torch.float16)])):
        here = [[(torch.full((1000,), float(i)).half(), 1000, None)] for i in some]
        numels, given = [1000] * len(some), [parameters[i] for i in some]
        swapper.initialize_from_swapped_fp16_params(here, numels, buffers, given)
    for i, parameter in enumerate(parameters):
        swapper.swap_in_optimizer_state(parameter)
        assert same(parameter.detach(), torch.full((1000,), float(i)))
        swapper.swap_out_optimizer_state(parameter)


def test_kept_buffer_tensors_block_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DiskStore(tmp_path) as store:
        parameters = [nn.Parameter(torch.randn(40_000)) for _ in range(3)]
        values = [parameter.detach().clone() for parameter in parameters]
        adam = torch.optim.Adam([torch.zeros(0)])
        swapper = OptimizerSwapper(adam, store, min_bytes=0, prefetch=2, buffer_bytes=4 * (4 * 40_000 + 4096))
        swapper.initialize_parameters(parameters)
        views = []
        for _ in range(2):
            for parameter, value in zip(parameters, values, strict=True):
                swapper.swap_in_optimizer_state(parameter)
                views.append(parameter.detach().view(-1))
                assert torch.equal(parameter.detach(), value)
                swapper.swap_out_optimizer_state(parameter)
        assert "that the program keeps hold the swap buffers" in caplog.text
        swapper.close()


@pytest.mark.parametrize("place", ["registered", "swapped in", "swapped out"])
def test_parameters_swapped_in_inference_mode_can_be_trained(tmp_path: Path, place: str) -> None:
    parameter = nn.Parameter(torch.ones(4096))
    optimizer = torch.optim.Adam([parameter])
    with torch.inference_mode(place == "registered"):
        swapper = OptimizerSwapper(optimizer, tmp_path, min_bytes=0)
        swapper.initialize_parameters([parameter])
    with swapper:
        for step in range(4):
            with torch.inference_mode(place == "swapped in" and step == 1):
                swapper.swap_in_optimizer_state(parameter)
            (parameter * parameter).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode(place == "swapped out" and step == 1):
                swapper.swap_out_optimizer_state(parameter).wait()
            assert not parameter.is_inference()


def count_lines_of_round(count: int, store: DiskStore) -> int:
    parameters = [nn.Parameter(torch.full((4,), float(i))) for i in range(count)]
    swapper = OptimizerSwapper(torch.optim.Adam(parameters), store, name=f"{count}", min_bytes=0)
    swapper.initialize_parameters(parameters)

    def go_round() -> None:
        for parameter in parameters:
            swapper.swap_out_gradients(parameter, [0], [torch.ones(4)])
            swapper.swap_in_optimizer_state(parameter)
            swapper.swap_out_optimizer_state(parameter, async_swap=False)

    with swapper:
        return count_lines(go_round)


def count_lines_of_pieces(count: int, store: DiskStore) -> int:
    parameter = nn.Parameter(torch.zeros(count))
    with OptimizerSwapper(torch.optim.Adam([parameter]), store, name=f"{count}", min_bytes=64) as swapper:
        swapper.initialize_parameters([parameter])
        return count_lines(lambda: [swapper.swap_out_gradients(parameter, [i], [torch.ones(1)]) for i in range(count)])


@pytest.mark.parametrize("work", [count_lines_of_round, count_lines_of_pieces], ids=["one by one", "pieces"])
def test_swapper_work_grows_linearly(work: Callable[[int, DiskStore], int], store: DiskStore) -> None:
    assert work(200, store) < 4.4 * work(50, store)

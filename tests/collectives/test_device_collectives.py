"""Collectives on tensors of a device that Gloo cannot carry: through the host, in order, at both ends."""

from __future__ import annotations

import datetime as dt
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, InvalidStateError, executors
from cudafuture.distributed import CollectiveError, Received
from cudafuture.testing import World
from support.comparison import ALL, COMMON, Case, Make, Place, bits, by_ours, expect_gathered_layouts
from support.ranks import compare_order, run_ranks, short_group
from support.simulated import SCHEDULES, onto, simulate

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("device-world")]

LONG = 40.0  # seconds; much more than anything takes
on_each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Yield two ranks of this module alone: none has computed a gradient before it has simulated devices."""
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def fill(value: float, index: int = 0, size: int = 64) -> Tensor:
    """Return a tensor that the device fills, after a while."""
    from cudafuture.testing import sim

    with torch.accelerator.device_index(index):
        sim.sleep(1)
        return torch.empty(size, device=f"sim:{index}").fill_(value)


def only(tensor: Tensor) -> float:
    """Return the value that fills a tensor, as the current stream of its device sees it."""
    low, high = (tensor * 1).aminmax()
    assert low.item() == high.item(), f"{low.item()} to {high.item()}"
    return float(high.item())


# ---- the same results as on the host


def expect_the_same(make: Make, dtype: torch.dtype, **more: Any) -> None:
    place = Place(root=1)
    wanted, case = make(place, dtype), make(place, dtype)
    moved = onto([case.arguments, case.written], "sim:1")
    arguments, names = moved[0], {id(t): i for i, t in enumerate(_tensors(case.arguments))}
    written = [_tensors(arguments)[names[id(t)]] for t in case.written]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_host = by_ours(wanted, **more)
        on_device = by_ours(Case(case.function, arguments, written, None, case.keywords), **more)
    refusal, error = on_host.exception(timeout=LONG), on_device.exception(timeout=LONG)
    what = f"{make.__name__} of {dtype}, {more}"
    assert type(error) is type(refusal), f"{what}: {refusal!r} on the host, {error!r} on the device"
    if error is not None:
        return
    for theirs, ours in zip(wanted.written, written, strict=True):
        assert torch.equal(bits(theirs), bits(ours.cpu())), what
    if on_host.value() is None:
        assert on_device.value() is None
    else:
        outputs = _tensors([on_device.value()])
        assert len(outputs) == len(written)
        assert all(a is b for a, b in zip(outputs, written, strict=True)), what


def in_place(device: str) -> dict[str, Any]:
    """Return what comes out of collectives that are given the same tensor twice, on this rank."""
    rank = dist.get_rank()

    def full(value: float) -> Tensor:
        return torch.full((2,), value, device=device)

    def all_gather(slot: int) -> Any:
        mine, outputs = full(rank + 1), [full(0), full(0)]
        outputs[slot] = mine
        return cfd.all_gather(outputs, mine)

    def gather() -> Any:
        mine = full(rank + 1)
        return cfd.gather(mine, [mine, full(0)] if rank == 0 else None, dst=0)

    def scatter() -> Any:
        parts = [full(5), full(6)]
        return cfd.scatter(parts[0] if rank == 0 else full(0), parts if rank == 0 else None, src=0)

    def reduce_scatter() -> Any:
        parts = [full(10 * rank + 1), full(10 * rank + 2)]
        return cfd.reduce_scatter(parts[rank], parts)

    calls: dict[str, Any] = {
        "all_gather into its own place": lambda: all_gather(rank),
        "all_gather into another place": lambda: all_gather(1 - rank),
        "gather": gather,
        "scatter": scatter,
        "reduce_scatter": reduce_scatter,
    }
    outcomes = {name: call().wait(timeout=LONG) for name, call in calls.items()}
    return {name: [t.tolist() for t in _tensors([value])] for name, value in outcomes.items()}


@on_each_schedule
def test_repeated_tensor_counts_once(ranks: World, schedule: str) -> None:
    def check() -> None:
        wanted = in_place("cpu")
        with simulate(schedule):
            assert in_place("sim:0") == wanted

    ranks.run(check)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


@on_each_schedule
def test_device_results_match_host(three_ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule):
            for make in ALL:
                for dtype in (*COMMON, torch.complex64, torch.int16):  # Gloo refuses the last
                    expect_the_same(make, dtype)
            for make in ALL:
                expect_the_same(make, torch.float32, owner=cfd.ProcessGroup())

    three_ranks.run(run)


def test_other_reductions_work(ranks: World) -> None:
    def run() -> None:
        from support.comparison import REDUCING

        with simulate("lazy"):
            for op in dist.ReduceOp.RedOpType.__members__.values():
                for make in REDUCING:
                    expect_the_same(make, torch.int64, op=op)

    ranks.run(run)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda t: t[0],
    "empty": lambda t: t[:0],
    "part": lambda t: t[2:4],
    "transposed": lambda t: t.view(2, 3).t(),
    "leaf": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_dense_layouts_are_accepted(ranks: World, name: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        root = {} if name == "all_reduce" else {("src" if name == "broadcast" else "dst"): 0}
        with simulate("lazy"):
            for layout in LAYOUTS.values():
                here, there = (torch.arange(6.0, device=d) + rank for d in ("cpu", "sim"))
                future = getattr(cfd, name)(layout(there), **root)
                getattr(cfd, name)(layout(here), **root).wait(timeout=LONG)
                future.wait(timeout=LONG)
                assert torch.equal(here, there.cpu()) or (name == "reduce" and rank == 1)

    ranks.run(run)


@on_each_schedule
@pytest.mark.parametrize("name", ["all_gather", "all_gather_coalesced", "gather"])
def test_tensors_of_any_layout_are_gathered(three_ranks: World, name: str, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule):
            expect_gathered_layouts(name, "sim:1")

    three_ranks.run(run)


@on_each_schedule
def test_gathered_view_follows_stream_order(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule) as sim:
            with torch.Stream("sim:0"), sim.hold():
                x = fill(dist.get_rank() + 1.0, size=128)
                outputs = [fill(7.0, size=128)[::2] for _ in range(2)]
                future = cfd.all_gather(outputs, x[::2])
                del x
                torch.empty(128, device="sim:0").fill_(100.0)
                assert not future.done()
            with torch.Stream("sim:0"):
                first, second = future.wait(non_blocking=True, timeout=LONG)
                assert (only(first), only(second)) == (1.0, 2.0)

    ranks.run(run)


# ---- ordering at both ends


@on_each_schedule
def test_input_and_output_follow_stream_order(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule) as sim:
            for index in (0, 1):
                stream = torch.Stream(f"sim:{index}")
                with sim.hold(), stream:
                    reduced = cfd.all_reduce(fill(dist.get_rank() + 1.0, index))
                with torch.Stream(f"sim:{index}"):
                    assert only(reduced.wait(non_blocking=True)) == 3.0
                blocked = cfd.all_reduce(fill(2.0, index)).wait(timeout=LONG)
                assert only(blocked) == 4.0

    ranks.run(run)


@on_each_schedule
def test_busy_device_does_not_block_caller(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule) as sim:
            n = dist.get_world_size()
            with sim.hold():
                pending: list[CUDAFuture[Any]] = [
                    cfd.all_reduce(fill(1.0)),
                    cfd.all_gather([torch.empty(64, device="sim") for _ in range(n)], fill(1.0)),
                    cfd.broadcast(fill(1.0), src=0),
                    cfd.send(fill(1.0), dst=1 - dist.get_rank(), tag=1),
                ]
                assert not any(f.done() for f in pending)
            for future in pending[:3]:
                future.wait(timeout=LONG)
            cfd.recv(torch.empty(64, device="sim"), src=1 - dist.get_rank(), tag=1).wait(timeout=LONG)
            pending[3].wait(timeout=LONG)

    ranks.run(run)


@on_each_schedule
def test_output_is_written_after_earlier_work(ranks: World, schedule: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with simulate(schedule) as sim:
            with sim.hold() as held:
                output = fill(-1.0)
                copied = output * 2
                ready = torch.Stream("sim")
                with ready:
                    mine = torch.full((64,), float(rank), device="sim")
                # The collective needs the written values only at its end: it continues without them.
                source = torch.full((64,), 9.0, device="sim:1") if rank == 0 else None
                future = cfd.broadcast(output if source is None else source, src=0)
                with ready:
                    later = cfd.all_reduce(mine)
                held.open()
            future.wait(non_blocking=True)
            assert only(output) == (9.0 if rank == 1 else -1.0)
            assert only(copied) == -2.0
            assert only(later.wait(non_blocking=True)) == 1.0

    ranks.run(run)


@on_each_schedule
def test_tensors_may_be_dropped_immediately(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule) as sim:
            rank = dist.get_rank()
            stream = torch.Stream("sim")
            with stream:
                futures = []
                with sim.hold():
                    for _ in range(4):
                        x = fill(1.0)
                        futures.append(cfd.reduce(x, dst=0))
                        del x
                        torch.empty(64, device="sim").fill_(100.0)
                values = [f.wait(timeout=LONG) for f in futures]
                assert [only(v) for v in values if v is not None] == ([2.0] * 4 if rank == 0 else [])
            cfd.all_reduce(fill(1.0))  # and the future
            received = [cfd.all_gather([torch.empty(64, device="sim") for _ in range(2)], fill(1.0)) for _ in range(4)]
            for future in received:
                future.wait(non_blocking=True)
            del received, future
            torch.full((640,), 3.0, device="sim")

    ranks.run(run)


@on_each_schedule
def test_waiter_may_change_tensors(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule):
            x, parts = fill(1.0), [torch.empty(64, device="sim") for _ in range(2)]
            gathered = cfd.all_gather(parts, x)
            with torch.Stream("sim"):
                gathered.wait(non_blocking=True)
                x.fill_(5.0)
                assert [only(p) for p in parts] == [1.0, 1.0]
                parts[0].zero_()

    ranks.run(run)


# ---- order


def issue_delayed_chain(turns: int, held: Callable[[int], bool]) -> None:
    """Issue collectives, of which this rank keeps some from starting until all are issued."""
    from cudafuture.testing import sim

    rank = dist.get_rank()
    streams = [torch.Stream("sim") for _ in range(turns)]
    holds, staged, direct, chained = [], [], [], []
    for turn, stream in enumerate(streams):
        if held(turn):
            holds.append(sim.hold(stream))
        with stream:
            staged.append(cfd.all_reduce(fill(10.0 * turn + rank)))
            chained.append(staged[-1].then_async(lambda f: cfd.broadcast(f.value() + rank, src=1)))
        direct.append(cfd.all_reduce(torch.full((8,), 100.0 * turn + rank)))
    for turn, future in enumerate(direct):  # tensors on the host do not wait for the others
        assert future.wait(timeout=LONG).unique().tolist() == [200.0 * turn + 1]
    for hold in reversed(holds):
        hold.open()
    for turn, (first, second) in enumerate(zip(staged, chained, strict=True)):
        assert only(second.wait(timeout=LONG)) == 20.0 * turn + 2
        assert only(first.wait(timeout=LONG)) in (20.0 * turn + 1, 20.0 * turn + 2)


@on_each_schedule
@pytest.mark.parametrize("late", ["odd on rank 1", "first on rank 0", "first here, last there", "all on rank 1"])
def test_unevenly_slow_devices_get_right_data(ranks: World, schedule: str, late: str) -> None:
    def run() -> None:
        rank, turns = dist.get_rank(), 6
        held = {
            "odd on rank 1": lambda turn: rank == 1 and turn % 2 == 1,
            "first on rank 0": lambda turn: rank == 0 and turn == 0,
            "first here, last there": lambda turn: turn == (turns - 1) * rank,
            "all on rank 1": lambda turn: rank == 1,
        }[late]
        with simulate(schedule):
            for _ in range(3):
                issue_delayed_chain(turns, held)

    ranks.run(run)


def test_host_and_device_collectives_stay_separate(ranks: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with simulate("jitter") as sim:
            with sim.hold():
                device = [cfd.all_reduce(fill(float(i + rank))) for i in range(4)]
                host = [cfd.all_reduce(torch.full((64,), 50.0 + i + rank)) for i in range(4)]
                objects = cfd.ProcessGroup().all_gather_object([None, None], rank)
                assert [h.wait(timeout=LONG)[0].item() for h in host] == [101.0 + 2 * i for i in range(4)]
                assert objects.wait(timeout=LONG) == [0, 1]
            assert [only(d.wait(timeout=LONG)) for d in device] == [1.0 + 2 * i for i in range(4)]

    ranks.run(run)


@on_each_schedule
def test_callbacks_run_in_attachment_order(ranks: World, schedule: str) -> None:
    def run() -> None:
        rank, order = dist.get_rank(), []
        with simulate(schedule) as sim:
            hold = sim.hold()
            late = cfd.all_reduce(fill(1.0))
            early = cfd.all_reduce(torch.ones(1))
            children = [f.then(lambda _, i=i: order.append(i)) for i, f in enumerate((late, early))]  # type: ignore[misc]
            early.wait(timeout=LONG)
            if rank == 1:
                sim.sleep(5)
            hold.open()
            cudafuture.gather(*children).wait(timeout=LONG)
            assert order == [0, 1]

    ranks.run(run)


@on_each_schedule
def test_chains_of_many_steps(ranks: World, schedule: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with simulate(schedule):
            chains = []
            for i in range(3):
                chain: CUDAFuture[Tensor] = cfd.all_reduce(fill(float(i)))
                for step in range(4):
                    if step == 2:  # a step on the host in between
                        chain = chain.then_async(lambda f: cudafuture.copy(f.value(), "cpu"))
                        chain = chain.then(lambda f: f.value() + 0, non_blocking=False).then_async(
                            lambda f: cfd.all_reduce(f.value())
                        )
                        chain = chain.then_async(lambda f: cudafuture.copy(f.value(), "sim:0"))
                    chain = chain.then_async(lambda f: cfd.broadcast(f.value() + rank, src=1))
                chains.append(chain)
            # i doubled, plus 1 twice, doubled, plus 1 twice
            assert [only(c.wait(timeout=LONG)) for c in chains] == [2 * (2 * i + 2) + 2.0 for i in range(3)]

    ranks.run(run)


def test_callback_without_order_is_refused(ranks: World) -> None:
    def run() -> None:
        with simulate("lazy"):
            loose = cudafuture.copy(torch.ones(64), "sim").then(lambda f: cfd.all_reduce(f.value()))
            with pytest.raises(InvalidStateError, match="queue"):
                loose.wait(timeout=LONG)
            queue = cfd.ProcessGroup().queue
            loaded = cudafuture.copy(torch.ones(64), "sim").then_async(
                lambda f: cfd.all_reduce(f.value()), executor=queue
            )
            assert only(loaded.wait(timeout=LONG)) == 2.0

    ranks.run(run)


def test_subgroups_and_several_groups_work(three_ranks: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with simulate("jitter"):
            pair, whole = cfd.new_group([0, 2]), cfd.ProcessGroup()
            for _ in range(3):
                a, b = pair.all_reduce(fill(1.0 + rank)), whole.all_reduce(fill(10.0, 1))
                assert only(b.wait(timeout=LONG)) == 30.0
                assert a.wait(timeout=LONG) is None if rank == 1 else only(a.wait(timeout=LONG)) == 4.0

    three_ranks.run(run)


# ---- send and recv


@on_each_schedule
def test_send_and_recv(ranks: World, schedule: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        peer = 1 - rank
        with simulate(schedule):
            sent = cfd.send(fill(1.0 + rank), dst=peer)
            received = cfd.recv(torch.empty(64, device="sim:1"), src=peer).wait(non_blocking=True)
            assert isinstance(received, Received)
            assert (only(received.tensor), received.source) == (1.0 + peer, peer)
            sent.wait(timeout=LONG)

            sent = cfd.send(fill(3.0 + rank), dst=peer)
            anyone = cfd.recv(torch.empty(64, device="sim:1"))
            assert only(anyone.then(lambda f: f.value().tensor + 1).wait(non_blocking=True)) == 4.0 + peer
            assert anyone.value().source == peer
            sent.wait(timeout=LONG)

            into = torch.empty(64, device="sim:0")
            ops = [dist.P2POp(dist.isend, fill(5.0 + rank, 1), peer), dist.P2POp(dist.irecv, into, peer)]
            nothing, came = cfd.batch_isend_irecv(ops).wait(non_blocking=True)
            assert nothing is None
            assert came is not None
            assert came.tensor is into
            assert only(into) == 5.0 + peer

    ranks.run(run)


@on_each_schedule
def test_sends_keep_order_beside_host_sends(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule) as sim:
            if dist.get_rank() == 0:
                side = torch.Stream("sim")
                with sim.hold(side):
                    with side:
                        first = cfd.send(fill(1.0), dst=1)
                    sends: list[CUDAFuture[Any]]
                    sends = [first, cfd.send(fill(2.0), dst=1), cfd.send(torch.full((64,), 3.0), dst=1)]
                    sends.append(cfd.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((64,), 4.0), 1)]))
                    assert not any(s.done() for s in sends)
                for s in sends:
                    s.wait(timeout=LONG)
                cfd.send(torch.full((64,), 5.0), dst=1).wait(timeout=LONG)
            else:
                into = [torch.empty(64, device=d) for d in ("sim:0", "cpu", "sim:1", "sim:0", "cpu")]
                received = [cfd.recv(t, src=0) for t in into]
                assert [only(r.wait(timeout=LONG).tensor) for r in received] == [1.0, 2.0, 3.0, 4.0, 5.0]

    ranks.run(run)


# ---- arguments, errors


def test_wrong_arguments_issue_nothing(ranks: World) -> None:
    def run() -> None:
        with simulate("lazy"):
            x = torch.ones(4, device="sim")
            calls: list[tuple[type[Exception], Callable[[], Any]]] = [
                (ValueError, lambda: cfd.all_gather([torch.empty(4), torch.empty(4)], x)),  # on two kinds of devices
                (ValueError, lambda: cfd.all_reduce(torch.ones(8, device="sim")[::2])),
                (ValueError, lambda: cfd.broadcast(x, src=7)),
                (ValueError, lambda: cfd.send(x, dst=dist.get_rank())),
                (ValueError, lambda: cfd.all_gather([x, x.int()], x)),
                (ValueError, lambda: cfd.gather(x, [x] if dist.get_rank() == 1 else None, dst=0)),
                (ValueError, lambda: cfd.gather_single(x, torch.empty(8, device="sim"), 1 - dist.get_rank())),
                (TypeError, lambda: cfd.all_gather(x, x)),  # type: ignore[arg-type]
                (TypeError, lambda: cfd.all_reduce([x])),  # type: ignore[arg-type]
            ]
            for error, call in calls:
                with pytest.raises(error):
                    call()
            future = cfd.all_reduce(x)
            assert only(future.wait(timeout=LONG)) == 2.0

    ranks.run(run)


def test_gloo_refusal_fails_future_only(ranks: World) -> None:
    def run() -> None:
        with simulate("lazy"):
            x = torch.ones(4, device="sim", dtype=torch.int16)
            error = cfd.all_reduce(x).exception(timeout=LONG)
            assert isinstance(error, CollectiveError)
            assert "all_reduce #0 on group '0', rank" in str(error)
            assert "int16[4]" in str(error)
            assert x.tolist() == [1] * 4
            assert only(cfd.all_reduce(fill(1.0)).wait(timeout=LONG)) == 2.0

    ranks.run(run)


def lose_one(rank: int, sent: signal.Signals) -> None:
    group = short_group()
    with simulate("lazy"):
        assert only(group.all_reduce(fill(1.0)).wait(timeout=LONG)) == 2.0
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), sent)
        kept = fill(3.0)
        operations: dict[str, CUDAFuture[Any]] = {
            "all_reduce": group.all_reduce(kept),
            "all_gather": group.all_gather([torch.empty(64, device="sim") for _ in range(2)], fill(1.0)),
            "recv": group.recv(torch.empty(64, device="sim"), 1),
        }
        child = operations["all_reduce"].then(lambda f: f.value() * 2)
        for name, future in operations.items():
            error = future.exception(timeout=LONG)
            assert isinstance(error, CollectiveError), name
            assert (error.operation, error.rank, error.group) == (name, 0, group.group.group_name)
            assert name in str(error)
        assert isinstance(child.exception(timeout=LONG), CollectiveError)
        assert only(kept) == 3.0


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_fails_every_future(sent: signal.Signals) -> None:
    run_ranks(2, lose_one, sent, lost=[1])


def break_the_device(rank: int) -> None:
    """Break the device of rank 1, which then refuses all collectives: later ones would meet wrong partners."""
    group = short_group()
    from cudafuture.testing import sim

    sim.enable(devices=2, schedule="lazy")
    assert only(group.all_reduce(fill(1.0)).wait(timeout=LONG)) == 2.0
    x = fill(1.0)
    if rank == 1:
        sim.fail("burnt")
        x = x + 1
    broken = group.all_reduce(x)
    after = group.all_reduce(fill(5.0, 1))
    for future in (broken, after):
        assert isinstance(future.exception(timeout=LONG), CollectiveError)
    if rank == 1:
        assert "burnt" in str(broken.exception())
        assert "out of step" in str(after.exception())
        sim.clear_error(0)
    sim.disable()


def test_failed_device_puts_rank_out_of_step() -> None:
    run_ranks(2, break_the_device)


def test_collective_cannot_be_cancelled(ranks: World) -> None:
    def run() -> None:
        with simulate("lazy") as sim:
            with sim.hold():
                reduced = cfd.all_reduce(fill(1.0))
                assert not reduced.cancel()
                with pytest.raises(TimeoutError):
                    reduced.wait(timeout=0.0)
            assert only(reduced.wait(timeout=LONG)) == 2.0

    ranks.run(run)


def differ(rank: int) -> None:
    group = short_group()
    with simulate("lazy"), compare_order():
        same = group.all_reduce(fill(1.0))
        assert only(same.wait(non_blocking=True)) == 2.0
        other = group.all_reduce(fill(1.0)) if rank == 0 else group.broadcast(fill(1.0), 1)
        error = other.exception(timeout=LONG)
        assert isinstance(error, CollectiveError)
        assert "all_reduce float32[64] on a device" in str(error)
        assert "broadcast float32[64] on a device" in str(error)
        assert __file__ in str(error)


def test_differences_between_ranks_are_found() -> None:
    run_ranks(2, differ)


# ---- other ways to use them


@on_each_schedule
def test_torch_bridges_keep_order(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule):
            theirs = cfd.all_reduce(fill(1.0)).to_torch().then(lambda f: f.value() * 2)
            assert only(theirs.wait()) == 4.0
            assert only(CUDAFuture.from_torch(theirs).then(lambda f: f.value() + 1).wait(non_blocking=True)) == 5.0

    ranks.run(run)


def test_executor_thread_may_issue(ranks: World) -> None:
    def run() -> None:
        with simulate("jitter"):
            group = cfd.new_group(timeout=dt.timedelta(seconds=LONG))
            pool = executors.default_executor()
            reduced = cudafuture.submit(lambda: group.all_reduce(fill(1.0)).wait(timeout=LONG), executor=pool)
            assert only(reduced.wait(timeout=LONG)) == 2.0

    ranks.run(run)


class ThroughTheHost(dist.ProcessGroup):
    """Group that takes tensors of a device, for DDP, which passes its own messages to the backend unchanged."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.inner = group

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        return self.work_of([cfd.broadcast(t, group=self.inner, group_src=options.rootRank) for t in tensors])

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        return self.work_of([cfd.all_reduce(t, options.reduceOp, self.inner) for t in tensors])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        return self.work_of([cfd.all_gather(o, i, self.inner) for o, i in zip(outputs, inputs, strict=True)])

    def work_of(self, futures: list[CUDAFuture[Any]]) -> Any:
        return torch._C._distributed_c10d._create_work_from_future(cudafuture.gather(*futures).to_torch())  # type: ignore[attr-defined]


@on_each_schedule
@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused_parameters"])
def test_ddp_trains_on_device_with_hook(ranks: World, schedule: str, unused: bool) -> None:
    def run() -> None:
        def make(device: str) -> nn.Module:
            torch.manual_seed(dist.get_rank())  # DDP makes the parameters those of rank 0
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).to(device)

        @cfd.ddp_comm_hook
        def average(_: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
            return cfd.all_reduce(bucket.buffer()).then(lambda f: f.value().div_(dist.get_world_size()))

        with simulate(schedule):
            here, there = make("cpu"), make("sim:0")
            options: dict[str, Any] = {"bucket_cap_mb": 1e-4, "find_unused_parameters": unused}
            theirs = DistributedDataParallel(here, **options)
            ours = DistributedDataParallel(there, process_group=ThroughTheHost(dist.group.WORLD), **options)
            ours.register_comm_hook(None, average)
            for model in (theirs, ours):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(3):
                    generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
                    x = torch.randn(4, 8, generator=generator).to(next(model.parameters()).device)
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()
            for p, q in zip(here.parameters(), there.parameters(), strict=True):
                assert torch.allclose(p, q.cpu(), atol=1e-5)

    ranks.run(run)


@on_each_schedule
def test_ddp_without_device_group_uses_hook(ranks: World, schedule: str) -> None:
    def run() -> None:
        with simulate(schedule):
            model = nn.Linear(8, 3).to("sim:0")
            with pytest.raises(RuntimeError):
                DistributedDataParallel(model)
            ddp = DistributedDataParallel(model, init_sync=False)
            ddp.register_comm_hook(None, cfd.ddp_comm_hook(lambda _, bucket: cfd.all_reduce(bucket.buffer())))
            ddp(torch.full((1, 8), 1.0, device="sim:0")).sum().backward()
            assert model.weight.grad is not None
            assert only(model.weight.grad) == 2.0
            with pytest.raises(RuntimeError, match="sim"):  # it tells the ranks in which order gradients came
                ddp(torch.full((1, 8), 1.0, device="sim:0"))

    ranks.run(run)

"""References to values on other workers: made, read, passed on, called through, and deleted."""

from __future__ import annotations

import gc
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError, executors, wait_all
from cudafuture.errors import WorkerLostError
from cudafuture.testing import World
from rpc_ext import RRef, async_execution, batch, remote, rpc_async, rpc_sync
from rpc_ext._creation import Creation
from support.parity import answers
from support.patience import PATIENCE
from support.rpc_callees import (
    ME,
    Adder,
    Gate,
    Watched,
    add,
    add_of,
    alone,
    collect_garbage,
    count,
    is_confirmed,
    is_watched_gone,
    local_value_of,
    make_on,
    pass_on,
    pass_on_after_deadline,
    pending,
    raises,
    references_to,
    same,
    sum_of,
    users_of_references,
    value_of,
    wait_for,
    waits,
    working,
)
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-rref")]

ONES = torch.ones(2, 2)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path / "rendezvous", num_worker_threads=4) as session:
        yield session


# ---- on one worker, which owns what it refers to


@answers("test_local_rref_no_fork", "test_rref_py_pickle_not_supported", "test_rref_str")
def test_reference_to_local_value_works(worker: rpc_ext.Session) -> None:
    value = [ONES]
    rref = RRef(value)
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.get_future().wait() is value
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert (rref.owner_name(), rref.owner().id) == (ME, 0)
    assert repr(rref) == "<RRef owned by 'me'>"
    with pytest.raises(RuntimeError, match="pickle"):
        pickle.dumps(rref)  # only a call counts who has it


@answers("test_owner_equality")
def test_owners_are_compared_and_hashed(worker: rpc_ext.Session) -> None:
    first, second = RRef(1), RRef(2)
    assert first.owner() == second.owner() == torch_rpc.get_worker_info()
    assert len({first.owner(): 1, second.owner(): 2}) == 1


@answers(
    "test_self_py_udf_remote",
    "test_builtin_remote_self",
    "test_builtin_remote_ret",
    "test_remote_same_worker",
    "test_rref_get_future",
)
def test_remote_returns_immediately(worker: rpc_ext.Session, gate: Gate) -> None:
    rref = remote(ME, waits, (gate, ONES))
    future = rref.get_future()
    assert gate.reached.wait(PATIENCE)
    assert not future.done()
    gate.open()
    assert torch.equal(future.wait(timeout=PATIENCE), ONES)
    assert torch.equal(rref.to_here(), ONES)
    assert torch.equal(rref.local_value(), ONES)
    assert torch.equal(remote(ME, torch.add, (ONES, ONES), {"alpha": 2}).to_here(), ONES * 3)


@answers(
    "test_self_remote_rref_as_rpc_arg",
    "test_self_remote_rref_as_self_rpc_arg",
    "test_self_remote_rref_as_remote_arg",
    "test_self_remote_rref_as_self_remote_arg",
    "test_pass_local_rrefs",
    "test_self_remote_rref_as_rpc_arg_sparse",
    "test_self_remote_rref_as_self_rpc_arg_sparse",
    "test_self_remote_rref_as_remote_arg_sparse",
    "test_self_remote_rref_as_self_remote_arg_sparse",
)
def test_references_are_arguments_and_results(worker: rpc_ext.Session) -> None:
    for rref in (RRef(ONES), remote(ME, same, (ONES,)), RRef(ONES.to_sparse())):
        for value in (
            rpc_sync(ME, sum_of, (rref, rref)),
            rpc_async(ME, sum_of, (rref, rref)).wait(timeout=PATIENCE),
            remote(ME, sum_of, (rref, rref)).to_here(),
        ):
            assert torch.equal(value.to_dense(), ONES * 2)
    nested = {"a": [RRef(1), (RRef(2),)]}
    got = rpc_sync(ME, same, (nested,))
    assert (got["a"][0].to_here(), got["a"][1][0].to_here()) == (1, 2)
    assert rpc_sync(ME, local_value_of, (RRef(5),)) == 5
    assert remote(ME, references_to, ([1, 2],)).to_here()[1].to_here() == 2


@pytest.mark.parametrize("call", [rpc_async, remote])
def test_unpicklable_call_reference_fails_immediately(tmp_path: Path, call: Any) -> None:
    with alone(tmp_path / "rendezvous") as session:
        rref = RRef(1)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            call(ME, same, ((rref, lambda: 1),))
        rpc_ext.shutdown(timeout=PATIENCE)  # raises TimeoutError where the owner waits for a worker to receive it
        assert session.is_ending


@answers("test_remote_with_exception")
def test_reference_raises_error_of_function(worker: rpc_ext.Session) -> None:
    for rref in (
        remote(ME, raises, (LookupError("expected"),)),
        remote(ME, async_raises),
        remote(ME, async_fails),
        remote(ME, raises, (SystemExit("expected"),)),
    ):
        for _ in range(2):
            with pytest.raises((LookupError, SystemExit, RuntimeError), match="expected"):
                rref.to_here()
        with pytest.raises((LookupError, SystemExit, RuntimeError), match="expected"):
            rref.local_value()
        with pytest.raises((LookupError, SystemExit, RuntimeError), match="expected"):
            rref.rpc_sync().anything()
    with pytest.raises(TypeError, match="positional"):
        remote(ME, same, (1, 2, 3)).to_here()


@async_execution
def async_raises() -> CUDAFuture[Any]:
    raise LookupError("expected")


@async_execution
def async_fails() -> CUDAFuture[Any]:
    return CUDAFuture.failed(LookupError("expected"))


def test_async_function_value_is_awaited(worker: rpc_ext.Session, gate: Gate) -> None:
    rref = remote(ME, pending, (gate,))
    future, called = rref.get_future(), rref.rpc_async().upper()
    assert gate.reached.wait(PATIENCE)
    assert not future.done()
    gate.futures[0].set_result("text")
    assert future.wait(timeout=PATIENCE) == "text"
    assert called.wait(timeout=PATIENCE) == "TEXT"
    assert rref.local_value() == "text"


@answers(
    "test_rref_proxy_tensor_self",
    "test_rref_proxy_class_self",
    "test_rref_proxy_reuse",
    "test_rref_proxy_non_exist",
    "test_call_method_on_rref",
)
def test_methods_are_called_through_reference(worker: rpc_ext.Session) -> None:
    rref: Any = remote(ME, Adder, (7,))
    asynchronous, synchronous, referring = rref.rpc_async(), rref.rpc_sync(), rref.remote()
    assert asynchronous.add(1).wait(timeout=PATIENCE) == 8
    assert synchronous.add(by=2) == 10
    assert referring.add(3).to_here() == 13
    assert (asynchronous.get().wait(), synchronous.get(), referring.get().to_here()) == (13, 13, 13)
    assert (synchronous.double(4), synchronous.of(5).value) == (8, 5)
    assert synchronous.later(ME, 1) == 14
    assert asynchronous.static_later(ME, 1, 2).wait(timeout=PATIENCE) == 3
    assert referring.class_later(ME, 1, 2).to_here() == 4
    tensor: Any = remote(ME, same, (ONES,))
    assert tensor.rpc_sync().size() == ONES.size()
    assert torch.equal(tensor.remote().view(1, 4).to_here(), ONES.view(1, 4))


@answers("test_async_class_rref_proxy", "test_async_class_rref_proxy_async", "test_async_class_rref_proxy_remote")
def test_method_errors_pass_through_reference(worker: rpc_ext.Session) -> None:
    rref: Any = remote(ME, Adder, (7,))
    for name, error in (("non_existent", AttributeError), ("fail", LookupError)):
        with pytest.raises(error):
            getattr(rref.rpc_sync(), name)()
        with pytest.raises(error):
            getattr(rref.rpc_async(), name)().wait(timeout=PATIENCE)
        with pytest.raises(error):
            getattr(rref.remote(), name)().to_here()
    with pytest.raises(TypeError, match="future"):
        remote(ME, Misdecorated).rpc_sync().method()


class Misdecorated:
    @async_execution
    def method(self) -> Any:
        return 3


@answers("test_rref_timeout", "test_rref_proxy_timeout")
def test_reading_and_calling_have_timeouts(worker: rpc_ext.Session, gate: Gate) -> None:
    rref: Any = RRef(Waiting(gate))
    with pytest.raises(TimeoutError, match=r"on worker 'me'"):
        rref.rpc_async(timeout=0.05).method().wait(timeout=PATIENCE)
    with pytest.raises(TimeoutError, match=r"on worker 'me'"):
        rref.rpc_sync(timeout=0.05).method()
    with pytest.raises(ValueError, match="seconds"):
        remote(ME, same, (1,), timeout=-1)


def test_owner_wait_has_timeout(worker: rpc_ext.Session, gate: Gate) -> None:
    rref = remote(ME, pending, (gate,))
    with pytest.raises(TimeoutError, match=r"this worker, 'me', had no value within 0.05 s"):
        rref.to_here(timeout=0.05)
    early = rref.get_future(timeout=0.05)
    late = rref.get_future(timeout=math.inf)
    assert isinstance(early.exception(timeout=PATIENCE), TimeoutError)
    assert gate.reached.wait(PATIENCE)
    gate.futures[0].set_result("there")
    assert late.wait(timeout=PATIENCE) == "there"
    assert rref.to_here(timeout=PATIENCE) == "there"


@pytest.mark.parametrize("making", [pending, waits])
def test_owner_makes_value_in_time(worker: rpc_ext.Session, gate: Gate, making: Callable[..., Any]) -> None:
    rref = remote(ME, making, (gate, 3) if making is waits else (gate,), timeout=0.05)
    asked: list[Callable[[], Any]] = [
        lambda: rref.to_here(timeout=PATIENCE),
        lambda: rref.get_future(timeout=math.inf).wait(timeout=PATIENCE),
        rref.local_value,
        lambda: rref.rpc_sync(timeout=PATIENCE).conjugate(),
    ]
    for ask in asked:  # the first in time, the others when it is over
        with pytest.raises(TimeoutError, match="worker 'me' has not made the value of an RRef in time"):
            ask()
    assert gate.reached.wait(PATIENCE)
    gate.make(3)
    while isinstance(rref.get_future(timeout=math.inf).exception(timeout=PATIENCE), TimeoutError):
        pass  # the owner has not stored the value yet
    assert [ask() for ask in asked] == [3] * 4


@pytest.fixture
def block(worker: rpc_ext.Session) -> Iterator[Callable[[], None]]:
    """Give a function that lets a callback block the callback thread until the test is over."""
    over = threading.Event()
    yield lambda: CUDAFuture.completed(None).add_done_callback(
        lambda _: over.wait(PATIENCE), executor=executors.callback_thread
    )
    over.set()


def test_late_value_needs_no_callback_thread(gate: Gate, block: Callable[[], None]) -> None:
    rref = remote(ME, waits, (gate, 3), timeout=0.05)
    with pytest.raises(TimeoutError):
        rref.to_here(timeout=PATIENCE)
    gate.open()
    wait_for(lambda: rref.get_future(timeout=math.inf).exception(timeout=PATIENCE) is None)
    block()
    assert rref.rpc_sync(timeout=PATIENCE).conjugate() == 3


@pytest.mark.parametrize("timeout", [math.inf, PATIENCE / 2])
def test_awaited_value_needs_no_callback_thread(gate: Gate, block: Callable[[], None], timeout: float) -> None:
    rref = remote(ME, waits, (gate, 3), timeout=timeout)
    assert gate.reached.wait(PATIENCE)
    block()
    asked = [rref.get_future(timeout=PATIENCE), rpc_async(ME, value_of, (rref,)), rref.rpc_async().conjugate()]
    gate.open()
    assert wait_all(asked, timeout=PATIENCE / 2) == [3, 3, 3]
    assert rref.local_value() == 3


def make_late(file: str) -> None:
    rank = dist.get_rank()
    with working(f"worker{rank}", rank, 3, file, num_worker_threads=4):
        if rank == 0:
            for making in (pending, waits):
                gate = Gate(f"made late by {making.__name__}")
                rref = remote(1, making, (gate, 3) if making is waits else (gate,), timeout=0.3)
                elsewhere = rpc_async(2, value_of, (rref,), timeout=PATIENCE)
                error = rref.get_future(timeout=PATIENCE).exception(timeout=PATIENCE)
                assert isinstance(error, TimeoutError)
                assert "worker 'worker1' has not made the value of an RRef in time" in str(error)
                assert isinstance(elsewhere.exception(timeout=PATIENCE), TimeoutError)
                assert isinstance(rref.get_future(timeout=PATIENCE).exception(timeout=PATIENCE), TimeoutError)
                with pytest.raises(TimeoutError):
                    rref.rpc_sync(timeout=PATIENCE).conjugate()
                rpc_sync(1, Gate.make, (gate, 3))
                while isinstance(rref.get_future().exception(timeout=PATIENCE), TimeoutError):
                    pass  # the owner has not stored the value yet
                assert rref.to_here(timeout=PATIENCE) == 3
        dist.barrier()


@pytest.mark.slow
@pytest.mark.world(3)
def test_late_value_is_late_for_everyone(world: World, tmp_path: Path) -> None:
    world.run(make_late, str(tmp_path / "rendezvous"))


def pass_on_late(file: str) -> None:
    rank = dist.get_rank()
    with working(f"worker{rank}", rank, 3, file, num_worker_threads=4):
        if rank == 0:
            made = False
            while not made:  # a busy machine may not make it in its time
                rref = remote(1, same, (3,), timeout=0.05)
                made = rref.get_future(timeout=PATIENCE).exception(timeout=PATIENCE) is None
            assert rpc_sync(2, pass_on_after_deadline, ([0, 2, 1, 0], rref)) == 3
        dist.barrier()


@pytest.mark.slow
@pytest.mark.world(3)
def test_each_worker_forwards_reference_late(world: World, tmp_path: Path) -> None:
    world.run(pass_on_late, str(tmp_path / "rendezvous"))


class Waiting:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def method(self) -> None:
        self.gate.wait()


@pytest.mark.slow
def test_value_without_references_is_deleted(worker: rpc_ext.Session) -> None:
    for make in (lambda: RRef(Watched()), lambda: remote(ME, Watched), lambda: rpc_sync(ME, make_on, (ME, Watched))):
        rref: Any = make()
        assert rpc_sync(ME, is_a, (rref,)) == "Watched"
        gc.collect()
        assert not Watched.gone.is_set()
        del rref
        while not Watched.gone.wait(0.01):
            rpc_sync(ME, collect_garbage)  # the last reference goes with an answer, in some thread
    assert Watched.gone.is_set()


def is_a(rref: RRef[Any]) -> str:
    return type(rref.local_value()).__name__


# ---- who runs callbacks


def test_callbacks_of_local_values_may_call(tmp_path: Path, gate: Gate) -> None:
    """They run on no thread of the engine's: there is but one, which brings the answer."""
    with alone(tmp_path / "rendezvous", num_worker_threads=1):
        threads: list[str] = []

        def call_again(done: CUDAFuture[Any]) -> Any:
            threads.append(threading.current_thread().name)
            return rpc_sync(ME, add, (done.value(), 1), timeout=PATIENCE)

        chained = remote(ME, waits, (gate, 1)).get_future().then(call_again)
        assert gate.reached.wait(PATIENCE)
        gate.open()
        assert chained.wait(timeout=PATIENCE) == 2
        assert threads[0] != threading.current_thread().name


def test_blocking_callback_delays_no_timeout(worker: rpc_ext.Session, gate: Gate) -> None:
    """They are kept by one thread."""
    blocked, may_go_on = threading.Event(), threading.Event()

    def block(_: object) -> None:
        blocked.set()
        assert may_go_on.wait(PATIENCE)

    never = remote(ME, pending, (gate,))
    never.get_future(timeout=0.05).add_done_callback(block)
    assert blocked.wait(PATIENCE)
    with batch(ME):
        late = rpc_async(ME, pending, (gate,), timeout=0.05)
    assert isinstance(never.get_future(timeout=0.05).exception(timeout=PATIENCE), TimeoutError)
    assert isinstance(late.exception(timeout=PATIENCE), TimeoutError)
    may_go_on.set()


@answers("test_use_rref_after_shutdown", "test_non_garbage_collected_user_rref_due_to_local_circular_dependency")
def test_reference_outlives_session_with_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match="init_rpc"):
        RRef(1)
    with alone(tmp_path / "rendezvous"):
        rrefs: list[Any] = [RRef(1), remote(ME, same, (2,))]
        rrefs.append(rrefs)  # a cycle
    rref = rrefs[1]
    uses: list[Callable[[], object]] = [
        lambda: rpc_async(ME, same, (rref,)),
        lambda: rref.rpc_sync().bit_length(),
        lambda: rref.remote().bit_length(),
        rref.to_here,
        rref.get_future,
        rref.local_value,
        rref.owner,
        rref.owner_name,
        rref.is_owner,
        rref.confirmed_by_owner,
    ]
    for use in uses:
        with pytest.raises(InvalidStateError, match="init_rpc"):
            use()
    assert repr(rrefs[0]) == "<RRef of a session that has ended>"


class OfEndedSession:
    """torch's reference whose message has failed, and which names no worker since its session has ended."""

    def _get_future(self) -> OfEndedSession:
        return self

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        raise RuntimeError("pipe closed (this error originated at tensorpipe/core/pipe_impl.cc:356)")

    def owner_name(self) -> str:
        raise RuntimeError("Current RPC agent is not set!")


def test_creation_that_fails_after_session_is_looked_at_once() -> None:
    told: list[Exception] = []
    creation = Creation(OfEndedSession(), "owner", "fn", lambda _, error: told.append(error))
    assert creation.look(0) is None
    assert [(type(error), "worker 'owner'" in str(error)) for error in told] == [(WorkerLostError, True)]


@answers("test_my_parameter_server")
def test_one_worker_thread_is_enough(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", num_worker_threads=1):
        rrefs = [remote(ME, add, (i, 1)) for i in range(50)]
        assert wait_all([rref.get_future() for rref in rrefs], timeout=PATIENCE) == list(range(1, 51))
        assert rpc_sync(ME, pass_on, ([], RRef(3))) == 3  # the value is there: nothing to wait for
        assert rpc_sync(ME, local_value_of, (rrefs[3],)) == 4
        shared = remote(ME, Adder, (0,))
        wait_all([shared.rpc_async().add(1) for _ in range(50)], timeout=PATIENCE)
        assert shared.rpc_sync().get() == 50


# ---- one session after another


def in_a_second_session(file: str, secret: str | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    kept: list[Any] = []
    for session in range(3):
        now = (rank + session) % size  # others' numbers, so that old references would be taken for theirs
        other = (now + 1) % size
        with working(f"w{now}", now, size, f"{file}{session}", secret=secret):
            rref: Any = remote(other, Watched)
            assert rref.rpc_sync().name() == "Watched"
            assert rpc_sync(other, add_of, (remote(other, add, (session, 1)), 1)) == session + 2
            assert rpc_sync(other, add_of, (RRef(session), 1)) == session + 1
            kept.append(remote(other, same, (session,)))
            assert kept[-1].to_here() == session
            del rref, kept[:session]  # those of earlier sessions have no owner now
            while not rpc_sync(other, is_watched_gone):
                rpc_sync(other, collect_garbage)
            dist.barrier()
    dist.barrier()


@pytest.mark.slow
@pytest.mark.world(2)
@pytest.mark.parametrize("secret", [None, "sixteen bytes and more"], ids=["open", "signed"])
def test_second_session_references_work(world: World, tmp_path: Path, secret: str | None) -> None:
    world.run(in_a_second_session, str(tmp_path / "rendezvous"), secret)


# ---- three workers: an owner, one that has made the reference, one that it is passed on to


def with_others(file: str, secret: str | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    one, two = (rank + 1) % size, (rank + 2) % size
    with working(f"w{rank}", rank, size, file, secret=secret):
        value = torch.full((2,), float(rank))
        made: Any = remote(one, add, (value, 1))
        assert (made.is_owner(), made.owner_name()) == (False, f"w{one}")
        assert torch.equal(made.to_here(), value + 1)
        with pytest.raises(RuntimeError, match="owner"):
            made.local_value()
        # Passed on, also before its owner has confirmed it. A use may end in a thread of the agent while this thread,
        # which has the GIL, drops a reference: neither waits for the other.
        for _ in range(soak_count(100)):
            assert torch.equal(rpc_sync(two, add_of, (remote(one, add, (value, 1)), 1)), value + 2)
            assert torch.equal(remote(two, sum_of, (remote(one, same, (value,)), RRef(value))).to_here(), 2 * value)
            assert rpc_sync(two, is_confirmed, (remote(one, same, (1,)),)) is True
            assert remote(two, is_confirmed, (remote(one, same, (1,)),)).to_here() is True
        assert torch.equal(rpc_sync(one, pass_on, ([two, rank, one, two], made)), value + 1)
        # returned: by its owner, and by another
        assert rpc_sync(one, make_on, (two, add, 1, 2)).to_here() == 3
        assert remote(one, make_on, (two, add, 1, 2)).to_here().to_here() == 3
        lists = rpc_sync(one, references_to, ([Adder(1), Adder(2)],))
        assert [rref.rpc_sync().add(10) for rref in lists] == [11, 12]
        assert [rpc_sync(rref.owner(), local_value_of, (rref,)).value for rref in lists] == [11, 12]
        assert rpc_sync(two, pass_on, ([], lists[0])).value == 11
        # in a batch, calls with references go in messages of their own, and the others keep their order
        with batch(two):
            calls = [rpc_async(two, count, (remote(one, same, (0,)) if i % 3 == 0 else i,)) for i in range(9)]
        numbers = wait_all(calls, timeout=PATIENCE)
        assert len(set(numbers)) == 9
        plain = [number for i, number in enumerate(numbers) if i % 3]
        assert plain == sorted(plain)
        # failed
        with pytest.raises(LookupError, match="expected"):
            remote(one, raises, (LookupError("expected"),)).to_here()
        with pytest.raises(LookupError, match="expected"):
            rpc_sync(two, add_of, (remote(one, raises, (LookupError("expected"),)), 1))
        dist.barrier()


@answers(
    "test_py_rref_args",
    "test_py_rref_args_user_share",
    "test_py_rpc_rref_args",
    "test_nested_remote",
    "test_nested_rref",
    "test_nested_rref_stress",
    "test_user_rrefs_confirmed",
    "test_user_rrefs_confirmed_remote",
    "test_rpc_return_rref",
    "test_return_local_rrefs",
    "test_local_value_not_on_owner",
    "test_rref_forward_chain",
    "test_rref_proxy_tensor",
    "test_rref_proxy_class",
    "test_py_udf_remote",
    "test_multi_py_udf_remote",
    "test_multi_builtin_remote_ret",
)
@pytest.mark.slow
@pytest.mark.world(3)
@pytest.mark.parametrize("secret", [None, "sixteen bytes and more"], ids=["open", "signed"])
def test_references_go_from_worker_to_worker(world: World, tmp_path: Path, secret: str | None) -> None:
    world.run(with_others, str(tmp_path / "rendezvous"), secret)


def use_elsewhere_while_made(file: str) -> None:
    rank = dist.get_rank()
    with working(f"worker{rank}", rank, 2, file, num_worker_threads=4):
        if rank == 0:
            # Itself, while it is made, and perhaps its creator already: torch would count none.
            assert remote(1, users_of_references).to_here() >= 1
            while rpc_sync(1, users_of_references):  # and none after the last use
                rpc_sync(1, collect_garbage)
            gate = Gate("used elsewhere")
            rref = remote(1, waits, (gate, 3))
            seen = rpc_async(0, value_of, (rref,))  # another reference, which is dropped right after
            for _ in range(5):
                collect_garbage()
                rpc_sync(1, collect_garbage)  # time for the message to reach the owner
            rpc_sync(1, Gate.open, (gate,))
            assert seen.wait(timeout=PATIENCE) == 3
            assert rref.to_here(timeout=PATIENCE) == 3
        dist.barrier()


@pytest.mark.slow
@pytest.mark.world(2)
def test_reference_works_elsewhere_before_value_exists(world: World, tmp_path: Path) -> None:
    world.run(use_elsewhere_while_made, str(tmp_path / "rendezvous"))

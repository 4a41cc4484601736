"""Start of RPC: its workers, a start after a failed one, beside torch's own RPC, or while other threads work."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc

import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError
from cudafuture.errors import AuthenticationError
from rpc_ext import _engine, _listeners, _options, _shutdown, rpc_async, rpc_sync
from rpc_ext._handshake import Handshake
from support.ranks import run_ranks
from support.rpc_workers import LONG, NAMES, SECRET, begin, hold, same

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-beginning")]

BRIEF = 0.2  # seconds, of starts that are to fail
LIKELY = 5.0  # seconds, of starts that are to fail late: all workers come at the same time


# ---- with whom


@pytest.mark.parametrize("name", ["", "a b", "\N{LATIN SMALL LETTER U WITH DIAERESIS}", "a.b", "a/b", "a\n", "x" * 128])
def test_names_refused_by_torch_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a worker's name has 1 to 127 letters and digits"):
        rpc_ext.init_rpc(name, rank=0, world_size=2)


def test_name_of_other_type_is_refused() -> None:
    with pytest.raises(TypeError, match="a worker's name is a str, not 5"):
        rpc_ext.init_rpc(5, rank=0, world_size=2)  # type: ignore[arg-type]


def test_occupied_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        with pytest.raises(ConnectionError, match=rf"the store at tcp://127.0.0.1:{port} cannot be reached: .*{port}"):
            rpc_ext.init_rpc(rank=0, world_size=2, init_method=f"tcp://127.0.0.1:{port}", start_timeout=LONG)


def be_called(rank: int, store: str, names: list[str]) -> list[str]:
    found = []
    for name in names:
        with rpc_ext.init_rpc(name, rank=0, world_size=1, init_method=f"file://{store}", secret=SECRET) as session:
            found.append(session.name)
    return found


@pytest.mark.slow
def test_other_names_are_accepted(tmp_path: Path) -> None:
    names = ["x" * 127, "a-b_c:d", "0"]
    assert run_ranks(1, be_called, str(tmp_path / "store"), names) == [names]


def test_late_secret_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAFUTURE_RPC_SECRET_FILE", "secret")
    with pytest.raises(ValueError, match="='secret' was set after cudafuture was imported, which has read None"):
        rpc_ext.init_rpc(rank=0, world_size=2)
    assert _options.read_secret(SECRET) == SECRET.encode()


def test_empty_secret_file_name_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAFUTURE_RPC_SECRET_FILE", "")
    with pytest.raises(ValueError, match="CUDAFUTURE_RPC_SECRET_FILE is set to an empty string"):
        rpc_ext.init_rpc(rank=0, world_size=2)


def test_unknown_seal_is_refused() -> None:
    with pytest.raises(ValueError, match='seal is "descriptions" or "contents"'):
        rpc_ext.init_rpc(rank=0, world_size=2, seal="everything")  # type: ignore[arg-type]


# ---- again after a start that failed


def give_up(rank: int, size: int, store: str, times: int) -> None:
    for _ in range(times):
        with pytest.raises(TimeoutError, match="has not arrived within"):
            begin(rank, size, store, start_timeout=BRIEF)


def begin_after_failures(rank: int, store: str, failures: list[list[int]]) -> list[int]:
    """Begin after each worker has given up as often as is said, all alone."""
    answers = []
    for turn, times in enumerate(failures):
        for each in range(3):
            dist.barrier()
            if each == rank:
                give_up(rank, 3, store, times[rank])
        dist.barrier()
        with begin(rank, 3, store):
            answers.append(rpc_sync((rank + 1) % 3, same, (turn,)))
    return answers


@pytest.mark.slow
def test_workers_meet_after_failed_starts(tmp_path: Path) -> None:
    failures = [[1, 0, 0], [0, 2, 1], [0, 0, 0], [1, 1, 0]]
    assert run_ranks(3, begin_after_failures, str(tmp_path / "store"), failures) == [[0, 1, 2, 3]] * 3


def be_late(rank: int, store: str) -> None:
    if rank == 1:
        give_up(rank, 2, store, 1)
    dist.barrier()
    with begin(rank, 2, store) as session:
        assert session.workers == list(NAMES[:2])


@pytest.mark.slow
def test_waiting_worker_meets_retrying_one(tmp_path: Path) -> None:
    run_ranks(2, be_late, str(tmp_path / "store"))


def differ(rank: int, store: str, options: list[dict[str, Any]]) -> tuple[str, str]:
    own = dict(options[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpc_ext._agent.__version__", own.pop("version", "1.0"))
        with pytest.raises((ValueError, AuthenticationError)) as caught:
            begin(rank, 2, store, start_timeout=math.inf, **own)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            [{"transports": ["shm"]}, {"transports": ["uv"]}],
            "ValueError",
            ["differ in `transports`", "['shm']", "['uv']"],
        ),
        ([{"seal": "contents"}, {}], "ValueError", ["differ in `seal`", "contents", "descriptions"]),
        ([{"version": "0.9"}, {}], "ValueError", ["differ in `version`", "1.0", "0.9"]),
        ([{}, {"secret": None}], "AuthenticationError", ["the `secret`: give all workers the same one"]),
    ],
    ids=["transports", "seal", "version", "secret"],
)
def test_different_workers_name_each_other(
    tmp_path: Path, options: list[dict[str, Any]], error: str, said: list[str]
) -> None:
    outcomes = run_ranks(2, differ, str(tmp_path / "store"), options)
    for rank, (kind, message) in enumerate(outcomes):
        assert kind == error
        for part in (*said, NAMES[1 - rank], "127.0.0.1"):
            assert part in message


def test_absent_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "eth99")
    with pytest.raises(ValueError, match="TP_SOCKET_IFNAME='eth99': this machine has no such network interface"):
        rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0", secret=SECRET)


def who_is_missing(rank: int, store: str, present: list[int]) -> str:
    if rank not in present:
        return ""
    with pytest.raises(TimeoutError) as caught:
        begin(rank, 3, store, start_timeout=LIKELY)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("present", "missing"), [([0, 1], "2"), ([1, 2], "0"), ([1], "0, 2")])
def test_every_worker_names_missing_one(tmp_path: Path, present: list[int], missing: str) -> None:
    said = run_ranks(3, who_is_missing, str(tmp_path / "store"), present)
    for rank in present:
        assert said[rank] == f"worker {missing} of 3 has not arrived within {LIKELY:g} s"


def fail_in(rank: int, store: str, step: str) -> str:
    """Fail the start of the second worker after it has written its record."""
    others_have_failed = threading.Event()

    def fail(*_: Any, **__: Any) -> Any:
        dist.barrier()
        others_have_failed.set()
        raise LookupError("of the test")

    def wait(_: Any) -> None:
        assert others_have_failed.wait(LONG)

    where: Any = rpc_ext._C if step == "Agent" else _engine
    with contextlib.ExitStack() as patched:
        if rank == 1:
            patched.enter_context(mock.patch.object(where, step, fail))
            if step == "first_calls":
                patched.enter_context(mock.patch.object(_engine, "_same", wait))
        with pytest.raises((TimeoutError, LookupError)) as caught:
            begin(rank, 2, store, start_timeout=LIKELY)
    if rank == 0:
        dist.barrier()
    with begin(rank, 2, store):
        assert rpc_sync(1 - rank, same, (1,)) == 1
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("Agent", "worker 1 ('callee') of 2 has not started its agent within 5 s (address)"),
        ("set_agent", "worker 1 ('callee') of 2 has not started its agent within 5 s (address)"),
        ("first_calls", "worker 'callee' has not answered its first call within 5 s"),
    ],
)
def test_worker_failing_during_start_is_named(tmp_path: Path, step: str, said: str) -> None:
    assert run_ranks(2, fail_in, str(tmp_path / "store"), step)[0] == said


# ---- beside torch's own


def begin_torchs(store: str) -> None:
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)


def take_turns(rank: int, store: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    backends = torch_rpc.BackendType
    for turn in range(2):
        with begin(0, 1, f"{store}{turn}ours"):
            assert rpc_sync(0, same, (1,)) == 1
        begin_torchs(f"{store}{turn}")
        assert torch_rpc.rpc_sync("me", same, (2,)) == 2
        with pytest.raises(InvalidStateError, match="torch's own RPC has begun in this process"):
            begin(0, 1, f"{store}{turn}never")
        with pytest.raises(InvalidStateError, match="RPC has not begun"):
            rpc_async(0, same, (1,))
        torch_rpc.shutdown()
    assert torch_rpc.BackendType is torch_rpc.backend_registry.BackendType is backends


@pytest.mark.slow
def test_ours_and_torchs_take_turns(tmp_path: Path) -> None:
    run_ranks(1, take_turns, str(tmp_path / "store"))


def be_ended_by_torch(rank: int, store: str) -> None:
    session = begin(0, 1, store)
    pending = rpc_async(0, hold)
    torch_rpc.shutdown(graceful=False)
    assert isinstance(pending.exception(timeout=LONG), Exception)
    for use in (lambda: rpc_async(0, same, (1,)), rpc_ext.statistics, rpc_ext.shutdown):
        with pytest.raises(InvalidStateError, match=r"torch\.distributed\.rpc\.shutdown\(\) has ended RPC"):
            use()
    assert session.is_ending
    with begin(0, 1, f"{store}again"):
        assert rpc_sync(0, same, (1,)) == 1


def test_session_ended_by_torch_is_reported(tmp_path: Path) -> None:
    run_ranks(1, be_ended_by_torch, str(tmp_path / "store"))


# ---- the end


def end_it_here(graceful: bool) -> None:
    rpc_ext.shutdown(graceful)


@rpc_ext.async_execution
def end_it_here_later(graceful: bool) -> CUDAFuture[None]:
    rpc_ext.shutdown(graceful)
    return CUDAFuture.completed(None)


def be_told_to_end(rank: int, store: str) -> None:
    with begin(0, 1, store):
        for fn in (end_it_here, end_it_here_later):
            for graceful in (True, False):
                with pytest.raises(InvalidStateError, match="cannot be shut down by a function that it runs"):
                    rpc_sync(0, fn, (graceful,))
        assert rpc_sync(0, same, (1,)) == 1


def test_called_function_cannot_end_rpc(tmp_path: Path) -> None:
    run_ranks(1, be_told_to_end, str(tmp_path / "store"))


class SlowStore:
    """Store that answers only after its release."""

    def __init__(self) -> None:
        self.uses, self.is_asked, self.may_answer = 0, threading.Event(), threading.Event()

    def check(self, keys: list[str], /) -> bool:
        self.uses += 1
        self.is_asked.set()
        assert self.may_answer.wait(LONG)
        return False

    def get(self, key: str, /) -> bytes:
        raise AssertionError(key)

    def set(self, key: str, value: Any, /) -> None:
        self.uses += 1


def test_store_answering_late_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shutdown, "_STORE_PATIENCE", 0.1)
    store, agent = SlowStore(), mock.Mock()
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError, match="did not reply"):
        _shutdown.leave(agent, Handshake(store, 0, 2, None, LONG), time.monotonic())  # type: ignore[arg-type]
    assert store.is_asked.wait(LONG)
    (thread,) = set(threading.enumerate()) - before
    store.may_answer.set()
    thread.join(LONG)
    assert not thread.is_alive()
    assert store.uses <= 2  # the requests that it got
    assert not agent.mock_calls


def test_store_error_leaves_shutdown() -> None:
    store = mock.Mock()
    store.set.side_effect = LookupError
    with pytest.raises(LookupError):
        _shutdown.leave(mock.Mock(), Handshake(store, 0, 2, None, LONG), time.monotonic() + LONG)


# ---- what else goes on meanwhile


def listener(watched_by: select.epoll | None = None) -> socket.socket:
    one = socket.socket()
    one.bind((_listeners.host(), 0))
    one.listen()
    if watched_by is not None:
        one.setblocking(False)
        watched_by.register(one.fileno(), select.EPOLLIN)
    return one


def can_connect(address: Any) -> bool:
    with socket.socket() as one:
        one.settimeout(LONG)
        return one.connect_ex(address) == 0


def open_while_rpc_begins(rank: int, store: str) -> None:
    """Open sockets at the moment at which the agent opens its own."""
    mine: list[socket.socket] = []
    set_agent = _engine.set_agent
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with select.epoll() as loop:

        def also_open(agent: Any) -> None:
            set_agent(agent)
            mine.extend([listener(), listener(loop)])

        with mock.patch.object(_engine, "set_agent", also_open), begin(0, 1, store) as session:
            address = session.agent.store.get(f"addrs/{session.name}").decode()
            assert not can_connect((_listeners.host(), int(address.rpartition(":")[2])))
            assert [can_connect(one.getsockname()) for one in mine] == [True, True]
    for one in mine:
        one.close()


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="the system does not list what is open")
def test_sockets_opened_meanwhile_stay_open(tmp_path: Path) -> None:
    run_ranks(1, open_while_rpc_begins, str(tmp_path / "store"))


def in_a_forked_child(do: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(LONG))
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_meanwhile(rank: int, store: str) -> int:
    """Fork while another thread waits in init_rpc for a worker that comes only then."""
    if rank == 1:
        dist.barrier()
        with begin(1, 2, store):
            return 0
    began = threading.Event()

    def wait() -> None:
        with begin(0, 2, store):
            began.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not rpc_ext.session._lock.locked():
        time.sleep(0.001)
    code = in_a_forked_child(lambda: begin(0, 1, f"{store}child").__exit__(None, None, None))
    dist.barrier()
    thread.join()
    assert began.is_set()
    return code


@pytest.mark.slow
def test_child_forked_meanwhile_starts_itself(tmp_path: Path) -> None:
    assert run_ranks(2, fork_meanwhile, str(tmp_path / "store")) == [0, 0]

"""Tests of the rules of the library in the place of NCCL, through its C functions.

Most of the programs have all ranks in one process, each on a device of its own (ncclCommInitAll).
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fakecuda.nccl_ranks import needs_fake_runtime, run_ranks

pytestmark = [pytest.mark.cuda, pytest.mark.world, needs_fake_runtime]

BINDINGS = """
nccl = ctypes.CDLL("libnccl.so.2")
for name in ("ncclGetErrorString", "ncclGetLastError"):
    getattr(nccl, name).restype = ctypes.c_char_p
SUCCESS, UNHANDLED_CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = 0, 1, 4, 5, 6, 7
INT32, FLOAT, SUM = 2, 7, 0

def check(result):
    assert result == SUCCESS, (nccl.ncclGetErrorString(result), nccl.ncclGetLastError(None))

def init_all(count):
    comms = (ctypes.c_void_p * count)()
    check(nccl.ncclCommInitAll(comms, count, None))
    return [ctypes.c_void_p(c) for c in comms]

class Group:
    def __enter__(self): check(nccl.ncclGroupStart())
    def __exit__(self, *_): check(nccl.ncclGroupEnd())

def pointer(x): return ctypes.c_void_p(x.data_ptr())
def raw(stream): return ctypes.c_void_p(stream.cuda_stream)
def all_reduce(x, comm, stream, count=None, kind=FLOAT, op=SUM):
    return nccl.ncclAllReduce(pointer(x), pointer(x), ctypes.c_size_t(x.numel() if count is None else count), kind, op,
                              comm, raw(stream))
def send(x, peer, comm, stream):
    return nccl.ncclSend(pointer(x), ctypes.c_size_t(x.numel()), FLOAT, peer, comm, raw(stream))
def recv(x, peer, comm, stream):
    return nccl.ncclRecv(pointer(x), ctypes.c_size_t(x.numel()), FLOAT, peer, comm, raw(stream))
def error_of(comm):
    error = ctypes.c_int()
    check(nccl.ncclCommGetAsyncError(comm, ctypes.byref(error)))
    return error.value
def until(condition):
    while not condition():
        time.sleep(0.001)
def streams(count): return [torch.cuda.Stream(i) for i in range(count)]
def tensors(count, value=1.0, size=3):
    made = [torch.full((size,), value + i, device=f"cuda:{i}") for i in range(count)]
    for i in range(count): torch.cuda.synchronize(i)
    return made
"""


def run(program: str, folder: Path, **environment: str) -> str:
    """Run a program in one process and return its output."""
    return run_ranks(BINDINGS + textwrap.dedent(program), 1, folder, **environment)[0]


def test_version_matches_torch_header(tmp_path: Path) -> None:
    run(
        """
        version = ctypes.c_int()
        check(nccl.ncclGetVersion(ctypes.byref(version)))
        v = version.value
        assert (v // 10000, v // 100 % 100, v % 100) == torch.cuda.nccl.version()
        """,
        tmp_path,
    )


def test_collective_occupies_stream_until_all_arrive(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(2), streams(2), tensors(2)
        check(all_reduce(x[0], comms[0], s[0]))
        until(lambda: nccl.fakenccl_running_kernels(0) == 1)
        assert not s[0].query()
        check(all_reduce(x[1], comms[1], s[1]))
        s[0].synchronize()
        s[1].synchronize()
        equal(x[0], [3.0] * 3)
        equal(x[1], [3.0] * 3)
        """,
        tmp_path,
        FAKECUDA_SCHEDULE="jitter",
    )


def test_nested_groups_launch_with_outermost(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(2), streams(2), tensors(2)
        with Group():
            with Group():
                check(all_reduce(x[0], comms[0], s[0]))
            s[0].synchronize()  # nothing was launched
            check(all_reduce(x[1], comms[1], s[1]))
        for each in s: each.synchronize()
        equal(x[0], [3.0] * 3)
        """,
        tmp_path,
    )


def test_group_on_two_streams_orders_both(tmp_path: Path) -> None:
    run(
        """
        comms = init_all(1)
        a, b = torch.cuda.Stream(), torch.cuda.Stream()
        x, y = torch.zeros(3, device=device), torch.zeros(3, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(a):
            torch.cuda._sleep(20_000_000)
            x.fill_(1)
        with Group():
            check(all_reduce(y, comms[0], b))
            check(all_reduce(x, comms[0], a))
        with torch.cuda.stream(b):
            z = x + 1
        b.synchronize()
        equal(z, [2.0] * 3)
        """,
        tmp_path,
    )


def test_messages_of_group_pass_each_other(tmp_path: Path) -> None:
    run(
        """
        comms, s = init_all(3), streams(3)
        x, y = tensors(3, size=50_000), tensors(3, -1.0, size=50_000)
        with Group():
            for r in range(3):
                for peer in range(3):
                    if peer == (r + 1) % 3: check(send(x[r], peer, comms[r], s[r]))
                for peer in range(3):
                    if peer == (r - 1) % 3: check(recv(y[r], peer, comms[r], s[r]))
        for r in range(3):
            s[r].synchronize()
            equal(y[r], torch.full((50_000,), 1.0 + (r - 1) % 3))
        """,
        tmp_path,
    )


def test_message_to_self_needs_one_group(tmp_path: Path) -> None:
    run(
        """
        comms, s, x, y = init_all(1), streams(1), tensors(1), tensors(1, 0.0)
        with Group():
            check(send(x[0], 0, comms[0], s[0]))
            check(recv(y[0], 0, comms[0], s[0]))
        s[0].synchronize()
        equal(y[0], [1.0] * 3)
        assert send(x[0], 0, comms[0], s[0]) == INVALID_USAGE
        assert b"without a matching receive" in nccl.ncclGetLastError(None)
        """,
        tmp_path,
    )


def test_send_waits_for_its_receiver(tmp_path: Path) -> None:
    run(
        """
        comms, s, x, y = init_all(2), streams(2), tensors(2), tensors(2, 0.0)
        check(send(x[0], 1, comms[0], s[0]))
        until(lambda: nccl.fakenccl_running_kernels(0) == 1)
        assert not s[0].query()
        check(recv(y[1], 0, comms[1], s[1]))
        s[0].synchronize()
        equal(y[1], [1.0] * 3)
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("all_reduce(x[0], comms[0], s[0], 2)", "all_reduce(x[1], comms[1], s[1])", ["count=2", "count=3"]),
        ("all_reduce(x[0], comms[0], s[0])", "all_reduce(x[1], comms[1], s[1], kind=INT32)", ["float32", "int32"]),
        ("all_reduce(x[0], comms[0], s[0])", "all_reduce(x[1], comms[1], s[1], op=2)", ["sum", "max"]),
        (
            "all_reduce(x[0], comms[0], s[0])",
            "nccl.ncclBroadcast(pointer(x[1]), pointer(x[1]), ctypes.c_size_t(3), FLOAT, 1, comms[1], raw(s[1]))",
            ["AllReduce", "Broadcast", "root=1"],
        ),
        ("send(x[0][:2], 1, comms[0], s[0])", "recv(x[1], 0, comms[1], s[1])", ["Send(count=2", "Recv(count=3"]),
    ],
    ids=["count", "type", "reduction", "operation", "message"],
)
def test_mismatch_fails_both_ranks(first: str, second: str, words: list[str], tmp_path: Path) -> None:
    output = run(
        f"""
        comms, s, x = init_all(2), streams(2), tensors(2)
        check({first})
        check({second})
        for r in (0, 1):
            until(lambda: error_of(comms[r]) == INVALID_USAGE)
            print("rank", r, nccl.ncclGetLastError(comms[r]).decode())
            assert not s[r].query()
            check(nccl.ncclCommAbort(comms[r]))
            s[r].synchronize()
        """,
        tmp_path,
    )
    for line in (line for line in output.splitlines() if line.startswith("rank")):
        assert "rank 0 called" in line
        assert "rank 1 called" in line
        assert all(word in line for word in words), line


@pytest.mark.parametrize("channels", [0, 1])
def test_different_communicator_orders_deadlock(channels: int, tmp_path: Path) -> None:
    run(
        f"""
        one, two, s, t = init_all(2), init_all(2), streams(2), streams(2)
        x, y = tensors(2), tensors(2)
        check(all_reduce(x[0], one[0], s[0]))
        check(all_reduce(y[1], two[1], t[1]))
        until(lambda: nccl.fakenccl_running_kernels(0) == 1 and nccl.fakenccl_running_kernels(1) == 1)
        check(all_reduce(y[0], two[0], t[0]))
        check(all_reduce(x[1], one[1], s[1]))
        if {channels}:
            assert not any(stream.query() for stream in s + t)
            assert [nccl.fakenccl_running_kernels(i) for i in (0, 1)] == [1, 1]
            # The second communicator goes on when the first releases device 0.
            check(nccl.ncclCommAbort(one[0]))
        for stream in t: stream.synchronize()
        equal(y[0], [3.0] * 3)
        equal(y[1], [3.0] * 3)
        if {channels}: check(nccl.ncclCommAbort(one[1]))
        for stream in s: stream.synchronize()
        if not {channels}: equal(x[0], [3.0] * 3)
        """,
        tmp_path,
        FAKENCCL_CHANNELS=str(channels),
    )


def test_abort_ends_kernels_for_peer_too(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(2), streams(2), tensors(2)
        check(all_reduce(x[0], comms[0], s[0]))
        check(nccl.ncclCommAbort(comms[0]))
        s[0].synchronize()
        assert error_of(comms[0]) != SUCCESS
        assert all_reduce(x[0], comms[0], s[0]) == INVALID_ARGUMENT
        check(all_reduce(x[1], comms[1], s[1]))
        until(lambda: error_of(comms[1]) == REMOTE)
        assert b"aborted" in nccl.ncclGetLastError(comms[1])
        assert nccl.ncclCommAbort(comms[0]) == INVALID_ARGUMENT
        check(nccl.ncclCommAbort(comms[1]))
        """,
        tmp_path,
    )


def test_split_orders_ranks_by_key(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(4), streams(4), tensors(4)
        children = [ctypes.c_void_p(1) for _ in range(4)]
        with Group():
            for r in range(4):
                check(nccl.ncclCommSplit(comms[r], -1 if r == 3 else 0, -r, ctypes.byref(children[r]), None))
        assert children[3].value is None
        ranks = []
        for child in children[:3]:
            number = ctypes.c_int()
            check(nccl.ncclCommUserRank(child, ctypes.byref(number)))
            ranks.append(number.value)
        assert ranks == [2, 1, 0]
        for r in range(3): check(all_reduce(x[r], children[r], s[r]))
        for r in range(3): s[r].synchronize()
        equal(x[0], [6.0] * 3)
        """,
        tmp_path,
    )


def test_shrunk_communicator_works_without_excluded_rank(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(3), streams(3), tensors(3)
        check(all_reduce(x[0], comms[0], s[0]))  # never completes: rank 1 is gone
        children = {0: ctypes.c_void_p(), 2: ctypes.c_void_p()}
        excluded = (ctypes.c_int * 1)(1)
        with Group():
            for r in children:
                check(nccl.ncclCommShrink(comms[r], excluded, 1, ctypes.byref(children[r]), None, 1))
        s[0].synchronize()
        x = tensors(3)
        for r in children: check(all_reduce(x[r], children[r], s[r]))
        for r in children: s[r].synchronize()
        equal(x[2], [4.0] * 3)
        """,
        tmp_path,
    )


def test_shared_device_is_refused(tmp_path: Path) -> None:
    run(
        """
        comms = (ctypes.c_void_p * 2)()
        assert nccl.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(1, 1)) == INVALID_USAGE
        assert b"Duplicate GPU detected: rank 0 and rank 1" in nccl.ncclGetLastError(None)
        """,
        tmp_path,
    )


def test_forked_child_gets_errors(tmp_path: Path) -> None:
    run(
        """
        comms = init_all(2)
        child = os.fork()
        if child == 0:
            error = ctypes.c_int()
            os._exit(nccl.ncclCommGetAsyncError(comms[0], ctypes.byref(error)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == INVALID_USAGE
        """,
        tmp_path,
    )


def test_forked_child_after_cuda_gets_errors(tmp_path: Path) -> None:
    run(
        """
        torch.ones(1, device="cuda")
        child = os.fork()
        if child == 0:
            os._exit(nccl.ncclCommInitAll((ctypes.c_void_p * 2)(), 2, None))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == UNHANDLED_CUDA_ERROR
        """,
        tmp_path,
    )


def test_empty_collectives_wait_for_no_rank(tmp_path: Path) -> None:
    run(
        """
        comms, s, x = init_all(2), streams(2), tensors(2)
        check(all_reduce(x[0], comms[0], s[0], 0))
        s[0].synchronize()
        check(nccl.ncclCommFinalize(comms[0]))
        check(nccl.ncclCommDestroy(comms[0]))
        """,
        tmp_path,
    )


def test_device_code_function_is_refused(tmp_path: Path) -> None:
    run(
        """
        assert nccl.ncclCommWindowRegister(None, None, ctypes.c_size_t(0), None, 0) == INVALID_USAGE
        assert b"ncclCommWindowRegister is not supported" in nccl.ncclGetLastError(None)
        """,
        tmp_path,
    )

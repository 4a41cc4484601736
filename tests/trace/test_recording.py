"""Recording: what is in a trace, and what survives a full disk, a kill, a fork and threads that end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, debug, gather, submit, trace
from cudafuture.errors import InvalidStateError
from support.child import Child


def only(path: Path) -> trace.RankTrace:
    """Return the trace of the one process in a file or a folder."""
    (rank,) = trace.load(path).ranks
    return rank


def makers(rank: trace.RankTrace) -> list[str]:
    """Return what made the futures that something made."""
    return [future.maker for future in rank.futures if future.maker]


def test_futures_have_parents_and_times(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        read = CUDAFuture[int](name="read")
        debug.register(read, debug.OperationPlace.find("store", "/nvme"), number=3, nbytes=8)
        child = read.then(lambda f: f.value() + 1)
        both = gather(child, CUDAFuture.completed(2))
        read.set_result(1)
        assert both.wait() == [2, 2]
    found = {future.maker: future for future in only(tmp_path).futures if future.maker}
    operation = found["then"].parents[0]
    assert operation.title == "read #3 of store '/nvme'"
    assert (operation.nbytes, operation.state) == (8, "completed")
    assert operation.issued is not None
    assert operation.done is not None
    assert operation.begin <= operation.issued <= operation.done
    assert found["then"] in found["gather"].parents
    assert found["then"].callback is not None
    assert "test_recording.py" in found["then"].callback.text


def double(number: int) -> int:
    return 2 * number


def test_function_with_arguments_has_its_own_name(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        assert submit(double, 3).wait() == 6
        assert submit(partial(partial(double), 3)).wait() == 6
    texts = [future.callback.text for future in only(tmp_path).futures if future.callback]
    assert [text.split(" at ")[0] for text in texts] == ["double", "double"]


def test_wait_has_its_line_and_its_future(tmp_path: Path) -> None:
    entered = threading.Event()
    future = CUDAFuture[None](name="late")

    def complete() -> None:
        entered.wait()
        while not debug.pending(future).trees[0].threads:  # until the wait has begun
            pass
        future.set_result(None)

    thread = threading.Thread(target=complete)
    with trace.record(tmp_path):
        thread.start()
        entered.set()
        future.wait()
        thread.join()
    (wait,) = [one for one in only(tmp_path).slices if one.kind == "wait"]
    assert f"test_recording.py:{test_wait_has_its_line_and_its_future.__code__.co_firstlineno + 14}" in wait.text
    assert wait.future is not None
    assert wait.future.name == "late"


def test_failure_and_cancellation_are_named(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        failed, cancelled = CUDAFuture[None](name="failed"), CUDAFuture[None](name="cancelled")
        failed.set_exception(ValueError("no"))
        cancelled.cancel()
        with pytest.raises(ValueError, match="no"):
            failed.wait()
    assert {future.name: future.state for future in only(tmp_path).futures} == {
        "failed": "failed",
        "cancelled": "cancelled",
    }


def test_spans_lie_within_one_another(tmp_path: Path) -> None:
    with trace.record(tmp_path / "one.cftrace"), trace.step(7), trace.span("forward"):
        pass
    outer, inner = only(tmp_path / "one.cftrace").slices
    assert (outer.text, inner.text, outer.depth, inner.depth) == ("step 7", "forward", 0, 1)
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def test_second_recording_is_refused(tmp_path: Path) -> None:
    with (
        trace.record(tmp_path),
        pytest.raises(InvalidStateError, match="recorded already"),
        trace.record(tmp_path / "other.cftrace"),
    ):
        pass
    with trace.record(tmp_path):
        submit(int).wait()
    assert makers(only(tmp_path)) == ["submit"]


def test_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), trace.record(tmp_path / "absent" / "x.cftrace"):
        pass


def test_full_disk_loses_the_trace_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.cftrace").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "cudafuture.trace"), trace.record(tmp_path / "x.cftrace"):
        assert submit(sum, [1, 2]).wait() == 3
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


FULL_LATER = """
import resource, signal, sys
from cudafuture import submit, trace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
with trace.record(sys.argv[1]):
    for _ in range(1000):
        with trace.span("x"):
            pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with trace.record(sys.argv[1]):
    submit(int).wait()
say("recorded")
"""


def test_recording_after_one_that_filled_the_disk(tmp_path: Path) -> None:
    with Child(FULL_LATER, str(tmp_path / "x.cftrace")) as child:
        assert child.hear() == "recorded"
        assert child.process.wait() == 0
        assert "File too large" in child.errors()
    assert makers(only(tmp_path / "x.cftrace")) == ["submit"]


def test_files_that_cannot_be_read_do_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trace.record(tmp_path):
        submit(int).wait()
    (written,) = tmp_path.iterdir()
    (tmp_path / "empty.cftrace").touch()
    (tmp_path / "header.cftrace").write_bytes(written.read_bytes()[:20])
    (tmp_path / "zeros.cftrace").write_bytes(written.read_bytes() + bytes(4096))
    with caplog.at_level(logging.WARNING, "cudafuture.trace"):
        assert [makers(rank) for rank in trace.load(tmp_path).ranks] == [["submit"], ["submit"]]
    assert len(caplog.records) == 3
    with pytest.raises(ValueError, match=r"empty\.cftrace"):
        trace.load(tmp_path / "empty.cftrace")


def test_names_that_are_not_utf_8_do_no_harm(tmp_path: Path) -> None:
    with trace.record(tmp_path), trace.span('\udcff\n"x'):
        pass
    assert [one.text for one in only(tmp_path).slices] == ['?\n"x']
    with pytest.raises(ValueError, match="UTF-8"), trace.record(os.fsdecode(bytes(tmp_path) + b"/\xff")):
        pass


def test_command_that_reads_traces_records_none(tmp_path: Path) -> None:
    with trace.record(tmp_path), trace.step(0):
        pass
    command = [sys.executable, "-m", "cudafuture", "trace", "summary", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(
            command, env=os.environ | {"CUDAFUTURE_TRACE": str(tmp_path)}, capture_output=True, check=True
        )
        assert done.stdout.startswith(b"1 step, ")
    assert len(list(tmp_path.iterdir())) == 1


def test_events_without_room_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = 200_000
    with trace.record(tmp_path):
        for _ in range(count):  # faster than the recorder's thread can read on a busy machine: none, or some, are lost
            with trace.span("x"):
                pass
    loaded = trace.load(tmp_path)
    assert len(loaded.ranks[0].file.events) + loaded.lost == 2 * count
    assert bool(caplog.records) == bool(loaded.lost)


def test_threads_that_have_ended_are_in_the_trace(tmp_path: Path) -> None:
    names = [f"part {number}" for number in range(20)]

    def work(name: str) -> None:
        with trace.span(name):
            pass

    with trace.record(tmp_path):
        for name in names:
            thread = threading.Thread(target=work, args=(name,))
            thread.start()
            thread.join()
    assert [one.text for one in only(tmp_path).slices] == names


def test_killed_process_leaves_its_trace(tmp_path: Path) -> None:
    script = f"""
import time
from cudafuture import submit, trace
with trace.record({str(tmp_path)!r}):
    submit(int).wait()
    while not any(future.maker for future in trace.load({str(tmp_path)!r}).ranks[0].futures):
        time.sleep(0.01)
    say("written")
    hear()
"""
    with Child(script) as child:
        child.hear()
        child.send(signal.SIGKILL)
        child.process.wait()
    rank = only(tmp_path)
    assert rank.file.trailer is None
    assert makers(rank) == ["submit"]


def test_file_that_was_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.cftrace"
    with trace.record(path):
        for number in range(50):
            with trace.step(number):
                pass
    data = path.read_bytes()
    header = data.index(b"}") + 1
    for length in range(header, len(data), 37):
        path.write_bytes(data[:length])
        assert len(only(path).slices) <= 50
    path.write_bytes(data[: header - 1])
    with pytest.raises(ValueError, match="ends before the header"):
        only(path)


def test_forked_child_records_nothing(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        child = os.fork()
        if child == 0:
            refused = False
            try:
                with trace.span("in the child"), trace.record(tmp_path / "child.cftrace"):
                    pass
            except InvalidStateError:
                refused = True
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        with trace.span("in the parent"):
            pass
    assert [one.text for one in only(tmp_path).slices] == ["in the parent"]


FORK_BEFORE_FUTURES = """
import os, sys
from cudafuture import trace
with trace.record(sys.argv[1]):
    with trace.span("a"):
        pass
    child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
say("recorded")
"""


def test_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    with Child(FORK_BEFORE_FUTURES, str(tmp_path)) as child:
        assert child.hear() == "recorded"
    assert [one.text for one in only(tmp_path).slices] == ["a"]


def test_environment_records_whole_process(tmp_path: Path) -> None:
    with Child(
        "from cudafuture import submit\nsubmit(int).wait()", environment={"CUDAFUTURE_TRACE": str(tmp_path)}
    ) as c:
        assert c.process.wait() == 0
    rank = only(tmp_path)
    assert rank.file.trailer is not None
    assert "submit" in makers(rank)


@pytest.mark.sim
def test_device_work_is_ready_after_it_is_done(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        future = submit(lambda: torch.ones(8, device="sim") + 1)
        future.wait(non_blocking=False)
    (made,) = [one for one in only(tmp_path).futures if one.maker == "submit"]
    assert made.done is not None
    assert made.ready is not None
    assert made.ready >= made.done

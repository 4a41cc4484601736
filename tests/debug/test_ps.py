"""Questions to other processes: their answers, and clear words from those that cannot answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cudafuture import CUDAFuture, debug
from cudafuture.cli import main
from support.child import FORK_WARNING, Child
from support.patience import PATIENCE
from support.soak import soak_count

pytestmark = [pytest.mark.usefixtures("on_the_host"), pytest.mark.filterwarnings(FORK_WARNING)]

PROLOGUE = """
import ctypes, os, sys, threading
from cudafuture import CUDAFuture, debug, gather

read = CUDAFuture(name="read of shard 7")
debug.register(read, debug.OperationPlace.find("store", "s3", "of"), number=7, nbytes=3 << 20)
"""


@contextmanager
def child_of(folder: Path, script: str) -> Iterator[Child]:
    """Run a script that has begun an operation, until the scope is left."""
    with Child(PROLOGUE + script, environment={"CUDAFUTURE_DEBUG_DIR": str(folder)}) as child:
        assert child.hear() == "ready"
        yield child


def problem_of(process: int, folder: Path, patience: float = PATIENCE) -> str:
    return debug.ask(process, folder, patience).problem


# ---- answers


def test_process_that_holds_gil_answers(tmp_path: Path) -> None:
    with child_of(tmp_path, "say('ready')\nctypes.PyDLL(None).pause()") as child:
        report = debug.ask(child.process.pid, tmp_path)
        assert report.problem == ""
        assert report.pending is not None
        (tree,) = report.pending.trees
        assert re.fullmatch(r"read of shard 7 #7 of store 's3' \(3 MiB\), [\d.e-]+ s old.*", tree.description)
        assert tree.operation == {
            "name": "read of shard 7", "place": "store", "of": "s3", "number": 7, "bytes": 3 << 20,
        }  # fmt: skip


def test_command_prints_processes_of_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child_of(tmp_path, "debug.name_process(rank=3, world_size=8)\nsay('ready')\nhear()") as child:
        assert main(["ps", "--job", str(tmp_path)]) == 0
        first = f"rank 3 \\(process {child.process.pid}\\)\n  read of shard 7 #7 of store 's3'"
        assert re.match(first, capsys.readouterr().out)
        child.send(signal.SIGKILL)
        child.process.wait()
        assert main(["ps", str(child.process.pid), "--job", str(tmp_path)]) == 1
        assert re.match(r"rank 3 \(process \d+\): it is dead", capsys.readouterr().out)
    assert main(["ps", "--job", str(tmp_path / "none")]) == 1


def test_command_leaves_out_dead_processes_of_earlier_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "debug.name_process(rank={}, world_size=8)\nsay('ready')\nhear()"
    with child_of(tmp_path, script.format(3)) as earlier:
        earlier.send(signal.SIGKILL)
        earlier.process.wait()
    progress = tmp_path / f"{earlier.process.pid}.progress"
    with child_of(tmp_path, script.format(5)):
        os.utime(progress, times=(time.time() - 600,) * 2)  # the living one removes what is older than an hour
        progress.with_suffix(".socket").unlink(missing_ok=True)  # if the living one has not removed it yet
        assert main(["ps", "--job", str(tmp_path)]) == 0
        assert "rank 3" not in capsys.readouterr().out
        os.utime(progress)  # it died as the other one started
        assert main(["ps", "--job", str(tmp_path)]) == 1
        assert re.search(r"rank 3 \(process \d+\): it is dead", capsys.readouterr().out)


def test_many_futures_are_shown_in_groups(tmp_path: Path) -> None:
    script = """reads = [CUDAFuture(name=f"read {n}") for n in range(3000)]
for one in reads: debug.register(one, nbytes=1024)
sums = [one.then(repr) for one in reads]
say("ready")
hear()
"""
    with child_of(tmp_path, script) as child:
        lines = str(debug.ask(child.process.pid, tmp_path).pending).splitlines()
    assert len(lines) == 3  # with the read of the prologue
    (at,) = (number for number, line in enumerate(lines) if re.match(r"3000 like then of 'read \d+', ", line))
    assert re.match(r"  3000 like read \d+ \(1 KiB\), ", lines[at + 1])


def test_exit_removes_files(tmp_path: Path) -> None:
    with child_of(tmp_path, "debug.name_process(rank=0)\nsay('ready')\nhear()") as child:
        names = {file.name for file in tmp_path.iterdir()}
        assert names == {f"{child.process.pid}.socket", f"{child.process.pid}.progress"}
        child.say("end")
        assert child.end() == 0
        assert not list(tmp_path.iterdir())
        assert child.errors() == ""


def test_sockets_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with child_of(tmp_path, "say('ready')\nhear()") as child:
        child.send(signal.SIGKILL)
        child.process.wait()
    assert [file.suffix for file in tmp_path.iterdir()] == [".socket"]
    with child_of(tmp_path, "say('ready')\nhear()") as child:
        assert problem_of(child.process.pid, tmp_path) == ""  # its thread answers after it has removed them
        assert [file.stem for file in tmp_path.iterdir()] == [str(child.process.pid)]


def test_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with child_of(tmp_path, "say('ready')\nhear()"):
        assert not list(tmp_path.iterdir())


def test_folder_with_long_path_is_used(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    with child_of(folder, "say('ready')\nhear()") as child:
        assert problem_of(child.process.pid, folder) == ""


# ---- processes that cannot answer


def test_absent_process_is_named(tmp_path: Path) -> None:
    with child_of(tmp_path, "say('ready')\nhear()") as child:
        process = child.process.pid
        child.say("end")
        child.end()
    assert problem_of(process, tmp_path) == f"there is no process {process}"


def test_stopped_process_is_named(tmp_path: Path) -> None:
    with child_of(tmp_path, "say('ready')\nhear()") as child:
        child.stop()
        assert "it is stopped" in problem_of(child.process.pid, tmp_path, 1.0)


def test_process_without_engine_is_named(tmp_path: Path) -> None:
    script = "import cudafuture\nsay('ready')\nhear()"
    with Child(script, environment={"CUDAFUTURE_DEBUG_DIR": str(tmp_path)}) as child:
        child.hear()
        assert "it has not used an engine of cudafuture" in problem_of(child.process.pid, tmp_path)


def test_forked_child_names_parent(tmp_path: Path) -> None:
    script = """process = os.fork()
if process == 0:
    say("ready")
    hear()
    os._exit(0)
os.waitpid(process, 0)
"""
    with child_of(tmp_path, script) as child:
        (process,) = {int(file.stem) for file in tmp_path.glob("*.socket")} - {child.process.pid}
        assert problem_of(process, tmp_path).startswith(f"it was forked from process {child.process.pid}")
        assert problem_of(child.process.pid, tmp_path) == ""
        child.say("end")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_process_of_other_user_is_named(tmp_path: Path) -> None:
    with child_of(tmp_path / "sockets", "say('ready')\nhear()") as asked:
        script = f"""os.setuid(65534)
print(debug.ask({asked.process.pid}, {str(tmp_path / "sockets")!r}).problem)
say("ready")
"""
        with child_of(tmp_path / "other", script) as child:
            child.end()
            assert child.output() == "it belongs to user 'root': only its user and root may ask\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "it is ending"),
        (b'{"protocol": 1, "vers', "its answer is cut short"),
        (b"[]", "its answer is cut short or is none of this library"),
        (
            json.dumps({"protocol": 2, "version": "9.9"}).encode(),
            "it runs cudafuture 9.9, which answers with protocol 2",
        ),
        (json.dumps({"protocol": 1, "version": "0", "process": 1}).encode(), "process 1 answered in its place"),
        (None, "it has not answered in time"),
    ],
)
def test_strange_answer_is_named(tmp_path: Path, answer: bytes | None, problem: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / f"{os.getpid()}.socket"))
        server.listen()

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(100)
                if answer is None:
                    client.recv(100)  # until the asker has gone
                else:
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found = problem_of(os.getpid(), tmp_path, 0.3 if answer is None else PATIENCE)
        thread.join()
    assert problem in found


# ---- questions amid everything


@pytest.mark.slow
@pytest.mark.soak
def test_threads_and_forks_survive_questions(tmp_path: Path) -> None:
    script = """
import gc
def work():
    for _ in range(20):
        one = CUDAFuture(name="one")
        debug.register(one)
        both = gather(one.then(repr), one)
        threading.Timer(0, one.set_result, (1,)).start()
        both.wait()
say("ready")
for _ in range(int(hear())):
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads: thread.start()
    process = os.fork()
    if process == 0:
        del read
        gc.collect()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    for thread in threads: thread.join()
say("done")
"""
    with child_of(tmp_path, script) as child:
        child.say(str(soak_count(10)))
        done = threading.Event()
        answers = [0]

        def ask() -> None:
            while not done.is_set():
                answers[0] += problem_of(child.process.pid, tmp_path) == ""

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            assert child.hear() == "done"
        finally:
            done.set()
            thread.join()
        assert child.end() == 0
        assert child.errors() == ""
        assert answers[0] > 0


@pytest.mark.slow
@pytest.mark.soak
def test_exit_survives_questions(tmp_path: Path) -> None:
    for _ in range(soak_count(5)):
        with child_of(tmp_path, "say('ready')\nhear()") as child:
            asked = threading.Thread(target=problem_of, args=(child.process.pid, tmp_path))
            asked.start()
            child.say("end")
            assert child.end() == 0
            asked.join()
            assert child.errors() == ""


@pytest.mark.slow
@pytest.mark.soak
def test_collections_survive_questions(tmp_path: Path) -> None:
    script = """
import gc, weakref
class Callback:
    def __call__(self, future): return self
reads = [CUDAFuture(name=f"read {n}") for n in range(50)]
for one in reads: debug.register(one)
children = [gather(one.then(Callback()), one) for one in reads]
gc.collect()
living = [weakref.ref(one) for one in gc.get_objects() if type(one) is Callback]
say("ready")
for _ in range(int(hear())): gc.collect()
say(str(sum(one() is None for one in living)))
for one in reads: one.set_result(1)
assert all(child.wait()[1] == 1 for child in children)
"""
    with child_of(tmp_path, script) as child:
        child.say(str(soak_count(100)))
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                debug.ask(child.process.pid, tmp_path)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            assert child.hear() == "0"  # of the callbacks were taken for garbage
        finally:
            done.set()
            thread.join()
        assert child.end() == 0


# ---- this process


def test_registered_future_is_shown_until_done() -> None:
    upload = CUDAFuture[None](name="upload")
    debug.register(upload, debug.OperationPlace.find("bucket", "b", "to"), nbytes=1 << 30)
    shown = "upload to bucket 'b' (1 GiB)"
    assert any(tree.description.startswith(shown) for tree in debug.pending().trees)
    upload.set_result(None)
    assert shown not in str(debug.pending())


def test_wrong_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="takes CUDAFutures, not 'upload'"):
        debug.register("upload")  # type: ignore[arg-type]


def test_origins_are_recorded_on_request() -> None:
    debug.record_origins()
    try:
        made = CUDAFuture[None](name="made here")
    finally:
        debug.record_origins(False)
    assert f"made at {__file__}" in str(debug.pending(made))
    assert "made at" not in str(debug.pending(CUDAFuture(name="made later")))

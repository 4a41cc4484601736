"""Launch of workers: forked by a server that has imported torch, with the environment of the moment."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cudafuture.testing import World, WorldError
from cudafuture.testing._worker_pool import WorkerPool

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Return a pool without workers, in an environment in which a server can fork."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("CUDAFUTURE_TRACE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = WorkerPool()
    yield made
    made.close()


def describe() -> tuple[int, str | None, str]:
    """Return the parent of a worker, a variable of its environment, and its working directory."""
    return os.getppid(), os.environ.get("CUDAFUTURE_TEST_MOMENT"), str(Path.cwd())


def kill_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def fail() -> None:
    raise LookupError


def test_server_forks_all_workers_and_ends_with_pool(pool: WorkerPool) -> None:
    (server,) = set(World(2, pool=pool).run(os.getppid))
    assert server != os.getpid()
    (worker,) = World(1, pool=pool).run(os.getpid)
    pool.close()
    assert not psutil.pid_exists(server)
    assert not psutil.pid_exists(worker)


def test_worker_has_own_session_files_and_random_numbers(pool: WorkerPool) -> None:
    def look() -> tuple[bool, list[str], float, float]:
        numpy = pytest.importorskip("numpy")
        files = [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)]
        return os.getsid(0) == os.getpid() == os.getpgid(0), files, random.random(), numpy.random.random()

    (leads, files, *numbers), (other_leads, other_files, *other_numbers) = World(2, pool=pool).run(look)
    assert leads
    assert other_leads
    assert files[0] == other_files[0] == os.devnull
    assert files[1] == files[2] != other_files[1] == other_files[2]
    assert not set(numbers) & set(other_numbers)


def test_new_worker_has_environment_and_folder_of_moment(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = str(Path.cwd())
    assert World(1, pool=pool).run(describe)[0][1:] == (None, before)
    monkeypatch.setenv("CUDAFUTURE_TEST_MOMENT", "later")
    monkeypatch.chdir(tmp_path)
    old, new = World(2, pool=pool).run(describe)
    assert old[1:] == (None, before), "a worker that is reused keeps its environment"
    assert new[1:] == ("later", str(tmp_path))
    assert new[0] != old[0], "libraries read variables when they are imported"

    with pytest.raises(WorldError, match="LookupError"):
        World(2, pool=pool).run(fail)
    assert World(1, pool=pool).run(describe) == [new]
    assert not psutil.pid_exists(old[0]), "a server without workers ends when another has replaced it"


def test_next_test_in_another_folder_needs_no_new_server(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def look() -> tuple[int, str, str]:
        return os.getppid(), os.environ["PYTEST_CURRENT_TEST"], str(Path.cwd())

    monkeypatch.setenv("PYTEST_CURRENT_TEST", "first")
    ((server, _, folder),) = World(1, pool=pool).run(look)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "second")
    monkeypatch.chdir(tmp_path)
    assert World(2, pool=pool).run(look) == [(server, "first", folder), (server, "second", str(tmp_path))]


def test_new_worker_has_limits_of_moment(pool: WorkerPool) -> None:
    def look() -> tuple[int, set[int], int]:
        umask = os.umask(0)
        os.umask(umask)
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.sched_getaffinity(0), umask

    World(1, pool=pool).run(os.getpid)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cpus, umask = os.sched_getaffinity(0), os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, hard))
        os.sched_setaffinity(0, {min(cpus)})
        found = World(2, pool=pool).run(look)[1]
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    assert found == (files - 1, {min(cpus)}, 0o077)


def test_ended_workers_leave_no_descriptors(pool: WorkerPool) -> None:
    def open_files() -> int:
        worker = pool.take(0)
        assert worker.wait_until_started()
        worker.kill()
        del worker
        return len(list(Path("/proc/self/fd").iterdir()))

    open_files()
    assert open_files() == open_files()


def test_refused_fork_spares_other_workers(pool: WorkerPool) -> None:
    first = pool.take(0)
    assert first.wait_until_started()
    server = psutil.Process(first.process).ppid()
    resource.prlimit(server, resource.RLIMIT_NOFILE, (8, 8))  # too few for the files of another worker
    second = pool.take(1)
    assert second.wait_until_started()
    assert psutil.Process(second.process).ppid() == os.getpid()  # a new interpreter
    assert first.is_alive
    pool.give_back([first, second])


def test_dead_server_is_replaced(pool: WorkerPool) -> None:
    world = World(2, pool=pool)
    servers = set(world.run(os.getppid))
    with pytest.raises(WorldError, match=r"(?s)rank . of 2 died of SIGKILL.*rank . of 2 died of SIGKILL"):
        world.run(kill_server)
    servers |= set(world.run(os.getppid))
    assert len(servers) == 2

    (server,) = set(world.run(os.getppid))
    workers = [psutil.Process(pid) for pid in world.run(os.getpid)]
    os.kill(server, signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == [], "workers die with their server"
    (server,) = set(world.run(os.getppid))
    assert server not in servers


def test_interrupted_launch_leaves_no_reply(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = socket.recv_fds

    def interrupt(*args: Any) -> Any:
        monkeypatch.setattr(socket, "recv_fds", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "recv_fds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        World(1, pool=pool).run(os.getpid)
    (process,) = World(1, pool=pool).run(os.getpid)
    worker = pool.take(0)
    assert worker.process == process
    worker.kill()


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "CUDAFUTURE_TRACE"])
def test_unsafe_fork_is_avoided(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """A preloaded library may not survive a fork; the thread that records a trace does not."""
    monkeypatch.setenv(variable, {"LD_PRELOAD": "libc.so.6", "CUDAFUTURE_TRACE": str(tmp_path)}[variable])
    assert World(2, pool=pool).run(os.getppid) == [os.getpid()] * 2

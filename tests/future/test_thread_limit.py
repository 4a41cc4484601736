"""A system that has no more threads: the operation that needs one fails and says so, and later ones succeed."""

from __future__ import annotations

import textwrap

from support.child import run_script

PROLOGUE = """
from concurrent.futures import ThreadPoolExecutor
import contextlib, ctypes, threading, torch, torch.distributed as dist
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, submit, executors
from cudafuture.distributed import ProcessGroup
from cudafuture.errors import CUDAFutureError

libc = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(256)
libc.pthread_attr_init(attributes)
size = ctypes.c_size_t()

@contextlib.contextmanager
def no_threads():
    "Let every new thread fail with EAGAIN: its stack would be larger than the address space."
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 52))
    assert libc.pthread_setattr_default_np(attributes) == 0
    try:
        yield
    finally:
        libc.pthread_attr_setstacksize(attributes, size)
        assert libc.pthread_setattr_default_np(attributes) == 0

def says_so(error):
    assert isinstance(error, CUDAFutureError), repr(error)
    assert "no thread could be started" in str(error), error
"""


def run(program: str) -> None:
    """Run it in a process of its own, whose main thread also waits for longer than it sleeps at a time."""
    done = run_script(PROLOGUE + textwrap.dedent(program))
    assert done.returncode == 0, done.stdout + done.stderr


def test_serial_queue_without_thread_fails_callback() -> None:
    run(
        """
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        queue = ProcessGroup().queue
        with no_threads():
            refused = CUDAFuture.completed(1).then(lambda f: f.value(), executor=queue)
            says_so(refused.exception())
        assert CUDAFuture.completed(2).then(lambda f: f.value(), executor=queue).wait() == 2
        late = CUDAFuture()
        timer = threading.Timer(0.2, late.set_result, (3,))
        timer.start()
        assert late.wait() == 3  # the main thread does not take the refusal for the end of the process
        """
    )


def test_object_collective_without_thread_fails() -> None:
    run(
        """
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with no_threads():
            refused = cfd.all_gather_object([None], "x")
            assert "no thread could be started" in str(refused.exception(timeout=60))
        gathered = [None]
        cfd.all_gather_object(gathered, "x").wait()
        assert gathered == ["x"]
        """
    )


def test_engine_callback_without_thread_fails_alone() -> None:
    run(
        """
        import os, tempfile
        from cudafuture.io import Engine, File
        with tempfile.TemporaryDirectory() as folder, Engine(backend="threads") as engine:
            with File(os.path.join(folder, "f"), "w+", engine=engine) as file:
                x = torch.ones(1024)
                with no_threads():
                    refused = []
                    while not refused:  # a write that is done when the callback is attached needs no thread
                        child = file.write(x).then(lambda f: threading.current_thread().name)
                        error = child.exception(timeout=60)
                        refused += [error] if error is not None else []
                    says_so(refused[0])
                assert file.write(x).then(lambda f: f.value()).wait(timeout=60) == x.nbytes
        """
    )


def test_device_callback_without_watcher_fails_alone() -> None:
    run(
        """
        from cudafuture.testing import sim
        sim.enable(schedule="lazy")
        def pending():
            future = CUDAFuture()
            future.set_result(torch.ones(2, device="sim") + 1)
            return future
        pending().wait()  # the threads of a first operator have started
        with no_threads():
            held = sim.hold()
            refused = pending().then(lambda f: f.value(), non_blocking=False)
            says_so(refused.exception())
            held.open()
        assert pending().then(lambda f: f.value().sum().item(), non_blocking=False).wait(timeout=60) == 4.0
        """
    )


def test_await_and_to_torch_without_thread_fail() -> None:
    run(
        """
        import asyncio, os, tempfile
        from cudafuture.io import Engine, File

        async def awaited(future):
            return await future

        with tempfile.TemporaryDirectory() as folder, Engine(backend="threads", _faults={"held": True}) as engine:
            with File(os.path.join(folder, "f"), "w+", engine=engine) as file:
                write = file.write(torch.ones(1024))
                target = write.to_torch()
                loop = asyncio.new_event_loop()
                with no_threads():
                    try:
                        loop.run_until_complete(awaited(write))
                    except CUDAFutureError as e:
                        says_so(e)
                    else:
                        raise AssertionError("awaited without a thread")
                    engine._native.release_held()
                    write.wait(timeout=60)
                    try:
                        target.wait()
                    except Exception as e:
                        assert "no thread could be started" in str(e), e
                    else:
                        raise AssertionError("torch's future without a thread")
                assert loop.run_until_complete(awaited(file.write(torch.ones(4)))) == 16
                loop.close()
        """
    )


def test_lost_serial_queue_callback_is_logged() -> None:
    run(
        """
        import io, logging
        log = io.StringIO()
        logging.getLogger("cudafuture").addHandler(logging.StreamHandler(log))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ran = []
        with no_threads():
            CUDAFuture.completed(1).add_done_callback(ran.append, executor=ProcessGroup().queue)
        assert not ran
        assert "was not run" in log.getvalue() and "no thread could be started" in log.getvalue(), log.getvalue()
        """
    )


def test_timer_thread_restarts() -> None:
    run(
        """
        from cudafuture.timer import schedule
        looked = threading.Event()

        class Due:
            def look(self, now):
                looked.set()

        with no_threads():
            try:
                schedule(Due(), 0.0)
            except RuntimeError as e:
                assert "can't start new thread" in str(e), e
            else:
                raise AssertionError("looked after without a thread")
        schedule(Due(), 0.0)
        assert looked.wait(60)
        """
    )


def test_engine_and_executor_report_missing_threads() -> None:
    run(
        """
        from cudafuture.io import Engine
        with no_threads():
            try:
                Engine()
            except CUDAFutureError as e:
                says_so(e)
            else:
                raise AssertionError("an engine without a thread")
            says_so(submit(int, "3").exception(timeout=60))
            says_so(submit(int, "3", executor=ThreadPoolExecutor(1)).exception(timeout=60))
        with Engine():
            pass
        assert submit(int, "3").wait(timeout=60) == 3
        """
    )

"""World of several processes that run a function, each with its rank."""

from __future__ import annotations

import importlib.util
import io
import pickle
import selectors
import shutil
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, ClassVar, TypeVar

from cudafuture._arguments import expect_int, expect_number
from cudafuture.debug import look_at
from cudafuture.testing._worker_job import Outcome, WorkerJob, code_of_file
from cudafuture.testing._worker_pool import Worker, WorkerPool, dump_stacks

__all__ = ["World", "WorldError"]

T = TypeVar("T")

_GROUP_SHARE = 0.8  # the process group's timeout, as a share of the test's timeout
_GRACE = 5.0  # seconds that the other ranks get to fail too, after one has failed


class WorldError(AssertionError):
    """Error of a function that failed on some rank. The message has every rank's traceback, stacks or cause of death.

    ``errors`` maps ranks to the exceptions that their functions raised, if these could be unpickled here.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class World:
    """World of `n` processes, each a rank of torch.distributed's default group of `backend`.

    The fixture ``world`` is one. Outside pytest it is a context manager::

        with World(2) as world:
            world.run(function)

    Args:
        n: the number of ranks.
        backend: of the default group; "gloo" by default.
        timeout: seconds for each ``run()``, 60 by default. The process group's own timeout is 0.8 of it, so that a
            collective that hangs can report that itself.
        pool: of the processes; for the plugin.
    """

    def __init__(self, n: int, backend: str = "gloo", timeout: float = 60.0, *, pool: WorkerPool | None = None) -> None:
        if expect_int("n", n) < 1:
            raise ValueError(f"a world has 1 rank or more, not {n}")
        expect_number("timeout", timeout)
        if not timeout > 0:
            raise ValueError(f"timeout is a positive number of seconds, not {timeout}")
        self.size, self.backend, self.timeout = n, backend, timeout
        self._pool = pool if pool is not None else WorkerPool()

    def __repr__(self) -> str:
        return f"<World of {self.size} ranks over {self.backend}, {self.timeout:g} s for each run>"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Call ``function(*args, **kwargs)`` on every rank, and return the results by rank.

        The function may be a local one or a lambda. The default group is initialised, with the world's timeout.
        Failed assertions are reported in full; ``pytest.skip()`` skips the test.

        Raises:
            WorldError: the function raised on some rank, a process died or exceeded the timeout, or left a process
                running. No process of the run survives that.

        >>> import torch
        >>> with World(2) as world:
        ...     world.run(lambda factor: factor * torch.distributed.get_rank(), 10)
        [0, 10]
        """
        __tracebackhide__ = True
        call = _pickled(function, args, kwargs)
        workers = [self._pool.take(rank) for rank in range(self.size)]
        folder = Path(tempfile.mkdtemp(prefix="cudafuture-world-"))
        run = _Run(workers, self.timeout)
        try:
            run.start()
            for rank, worker in enumerate(workers):
                group_timeout = _GROUP_SHARE * self.timeout  # so that collectives that hang report it themselves
                job = WorkerJob(rank, self.size, self.backend, str(folder / "store"), group_timeout, sys.path, call)
                worker.begin(job)
            run.collect()
            if run.succeeded and run.release():
                self._pool.give_back(workers)
                workers = []
            return run.values()
        finally:
            for worker in workers:
                worker.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call, by value if a worker cannot import the module, or would import it without pytest's assertions."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and (hasattr(module, "@pytest_ar") or not _can_be_imported(module))
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = io.BytesIO()
        Pickler(pickled).dump((function, args, kwargs))
        return pickled.getvalue()
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Pickle code with its file's name, which cloudpickle 3.1.3 omits: tracebacks show the file's lines."""
    import cloudpickle

    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_of_file, (code.co_filename, make, parts)


def _can_be_imported(module: ModuleType) -> bool:
    try:
        return importlib.util.find_spec(module.__name__) is not None
    except (ImportError, ValueError):
        return False


class _Run:
    """One function in one world: its outcome on each rank."""

    def __init__(self, workers: list[Worker], timeout: float) -> None:
        self._workers = workers
        self._timeout = timeout
        self._outcomes: dict[int, Outcome] = {}
        self._deaths: dict[int, str] = {}
        self._stacks: dict[int, str] = {}
        self._pending = ""  # the report of `ps`, when some rank has not come back
        self._order: list[int] = []  # ranks in the order of their failures

    @property
    def succeeded(self) -> bool:
        return not self._order and len(self._outcomes) == len(self._workers)

    def start(self) -> None:
        """Wait until all processes have started, which does not count towards the timeout of the run."""
        for worker in self._workers:
            if not worker.wait_until_started():
                raise WorldError(f"a process of the world did not start\n{worker.output()}", {})

    def collect(self) -> None:
        """Wait for every rank. Kill one that fails at once, so that the others, which may wait for it, fail too.

        They get a short time for that. The report shows the stacks of ranks that do not answer.
        """
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                selector.register(worker.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    break
                for key, _ in events:
                    self._receive(key.data)
                    selector.unregister(key.fileobj)
                    if self._order:
                        deadline = min(deadline, time.monotonic() + _GRACE)
            late = [key.data for key in selector.get_map().values()]
        if late:
            self._pending = str(look_at(worker.process for worker in self._workers))
        stacks = dump_stacks(self._workers[rank] for rank in late)
        self._stacks = dict(zip(late, stacks, strict=True))
        self._order += late

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            outcome = self._outcomes[rank] = worker.answer()
            if outcome.value is None or outcome.left:
                self._order.append(rank)
                worker.stop()
        except EOFError:
            self._deaths[rank] = worker.way_of_dying()
            self._order.append(rank)

    def release(self) -> bool:
        """Make the ranks leave their world; return False if one does not, and cannot be used again."""
        left = [worker.end() for worker in self._workers]
        return all(left)

    def values(self) -> list[Any]:
        __tracebackhide__ = True
        if not self._order:
            return [pickle.loads(self._outcomes[rank].value or b"") for rank in range(len(self._workers))]
        first = self._outcomes.get(self._order[0])
        if first is not None and first.skipped is not None:
            import pytest

            pytest.skip(first.skipped)
        errors = {
            rank: pickle.loads(outcome.error) for rank, outcome in self._outcomes.items() if outcome.error is not None
        }
        parts = [self._describe(rank) for rank in self._order]
        if self._pending:
            parts.append("--- what is pending\n" + self._pending)
        raise WorldError("\n\n".join(parts), errors)

    def _describe(self, rank: int) -> str:
        title = f"rank {rank} of {len(self._workers)}"
        outcome = self._outcomes.get(rank)
        if outcome is None:
            what = self._deaths.get(rank) or f"has not come back in time\n{self._stacks.get(rank, '')}"
        elif outcome.value is None:
            what = f"failed\n{outcome.traceback}"
        else:
            what = ""
        if outcome is not None and outcome.left:
            what += "left behind:\n  " + "\n  ".join(outcome.left)
        output = self._workers[rank].output()
        return f"{title} {what}".rstrip() + (f"\n--- its output\n{output}" if output else "")

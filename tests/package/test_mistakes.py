"""Wrong calls of new users: the error has the right type, comes at once, and names the argument and the remedy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cudafuture
import rpc_ext
from cudafuture import CUDAFuture, bench, cli, config, data, debug, doctor, executors, testing, trace
from cudafuture import distributed as distributed_module
from cudafuture import pipeline as pipeline_module
from cudafuture import swap as swap_module
from cudafuture.compat import deepspeed, tensornvme, torchgpipe
from cudafuture.errors import (
    ArchiveError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    ScheduleError,
    StorageError,
    TensorError,
)
from cudafuture.io import BufferPool, Digest, Engine, File
from cudafuture.store import DiskStore, ShardedStore
from cudafuture.testing import fakecuda
from cudafuture.testing import sim as simulator
from cudafuture.testing.fakecuda.__main__ import main as run_fakecuda
from support.child import run_script
from support.rpc_callees import ME, alone

pytestmark = [pytest.mark.usefixtures("on_the_host"), pytest.mark.xdist_group("mistakes")]

Moment = Literal["call", "wait", "collection", "exit"]
"""The moment at which the error comes: from the call itself, from a wait for the future that it returns, when the
garbage collector frees the future, or when the process ends."""


class Things(NamedTuple):
    """Objects of a program that makes mistakes. The types are open, because the calls are wrong."""

    folder: Path
    tensor: torch.Tensor
    file: Any
    store: Any
    closed: Any
    future: Any


class Mistake(NamedTuple):
    """Wrong call, and its error."""

    name: str
    call: Callable[[Things], object]
    moment: Moment
    error: type[BaseException]
    words: str
    """pattern of the message: the argument or the object, and the remedy"""


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Things]:
    folder = tmp_path_factory.mktemp("mistakes")
    tensor = torch.ones(4, device="cpu")
    (folder / "text").write_text("hello")
    closed = DiskStore(folder / "closed")
    closed.close()
    with DiskStore(folder / "store") as store, File(folder / "numbers", "w+") as file:
        store.write("weight", tensor).wait()
        file.write(tensor).wait()
        yield Things(folder, tensor, file, store, closed, CUDAFuture.completed(1))


def expect(mistake: Mistake, things: Things) -> None:
    """Make a wrong call, and compare its error with the row."""
    moment: Moment = "call"
    error: BaseException | None = None
    made: Any = None
    try:
        made = mistake.call(things)
        if isinstance(made, CUDAFuture):
            moment = "wait"
            made.wait(timeout=60)
    except BaseException as e:
        error = e
    assert error is not None, f"the call was accepted, and returned {made!r}"
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert (moment, type(error)) == (mistake.moment, mistake.error), message
    assert re.search(mistake.words, message, re.DOTALL), message
    assert "incompatible function arguments" not in message  # the signature of a native function says no remedy


# ---- calls with several steps


async def sleep_and_return(*_: object) -> int:
    return 1


def take_two(first: object, second: object) -> object:
    return first, second


def loop_over(batches: Any) -> list[Any]:
    return list(batches)


def run_in_loop(function: Callable[[], object]) -> object:
    """Call a function in a running event loop."""

    async def main() -> object:
        return function()

    return asyncio.run(main())


def end_twice() -> None:
    future: CUDAFuture[int] = CUDAFuture(name="load")
    future.set_result(1)
    future.set_result(2)


def wait_for_itself() -> object:
    """Wait, in a callback, for the future of that callback."""
    parent: CUDAFuture[None] = CUDAFuture()
    children: list[CUDAFuture[Any]] = []
    children.append(parent.then(lambda _: children[0].wait()))
    parent.set_result(None)
    return children[0]


def attach_to_ended_executor(things: Things) -> object:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    return things.future.then(lambda done: done.value(), executor=executor)


def record_twice(things: Things) -> None:
    with trace.record(things.folder / "outer.cftrace"), trace.record(things.folder / "inner.cftrace"):
        pass


def enter(context: Any) -> None:
    with context:
        pass


def write_after_close(things: Things) -> object:
    file = File(things.folder / "ended", "w")
    file.close()
    return file.write(things.tensor)


def commit_without_parts(things: Things) -> object:
    return things.store.begin_write("parts", torch.float32, [4]).commit()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def use_closed_optimizer(things: Things) -> None:
    optimizer = swap_module.offload(adam(), things.store, name="closed")
    optimizer.close()
    optimizer.step()


def step_given_optimizer(things: Things) -> None:
    given = adam()
    with contextlib.closing(swap_module.offload(given, things.store, name="given")):
        given.step()


def read_gradient_of_other_parameter(things: Things) -> None:
    with contextlib.closing(swap_module.offload(adam(), things.store, name="gradients")) as optimizer:
        optimizer.gradient_of(nn.Parameter(torch.ones(4)))


def read_state_of_other_parameter(things: Things) -> None:
    with contextlib.closing(swap_module.offload(adam(), things.store, name="other")) as optimizer:
        optimizer.state_of(nn.Parameter(torch.ones(4)))


def share_name(things: Things) -> None:
    with contextlib.closing(swap_module.offload(adam(), things.store, name="shared")):
        swap_module.offload(adam(), things.store, name="shared")


def begin_second_epoch() -> None:
    batches = cudafuture.prefetch([1, 2], "cpu")
    first = iter(batches)
    second = iter(batches)
    try:
        next(first)
    finally:
        second.close()


def give_to_worker(function: Callable[[], object]) -> object:
    with pipeline_module.Workers(["cpu"]) as workers:
        return workers.submit("cpu", function)


def offload_twice(things: Things) -> None:
    given = torch.optim.Adam([nn.Parameter(torch.ones(4))])
    first = offload(given, things.folder / "first")
    try:
        offload(given, things.folder / "second")
    finally:
        first.close()


def step_of(things: Things, *batch: Any, **options: Any) -> Any:
    """Return the loss of a step of a small pipeline."""
    arguments: Any = {"microbatches": 2, "loss": nn.functional.l1_loss, **options}
    pipeline = pipeline_module.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], ["cpu", "cpu"], **arguments)
    return pipeline.step(*batch)


def command(*arguments: str) -> None:
    """Run the command ``cudafuture``; raise SystemExit with its exit status and the text that it wrote."""
    run_command(cli.main, arguments)


def run_command(main: Callable[[list[str]], object], arguments: tuple[str, ...]) -> None:
    written = io.StringIO()
    with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
        try:
            status = main(list(arguments))
        except SystemExit as e:
            status = e.code
    raise SystemExit(f"{status}: {written.getvalue()}")


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.ones(4))])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


class States:
    """Iterable with a state."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


# The public names without their types, because the calls are wrong.
cf: Any = cudafuture
cfd: Any = distributed_module
pipe: Any = pipeline_module
offload: Any = swap_module.offload
rpc: Any = rpc_ext
traces: Any = trace
debugging: Any = debug
kits: Any = testing
sim: Any = simulator
open_file: Any = File
open_store: Any = DiskStore
open_shards: Any = ShardedStore
start_engine: Any = Engine
make_pool: Any = BufferPool
serial: Any = executors.serial
swapper: Any = deepspeed.OptimizerSwapper
disk_offloader: Any = tensornvme.DiskOffloader
gpipe: Any = torchgpipe.GPipe
images: Any = data.TgzImages

SECONDS = timedelta(seconds=5)

FUTURES = [
    Mistake("then_calls_the_callback", lambda t: t.future.then(None), "call", TypeError, r"then\(\) takes a callable"),
    Mistake("then_without_callback", lambda t: t.future.then(), "call", TypeError, r"then\(\) needs the argument 'fn'"),
    Mistake(
        "word_as_priority_of_callback",
        lambda t: t.future.then(print, priority="high"),
        "call",
        TypeError,
        r"priority of then\(\) is int or None, not str: then\(fn, priority=None",
    ),
    Mistake(
        "coroutine_function_as_callback",
        lambda t: t.future.then(sleep_and_return),
        "wait",
        TypeError,
        r"callback of then\(\) returned .*a coroutine, which nothing would run: .*await this future in a coroutine",
    ),
    Mistake(
        "callback_with_two_parameters",
        lambda t: t.future.then(take_two),
        "wait",
        TypeError,
        r"take_two\(\) missing 1 required positional argument: 'second'",
    ),
    Mistake(
        "callback_without_parameters",
        lambda t: t.future.then(executors.default_executor),
        "wait",
        TypeError,
        r"default_executor\(\) takes 0 positional arguments but 1 was given",
    ),
    Mistake(
        "future_from_callback_of_then",
        lambda t: t.future.then(lambda _: CUDAFuture()),
        "wait",
        TypeError,
        r"callback of then\(\) returned <CUDAFuture.*or use then_async\(\)",
    ),
    Mistake(
        "plain_value_from_callback_of_then_async",
        lambda t: t.future.then_async(lambda done: done.value()),
        "wait",
        TypeError,
        r"callback of then_async\(\) returned 1, .*use then\(\) for a plain value",
    ),
    Mistake(
        "future_of_torch_from_callback_of_then_async",
        lambda t: t.future.then_async(lambda _: torch.futures.Future()),
        "wait",
        TypeError,
        r"CUDAFuture\.from_torch\(\) for torch's handles",
    ),
    Mistake(
        "unknown_stream",
        lambda t: t.future.then(print, stream="default"),
        "call",
        ValueError,
        r"stream is 'pool', 'caller', a torch\.Stream or several, not 'default'",
    ),
    Mistake(
        "serial_without_call_as_executor",
        lambda t: t.future.then(print, executor=executors.serial),
        "call",
        TypeError,
        r"executor is None, cudafuture\.executors\.inline or .*, not <function serial",
    ),
    Mistake(
        "ended_executor",
        attach_to_ended_executor,
        "wait",
        InvalidStateError,
        "the executor no longer accepts callbacks: .*after shutdown",
    ),
    Mistake(
        "misspelt_option",
        lambda t: t.future.then(print, nonblocking=True),
        "call",
        TypeError,
        r"then\(\) has no argument 'nonblocking': then\(fn, .*non_blocking=True\)",
    ),
    Mistake(
        "positive_priority",
        lambda t: cf.CUDAFuture(priority=3),
        "call",
        ValueError,
        r"priority is 0 \(the default\) or negative .*, not 3",
    ),
    Mistake(
        "timeout_by_position",
        lambda t: t.future.wait(5),
        "call",
        TypeError,
        r"wait\(\) was given 1 argument without a name, but takes 0: wait\(.*timeout=None\)",
    ),
    Mistake(
        "timedelta_as_timeout",
        lambda t: t.future.wait(timeout=SECONDS),
        "call",
        TypeError,
        r"timeout is None \(no limit\) or a number of seconds, not datetime\.timedelta",
    ),
    Mistake(
        "negative_timeout",
        lambda t: cf.CUDAFuture().wait(timeout=-1),
        "call",
        ValueError,
        r"timeout is None \(no limit\) or seconds >= 0, not -1",
    ),
    Mistake(
        "value_of_pending_future",
        lambda t: cf.CUDAFuture().value(),
        "call",
        InvalidStateError,
        r"value\(\): the future is pending; wait\(\) for it, or ask done\(\) first",
    ),
    Mistake("set_result_twice", lambda t: end_twice(), "call", InvalidStateError, "'load' is completed already.*once"),
    Mistake(
        "set_result_without_value",
        lambda t: cf.CUDAFuture().set_result(),
        "call",
        TypeError,
        r"set_result\(\) needs the argument 'value'",
    ),
    Mistake(
        "text_as_exception",
        lambda t: cf.CUDAFuture().set_exception("no such file"),
        "call",
        TypeError,
        r"set_exception\(\) takes an exception, not 'no such file'",
    ),
    Mistake(
        "text_as_failure",
        lambda t: cf.CUDAFuture.failed("no such file"),
        "call",
        TypeError,
        r"failed\(\) takes an exception, not 'no such file'",
    ),
    Mistake(
        "single_device_for_devices",
        lambda t: cf.CUDAFuture("cuda:0"),
        "call",
        TypeError,
        r"devices is a list of devices, as in devices=\['cuda:0'\], not one str",
    ),
    Mistake(
        "unknown_lifetime",
        lambda t: cf.CUDAFuture(lifetime="weak"),
        "call",
        ValueError,
        "lifetime is 'record' or 'hold'",
    ),
    Mistake(
        "thread_pool_as_executor_of_a_future",
        lambda t: cf.CUDAFuture(executor=executors.default_executor()),
        "call",
        TypeError,
        r"CUDAFuture\(executor=\) is cudafuture\.executors\.inline, \.callback_thread, or None, not",
    ),
    Mistake(
        "future_of_concurrent_to_from_torch",
        lambda t: cf.CUDAFuture.from_torch(Future()),
        "call",
        TypeError,
        r"from_torch\(\) takes a torch\.futures\.Future or a c10d Work .*async_op=True returns\), not <Future",
    ),
    Mistake(
        "method_of_the_class",
        lambda t: cf.CUDAFuture.then(print),
        "call",
        TypeError,
        r"then\(\) is a method of a CUDAFuture, not of",
    ),
    Mistake(
        "await_without_event_loop",
        lambda t: next(iter(cf.CUDAFuture().__await__())),
        "call",
        RuntimeError,
        "no running event loop",
    ),
    Mistake(
        "wait_in_event_loop",
        lambda t: run_in_loop(cf.CUDAFuture().wait),
        "call",
        RuntimeWarning,
        "a blocking wait for a CUDAFuture stops the event loop.*use `await future`, or wait in another thread",
    ),
    Mistake(
        "callback_that_waits_for_itself",
        lambda t: wait_for_itself(),
        "wait",
        InvalidStateError,
        r"a callback waits for its own result.*return the value, or use then_async\(\)",
    ),
    Mistake(
        "failure_that_nothing_retrieves",
        lambda t: cf.CUDAFuture.failed(ValueError("no such file")) and None,
        "collection",
        ValueError,
        "the exception of CUDAFuture '' was never retrieved",
    ),
    Mistake(
        "exception_in_done_callback",
        lambda t: t.future.add_done_callback(take_two),
        "collection",
        TypeError,
        "a callback of <CUDAFuture completed, .*> raised",
    ),
]

SUBMIT_AND_COPY = [
    Mistake(
        "submit_of_a_result",
        lambda t: cf.submit(divmod(7, 2)),
        "call",
        TypeError,
        r"submit\(\) takes a callable and its arguments, not \(3, 1\)",
    ),
    Mistake(
        "submit_of_coroutine_function",
        lambda t: cf.submit(sleep_and_return),
        "wait",
        TypeError,
        r"callback of submit\(\) returned .*a coroutine, which nothing would run",
    ),
    Mistake(
        "submit_of_function_that_returns_a_future",
        lambda t: cf.submit(lambda: t.future),
        "wait",
        TypeError,
        r"callback of submit\(\) returned <CUDAFuture.*wait for it in the callback, or use then_async\(\)",
    ),
    Mistake(
        "number_of_threads_as_executor",
        lambda t: cf.submit(divmod, 7, 2, executor=4),
        "call",
        TypeError,
        r"executor is None, .*or a concurrent\.futures\.Executor, not 4",
    ),
    Mistake("serial_without_name", lambda t: serial(4), "call", TypeError, "name is a str, not 4"),
    Mistake(
        "copy_of_a_future",
        lambda t: cf.copy(t.future, "cpu"),
        "call",
        TypeError,
        r"value is a CUDAFuture: wait for it, .*then_async\(lambda done: copy\(done\.value\(\), device\)\)",
    ),
    Mistake(
        "copy_with_swapped_arguments",
        lambda t: cf.copy("cpu", t.tensor),
        "call",
        TypeError,
        r"device is a torch\.device, a str such as 'cuda:0' or an int, not a tensor of shape \[4\]",
    ),
    Mistake(
        "copy_to_unknown_device",
        lambda t: cf.copy(t.tensor, "gpu"),
        "call",
        ValueError,
        r"device is a torch\.device, a str such as 'cuda:0' or an int, not 'gpu'",
    ),
    Mistake(
        "stream_of_unknown_device",
        lambda t: cf.pool_stream("gpu"),
        "call",
        ValueError,
        r"device is a torch\.device, a str such as 'cuda:0' or an int, not 'gpu'",
    ),
    Mistake(
        "stream_without_device",
        lambda t: cf.own_stream(None),
        "call",
        TypeError,
        r"device is a torch\.device, .*, not None",
    ),
    Mistake(
        "streams_of_one_device",
        lambda t: cf.current_streams(torch.device("cpu")),
        "call",
        TypeError,
        "devices is a list of devices, not device.*: for a single one pass a list of one",
    ),
    Mistake(
        "device_for_use_streams",
        lambda t: cf.use_streams("cuda:0"),
        "call",
        TypeError,
        r"a stream is a torch\.Stream, not 'cuda:0'",
    ),
]

COMBINATORS = [
    Mistake(
        "list_to_gather",
        lambda t: cf.gather([t.future, t.future]),
        "call",
        TypeError,
        r"gather\(\) takes them one by one: gather\(\*futures\)",
    ),
    Mistake(
        "single_future_to_collect_all",
        lambda t: cf.collect_all(t.future),
        "call",
        TypeError,
        "futures is a list of CUDAFutures, not <CUDAFuture.*: for a single one pass a list of one",
    ),
    Mistake(
        "futures_one_by_one_to_wait_all",
        lambda t: cf.wait_all(t.future, t.future),
        "call",
        TypeError,
        "futures is a list of CUDAFutures, not <CUDAFuture",
    ),
    Mistake(
        "values_to_wait",
        lambda t: cf.wait([t.future.value()]),
        "call",
        TypeError,
        r"1 is not a CUDAFuture; CUDAFuture\.from_torch\(\) converts torch's futures and works",
    ),
    Mistake(
        "no_future_to_collect_any",
        lambda t: cf.collect_any([]),
        "call",
        ValueError,
        r"collect_any\(\) needs at least one future",
    ),
    Mistake(
        "unknown_return_when",
        lambda t: cf.wait([t.future], return_when="ALL"),
        "call",
        ValueError,
        "return_when is 'ALL_COMPLETED', 'FIRST_COMPLETED' or 'FIRST_EXCEPTION', not 'ALL'",
    ),
    Mistake(
        "timedelta_to_wait_all",
        lambda t: cf.wait_all([t.future], timeout=SECONDS),
        "call",
        TypeError,
        r"timeout is None \(no limit\) or a number of seconds, not datetime\.timedelta",
    ),
]

PREFETCH = [
    Mistake(
        "prefetch_of_generator_function",
        lambda t: cf.prefetch(loop_over),
        "call",
        TypeError,
        r"prefetch\(\) takes an iterable, not function: call it, and pass the iterable that it returns",
    ),
    Mistake(
        "prefetch_of_dataset",
        lambda t: cf.prefetch(torch.utils.data.TensorDataset(t.tensor)),
        "call",
        TypeError,
        r"prefetch\(\) takes an iterable, not TensorDataset: pass a DataLoader of it",
    ),
    Mistake(
        "prefetch_to_unknown_device",
        lambda t: cf.prefetch([t.tensor], "gpu"),
        "call",
        ValueError,
        r"device is a torch\.device, .*, not 'gpu'",
    ),
    Mistake(
        "depth_of_zero",
        lambda t: cf.prefetch([t.tensor], "cpu", depth=0),
        "call",
        ValueError,
        "depth=0 is less than 1: at least one batch must be read ahead",
    ),
    Mistake(
        "bytes_as_float",
        lambda t: cf.prefetch([t.tensor], "cpu", bytes=1e9),
        "call",
        TypeError,
        "bytes=1000000000.0: pass an int",
    ),
    Mistake(
        "text_for_pin",
        lambda t: cf.prefetch([t.tensor], "cpu", pin="yes"),
        "call",
        ValueError,
        "pin='yes': pass True, False or 'auto'",
    ),
    Mistake(
        "transform_with_two_parameters",
        lambda t: loop_over(cf.prefetch([t.tensor], "cpu", transform=take_two)),
        "call",
        TypeError,
        r"take_two\(\) missing 1 required positional argument: 'second'",
    ),
    Mistake(
        "two_loops_over_one_prefetcher",
        lambda t: begin_second_epoch(),
        "call",
        RuntimeError,
        "another epoch of this prefetcher has begun.*create a second prefetcher for a second loop",
    ),
    Mistake(
        "state_without_epoch",
        lambda t: cf.prefetch(States(), "cpu", across_epochs=id).load_state_dict({}),
        "call",
        ValueError,
        r"state is \{'epoch': number, 'iterable': state\}, as state_dict\(\) returns it, not \{\}",
    ),
]

PIPELINES = [
    Mistake(
        "pipeline_without_balance",
        lambda t: pipe.Pipeline(layers(), ["cpu", "cpu"], microbatches=2),
        "call",
        ValueError,
        "an nn.Sequential needs a balance: the number of layers in each stage",
    ),
    Mistake(
        "balance_that_does_not_fit",
        lambda t: pipe.Pipeline(layers(), ["cpu", "cpu"], balance=[2, 2], microbatches=2),
        "call",
        ValueError,
        r"balance=\[2, 2\] does not divide 3 layers, at least one for each stage",
    ),
    Mistake(
        "number_of_stages_as_balance",
        lambda t: pipe.Pipeline(layers(), ["cpu", "cpu"], balance=2, microbatches=2),
        "call",
        TypeError,
        "balance is a list of numbers of layers, not 2",
    ),
    Mistake(
        "module_as_stages",
        lambda t: pipe.Pipeline(nn.Linear(2, 2), ["cpu"], microbatches=2),
        "call",
        TypeError,
        "stages are an nn.Sequential with layers, or a list of modules, not Linear",
    ),
    Mistake(
        "no_microbatch",
        lambda t: step_of(t, microbatches=0),
        "call",
        ValueError,
        "microbatches=0: pass an int of at least 1",
    ),
    Mistake(
        "too_few_devices",
        lambda t: pipe.Pipeline(layers(), ["cpu"], balance=[2, 1], microbatches=2),
        "call",
        ValueError,
        "1f1b needs one device per stage, but has 2 stages and 1 devices",
    ),
    Mistake(
        "no_device",
        lambda t: pipe.Pipeline(layers(), [], balance=[2, 1], microbatches=2),
        "call",
        ValueError,
        "devices is empty: name one for each row of the table, or pass None",
    ),
    Mistake(
        "unknown_schedule",
        lambda t: step_of(t, schedule="1F1B"),
        "call",
        ValueError,
        "unknown schedule '1F1B': pass one of gpipe, 1f1b, zb1p, interleaved_1f1b, looped_bfs",
    ),
    Mistake(
        "name_of_a_loss",
        lambda t: step_of(t, loss="mse"),
        "call",
        TypeError,
        r"loss is a callable, which is called as loss\(output, target\), not 'mse'",
    ),
    Mistake(
        "optimizer_offloaded_twice",
        lambda t: offload_twice(t),
        "call",
        ValueError,
        r"was given this optimizer before: use what it returned, or make a new optimizer",
    ),
    Mistake(
        "coroutine_function_as_transform",
        lambda t: cf.prefetch([t.tensor], "cpu", transform=sleep_and_return),
        "call",
        TypeError,
        r"transform=.*sleep_and_return.*transform\(batch\) would only make a coroutine.*pass a function",
    ),
    Mistake(
        "coroutine_function_for_workers",
        lambda t: give_to_worker(sleep_and_return),
        "call",
        TypeError,
        r"compute=.*sleep_and_return.*compute\(\) would only make a coroutine.*pass a function",
    ),
    Mistake(
        "class_of_a_loss",
        lambda t: step_of(t, loss=nn.MSELoss),
        "call",
        TypeError,
        r"loss=MSELoss is a class: pass an object of it, such as MSELoss\(\)",
    ),
    Mistake(
        "trace_of_a_number",
        lambda t: traces.load(5),
        "call",
        TypeError,
        r"path is a str or an os.PathLike of one, not 5",
    ),
    Mistake(
        "profile_in_place_of_profiles",
        lambda t: traces.merge(t.folder, t.folder / "merged.json", profiles=t.folder / "text"),
        "call",
        TypeError,
        r"profiles='.*/text' is one path: pass a list of paths",
    ),
    Mistake(
        "text_in_place_of_a_chrome_file",
        lambda t: trace.problems(t.folder / "text"),
        "call",
        ValueError,
        r"/text is not a Chrome JSON file: ",
    ),
    Mistake(
        "store_in_a_file",
        lambda t: DiskStore(t.folder / "text"),
        "call",
        StorageError,
        r"no store can be opened in .*/text: it is a file; pass a folder",
    ),
    Mistake(
        "durable_store_in_a_file",
        lambda t: DiskStore(t.folder / "text", durable=True),
        "call",
        StorageError,
        r"no store can be opened in .*/text: it is a file; pass a folder",
    ),
    Mistake(
        "link_without_class",
        lambda t: step_of(t, link=pipe.LocalLink()),
        "call",
        TypeError,
        r"link is a callable, which is called as link\(\), not <",
    ),
    Mistake(
        "loss_of_each_row",
        lambda t: step_of(t, torch.ones(4, 2), torch.ones(4, 1), loss=nn.L1Loss(reduction="none")),
        "call",
        TypeError,
        r"a loss returns a tensor with one element, not one of shape \(2, 1\)",
    ),
    Mistake(
        "target_with_other_rows",
        lambda t: step_of(t, torch.ones(4, 2), torch.ones(3, 1)),
        "call",
        ValueError,
        "a target has 3 rows for a mini-batch of 4: it needs as many, or a multiple",
    ),
    Mistake(
        "step_without_gradients",
        lambda t: torch.no_grad()(step_of)(t, torch.ones(4, 2), torch.ones(4, 1)),
        "call",
        RuntimeError,
        r"step\(\) computes gradients: call it outside of no_grad\(\)",
    ),
    Mistake(
        "missing_cell",
        lambda t: pipe.Schedule([["0F0"]]).check(),
        "call",
        ScheduleError,
        r"stage 0, micro-batch 0 is not complete: .* Add 0B0\.",
    ),
    Mistake(
        "single_device_for_workers",
        lambda t: pipe.Workers("cpu"),
        "call",
        TypeError,
        "devices is a list of devices, not 'cpu': for a single one pass a list of one",
    ),
    Mistake(
        "model_that_is_not_sequential",
        lambda t: pipe.balance.balance_by_size(1, nn.Linear(2, 2), torch.ones(4, 2)),
        "call",
        TypeError,
        r"module is an nn\.Sequential, not Linear",
    ),
]

FILES = [
    Mistake(
        "missing_file",
        lambda t: open_file(t.folder / "nothing"),
        "call",
        StorageError,
        "cannot open .*/nothing: No such file or directory",
    ),
    Mistake("folder_as_file", lambda t: open_file(t.folder), "call", StorageError, "cannot open .*: it is a folder"),
    Mistake(
        "mode_of_open",
        lambda t: open_file(t.folder / "numbers", "rb"),
        "call",
        ValueError,
        r"mode='rb' is not valid; use one of r, r\+, w, w\+",
    ),
    Mistake(
        "write_to_file_for_reading",
        lambda t: open_file(t.folder / "numbers").write(t.tensor),
        "call",
        io.UnsupportedOperation,
        r"is open for reading only; open it with mode 'r\+'",
    ),
    Mistake(
        "read_beyond_the_end",
        lambda t: t.file.read(torch.ones(400)),
        "wait",
        StorageError,
        "reading 1600 bytes at offset 0 of .* ended after 16: there the file ends",
    ),
    Mistake(
        "read_into_expanded_tensor",
        lambda t: t.file.read(torch.ones(1).expand(4)),
        "call",
        ValueError,
        "some of its elements share memory; read into a contiguous tensor",
    ),
    Mistake(
        "write_of_numpy_array",
        lambda t: t.file.write(t.tensor.numpy()),
        "call",
        TypeError,
        r"tensor: expected a torch\.Tensor, not array.*: convert it with torch\.as_tensor\(\)",
    ),
    Mistake(
        "write_of_freed_tensor",
        lambda t: t.file.write(freed(torch.ones(4))),
        "call",
        TensorError,
        "the storage of the tensor has 0 bytes, but its elements need 16: it was freed or shrunk",
    ),
    Mistake(
        "write_to_closed_file",
        write_after_close,
        "wait",
        InvalidStateError,
        "the file was closed before this could begin: .*/ended",
    ),
    Mistake(
        "no_thread", lambda t: start_engine("threads", threads=0), "call", ValueError, "threads=0 is not between 1 and"
    ),
    Mistake(
        "unknown_engine",
        lambda t: start_engine("uring"),
        "call",
        ValueError,
        "backend='uring' does not exist; use one of auto, io_uring, threads",
    ),
    Mistake(
        "larger_buffer_than_its_pool",
        lambda t: make_pool(1 << 16).take(1 << 20),
        "call",
        ValueError,
        "1048576 bytes were requested of a pool of 65536",
    ),
    Mistake(
        "digest_of_missing_bytes",
        lambda t: Digest(16).value(),
        "call",
        InvalidStateError,
        "16 of 16 bytes were not added",
    ),
]

STORES = [
    Mistake("empty_path", lambda t: open_store(""), "call", ValueError, r"dir is empty; the current folder is '\.'"),
    Mistake(
        "no_capacity",
        lambda t: open_store(t.folder / "new", capacity=0),
        "call",
        ValueError,
        "capacity=0 is not at least 1",
    ),
    Mistake(
        "read_only_ephemeral_store",
        lambda t: open_store(t.folder / "new", read_only=True),
        "call",
        ValueError,
        "read_only=True is for a durable store",
    ),
    Mistake(
        "small_capacity",
        lambda t: open_store(t.folder / "small", capacity=8).write("weight", t.tensor),
        "wait",
        QuotaError,
        "no room for 64 bytes: 0 of 8 are in use",
    ),
    Mistake(
        "missing_key",
        lambda t: t.store.delete("bias"),
        "wait",
        NotFoundError,
        "there is no key 'bias'; this store began empty: one with durable=True keeps its keys",
    ),
    Mistake(
        "empty_key", lambda t: t.store.write("", t.tensor), "call", ValueError, "a key has 1 to 1024 bytes of UTF-8"
    ),
    Mistake("key_with_nul", lambda t: t.store.write("a\0b", t.tensor), "call", ValueError, "a key has no NUL"),
    Mistake(
        "key_and_tensor_swapped",
        lambda t: t.store.write(t.tensor, "weight"),
        "call",
        TypeError,
        r"a key is a str, not a tensor of shape \[4\]",
    ),
    Mistake(
        "write_of_state_dict",
        lambda t: t.store.write("model", {"weight": t.tensor}),
        "call",
        TypeError,
        r"tensor: expected a torch\.Tensor, not \{'weight'",
    ),
    Mistake(
        "read_into_other_shape",
        lambda t: t.store.read("weight", torch.ones(3)),
        "call",
        ValueError,
        r"key 'weight' is a tensor of Float \[4\], but the tensor to read into is one of Float \[3\]",
    ),
    Mistake(
        "out_and_device",
        lambda t: t.store.read("weight", torch.ones(4), "cpu"),
        "call",
        ValueError,
        "pass either out or device, not both",
    ),
    Mistake(
        "more_tensors_than_keys",
        lambda t: t.store.readv(["weight"], [t.tensor, t.tensor]),
        "call",
        ValueError,
        "1 keys, and 2 tensors to fill: pass one for each key",
    ),
    Mistake(
        "part_at_wrong_place",
        lambda t: t.store.begin_write("parts", torch.float32, [4]).put(3, t.tensor),
        "call",
        ValueError,
        "a part of 16 bytes at byte 3 of a tensor of 16 must lie in the tensor, begin at a multiple of 64 KiB",
    ),
    Mistake(
        "commit_without_parts",
        commit_without_parts,
        "wait",
        InvalidStateError,
        "write of key 'parts' cannot be committed: 16 of 16 bytes were not put",
    ),
    Mistake("closed_store", lambda t: t.closed.read("weight"), "call", InvalidStateError, "the store is closed"),
    Mistake("no_shard", lambda t: open_shards([]), "call", ValueError, "no stores were given: pass at least one"),
    Mistake(
        "one_store_as_two_shards",
        lambda t: open_shards([t.store, t.store]),
        "call",
        ValueError,
        "two shards are called .*: give a mapping of names to stores",
    ),
    Mistake(
        "weight_of_unknown_shard",
        lambda t: open_shards({"a": t.store}, weights={"b": 1}),
        "call",
        ValueError,
        r"weights for \['b'\], which are not among \['a'\]",
    ),
]

COMPAT = [
    Mistake(
        "read_before_write",
        lambda t: disk_offloader(str(t.folder / "disk")).sync_read(t.tensor),
        "call",
        RuntimeError,
        "nothing is stored as a tensor of 16 bytes: write it first",
    ),
    Mistake(
        "unknown_backend_of_tensornvme",
        lambda t: disk_offloader(str(t.folder / "disk"), backend="io_uring"),
        "call",
        ValueError,
        "backend='io_uring' does not exist; use one of aio, pthread, uring",
    ),
    Mistake(
        "swapper_of_a_model",
        lambda t: swapper(nn.Linear(2, 2), t.store),
        "call",
        TypeError,
        r"optimizer is a torch\.optim\.Optimizer, not Linear",
    ),
    Mistake(
        "gpipe_without_balance",
        lambda t: gpipe(layers(), devices=["cpu"]),
        "call",
        torchgpipe.gpipe.BalanceError,
        "a balance is required: .*balance_by_time",
    ),
]

SWAP = [
    Mistake(
        "offload_of_parameters",
        lambda t: offload(nn.Linear(2, 2).parameters(), t.store),
        "call",
        TypeError,
        r"optimizer is a torch\.optim\.Optimizer, or a function .*such as torch\.optim\.Adam, not <generator",
    ),
    Mistake(
        "offload_of_class_without_parameters",
        lambda t: offload(torch.optim.Adam, t.store),
        "call",
        ValueError,
        "a function that creates an optimizer needs params=",
    ),
    Mistake(
        "no_parameter",
        lambda t: offload(torch.optim.Adam, t.store, params=[]),
        "call",
        ValueError,
        "params is empty: pass at least one parameter",
    ),
    Mistake(
        "named_parameters",
        lambda t: offload(torch.optim.Adam, t.store, params=nn.Linear(2, 2).named_parameters()),
        "call",
        TypeError,
        r"params is a list of parameters or groups, .*: pass model\.parameters\(\)",
    ),
    Mistake(
        "unknown_when",
        lambda t: offload(adam(), t.store, when="forward"),
        "call",
        ValueError,
        "when='forward' is neither 'step' nor 'backward'",
    ),
    Mistake(
        "optimizer_of_all_parameters",
        lambda t: offload(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]), t.store),
        "call",
        ValueError,
        "LBFGS keeps the history of all parameters in one flat vector, which cannot be swapped",
    ),
    Mistake(
        "same_name_in_one_store",
        share_name,
        "call",
        ValueError,
        "another optimizer uses the name 'shared' in this store: pass another name=",
    ),
    Mistake(
        "state_of_parameter_of_another_optimizer",
        read_state_of_other_parameter,
        "call",
        KeyError,
        "the optimizer does not have this parameter",
    ),
    Mistake(
        "step_of_closed_optimizer", use_closed_optimizer, "call", InvalidStateError, "the offloaded optimizer is closed"
    ),
    Mistake(
        "step_of_the_optimizer_that_was_given_to_offload",
        step_given_optimizer,
        "call",
        InvalidStateError,
        r"offload\(\) has taken this optimizer's parameters: call step\(\) of what offload\(\) returned",
    ),
    Mistake(
        "gradient_of_parameter_of_another_optimizer",
        read_gradient_of_other_parameter,
        "call",
        KeyError,
        "the optimizer does not have this parameter",
    ),
    Mistake(
        "offload_to_closed_store", lambda t: offload(adam(), t.closed), "call", InvalidStateError, "the store is closed"
    ),
]

IMAGES = [
    Mistake(
        "missing_archive",
        lambda t: images(t.folder / "nothing.tgz"),
        "call",
        FileNotFoundError,
        "No such file.*nothing",
    ),
    Mistake(
        "text_as_archive",
        lambda t: data.classes_of(t.folder / "text"),
        "call",
        ArchiveError,
        "/text is no tar archive: its unpacked data begin with b'hello'",
    ),
    Mistake(
        "unknown_treatment_of_errors",
        lambda t: images(t.folder / "text", on_error="ignore"),
        "call",
        ValueError,
        "on_error='ignore': pass 'raise' or 'skip'",
    ),
]

TESTING = [
    Mistake("world_of_text", lambda t: kits.World("2"), "call", TypeError, "n is an int, not '2'"),
    Mistake(
        "world_without_time",
        lambda t: kits.World(1, timeout=0),
        "call",
        ValueError,
        "timeout is a positive number of seconds, not 0",
    ),
    Mistake(
        "missing_script",
        lambda t: kits.torchrun(t.folder / "nothing.py", 2),
        "call",
        FileNotFoundError,
        r"there is no script .*/nothing\.py",
    ),
    Mistake(
        "rate_above_one",
        lambda t: kits.FaultyEngine(io_error=2),
        "call",
        ValueError,
        "io_error=2 is not between 0 and 1",
    ),
    Mistake("devices_of_sim", lambda t: sim.enable("sim:0"), "call", TypeError, "devices is an int, not 'sim:0'"),
    Mistake(
        "too_many_devices", lambda t: sim.enable(9), "call", ValueError, "devices=9 cannot be simulated; pass 1 to"
    ),
    Mistake(
        "unknown_schedule_of_sim",
        lambda t: sim.enable(schedule="random"),
        "call",
        ValueError,
        "schedule='random' does not exist; use one of free, jitter, lazy",
    ),
    Mistake(
        "sim_that_is_off",
        lambda t: sim.synchronize(),
        "call",
        RuntimeError,
        r"accelerator is off: call sim\.enable\(\)",
    ),
    Mistake(
        "fake_devices_without_command",
        lambda t: fakecuda.hold(),
        "call",
        RuntimeError,
        "this process has no fake devices; run: python -m cudafuture.testing.fakecuda -- COMMAND",
    ),
    Mistake(
        "fakecuda_without_command",
        lambda t: run_command(run_fakecuda, ("--races",)),
        "call",
        SystemExit,
        "2: .*the following arguments are required: COMMAND",
    ),
    Mistake(
        "fakecuda_with_unknown_schedule",
        lambda t: run_command(run_fakecuda, ("--schedule", "random", "--", "true")),
        "call",
        SystemExit,
        "2: .*argument --schedule: invalid choice: 'random'",
    ),
]

SETTINGS = [
    Mistake(
        "no_thread_of_submit",
        lambda t: config.read({"CUDAFUTURE_SUBMIT_THREADS": "0"}),
        "call",
        ValueError,
        "CUDAFUTURE_SUBMIT_THREADS='0' is not a number of at least 1; the default is",
    ),
    Mistake(
        "empty_number",
        lambda t: config.read({"CUDAFUTURE_SUBMIT_EXIT_SECONDS": ""}),
        "call",
        ValueError,
        "CUDAFUTURE_SUBMIT_EXIT_SECONDS='' is not a number of at least 1; the default is 30",
    ),
    Mistake(
        "debug_as_switch",
        lambda t: config.read({"CUDAFUTURE_DEBUG": "1"}),
        "call",
        ValueError,
        "CUDAFUTURE_DEBUG='1': use order, origin, ownership, or leave it empty",
    ),
    Mistake(
        "unknown_transport",
        lambda t: config.read({"CUDAFUTURE_RPC_TRANSPORTS": "tcp"}),
        "call",
        ValueError,
        "CUDAFUTURE_RPC_TRANSPORTS='tcp': use ibv, shm, uv, or leave it empty",
    ),
]

DEBUG = [
    Mistake(
        "list_to_pending",
        lambda t: debugging.pending([t.future]),
        "call",
        TypeError,
        r"pending\(\) takes CUDAFutures, not list; it takes them one by one: pending\(\*futures\)",
    ),
    Mistake(
        "name_as_place",
        lambda t: debugging.register(CUDAFuture(), "worker"),
        "call",
        TypeError,
        r"place is what OperationPlace\.find\(\) returns, not 'worker'",
    ),
    Mistake("rank_as_text", lambda t: debugging.name_process(rank="0"), "call", TypeError, "rank is an int, not '0'"),
    Mistake("text_as_switch", lambda t: debugging.record_origins("no"), "call", TypeError, "record is True or False"),
    Mistake("name_of_process", lambda t: debugging.ask("python"), "call", TypeError, "process is an int, not 'python'"),
    Mistake(
        "single_process",
        lambda t: debugging.look_at(1),
        "call",
        TypeError,
        "processes is a list of process numbers, not 1",
    ),
]

TRACES = [
    Mistake("record_inside_record", record_twice, "call", InvalidStateError, "a trace is being recorded already"),
    Mistake("number_as_path", lambda t: enter(traces.record(5)), "call", TypeError, "path is a str or an os.PathLike"),
    Mistake("number_as_span", lambda t: enter(traces.span(3)), "call", TypeError, "name is a str, not 3"),
    Mistake(
        "missing_trace",
        lambda t: traces.load(t.folder / "nothing"),
        "call",
        FileNotFoundError,
        "/nothing is no file of a trace, and no folder with such files",
    ),
    Mistake(
        "text_as_trace",
        lambda t: traces.load(t.folder / "text"),
        "call",
        ValueError,
        "/text is not a file of a trace that this version reads",
    ),
]

COMMANDS = [
    Mistake(
        "unknown_suite",
        lambda t: command("bench", "UNKNOWN"),
        "call",
        SystemExit,
        "2: there is no benchmark UNKNOWN; there are .*core, ",
    ),
    Mistake(
        "unknown_row",
        lambda t: command("bench", "core", "--only", "UNKNOWN"),
        "call",
        SystemExit,
        "2: core: no row is named UNKNOWN; there are .*callback",
    ),
    Mistake(
        "option_without_suite",
        lambda t: command("bench", "--check"),
        "call",
        SystemExit,
        "2: name a suite before its options",
    ),
    Mistake(
        "no_round", lambda t: bench.run("core", [], rounds=0), "call", ValueError, "rounds must be at least 1, not 0"
    ),
    Mistake(
        "missing_store",
        lambda t: command("store", "ls", str(t.folder / "nothing")),
        "call",
        SystemExit,
        "2: no store can be opened in .*/nothing: No such file or directory",
    ),
    Mistake(
        "summary_of_missing_trace",
        lambda t: command("trace", "summary", str(t.folder / "nothing")),
        "call",
        SystemExit,
        "2: .*/nothing is no file of a trace, and no folder with such files",
    ),
    Mistake("missing_process", lambda t: command("ps", "0"), "call", SystemExit, "1: process 0: there is no process 0"),
    Mistake(
        "unknown_command", lambda t: command("status"), "call", SystemExit, "2: .*invalid choice: 'status' .*'doctor'"
    ),
]

BEFORE_BEGINNING = [
    Mistake(
        "collective_before_init_process_group",
        lambda t: cfd.all_reduce(t.tensor),
        "call",
        ValueError,
        r"torch\.distributed has no default process group yet: call init_process_group\(\) first",
    ),
    Mistake(
        "wrap_before_init_process_group",
        lambda t: cfd.wrap(),
        "call",
        ValueError,
        r"no default process group yet: call init_process_group\(\) first",
    ),
    Mistake(
        "call_before_init_rpc",
        lambda t: rpc.rpc_async(ME, divmod, (7, 2)),
        "call",
        InvalidStateError,
        r"RPC has not begun, or has ended: call rpc_ext\.init_rpc\(\) first",
    ),
    Mistake(
        "backend_of_unknown_devices",
        lambda t: cfd.BackendOptions(backend="gloo"),
        "call",
        ValueError,
        "torch has no devices of the type 'backend'; name one, such as cpu='gloo'",
    ),
    Mistake(
        "timeout_as_backend",
        lambda t: cfd.BackendOptions(cpu=5),
        "call",
        TypeError,
        "cpu is the name of a backend, or its options, not 5",
    ),
    Mistake(
        "rank_of_rpc_as_text",
        lambda t: rpc.init_rpc("me", rank="0", world_size=1),
        "call",
        TypeError,
        "rank is an int, not '0'",
    ),
    Mistake(
        "rank_outside_of_world",
        lambda t: rpc.init_rpc("me", rank=1, world_size=1),
        "call",
        ValueError,
        "rank is 1, but must be from 0 to world_size - 1 = 0",
    ),
    Mistake(
        "name_with_blank",
        lambda t: rpc.init_rpc("my worker", rank=0, world_size=1),
        "call",
        ValueError,
        "a worker's name has 1 to 127 letters and digits .*, unlike 'my worker'",
    ),
    Mistake(
        "address_without_scheme",
        lambda t: rpc.init_rpc("me", rank=0, world_size=1, init_method="127.0.0.1:29500"),
        "call",
        ValueError,
        "init_method is a URL, such as 'tcp://HOST:PORT', .*, not '127.0.0.1:29500'",
    ),
    Mistake(
        "rpc_timeout_as_timedelta",
        lambda t: rpc.init_rpc("me", rank=0, world_size=1, rpc_timeout=SECONDS),
        "call",
        TypeError,
        r"rpc_timeout is a positive number of seconds, or math\.inf for no limit, not datetime",
    ),
    Mistake(
        "transports_as_text",
        lambda t: rpc.init_rpc("me", rank=0, world_size=1, transports="tcp"),
        "call",
        ValueError,
        "transports='tcp': pass one or more of ibv, shm, uv",
    ),
    Mistake(
        "device_map_without_worker",
        lambda t: rpc.init_rpc("me", rank=0, world_size=1, device_maps={"cuda:0": "cuda:1"}),
        "call",
        TypeError,
        r"device_maps\['cuda:0'\] is a mapping, \{device here: device there\}, not 'cuda:1'",
    ),
]

COLLECTIVES = [
    Mistake(
        "future_to_collective",
        lambda t: cfd.all_reduce(CUDAFuture.completed(t.tensor)),
        "call",
        TypeError,
        r"Expected parameter `tensor` of type torch\.Tensor",
    ),
    Mistake(
        "name_of_operation",
        lambda t: cfd.all_reduce(t.tensor, op="sum"),
        "call",
        TypeError,
        r"op is a torch\.distributed\.ReduceOp, such as ReduceOp\.SUM, not 'sum'",
    ),
    Mistake(
        "group_as_operation",
        lambda t: cfd.reduce_scatter_tensor(t.tensor, t.tensor, dist.group.WORLD),
        "call",
        TypeError,
        r"op is a torch\.distributed\.ReduceOp, .*, not <",
    ),
    Mistake(
        "ranks_as_group",
        lambda t: cfd.all_reduce(t.tensor, group=[0]),
        "call",
        TypeError,
        r"group is a process group or None, not \[0\]",
    ),
    Mistake(
        "tensor_with_strides",
        lambda t: cfd.all_reduce(torch.ones(4, 4)[:, 0]),
        "call",
        ValueError,
        r"needs contiguous tensors, but one of shape \[4\] has the strides \[4\]; give it tensor\.contiguous\(\)",
    ),
    Mistake(
        "rank_outside_of_group",
        lambda t: cfd.broadcast(t.tensor, src=5),
        "call",
        ValueError,
        "src is 5, but the group has the ranks 0 to 0",
    ),
    Mistake(
        "no_source",
        lambda t: cfd.broadcast(t.tensor),
        "call",
        ValueError,
        "give src, a global rank, or group_src, a rank in the group",
    ),
    Mistake(
        "message_to_itself",
        lambda t: cfd.send(t.tensor, 0),
        "call",
        ValueError,
        "dst is this rank itself; give the rank of another process",
    ),
    Mistake(
        "other_shape",
        lambda t: cfd.all_gather([torch.ones(3)], t.tensor),
        "wait",
        cfd.CollectiveError,
        r"all_gather #\d+ on group .* of \[float32\[3\]\], float32\[4\]: .*invalid tensor size",
    ),
    Mistake(
        "seconds_for_barrier",
        lambda t: cfd.barrier(timeout=5),
        "call",
        TypeError,
        r"timeout is a datetime\.timedelta, such as timedelta\(seconds=5\), not 5",
    ),
    Mistake(
        "no_place_for_objects",
        lambda t: cfd.all_gather_object([], {"loss": 0.5}),
        "call",
        ValueError,
        r"object_list has 0 entries for 1 ranks: pass \[None\] \* world size",
    ),
    Mistake(
        "text_as_list_of_objects",
        lambda t: cfd.broadcast_object_list("settings", src=0),
        "call",
        TypeError,
        "object_list is a list, which is filled, not 'settings'",
    ),
    Mistake(
        "object_that_does_not_pickle",
        lambda t: cfd.all_gather_object([None], Lock()),
        "wait",
        TypeError,
        r"cannot pickle '_thread\.lock' object",
    ),
    Mistake("number_as_ranks", lambda t: cfd.new_group(0), "call", TypeError, "ranks is a list of ranks, not 0"),
    Mistake(
        "group_without_ranks", lambda t: cfd.new_group([]), "call", ValueError, "ranks is empty: pass at least one"
    ),
    Mistake(
        "rank_twice",
        lambda t: cfd.ProcessGroup().new_group([0, 0]),
        "call",
        ValueError,
        r"the ranks 0 to 0, each of which may be given once, but new_group\(\) was given \[0, 0\]",
    ),
    Mistake(
        "flat_split",
        lambda t: cfd.ProcessGroup().split([0]),
        "call",
        TypeError,
        "each of split_ranks is a list of ranks, not 0",
    ),
    Mistake(
        "collective_in_callback_of_other_future",
        lambda t: t.future.then_async(lambda _: cfd.all_reduce(t.tensor)),
        "wait",
        InvalidStateError,
        r"a collective cannot be issued in a callback .*executor=ProcessGroup\(group\)\.queue",
    ),
    Mistake(
        "work_of_collective_that_has_ended",
        lambda t: cf.CUDAFuture.from_torch(dist.barrier()),
        "call",
        TypeError,
        r"a c10d Work \(which a collective with async_op=True returns\), not None",
    ),
    Mistake(
        "number_as_prefix",
        lambda t: cfd.dump_flight_recorder(5),
        "call",
        TypeError,
        "prefix is a str or an os.PathLike of one, not 5",
    ),
]

CALLS = [
    Mistake(
        "second_session",
        lambda t: rpc.init_rpc("me", rank=0, world_size=1),
        "call",
        InvalidStateError,
        r"RPC has begun in this process already; rpc_ext\.shutdown\(\) ends it",
    ),
    Mistake(
        "unknown_worker",
        lambda t: rpc.rpc_async("you", divmod, (7, 2)),
        "call",
        ValueError,
        "there is no worker 'you'; the workers are me",
    ),
    Mistake(
        "call_of_a_result",
        lambda t: rpc.rpc_async(ME, divmod(7, 2)),
        "call",
        TypeError,
        r"rpc_async\(\) takes a callable, not \(3, 1\)",
    ),
    Mistake(
        "argument_without_tuple",
        lambda t: rpc.rpc_async(ME, abs, -5),
        "call",
        TypeError,
        r"args is a tuple of arguments, not int: for a single one pass args=\(value,\)",
    ),
    Mistake(
        "text_without_tuple",
        lambda t: rpc.rpc_sync(ME, len, "abc"),
        "call",
        TypeError,
        "args is a tuple of arguments, not str",
    ),
    Mistake(
        "tensor_without_tuple",
        lambda t: rpc.remote(ME, torch.sum, t.tensor),
        "call",
        TypeError,
        "args is a tuple of arguments, not Tensor",
    ),
    Mistake(
        "options_as_list",
        lambda t: rpc.rpc_async(ME, sorted, ([2, 1],), ["reverse"]),
        "call",
        TypeError,
        r"kwargs is a mapping, \{name: value\}, not list",
    ),
    Mistake(
        "call_of_lambda",
        lambda t: rpc.rpc_async(ME, lambda: 1),
        "call",
        AttributeError,
        r"local object.*cannot be pickled: pass a function at the top level of a module",
    ),
    Mistake(
        "argument_that_does_not_pickle",
        lambda t: rpc.rpc_async(ME, len, (Lock(),)),
        "call",
        TypeError,
        r"cannot pickle '_thread\.lock' object.*argument of the call of len on worker 'me'.*values that pickle",
    ),
    Mistake(
        "timeout_of_a_call_as_timedelta",
        lambda t: rpc.rpc_async(ME, divmod, (7, 2), timeout=SECONDS),
        "call",
        TypeError,
        r"timeout is a positive number of seconds, or math\.inf for no limit, not datetime",
    ),
    Mistake(
        "missing_argument_of_remote_function",
        lambda t: rpc.rpc_async(ME, divmod, (7,)),
        "wait",
        TypeError,
        "divmod expected 2 arguments, got 1",
    ),
    Mistake(
        "async_execution_of_plain_function",
        lambda t: rpc.rpc_async(ME, plain_as_async),
        "wait",
        TypeError,
        "plain_as_async is decorated with async_execution and must return a CUDAFuture, not 5",
    ),
    Mistake(
        "async_execution_of_a_result",
        lambda t: rpc.async_execution(5),
        "call",
        TypeError,
        "async_execution decorates a function, not 5",
    ),
    Mistake(
        "worker_without_list",
        lambda t: rpc.broadcast_call(ME, divmod, (7, 2)),
        "call",
        TypeError,
        r"workers is a list of workers, not the str 'me': pass \['me'\]",
    ),
    Mistake(
        "more_arguments_than_workers",
        lambda t: rpc.map_call([ME], divmod, [(7, 2), (9, 4)]),
        "call",
        ValueError,
        "workers has 1 elements, and args_per_worker 2: pass one for each",
    ),
    Mistake(
        "store_of_unknown_name",
        lambda t: rpc.RemoteStore(ME, name="nothing"),
        "call",
        InvalidStateError,
        r"serves no store called 'nothing': call rpc_ext\.serve_store\(\) there first",
    ),
    Mistake(
        "number_as_namespace",
        lambda t: rpc.RemoteStore(ME, namespace=5),
        "call",
        TypeError,
        "namespace is a str, not 5",
    ),
    Mistake(
        "store_instead_of_folder",
        lambda t: rpc.serve_store(t.store),
        "call",
        TypeError,
        r"dir is a str or an os\.PathLike of one, not <ephemeral DiskStore",
    ),
    Mistake(
        "capacity_as_text",
        lambda t: rpc.serve_store(t.folder / "served", namespace_capacity="1G"),
        "call",
        TypeError,
        "namespace_capacity is an int, not '1G'",
    ),
    Mistake(
        "too_little_memory",
        lambda t: rpc.serve_store(t.folder / "served", memory=1000),
        "call",
        ValueError,
        "memory=1000 for 16 clients: each needs at least 33554432 bytes",
    ),
    Mistake(
        "no_patience",
        lambda t: rpc.serve_store(t.folder / "served", patience=0),
        "call",
        ValueError,
        r"patience is a positive number of seconds, or math\.inf for no limit, not 0",
    ),
]

AT_EXIT = [
    Mistake(
        "failure_in_global_variable",
        lambda t: "kept = cudafuture.CUDAFuture(name='load')\nkept.set_exception(ValueError('no such file'))",
        "exit",
        ValueError,
        "the exception of CUDAFuture 'load' was never retrieved",
    ),
    Mistake(
        "failure_of_submit_in_global_variable",
        lambda t: f"opened = cudafuture.submit(open, {str(t.folder / 'nothing')!r})",
        "exit",
        FileNotFoundError,
        "the exception of CUDAFuture 'open' was never retrieved",
    ),
]


@rpc_ext.async_execution
def plain_as_async() -> Any:
    return 5


def names(mistakes: list[Mistake], moments: str = "call wait") -> pytest.MarkDecorator:
    """Parametrize a test with the mistakes of some moments, by name."""
    chosen = [mistake for mistake in mistakes if mistake.moment in moments.split()]
    return pytest.mark.parametrize("mistake", chosen, ids=[mistake.name for mistake in chosen])


IN_ONE_PROCESS = [
    *FUTURES,
    *SUBMIT_AND_COPY,
    *COMBINATORS,
    *PREFETCH,
    *PIPELINES,
    *FILES,
    *STORES,
    *COMPAT,
    *SWAP,
    *IMAGES,
    *TESTING,
    *SETTINGS,
    *DEBUG,
    *TRACES,
    *COMMANDS,
    *BEFORE_BEGINNING,
]


@names(IN_ONE_PROCESS)
def test_error_names_argument_and_remedy(mistake: Mistake, things: Things) -> None:
    expect(mistake, things)


@names(IN_ONE_PROCESS, "collection")
def test_log_names_error_that_no_call_raises(
    mistake: Mistake, things: Things, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        mistake.call(things)
        gc.collect()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is mistake.error
    assert re.search(mistake.words, record.getMessage()), record.getMessage()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.world
@pytest.mark.usefixtures("group")
@names(COLLECTIVES)
def test_error_of_collective_names_argument_and_remedy(mistake: Mistake, things: Things) -> None:
    expect(mistake, things)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with alone(tmp_path_factory.mktemp("worker") / "rendezvous", transports=["uv"]):
        yield


@pytest.mark.world
@pytest.mark.usefixtures("worker")
@names(CALLS)
def test_error_of_remote_call_names_argument_and_remedy(mistake: Mistake, things: Things) -> None:
    expect(mistake, things)


@pytest.fixture(scope="module")
def last_words(things: Things) -> str:
    """Return what a process with all mistakes of AT_EXIT writes to stderr."""
    parts = [str(mistake.call(things)) for mistake in AT_EXIT]
    return run_script("\n".join(["import cudafuture", *parts])).stderr


@names(AT_EXIT, "exit")
def test_log_at_exit_names_error(mistake: Mistake, last_words: str) -> None:
    assert re.search(mistake.words, last_words), last_words
    assert re.search(rf"^(cudafuture\.errors\.)?{mistake.error.__name__}: ", last_words, re.MULTILINE), last_words


def test_doctor_names_folder_that_cannot_be_used(things: Things) -> None:
    (found,) = [finding for finding in doctor.examine(things.folder / "nothing") if finding.name == "disk"]
    assert (found.state, found.found) == ("broken", f"no file can be made in {things.folder / 'nothing'}")
    assert found.advice == "name a folder that you may write: --folder"


def test_error_of_a_future_is_raised_as_it_is() -> None:
    error = TypeError("result(): incompatible function arguments. The following argument types are supported: none")
    with pytest.raises(TypeError) as caught:
        CUDAFuture.failed(error).result()
    assert caught.value is error

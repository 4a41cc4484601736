"""Scenarios of missing sync edges: for each edge, the test of the device suite that depends on it.

The mutation tests of the accelerators run each test as it is and with its edge cut (tests/sim, tests/fakecuda).
"""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import cudafuture
from cudafuture import _C
from cudafuture.testing.sim import Report, Site
from device import (
    test_combinators,
    test_completion,
    test_copy,
    test_copy_batch,
    test_events,
    test_failures,
    test_guards,
    test_io,
    test_lifetime,
    test_pipeline,
    test_prefetch,
    test_scopes,
    test_staging,
    test_then,
    test_torch_futures,
    test_wait,
)
from support.harness import Device

SUITE = Path(__file__).resolve().parent
OURS = (SUITE, SUITE.with_name("support"), Path(cudafuture.__file__).parent)
FRAME = re.compile(r"\s*(?P<file>.+):(?P<line>\d+) in ")


@dataclass(frozen=True)
class Scenario:
    """A test that notices that its edge is missing.

    ``kind`` is the finding's kind on the simulated accelerator, which sees more than others do. ``earlier`` and
    ``later`` are parts of source lines that the stacks of the finding's two sides show. A wrong device has one side.
    """

    test: Callable[..., None]
    kind: str
    earlier: str | None
    later: str | None
    arguments: dict[str, Any] = field(default_factory=dict)


def race(test: Callable[..., None], earlier: str | None, later: str | None, **arguments: Any) -> Scenario:
    return Scenario(test, "race", earlier, later, arguments)


def host_race(test: Callable[..., None], earlier: str, later: str, **arguments: Any) -> Scenario:
    return Scenario(test, "host_race", earlier, later, arguments)


def reuse(
    test: Callable[..., None], earlier: str | None, later: str = "device.produce(-1.0)", **arguments: Any
) -> Scenario:
    return Scenario(test, "reuse", earlier, later, arguments)


def wrong_data(test: Callable[..., None], **arguments: Any) -> Scenario:
    """Return a scenario of data on a disk, which no accelerator sees: under the lazy schedule the test fails."""
    return Scenario(test, "wrong_data", None, None, arguments)


def wrong_device(test: Callable[..., None], later: str) -> Scenario:
    return Scenario(test, "wrong_device", None, later)


READ = "device.read(x) == 3.0"  # in the tests of failures
PRODUCE = "device.produce(value)"
SCALED = "return x * self.by"
GATHERED = "[device.complete(float(i)) for i in range(parts)]"
STORED = "copy_between(tensor, host)"
OVERWRITTEN = "others = [accelerator.empty().fill_(9.0)"
STAGED = "all_gather_into_tensor"  # through staging buffers of ours; others Gloo itself does with CUDA tensors
STAGING = f'"{STAGED}": lambda'

SCENARIOS: dict[str, Scenario] = {
    # events that are recorded, or kept, when a future is done
    "result.record": race(
        test_wait.test_current_stream_follows_value,
        "device.complete(2.0)",
        "device.read(future.wait(non_blocking=True))",
        consumer=0,
    ),
    "result.stream": race(
        test_completion.test_named_stream_has_work,
        "x = accelerator.produce(2.0)",
        "accelerator.read(future.wait(non_blocking=True))",
        priority=0,
    ),
    "result.tensors": reuse(test_lifetime.test_unfindable_tensors_are_named, "lambda x=x: x * 3"),
    "failure.record": race(test_failures.test_failure_handler_follows_work, PRODUCE, READ),
    "then.record": race(
        test_then.test_callback_is_ordered_between_value_and_waiter,
        "return done.value() * 2",
        "device.read(child.wait(non_blocking=True))",
        priority=0,
    ),
    "then.failure_record": race(test_failures.test_raising_callback_leaves_ordered_work, "x.copy_(done.value())", READ),
    "then_async.events": race(
        test_then.test_then_async_follows_later_inner_future,
        "inner.set_result(device.produce(2.0))",
        "device.read(child.wait(non_blocking=True))",
    ),
    "then_async.failure_events": race(test_failures.test_then_async_keeps_failure_order, PRODUCE, READ),
    "gather.events": race(
        test_combinators.test_gather_is_ordered_after_every_part, GATHERED, "whole.wait(non_blocking=True)", parts=2
    ),
    "gather.failure_events": race(test_failures.test_gather_keeps_failure_order, PRODUCE, READ),
    "gather.tensors": reuse(
        test_lifetime.test_wait_all_records_every_tensor, "whole.wait(non_blocking=True)[0].value()"
    ),
    "join.wait": race(
        test_combinators.test_collect_all_follows_every_part,
        GATHERED,
        "whole.wait(non_blocking=True)",
        parts=2,
    ),
    "join.record": race(
        test_combinators.test_gather_is_ordered_after_every_part, GATHERED, "whole.wait(non_blocking=True)", parts=9
    ),
    "any.events": race(
        test_combinators.test_collect_any_follows_first_part,
        "futures[first].set_result(device.produce(5.0))",
        "device.read(x)) == (first, 5.0)",
        first=1,
    ),
    "any.failure_events": race(
        test_failures.test_collect_any_keeps_failure_order, PRODUCE, "[device.read(x), device.read(y)]"
    ),
    "from_torch.record": race(
        test_torch_futures.test_torch_value_is_ordered_here,
        "source.set_result(device.produce(2.0))",
        "device.read(future.wait(non_blocking=True))",
    ),
    "work.events": race(
        test_torch_futures.test_python_work_is_ordered,
        "buffer.fill_(2.0)",
        "device.read(known.wait(non_blocking=True))",
    ),
    "work.record": race(
        test_torch_futures.test_deviceless_work_is_ordered_by_value,
        "source.set_result([device.produce(2.0)])",
        "device.read(future.wait(non_blocking=True)[0])",
    ),
    # streams that wait
    "wait.stream": race(
        test_wait.test_each_reading_stream_waits_itself, "device.complete(2.0)", "device.read(future.wait("
    ),
    "wait.record_stream": reuse(
        test_lifetime.test_three_streams_use_one_value, "future.wait(non_blocking=not blocking) * 3", blocking=False
    ),
    "then.stream": race(
        test_then.test_callback_reads_value_on_own_stream,
        "device.complete(3.0).then(",
        "device.read(done.value())",
    ),
    "then.record_stream": reuse(
        test_lifetime.test_callback_tells_allocator, "future.then(lambda done: done.value() * 3)"
    ),
    "to_torch.stream": race(
        test_torch_futures.test_our_value_is_ordered_in_torch,
        "future.set_result(device.produce(2.0))",
        "device.read(target.wait())",
    ),
    "event.wait": race(
        test_events.test_waiting_stream_may_read,
        "accelerator.complete(4.0)",
        "accelerator.read(future.value())",
    ),
    "event.to_torch_wait": race(
        test_events.test_stream_waiting_for_torch_event_may_read,
        "accelerator.complete(4.0)",
        "accelerator.read(future.value())",
    ),
    "event.to_torch_record": race(
        test_events.test_stream_waiting_for_torch_event_may_read,
        "accelerator.complete(4.0)",
        "accelerator.read(future.value())",
    ),
    # the host waits
    "host.query": host_race(
        test_wait.test_host_may_read_after_blocking_wait,
        "host.copy_(x, non_blocking=True)",
        "future.wait().sum()",
    ),
    "then.when_ready": host_race(
        test_then.test_blocking_callback_may_read_on_host,
        "host.copy_(x, non_blocking=True)",
        "done.value().sum().item(), non_blocking=False",
    ),
    "event.synchronize": host_race(
        test_events.test_synchronized_host_may_read,
        "host.copy_(accelerator.produce(3.0), non_blocking=True)",
        "host.sum().item()",
    ),
    # current streams and devices
    "scope.enter": race(
        test_then.test_later_work_of_caller_may_use_result,
        "return done.value() * 2",
        "device.read(kept[0])",
    ),
    "scope.leave": race(
        test_scopes.test_work_after_scope_follows_earlier_work,
        "x = accelerator.produce(1.0)",
        "accelerator.read(x.add_(1))",
    ),
    "scope.device": wrong_device(test_scopes.test_device_inside_use_streams_does_not_stay, "event.synchronize()"),
    "caller.device": wrong_device(test_scopes.test_callback_has_device_of_caller, "event.synchronize()"),
    "guard.record": wrong_device(test_guards.test_completion_with_value_elsewhere_works, "future.set_result("),
    "guard.block": wrong_device(test_guards.test_stream_waits_for_other_device, "future.wait(non_blocking=True)"),
    "guard.query": wrong_device(test_guards.test_query_of_other_device_works, "future.ready()"),
    "guard.synchronize": wrong_device(test_guards.test_synchronizing_with_other_device_works, ".synchronize()"),
    "guard.destroy": wrong_device(test_guards.test_surplus_events_elsewhere_are_destroyed, "del futures"),
    "guard.to_torch": wrong_device(test_guards.test_torch_event_covers_other_device, ".to_torch_event()"),
    # in I/O: the engine's thread has no stack of Python
    "io.source_wait": race(test_io.test_write_follows_work_of_caller, "x = accelerator.produce(3.0)", None, priority=0),
    "io.source_copied": wrong_data(test_io.test_disk_waits_for_filled_buffer),
    "io.target_wait": race(test_io.test_read_follows_earlier_use_of_target, "x = accelerator.produce(1.0)", None),
    "io.target_record_stream": Scenario(test_io.test_target_may_be_dropped_after_read, "reuse", None, "fill_(9.0)"),
    "io.target_copied": wrong_data(test_io.test_buffer_is_reused_after_device),
    "io.read_record": race(test_io.test_waiter_follows_read, None, "doubled = x * 2"),
    "io.failure_record": race(test_io.test_failure_handler_follows_partial_read, None, "x.fill_(3.0)"),
    "io.buffer_record": wrong_data(test_io.test_pool_memory_waits_for_device),
    # in Python
    "copy.source_wait": race(
        test_copy.test_source_is_read_after_earlier_work,
        "copy(accelerator.produce(3.0), ",
        "copy(accelerator.produce(3.0), ",
        target="here",
    ),
    "copy.source_record_stream": reuse(
        test_copy.test_source_may_be_dropped_immediately, "copying = copy(x, ", OVERWRITTEN, target="there"
    ),
    "copy.target_wait": race(
        test_copy.test_pinned_result_is_read_in_order,
        "pinned.copy_(x, non_blocking=True)",
        "again = copy(pinned, ",
    ),
    "copy.target_record_stream": reuse(
        test_copy_batch.test_out_may_be_dropped_early,
        "copy(accelerator.make_pinned(4.0), ",
        OVERWRITTEN,
    ),
    "batch.slab_wait": race(
        test_copy_batch.test_slab_is_written_after_earlier_use,
        None,
        "copy(torch.full((SIZE,), 4.0), ",
    ),
    "batch.record_stream": reuse(
        test_copy_batch.test_packed_copies_may_be_dropped_early,
        "copy(torch.full((SIZE,), 4.0), ",
        OVERWRITTEN,
    ),
    "copy.done_record": race(
        test_copy.test_waiter_follows_copy,
        "copying = copy(source, ",
        "accelerator.read(copying.wait(non_blocking=True))",
    ),
    "staging.out_wait": race(
        test_staging.test_input_is_read_after_earlier_work,
        "move(accelerator.produce(2.0), output)",
        STAGING,
        move=test_staging.MOVES[STAGED],
    ),
    "staging.out_record_stream": reuse(
        test_staging.test_tensors_may_be_dropped_immediately,
        STAGING,
        OVERWRITTEN,
        move=test_staging.MOVES[STAGED],
    ),
    "staging.out_done": host_race(
        test_staging.test_input_is_read_after_earlier_work,
        STAGING,
        "return getattr(group, method)(*given, **keywords)",
        move=test_staging.MOVES[STAGED],
    ),
    "staging.in_wait": race(test_staging.test_output_elsewhere_is_written_in_order, "double = output * 2", STORED),
    "staging.in_record_stream": reuse(
        test_staging.test_tensors_may_be_dropped_immediately,
        STORED,
        "again = [accelerator.empty().fill_(7.0)",
        move=test_staging.MOVES[STAGED],
    ),
    "staging.in_record": race(
        test_staging.test_input_is_read_after_earlier_work,
        STORED,
        "accelerator.read(output)",
        move=test_staging.MOVES[STAGED],
    ),
    "prefetch.loader_wait": race(
        test_prefetch.test_batch_follows_work_of_loader,
        None,
        'accelerator.read(getattr(batch["there"]',
        wrap=lambda x: x,
    ),
    "prefetch.ready_record": race(test_prefetch.test_consumer_follows_copy, None, "accelerator.read(batch) == i"),
    "prefetch.record_stream": reuse(
        test_prefetch.test_transform_memory_lives_during_use,
        None,
        "return x + 1",
    ),
    "prefetch.drop_wait": reuse(test_prefetch.test_abandoned_batches_are_freed, None, OVERWRITTEN),
    "pipeline.wait_stream": race(test_pipeline.test_call_orders_devices, SCALED, "tensor.to(device)"),
    "pipeline.record_stream": reuse(test_pipeline.test_call_orders_devices, "tensor.to(device)", SCALED),
}


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Give the collectives a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def cut(edge: str | None) -> Iterator[None]:
    """Leave out an edge for a scope."""
    _C.cut_sync_edge(edge)
    try:
        yield
    finally:
        _C.cut_sync_edge(None)


def run(scenario: Scenario, edge: str | None, device: Device) -> Exception | None:
    """Run the scenario's test with the edge cut, and return the error that the test raised."""
    names = scenario.test.__annotations__
    parameters = {name: device for name in ("device", "accelerator", "pair") if name in names}
    with cut(edge):
        try:
            scenario.test(**parameters, **scenario.arguments)
        except (AssertionError, RuntimeError) as e:
            return e.with_traceback(None)
    return None


def source(site: Site | None) -> list[str]:
    """Return the source lines of a stack that are in the device suite or in the library."""
    lines = []
    for frame in site.stack if site is not None else ():
        match = FRAME.match(frame)
        if match is not None and any(Path(match["file"]).is_relative_to(folder) for folder in OURS):
            lines.append(linecache.getline(match["file"], int(match["line"])).strip())
    return lines


def shows(report: Report, scenario: Scenario) -> bool:
    """Return whether the stacks of the report's two sides show the lines that are to blame."""
    return all(
        wanted is None or any(wanted in line for line in source(site))
        for wanted, site in ((scenario.earlier, report.earlier), (scenario.later, report.later))
    )

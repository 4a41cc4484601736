"""The trees of pending futures."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest

from cudafuture import CUDAFuture, gather
from cudafuture.debug import PendingFuture, pending

pytestmark = pytest.mark.usefixtures("without_origins")

AGE = r", [\d.e+-]+ s old"


def lines_of(*futures: CUDAFuture[Any]) -> list[str]:
    return re.sub(AGE, "", str(pending(*futures))).splitlines()


def test_tree_leads_to_the_operations_that_hold_up_the_rest() -> None:
    read, done = CUDAFuture[int](name="read"), CUDAFuture.completed(1)
    child = read.then(lambda f: f.value() + 1)
    both = gather(child, read, done)
    gc.collect()  # which changes the order of its objects
    last = both.then_async(lambda _: read)
    assert lines_of(last, read) == [
        "then_async of an unnamed future",
        "  gather of 3",
        "    then of 'read'",
        "      future 'read' (no known operation)",
        "    future 'read' (no known operation)",
        "future 'read' (no known operation)",
    ]
    read.set_result(1)
    assert last.wait() == 1
    assert str(pending(last, both, child)) == "no future is pending"


def test_parts_of_a_future_are_shown_once() -> None:
    reads = [CUDAFuture[int](name=name) for name in "ab"]
    both = gather(*reads)
    shown = lines_of(gather(both, both.then(repr)))
    assert [line.strip() for line in shown].count("future 'a' (no known operation)") == 1
    assert shown[-1].endswith("gather of 2 (see above)")


def test_wrong_root_is_refused() -> None:
    with pytest.raises(TypeError, match="takes CUDAFutures, not str"):
        pending("read")  # type: ignore[arg-type]


def test_all_futures_have_a_root() -> None:
    read = CUDAFuture[int](name="a read that nobody else has")
    child = read.then(repr)
    roots = [tree for tree in pending().trees if "a read that nobody else has" in tree.description]
    assert [len(root.waits_for) for root in roots] == [1], "the parent is below its child"
    assert not child.done()


def test_late_then_async_waits_for_the_inner_future() -> None:
    inner = CUDAFuture[int](name="inner")
    outer = CUDAFuture.completed(0).then_async(lambda _: inner)
    assert lines_of(outer) == [
        "then_async of an unnamed future",
        "  future 'inner' (no known operation)",
    ]
    inner.set_result(3)
    assert outer.wait() == 3


def test_blocked_thread_is_named_with_its_line() -> None:
    read = CUDAFuture[int](name="read")

    def wait_for_read() -> None:
        read.wait()

    thread = threading.Thread(target=wait_for_read, name="reader")
    thread.start()
    tree: PendingFuture | None = None
    while tree is None or not tree.waiting_threads:  # until the thread has blocked
        (tree,) = pending(read).trees
    read.set_result(1)
    thread.join()
    (shown,) = tree.waiting_threads
    assert re.fullmatch(rf"'reader' at {re.escape(__file__)}:\d+ in wait_for_read\(\)", shown)
    assert pending(read).trees == ()


def test_deep_chains_are_shown() -> None:
    first = CUDAFuture[int](name="first")
    last: CUDAFuture[Any] = first
    for _ in range(3_000):
        last = last.then(lambda f: f.value())
    assert len(lines_of(last)) == 3_001
    assert repr(pending(last)) == "<Pending with 1 trees>"
    first.set_result(1)
    assert last.wait() == 1

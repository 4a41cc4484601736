"""Random graphs of futures do what a simple model of them does."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudafuture import AllFailedError, CancelledError, CUDAFuture, InvalidStateError, collect_all, collect_any, gather
from support.graphs import (
    CANCELLED,
    DROPPED,
    Error,
    Model,
    Node,
    Outcome,
    all_failed,
    digest,
    expected_outcome,
    reachable,
)
from support.soak import SOAK, soak_count

EXAMPLES = soak_count(2000)
MOST_DEPTH = 3  # of lists in lists: gathers of gathers grow by the power of it

pytestmark = [pytest.mark.slow, pytest.mark.soak]

Future = CUDAFuture[Any]
Step = tuple[Any, ...]  # a name, then numbers that choose among the futures that there are

several = st.lists(st.integers(0, 99), min_size=1, max_size=3)
one = st.integers(0, 99)
building = [
    st.tuples(st.just("root")),
    st.tuples(st.just("then"), one, st.sampled_from(["add", "recover", "raise"])),
    st.tuples(st.just("then_async"), one, one),
    st.tuples(st.just("gather"), several, st.booleans()),
    st.tuples(st.just("collect_all"), several, st.just(False)),
    st.tuples(st.just("collect_any"), several, st.just(False)),
    st.tuples(st.just("add_done_callback"), one),
]
completing = [
    st.tuples(st.just("set_result"), one, one),
    st.tuples(st.just("set_exception"), one, one),
    st.tuples(st.just("cancel"), one),
]
dropping = [st.tuples(st.just("drop"), one), st.tuples(st.just("drop_with_parts"), one)]
programs = st.lists(st.one_of(*building, *completing, *dropping), min_size=20, max_size=60)
graphs = st.lists(st.one_of(*building), min_size=10, max_size=30)
completions = st.lists(st.one_of(*completing), min_size=8, max_size=40)


@pytest.fixture(autouse=True, scope="module")
def quiet_heap() -> Iterator[None]:
    """Keep unseen failures out of the log, and collect the garbage of earlier tests."""
    logging.disable()
    gc.collect()
    yield
    logging.disable(logging.NOTSET)


class Graph:
    """Futures, and the nodes of the model that stand for them."""

    def __init__(self) -> None:
        self.model = Model()
        self.log: list[tuple[Any, ...]] = []  # append is atomic
        self.nodes: list[Node] = []
        self.held: dict[Node, Future] = {}
        self.known: dict[Node, weakref.ref[Future]] = {}
        self._marks = itertools.count()
        self.inner: set[Node] = set()  # returned by callbacks of then_async(): never dropped
        self.root()
        self.root()

    # ---- building

    def pick(self, number: int) -> Node:
        """Choose among the futures that are held; odd numbers prefer those that wait for nothing but the test."""
        nodes = list(self.held)
        pending = [n for n in nodes if n.kind == "root" and not n.done]
        return pending[number // 2 % len(pending)] if number % 2 and pending else nodes[number // 2 % len(nodes)]

    def add(self, node: Node, future: Future) -> None:
        self.nodes.append(node)
        self.held[node] = future
        self.known[node] = weakref.ref(future)
        self.model.begin(node)
        self.call_back(node)  # the log shows when each is done

    def root(self) -> None:
        self.add(Node(len(self.nodes)), CUDAFuture())

    def then(self, parent: int, transform: Any) -> None:
        node = Node(len(self.nodes), "then", [self.pick(parent)], transform)
        self.add(node, self.held[node.parents[0]].then(self.callback(node.key, transform)))

    def callback(self, key: int, transform: str) -> Callable[[Future], int]:
        def run(future: Future) -> int:
            error = error_of(future)
            if error != DROPPED:
                self.log.append(("then", key))
            if transform == "recover" and error not in (None, DROPPED):
                return -1
            number = digest(plain(future.value()))
            if transform == "raise":
                raise KeyError(number)
            return number + 1

        return run

    def then_async(self, parent: int, inner: int) -> None:
        node = Node(len(self.nodes), "then_async", [self.pick(parent), self.pick(inner)])
        node.depth = node.parents[1].depth
        returned = self.held[node.parents[1]]
        self.inner.add(node.parents[1])

        def run(future: Future) -> Future:
            if error_of(future) != DROPPED:
                self.log.append(("then", node.key))
            future.value()
            return returned

        self.add(node, self.held[node.parents[0]].then_async(run))

    def combine(self, how: Any, numbers: list[int], cancels_parts: bool) -> None:
        parts = list(dict.fromkeys(self.pick(n) for n in numbers))
        if cancels_parts and any(p.kind != "root" for p in parts):
            cancels_parts = False  # cancelling one part may complete another: then the order decides
        depth = 1 + max(p.depth for p in parts)
        if depth > MOST_DEPTH:
            return
        futures = [self.held[p] for p in parts]
        whole: Future
        if how == "gather":
            whole = gather(*futures, cancel_parts=cancels_parts)
        else:
            whole = (collect_all if how == "collect_all" else collect_any)(futures)
        node = Node(len(self.nodes), how, parts, cancels_parts=cancels_parts, depth=depth)
        self.add(node, whole)

    def add_done_callback(self, number: int) -> None:
        self.call_back(self.pick(number))

    def call_back(self, node: Node) -> None:
        key, mark, log = node.key, next(self._marks), self.log
        self.held[node].add_done_callback(lambda f: log.append(("callback", key, mark, outcome_of(f)[0])))
        self.model.add_done_callback(node, mark)

    # ---- completing, in the future and then in the model

    def complete(self, how: str, number: int, value: int = 0) -> bool:
        return finish(self.held[self.pick(number)], how, value)

    def complete_model(self, how: str, number: int, value: int = 0) -> bool:
        node = self.pick(number)
        if how == "cancel":
            return self.model.cancel(node)
        return self.model.finish(node, *outcome_of_setter(how, value))

    # ---- dropping

    def drop(self, *nodes: Node) -> None:
        """Drop the test's own references to them. What then happens is for the futures to show."""
        for node in nodes:
            del self.held[node]

    def is_kept(self, node: Node, whole: Node | None = None) -> bool:
        """Return whether the node would be dropped in the middle of a later step, which the model does not follow."""
        wholes = [n for n in reachable(self.held) if n.is_whole and not n.done and n is not whole]
        return node in self.inner or any(node in w.parents for w in wholes)

    # ---- looking

    def check(self, *, exactly_ordered: bool, gone: set[Node]) -> None:
        ours = [entry for entry in self.log if not self.is_of(gone, entry)]
        models = [entry for entry in self.model.log if not self.is_of(gone, entry)]
        assert (ours == models) if exactly_ordered else (Counter(ours) == Counter(models))
        self.log[:] = ours
        self.model.log[:] = ours
        for node in reachable(self.held):
            future = self.known[node]()
            assert future is not None
            assert outcome_of(future) == (node.state, node.outcome), node
        for node in gone:
            assert self.known[node]() is None, node

    def is_of(self, gone: set[Node], entry: tuple[Any, ...]) -> bool:
        return self.nodes[entry[1]] in gone


def outcome_of_setter(how: str, value: int) -> Outcome:
    return ("completed", value) if how == "set_result" else ("failed", ("ValueError", value))


def finish(future: Future, how: str, value: int) -> bool:
    """Complete, fail or cancel a future; say whether that is how it ended."""
    if how == "cancel":
        return future.cancel()
    try:
        future.set_result(value) if how == "set_result" else future.set_exception(ValueError(value))
    except InvalidStateError:
        return False
    return True


def outcome_of(future: Future) -> Outcome:
    if not future.done():
        return "pending", None
    if future.cancelled():
        return "cancelled", None
    error = error_of(future)
    return ("completed", plain(future.value())) if error is None else ("failed", error)


def error_of(future: Future) -> Error | None:
    if future.cancelled():
        return CANCELLED
    error = future.exception()
    return None if error is None else plain_error(error)


def plain_error(error: BaseException) -> Error:
    if isinstance(error, AllFailedError):
        return all_failed([plain_error(e) for e in error.exceptions])
    if isinstance(error, CancelledError):
        return CANCELLED
    return DROPPED if isinstance(error, InvalidStateError) else (type(error).__name__, *error.args)


def plain(value: Any) -> Any:
    """Return a value as the model has it: of the futures that collect_all gives, whether they completed."""
    if isinstance(value, CUDAFuture):
        return int(not value.cancelled() and value.exception() is None)
    return type(value)(plain(part) for part in value) if isinstance(value, list | tuple) else value


def build(graph: Graph, step: Step) -> None:
    name, *arguments = step
    if name == "root" or not graph.held:
        graph.root()
    elif name in ("gather", "collect_all", "collect_any"):
        graph.combine(name, *arguments)
    else:
        getattr(graph, name)(*arguments)


def run(graph: Graph, step: Step) -> bool:
    """Do one step with the futures and with the model; say whether the order of callbacks is determined."""
    name, *arguments = step
    if not graph.held or name not in ("set_result", "set_exception", "cancel", "drop", "drop_with_parts"):
        build(graph, step if graph.held else ("root",))
        return True
    node = graph.pick(arguments[0])
    if name == "drop":
        if not graph.is_kept(node):
            graph.drop(node)
        return node.done
    if name == "drop_with_parts":
        parts = [p for p in node.parents if p in graph.held]
        if node.is_whole and not node.consumers and not any(graph.is_kept(n, node) for n in (node, *parts)):
            graph.drop(node, *parts)
        return False
    assert graph.complete(name, *arguments) == graph.complete_model(name, *arguments)
    return not (name == "cancel" and node.cancels_parts)


reproducible = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


@given(programs)
@reproducible
def test_future_graph_matches_model(program: list[Step]) -> None:
    gc.freeze()  # the collector is asked often, and has to look at this graph only
    graph = Graph()
    for step in program:
        exactly_ordered = run(graph, step)
        gone = graph.model.drop_unreachable(graph.nodes, graph.held)
        if gone:
            gc.collect()
        graph.check(exactly_ordered=exactly_ordered and not gone, gone=gone)
        graph.nodes = [n if n not in gone else Node(n.key, state="cancelled") for n in graph.nodes]
    graph.drop(*graph.held)
    gc.collect()
    assert [n for n, future in graph.known.items() if future() is not None] == []


def test_uncancelled_gather_cancels_no_part() -> None:
    part: Future = CUDAFuture()
    whole = gather(part, cancel_parts=True)
    part.add_done_callback(lambda f: finish(whole, "set_result", 1))
    assert (whole.cancel(), whole.cancelled(), part.cancelled()) == (True, True, True)


# ---- several threads: what is final must fit together


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as pool:
        yield pool


THREADS = 4


@given(graphs, completions)
@reproducible
@pytest.mark.usefixtures("frequent_switches")
def test_threaded_graphs_end_in_consistent_states(
    threads: ThreadPoolExecutor, steps: list[Step], completing: list[Step]
) -> None:
    graph = Graph()
    for step in steps:
        build(graph, step)
    roots = [2 * i for i, node in enumerate(graph.held) if node.kind == "root"]
    # At last every root is completed, so that all are done.
    every = [*completing, *(("set_result", i, i) for i in roots)]
    barrier = threading.Barrier(THREADS)
    won: list[tuple[Node, Outcome]] = []

    def work(mine: Sequence[Step]) -> None:
        barrier.wait()
        for name, number, *value in mine:
            if graph.complete(name, number, *value):
                outcome: Outcome = ("cancelled", None) if name == "cancel" else outcome_of_setter(name, *value)
                won.append((graph.pick(number), outcome))

    for future in [threads.submit(work, every[k::THREADS]) for k in range(THREADS)]:
        future.result()
    expect_consistency(graph, won)


def expect_consistency(graph: Graph, won: list[tuple[Node, Outcome]]) -> None:
    for node, future in graph.held.items():
        node.state, node.outcome = outcome_of(future)
    winners = dict(won)
    # Two that cancel at the same moment may both hear that it is cancelled.
    assert len(winners) == len({(node, outcome) for node, outcome in won}), "a future was completed twice"
    assert all(outcome[0] == "cancelled" for (_, outcome), count in Counter(won).items() if count > 1)
    cancelled_wholes = {n for n, outcome in won if outcome[0] == "cancelled" and n.cancels_parts}
    for node in graph.held:
        if node in winners:
            assert (node.state, node.outcome) == winners[node]
        elif any(node in whole.parents for whole in cancelled_wholes) and node.state == "cancelled":
            continue
        else:
            allowed = [expected_outcome(node, part) for part in node.parents if decides(node, part)]
            assert (node.state, node.outcome) in allowed, node
    calls = Counter(entry for entry in graph.log if entry[0] == "callback")
    states = {n.key: n.state for n in graph.held}
    assert all(count == 1 and states[key] == state for (_, key, _, state), count in calls.items())
    assert len(calls) == sum(1 for n in graph.nodes for c in n.consumers if is_callback(c)) + len(graph.model.log)


def is_callback(consumer: Callable[[], object]) -> bool:
    return "add_done_callback" in consumer.__qualname__


def decides(node: Node, part: Node) -> bool:
    """Return whether a part can have decided: a failed one of a gather, a completed one of a collect_any."""
    if node.kind == "gather" and any(p.state != "completed" for p in node.parents):
        return part.state != "completed"
    if node.kind == "collect_any" and any(p.state == "completed" for p in node.parents):
        return part.state == "completed"
    return True

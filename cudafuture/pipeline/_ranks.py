"""Ranks of a pipeline over several processes: each runs one row of the table, and all agree on each step.

::

    step():  the rank of stage 0 ── BEGIN: rows ──► all          cells run; messages go from rank to rank
             all ── END: failure or none ──► rank 0 ── VERDICT: failures ──► all

A step ends well on all ranks, or raises on all. A rank whose cell fails sends STOP, so that no other rank waits for its
messages. A rank that has waited for nearly the whole timeout asks all others what they do: those that do not answer are
stopped or dead, and its error names them. It sends ABANDON with that error. After it, and after the loss of a rank,
these processes need another group and another pipeline.

``Alone`` and ``SharedStep`` have the same methods for a pipeline in one process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree

from cudafuture._arguments import expect_timeout
from cudafuture._C import CUDAFuture
from cudafuture.combine import wait
from cudafuture.distributed.mailbox import Mailbox, Message
from cudafuture.errors import CUDAFutureError, InvalidStateError, RemoteError, WorkerLostError
from cudafuture.future import copy
from cudafuture.pipeline._sharing import expect_sendable
from cudafuture.pipeline._stage import StageMessage
from cudafuture.pipeline.link import Link, LinkClosedError

__all__ = ["Alone", "RankStep", "Ranks", "Receiver", "SharedStep"]

T = TypeVar("T")
_ANSWER_SHARE, _LONGEST_ANSWER = 0.1, 2.0  # of the timeout, and seconds: how long the others may take to answer
_PATIENCE = 5.0  # seconds in which the last messages are sent
_all: weakref.WeakSet[Ranks] = weakref.WeakSet()


class Receiver(NamedTuple):
    """Receiver of messages: their key without the micro-batch, the stage, its rank, and its device if it is here."""

    key: tuple[Any, ...]
    stage: int
    rank: int
    device: torch.device | None


class _NoLink:
    """Link of no stages."""

    def send(self, key: Any, leaves: Sequence[Any], device: torch.device, header: Any) -> None:
        raise AssertionError

    def receive(self, key: Any) -> tuple[list[Any], Any]:
        raise AssertionError

    def close(self) -> None:
        pass


class SharedStep:
    """One step of a pipeline in one process: nothing is shared."""

    def __init__(self, link: Link, timeout: float | None) -> None:
        self.link, self.timeout = link, timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.describe: Callable[[], str] = lambda: "has not begun its cells"
        """Returns what this process does, as the rest of a sentence."""
        self.fail: Callable[[BaseException], object] = lambda error: None
        """Fails the cells of this process."""
        self.settings = ""
        """Text that is the same on all ranks, when they make the pipeline."""
        self.receivers: Sequence[Receiver] = ()
        """Of all messages between stages, when the ranks make the pipeline."""

    def limit(self, timeout: float | None) -> None:
        """Set the timeout of the step, unless it is None."""
        expect_timeout("timeout", timeout)
        if timeout is not None:
            self.timeout, self.deadline = timeout, time.monotonic() + timeout

    def share(self, rows: int | None) -> int:
        """Return the rows of the mini-batch, which the process of stage 0 gives; the others give None."""
        assert rows is not None
        return rows

    def wait(self, future: CUDAFuture[T]) -> T:
        """Wait for a future; raise TimeoutError at the deadline of the step."""
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        return future.wait(non_blocking=True, timeout=left)

    def send(self, key: tuple[Any, ...], message: StageMessage, failed: Callable[[BaseException], object]) -> None:
        """Send a message to a stage of another process."""
        raise AssertionError(f"the receiver of {key} is in this process")

    def stop(self) -> None:
        """Stop the cells of the other processes, since a cell of this one has failed."""


class Alone:
    """Pipeline in one process."""

    rank, size = 0, 1
    group = broken = None

    def making(self) -> AbstractContextManager[SharedStep]:
        """Return the scope in which the pipeline is made."""
        return nullcontext(SharedStep(_NoLink(), None))

    @contextmanager
    def step(self, kind: str, link: Link) -> Iterator[SharedStep]:
        """Return the scope of a step."""
        yield SharedStep(link, None)

    def abandon(self, error: BaseException) -> None:
        """Let no rank wait for this one any more, of which there are none."""

    def close(self) -> None:
        """Close the connection to the others, of which there are none."""

    leave = close


class _MessageKind(IntEnum):
    BEGIN = 0
    STOP = 1
    END = 2
    VERDICT = 3
    ASK = 4
    ANSWER = 5
    ABANDON = 6
    LEAVE = 7
    FIRST_KEY = 8  # the messages of the stages have the channels from here on


class _StepFailure(NamedTuple):
    """Error of a rank, as the others get it."""

    rank: int
    type_name: str
    text: str
    traceback: str
    is_difference: bool = False
    """The rank has other settings than the first one."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> _StepFailure:
        try:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            trace = "".join(traceback.format_exception(error))
        except Exception:  # of its __str__
            text, trace = "it has no text", ""
        return cls(rank, type(error).__qualname__, text, trace)

    def sentence(self, noun: str) -> str:
        return f"{noun} {self.rank} of the pipeline raised {self.type_name}: {self.text}"

    def error(self, noun: str) -> RemoteError | WorkerLostError:
        if self.type_name == WorkerLostError.__qualname__:
            return WorkerLostError(self.sentence(noun), worker=f"{noun} {self.rank}")
        return RemoteError(
            self.sentence(noun),
            type_name=self.type_name,
            remote_traceback=self.traceback,
            worker=f"{noun} {self.rank}",
        )


class _Structure:
    """Structure of a value. It is pickled as such a value, since torch's TreeSpec warns when it is unpickled."""

    def __init__(self, spec: _pytree.TreeSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _structure_of, (_pytree.tree_unflatten(range(self.spec.num_leaves), self.spec),)


def _structure_of(value: Any) -> _Structure:
    return _Structure(_pytree.tree_flatten(value)[1])


class RankStep(SharedStep):
    """One step, as this rank shares it with the others. Messages of it may come before this rank begins it."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self.number = ranks, number
        self.kind = ""  # "": this rank has not begun the step
        self.early: list[Message] = []
        self.is_stopped = False
        self.has_ended = False  # this rank
        self.begun: CUDAFuture[tuple[str, int]] = CUDAFuture(name=f"rows of step {number}")
        self.ends: dict[int, tuple[_StepFailure | None, str]] = {}  # by rank; on rank 0 only
        self.all_ended: CUDAFuture[None] = CUDAFuture(name=f"ends of step {number} on all ranks")
        self.verdict: CUDAFuture[list[_StepFailure]] = CUDAFuture(name=f"verdict of step {number}")
        self.answers: dict[int, str] = {}
        self.has_asked = False
        self.describe = lambda: "has not begun its cells"

    def enter(self, kind: str, link: Link, timeout: float) -> None:
        super().__init__(link, timeout)
        self.kind = kind

    def share(self, rows: int | None) -> int:
        if rows is not None:
            self._ranks.send_to_all(_MessageKind.BEGIN, self.number, (self.kind, rows))
            return rows
        self.describe = lambda: "waits for the rank of stage 0 to begin the step"
        kind, rows = self.wait(self.begun)
        if kind != self.kind:
            raise InvalidStateError(
                f"rank {self._ranks.rank} is in a {self.kind} of the pipeline, but the rank of stage 0 in a {kind}"
            )
        return rows

    def wait(self, future: CUDAFuture[T]) -> T:
        assert self.deadline is not None
        assert self.timeout is not None
        asking = min(_ANSWER_SHARE * self.timeout, _LONGEST_ANSWER)
        left = self.deadline - asking - time.monotonic()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                return future.wait(non_blocking=True, timeout=left)
        if not future.done():
            self.has_asked = True
            self._ranks.send_to_all(_MessageKind.ASK, self.number)
        return super().wait(future)

    def wait_unless_over(self, future: CUDAFuture[T]) -> T:
        """Wait for a future that a lost rank would leave pending; raise LinkClosedError if one is lost meanwhile."""
        assert self.deadline is not None
        pending: list[CUDAFuture[Any]] = [future, self.verdict]
        wait(pending, max(0.0, self.deadline - time.monotonic()), "FIRST_COMPLETED")
        if self.verdict.done() and not future.done():
            raise LinkClosedError
        return self.wait(future)

    def send(self, key: tuple[Any, ...], message: StageMessage, failed: Callable[[BaseException], object]) -> None:
        self._ranks.send(self.number, key, message, failed)

    def stop(self) -> None:
        self._ranks.send_to_all(_MessageKind.STOP, self.number)

    def close(self, is_over: bool) -> None:
        """Wake the threads of this rank that wait for messages; if the step is over, all of its threads that wait."""
        if self.kind:
            self.link.close()
        for future in (self.begun, self.all_ended, self.verdict) if is_over else (self.begun,):
            with contextlib.suppress(InvalidStateError):  # done
                future.set_exception(LinkClosedError())
                future.exception()  # so that it is not logged as one that no thread has seen

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not answered."""
        return [r for r in range(self._ranks.size) if r != self._ranks.rank and r not in self.answers]


class Ranks:
    """The processes of a group, each of which runs the row of its rank.

    Args:
        group: a process group; its timeout is that of steps without one.
        noun: for a process in messages.
    """

    def __init__(self, group: Any, noun: str = "rank") -> None:
        self._noun = noun
        self._lock = threading.RLock()  # guards the fields below
        self._steps: dict[int, RankStep] = {}
        self._number = 0  # of the step that this rank runs, or begins next
        self._broken: BaseException | None = None
        self._is_told = False  # by another rank
        self._is_raised = False  # in the program
        self._has_abandoned = False  # this rank has told the others so
        self._is_closed = False
        self._gone: dict[int, BaseException] = {}  # by the first step in which a rank takes no part
        self._process = os.getpid()
        self._receivers: list[Receiver] = []
        self.group = group
        self._mailbox = Mailbox(group)
        self.rank, self.size, self._timeout = self._mailbox.rank, self._mailbox.size, self._mailbox.timeout
        self._channels: dict[tuple[Any, ...], int] = {}
        self._mailbox.open(self._deliver, self._lose)
        _all.add(self)

    @contextmanager
    def making(self) -> Iterator[SharedStep]:
        """Return the scope in which all ranks make the same pipeline, or none.

        Raises:
            ValueError: another rank could not make it, or has other settings.
        """
        with self._shared("pipeline", _NoLink()) as step:
            yield step
            self._receivers = list(step.receivers)
            self._channels = {each.key: _MessageKind.FIRST_KEY + i for i, each in enumerate(self._receivers)}

    def step(self, kind: str, link: Link | None) -> AbstractContextManager[RankStep]:
        """Return the scope of a step, which all ranks enter; without a link they exchange no messages of stages.

        Raises:
            RemoteError: a cell of another rank failed.
            WorkerLostError: a rank is lost.
            TimeoutError: it has not ended in time, on some rank.
            InvalidStateError: an earlier step was abandoned.
        """
        return self._shared(kind, _NoLink() if link is None else link)

    @property
    def broken(self) -> BaseException | None:
        """The reason that these ranks cannot go on together; None: they can."""
        return self._broken

    def abandon(self, error: BaseException) -> None:
        """Let no rank wait for this one any more; do nothing if one has done so, or the pipeline is closed."""
        with self._lock:
            if self._broken is not None or self._is_closed or os.getpid() != self._process:
                return
            number = self._number
            self._break(error)
            self._is_raised = self._has_abandoned = True
        self._send_abandon(number, error)

    def close(self) -> None:
        """Close the pipeline on this rank: it takes part in no further step. Block until its last messages are sent."""
        if self._broken is None and not self._is_closed and os.getpid() == self._process:
            self._mailbox.flush(range(self.size), _PATIENCE)  # the verdict of the last step, too
        self.leave()

    def leave(self) -> None:
        """Close the pipeline without blocking. In a forked process nothing happens."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        with contextlib.suppress(InvalidStateError):
            self.send_to_all(_MessageKind.LEAVE, self._number)
        self._mailbox.close()

    # ---- a step on this rank

    @contextmanager
    def _shared(self, kind: str, link: Link) -> Iterator[RankStep]:
        step = self._enter(kind, link)
        error: BaseException | None = None
        try:
            try:
                yield step
            except BaseException as raised:
                error = raised
            failures = self._end(step, error)
        except BaseException as raised:  # the ranks cannot go on together
            broken = self._broken  # by another rank, which knows why this one waited in vain
            error = broken if broken is not None and isinstance(raised, (LinkClosedError, TimeoutError)) else raised
            self._abandon(step, error)
            raise error from None
        finally:
            with self._lock:
                self._steps.pop(step.number, None)
                self._number = step.number + 1
        if error is not None and not isinstance(error, LinkClosedError):
            raise error
        if failures:
            first, *others = failures
            noun = self._noun
            raised_here: Any = first.error(noun) if kind != "pipeline" else ValueError(first.sentence(noun))
            if first.is_difference:
                raised_here = ValueError(first.text)
            if hasattr(raised_here, "add_note"):
                for other in others:
                    raised_here.add_note(f"then {noun} {other.rank}: {other.type_name}: {other.text}")
            raise raised_here
        if error is not None:
            raise error

    def _enter(self, kind: str, link: Link) -> RankStep:
        with self._lock:
            if self._is_closed:
                raise InvalidStateError("the pipeline is closed")
            if os.getpid() != self._process:
                raise InvalidStateError("the pipeline belongs to the process that this one was forked from")
            for number, gone in self._gone.items():
                if number <= self._number:
                    self._break(gone)
            if self._broken is not None and not self._is_raised:
                self._is_raised = True
                raise self._broken
            if self._broken is not None:
                raise InvalidStateError(
                    f"the ranks of this pipeline cannot go on together: make another group and another pipeline. "
                    f"What happened: {self._broken}"
                ) from self._broken
            step = self._step(self._number)
            step.enter(kind, link, self._timeout)
            if step.is_stopped:
                step.close(is_over=False)
            early, step.early = step.early, []
            for message in early:
                self._pass_on(step, message)
        return step

    def _end(self, step: RankStep, error: BaseException | None) -> list[_StepFailure]:
        """Wait until all ranks have ended the step, and return their failures."""
        if self._broken is not None:
            raise self._broken
        if isinstance(error, TimeoutError) and step.deadline is not None and time.monotonic() >= step.deadline:
            raise error
        failure = None
        if error is not None and not isinstance(error, LinkClosedError):
            step.stop()
            failure = _StepFailure.of(self.rank, error)
        step.describe = lambda: "has ended its cells, and waits for the other ranks"
        with self._lock:
            step.has_ended = True
        if self.rank == 0:
            self._note_end(step, 0, (failure, step.settings))
            step.wait(step.all_ended)
            failures = self._failures_of(step)
            self.send_to_all(_MessageKind.VERDICT, step.number, failures)
            return failures
        self._mailbox.send(0, _MessageKind.END, (step.number, 0), body=(failure, step.settings))
        return step.wait(step.verdict)

    def _failures_of(self, step: RankStep) -> list[_StepFailure]:
        found = [failure for _, (failure, _) in sorted(step.ends.items()) if failure is not None]
        if not found:
            own = step.ends[0][1]
            for rank, (_, settings) in sorted(step.ends.items()):
                if settings != own:
                    text = f"{self._noun} 0 makes {own}\nbut {self._noun} {rank} makes {settings}"
                    return [_StepFailure(rank, "ValueError", text, "", is_difference=True)]
        return found

    def _abandon(self, step: RankStep, error: BaseException) -> None:
        """Let no rank wait for this one any more; add to the error what the others said."""
        with self._lock:
            self._break(error)
            self._is_raised = True
            if self._is_told or self._has_abandoned:
                return
            self._has_abandoned = True
        if isinstance(error, TimeoutError) and step.has_asked:
            error.args = (f"{error}\n{self._answers_of(step)}",)
        self._send_abandon(step.number, error)
        awake = step.answers if isinstance(error, TimeoutError) else range(self.size)
        self._mailbox.flush(awake, _PATIENCE)

    def _send_abandon(self, number: int, error: BaseException) -> None:
        kind = "WorkerLostError" if isinstance(error, WorkerLostError) else type(error).__qualname__
        text = _StepFailure.of(self.rank, error).text
        with contextlib.suppress(InvalidStateError):  # closed, or in a forked process
            self.send_to_all(_MessageKind.ABANDON, number, (kind, text, getattr(error, "worker", "")))

    def _answers_of(self, step: RankStep) -> str:
        with self._lock:
            lines = [f"{self._noun} {rank} {answer}" for rank, answer in sorted(step.answers.items())]
            lines += [f"{self._noun} {rank} does not answer: it is stopped, or dead" for rank in step.silent_ranks()]
        return "\n".join([f"{self._noun} {self.rank} {step.describe()}", *lines])

    # ---- messages

    def send_to_all(self, channel: int, number: int, body: Any = None) -> None:
        """Send a message to all other ranks."""
        for rank in range(self.size):
            if rank != self.rank:
                self._mailbox.send(rank, channel, (number, 0), body=body)

    def send(
        self, number: int, key: tuple[Any, ...], message: StageMessage, failed: Callable[[BaseException], object]
    ) -> None:
        """Send a message to a stage, after the work that is enqueued on the current streams."""
        *name, microbatch = key
        channel = self._channels[tuple(name)]
        are_tensors = [isinstance(leaf, torch.Tensor) for leaf in message.leaves]
        tensors: Any = [leaf for leaf in message.leaves if isinstance(leaf, torch.Tensor)]
        expect_sendable(tensors)
        others = [leaf for leaf in message.leaves if not isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            tensors = copy(tensors, "cpu")
        self._mailbox.send(
            self._receivers[channel - _MessageKind.FIRST_KEY].rank,
            channel,
            (number, microbatch),
            layout=(_Structure(message.structure), message.indices, message.needs_gradient, are_tensors),
            body=others if any(other is not None for other in others) else None,
            tensors=tensors,
            failed=failed,
        )

    def _deliver(self, rank: int, message: Message) -> None:
        channel, (number, _) = message.channel, message.numbers
        with self._lock:
            if channel >= _MessageKind.FIRST_KEY:
                if number >= self._number:  # of a step that this rank has not ended
                    self._pass_on(self._step(number), message)
                return
            if channel == _MessageKind.LEAVE:
                one = f"{self._noun} {rank}"
                self._goes(number, WorkerLostError(f"{one} has closed its pipeline", worker=one))
                return
            if channel == _MessageKind.ASK:
                with contextlib.suppress(InvalidStateError):  # closed
                    self._mailbox.send(rank, _MessageKind.ANSWER, (number, 0), body=self._answer(number))
                return
            if channel == _MessageKind.ABANDON:
                self._is_told = self._is_told or self._broken is None
                self._break(_abandoned_by(f"{self._noun} {rank}", number, *message.body))
            if number < self._number or channel == _MessageKind.ABANDON:
                return  # of a step that this rank has ended
            step = self._step(number)
            if channel == _MessageKind.BEGIN:
                with contextlib.suppress(InvalidStateError):  # stopped already
                    step.begun.set_result(message.body)
            elif channel == _MessageKind.STOP:
                step.is_stopped = True
                step.close(is_over=False)
            elif channel == _MessageKind.END:
                self._note_end(step, rank, message.body)
            elif channel == _MessageKind.VERDICT:
                with contextlib.suppress(InvalidStateError):  # abandoned already
                    step.verdict.set_result(message.body)
            elif channel == _MessageKind.ANSWER:
                step.answers[rank] = message.body

    def _pass_on(self, step: RankStep, message: Message) -> None:
        """Give a message for a stage of this rank to the link."""
        if not step.kind:
            step.early.append(message)
            return
        receiver = self._receivers[message.channel - _MessageKind.FIRST_KEY]
        structure, indices, needs_gradient, are_tensors = message.layout
        tensors, others = iter(message.tensors), iter(message.body or ())
        leaves = [next(tensors) if is_tensor else next(others, None) for is_tensor in are_tensors]
        assert receiver.device is not None
        header = structure.spec, indices, needs_gradient
        try:
            step.link.send((*receiver.key, message.numbers[1]), leaves, receiver.device, header)
        except LinkClosedError:
            return
        except Exception as error:  # of a copy to the device
            step.fail(error)

    def _note_end(self, step: RankStep, rank: int, end: tuple[_StepFailure | None, str]) -> None:
        with self._lock:
            step.ends[rank] = end
            if len(step.ends) < self.size:
                return
        with contextlib.suppress(InvalidStateError):  # abandoned already
            step.all_ended.set_result(None)

    def _answer(self, number: int) -> str:
        step = self._steps.get(self._number)
        if self._number < number or step is None or not step.kind:
            return f"has not begun step {number}"
        if self._number > number:
            return f"has ended step {number}"
        return step.describe()

    def _lose(self, rank: int, error: BaseException | None) -> None:
        if error is None:
            return  # it has sent LEAVE
        one = f"{self._noun} {rank}"
        text = f"{one} of the pipeline is lost: it has died or ended, or the network has: {error}"
        if isinstance(error, CUDAFutureError):  # a message that cannot be read
            text = str(error)
        lost = WorkerLostError(text, worker=one)
        with self._lock:
            step = self._steps.get(self._number)
            has_ended = step is not None and step.has_ended and (rank in step.ends if self.rank == 0 else rank != 0)
            self._goes(self._number + has_ended, lost)  # if it has ended the step, too, or rank 0 finds out

    def _goes(self, number: int, error: BaseException) -> None:
        """Record that a rank takes no part in steps from a number on."""
        step = self._steps.get(self._number)
        if number <= self._number and step is not None and step.kind:
            self._break(error)
        else:
            self._gone.setdefault(number, error)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            for step in self._steps.values():
                step.close(is_over=True)

    def _step(self, number: int) -> RankStep:
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = RankStep(self, number)
        return step


@atexit.register
def _close_all() -> None:
    """Send the last messages of pipelines that the program has not closed."""
    for ranks in list(_all):
        ranks.close()


def _abandoned_by(who: str, number: int, kind: str, text: str, worker: str) -> BaseException:
    message = f"{who} has abandoned step {number}: {text}"
    if kind == "WorkerLostError":
        return WorkerLostError(message, worker=worker)
    if kind == "TimeoutError":
        return TimeoutError(message)
    return RemoteError(message, type_name=kind, worker=who)

"""Issue of a collective: find its issuer, number it, call torch, follow the Work.

::

    collectives.broadcast(t, src=0)
        begin(BROADCAST, group, (t,))         finds the issuer and the sequence number
        Issue.run(function, value, (t,))      function(t, group=...) -> Work -> CUDAFuture[value]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from cudafuture import _C, ownership
from cudafuture._tensors import find_tensors
from cudafuture.config import config
from cudafuture.distributed import _gloo, _order, _staged
from cudafuture.distributed._flight_recorder import record_collective
from cudafuture.distributed._group import Group, Issuer, group_of, groups, rank_in, resolve
from cudafuture.distributed._monitored_barrier import Deadline
from cudafuture.distributed._operations import DistributedOperation, Layout
from cudafuture.distributed._order_entry import text_of
from cudafuture.distributed._staging_buffers import each
from cudafuture.errors import CollectiveError, InvalidStateError, TensorSearchError
from cudafuture.transfer import are_dense

__all__ = [
    "NO_PEER",
    "Issue",
    "begin",
    "begin_beside",
    "begin_in_queue",
    "nothing",
]

NO_PEER = -1
T = TypeVar("T")
_world = dist.distributed_c10d._world
_new: Any = tuple.__new__
_coalesced = _world.pg_coalesce_state  # the groups whose operations torch's coalescing manager collects now
_compares_order = config.debug_order
_checks_ownership = config.debug_ownership


class Issue(NamedTuple):
    """One operation that this rank issues. `begin` creates it: a call of the class costs more than the rest of it."""

    operation: DistributedOperation
    group: Group
    issuer: Issuer
    sequence: int
    tensors: tuple[Any, ...]  # shapes and dtypes only: futures may live long
    is_staged: bool  # the tensors go through the host

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every given tensor, in order."""
        return tuple(tuple(shape) for shape, _ in _flat(self.tensors))

    @property
    def signature(self) -> str:
        """The given tensors, as ``float32[4, 2]``."""
        return ", ".join(text_of(facts) for facts in self.tensors)

    def __str__(self) -> str:
        beside = f" in serial queue '{self.issuer.queue}'" if self.issuer.queue is not None else ""
        tensors = f" of {self.signature}" if self.tensors else ""
        group = self.group
        return (
            f"{self.operation.name} #{self.sequence}{beside} on group '{group.name}', rank {group.rank} of {group.size}"
            f"{tensors}"
        )

    def error(self, cause: BaseException) -> BaseException:
        """Return the error of the future for the `cause` that torch reports; the native module calls this too."""
        cause = _unmasked(cause)
        if isinstance(cause, CollectiveError) or not isinstance(cause, RuntimeError):
            return cause
        group = self.group
        why = str(cause).strip() or type(cause).__name__
        if _gloo.failures:
            why += (
                ". Before that, Gloo received a message of an unexpected size, and its thread ended: the ranks did "
                f"not all give tensors of the same shape and dtype. Gloo reported: {_gloo.failures[-1]}"
            )
        error = CollectiveError(
            f"{self}: {why}",
            operation=self.operation.name,
            group=group.name,
            rank=group.rank,
            sequence=self.sequence,
            shapes=self.shapes,
        )
        error.__cause__ = cause
        return error

    def run(
        self,
        process_group: dist.ProcessGroup,
        function: Callable[..., Any],
        value: T,
        tensors: tuple[Any, ...] = (),
        roles: str = "",
        peer: int = NO_PEER,
    ) -> _Future[T]:
        """Issue the operation: call `function` with `tensors` and ``group=``; it returns a Work.

        The future completes with `value`. `roles` are those of :class:`DistributedOperation`. For tensors that go
        through the host, `function` gets their staging buffers.
        """
        if self.group.is_broken:
            return self.refused(RuntimeError("the group's Gloo thread has ended; create a new group"))
        if self.is_staged:
            future = _staged.run(self, process_group, function, value, tensors, roles)
            return self.shown(process_group, future, function, roles)
        try:
            work = function(*tensors, group=self.issuer.process_group or process_group)
        except BaseException as e:
            return self.refused(e)
        return self.follow(process_group, work, value, tensors, function, roles, peer)

    def place_of(self, peer: int) -> tuple[_C.OperationPlace | None, int]:
        """Return the place of the operation, and its number there; -1: none, since messages have no common order."""
        return (self.issuer.place, self.sequence) if peer == NO_PEER else (self.group.messages, -1)

    def choose_root(
        self, process_group: dist.ProcessGroup, rank: int | None, group_rank: int | None, options: dict[str, Any]
    ) -> bool:
        """Put the root, a rank in the group, into the options for torch; return True if this rank is the root.

        Raises:
            ValueError: no such rank. The count is undone, since nothing was issued.
        """
        operation = self.operation
        assert operation.root is not None
        try:
            root = rank_in(process_group, rank, group_rank, operation.root, operation.default_root)
        except BaseException:
            self.issuer.issued -= 1
            raise
        options[f"group_{operation.root}"] = root
        return root == process_group.rank()

    def expect_storages(self, value: object) -> None:
        """Raise TensorError, and undo the count, if the storage of a tensor in `value` was freed or shrunk."""
        try:
            with contextlib.suppress(TensorSearchError):  # a value that is too large to search
                for tensor in find_tensors(value):
                    _C.expect_storage(tensor)
        except BaseException:
            self.issuer.issued -= 1
            raise

    def follow(
        self,
        process_group: dist.ProcessGroup,
        work: Any,
        value: T,
        tensors: object,
        function: Callable[..., Any] | None = None,
        roles: str = "",
        peer: int = NO_PEER,
    ) -> _Future[T]:
        """Return the future of the issued Work, which keeps `tensors` while a device uses them.

        `peer`: of a message: the rank of its other end in the group.
        """
        operation, group, issuer, number, facts, _ = self
        record_collective(operation, roles or operation.roles, group, issuer, number, facts)
        place = issuer.place  # as place_of() does, without a call
        if peer != NO_PEER:
            place, number = self.place_of(peer)
        future: _Future[T] = _C.collective(
            work,
            value,
            operation.name,
            group.callbacks,
            self,
            group.timeout,
            place,
            number,
            group.backends,
            tensors,
            peer,
        )
        if _checks_ownership:
            result: _Future[T] = _C.issued(self.operation.name, group.callbacks, self)
            future = ownership.checked_in_place(future, self.operation.name, find_tensors(tensors), result)
        return self.shown(process_group, future, function, roles) if _compares_order else future

    def shown(
        self,
        process_group: dist.ProcessGroup,
        future: _Future[T],
        function: Callable[..., Any] | None,
        roles: str,
    ) -> _Future[T]:
        """Return the future, or one that also waits until all ranks have shown that they issued the same operation."""
        return _order.checked(future, self, process_group, function, roles) if _compares_order else future

    def refused(self, cause: BaseException) -> _Future[Any]:
        """Return a failed future if the backend refused; raise errors of the arguments, since nothing was issued."""
        cause = _unmasked(cause)
        if not isinstance(cause, RuntimeError):
            self.issuer.issued -= 1
            raise cause
        future: _Future[Any] = _C.issued(self.operation.name, self.group.callbacks, self)
        error = self.error(cause)
        if _compares_order:
            _order.refusals.add(error)
        future.set_exception(error)
        return future

    def run_in_queue(self, process_group: dist.ProcessGroup, function: Callable[..., object], value: T) -> _Future[T]:
        """Issue an operation that blocks: call `function` on a library thread, after those issued before it."""
        group = self.group
        compared = _order.queued(self, function) if _compares_order else None

        def call_on_side_group(queue: str) -> None:
            issuer = group.side_group(process_group, queue)
            assert issuer.process_group is not None
            if compared is not None:
                compared.show(issuer, process_group, issuer.issued)
            issuer.issued += 1
            function(group=issuer.process_group)

        future = self._run_behind(group.objects, call_on_side_group, value)
        return future if compared is None else compared.follow(future)

    def run_monitored_barrier(
        self, process_group: dist.ProcessGroup, deadline: Deadline, wait_all_ranks: bool
    ) -> _Future[None]:
        """Enter the group's next monitored barrier on a library thread.

        Only other monitored barriers can delay it, and each of them ends at its own deadline.
        """
        group = self.group

        def enter(queue: str) -> None:
            group.monitored_barrier(process_group, queue).enter(deadline, wait_all_ranks)

        return self._run_behind(group.barriers, enter, None)

    def _run_behind(self, queue: _C.HostExecutor, call: Callable[[str], object], value: T) -> _Future[T]:
        """Run `call`, which blocks and takes the name of its serial queue, after the operations in that queue."""
        group = self.group
        future: _Future[T] = _C.issued(
            self.operation.name, group.callbacks, self, _C.OperationPlace.find("group", group.name), self.sequence
        )

        def run() -> None:
            try:
                name = _C.issuing_serial_queue(queue)
                assert name is not None
                if group.is_broken:
                    raise RuntimeError("the group's Gloo thread has ended; create a new group")
                _C.set_leavable(True)  # the blocking call cannot be interrupted
                call(name)
            except BaseException as e:
                future.set_exception(self.error(e))
            else:
                future.set_result(value)
            finally:
                _C.set_leavable(False)

        def fail_if_not_run(run: _Future[Any]) -> None:
            error = run.exception()
            if error is not None and not future.done():  # for example, no thread was left, or the process is exiting
                future.set_exception(self.error(error))

        _C.submit(run, queue, 0, self.operation.name).add_done_callback(fail_if_not_run, executor=_C.inline_executor)
        return future


_Future = _C.CUDAFuture


def begin(
    operation: DistributedOperation, group: Any, tensors: tuple[Any, ...], on_device: bool | None = None
) -> tuple[Issue, dist.ProcessGroup] | None:
    """Begin an operation on `group`; return None if this rank is not in it.

    `on_device`: True if an operation without tensors runs on a device; None: if the group has no host backend.

    Raises:
        TensorError: the storage of a tensor was freed or shrunk.
        ValueError: a tensor is not contiguous, or is a conjugated or negated view.
        InvalidStateError: issued by a callback that has no order among the callbacks of the other ranks, or inside
            torch's coalescing manager.
        CollectiveError: issued by a callback, and its side group could not be created; or over NCCL, and the callbacks
            before it have not run.
    """
    process_group: Any = _world.default_pg if group is None else group
    known = groups.get(id(process_group))
    if known is None:
        process_group = resolve(group)
        if process_group is None:
            return None
        state = group_of(process_group)
    else:
        state = known[1]
    queue = _C.issuing_serial_queue(state.callbacks)
    first = tensors[0] if len(tensors) == 1 else None
    if (
        isinstance(first, torch.Tensor)
        and (first.is_cpu or (first.is_cuda and state.has_nccl))
        and _C.has_contiguous_memory(first)
    ):
        facts: Any = ((first.shape, first.dtype),)  # without a function call: nearly every operation takes this path
        is_staged = False
        over_nccl = not first.is_cpu
    else:
        facts = tuple([_facts(t, operation, process_group) for t in tensors])
        is_staged = _staged.is_staged(state, process_group, operation, tensors)
        over_nccl = state.has_nccl and _is_over_nccl(state, tensors, on_device)
    issuer = state.program
    if over_nccl or queue is not None:
        issuer = state.issuer(process_group, operation.name, queue, over_nccl=over_nccl, connected=not is_staged)
    if _coalesced:  # in the place of this operation, after those that callbacks issue before it
        _refuse_coalesced(operation, process_group)
    sequence = issuer.issued
    issuer.issued = sequence + 1
    return _new(Issue, (operation, state, issuer, sequence, facts, is_staged)), process_group


def begin_in_queue(operation: DistributedOperation, group: Any) -> tuple[Issue, dist.ProcessGroup] | None:
    """Begin an operation that runs in its own serial queue (`Issue.run_in_queue`), on a side group."""
    begun = begin_beside(operation, group, ())
    if begun is not None:
        _C.issuing_serial_queue(begun[0].group.callbacks)  # raises if there is no order
    return begun


def begin_beside(
    operation: DistributedOperation, group: Any, tensors: tuple[Any, ...]
) -> tuple[Issue, dist.ProcessGroup] | None:
    """Begin an operation that is matched by its peer and its tag, and needs no order."""
    _C.refuse_after_fork()
    process_group = resolve(group)
    if process_group is None:
        return None
    state = group_of(process_group)
    facts = tuple([_facts(t, operation, process_group) for t in tensors])
    is_staged = _staged.is_staged(state, process_group, operation, tensors)
    if tensors and state.has_nccl and _is_over_nccl(state, tensors, None):
        state.wait_for_issue_order(operation.name, _C.issuing_serial_queue(state.callbacks))
    if _coalesced:
        _refuse_coalesced(operation, process_group)
    sequence = state.beside.issued
    state.beside.issued = sequence + 1
    return Issue(operation, state, state.beside, sequence, facts, is_staged), process_group


def _refuse_coalesced(operation: DistributedOperation, process_group: dist.ProcessGroup) -> None:
    """Raise inside torch's coalescing manager, where only the Work of the manager tells when operations are done."""
    if process_group in _coalesced:
        raise InvalidStateError(
            f"{operation.name}() was called inside torch's coalescing manager, whose operations start together at its "
            "end: call torch's own function there, and give the manager's Work to CUDAFuture.from_torch()"
        )


def _is_over_nccl(state: Group, tensors: tuple[Any, ...], on_device: bool | None) -> bool:
    if not tensors:
        return state.has_nccl_only if on_device is None else on_device
    return any(tensor.device.type in state.nccl_devices for tensor in each(tensors))


def _unmasked(error: BaseException) -> BaseException:
    """Return the error that torch tried to log when it found that it does not know the group."""
    while isinstance(error, ValueError) and "world group map" in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def nothing() -> _Future[Any]:
    """Return the completed future that a rank outside of the group gets."""
    return _C.CUDAFuture.completed(None)


def _facts(tensors: Any, operation: DistributedOperation, process_group: dist.ProcessGroup) -> Any:
    """Return shape and dtype of each tensor; None for other arguments, which torch rejects.

    Raises:
        TensorError: the storage of a tensor was freed or shrunk.
        ValueError: a tensor is not contiguous, or is a conjugated or negated view, and the backend would use its memory
            as if it were the tensor.
    """
    if isinstance(tensors, torch.Tensor):
        is_plain = _C.has_contiguous_memory(tensors) or tensors.layout is not torch.strided
        if not is_plain and (tensors.is_conj() or tensors.is_neg()):
            view, remedy = ("conjugated", "resolve_conj()") if tensors.is_conj() else ("negated", "resolve_neg()")
            raise ValueError(
                f"{operation.name}() would use the memory of a {view} view of shape {list(tensors.shape)} as it is; "
                f"give it tensor.{remedy}, and copy the result back"
            )
        if not (is_plain or _is_fit(tensors, operation, process_group)):
            raise ValueError(
                f"{operation.name}() needs contiguous tensors, but one of shape {list(tensors.shape)} has the strides "
                f"{list(tensors.stride())}; give it tensor.contiguous(), and copy the result back"
            )
        return tensors.shape, tensors.dtype
    if isinstance(tensors, (list, tuple)):
        return [_facts(t, operation, process_group) for t in tensors]
    return None


def _is_fit(tensor: torch.Tensor, operation: DistributedOperation, process_group: dist.ProcessGroup) -> bool:
    """Return True if the operation is correct for a tensor that is not contiguous."""
    if operation.layout is Layout.ANY_OVER_GLOO:
        return _staged.is_over_gloo(process_group, tensor.device)
    return operation.layout is Layout.DENSE and are_dense(tensor)


def _flat(facts: Iterable[Any]) -> Iterable[tuple[torch.Size, torch.dtype]]:
    for one in facts:
        if isinstance(one, list):
            yield from _flat(one)
        elif one is not None:
            yield one

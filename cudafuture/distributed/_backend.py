"""The c10d backend "cudafuture": groups whose Works are futures, for programs that call torch.distributed itself.

::

    dist.init_process_group("cudafuture")         _create, which torch calls     (cudafuture_c10d)
        create(wanted, options)                   the wrapped backends           (this file)
            FutureBackend(rank, size, ...)        forwards every operation       (_c10d/backend.h)
    dist.all_reduce(t, async_op=True)             FutureWork                     (_c10d/work.h)
        .then(f)                                  make_future(work), once        (this file)

With CUDAFUTURE_DEBUG=order FutureBackend calls compare(), which issues the operation, and makes its future at once.
While a trace is recorded it calls trace() behind the issue, which makes the future at once as well.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from cudafuture import _C, streams
from cudafuture._c10d import FutureBackend, FutureWork
from cudafuture._frames import is_called_from
from cudafuture.config import config
from cudafuture.distributed import _operations, _order
from cudafuture.distributed._backend_options import BackendOptions, name_of
from cudafuture.distributed._group import group_of, resolve
from cudafuture.distributed._issue import Issue
from cudafuture.distributed._operations import RECV, SEND
from cudafuture.distributed._order_entry import text_of
from cudafuture.distributed._order_messages import End, checked_messages
from cudafuture.distributed._side_group import make_by_plugin
from cudafuture.distributed.point_to_point import Received, with_sender

__all__ = [
    "compare",
    "compare_message",
    "create",
    "group_of_backend",
    "make_future",
    "place_of_works",
    "route",
    "trace",
    "wait_compared",
    "wrap",
]

_OPERATIONS = {
    operation.name: operation
    for operation in vars(_operations).values()
    if isinstance(operation, _operations.DistributedOperation)
}
FutureBackend._compare_order(config.debug_order)
_COALESCED = _operations.DistributedOperation("coalesced", c10d._coalescing_manager)
_HERE = Path(__file__).parent
_making = threading.RLock()  # a finalizer may ask for a future, too
T = TypeVar("T")
_groups: dict[int, weakref.ref[Any]] = {}  # by the number of the backend
_wrapped: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()  # by name, from wrap()


def create(wanted: _DistributedBackendOptions, options: Any) -> FutureBackend:
    """Return the backend of a new group; torch calls this.

    Args:
        wanted: the group, as torch describes it.
        options: BackendOptions; the options of one wrapped backend, which then carries its own devices; or None.

    Raises:
        TypeError: other options.
        ValueError: a wrapped backend is "cudafuture" itself, or torch does not have it.
    """
    choices = BackendOptions.of(options).choices
    if dist.group.WORLD is None:  # it will be the default group; for those who ask before its first operation
        _C.set_rank(wanted.group_rank, wanted.group_size)
    made: dict[Any, Any] = {}  # one backend for all devices with the same choice
    inner = []
    for device, choice in choices.items():
        key = choice if isinstance(choice, str) else id(choice)
        if key not in made:
            made[key] = _make(choice, PrefixStore(f"{device}/", wanted.store), wanted)
        inner.append((device, made[key]))
    return FutureBackend(wanted.group_rank, wanted.group_size, inner, is_owner=True, name=wanted.group_id)


def _make(choice: Any, store: Store, wanted: Any) -> Any:
    """Return a backend to wrap, made as torch makes it for a group of its own."""
    name, options = name_of(choice), None if isinstance(choice, str) else choice
    rank, size, timeout = wanted.group_rank, wanted.group_size, wanted.timeout
    if name == "gloo":
        if not dist.is_gloo_available():
            raise ValueError("the backend cudafuture cannot wrap gloo, which this build of torch does not have")
        backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend.options.global_ranks_in_group = wanted.global_ranks_in_group
        backend.options.group_name = wanted.group_id
        backend._set_sequence_number_for_group()
        return backend
    if name == "nccl":
        if not dist.is_nccl_available():
            raise ValueError("the backend cudafuture cannot wrap nccl, which this build of torch does not have")
        options = dist.ProcessGroupNCCL.Options() if options is None else options
        options._timeout = timeout
        default = dist.group.WORLD
        split_from = c10d._get_split_source(default) if default is not None and default.bound_device_id else None
        if split_from is not None:
            options.split_from = split_from
            options.split_color = c10d._process_group_color(wanted.global_ranks_in_group)
        options.global_ranks_in_group = wanted.global_ranks_in_group
        options.group_name = wanted.group_id
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        return backend
    if name == "cudafuture" or name.upper() not in dist.Backend._plugins:
        raise ValueError(f"the backend cudafuture cannot wrap {name!r}: give the name of a backend that torch has")
    own = _DistributedBackendOptions()
    own.store, own.group_rank, own.group_size, own.timeout = store, rank, size, timeout
    own.group_id, own.global_ranks_in_group = wanted.group_id, wanted.global_ranks_in_group
    return make_by_plugin(name, own, options)


def wrap(group: Any = None) -> dist.ProcessGroup:
    """Let the Works of a group that exists already be futures, and return the group.

    Every rank may do so for itself. `group`: None: the default group. The group keeps its name and its backends, so
    code that asks for the backend's name sees the same as before. A group that is wrapped already stays as it is.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: no group is given and ``init_process_group`` has not been called; the group was destroyed; its
            backend is one that an extension of torch has registered.

    >>> work = dist.all_reduce(torch.ones(2), group=wrap(), async_op=True)
    >>> work.then(lambda f: f.value() / 2).wait()
    tensor([0.5000, 0.5000])
    """
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("this rank is not in the group")
    if resolved not in c10d._world.pg_map:
        raise ValueError(f"the process group '{resolved.group_name}' was destroyed")
    if _future_backends(resolved):
        return resolved
    backends = [(device, resolved._get_backend(device)) for device in resolved._device_types]
    inner = [(device.type, backend) for device, backend in backends]
    name: str = resolved.group_name
    wrapper = FutureBackend(resolved.rank(), resolved.size(), inner, is_owner=False, name=name)
    _wrapped[name] = resolved
    for device, _ in backends:
        resolved._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, wrapper)
        if resolved._get_backend(device) is not wrapper:  # torch keeps a backend of this type that it has
            raise ValueError(
                f"the backend of group '{name}' was registered with torch by an extension, and torch replaces no such "
                'backend: create the group with backend "cudafuture" and BackendOptions that name it'
            )
    return resolved


def group_of_backend(name: str, number: int) -> dist.ProcessGroup:
    """Return the group with a name, if its backend is the one with this number: a later group may have the name.

    Raises:
        RuntimeError: it was destroyed.
    """
    known = _groups.get(number)
    if known is not None and (same := known()) is not None and same in c10d._world.pg_map:
        return same  # type: ignore[no-any-return]
    resolve_name: Any = c10d._resolve_process_group
    for find in (resolve_name, _wrapped.get):
        group: Any = None
        with contextlib.suppress(KeyError, RuntimeError, ValueError):
            group = find(name)
        if group is not None and number in {b._number for b in _future_backends(group)}:
            _groups[number] = weakref.ref(group, lambda _: _groups.pop(number, None))
            return group  # type: ignore[no-any-return]
    raise RuntimeError(f"the process group '{name}' was destroyed")


def place_of_works(name: str, number: int, is_counted: bool) -> Any:
    """Return a capsule of the place of the operations on a group whose backend has this number."""
    try:
        place = group_of(group_of_backend(name, number)).works(is_counted)
    except (KeyError, RuntimeError):  # unknown to torch, such as a side group
        place = _C.OperationPlace.find("group", name)
    return place._capsule()


def _future_backends(group: dist.ProcessGroup) -> list[FutureBackend]:
    backends = [group._get_backend(device) for device in group._device_types]
    backends = [b if isinstance(b, FutureBackend) else getattr(b, "wrapped_pg", b) for b in backends]
    return [b for b in backends if isinstance(b, FutureBackend)]


def make_future(work: FutureWork) -> _C.CUDAFuture[Any]:
    """Return the future that follows `work`, with the callbacks and the errors of its group; make it once."""
    with _making:
        if (made := work._made) is None:
            made = _follow(work)
            work._keep(made)
        return made


def trace(work: FutureWork) -> _C.CUDAFuture[Any] | None:
    """Return the future of `work`; None: a function of this package issues, and makes one."""
    return None if is_called_from(_HERE) else make_future(work)


def _follow(work: FutureWork, issue: Issue | None = None) -> _C.CUDAFuture[Any]:
    """Return a new future that follows `work`. `issue`: None: that of its group, for an error."""
    value = work._value
    try:
        group = group_of_backend(work.group_name, work._group_number)
        state = group_of(group)
    except (KeyError, RuntimeError):  # destroyed, or unknown to torch
        return _without_group(work.inner, value)
    if issue is None:
        operation = _OPERATIONS.get(work.name, _COALESCED)
        issue = Issue(operation, state, state.program, work.sequence, tuple(map(_facts, _flat(value))), is_staged=False)
    source = work._peer
    if work.name == RECV.name and source >= 0:
        value = Received(value, dist.get_global_rank(group, source))
    # The memory of the operation belongs to the stream of its issue.
    with streams.use_streams(work._stream) if work._stream is not None else contextlib.nullcontext():
        future: _C.CUDAFuture[Any] = _C.collective(
            work.inner,
            value,
            work.name,
            state.callbacks,
            issue,
            state.timeout,
            state.works(),
            work._number,
            state.backends,
            value,
            work._peer,
        )
    return with_sender(future, work.inner, issue, group) if work.name == RECV.name and source < 0 else future


def _without_group(work: dist.Work, value: T) -> _C.CUDAFuture[T]:
    def take(followed: _C.CUDAFuture[Any]) -> T:
        followed.value()
        return value

    return _C.CUDAFuture.from_torch(work).then(take)


def _facts(tensors: Any) -> Any:
    """Return shape and dtype of a tensor, or a list of them."""
    if isinstance(tensors, list):
        return [_facts(tensor) for tensor in tensors]
    return None if tensors is None else (tensors.shape, tensors.dtype)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value or () for tensor in _flat(part)]


def compare(
    issue_now: Callable[[], FutureWork | None],
    group_name: str,
    number: int,
    device: str,
    name: str,
    tensors: tuple[Any, ...],
    options: dict[str, Any],
) -> FutureWork | None:
    """Issue a collective of torch, and compare it with those of the other ranks (CUDAFUTURE_DEBUG=order).

    Raises:
        CollectiveError: torch asked for no Work, and the ranks issue different collectives.
    """
    group = _group_to_compare(group_name, number)
    if group is None:
        return issue_now()
    state = group_of(group)
    queue = _C.issuing_serial_queue(state.callbacks)
    issuer = state.issuer(group, name, queue, over_nccl=device in state.nccl_devices)
    operation, sequence = _OPERATIONS[name], issuer.issued
    issuer.issued = sequence + 1
    try:
        work = issue_now()
    except BaseException as e:
        if not isinstance(e, RuntimeError):  # as Issue.refused() counts
            issuer.issued = sequence
        raise
    issue = Issue(operation, state, issuer, sequence, tuple(map(_facts, tensors)), is_staged=False)
    is_elsewhere = state.rank != options.get("group_src", options.get("group_dst", state.rank))
    roles = operation.roles_elsewhere if is_elsewhere and operation.roles_elsewhere else operation.roles
    future = _C.CUDAFuture.completed(None) if work is None else _follow(work, issue)
    compared = _order.checked(future, issue, group, partial(operation.function, **options), roles)
    if work is None:
        compared.wait(timeout=state.timeout)
    else:
        work._keep(compared, is_compared=True)
    return work


def compare_message(
    issue_now: Callable[[], FutureWork | None],
    group_name: str,
    number: int,
    name: str,
    tensor: Any,
    peer: int,
    tag: int,
) -> FutureWork | None:
    """Issue one end of a message of torch, and compare it with the other end (CUDAFUTURE_DEBUG=order)."""
    group = _group_to_compare(group_name, number)
    if group is None:
        return issue_now()
    state = group_of(group)
    issue = Issue(_OPERATIONS[name], state, state.beside, state.beside.issued, (_facts(tensor),), is_staged=False)
    state.beside.issued += 1
    work: FutureWork | None = None

    def follow() -> _C.CUDAFuture[Any]:
        nonlocal work
        work = issue_now()
        return _C.CUDAFuture.completed(None) if work is None else _follow(work, issue)

    end = End(name == SEND.name, None if peer < 0 else peer, tag, text_of(_facts(tensor)))
    compared = checked_messages(issue, group, [end], follow)
    if work is not None:
        work._keep(compared, is_compared=True)
    return work


def wait_compared(compared: _C.CUDAFuture[Any], timeout: float | None) -> None:
    """Wait as a Work of torch does.

    Raises:
        RuntimeError: the operation has failed, differs between the ranks, or is not done in time.
    """
    try:
        compared.wait(timeout=timeout)
    except TimeoutError as e:
        raise RuntimeError(str(e)) from e


def _group_to_compare(name: str, number: int) -> dist.ProcessGroup | None:
    """Return the group; None: a function of this package issues, and compares, or torch does not know the group yet."""
    if is_called_from(_HERE):
        return None
    with contextlib.suppress(RuntimeError):
        return group_of_backend(name, number)
    return None


def route(group_name: str, number: int, device: str, operation: str, over_nccl: bool) -> Any:
    """Return the backend on which the calling thread issues; None: the group's own.

    Raises:
        InvalidStateError: issued in a callback that has no order among the callbacks of the other ranks.
        CollectiveError: the callback's side group could not be created, or the callbacks before it have not run.
    """
    group = group_of_backend(group_name, number)
    state = group_of(group)
    issuer = state.issuer(group, operation, _C.issuing_serial_queue(state.callbacks), over_nccl=over_nccl)
    if issuer.process_group is None:
        return None
    issuer.issued += 1
    return issuer.process_group._get_backend(torch.device(device))

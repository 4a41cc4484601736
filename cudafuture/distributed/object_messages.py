"""send_object_list and recv_object_list: Python objects from one rank to another.

::

    send_object_list ──► header: payload's tag, objects, bytes ──► payload: size and pickle of each object
    recv_object_list ◄── header, in the order of the calls     ◄── payload, by its tag

Both messages are sends of tensors on the group itself. Headers share one tag, so they arrive in the order of the calls.
Each payload has a tag of its own, so any number of calls may be in flight. Over NCCL, which has no tags, the header is
followed by its payload in the issue order.

Objects are pickled at the call. Unpickling runs code that the sender chooses, so it must be trusted. The receiver
unpickles on a library thread. Both ranks use these functions: torch's own send other messages.

The examples have a default group of two processes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.distributed._group import resolve
from cudafuture.distributed._issue import Issue, begin_beside, nothing
from cudafuture.distributed._operations import (
    BATCH_ISEND_IRECV,
    RECV_OBJECT_LIST,
    SEND_OBJECT_LIST,
    DistributedOperation,
)
from cudafuture.distributed._order_entry import count_of
from cudafuture.distributed._side_group import kind_of
from cudafuture.distributed.objects import safely
from cudafuture.distributed.point_to_point import (
    Received,
    compared,
    issue_recv,
    issue_recv_from_anyone,
    issue_send,
    peer_in,
)

__all__ = ["recv_object_list", "send_object_list"]

_HOST = torch.device("cpu")
_HEADER_TAG = 2**31 - 1  # the largest tag of Gloo
_PAYLOAD_TAGS = range(2**30, _HEADER_TAG)  # used in turn
_unpickling = _C.serial_executor("cudafuture/objects")


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> CUDAFuture[None]:
    """Send the objects to global rank `dst`, or to `group_dst` of the group; complete when they have been sent.

    `device`: carries the bytes if the group has no backend for the host; None: the current device. `use_batch`: send
    as ``batch_isend_irecv`` does, over the communicator of the whole NCCL group; the same on both ranks.

    Raises:
        TypeError, ValueError: `object_list` is no list or is empty, or no such rank.
        TensorError: the storage of a tensor in `object_list` was freed or shrunk.

    >>> peer = 1 - dist.get_rank()  # of two
    >>> sent = send_object_list(["settings", 3], dst=peer)
    >>> objects = [None, None]
    >>> recv_object_list(objects, src=peer).wait() == peer
    True
    >>> objects
    ['settings', 3]
    """
    options = safely(weights_only)
    process_group = resolve(group)
    if process_group is None:
        return nothing()
    _expect_objects(object_list)
    peer = peer_in(process_group, dst, group_dst, "dst")
    carrier = _carrier(process_group, device)
    issue = _begin(SEND_OBJECT_LIST, process_group, _empty(0, carrier))
    issue.expect_storages(object_list)
    try:
        objects, sizes = zip(*[c10d._object_to_tensor(o, "cpu", group, **options) for o in object_list], strict=True)
    except Exception as e:  # the sender alone fails; nothing was issued
        failed: CUDAFuture[None] = _C.issued(issue.operation.name, issue.group.callbacks, issue)
        failed.set_exception(e)
        return failed
    payload = torch.cat([torch.cat(sizes).view(torch.uint8), *objects]).to(carrier)
    tag = _PAYLOAD_TAGS[next(issue.group.payloads) % len(_PAYLOAD_TAGS)]
    header = torch.tensor([tag, len(objects), payload.numel()], dtype=torch.int64, device="cpu").to(carrier)
    send = _send_in_batch if use_batch else issue_send

    def issue_both() -> CUDAFuture[None]:
        send(issue, process_group, header, peer, _HEADER_TAG)  # if it fails, so does the payload
        return send(issue, process_group, payload, peer, tag)

    return compared(issue, process_group, [(True, peer, _HEADER_TAG)], issue_both, carries=count_of(len(object_list)))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> CUDAFuture[int]:
    """Replace the entries of `object_list` by the objects of a sender; the value is the sender's global rank.

    The sender is global rank `src`, or `group_src` of the group; None: any rank, which NCCL does not have. `device`,
    `use_batch`: as in :func:`send_object_list`. If the sender's list has another length, the future fails with
    CollectiveError, and `object_list` is unchanged.

    Raises:
        TypeError, ValueError: `object_list` is no list or is empty, no such rank, or `use_batch` without a rank.

    >>> sent = send_object_list([{"loss": 0.5}], dst=1 - dist.get_rank())  # to the other of two
    >>> objects = [None]
    >>> recv_object_list(objects).wait() == 1 - dist.get_rank()
    True
    >>> objects
    [{'loss': 0.5}]
    """
    options = safely(weights_only)
    process_group = resolve(group)
    if process_group is None:
        return nothing()
    _expect_objects(object_list)
    carrier = _carrier(process_group, device)
    header = torch.empty(3, dtype=torch.int64, device=carrier)
    issue = _begin(RECV_OBJECT_LIST, process_group, header)
    peer = None
    if src is not None or group_src is not None:
        peer = peer_in(process_group, src, group_src, "src")
    elif use_batch:
        raise ValueError("recv_object_list() with use_batch=True needs src or group_src")
    recv = _recv_in_batch if use_batch else issue_recv
    over_nccl = carrier.type in issue.group.nccl_devices
    sources: list[int] = []

    def receive_header() -> CUDAFuture[int]:
        if peer is None:
            received = issue_recv_from_anyone(issue, process_group, header, _HEADER_TAG)
        else:
            received = recv(issue, process_group, header, peer, _HEADER_TAG)
        # Over NCCL the payload takes the place of this callback in the issue order.
        received.then(receive_payload, executor=None if over_nccl else _C.callback_thread)
        return result

    place, number = issue.place_of(peer) if peer is not None else (None, -1)
    result: CUDAFuture[int] = _C.issued(
        issue.operation.name, issue.group.callbacks, issue, place, number, -1 if peer is None else peer
    )

    def receive_payload(received: CUDAFuture[Received]) -> None:
        try:
            source = received.value().source
            sources.append(source)
            tag, count, nbytes = header.tolist()
            payload = _empty(nbytes, carrier)
            if over_nccl:
                issue.group.wait_for_issue_order(issue.operation.name, _C.issuing_serial_queue(issue.group.callbacks))
            arrived = recv(issue, process_group, payload, dist.get_group_rank(process_group, source), tag)
            arrived.then(partial(unpickle, count), executor=_unpickling, non_blocking=False)
        except BaseException as e:
            result.set_exception(issue.error(e))

    def unpickle(count: int, arrived: CUDAFuture[Received]) -> None:
        try:
            payload, source = arrived.value()
            if count != len(object_list):
                raise RuntimeError(f"rank {source} sent {count_of(count)}, but the list here has {len(object_list)}")
            sizes = payload[: 8 * count].view(torch.int64).tolist()
            parts = payload[8 * count :].split(sizes)
            objects = [c10d._tensor_to_object(p, n, group, **options) for p, n in zip(parts, sizes, strict=True)]
            object_list[:] = objects
        except BaseException as e:
            result.set_exception(issue.error(e))
        else:
            result.set_result(source)

    ends, carries = [(False, peer, _HEADER_TAG)], count_of(len(object_list))
    return compared(issue, process_group, ends, receive_header, carries=carries, sources=sources)


def _expect_objects(object_list: object) -> None:
    if not isinstance(object_list, list):
        raise TypeError(f"object_list is a list, not {type(object_list)}")
    if not object_list:
        raise ValueError("object_list is empty: give at least one object, the same number on both ranks")


def _carrier(process_group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """Return the device whose backend carries the messages: the host, if the group has a backend for it."""
    if kind_of(process_group, _HOST) is not None:
        return _HOST
    return torch.device(device or c10d._get_object_coll_device(process_group))


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _begin(operation: DistributedOperation, process_group: dist.ProcessGroup, message: torch.Tensor) -> Issue:
    begun = begin_beside(operation, process_group, (message,))
    assert begun is not None
    return begun[0]._replace(tensors=())  # errors do not name the message


def _send_in_batch(
    issue: Issue, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int
) -> CUDAFuture[None]:
    return issue.run(group, _batch_of_one(dist.isend, peer, tag), None, (tensor,), peer=peer)


def _recv_in_batch(
    issue: Issue, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int
) -> CUDAFuture[Received]:
    received = Received(tensor, dist.get_global_rank(group, peer))
    return issue.run(group, _batch_of_one(dist.irecv, peer, tag), received, (tensor,), peer=peer)


def _batch_of_one(function: Any, peer: int, tag: int) -> Any:
    def issue(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        (work,) = BATCH_ISEND_IRECV.function([dist.P2POp(function, tensor, group=group, tag=tag, group_peer=peer)])
        return work

    return issue

"""Collectives that return CUDAFuture, in an order that is the same on every rank.

The functions take torch.distributed's own arguments, without ``async_op``.
:mod:`~cudafuture.distributed.collectives` documents their values.

The callbacks of a group's futures run in the order in which they were attached, whichever future completes first. A
collective that a callback issues goes to a side group, which only callbacks of that kind use. A program that attaches
the same callbacks in the same order on every rank therefore pairs its data correctly, for any timing of the ranks.
"""

from cudafuture._c10d import FutureWork
from cudafuture.distributed._backend import wrap
from cudafuture.distributed._backend_options import BackendOptions
from cudafuture.distributed._flight_recorder import dump_flight_recorder
from cudafuture.distributed.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    gather_into_tensor,
    gather_single,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from cudafuture.distributed.ddp import ddp_comm_hook
from cudafuture.distributed.object_messages import recv_object_list, send_object_list
from cudafuture.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    monitored_barrier,
    scatter_object_list,
)
from cudafuture.distributed.point_to_point import Received, batch_isend_irecv, irecv, isend, recv, send
from cudafuture.distributed.process_group import ProcessGroup, new_group
from cudafuture.errors import CollectiveError
from cudafuture.graph_breaks import break_graphs

__all__ = [
    "BackendOptions",
    "CollectiveError",
    "FutureWork",
    "ProcessGroup",
    "Received",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "ddp_comm_hook",
    "dump_flight_recorder",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "wrap",
]

break_graphs(*map(globals().get, __all__))

"""Transfers of tensors between the host and devices: copies, packing and staging, for the modules of the library.

::

    the caller's current streams ──► earlier_work() ──► streams_after() ──► copies ──► complete(): a future's events
                                                              │
                                                              └── used_on(): memory that the caller may drop meanwhile

Programs call ``cudafuture.copy``. ``LARGE`` is the number of bytes of host memory up to which the caller's thread
copies to pinned memory itself; more goes to the executor.
"""

from cudafuture.graph_breaks import break_graphs
from cudafuture.transfer._copy import LARGE, Transfer
from cudafuture.transfer._packing import send_packed
from cudafuture.transfer._staging import (
    are_dense,
    complete,
    copy_between,
    devices_of,
    earlier_work,
    empty_on,
    enqueued_work,
    is_on_device,
    memory_of,
    plain_view,
    streams_after,
    used_on,
)

__all__ = [
    "LARGE",
    "Transfer",
    "are_dense",
    "complete",
    "copy_between",
    "devices_of",
    "earlier_work",
    "empty_on",
    "enqueued_work",
    "is_on_device",
    "memory_of",
    "plain_view",
    "send_packed",
    "streams_after",
    "used_on",
]

break_graphs(*map(globals().get, __all__))

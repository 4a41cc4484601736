"""One future type for every asynchronous operation in distributed PyTorch."""

from cudafuture import _native as _native  # first: raises a clear ImportError if the native module is missing
from cudafuture import config as config
from cudafuture import debug as debug
from cudafuture import errors as errors
from cudafuture import executors as executors
from cudafuture._C import CUDAFuture, EventView
from cudafuture._C import set_debug_socket as _set_debug_socket
from cudafuture.combine import AsCompleted, as_completed, collect_all, collect_any, gather, wait, wait_all
from cudafuture.errors import (
    AllFailedError,
    CancelledError,
    CUDAFutureError,
    DeviceMismatchError,
    InvalidStateError,
    TensorSearchError,
)
from cudafuture.future import copy, fail, packed_nbytes, submit
from cudafuture.graph_breaks import break_graphs
from cudafuture.openmetrics import metrics
from cudafuture.prefetch import Prefetcher, prefetch
from cudafuture.streams import current_streams, has_context, own_stream, pool_stream, use_streams
from cudafuture_c10d import register as _register_backend

__version__ = "0.2.0"
__all__ = [
    "AllFailedError",
    "CUDAFuture",
    "CUDAFutureError",
    "CancelledError",
    "DeviceMismatchError",
    "EventView",
    "InvalidStateError",
    "Prefetcher",
    "TensorSearchError",
    "as_completed",
    "collect_all",
    "collect_any",
    "copy",
    "current_streams",
    "fail",
    "gather",
    "has_context",
    "metrics",
    "own_stream",
    "packed_nbytes",
    "pool_stream",
    "prefetch",
    "submit",
    "use_streams",
    "wait",
    "wait_all",
]

_set_debug_socket(config.config.debug_dir, __version__)
_register_backend()
if config.config.trace_dir:
    from cudafuture import trace as trace  # which records from now on
break_graphs(AsCompleted, executors.default_executor, executors.serial, *map(globals().get, __all__))

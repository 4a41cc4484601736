"""RPC calls that return CUDAFuture, on torch.distributed.rpc."""

from cudafuture.graph_breaks import break_graphs
from rpc_ext._batching import batch
from rpc_ext._serve import async_execution
from rpc_ext._statistics import DestinationStatistics, RpcStatistics
from rpc_ext.barrier import barrier
from rpc_ext.calls import broadcast_call, map_call, rpc_async, rpc_sync
from rpc_ext.rref import RRef, remote
from rpc_ext.session import Session, call_at_end, current, init_rpc, shutdown, statistics
from rpc_ext.store import (
    RemoteStore,
    RemoteStoreStatistics,
    StoreService,
    StoreServiceStatistics,
    serve_store,
)
from rpc_ext.watch import watch

__all__ = [
    "DestinationStatistics",
    "RRef",
    "RemoteStore",
    "RemoteStoreStatistics",
    "RpcStatistics",
    "Session",
    "StoreService",
    "StoreServiceStatistics",
    "async_execution",
    "barrier",
    "batch",
    "broadcast_call",
    "init_rpc",
    "map_call",
    "remote",
    "rpc_async",
    "rpc_sync",
    "serve_store",
    "shutdown",
    "statistics",
    "watch",
]

break_graphs(call_at_end, current, *map(globals().get, __all__))

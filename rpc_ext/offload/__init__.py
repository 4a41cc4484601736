"""Tensors by key on the NVMe of another worker: ``serve_offload`` there, a ``RemoteOffloader`` here."""

from rpc_ext.offload._statistics import OffloadServiceStatistics, RemoteOffloaderStatistics
from rpc_ext.offload.client import RemoteOffloader
from rpc_ext.offload.service import OffloadService, serve_offload

__all__ = [
    "OffloadService",
    "OffloadServiceStatistics",
    "RemoteOffloader",
    "RemoteOffloaderStatistics",
    "serve_offload",
]

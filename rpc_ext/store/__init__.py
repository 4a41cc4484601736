"""Tensors by key on the NVMe of another worker: ``serve_store`` there, a ``RemoteStore`` here."""

from rpc_ext.store._statistics import RemoteStoreStatistics, StoreServiceStatistics
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import StoreService, serve_store

__all__ = [
    "RemoteStore",
    "RemoteStoreStatistics",
    "StoreService",
    "StoreServiceStatistics",
    "serve_store",
]

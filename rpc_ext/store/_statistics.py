"""Statistics of a store service and of its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudafuture.statistics import StatisticsBase

__all__ = ["RemoteStoreStatistics", "StoreServiceStatistics"]


@dataclass(frozen=True, repr=False)
class StoreServiceStatistics(StatisticsBase):
    """Statistics of a service since it began. Sizes are in bytes, durations in seconds."""

    GAUGES: ClassVar = frozenset({"clients", "namespaces", "in_flight", "most_in_flight", "latency_p50", "latency_p99"})
    BYTES: ClassVar = frozenset({"in_flight", "most_in_flight", "bytes_written", "bytes_read"})
    SECONDS: ClassVar = frozenset({"latency_p50", "latency_p99"})

    clients: int
    """open sessions"""
    namespaces: int
    """namespaces with a session or tensors, and some that had a session"""
    in_flight: int
    """bytes of requests in flight"""
    most_in_flight: int
    """the most bytes in flight so far"""
    bytes_written: int
    bytes_read: int
    requests: int
    """puts and gets with a reply, failed ones included"""
    refused: int
    """malformed requests, requests without a session, and tensors whose bytes were not those that were sent"""
    late: int
    """requests and changes of keys that were dropped: they arrived after their deadline, or after a later change"""
    latency_p50: float
    """median time of puts and gets, from their arrival to their reply; nan: there were none"""
    latency_p99: float


@dataclass(frozen=True, repr=False)
class RemoteStoreStatistics(StatisticsBase):
    """Statistics of a client since it began. Sizes are in bytes, durations in seconds."""

    GAUGES: ClassVar = frozenset({"pending", "in_flight", "waiting", "window", "latency_p50", "latency_p99"})
    BYTES: ClassVar = frozenset({"in_flight", "waiting", "window", "bytes_written", "bytes_read"})
    SECONDS: ClassVar = frozenset({"latency_p50", "latency_p99"})

    pending: int
    """operations whose futures are not done"""
    in_flight: int
    """bytes of requests in flight"""
    waiting: int
    """bytes of requests that wait for room in the window"""
    window: int
    """the most bytes that may be in flight"""
    bytes_written: int
    bytes_read: int
    operations: int
    """operations that are done, failed ones included"""
    failed: int
    repeated: int
    """reads that were repeated because the received bytes were not those that were written"""
    latency_p50: float
    """median time of operations, from the call to the outcome; nan: there were none"""
    latency_p99: float

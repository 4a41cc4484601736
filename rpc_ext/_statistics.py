"""Statistics of the calls of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudafuture.statistics import StatisticsBase

__all__ = ["DestinationStatistics", "RpcStatistics"]


@dataclass(frozen=True, repr=False)
class DestinationStatistics(StatisticsBase):
    """The calls from this worker to one worker since ``init_rpc``. Sizes are in bytes, durations in seconds.

    ``latencies`` is the histogram of the quantiles: the upper end and the count of each bucket that is not empty, each
    an eighth of a power of two wide. A latency is the time from the call to the completion of its future.
    """

    GAUGES: ClassVar = frozenset({"in_flight", "bytes_in_flight", "waiting", "latency_p50", "latency_p99"})
    BYTES: ClassVar = frozenset({"bytes_in_flight", "bytes_sent", "bytes_received"})
    SECONDS: ClassVar = frozenset({"latency_p50", "latency_p99"})

    calls: int
    """calls made, including those in flight"""
    failed: int
    """calls whose future failed for any reason"""
    in_flight: int
    """calls without a reply"""
    bytes_in_flight: int
    """bytes of their payloads and tensors"""
    waiting: int
    """threads that wait for room"""
    bytes_sent: int
    """bytes of all calls"""
    bytes_received: int
    """bytes of all replies"""
    latency_p50: float
    """the median; nan before the first reply"""
    latency_p99: float
    """the quantile 0.99"""
    latencies: tuple[tuple[float, int], ...]


@dataclass(frozen=True, repr=False)
class RpcStatistics(StatisticsBase):
    """The statistics of this process, from ``rpc_ext.statistics()``."""

    GAUGES: ClassVar = frozenset({"serving"})
    BYTES: ClassVar = frozenset({"received_outside"})

    worker: str
    """the name of this worker"""
    destinations: Mapping[str, DestinationStatistics]
    """statistics by the name of the callee"""
    served: int
    """calls that this worker has begun to run"""
    serving: int
    """those of them without a reply"""
    refused: Mapping[str, int]
    """messages without a valid signature, by the worker that they claim to come from; ``""``: no worker"""
    received_outside: int
    """bytes of tensors that this process has received into new memory because its pool was exhausted"""

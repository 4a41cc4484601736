"""What an offload service, and a client of one, have come to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OffloadServiceStatistics", "RemoteOffloaderStatistics"]


@dataclass(frozen=True)
class OffloadServiceStatistics:
    """What a service has, and what it has done so far. Sizes are in bytes, durations in seconds."""

    clients: int
    """sessions that are open"""
    namespaces: int
    """those of the sessions, those that have tensors, and some that had"""
    under_way: int
    """bytes of requests that have not been answered"""
    most_under_way: int
    """the most that there ever were"""
    bytes_written: int
    bytes_read: int
    requests: int
    """puts and gets that were answered, one way or another"""
    refused: int
    """requests that broke the rules: of no session, or malformed; and tensors whose bytes were not those that were
    sent"""
    late: int
    """requests, and changes of keys, that were dropped: they arrived after their deadline, or after a later change"""
    latency_p50: float
    """of puts and gets, from their arrival to their answer; nan: there were none"""
    latency_p99: float


@dataclass(frozen=True)
class RemoteOffloaderStatistics:
    """What a client has under way, and what it has done so far. Sizes are in bytes, durations in seconds."""

    pending: int
    """operations whose futures are not done"""
    under_way: int
    """bytes of requests that have not been answered"""
    waiting: int
    """bytes of requests that wait for room in the window"""
    window: int
    """the most that may be under way"""
    bytes_written: int
    bytes_read: int
    operations: int
    """that have ended, one way or another"""
    failed: int
    latency_p50: float
    """of operations, from the call to the end; nan: there were none"""
    latency_p99: float

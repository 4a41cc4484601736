"""Fixtures of the RPC tests."""

from support.rpc_fixtures import gate, nothing_in_flight, worker

__all__ = ["gate", "nothing_in_flight", "worker"]

"""The parts of torch.distributed that this package uses and torch does not type or document."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch._C import _distributed_rpc
from torch.distributed.rpc import api, constants

from rpc_ext import _C

__all__ = [
    "DEFAULT_RPC_TIMEOUT",
    "DEFAULT_WORKER_THREADS",
    "PrefixStore",
    "PyRRef",
    "RRef",
    "StoreError",
    "calls_in_flight",
    "finish",
    "first_calls",
    "forget_users",
    "has_agent",
    "init_distributed_autograd",
    "is_current",
    "remote",
    "rendezvous",
    "set_agent",
]

_rpc: Any = torch.distributed.rpc
_distributed: Any = torch.distributed
_autograd: Any = torch.distributed.autograd
_native: Any = _distributed_rpc
_api: Any = api

DEFAULT_RPC_TIMEOUT: float = constants.DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_WORKER_THREADS: int = constants.DEFAULT_NUM_WORKER_THREADS

PrefixStore: Any = _distributed.PrefixStore
StoreError: Any = _distributed.DistError
rendezvous: Any = _distributed.rendezvous
PyRRef: Any = _rpc.PyRRef
RRef: Any = _rpc.RRef
remote: Any = _rpc.remote
has_agent: Any = _native._is_current_rpc_agent_set


def is_current(agent: Any) -> bool:
    """Return whether an agent is the current agent of this process."""
    try:
        return bool(_native._get_current_rpc_agent() is agent)
    except RuntimeError:  # this process has no agent
        return False


def init_distributed_autograd(rank: int) -> None:
    """Prepare distributed autograd and the profiler's node id, which torch's agent expects."""
    _C.forget_autograd_rank()
    _autograd._init(rank)
    _native._set_profiler_node_id(rank)


def set_agent(agent: Any) -> None:
    """Make an agent the current agent of this process, and start it."""
    _api._init_rpc_states(agent)
    _C.renew_references()


def first_calls(workers: list[str], timeout: float) -> None:
    """Call workers, which opens all connections to them, including those for tensors.

    Raises:
        TimeoutError: a worker has not replied.
    """
    probe = torch.zeros(1024, dtype=torch.float32, device="cpu")
    futures = {worker: _rpc.rpc_async(worker, _same, (probe,), timeout=timeout) for worker in workers}
    try:
        torch.futures.wait_all(list(futures.values()))
    except RuntimeError as e:
        if "RPCErr:1:" not in str(e):
            raise
        late = ", ".join(f"'{worker}'" for worker, future in futures.items() if not _has_value(future))
        raise TimeoutError(f"worker {late} has not answered its first call within {timeout:g} s") from e


def _has_value(future: Any) -> bool:
    try:
        return bool(future.done()) and future.value() is not None
    except RuntimeError:
        return False


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def calls_in_flight(agent: Any) -> int:
    """Return the number of an agent's messages without a reply, including torch's own messages."""
    return int(agent.get_metrics()["agent.client_active_calls"])


def forget_users(timeout: float) -> None:
    """Delete this worker's references to values of other workers, and wait until the owners have confirmed it."""
    _native._delete_all_user_and_unforked_owner_rrefs(timedelta(seconds=timeout))


def finish(agent: Any, patience: float) -> bool:
    """Stop and remove this process's agent; return False if functions of other workers' calls still run."""
    try:
        _native._destroy_rref_context(_api._ignore_rref_leak)
    finally:
        stopped: bool = agent.stop(patience)
        _native._cleanup_python_rpc_handler()
        _native._reset_current_rpc_agent()
    return stopped

"""What is used of torch.distributed beyond what torch types or documents, in one place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch._C import _distributed_rpc
from torch.distributed.rpc import api, backend_registry, constants

__all__ = [
    "DEFAULT_RPC_TIMEOUT",
    "DEFAULT_WORKER_THREADS",
    "PrefixStore",
    "PyRRef",
    "RRef",
    "current_agent",
    "finish",
    "first_round_of_calls",
    "forget_users",
    "init_agent",
    "init_distributed_autograd",
    "register_backend",
    "remote",
    "rendezvous",
    "rpc_async",
    "set_agent",
]

_rpc: Any = torch.distributed.rpc
_distributed: Any = torch.distributed
_autograd: Any = torch.distributed.autograd
_native: Any = _distributed_rpc
_api: Any = api
_registry: Any = backend_registry

DEFAULT_RPC_TIMEOUT: float = constants.DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_WORKER_THREADS: int = constants.DEFAULT_NUM_WORKER_THREADS

PrefixStore: Any = _distributed.PrefixStore
rendezvous: Any = _distributed.rendezvous
PyRRef: Any = _rpc.PyRRef
RRef: Any = _rpc.RRef
rpc_async: Any = _rpc.rpc_async
remote: Any = _rpc.remote
current_agent: Any = _native._get_current_rpc_agent


def register_backend(name: str, options: Any, init_agent: Any) -> Any:
    """Return the entry of that name in torch's registry of RPC backends, which is made where there is none."""
    if not _registry.backend_registered(name):
        _registry.register_backend(name, options, init_agent)
    return _registry.BackendType[name]


def init_distributed_autograd(rank: int) -> None:
    """Prepare what torch's agent expects: distributed autograd, and the profiler's number of this process."""
    _autograd._init(rank)
    _native._set_profiler_node_id(rank)


def init_agent(backend: Any, store: Any, name: str, rank: int, world_size: int, options: Any) -> None:
    """Let a registered backend make this process's agent."""
    _rpc._init_rpc_backend(backend, store, name, rank, world_size, options)


def set_agent(agent: Any) -> None:
    """Make an agent this process's, and start it."""
    _api._init_rpc_states(agent)


def first_round_of_calls(timeout: float) -> None:
    """Make a call between each worker and the first, so that their connections stand."""
    _api._all_gather(None, timeout=timeout)


def forget_users() -> None:
    """Delete this worker's references to others' values, and wait until the owners know."""
    _native._delete_all_user_and_unforked_owner_rrefs()


def finish() -> None:
    """Stop this process's agent, and forget it."""
    _api._finalize_shutdown()

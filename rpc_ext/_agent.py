"""The start of this process's RPC agent.

::

    rendezvous ──► handshake: names, devices, proofs of the secret ──► Agent ──► addresses ──► first calls
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions

from cudafuture import __version__
from cudafuture.errors import AuthenticationError
from cudafuture.io import BufferPool
from rpc_ext import _C, _engine, _listeners
from rpc_ext._codec import DeviceMap
from rpc_ext._devices import Plan, local_devices, plan
from rpc_ext._handshake import Handshake
from rpc_ext._options import RpcOptions
from rpc_ext._rendezvous import session_store
from rpc_ext._serve import Server

__all__ = ["DEFAULT_RECEIVE_MEMORY", "PATIENCE", "Started", "received_outside", "start"]

PATIENCE = 5.0
"""seconds that a stopping agent waits for functions that it runs for other workers"""
DEFAULT_RECEIVE_MEMORY = 512 << 20
"""bytes of the pool for tensors from other workers"""

_SETTINGS = {
    "version": "that of cudafuture",
    "seal": "an argument of init_rpc",
    "transports": "an argument of init_rpc or CUDAFUTURE_RPC_TRANSPORTS, of which the last one must be the same",
}
"""settings that all workers need to have in common"""

_logger = logging.getLogger("rpc_ext.authentication")

# By size. C++ keeps each allocator until the process ends, so a later session with the same size reuses the pool.
_pools: dict[int, BufferPool] = {}


class Started(NamedTuple):
    """A running agent, its handshake and the devices of its peers."""

    agent: _C.Agent
    handshake: Handshake
    peers: list[DeviceMap]
    """target devices of the tensors of a call, by rank of the callee"""


def start(options: RpcOptions, server: Server) -> Started:
    """Start the agent, whose incoming calls `server` runs, after the rendezvous and the handshake."""
    handshake, workers, key = _find_workers(options)
    names = handshake.names
    devices = plan(
        options.rank,
        names,
        [worker["devices"] for worker in workers],
        [worker["maps"] for worker in workers],
        carries_devices=not options.seals_contents,
    )
    if devices.native_devices:
        torch.cuda.init()  # tensors may arrive before the first local use
    server.set_devices(dict(enumerate(devices.answers)))
    _receive_into_pool(options.receive_memory)
    _engine.init_distributed_autograd(options.rank)
    agent = _C.Agent(
        names,
        options.rank,
        lambda address: _addresses(handshake, address),
        _engine_options(options, devices),
        devices.native_reverse,
        devices.native_devices,
        key=key,
        contents=options.seals_contents,
        serve=server.serve,
        tell=functools.partial(_report_refused, names),
    )
    try:
        _connect(agent, names, handshake, options)
    except BaseException:
        with contextlib.suppress(Exception):
            _engine.finish(agent, PATIENCE)
        raise
    return Started(agent, handshake, devices.calls)


def _find_workers(options: RpcOptions) -> tuple[Handshake, list[Any], bytes]:
    """Return the handshake with all workers, their descriptions by rank, and the key of the session."""
    rank, world_size, seconds = options.rank, options.world_size, options.start_timeout
    address = f"{socket.gethostname()} ({_listeners.host()})"
    store = _engine.PrefixStore("handshake", session_store(options.init_method, rank, world_size, seconds))
    handshake = Handshake(store, rank, world_size, options.secret, seconds)
    mine = {
        "name": options.name,
        "address": address,
        "devices": local_devices(),
        "maps": options.device_maps,
        "version": __version__,
        "seal": options.seal if options.secret is not None else "none",
        "transports": _by_priority(options.transports or ("shm", "uv")),
    }
    workers, key = handshake.begin(mine)
    names = [worker["name"] for worker in workers]
    if len(set(names)) != len(names):
        raise ValueError(f"every worker needs a name of its own; the names are {', '.join(names)}")
    _expect_same(workers, "version")
    _expect_same(workers, "seal")
    _expect_same(workers, "transports", lambda transports: transports[-1])
    handshake.names = names
    return handshake, workers, key


def _expect_same(workers: list[Any], setting: str, of: Callable[[Any], object] = str) -> None:
    """Raise ValueError unless all workers have the same setting, compared by `of`."""
    if len({of(worker[setting]) for worker in workers}) > 1:
        found = "; ".join(f"'{w['name']}' at {w['address']}: {w[setting]}" for w in workers)
        raise ValueError(f"the workers differ in `{setting}`, {_SETTINGS[setting]}: {found}")


def _report_refused(names: list[str], sender: int, reason: str) -> None:
    """Record a refused message in the log. The agent calls this for the first one of each sender."""
    who = f"worker '{names[sender]}'" if 0 <= sender < len(names) else "an unknown sender"
    _logger.warning(
        "a message that claims to come from %s was refused: %s; further messages of that sender are only counted "
        "(rpc_ext.statistics().refused)",
        who,
        reason,
    )


def _receive_into_pool(nbytes: int) -> None:
    """Receive tensors of 1 to 16 MiB from other workers into a pool of `nbytes`; 0: into new memory.

    Smaller tensors are cheap to allocate and to copy. TensorPipe allocates on a thread that serves all connections and
    must not block, so an exhausted pool allocates new memory for each tensor and counts its bytes.
    """
    if nbytes and nbytes not in _pools:
        _pools[nbytes] = BufferPool(nbytes, pin=False)
    _C.receive_into(_pools[nbytes].allocator() if nbytes else None, 1 << 20, 16 << 20)


def received_outside() -> int:
    """Return the number of bytes that this process has received outside of its exhausted pools."""
    return sum(pool.outside for pool in _pools.values())


def _engine_options(options: RpcOptions, devices: Plan) -> TensorPipeRpcBackendOptions:
    """Return the options in the form of torch's agent."""
    made = TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.rpc_timeout,
        _transports=None if options.transports is None else _by_priority(options.transports),
    )
    for worker, device_map in devices.native.items():
        made._set_device_map(worker, device_map)
    return made


def _by_priority(transports: Collection[str]) -> list[str]:
    """Return transports by priority, highest first. The last one carries the first message of a connection."""
    return sorted(transports, key=("shm", "ibv", "uv").index)


def _addresses(handshake: Handshake, own: str) -> list[str]:
    """Publish the address of this worker's agent; return the addresses of all agents, by rank.

    The records are signed with the session's key. Agents have no other source of addresses.
    """
    return handshake.round("address", own, lambda address: isinstance(address, str), absent="has not started its agent")


def _connect(agent: _C.Agent, names: list[str], handshake: Handshake, options: RpcOptions) -> None:
    """Start the agent and wait for the agents of all workers. With a secret, no process can connect to it after that.

    Raises:
        AuthenticationError: an address leads to a process that does not have the session's key.
    """
    before, others = _listeners.listening(), _listeners.watchers()
    _engine.set_agent(agent)
    found = _listeners.listening() - before
    is_safe = options.secret is not None
    try:
        _engine.first_calls(names if is_safe else names[:1], options.start_timeout)
    except RuntimeError as e:
        if "was refused" in str(e):
            raise AuthenticationError(f"the first calls to the other workers have failed: {e}") from e
        raise
    handshake.round("ready", True)  # no worker closes its sockets before the first calls of all workers have succeeded
    if not is_safe:
        return
    listeners = _listeners.of_an_engine(found, others)
    _listeners.close(listeners)
    if not listeners:
        warnings.warn(
            "the sockets on which RPC listens were not found, so they stay open: other processes can connect to this "
            "worker, and bytes that TensorPipe cannot read end it. Block its ports for other processes by a firewall",
            RuntimeWarning,
            stacklevel=2,
        )

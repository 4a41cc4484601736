"""The start of an agent.

::

    store ──► Exchange: names, devices, proofs of the secret ──► Agent ──► addresses ──► first calls
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions

from cudafuture.errors import AuthenticationError
from rpc_ext import _C, _engine, _listeners
from rpc_ext._codec import DeviceMap
from rpc_ext._devices import Plan, local_devices, plan
from rpc_ext._exchange import Exchange
from rpc_ext._receive_pool import receive_into_pool
from rpc_ext._serve import Server

__all__ = ["PATIENCE", "Options", "Started", "start"]

PATIENCE = 5.0
"""seconds that an agent, when it ends, waits for functions that it runs for others"""

_logger = logging.getLogger("rpc_ext.authentication")


@dataclass(frozen=True)
class Options:
    """The arguments of ``init_rpc`` that an agent is made with, checked."""

    num_worker_threads: int
    rpc_timeout: float
    secret: bytes | None
    seals_contents: bool
    device_maps: Any
    """as JSON"""
    start_timeout: float
    transports: list[str] | None
    receive_memory: int


class Started(NamedTuple):
    """An agent that runs, and what its session needs."""

    agent: _C.Agent
    exchange: Exchange
    peers: list[DeviceMap]
    """devices that the tensors of a call are sent to, by rank of the callee"""


def start(store: Any, rank: int, world_size: int, options: Options, server: Server) -> Started:
    """Find the other workers, exchange proofs of the secret, and start the agent, whose calls `server` answers."""
    exchange = Exchange(_engine.PrefixStore("exchange", store), rank, world_size, options.secret, options.start_timeout)
    mine = {
        "name": server.name,
        "devices": local_devices(),
        "maps": options.device_maps,
        "seal": options.seals_contents,
    }
    workers, key = exchange.begin(mine)
    names = [worker["name"] for worker in workers]
    if len(set(names)) != len(names):
        raise ValueError(f"every worker needs a name of its own; these came: {', '.join(names)}")
    _expect_one_seal(names, [worker["seal"] for worker in workers])
    exchange.names = names
    devices = plan(
        rank,
        names,
        [worker["devices"] for worker in workers],
        [worker["maps"] for worker in workers],
        carries_devices=not options.seals_contents,
    )
    if devices.native_devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # others may send before this process has used its devices
    server.set_devices(dict(enumerate(devices.answers)))
    receive_into_pool(options.receive_memory)
    _engine.init_distributed_autograd(rank)
    agent = _C.Agent(
        names,
        rank,
        lambda address: _addresses(exchange, address),
        _engine_options(options, devices),
        devices.native_reverse,
        devices.native_devices,
        key=key,
        contents=options.seals_contents,
        serve=server.serve,
        tell=_Teller(names),
    )
    try:
        _connect(agent, names, exchange, options)
    except BaseException:
        with contextlib.suppress(Exception):
            _engine.finish(agent, PATIENCE)
        raise
    return Started(agent, exchange, devices.calls)


def _expect_one_seal(names: list[str], seals_contents: list[bool]) -> None:
    """Raise ValueError unless all workers have chosen the same seal."""
    if len(set(seals_contents)) > 1:
        chosen = ", ".join(
            f"'{name}': {'contents' if contents else 'descriptions'}"
            for name, contents in zip(names, seals_contents, strict=True)
        )
        raise ValueError(f"all workers need the same init_rpc(seal=...); they have {chosen}")


def _engine_options(options: Options, devices: Plan) -> TensorPipeRpcBackendOptions:
    """Return the options as torch's agent takes them."""
    made = TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.rpc_timeout,
        _transports=options.transports,
    )
    for worker, device_map in devices.native.items():
        made._set_device_map(worker, device_map)
    return made


def _addresses(exchange: Exchange, own: str) -> list[str]:
    """Show the address of this worker's agent to the other workers; return the addresses of all, by rank.

    The records are signed with the session's key. Agents take addresses from nowhere else.
    """
    return exchange.round("address", own, lambda address: isinstance(address, str), absent="has not started its agent")


def _connect(agent: _C.Agent, names: list[str], exchange: Exchange, options: Options) -> None:
    """Start the agent and wait until all have; with a secret, no process can connect to it after that.

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
    exchange.round("ready", True)  # no worker closes its sockets before the first calls of all have gone through
    if is_safe:
        _close_listeners(_listeners.of_an_engine(found, others))


def _close_listeners(listeners: set[int]) -> None:
    _listeners.close(listeners)
    if not listeners:
        warnings.warn(
            "the sockets on which RPC listens were not found, so they stay open: other processes can connect to this "
            "worker, and bytes that TensorPipe cannot read end it. Keep its ports closed to others by a firewall",
            RuntimeWarning,
            stacklevel=2,
        )


class _Teller:
    """Logs the first message that is refused of each worker."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, sender: int, reason: str) -> None:
        who = f"worker '{self._names[sender]}'" if 0 <= sender < len(self._names) else "an unknown sender"
        _logger.warning(
            "a message that claims to come from %s was refused: %s; further ones are only counted "
            "(rpc_ext.statistics().refused)",
            who,
            reason,
        )

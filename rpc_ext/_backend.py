"""How an agent comes to be: our backend in torch's registry of RPC backends.

::

    store ──► Exchange: who is there, with which devices; who knows the secret ──► Agent ──► first calls
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions

from cudafuture.errors import AuthenticationError
from rpc_ext import _C, _engine, _listeners
from rpc_ext._codec import DeviceMap
from rpc_ext._devices import as_json, local_devices, plan
from rpc_ext._exchange import Exchange
from rpc_ext._receive_pool import DEFAULT_BYTES, receive_into_pool
from rpc_ext._serve import Server

__all__ = ["BACKEND", "PATIENCE", "Options", "backend"]

BACKEND = "CUDAFUTURE"
"""the name of our backend in torch's registry"""
PATIENCE = 5.0
"""seconds that an agent, when it ends, waits for functions that it runs for others"""

_logger = logging.getLogger("rpc_ext.authentication")


class Options(TensorPipeRpcBackendOptions):
    """What our backend is made with, beside what TensorPipe's is, and what came of it."""

    def __init__(
        self,
        *,
        num_worker_threads: int = _engine.DEFAULT_WORKER_THREADS,
        rpc_timeout: float = _engine.DEFAULT_RPC_TIMEOUT,
        init_method: str = "env://",
        secret: bytes | None = None,
        seal: str = "descriptions",
        device_maps: Any = "auto",
        start_timeout: float = 300.0,
        transports: Sequence[str] | None = None,
        receive_memory: int = DEFAULT_BYTES,
        server: Server | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            _transports=None if transports is None else list(transports),
        )
        self.secret, self.wanted_maps, self.start_timeout = secret, as_json(device_maps), start_timeout
        self.seals_contents = secret is not None and seal == "contents"
        self.receive_memory = receive_memory
        self.server = server
        self.exchange: Exchange | None = None
        self.peers: list[DeviceMap] = []


def backend() -> contextlib.AbstractContextManager[Any]:
    """Have our entry in torch's registry, while an agent is made."""
    return _engine.registered_backend(BACKEND, _options, _init_agent)


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> Options:
    return Options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init_agent(store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Options) -> Any:
    """Find the others, prove and have proven who knows the secret, and start the agent. Called by torch."""
    options = rpc_backend_options
    server = options.server if options.server is not None else Server(name, options.num_worker_threads)
    exchange = Exchange(
        _engine.PrefixStore("exchange", store),
        rank,
        world_size,
        options.secret,
        options.start_timeout,
    )
    mine = {"name": name, "devices": local_devices(), "maps": options.wanted_maps, "seal": options.seals_contents}
    workers, key = exchange.begin(mine)
    names = [worker["name"] for worker in workers]
    if len(set(names)) != len(names):
        raise ValueError(f"every worker needs a name of its own; these came: {', '.join(names)}")
    _expect_one_seal(names, [worker["seal"] for worker in workers])
    exchange.names = names
    found = plan(
        rank,
        names,
        [w["devices"] for w in workers],
        [w["maps"] for w in workers],
        carries_devices=not options.seals_contents,
    )
    for worker, device_map in found.native.items():
        options._set_device_map(worker, device_map)
    if found.native_devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # others may send before this process has used its devices
    server.set_devices(dict(enumerate(found.answers)))
    receive_into_pool(options.receive_memory)
    agent = _C.Agent(
        names,
        rank,
        lambda address: _addresses(exchange, address),
        options,
        found.native_reverse,
        found.native_devices,
        key=key,
        contents=options.seals_contents,
        serve=server.serve,
        tell=_Teller(names),
    )
    try:
        _start(agent, names, exchange, options)
    except BaseException:
        with contextlib.suppress(Exception):
            _engine.finish(agent, PATIENCE)
        raise
    options.exchange, options.peers = exchange, found.calls
    return agent


def _expect_one_seal(names: list[str], seals_contents: list[bool]) -> None:
    """Raise ValueError unless all workers have chosen the same seal."""
    if len(set(seals_contents)) > 1:
        chosen = ", ".join(
            f"'{name}': {'contents' if contents else 'descriptions'}"
            for name, contents in zip(names, seals_contents, strict=True)
        )
        raise ValueError(f"all workers need the same init_rpc(seal=...); they have {chosen}")


def _addresses(exchange: Exchange, own: str) -> list[str]:
    """Show the address of this worker's agent to the other workers; return the addresses of all, by rank.

    The records are signed with the session's key. Agents take addresses from nowhere else.
    """
    return exchange.round("address", own, lambda address: isinstance(address, str), absent="has not started its agent")


def _start(agent: _C.Agent, names: list[str], exchange: Exchange, options: Options) -> None:
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

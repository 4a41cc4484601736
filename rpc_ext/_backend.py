"""How an agent comes to be: our backend in torch's registry of RPC backends.

::

    store ──► Exchange: who is there, with which devices; who knows the secret ──► Agent ──► a first round of calls
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions

from rpc_ext import _C, _engine
from rpc_ext._codec import DeviceMap
from rpc_ext._devices import as_json, local_devices, plan
from rpc_ext._exchange import Exchange
from rpc_ext._serve import Server

__all__ = ["BACKEND", "Options", "backend"]

BACKEND = "CUDAFUTURE"
"""the name of our backend in torch's registry"""

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
        device_maps: Any = "auto",
        start_timeout: float = 300.0,
        server: Server | None = None,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.secret, self.wanted_maps, self.start_timeout = secret, as_json(device_maps), start_timeout
        self.server = server
        self.exchange: Exchange | None = None
        self.peers: list[DeviceMap] = []


def backend() -> Any:
    """Return our entry in torch's registry."""
    return _engine.register_backend(BACKEND, _options, _init_agent)


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
    mine = {"name": name, "devices": local_devices(), "maps": options.wanted_maps}
    workers, key = exchange.begin(mine)
    names = [worker["name"] for worker in workers]
    if len(set(names)) != len(names):
        raise ValueError(f"every worker needs a name of its own; these came: {', '.join(names)}")
    found = plan(rank, names, [w["devices"] for w in workers], [w["maps"] for w in workers])
    for worker, device_map in found.native.items():
        options._set_device_map(worker, device_map)
    if found.native_devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # others may send before this process has used its devices
    server.set_devices(dict(enumerate(found.to_peers)))
    agent = _C.Agent(
        _engine.PrefixStore("agent", store),
        name,
        rank,
        world_size,
        options,
        found.native_reverse,
        found.native_devices,
        key=key,
        serve=server.serve,
        tell=_Teller(names),
    )
    try:
        _engine.set_agent(agent)
        _engine.first_round_of_calls(options.start_timeout)
        exchange.round("ready", True)  # nobody leaves before the first round of calls has gone through
    except BaseException:
        with contextlib.suppress(Exception):
            _engine.finish()
        raise
    options.exchange, options.peers = exchange, found.to_peers
    return agent


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

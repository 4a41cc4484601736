"""How an agent comes to be: our backend in torch's registry of RPC backends.

::

    store ──► Exchange: who is there, with which devices; who knows the secret ──► Agent ──► first calls
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions

from cudafuture.errors import AuthenticationError, CUDAFutureError
from rpc_ext import _C, _engine, _listeners, _memory
from rpc_ext._codec import DeviceMap
from rpc_ext._devices import as_json, local_devices, plan
from rpc_ext._exchange import Exchange
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
        device_maps: Any = "auto",
        start_timeout: float = 300.0,
        transports: Sequence[str] | None = None,
        server: Server | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            _transports=None if transports is None else list(transports),
        )
        self.secret, self.wanted_maps, self.start_timeout = secret, as_json(device_maps), start_timeout
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
    mine = {"name": name, "devices": local_devices(), "maps": options.wanted_maps}
    workers, key = exchange.begin(mine)
    names = [worker["name"] for worker in workers]
    if len(set(names)) != len(names):
        raise ValueError(f"every worker needs a name of its own; these came: {', '.join(names)}")
    exchange.names = names
    found = plan(rank, names, [w["devices"] for w in workers], [w["maps"] for w in workers])
    for worker, device_map in found.native.items():
        options._set_device_map(worker, device_map)
    if found.native_devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # others may send before this process has used its devices
    server.set_devices(dict(enumerate(found.answers)))
    _memory.receive_here()
    meeting = _engine.PrefixStore("agent", store)
    with _missing_named(meeting, names, options.start_timeout):
        agent = _C.Agent(
            meeting,
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
            _start(agent, names, exchange, options)
        except BaseException:
            with contextlib.suppress(Exception):
                _engine.finish(agent, PATIENCE)
            raise
    options.exchange, options.peers = exchange, found.calls
    return agent


@contextlib.contextmanager
def _missing_named(meeting: Any, names: list[str], timeout: float) -> Iterator[None]:
    """Say who has not come to the place in the store where torch's agents meet, when one does not get over that."""
    try:
        yield
    except CUDAFutureError:  # it says so itself
        raise
    except RuntimeError as e:
        try:
            unnamed = [name for rank, name in enumerate(names) if not meeting.check([f"names/{rank}"])]
            missing = unnamed or [name for name in names if not meeting.check([f"addrs/{name}"])]
        except RuntimeError:
            raise TimeoutError(f"the store was lost while RPC began: {e}") from e
        if not missing:
            raise
        who = ", ".join(f"'{name}'" for name in missing)
        raise TimeoutError(f"worker {who} has not started its agent within {timeout:g} s") from e


def _start(agent: _C.Agent, names: list[str], exchange: Exchange, options: Options) -> None:
    """Start the agent and wait until all have; with a secret, nobody can connect to it after that.

    Raises:
        AuthenticationError: the store leads to others than those who have proven that they know the secret.
    """
    before, others = _listeners.listening(), _listeners.watchers()
    _engine.set_agent(agent)
    doors = _listeners.listening() - before
    is_safe = options.secret is not None
    if is_safe:
        _check_names(agent, names)
    try:
        _engine.first_calls(names if is_safe else names[:1], options.start_timeout)
    except RuntimeError as e:
        if "was refused" in str(e):
            raise AuthenticationError(f"the first calls to the other workers have failed: {e}") from e
        raise
    exchange.round("ready", True)  # nobody leaves, or closes the doors, before the first calls have gone through
    if is_safe:
        _listeners.close(_listeners.of_an_engine(doors, others))


def _check_names(agent: Any, names: list[str]) -> None:
    """Check that torch's agent has the names that the workers have signed: it takes them from the store as they are."""
    found = {info.id: info.name for info in agent.get_worker_infos()}
    if found != dict(enumerate(names)):
        raise AuthenticationError(f"the store says that the workers are {found}, and they say that they are {names}")


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

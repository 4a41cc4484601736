"""A process that does not belong to a job, and what it sends to the workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hmac
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch._C import _distributed_rpc
from torch.distributed import rpc as torch_rpc
from torch.distributed.rpc import api, internal

import rpc_ext
from rpc_ext import _C, _codec, _engine
from support.patience import PATIENCE

MAGIC = b"\xcfRPC"
SEAL_SIZE = 80
NAME = "stranger"

rpc: Any = torch_rpc  # has few types
_api: Any = api
_internal: Any = internal
_native: Any = _distributed_rpc


def key_of(worker: rpc_ext.Session) -> bytes:
    """Return the key that seals the messages of a session."""
    key = worker._handshake._key
    return b"" if key is None else hmac.digest(key, b"cudafuture messages", "sha256")


@contextlib.contextmanager
def collect_log() -> Iterator[list[str]]:
    """Collect what is logged of messages and records that were not as they should be."""
    logger = logging.getLogger("rpc_ext.authentication")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


# ---- what is to happen where it must not


def our_call(path: str, *, caller: int = 1) -> bytes:
    """Return the payload of a call by rpc_ext that makes a folder."""
    return _codec.encode(_codec.PayloadKind.CALL, (caller, os.mkdir, (path,), {})).payload


def torchs_call(path: str) -> bytes:
    """Return the payload of torch's Python call that makes a folder: first whether a future comes of it."""
    serialized: bytes = _internal.serialize(_internal.PythonUDF(os.mkdir, (path,), {}))[0]
    return b"\0" + serialized


def make_folder(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make a folder; the tensor is what autograd follows."""
    Path(path).mkdir()
    return tensor


@functools.cache
def script_that_makes_a_file() -> Any:
    """Return a TorchScript function, which others can call when they have asked for it as well."""
    return _compile(_make_file)


@functools.cache
def script_that_adds() -> Any:
    """Return another."""
    return _compile(_add)


def _compile(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return torch.jit.script(function)


def _make_file(path: str) -> torch.Tensor:
    return torch.from_file(path, True, 4)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def fetch(reference: Any) -> Any:
    """Return what a reference refers to."""
    return reference.to_here()


class Bomb:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


# ---- who sends it


class Stranger:
    """An agent that is no worker of a job, and knows the addresses of its workers.

    Without a key it is the next worker, and signs nothing. With a key it takes itself for the worker `rank`.
    """

    def __init__(self, addresses: Mapping[str, bytes], rank: int | None = None, key: bytes = b"") -> None:
        names, known = list(addresses), [address.decode() for address in addresses.values()]
        if rank is None:
            rank = len(names)
            names.append(NAME)
            known.append("")

        def exchange(own: str) -> list[str]:
            return [*known[:rank], own, *known[rank + 1 :]]

        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, rpc_timeout=PATIENCE)
        self._agent = _C.Agent(
            names,
            rank,
            exchange,
            options,
            {},
            [],
            key=key,
            contents=False,
            serve=lambda *_: None,
            tell=lambda *_: None,
        )
        self.workers = list(addresses)
        _engine.init_distributed_autograd(rank)

    def __enter__(self) -> Stranger:
        _engine.set_agent(self._agent)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with mock.patch.object(_api, "_ignore_rref_leak", True):  # of values that were never made
            _engine.finish(self._agent, PATIENCE)

    def send(self, to: int, message: bytes, tensors: Sequence[torch.Tensor] = ()) -> str:
        """Send bytes as a Python call; return what is said to that: "" where an answer came."""
        answer: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._agent.call(to, message, list(tensors), PATIENCE, _Listener(answer))
        return answer.result(PATIENCE)

    def call(self, function: Any, *args: object) -> str:
        """Call a function by torch's own rpc_async; return what is said to that: "" where an answer came."""
        return message_of(lambda: rpc.rpc_sync(self.workers[0], function, args=args))

    def builtin(self, operator: str, *args: object) -> str:
        """Call an operator by its name."""
        to = self._agent.get_worker_info(self.workers[0])
        return message_of(lambda: _native._invoke_rpc_builtin(to, operator, float(PATIENCE), *args).wait())

    def remote(self, function: Any, *args: object) -> str:
        """Make an RRef of the result of a function, and release it: until then its owner cannot shut down."""
        message = message_of(lambda: rpc.remote(self.workers[0], function, args=args).to_here())
        if not message:
            _engine.forget_users(PATIENCE)
            while _engine.calls_in_flight(self._agent):
                time.sleep(0)
        return message


class _Listener:
    def __init__(self, answer: concurrent.futures.Future[str]) -> None:
        self._answer = answer

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        self._answer.set_result("")

    def on_error(self, kind: int, message: str) -> None:
        self._answer.set_result(message)


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the error that a call ends with, or ""."""
    try:
        call()
    except RuntimeError as e:
        return str(e) or repr(e)
    return ""

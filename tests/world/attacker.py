"""One who does not belong to a job, and what he sends to its workers: with an agent of torch's, or signed like ours.

``Frame`` is a second making of the frames that rpc_ext/_C/seal.h describes, so what it signs also shows that native
workers keep to the description.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hmac
import logging
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

MAGIC = b"\xcfRPC"
HEAD = struct.Struct("<4sBBHIIQ")  # magic, version, direction, type, sender, receiver, counter
HEADER_SIZE = HEAD.size + 32
PYTHON_CALL, PYTHON_RET, SCRIPT_CALL = 0x102, 0x203, 0x100  # of torch's messages
REQUEST, REPLY = 1, 2
PATIENCE = 60  # seconds until what has not come is a failure of the test
NAME = "stranger"

rpc: Any = torch_rpc  # has few types
_api: Any = api
_internal: Any = internal
_native: Any = _distributed_rpc
_torch: Any = torch


@dataclass(frozen=True)
class Frame:
    """A sealed message."""

    payload: bytes
    sender: int
    receiver: int
    counter: int
    direction: int = REQUEST
    type: int = PYTHON_CALL
    tensors: tuple[torch.Tensor, ...] = ()
    magic: bytes = MAGIC
    version: int = 1

    def signed(self, key: bytes) -> bytes:
        """Return its bytes; the tensors go beside them."""
        head = HEAD.pack(self.magic, self.version, self.direction, self.type, self.sender, self.receiver, self.counter)
        return head + hmac.digest(key, head + described(self.tensors) + self.payload, "sha256") + self.payload


def described(tensors: Sequence[torch.Tensor]) -> bytes:
    """Describe tensors as their signature does: of the host, of a few dtypes."""
    numbers = {torch.uint8: 0, torch.int64: 4, torch.float32: 6, torch.float64: 7}
    parts = [struct.pack("<Q", len(tensors))]
    parts += [
        struct.pack(f"<iiQ{t.dim()}q", numbers[t.dtype], 0, t.dim(), *t.shape)  # 0: the host
        for t in tensors
    ]
    return b"".join(parts)


def key_of(worker: rpc_ext.Session) -> bytes:
    """Return what the messages of a session are signed with: to make frames such as a worker could have sent."""
    key = worker._exchange._key
    return b"" if key is None else hmac.digest(key, b"cudafuture messages", "sha256")


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
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
    return _codec.encode(_codec.Kind.CALL, (caller, os.mkdir, (path,), {})).payload


def torchs_call(path: str) -> bytes:
    """Return the payload of torch's Python call that makes a folder: first whether a future comes of it."""
    return b"\0" + _internal.serialize(_internal.PythonUDF(os.mkdir, (path,), {}))[0]


def make_folder(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make a folder; the tensor is what autograd follows."""
    Path(path).mkdir()
    return tensor


@functools.cache
def script_that_makes_a_file() -> Any:
    """Return a TorchScript function, which others can call when they have asked for it as well."""
    return _compiled(_make_file)


@functools.cache
def script_that_adds() -> Any:
    """Return another."""
    return _compiled(_add)


def _compiled(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return torch.jit.script(function)


def _make_file(path: str) -> torch.Tensor:
    return torch.from_file(path, True, 4)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def fetched(reference: Any) -> Any:
    """Return what a reference refers to."""
    return reference.to_here()


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


# ---- who sends it


class Stranger:
    """Has an agent of torch's that signs nothing, and the addresses of a job's workers out of their store."""

    def __init__(self, rank: int, addresses: Mapping[str, bytes]) -> None:
        store = _torch.distributed.HashStore()
        for worker, (name, address) in enumerate(addresses.items()):
            store.set(f"names/{worker}", name)
            store.set(f"addrs/{name}", address)
        assert rank == len(addresses)
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, rpc_timeout=PATIENCE)
        self._agent = _C.Agent(
            store, NAME, rank, rank + 1, options, {}, [], key=b"", serve=lambda *_: None, tell=lambda *_: None
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
        return said(lambda: rpc.rpc_sync(self.workers[0], function, args=args))

    def builtin(self, operator: str, *args: object) -> str:
        """Call an operator by its name."""
        to = self._agent.get_worker_info(self.workers[0])
        return said(lambda: _native._invoke_rpc_builtin(to, operator, float(PATIENCE), *args).wait())

    def remote(self, function: Any, *args: object) -> str:
        """Have an RRef made of what a function returns."""
        return said(lambda: rpc.remote(self.workers[0], function, args=args).to_here())


class _Listener:
    def __init__(self, answer: concurrent.futures.Future[str]) -> None:
        self._answer = answer

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        self._answer.set_result("")

    def on_error(self, kind: int, message: str) -> None:
        self._answer.set_result(message)


def said(call: Callable[[], object]) -> str:
    """Return the message of the error that a call ends with, or ""."""
    try:
        call()
    except RuntimeError as e:
        return str(e) or repr(e)
    return ""

"""The encoding of Python values as bytes and tensors, the parts of a message of torch's agent.

A payload is::

    magic, 4 bytes | kind, 1 | flags, 1 | [length, 4, and JSON: the target device of each tensor] | [RRefs] | pickle

RRefs are serialized last, after everything else has been pickled: the owner of a serialized RRef waits until a worker
receives it. Tensors of devices that the agent cannot carry are sent through the host; `Encoded.targets` has the device
of each on the other worker.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import TensorError
from rpc_ext import _C
from rpc_ext._engine import PyRRef, RRef

__all__ = [
    "ATOMS",
    "CHANNEL_HEADER",
    "NO_DEVICES",
    "DeviceMap",
    "DirectCall",
    "Encoded",
    "PayloadKind",
    "decode",
    "decode_with_owners",
    "encode",
    "has_rrefs",
    "kind_of",
    "targets_of",
]


class PayloadKind:
    """The kinds of payloads."""

    CALL = 1  # caller's rank, function, arguments
    VALUE = 2  # result of the function
    FAILURE = 3  # exception of the function
    BATCH = 4  # many calls, or their replies; see _batching
    CHANNEL = 5  # a message for a handler, or its reply; see _C/message_handler.h


_HAS_RREFS = 1
_HAS_TARGETS = 2
_LENGTH = struct.Struct("<I")
_HEADER = len(_C.MAGIC) + 2
_KIND, _FLAGS = len(_C.MAGIC), len(_C.MAGIC) + 1
_HEADS = [_C.MAGIC + bytes(divmod(i, 4)) for i in range(4 * (PayloadKind.BATCH + 1))]
CHANNEL_HEADER = _HEADER
_LARGE = 1 << 16  # bytes; a larger buffer is not kept


@dataclass(frozen=True)
class DeviceMap:
    """The target devices of tensors: the agent carries `native` ones; `staged` ones go through the host."""

    peer: str
    native: Mapping[torch.device, torch.device]
    staged: Mapping[torch.device, torch.device]


NO_DEVICES = DeviceMap("", {}, {})

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""types of immutable values without references: several of them may be pickled together"""
_HOST = torch.device("cpu")


class Encoded:
    """A payload and its tensors. A tensor with a device in `targets` must be copied to the host before it is sent."""

    __slots__ = ("earlier", "payload", "targets", "tensors")

    def __init__(self, payload: bytes, tensors: list[torch.Tensor], targets: list[str | None] | None) -> None:
        self.payload, self.tensors, self.targets = payload, tensors, targets
        self.earlier: list[CUDAFuture[list[torch.Tensor]]] = []  # the tensors, if the message is sent later

    @property
    def size(self) -> int:
        """The bytes of the payload and the tensors."""
        return len(self.payload) + sum(tensor.nbytes for tensor in self.tensors)


class DirectCall:
    """A call in a batch whose arguments are plain values. Such calls of one message are pickled together."""

    __slots__ = ("args", "index", "size")

    def __init__(self, index: int, args: tuple[Any, ...]) -> None:
        self.index, self.args = index, args
        self.size = 8 * (len(args) + 1)
        for arg in args:
            if type(arg) is str or type(arg) is bytes:
                self.size += len(arg)


class _TensorPickler(pickle.Pickler):
    """A pickler that replaces tensors by indexes, and RRefs by torch's serialized form."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.file = file
        self.forget()

    def dumped(self, value: object, devices: DeviceMap) -> bytes:
        """Return one pickled value."""
        self.devices = devices
        try:
            self.dump(value)
        except TensorError:
            raise
        except Exception:
            for tensor in reversed(self.others):
                _expect_picklable(tensor, devices)
            raise
        return self.file.getvalue()

    def forget(self) -> None:
        """Reset the pickler for the next value."""
        self.clear_memo()
        self.file.seek(0)
        self.file.truncate()
        self.devices = NO_DEVICES
        self.tensors: list[torch.Tensor] = []
        self.targets: list[str | None] = []
        self.rrefs: list[Any] = []
        self.others: list[torch.Tensor] = []  # whose classes reduce them to plain tensors
        self.staged = False

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls is torch.Tensor and obj.layout is torch.strided and not obj.is_nested:
            return self._tensor(_C.sendable(obj))
        if cls is PyRRef or cls is RRef:
            self.rrefs.append(obj)
            return _rref, (len(self.rrefs) - 1,)
        if isinstance(obj, torch.Tensor):
            _C.expect_storage(obj)
            self.others.append(obj)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        target = None
        device = tensor.device
        if device != _HOST and device not in self.devices.native:
            target = str(self._target(device))
            self.staged = True
        self.tensors.append(tensor)
        self.targets.append(target)
        return _tensor, (len(self.tensors) - 1,)

    def _target(self, device: torch.device) -> torch.device:
        target = self.devices.staged.get(device)
        if target is None:
            pairs = {**self.devices.native, **self.devices.staged}.items()
            known = ", ".join(f"{here} to {there}" for here, there in pairs) or "nothing"
            raise TensorError(
                f"a tensor on {device} cannot be sent to worker '{self.devices.peer}': no device there is its target "
                f"(mapped: {known}); copy it to the host first, or pass device_maps to init_rpc"
            )
        return target


def _expect_picklable(tensor: torch.Tensor, devices: DeviceMap) -> None:
    """Raise TensorError if a tensor cannot be pickled: for example a fake or an opaque one, or one in a transform."""
    pickler = _TensorPickler(io.BytesIO())
    pickler.devices = devices
    try:
        pickler.dump(tensor)
    except TensorError:
        raise
    except Exception as e:
        cls = type(tensor)
        what = f"{cls.__module__}.{cls.__qualname__} of layout {tensor.layout}"
        raise TensorError(f"a {what} cannot be sent: {e}") from e


def encode(kind: int, value: object, devices: DeviceMap = NO_DEVICES) -> Encoded:
    """Pickle `value` without its tensors.

    Raises:
        TensorError: a tensor cannot be sent, or its device has no target.
        Exception: the error of a value that cannot be pickled.
    """
    pickler, _state.pickler = _state.pickler, None  # not available to __reduce__ of a value, which may make a call
    if pickler is None:
        pickler = _TensorPickler(io.BytesIO())
    pickled = pickler.dumped(value, devices)
    tensors, targets = pickler.tensors, pickler.targets if pickler.staged else None
    if pickler.rrefs:
        pickled = pickle.dumps([rref._serialize() for rref in pickler.rrefs]) + pickled
    flags = (_HAS_RREFS if pickler.rrefs else 0) | (_HAS_TARGETS if pickler.staged else 0)
    if len(pickled) <= _LARGE:
        pickler.forget()
        _state.pickler = pickler
    head = _HEADS[4 * kind + flags]
    if targets is None:
        return Encoded(head + pickled, tensors, None)
    places = json.dumps(targets).encode()
    return Encoded(b"".join((head, _LENGTH.pack(len(places)), places, pickled)), tensors, targets)


def kind_of(payload: bytes) -> int:
    """Return the kind of a payload."""
    return payload[_KIND]


def has_rrefs(payload: bytes) -> bool:
    """Return whether the payload has RRefs, which their owners have to confirm before the value is used."""
    return bool(payload[_FLAGS] & _HAS_RREFS)


def targets_of(payload: bytes) -> list[str | None] | None:
    """Return the target device of each tensor, None for tensors that stay on their device."""
    if not payload[_FLAGS] & _HAS_TARGETS:
        return None
    (length,) = _LENGTH.unpack_from(payload, _HEADER)
    targets: list[str | None] = json.loads(payload[_HEADER + _LENGTH.size : _HEADER + _LENGTH.size + length])
    return targets


class _CodecState(threading.local):
    tensors: Sequence[torch.Tensor] = ()  # of the payload that this thread is decoding
    rrefs: Sequence[Any] = ()  # of that payload, serialized by torch
    owners: set[str] | None = None  # in decode_with_owners: the owners of unconfirmed RRefs
    pickler: _TensorPickler | None = None  # of this thread, while it is not in use


_state = _CodecState()


def decode(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Return the value in a payload. With a secret, the agent has verified its seal."""
    start = _HEADER
    if payload[_FLAGS] & _HAS_TARGETS:
        start += _LENGTH.size + _LENGTH.unpack_from(payload, start)[0]
    if not tensors and not payload[_FLAGS] & _HAS_RREFS:
        return pickle.loads(memoryview(payload)[start:])
    outer = _state.tensors, _state.rrefs
    file = io.BytesIO(memoryview(payload)[start:])
    _state.tensors, _state.rrefs = tensors, pickle.load(file) if payload[_FLAGS] & _HAS_RREFS else ()
    try:
        return pickle.load(file)
    finally:
        _state.tensors, _state.rrefs = outer


def _tensor(index: int) -> torch.Tensor:
    return _state.tensors[index]


def decode_with_owners(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, set[str]]:
    """Return the value in a payload with RRefs, and the names of the owners that have to confirm RRefs."""
    outer, owners = _state.owners, set[str]()
    _state.owners = owners
    try:
        return decode(payload, tensors), owners
    finally:
        _state.owners = outer


def _rref(index: int) -> Any:
    rref = PyRRef._deserialize(_state.rrefs[index])
    if _state.owners is not None and not rref.confirmed_by_owner():
        _state.owners.add(rref.owner_name())
    return rref

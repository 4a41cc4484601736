"""Python values as bytes beside tensors, which is how torch's agent carries them.

A payload is::

    magic, 4 bytes | kind, 1 | flags, 1 | [length, 4, and JSON: the target device of each tensor] | [RRefs] | pickle

RRefs are serialized when all else is pickled: an owner waits for each that was serialized until a worker receives it.
Tensors of devices that the agent cannot carry travel through the host: `Encoded.targets` says where each belongs on the
other side.
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
from rpc_ext import _C
from rpc_ext._engine import PyRRef, RRef

__all__ = [
    "ATOMS",
    "CHANNEL_HEADER",
    "NO_DEVICES",
    "DeviceMap",
    "Direct",
    "Encoded",
    "Kind",
    "channel_header",
    "decode",
    "decode_with_owners",
    "encode",
    "has_rrefs",
    "kind_of",
    "targets_of",
]


class Kind:
    """The kinds of payloads."""

    CALL = 1  # caller's rank, function, arguments
    VALUE = 2  # what it returned
    FAILURE = 3  # what it raised
    BATCH = 4  # many calls, or their answers; see _batching
    CHANNEL = 5  # a message for a handler, or its answer; the flags are the number of the channel


_HAS_RREFS = 1
_HAS_TARGETS = 2
_LENGTH = struct.Struct("<I")
_HEADER = len(_C.MAGIC) + 2
_KIND, _FLAGS = len(_C.MAGIC), len(_C.MAGIC) + 1
_HEADS = [_C.MAGIC + bytes(divmod(i, 4)) for i in range(4 * (Kind.BATCH + 1))]
CHANNEL_HEADER = _HEADER
_LARGE = 1 << 16  # bytes: a buffer that has held more is not kept


@dataclass(frozen=True)
class DeviceMap:
    """The targets of tensors: the agent carries those of `native` devices, those of `staged` go through the host."""

    peer: str
    native: Mapping[torch.device, torch.device]
    staged: Mapping[torch.device, torch.device]


NO_DEVICES = DeviceMap("", {}, {})

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""types of values that pickle as themselves and cannot change: several of them may be pickled together"""
_HOST = torch.device("cpu")


class Encoded:
    """A payload and its tensors; where `targets` has a device, that tensor has still to be copied to the host."""

    __slots__ = ("earlier", "payload", "targets", "tensors")

    def __init__(self, payload: bytes, tensors: list[torch.Tensor], targets: list[str | None] | None) -> None:
        self.payload, self.tensors, self.targets = payload, tensors, targets
        self.earlier: list[CUDAFuture[list[torch.Tensor]]] = []  # of a message that is sent later: its tensors

    @property
    def size(self) -> int:
        """Bytes that it takes, with its tensors."""
        return len(self.payload) + sum(tensor.nbytes for tensor in self.tensors)


class Direct:
    """A call in a batch, with plain values for arguments: the calls of a message are pickled together."""

    __slots__ = ("args", "index", "size")

    def __init__(self, index: int, args: tuple[Any, ...]) -> None:
        self.index, self.args = index, args
        self.size = 8 * (len(args) + 1)
        for arg in args:
            if type(arg) is str or type(arg) is bytes:
                self.size += len(arg)


class _Pickler(pickle.Pickler):
    """Takes plain tensors out, and RRefs as torch has them counted."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.file = file

    def dumped(self, value: object, devices: DeviceMap) -> bytes:
        """Pickle one value."""
        self.devices = devices
        self.tensors: list[torch.Tensor] = []
        self.targets: list[str | None] = []
        self.rrefs: list[Any] = []
        self.staged = False
        self.dump(value)
        return self.file.getvalue()

    def forget(self) -> None:
        """Be as new."""
        self.clear_memo()
        self.file.seek(0)
        self.file.truncate()
        self.devices = NO_DEVICES
        self.tensors, self.targets, self.rrefs = [], [], []

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls is torch.Tensor and obj.layout is torch.strided and not obj.is_nested:
            return self._tensor(obj)  # torch reduces others to such ones
        if cls is PyRRef or cls is RRef:
            self.rrefs.append(obj)
            return _rref, (len(self.rrefs) - 1,)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_quantized:
            tensor.qscheme()  # without one torch's engine would end the process
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
            raise ValueError(
                f"a tensor on {device} cannot be sent to worker '{self.devices.peer}': no device there is its target "
                f"(mapped: {known}); copy it to the host first, or give init_rpc device_maps"
            )
        return target


def encode(kind: int, value: object, devices: DeviceMap = NO_DEVICES) -> Encoded:
    """Pickle `value`, its tensors apart.

    Raises:
        ValueError: a tensor's device has no target.
        Exception: whatever a value that cannot be pickled raises.
    """
    pickler, _table.pickler = _table.pickler, None  # none: __reduce__ of a value makes a call of its own
    if pickler is None:
        pickler = _Pickler(io.BytesIO())
    pickled = pickler.dumped(value, devices)
    tensors, targets = pickler.tensors, pickler.targets if pickler.staged else None
    if pickler.rrefs:
        pickled = pickle.dumps([rref._serialize() for rref in pickler.rrefs]) + pickled
    flags = (_HAS_RREFS if pickler.rrefs else 0) | (_HAS_TARGETS if pickler.staged else 0)
    if len(pickled) <= _LARGE:
        pickler.forget()
        _table.pickler = pickler
    head = _HEADS[4 * kind + flags]
    if targets is None:
        return Encoded(head + pickled, tensors, None)
    places = json.dumps(targets).encode()
    return Encoded(b"".join((head, _LENGTH.pack(len(places)), places, pickled)), tensors, targets)


def channel_header(number: int) -> bytes:
    """Return the beginning of a message of a channel. An answer has number 0."""
    return _C.MAGIC + bytes((Kind.CHANNEL, number))


def kind_of(payload: bytes) -> int:
    """Return the kind of a payload."""
    return payload[_KIND]


def has_rrefs(payload: bytes) -> bool:
    """Return whether owners have to confirm RRefs in the decoded value before it is used."""
    return bool(payload[_FLAGS] & _HAS_RREFS)


def targets_of(payload: bytes) -> list[str | None] | None:
    """Return the device that each tensor belongs on, None for those that stay where they are."""
    if not payload[_FLAGS] & _HAS_TARGETS:
        return None
    (length,) = _LENGTH.unpack_from(payload, _HEADER)
    targets: list[str | None] = json.loads(payload[_HEADER + _LENGTH.size : _HEADER + _LENGTH.size + length])
    return targets


class _Table(threading.local):
    tensors: Sequence[torch.Tensor] = ()  # of the payload that this thread is decoding
    rrefs: Sequence[Any] = ()  # of that payload, as torch has serialized them
    owners: set[str] | None = None  # where they are wanted: of the RRefs in there that others still have to confirm
    pickler: _Pickler | None = None  # of this thread, while it is not in use


_table = _Table()


def decode(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Unpickle a payload. If there is a secret, its seal was checked before."""
    start = _HEADER
    if payload[_FLAGS] & _HAS_TARGETS:
        start += _LENGTH.size + _LENGTH.unpack_from(payload, start)[0]
    if not tensors and not payload[_FLAGS] & _HAS_RREFS:
        return pickle.loads(memoryview(payload)[start:])
    outer = _table.tensors, _table.rrefs
    file = io.BytesIO(memoryview(payload)[start:])
    _table.tensors, _table.rrefs = tensors, pickle.load(file) if payload[_FLAGS] & _HAS_RREFS else ()
    try:
        return pickle.load(file)
    finally:
        _table.tensors, _table.rrefs = outer


def _tensor(index: int) -> torch.Tensor:
    return _table.tensors[index]


def decode_with_owners(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, set[str]]:
    """Unpickle a payload with RRefs; return the names of the workers that still have to confirm some, too."""
    outer, owners = _table.owners, set[str]()
    _table.owners = owners
    try:
        return decode(payload, tensors), owners
    finally:
        _table.owners = outer


def _rref(index: int) -> Any:
    rref = PyRRef._deserialize(_table.rrefs[index])
    if _table.owners is not None and not rref.confirmed_by_owner():
        _table.owners.add(rref.owner_name())
    return rref

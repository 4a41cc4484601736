"""Module ``torch.sim``: the functions that torch expects of every backend."""

from __future__ import annotations

import os
import struct
from types import TracebackType

import torch

from cudafuture.testing.sim import _C as _native

_STATE = struct.Struct("<QQ")  # of a generator: its seed, and the number of values drawn
_process = os.getpid()


def _lazy_init() -> None:
    """Do nothing: the accelerator starts with sim.enable()."""


def _is_in_bad_fork() -> bool:
    return os.getpid() != _process


def is_initialized() -> bool:
    """Return True if there are devices."""
    return device_count() > 0


def is_available() -> bool:
    """Return True if there are devices."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices."""
    return int(_native.device_count())


def current_device() -> int:
    """Return the index of the calling thread's device."""
    return int(_native.current_device())


def set_device(device: torch.device | str | int) -> None:
    """Make a device current in the calling thread."""
    torch.accelerator.set_device_index(_index(device))


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    """Return the calling thread's current stream of a device."""
    return torch.accelerator.current_stream(current_device() if device is None else _index(device))


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Block until all work of a device has run. The device: None: the current one, if there is one.

    torch.profiler calls this also when the accelerator is disabled.
    """
    if device is None and device_count() == 0:
        return
    torch.accelerator.synchronize(current_device() if device is None else _index(device))


class device:
    """Context manager that makes a device current."""

    def __init__(self, device: torch.device | str | int) -> None:
        self._index = _index(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(current_device())
        set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_device(self._before.pop())


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _native.set_generator(current_device(), seed % 2**64, 0)


def manual_seed_all(seed: int) -> None:
    """Seed the generator of every device."""
    for index in range(_native.MAX_DEVICES):
        _native.set_generator(index, seed % 2**64, 0)


def get_rng_state(device: torch.device | str | int = "sim") -> torch.Tensor:
    """Return the state of a device's generator as 16 bytes."""
    return torch.frombuffer(bytearray(_STATE.pack(*_native.generator(_index(device)))), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "sim") -> None:
    """Set a device's generator to a state that get_rng_state() has returned."""
    _native.set_generator(_index(device), *_STATE.unpack(bytes(new_state.tolist())))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast can use, of which none is special here."""
    return [torch.float16, torch.bfloat16]


def _index(device: torch.device | str | int) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else int(index)

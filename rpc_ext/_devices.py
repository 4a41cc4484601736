"""Which device here is which device there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rpc_ext._codec import DeviceMap

__all__ = ["DeviceMaps", "Plan", "as_json", "local_devices", "plan"]

DeviceMaps = Mapping[str, Mapping[Any, Any]]
"""for each worker by name: a device here -> the device there"""

Devices = dict[torch.device, torch.device]

_NATIVE = "cuda"  # what TensorPipe carries by itself


def local_devices() -> dict[str, int]:
    """Return how many devices of each type this process has beside the host."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if accelerator is None else {accelerator.type: torch.accelerator.device_count()}


def as_json(maps: DeviceMaps | Literal["auto"] | None) -> Any:
    """Return what a worker shows of the maps that it was given."""
    if maps is None or maps == "auto":
        return maps
    if not isinstance(maps, Mapping):
        raise TypeError(f"device_maps is 'auto', None, or a dict of dicts by worker, not {maps!r}")
    return {
        worker: {str(torch.device(here)): str(torch.device(there)) for here, there in of.items()}
        for worker, of in maps.items()
    }


@dataclass(frozen=True)
class Plan:
    """The maps of one worker, checked. Calls go as its own maps say; an answer the way back that its caller's says."""

    calls: list[DeviceMap]  # by rank
    answers: list[DeviceMap]  # by rank
    native: dict[str, Devices]  # for TensorPipe, by worker
    native_reverse: dict[str, Devices]
    native_devices: list[torch.device]


def plan(
    rank: int, names: list[str], counts: list[dict[str, int]], maps: list[Any], *, carries_devices: bool = True
) -> Plan:
    """Work out where this worker's tensors go, from what all workers have shown, by rank.

    Without `carries_devices` TensorPipe carries tensors on the host only, and those on devices go through the host.

    Raises:
        ValueError: a map names a worker or a device that is not there, or one device twice.
    """
    full = [[_map(names, counts, maps[a], a, b) for b in range(len(names))] for a in range(len(names))]
    there = {name: full[rank][b] for b, name in enumerate(names)}
    back = {name: {t: h for h, t in full[a][rank].items()} for a, name in enumerate(names)}
    carried = _native if carries_devices else _none
    native, reverse = ({name: carried(of) for name, of in maps.items()} for maps in (there, back))
    return Plan(
        [_device_map(name, of, native[name]) for name, of in there.items()],
        [_device_map(name, of, reverse[name]) for name, of in back.items()],
        {worker: of for worker, of in native.items() if of},
        {worker: of for worker, of in reverse.items() if of},
        sorted({d for of in (*native.values(), *reverse.values()) for d in of}, key=lambda d: d.index),
    )


def _device_map(peer: str, of: Devices, native: Devices) -> DeviceMap:
    return DeviceMap(peer, native, {here: there for here, there in of.items() if here not in native})


def _native(of: Devices) -> Devices:
    return {here: there for here, there in of.items() if here.type == _NATIVE and there.type == _NATIVE}


def _none(of: Devices) -> Devices:
    return {}


def _map(names: list[str], counts: list[dict[str, int]], maps: Any, a: int, b: int) -> Devices:
    if maps is None:
        return {}
    if maps == "auto":
        return {
            torch.device(kind, i): torch.device(kind, i)
            for kind, count in counts[a].items()
            for i in range(min(count, counts[b].get(kind, 0)))
        }
    unknown = set(maps) - set(names)
    if unknown:
        raise ValueError(
            f"device_maps of worker '{names[a]}' names {', '.join(sorted(unknown))}; the workers are {', '.join(names)}"
        )
    found = {
        _device(h, names[a], counts[a]): _device(t, names[b], counts[b]) for h, t in maps.get(names[b], {}).items()
    }
    if len(set(found.values())) != len(found):
        raise ValueError(f"device_maps of worker '{names[a]}' sends two devices to one of worker '{names[b]}': {found}")
    return found


def _device(text: str, worker: str, counts: dict[str, int]) -> torch.device:
    device = torch.device(text)
    index = 0 if device.index is None else device.index
    if device.type == "cpu":
        raise ValueError(
            f"device_maps: the host ({text}) of worker '{worker}' cannot be mapped. Leave it out: a tensor on the host "
            "arrives on the host, and one on a device on a device; move it with Tensor.to() before or in the function"
        )
    if index >= counts.get(device.type, 0):
        raise ValueError(f"device_maps: worker '{worker}' has no device {text}; it has {counts or 'the host only'}")
    return torch.device(device.type, index)

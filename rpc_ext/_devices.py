"""Device maps: the target devices of tensors in calls and replies."""

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


def local_devices() -> dict[str, int]:
    """Return the number of devices of each type in this process, without the host."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if accelerator is None else {accelerator.type: torch.accelerator.device_count()}


def as_json(maps: DeviceMaps | Literal["auto"] | None) -> Any:
    """Return the argument `device_maps` in the JSON form for the handshake."""
    if maps is None or maps == "auto":
        return maps
    if not isinstance(maps, Mapping):
        raise TypeError(f"device_maps is 'auto', None, or a dict of dicts by worker, not {maps!r}")
    for worker, of in maps.items():
        if not isinstance(of, Mapping):
            raise TypeError(f"device_maps[{worker!r}] is a mapping, {{device here: device there}}, not {of!r}")
    return {worker: {_name(here): _name(there) for here, there in of.items()} for worker, of in maps.items()}


def _name(device: Any) -> str:
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as e:
        raise ValueError(
            f"each device of device_maps is a torch.device, or a str such as 'cuda:0', not {device!r}"
        ) from e


@dataclass(frozen=True)
class Plan:
    """The checked maps of one worker: its own map for calls, and the reverse of the caller's map for replies."""

    calls: list[DeviceMap]  # by rank
    answers: list[DeviceMap]  # by rank
    native: dict[str, Devices]  # for TensorPipe, by worker
    native_reverse: dict[str, Devices]
    native_devices: list[torch.device]


def plan(
    rank: int, names: list[str], counts: list[dict[str, int]], maps: list[Any], *, carries_devices: bool = True
) -> Plan:
    """Return the target devices of this worker's tensors.

    With `carries_devices`, TensorPipe carries CUDA tensors. All other tensors on devices go through the host.

    Args:
        rank: rank of this worker.
        names, counts, maps: names, devices and device maps of all workers, by rank.

    Raises:
        ValueError: a map names an unknown worker or device, or one device twice.
    """
    full = [[_map(names, counts, maps[a], a, b) for b in range(len(names))] for a in range(len(names))]

    def split(peer: str, pairs: Devices) -> DeviceMap:
        native = {h: t for h, t in pairs.items() if carries_devices and h.type == t.type == "cuda"}
        return DeviceMap(peer, native, {h: t for h, t in pairs.items() if h not in native})

    calls = [split(name, full[rank][b]) for b, name in enumerate(names)]
    answers = [split(name, {t: h for h, t in full[a][rank].items()}) for a, name in enumerate(names)]
    return Plan(
        calls,
        answers,
        {of.peer: dict(of.native) for of in calls if of.native},
        {of.peer: dict(of.native) for of in answers if of.native},
        sorted({d for of in (*calls, *answers) for d in of.native}, key=lambda d: d.index),
    )


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
            f"device_maps: the host ({text}) of worker '{worker}' cannot be mapped. Leave it out: tensors on the host "
            "arrive on the host, and device tensors on a device; move them with Tensor.to() before or in the function"
        )
    if index >= counts.get(device.type, 0):
        raise ValueError(f"device_maps: worker '{worker}' has no device {text}; it has {counts or 'the host only'}")
    return torch.device(device.type, index)

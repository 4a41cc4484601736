"""Simulated accelerator as a whole: its start and stop, its settings, and its statistics."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch

from cudafuture import _C
from cudafuture._arguments import expect_int
from cudafuture.statistics import StatisticsBase
from cudafuture.testing.sim import _C as _native
from cudafuture.testing.sim._prepare import prepare
from cudafuture.testing.sim._virtual_time import Speeds

__all__ = [
    "DeviceError",
    "Schedule",
    "Settings",
    "Statistics",
    "clear_error",
    "contexts",
    "disable",
    "enable",
    "is_enabled",
    "settings",
    "statistics",
    "synchronize",
]

DeviceError = _native.DeviceError
DeviceError.__module__ = "cudafuture.testing.sim"  # its public module
Schedule = Literal["free", "jitter", "lazy"]


@dataclass(frozen=True)
class Settings:
    """Arguments of ``enable``."""

    devices: int = 1
    schedule: Schedule = "free"
    seed: int = 0
    detect: bool = True
    poison: bool = True
    memory: int = 4 << 30
    strict_devices: bool = False
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(frozen=True, repr=False)
class Statistics(StatisticsBase):
    """Counts since ``enable``, and the current bytes."""

    GAUGES: ClassVar = frozenset({"allocated_bytes", "reserved_bytes", "deferred_blocks"})
    BYTES: ClassVar = frozenset({"allocated_bytes", "reserved_bytes"})

    submitted: int
    executed: int
    dropped: int
    recorded: int
    waited: int
    allocated_bytes: int
    reserved_bytes: int
    deferred_blocks: int


_settings: Settings | None = None


def enable(
    devices: int = 1,
    *,
    schedule: Schedule = "free",
    seed: int = 0,
    detect: bool = True,
    poison: bool = True,
    memory: int = 4 << 30,
    strict_devices: bool = False,
    speeds: Speeds | None = None,
) -> None:
    """Start the accelerator; if it runs, restart it, with no queued work and no reports.

    Args:
        devices: the number of devices, 1 to 8.
        schedule: the time at which device work runs: "free" (default), "jitter" or "lazy".
        seed: of the choices of the schedule.
        detect: detect races.
        poison: fill fresh memory, on devices and pinned, with NaN.
        memory: bytes of each device; more raises torch.OutOfMemoryError. Default 4 GiB, allocated on use.
        strict_devices: report events that are recorded, queried, waited for, synchronised or destroyed while another
            device is current. For libraries that handle events themselves.
        speeds: of virtual time.

    Raises:
        ValueError: the schedule does not exist, or there are too many devices.
        RuntimeError: after a ``backward()`` without ``prepare()``, or in a forked child.

    >>> sim.enable(devices=2, schedule="lazy", seed=7)
    >>> torch.ones(2, device="sim:1") + 1
    tensor([2., 2.], device='sim:1')
    """
    global _settings
    if not 1 <= expect_int("devices", devices) <= _native.MAX_DEVICES:
        raise ValueError(f"devices={devices} cannot be simulated; pass 1 to {_native.MAX_DEVICES}")
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule={schedule!r} does not exist; use one of {', '.join(get_args(Schedule))}")
    seed = operator.index(seed)
    prepare()
    wanted = Settings(devices, schedule, seed, detect, poison, memory, strict_devices, speeds or Speeds())
    _C.set_device_functions(torch.device("sim", 0), **_native.device_functions())
    _native.start(devices, schedule, seed % 2**64, detect, poison, memory, strict_devices, wanted.speeds._native())
    _settings = wanted


def disable() -> None:
    """Remove the devices. Remaining tensors can only be freed.

    >>> sim.disable()
    >>> torch.accelerator.is_available()
    False
    """
    global _settings
    if _settings is not None:
        functions = _native.device_functions()
        del functions["host_now"], functions["host_join"]  # the others serve streams that outlive the devices
        _C.set_device_functions(torch.device("sim", 0), **functions)
        _native.stop()
        _settings = None


def is_enabled() -> bool:
    """Return True if there are devices.

    >>> sim.enable()
    >>> sim.is_enabled()
    True
    """
    return _settings is not None


def settings() -> Settings:
    """Return the settings that the accelerator was started with.

    Raises:
        RuntimeError: it was not started.

    >>> sim.enable(seed=7)
    >>> sim.settings().seed
    7
    """
    if _settings is None:
        raise RuntimeError("the simulated accelerator is off: call sim.enable()")
    return _settings


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Block until all work of a device (default: of all devices) has run.

    Raises:
        DeviceError: some of it failed.

    >>> sim.enable(schedule="lazy")
    >>> sim.sleep(ms=1)
    >>> sim.synchronize()
    >>> sim.statistics().executed
    1
    """
    __tracebackhide__ = True
    settings()
    _native.synchronize(None if device is None else index_of(device))


def clear_error(device: torch.device | str | int = 0) -> None:
    """Repair a device that work has broken, and drop its queued work.

    >>> sim.enable()
    >>> sim.fail("a broken bit")
    >>> sim.clear_error("sim:0")
    >>> sim.synchronize()
    """
    _native.clear_error(index_of(device))


def contexts() -> list[torch.device]:
    """Return the devices that have a context: those that were used, or made current, since ``enable()``.

    On CUDA a context takes about half a gigabyte of its device. A process that should use only one device, such as each
    rank of a job, has one.

    >>> sim.enable(devices=2)
    >>> x = torch.ones(2, device="sim:1")
    >>> sim.contexts()
    [device(type='sim', index=1)]
    """
    return [torch.device("sim", i) for i in range(settings().devices) if _native.has_context(i)]


def statistics() -> Statistics:
    """Return the counters of the accelerator.

    >>> sim.enable(schedule="lazy")
    >>> sim.sleep(ms=1)
    >>> (sim.statistics().submitted, sim.statistics().executed)
    (1, 0)
    """
    return Statistics(**_native.statistics())


def index_of(device: torch.device | str | int) -> int:
    """Return the index of an existing simulated device; raise ValueError for any other device."""
    found = torch.device("sim", device) if isinstance(device, int) else torch.device(device)
    if found.type != "sim":
        raise ValueError(f"{device} is not a simulated device")
    index = _native.current_device() if found.index is None else found.index
    if not 0 <= index < settings().devices:
        raise ValueError(f"there is no sim:{index}: sim.enable() made {settings().devices} devices")
    return int(index)

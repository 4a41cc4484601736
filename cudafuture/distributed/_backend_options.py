"""Choice of the backends that the backend "cudafuture" wraps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BackendOptions", "name_of"]


class BackendOptions:
    """Choice of the backends that the backend "cudafuture" wraps, as ``pg_options`` of torch's functions.

    Args:
        devices: for each type of devices the name of a backend, such as ``cpu="gloo"``, or the options object of one,
            such as ``cuda=ProcessGroupNCCL.Options()``. Types that are not named keep their default: Gloo for "cpu",
            NCCL for "cuda" where there is a GPU, else Gloo.

    Raises:
        TypeError: a choice is neither a name nor an options object.
        ValueError: torch has no such type of devices.

    >>> BackendOptions(cpu="gloo")
    BackendOptions(cpu='gloo', cuda='gloo')
    """

    def __init__(self, **devices: Any) -> None:
        for device, choice in devices.items():
            if not isinstance(name_of(choice), str):
                raise TypeError(f"{device} is the name of a backend, or its options, not {choice!r}")
            try:
                torch.device(device)
            except RuntimeError:
                raise ValueError(
                    f"{device}={choice!r}: torch has no devices of the type {device!r}; name one, such as cpu='gloo'"
                ) from None
        self.choices: dict[str, Any] = {**_default_choices(), **devices}
        """For each type of devices, the name of a backend or its options."""

    @classmethod
    def of(cls, options: Any) -> BackendOptions:
        """Return the options that `options` stand for: those of one backend choose it for the devices that it carries.

        Raises:
            TypeError: they are no options of a backend.
        """
        if options is None or isinstance(options, BackendOptions):
            return options or cls()
        name = name_of(options)
        if not isinstance(name, str):
            raise TypeError(f"pg_options of the backend cudafuture are BackendOptions, not {options!r}")
        return cls(**dict.fromkeys(dist.Backend.backend_capability[name], options))

    def __repr__(self) -> str:
        return (
            f"BackendOptions({', '.join(f'{device}={name_of(choice)!r}' for device, choice in self.choices.items())})"
        )


def name_of(choice: Any) -> Any:
    """Return the name of the backend that a choice stands for; None if it is no choice."""
    return choice.lower() if isinstance(choice, str) else getattr(choice, "backend", None)


def _default_choices() -> dict[str, Any]:
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return {"cpu": "gloo", "cuda": "nccl" if has_nccl else "gloo"}

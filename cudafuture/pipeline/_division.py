"""The division of a model into stages: its layers, their devices, and the skips between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cudafuture import _C
from cudafuture.pipeline._step import Route
from cudafuture.pipeline.skip import inspect_skip_layout, verify_skippables

__all__ = ["divide", "places_of", "refuse_shared", "route_of"]


def divide(
    stages: nn.Sequential | Sequence[nn.Module], balance: Sequence[int] | None
) -> tuple[list[tuple[str, nn.Module]], list[nn.Sequential]]:
    """Return the layers by their names, and the stages."""
    if isinstance(stages, nn.Sequential):
        if balance is None:
            raise ValueError("an nn.Sequential needs a balance: the number of layers in each stage")
        layers = list(stages.named_children())
    else:
        layers = [(str(i), layer) for i, layer in enumerate(stages)]
        balance = [1] * len(layers) if balance is None else balance
    if not layers or not all(isinstance(layer, nn.Module) for _, layer in layers):
        raise TypeError("stages are an nn.Sequential with layers, or a list of modules")
    if len({name for name, _ in layers} & set(dir(nn.Module))) > 0:
        raise ValueError("a layer has the name of an attribute of nn.Module")
    if sum(balance) != len(layers) or min(balance) < 1:
        raise ValueError(f"balance={list(balance)} does not divide {len(layers)} layers, at least one for each stage")
    parts, at = [], 0
    for count in balance:
        part = nn.Sequential()
        for name, layer in layers[at : at + count]:
            part.add_module(name, layer)
        parts.append(part)
        at += count
    return layers, parts


def refuse_shared(parts: Sequence[nn.Module]) -> None:
    """Raise ValueError if two stages have a parameter in common."""
    owner: dict[int, tuple[int, str]] = {}
    for s, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            at, other = owner.setdefault(id(parameter), (s, name))
            if at != s:
                raise ValueError(
                    f"stage {at} and stage {s} share a parameter, {other} and {name}, which cannot lie on two devices; "
                    "put its layers into one stage"
                )


def places_of(devices: Sequence[torch.device | str | int] | None, stages: int) -> list[torch.device]:
    """Return the devices of the rows; by default all accelerators, or the host for each stage."""
    if devices is not None:
        places = [torch.device(device) for device in devices]
        return [at if at.type == "cpu" else _C.pool_stream(at, 0).device for at in places]  # with its index
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")] * stages
    return [torch.device(accelerator.type, i) for i in range(min(torch.accelerator.device_count(), stages))]


def route_of(parts: Sequence[nn.Sequential]) -> Route:
    """Return the ways of skips between stages; those inside a stage are its own affair."""
    verify_skippables(nn.Sequential(*(layer for part in parts for layer in part)))
    between = {
        skip: (stash, pop) for skip, (stash, pop) in inspect_skip_layout(parts).by_ns_name.items() if stash != pop
    }
    popped: dict[int, list[Any]] = {}
    for skip, (_, pop) in between.items():
        popped.setdefault(pop, []).append(skip)
    return Route(
        popped, {skip: stash for skip, (stash, _) in between.items()}, {skip: pop for skip, (_, pop) in between.items()}
    )

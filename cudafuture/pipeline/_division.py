"""Division of a model into stages: its layers, their devices, and the skips between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from cudafuture import _C
from cudafuture._arguments import expect_int, listed, parse_device, shown
from cudafuture.pipeline._ranks import Receiver
from cudafuture.pipeline._step import Route
from cudafuture.pipeline.schedule import Schedule
from cudafuture.pipeline.skip import Skippable, inspect_skip_layout, verify_skippables

__all__ = [
    "divide",
    "layers_of",
    "move_stages",
    "place_of_rank",
    "places_of",
    "receivers_of",
    "refuse_shared",
    "route_of",
    "table_of",
]


def layers_of(part: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers by name. A layer in two places is listed twice; named_children() lists it once."""
    return list(cast("dict[str, nn.Module]", part._modules).items())


def divide(
    stages: nn.Sequential | Sequence[nn.Module], balance: Sequence[int] | None, reserved: Collection[str] = ()
) -> tuple[list[tuple[str, nn.Module]], list[nn.Sequential]]:
    """Return the layers by name, and the stages.

    Args:
        stages: an nn.Sequential with a balance, or a list of modules.
        balance: the number of layers in each stage.
        reserved: names that no layer may have, in addition to those of nn.Module's attributes.

    Raises:
        TypeError: `stages` are not layers, or an nn.Sequential that does more than call its layers; the balance is not
            a list of ints.
        ValueError: the balance does not fit, or a layer has a reserved name.
    """
    if isinstance(stages, nn.Sequential):
        _refuse_more_than_layers(stages)
        if balance is None:
            raise ValueError("an nn.Sequential needs a balance: the number of layers in each stage")
        layers = layers_of(stages)
    else:
        if not hasattr(stages, "__iter__"):
            raise TypeError(f"stages are an nn.Sequential with layers, or a list of modules, not {shown(stages)}")
        layers = [(str(i), layer) for i, layer in enumerate(stages)]
        balance = [1] * len(layers) if balance is None else balance
    balance = [expect_int("each of balance", count) for count in listed("balance", balance, "numbers of layers")]
    if not layers or not all(isinstance(layer, nn.Module) for _, layer in layers):
        raise TypeError("stages are an nn.Sequential with layers, or a list of modules")
    taken = {*reserved, *dir(nn.Module)}
    for name, _ in layers:
        if name in taken:
            raise ValueError(f"a layer is named {name!r}, like an attribute of the pipeline: give it another name")
    if sum(balance) != len(layers) or min(balance) < 1:
        raise ValueError(f"balance={balance} does not divide {len(layers)} layers, at least one for each stage")
    parts, at = [], 0
    for count in balance:
        part = nn.Sequential()
        for name, layer in layers[at : at + count]:
            part.add_module(name, layer)
        parts.append(part)
        at += count
    return layers, parts


def _refuse_more_than_layers(stages: nn.Sequential) -> None:
    """Raise TypeError if a call of the nn.Sequential does more than call its layers, since only the layers remain."""
    if type(stages).forward is not nn.Sequential.forward or "forward" in vars(stages):
        raise TypeError(
            f"{type(stages).__name__} has a forward of its own, which its stages would not run: pass an nn.Sequential, "
            "or a list of modules, one for each stage"
        )
    hooks = (stages._forward_pre_hooks, stages._forward_hooks, stages._backward_pre_hooks, stages._backward_hooks)
    if any(hooks):
        raise TypeError(
            "the nn.Sequential has hooks on itself, which its stages would not run: remove them, or put them on a layer"
        )


def refuse_shared(parts: Sequence[nn.Module]) -> None:
    """Raise ValueError if two stages share a parameter or a buffer. Other layers may be in several stages."""
    owner: dict[int, tuple[int, str]] = {}
    for s, part in enumerate(parts):
        for kind, named in (("parameter", part.named_parameters()), ("buffer", part.named_buffers())):
            for name, tensor in named:
                at, other = owner.setdefault(id(tensor), (s, name))
                if at != s:
                    raise ValueError(
                        f"stage {at} and stage {s} share a {kind}, {other} and {name}. Two stages cannot share one, "
                        "even on one device: put its layers into one stage"
                    )


def places_of(devices: Sequence[torch.device | str | int] | None, stages: int) -> list[torch.device]:
    """Return the devices of the rows; by default all accelerators, or the host for each stage."""
    if devices is not None:
        given = listed("devices", devices, "devices")
        if not given:
            raise ValueError("devices is empty: name one for each row of the table, or pass None")
        places = [parse_device("each of devices", device) for device in given]
        return [at if at.type == "cpu" else _C.with_index(at) for at in places]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")] * stages
    return [torch.device(accelerator.type, i) for i in range(min(torch.accelerator.device_count(), stages))]


def place_of_rank(devices: Any) -> torch.device:
    """Return the device of a rank: the given one, or by default the current accelerator, or the host."""
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else _C.with_index(accelerator)
    given = [devices] if isinstance(devices, (torch.device, str, int)) else listed("devices", devices, "devices")
    if len(given) != 1:
        raise ValueError(f"devices has {len(given)} devices, but each rank of a group runs one row: name its device")
    device = parse_device("each of devices", given[0])
    return device if device.type == "cpu" else _C.with_index(device)


def move_stages(
    stages: Sequence[nn.Module],
    devices: Sequence[torch.device],
    initialize: Callable[[nn.Module], object] | None = None,
) -> None:
    """Move each stage to its device. Layers of one device still share their tensors, even where torch replaces them.

    Tensors on the meta device get memory there; `initialize` then fills a stage that had such ones. None: the
    ``reset_parameters()`` of its modules.

    Raises:
        ValueError: `initialize` is None, and a module has no ``reset_parameters()``.
    """
    shared = [
        (tensors, name, id(tensor))
        for stage in stages
        for module in stage.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    unmade = [[module for module in stage.modules() if _is_unmade(module)] for stage in stages]
    for stage, device in zip(stages, devices, strict=True):
        stage._apply(partial(_moved, device))
    moved: dict[int, torch.Tensor | None] = {}
    for tensors, name, key in shared:
        if tensors[name] is not moved.setdefault(key, tensors[name]):
            tensors[name] = moved[key]  # type: ignore[assignment]
    with torch.no_grad():
        for stage, modules in zip(stages, unmade, strict=True):
            if modules and initialize is not None:
                _fill(stage, modules, initialize)
            for module in modules if initialize is None else ():
                reset: Any = getattr(module, "reset_parameters", None)
                if reset is None:
                    raise ValueError(
                        f"a {type(module).__name__} has tensors on the meta device, and no reset_parameters() to fill "
                        "them: pass initialize="
                    )
                reset()


def _fill(stage: nn.Module, modules: list[nn.Module], initialize: Callable[[nn.Module], object]) -> None:
    """Call `initialize`; raise ValueError if it leaves a tensor of one of the modules without values."""
    for module in modules:
        for tensor in _own_tensors(module):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(torch.nan)
    initialize(stage)
    names = {module: name for name, module in stage.named_modules()}
    for module in modules:
        for tensor in _own_tensors(module):
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and tensor.isnan().all():
                raise ValueError(
                    f"initialize() has left a tensor of shape {tuple(tensor.shape)} in layer {names[module]} without "
                    "values. A state_dict() has no buffers that are not persistent: fill them, too"
                )


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_unmade(module: nn.Module) -> bool:
    """Return True if a module has tensors of its own on the meta device."""
    return any(tensor.is_meta for tensor in _own_tensors(module))


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def receivers_of(route: Route, row_of: Sequence[int], devices: Mapping[int, torch.device]) -> list[Receiver]:
    """Return the receivers of all messages between stages; `devices` are those of the stages of this process."""
    stages = len(row_of)
    keys: list[tuple[tuple[Any, ...], int]] = [(("F", s), s) for s in range(1, stages)]
    keys += [(("B", s), s) for s in range(stages - 1)]
    keys += [(("skip", skip), s) for skip, s in route.popped_by.items()]
    keys += [(("skip gradient", skip), s) for skip, s in route.stashed_by.items()]
    return [Receiver(key, s, row_of[s], devices.get(s)) for key, s in keys]


def route_of(parts: Sequence[nn.Sequential]) -> Route:
    """Return the routes of skips between stages; a stage handles the skips inside it."""
    layers = [layer for part in parts for layer in part]
    places: dict[nn.Module, int] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, Skippable) and places.setdefault(layer, i) != i:
            raise TypeError(f"layers {places[layer]} and {i} are one module with skips: make a module for each place")
    verify_skippables(nn.Sequential(*layers))
    between = {
        skip: (stash, pop) for skip, (stash, pop) in inspect_skip_layout(parts).by_ns_name.items() if stash != pop
    }
    popped: dict[int, list[Any]] = {}
    for skip, (_, pop) in between.items():
        popped.setdefault(pop, []).append(skip)
    return Route(
        popped, {skip: stash for skip, (stash, _) in between.items()}, {skip: pop for skip, (_, pop) in between.items()}
    )


def table_of(schedule: str | Schedule, stages: int, microbatches: int, devices: int) -> Schedule:
    """Return the table of a pipeline; raise TypeError or ValueError unless it fits."""
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(f"schedule is a name such as '1f1b', or a Schedule, not {shown(schedule)}")
    table = Schedule.build(schedule, stages, microbatches, devices) if isinstance(schedule, str) else schedule
    table.check()
    for what, has, wanted in (
        ("stages", table.stages, stages),
        ("micro-batches", table.microbatches, microbatches),
        ("rows", len(table.rows), devices),
    ):
        if has != wanted:
            raise ValueError(f"the table has {has} {what}, but the pipeline has {wanted}")
    return table

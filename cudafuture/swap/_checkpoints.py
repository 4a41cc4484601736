"""Checkpoints of optimizer state in a store: links to the tensors, and a manifest.

    <name>/checkpoints/<checkpoint>           the manifest: groups, and each parameter's values and tensors
    <name>/saved/<number>/<key of a chunk>    the tensors of one call of save()

The manifest is written last and replaces an older one at once, so a checkpoint is complete whenever its name is there.
"""

from __future__ import annotations

import io
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from cudafuture.errors import NotFoundError
from cudafuture.storage import Offloader, Store
from cudafuture.swap._namespace import Namespace
from cudafuture.swap._parameter_state import Chunk, ParameterState, StoredTensor, cast, key_of
from cudafuture.swap._pipeline import Pipeline

__all__ = ["Checkpoints", "SwappedStates"]

_FORMAT = 1
_NUMBER = 8  # bytes of the checkpoint's number, at the beginning of the manifest


class SwappedStates(Protocol):
    """The states that a checkpoint holds."""

    pipeline: Pipeline
    optimizer_class: type[torch.optim.Optimizer]

    def state(self, parameter: torch.Tensor) -> ParameterState: ...

    def like(self, parameter: torch.Tensor) -> StoredTensor: ...

    def key(self, chunk: Chunk, name: str) -> str: ...

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...


class Checkpoints(ABC):
    """The methods of an offloaded optimizer that save and load checkpoints."""

    _namespace: Namespace
    _lock: threading.RLock
    param_groups: list[dict[str, Any]]

    @property
    @abstractmethod
    def _swap(self) -> SwappedStates: ...

    @abstractmethod
    def _forget_reads(self) -> None: ...

    def save(self, checkpoint: str) -> None:
        """Keep the state of all parameters, and the options of their groups, under a name in the store.

        In an ``Offloader`` a checkpoint is links to the tensors, so it copies none of them: later steps write new ones.
        Other stores copy. A checkpoint of the same name is replaced when the new one is complete. Values of parameters
        are not in it, unless they have master weights.

        Raises:
            SwapError: state of a step before cannot be written.
            StorageError: the checkpoint cannot be written; an older one of the name is as it was.
            ValueError: the name is empty, or has a "/".

        >>> from cudafuture.storage import Offloader
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), Offloader("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.checkpoints()
        ['epoch 1']
        >>> optimizer.load("epoch 1")
        """
        with self._lock, torch.no_grad():
            self._swap.pipeline.drain()
            _save(self._namespace.store, self._namespace.name, checkpoint, self.param_groups, self._swap)

    def load(self, checkpoint: str) -> None:
        """Take over the state and the groups' options of a checkpoint, whatever its chunks were.

        State of the parameters' dtype is cast where that is another one now, as ``load_state_dict()`` does.

        Raises:
            NotFoundError: there is no checkpoint of that name, or a tensor of it is missing; nothing has changed.
            ValueError: its groups, the shapes of its parameters, or its optimizer's class are others than this one's.
            StorageError: a tensor cannot be read. Some parameters have the state of the checkpoint, the others and the
                options are as they were: load it again, or another one.

        >>> from cudafuture.storage import Offloader
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), Offloader("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.load("epoch 1")
        """
        with self._lock, torch.no_grad():
            self._forget_reads()
            _load(self._namespace.store, self._namespace.name, checkpoint, self.param_groups, self._swap)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the store, sorted.

        >>> from cudafuture.storage import Offloader
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), Offloader("states", durable=True))
        >>> optimizer.checkpoints()
        []
        """
        return _names(self._namespace.store, self._namespace.name)

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: there is no checkpoint of that name.

        >>> from cudafuture.storage import Offloader
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), Offloader("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.delete_checkpoint("epoch 1")
        """
        _delete(self._namespace.store, self._namespace.name, checkpoint)


def _names(store: Store, name: str) -> list[str]:
    """Return the names of the checkpoints of an optimizer, sorted."""
    prefix = f"{name}/checkpoints/"
    return sorted(key[len(prefix) :] for key in store.list_keys().wait() if key.startswith(prefix))


def _save(store: Store, name: str, checkpoint: str, groups: list[dict[str, Any]], swapper: SwappedStates) -> None:
    """Save the state of all parameters, no write of which is in flight."""
    if not checkpoint or "/" in checkpoint:
        raise ValueError(f"the name of a checkpoint, {checkpoint!r}, is empty or has a '/'")
    saved = f"{name}/saved/"
    keys = store.list_keys().wait()
    numbers = [int(key[len(saved) :].split("/")[0]) for key in keys if key.startswith(saved)]
    number = max(numbers, default=0) + 1
    place = f"{saved}{number}/"
    parameters: list[list[dict[str, Any]]] = []
    links: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for group in groups:
        parameters.append([])
        for parameter in group["params"]:
            state = swapper.state(parameter)
            for chunk in state.chunks():
                unwritten = chunk.unwritten()
                for tensor_name in state.stored:
                    key = chunk.key(place, tensor_name, 0)
                    if unwritten is None:
                        links[key] = swapper.key(chunk, tensor_name)
                    else:
                        tensors[key] = unwritten[tensor_name]
            parameters[-1].append(_entry(swapper, parameter))
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    manifest = io.BytesIO()
    manifest.write(number.to_bytes(_NUMBER, "little"))
    classes = _class_names(swapper.optimizer_class)
    torch.save({"format": _FORMAT, "classes": classes, "groups": options, "parameters": parameters}, manifest)
    try:
        _copy(store, links)
        store.writev(tensors).wait()
        older = _place_of(store, name, checkpoint) if _key(name, checkpoint) in keys else None
        store.write(_key(name, checkpoint), torch.frombuffer(manifest.getbuffer(), dtype=torch.uint8)).wait()
    except BaseException:
        store.deletev([*links, *tensors]).exception()
        raise
    if older is not None:
        store.deletev([key for key in keys if key.startswith(older)])  # the checkpoint does not wait for that


def _entry(swapper: SwappedStates, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the manifest's entry of a parameter, from which ``_keys`` and ``_bounds`` follow."""
    state, like = swapper.state(parameter), swapper.like(parameter)
    return {
        "number": state.number,
        "shape": tuple(like.shape),
        "dtype": like.dtype,
        "chunks": len(state.bounds),
        "chunk": state.bounds[0][1],  # elements of each but the last
        "values": state.values,
        "tensors": {name: (stored.dtype, tuple(stored.shape)) for name, stored in state.stored.items()},
    }


def _keys(place: str, entry: dict[str, Any], tensor_name: str) -> list[str]:
    """Return the keys of a state tensor in a checkpoint, one for each chunk."""
    return [key_of(place, entry["number"], tensor_name, index, 0) for index in range(entry["chunks"])]


def _bounds(entry: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the first element of each chunk and the first one after it."""
    begins = [index * entry["chunk"] for index in range(entry["chunks"])]
    return list(itertools.pairwise([*begins, math.prod(entry["shape"])]))


def _class_names(optimizer: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of a class of optimizers and of its bases, which keep state of the same kind."""
    return [c.__name__ for c in optimizer.__mro__ if issubclass(c, torch.optim.Optimizer)][:-1]


def _copy(store: Store, links: dict[str, str]) -> None:
    if isinstance(store, Offloader):
        store.link(links).wait()
        return
    for new, old in links.items():
        store.write(new, store.read(old).wait()).wait()


def _load(store: Store, name: str, checkpoint: str, groups: list[dict[str, Any]], swapper: SwappedStates) -> None:
    """Load the state of all parameters."""
    manifest = _manifest(store, name, checkpoint)
    classes = _class_names(swapper.optimizer_class)
    if classes[0] not in manifest["classes"] and manifest["classes"][0] not in classes:
        raise ValueError(f"checkpoint {checkpoint!r} is of {manifest['classes'][0]}, and the optimizer is {classes[0]}")
    found = [[tuple(entry["shape"]) for entry in group] for group in manifest["parameters"]]
    wanted = [[tuple(swapper.like(parameter).shape) for parameter in group["params"]] for group in groups]
    if found != wanted:
        raise ValueError(f"checkpoint {checkpoint!r} has parameters of the shapes {found}, and the optimizer {wanted}")
    place = _place_of(store, name, checkpoint)
    _expect_tensors(store, place, checkpoint, manifest)
    for group, entries in zip(groups, manifest["parameters"], strict=True):
        for parameter, entry in zip(group["params"], entries, strict=True):
            state = {**entry["values"], **_tensors_of(store, place, entry)}
            state = cast(state, swapper.like(parameter), entry["dtype"])
            swapper.write_state(parameter, state)
    for group, options in zip(groups, manifest["groups"], strict=True):
        group.update(options)


def _expect_tensors(store: Store, place: str, checkpoint: str, manifest: dict[str, Any]) -> None:
    """Raise NotFoundError if the store lacks a tensor of a checkpoint."""
    entries = [entry for group in manifest["parameters"] for entry in group]
    keys = [key for entry in entries for tensor_name in entry["tensors"] for key in _keys(place, entry, tensor_name)]
    missing = [key for key, found in zip(keys, store.find(keys).wait(), strict=True) if found is None]
    if missing:
        raise NotFoundError(
            f"checkpoint {checkpoint!r} lacks {len(missing)} of its {len(keys)} tensors: {missing[0]!r}"
        )


def _tensors_of(store: Store, place: str, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {}
    for tensor_name, (dtype, shape) in entry["tensors"].items():
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        is_chunked = entry["chunks"] > 1
        parts = [whole.view(-1)[begin:end] for begin, end in _bounds(entry)] if is_chunked else [whole]
        store.readv(_keys(place, entry, tensor_name), parts).wait()
        tensors[tensor_name] = whole
    return tensors


def _delete(store: Store, name: str, checkpoint: str) -> None:
    """Delete a checkpoint: its name first, so that what is left of it is never loaded."""
    place = _place_of(store, name, checkpoint)
    store.delete(_key(name, checkpoint)).wait()
    store.deletev([key for key in store.list_keys().wait() if key.startswith(place)]).wait()


def _place_of(store: Store, name: str, checkpoint: str) -> str:
    """Return the beginning of the keys of a checkpoint's tensors."""
    number = int.from_bytes(_content(store, name, checkpoint)[:_NUMBER], "little")
    return f"{name}/saved/{number}/"


def _manifest(store: Store, name: str, checkpoint: str) -> dict[str, Any]:
    manifest = torch.load(io.BytesIO(_content(store, name, checkpoint)[_NUMBER:]), weights_only=True)
    if manifest["format"] != _FORMAT:
        raise ValueError(f"checkpoint {checkpoint!r} has format {manifest['format']}; this version reads {_FORMAT}")
    return manifest  # type: ignore[no-any-return]


def _content(store: Store, name: str, checkpoint: str) -> bytes:
    """Return the number of a checkpoint, and after it the groups and parameters."""
    try:
        return store.read(_key(name, checkpoint)).wait().numpy().tobytes()
    except NotFoundError:
        known = ", ".join(map(repr, _names(store, name))) or "none"
        raise NotFoundError(f"there is no checkpoint {checkpoint!r}; there are: {known}") from None


def _key(name: str, checkpoint: str) -> str:
    return f"{name}/checkpoints/{checkpoint}"

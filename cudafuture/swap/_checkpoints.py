"""Checkpoints of optimizer state in a store: links to the tensors, and a manifest.

    <name>/checkpoints/<checkpoint>/<number>              the manifest: groups, and each parameter's values and tensors
    <name>/saved/<checkpoint>/<number>/<key of a chunk>   the tensors to which the manifest refers

Each ``save()`` of a checkpoint has its own number, higher than all numbers of that checkpoint in the store:

1. The tensors are linked or written, under keys that no manifest refers to yet.
2. The manifest is written. This commits the checkpoint: the highest number with a manifest is the current one.
3. The manifests and tensors of lower numbers are deleted. ``save()`` does not wait for that.

A crash or an error before 2 leaves tensors without a manifest, and one before 3 leaves two manifests. All keys that do
not belong to the highest manifest of a checkpoint are obsolete, and the next ``save()`` deletes them.
"""

from __future__ import annotations

import io
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch

from cudafuture._arguments import expect_str
from cudafuture._modes import outside_inference
from cudafuture.errors import NotFoundError, StorageError
from cudafuture.store import DiskStore, Store
from cudafuture.swap._namespace import OptimizerNamespace
from cudafuture.swap._parameter_state import Chunk, ParameterState, StoredTensor, cast, key_of

__all__ = ["Checkpoints", "SwappedStates"]

_FORMAT = 2
_LARGEST_VALUE = 1 << 16  # bytes of a tensor in the manifest; larger ones have their own keys
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class SwappedStates(Protocol):
    """States that a checkpoint contains."""

    optimizer_class: type[torch.optim.Optimizer]

    def flush(self) -> None: ...

    def state(self, parameter: torch.Tensor) -> ParameterState: ...

    def like(self, parameter: torch.Tensor) -> StoredTensor: ...

    def key(self, chunk: Chunk, name: str) -> str: ...

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...


class Checkpoints(ABC):
    """Methods of an offloaded optimizer that save and load checkpoints."""

    _namespace: OptimizerNamespace
    _lock: threading.RLock
    _is_settled = False  # no write of an interrupted save() is in flight
    param_groups: list[dict[str, Any]]

    @property
    @abstractmethod
    def _swap(self) -> SwappedStates: ...

    @abstractmethod
    def _forget_reads(self) -> None: ...

    def save(self, checkpoint: str) -> None:
        """Save the state of all parameters, and the options of their groups, under a name in the store.

        In a ``DiskStore`` a checkpoint links to the tensors without copying them, because later steps write new ones.
        Other stores copy. A checkpoint of the same name is replaced when the new one is complete. A checkpoint does not
        contain the values of parameters, unless they have master weights.

        Raises:
            SwapError: state of an earlier step cannot be written.
            StorageError: the checkpoint cannot be written; an older one of the name does not change.
            TypeError: the name, an option or a value of a state has a type ``load()`` cannot read; nothing is written.
            ValueError: the name is empty, or has a "/".

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.checkpoints()
        ['epoch 1']
        >>> optimizer.load("epoch 1")
        """
        with self._lock, outside_inference(), torch.no_grad():
            self._swap.flush()
            self._settle()
            self._is_settled = False
            _save(self._namespace.store, self._namespace.name, checkpoint, self.param_groups, self._swap)
            self._is_settled = True

    def load(self, checkpoint: str) -> None:
        """Restore the state and the groups' options of a checkpoint, for any chunk size.

        State of the parameters' dtype is cast if that dtype has changed, as ``load_state_dict()`` does.

        Raises:
            NotFoundError: the checkpoint does not exist, or one of its tensors is missing; nothing has changed.
            ValueError: its groups, the shapes of its parameters, or its optimizer's class differ from this one's.
            StorageError: a tensor cannot be read. Some parameters have the state of the checkpoint, the others and the
                options have not changed: load it again, or load another one.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.load("epoch 1")
        """
        with self._lock, outside_inference(), torch.no_grad():
            self._forget_reads()
            self._settle()
            _load(self._namespace.store, self._namespace.name, checkpoint, self.param_groups, self._swap)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the store, sorted.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.checkpoints()
        []
        """
        return sorted(_Listing.of(self._namespace.store, self._namespace.name).numbers)

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: the checkpoint does not exist.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.delete_checkpoint("epoch 1")
        """
        with self._lock:
            self._settle()
            _delete(self._namespace.store, self._namespace.name, checkpoint)

    def _settle(self) -> None:
        """Wait for the writes of an interrupted save(): the list of keys lacks them until they end."""
        if not self._is_settled:
            self._namespace.store.flush().exception()  # the call that wrote raises an error of the write
            self._is_settled = True


@dataclass(frozen=True)
class _Listing:
    """Keys of all checkpoints of an optimizer."""

    keys: dict[tuple[str, int], list[str]]
    """the keys of manifests and tensors, by checkpoint and number"""
    numbers: dict[str, int]
    """the highest number that has a manifest, by checkpoint"""

    @classmethod
    def of(cls, store: Store, name: str) -> _Listing:
        listing = cls({}, {})
        for key in store.list_keys().wait():
            if key.startswith((f"{name}/checkpoints/", f"{name}/saved/")):
                _, kind, checkpoint, number, *_ = key.split("/", 4)
                listing.keys.setdefault((checkpoint, int(number)), []).append(key)
                if kind == "checkpoints":
                    listing.numbers[checkpoint] = max(int(number), listing.numbers.get(checkpoint, 0))
        return listing

    def of_checkpoint(self, checkpoint: str) -> dict[int, list[str]]:
        """Return the keys of a checkpoint by number, in ascending order."""
        return {n: self.keys[c, n] for c, n in sorted(self.keys) if c == checkpoint}

    def obsolete(self) -> list[str]:
        """Return the keys that no checkpoint needs: a later manifest replaced them, or no manifest refers to them."""
        return [key for (c, n), keys in self.keys.items() if self.numbers.get(c) != n for key in keys]

    def number(self, checkpoint: str) -> int:
        """Return the number of a checkpoint.

        Raises:
            NotFoundError: the checkpoint does not exist.
        """
        expect_str("checkpoint", checkpoint)
        if checkpoint not in self.numbers:
            known = ", ".join(map(repr, sorted(self.numbers))) or "none"
            raise NotFoundError(f"there is no checkpoint {checkpoint!r}; there are: {known}")
        return self.numbers[checkpoint]


@dataclass(frozen=True)
class _Contents:
    """Tensors of a checkpoint that is being saved; their keys begin with `place`."""

    place: str
    links: dict[str, str] = field(default_factory=dict)
    """the keys of tensors that are in the store, by new key"""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """tensors in memory, by key"""

    def add(self, swapper: SwappedStates, parameter: torch.Tensor) -> dict[str, Any]:
        """Add a parameter's tensors; return its manifest entry, from which ``_keys`` and ``_bounds`` are derived."""
        state, like = swapper.state(parameter), swapper.like(parameter)
        tensors = {name: (t.dtype, tuple(t.shape), len(state.bounds)) for name, t in state.stored.items()}
        for chunk in state.chunks():
            unwritten = chunk.unwritten()
            for name in state.stored:
                key = chunk.key(self.place, name, 0)
                if unwritten is None:
                    self.links[key] = swapper.key(chunk, name)
                else:
                    self.tensors[key] = unwritten[name]
        values = {}
        for name, value in state.values.items():
            if _is_plain(value) and value.layout == torch.strided and value.nbytes > _LARGEST_VALUE:
                tensors[name] = (value.dtype, tuple(value.shape), 1)
                self.tensors[key_of(self.place, state.number, name, 0, 0)] = value.detach()
            else:
                values[name] = _loadable(value, f"{name!r} of the state of parameter {state.number}")
        return {
            "number": state.number,
            "shape": tuple(like.shape),
            "dtype": like.dtype,
            "chunk": state.bounds[0][1],  # elements of each chunk but the last
            "values": values,
            "tensors": tensors,  # dtype, shape and the number of chunks
        }


def _save(store: Store, name: str, checkpoint: str, groups: list[dict[str, Any]], swapper: SwappedStates) -> None:
    """Save the state of all parameters; none of them is being written."""
    expect_str("checkpoint", checkpoint)
    if not checkpoint or "/" in checkpoint:
        raise ValueError(f"checkpoint={checkpoint!r} is empty or has a '/'")
    listing = _Listing.of(store, name)
    older = listing.of_checkpoint(checkpoint)
    number = max(older, default=0) + 1
    contents = _Contents(_place(name, checkpoint, number))
    parameters = [[contents.add(swapper, parameter) for parameter in group["params"]] for group in groups]
    options = [
        {key: _loadable(value, f"option {key!r} of group {i}") for key, value in group.items() if key != "params"}
        for i, group in enumerate(groups)
    ]
    classes = _class_names(swapper.optimizer_class)
    content = {"format": _FORMAT, "classes": classes, "groups": options, "parameters": parameters}
    torch.save(content, manifest := io.BytesIO())
    if obsolete := listing.obsolete():
        store.deletev(obsolete)  # without a wait, like the deletion below
    is_sent = False
    try:
        _copy(store, contents.links)
        store.writev(contents.tensors).wait()
        is_sent = True
        store.write(_key(name, checkpoint, number), torch.frombuffer(manifest.getbuffer(), dtype=torch.uint8)).wait()
    except BaseException as e:
        # After an interrupt or the loss of a connection the store may have the manifest, or write it later.
        if not is_sent or isinstance(e, StorageError):
            store.deletev([*contents.links, *contents.tensors]).exception()
        raise
    if checkpoint in listing.numbers:
        store.deletev(older[listing.numbers[checkpoint]])


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if a value is a tensor, and not of a subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _loadable(value: Any, what: str) -> Any:
    """Return a value in the form that a checkpoint stores: with Python's numbers in place of numpy's.

    Raises:
        TypeError: ``load()`` could not read the value; the message begins with `what`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple):
        return kind(_loadable(item, what) for item in value)
    if kind is dict:
        return dict(_loadable(list(value.items()), what))
    if _is_plain(value):
        is_part = value.layout == torch.strided and value.nbytes < value.untyped_storage().nbytes()
        return value.detach().clone() if is_part else value  # torch.save() writes all of the memory
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and type(value.item()) in _PLAIN:
        return value.item()
    try:
        torch.save(value, buffer := io.BytesIO())
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as e:
        raise TypeError(
            f"{what} has the type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store. Use numbers, "
            "strings or tensors, or lists, tuples or dicts of those"
        ) from e
    return value


def _keys(place: str, entry: dict[str, Any], tensor_name: str) -> list[str]:
    """Return the keys of a state tensor in a checkpoint, one for each chunk."""
    return [key_of(place, entry["number"], tensor_name, i, 0) for i in range(entry["tensors"][tensor_name][2])]


def _bounds(entry: dict[str, Any], chunks: int) -> list[tuple[int, int]]:
    """Return the first element of each chunk and the first one after it."""
    return list(itertools.pairwise([*range(0, chunks * entry["chunk"], entry["chunk"]), math.prod(entry["shape"])]))


def _class_names(optimizer: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of an optimizer class and of its bases, which keep state of the same kind."""
    return [c.__name__ for c in optimizer.__mro__ if issubclass(c, torch.optim.Optimizer)][:-1]


def _copy(store: Store, links: dict[str, str]) -> None:
    if isinstance(store, DiskStore):
        store.link(links).wait()
        return
    for new, old in links.items():
        store.write(new, store.read(old).wait()).wait()


def _load(store: Store, name: str, checkpoint: str, groups: list[dict[str, Any]], swapper: SwappedStates) -> None:
    """Load the state of all parameters."""
    number = _Listing.of(store, name).number(checkpoint)
    manifest = _manifest(store, _key(name, checkpoint, number), checkpoint)
    classes = _class_names(swapper.optimizer_class)
    if classes[0] not in manifest["classes"] and manifest["classes"][0] not in classes:
        raise ValueError(f"checkpoint {checkpoint!r} is of {manifest['classes'][0]}, but the optimizer is {classes[0]}")
    found = [[tuple(entry["shape"]) for entry in group] for group in manifest["parameters"]]
    wanted = [[tuple(swapper.like(parameter).shape) for parameter in group["params"]] for group in groups]
    if found != wanted:
        raise ValueError(f"checkpoint {checkpoint!r} has parameters of the shapes {found}, but the optimizer {wanted}")
    place = _place(name, checkpoint, number)
    _expect_tensors(store, place, checkpoint, manifest)
    for group, entries in zip(groups, manifest["parameters"], strict=True):
        for parameter, entry in zip(group["params"], entries, strict=True):
            state = {**entry["values"], **_tensors_of(store, place, entry)}
            swapper.write_state(parameter, cast(state, swapper.like(parameter), entry["dtype"]))
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
    for tensor_name, (dtype, shape, chunks) in entry["tensors"].items():
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        parts = [whole.view(-1)[begin:end] for begin, end in _bounds(entry, chunks)] if chunks > 1 else [whole]
        store.readv(_keys(place, entry, tensor_name), parts).wait()
        tensors[tensor_name] = whole
    return tensors


def _delete(store: Store, name: str, checkpoint: str) -> None:
    """Delete a checkpoint, its manifests first, so that an interrupt leaves only tensors without a manifest."""
    listing = _Listing.of(store, name)
    listing.number(checkpoint)
    kept = listing.of_checkpoint(checkpoint)
    manifests = [key for number in kept if (key := _key(name, checkpoint, number)) in kept[number]]
    for key in manifests:  # in ascending order: a crash leaves the highest one
        store.delete(key).wait()
    store.deletev([key for keys in kept.values() for key in keys if key not in manifests]).wait()


def _manifest(store: Store, key: str, checkpoint: str) -> dict[str, Any]:
    manifest = torch.load(io.BytesIO(store.read(key).wait().numpy().tobytes()), weights_only=True)
    if manifest["format"] != _FORMAT:
        raise ValueError(f"checkpoint {checkpoint!r} has format {manifest['format']}; this version reads {_FORMAT}")
    return manifest  # type: ignore[no-any-return]


def _key(name: str, checkpoint: str, number: int) -> str:
    """Return the key of a manifest."""
    return f"{name}/checkpoints/{checkpoint}/{number}"


def _place(name: str, checkpoint: str, number: int) -> str:
    """Return the prefix of the keys of a checkpoint's tensors."""
    return f"{name}/saved/{checkpoint}/{number}/"

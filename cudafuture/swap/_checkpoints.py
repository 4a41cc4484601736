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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch

from cudafuture._arguments import expect_str
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


class Checkpoints:
    """Checkpoints of one optimizer in its store. Only one thread at a time may call it, without gradient mode."""

    def __init__(self, namespace: OptimizerNamespace) -> None:
        self._store, self._name = namespace.store, namespace.name
        self._is_settled = False  # no write of an interrupted save() is in flight

    def names(self) -> list[str]:
        """Return the names of the checkpoints in the store, sorted."""
        return sorted(_Listing.of(self._store, self._name).numbers)

    def _settle(self) -> None:
        """Wait for the writes of an interrupted save(): the list of keys lacks them until they end."""
        if not self._is_settled:
            self._store.flush().exception()  # the call that wrote raises an error of the write
            self._is_settled = True

    # ---- saving

    def save(self, checkpoint: str, groups: list[dict[str, Any]], states: SwappedStates) -> None:
        """Save the state of all parameters, and the options of their groups, under a name.

        Raises:
            SwapError: state of an earlier step cannot be written.
            StorageError: the checkpoint cannot be written; an older one of the name does not change.
            TypeError: the name, an option or a value of a state has a type ``load()`` cannot read; nothing is written.
            ValueError: the name is empty, or has a "/".
        """
        states.flush()
        self._settle()
        expect_str("checkpoint", checkpoint)
        if not checkpoint or "/" in checkpoint:
            raise ValueError(f"checkpoint={checkpoint!r} is empty or has a '/'")
        listing = _Listing.of(self._store, self._name)
        older = listing.of_checkpoint(checkpoint)
        number = max(older, default=0) + 1
        contents = _Contents(self._place(checkpoint, number))
        manifest = _manifest_of(contents, groups, states)
        self._is_settled = False
        if obsolete := listing.obsolete():
            self._store.deletev(obsolete)  # without a wait, like the deletion below
        self._write(contents, self._key(checkpoint, number), manifest)
        if checkpoint in listing.numbers:
            self._store.deletev(older[listing.numbers[checkpoint]])
        self._is_settled = True

    def _write(self, contents: _Contents, key: str, manifest: torch.Tensor) -> None:
        """Write the tensors of a checkpoint, and then its manifest."""
        is_sent = False
        try:
            self._copy(contents.links)
            self._store.writev(contents.tensors).wait()
            is_sent = True
            self._store.write(key, manifest).wait()
        except BaseException as e:
            # After an interrupt or the loss of a connection the store may have the manifest, or write it later.
            if not is_sent or isinstance(e, StorageError):
                self._store.deletev([*contents.links, *contents.tensors]).exception()
            raise

    def _copy(self, links: dict[str, str]) -> None:
        if isinstance(self._store, DiskStore):
            self._store.link(links).wait()
            return
        for new, old in links.items():
            self._store.write(new, self._store.read(old).wait()).wait()

    # ---- loading

    def load(self, checkpoint: str, groups: list[dict[str, Any]], states: SwappedStates) -> None:
        """Load the state of all parameters, and then the options of their groups.

        Raises:
            NotFoundError: the checkpoint does not exist, or one of its tensors is missing; nothing has changed.
            ValueError: its groups, the shapes of its parameters, or its optimizer's class differ from this one's.
            StorageError: a tensor cannot be read. Some parameters have the state of the checkpoint, the others and the
                options have not changed.
        """
        self._settle()
        number = _Listing.of(self._store, self._name).number(checkpoint)
        manifest = self._manifest(checkpoint, number)
        classes = _class_names(states.optimizer_class)
        if classes[0] not in manifest["classes"] and manifest["classes"][0] not in classes:
            raise ValueError(
                f"checkpoint {checkpoint!r} is of {manifest['classes'][0]}, but the optimizer is {classes[0]}"
            )
        found = [[tuple(entry["shape"]) for entry in group] for group in manifest["parameters"]]
        wanted = [[tuple(states.like(parameter).shape) for parameter in group["params"]] for group in groups]
        if found != wanted:
            raise ValueError(
                f"checkpoint {checkpoint!r} has parameters of the shapes {found}, but the optimizer {wanted}"
            )
        place = self._place(checkpoint, number)
        self._expect_tensors(place, checkpoint, manifest)
        for group, entries in zip(groups, manifest["parameters"], strict=True):
            for parameter, entry in zip(group["params"], entries, strict=True):
                state = {**entry["values"], **self._tensors_of(place, entry)}
                states.write_state(parameter, cast(state, states.like(parameter), entry["dtype"]))
        for group, options in zip(groups, manifest["groups"], strict=True):
            group.update(options)

    def _manifest(self, checkpoint: str, number: int) -> dict[str, Any]:
        content = self._store.read(self._key(checkpoint, number)).wait()
        manifest = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
        if manifest["format"] != _FORMAT:
            raise ValueError(f"checkpoint {checkpoint!r} has format {manifest['format']}; this version reads {_FORMAT}")
        return manifest  # type: ignore[no-any-return]

    def _expect_tensors(self, place: str, checkpoint: str, manifest: dict[str, Any]) -> None:
        """Raise NotFoundError if the store lacks a tensor of a checkpoint."""
        entries = [entry for group in manifest["parameters"] for entry in group]
        keys = [
            key for entry in entries for tensor_name in entry["tensors"] for key in _keys(place, entry, tensor_name)
        ]
        missing = [key for key, found in zip(keys, self._store.find(keys).wait(), strict=True) if found is None]
        if missing:
            raise NotFoundError(
                f"checkpoint {checkpoint!r} lacks {len(missing)} of its {len(keys)} tensors: {missing[0]!r}"
            )

    def _tensors_of(self, place: str, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors = {}
        for tensor_name, (dtype, shape, chunks) in entry["tensors"].items():
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            parts = [whole.view(-1)[begin:end] for begin, end in _bounds(entry, chunks)] if chunks > 1 else [whole]
            self._store.readv(_keys(place, entry, tensor_name), parts).wait()
            tensors[tensor_name] = whole
        return tensors

    # ---- deletion

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint, its manifests first, so that an interrupt leaves only tensors without a manifest.

        Raises:
            NotFoundError: the checkpoint does not exist.
        """
        self._settle()
        listing = _Listing.of(self._store, self._name)
        listing.number(checkpoint)
        kept = listing.of_checkpoint(checkpoint)
        manifests = [key for number in kept if (key := self._key(checkpoint, number)) in kept[number]]
        for key in manifests:  # in ascending order: a crash leaves the highest one
            self._store.delete(key).wait()
        self._store.deletev([key for keys in kept.values() for key in keys if key not in manifests]).wait()

    # ---- keys

    def _key(self, checkpoint: str, number: int) -> str:
        """Return the key of a manifest."""
        return f"{self._name}/checkpoints/{checkpoint}/{number}"

    def _place(self, checkpoint: str, number: int) -> str:
        """Return the prefix of the keys of a checkpoint's tensors."""
        return f"{self._name}/saved/{checkpoint}/{number}/"


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

    def add(self, states: SwappedStates, parameter: torch.Tensor) -> dict[str, Any]:
        """Add a parameter's tensors; return its manifest entry, from which ``_keys`` and ``_bounds`` are derived."""
        state, like = states.state(parameter), states.like(parameter)
        tensors = {name: (t.dtype, tuple(t.shape), len(state.bounds)) for name, t in state.stored.items()}
        for chunk in state.chunks():
            unwritten = chunk.unwritten()
            for name in state.stored:
                key = chunk.key(self.place, name, 0)
                if unwritten is None:
                    self.links[key] = states.key(chunk, name)
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


def _manifest_of(contents: _Contents, groups: list[dict[str, Any]], states: SwappedStates) -> torch.Tensor:
    """Return the bytes of a checkpoint's manifest, and add its tensors to `contents`; none of them is being written."""
    parameters = [[contents.add(states, parameter) for parameter in group["params"]] for group in groups]
    options = [
        {key: _loadable(value, f"option {key!r} of group {i}") for key, value in group.items() if key != "params"}
        for i, group in enumerate(groups)
    ]
    classes = _class_names(states.optimizer_class)
    torch.save(
        {"format": _FORMAT, "classes": classes, "groups": options, "parameters": parameters}, out := io.BytesIO()
    )
    return torch.frombuffer(out.getbuffer(), dtype=torch.uint8)


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

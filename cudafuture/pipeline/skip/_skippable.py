"""Modules that stash and pop skip tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from cudafuture.pipeline.skip._tracker import Key, SkipNamespace, current_skip_tracker

__all__ = ["Skippable", "pop", "skippable", "stash"]

_Skippable = TypeVar("_Skippable", bound="Skippable")


class stash:
    """Command to stash a tensor, or None, under a name: ``yield stash("skip", x)``.

    >>> stash("skip", None).name
    'skip'
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Command to pop the tensor that an earlier module stashed under a name: ``x = yield pop("skip")``.

    >>> pop("skip").name
    'skip'
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """Base class of the modules that ``skippable`` creates. Its ``module`` is an instance of the decorated class."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, SkipNamespace | None] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """Return the namespace of a skip name, and the name.

        >>> skippable(stash=["skip"])(nn.Identity)().namespaced("skip")
        (None, 'skip')
        """
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[Key]:
        """Return an iterator over the namespaces and names that the module stashes, sorted by name.

        >>> list(skippable(stash=["b", "a"])(nn.Identity)().stashable())
        [(None, 'a'), (None, 'b')]
        """
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Return an iterator over the namespaces and names that the module pops, sorted by name.

        >>> list(skippable(pop=["a"])(nn.Identity)().poppable())
        [(None, 'a')]
        """
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(self: _Skippable, ns: SkipNamespace, *, only: Iterable[str] | None = None) -> _Skippable:
        """Move skip names of the module into a namespace, and return the module.

        Args:
            ns: the namespace. Two pairs of modules that use the same name need separate namespaces.
            only: the names; default all that the module declares.

        >>> ns = SkipNamespace()
        >>> layer = skippable(stash=["a", "b"])(nn.Identity)().isolate(ns, only=["a"])
        >>> [namespace is ns for namespace, name in layer.stashable()]
        [True, False]
        """
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def dispatch(
        self,
        input: Any,
        handle_stash: Callable[[str, Tensor | None], None],
        handle_pop: Callable[[str], Tensor | None],
    ) -> Any:
        """Run the module's forward, and call a handler for each command that it yields.

        Raises:
            TypeError: the forward yielded another object than ``stash`` or ``pop``.

        >>> import torch
        >>> skippable()(nn.Identity)().dispatch(torch.ones(1), print, print)
        tensor([1.])
        """
        running = self.module(input)
        if not isinstance(running, Generator):
            return running  # a forward without any yield
        answer: Tensor | None = None
        while True:
            try:
                command = running.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(command, stash):
                handle_stash(command.name, command.tensor)
            elif isinstance(command, pop):
                answer = handle_pop(command.name)
            else:
                raise TypeError(f"a skippable module yields stash(...) or pop(...), not {command!r}")

    def forward(self, input: Any) -> Any:
        """Run the module; the current skip tracker keeps its stashes and provides its pops.

        Raises:
            RuntimeError: a name is not declared, has not been stashed, or is declared but not used.

        >>> skippable(pop=["skip"])(nn.Identity)()(None)
        Traceback (most recent call last):
            ...
        RuntimeError: Identity pops 'skip', which has not been stashed
        """
        tracker = current_skip_tracker()
        batch = tracker.batch_of(input)
        popped: dict[str, Tensor | None] = {}
        for ns, name in self.poppable():
            try:
                popped[name] = tracker.load(batch, ns, name)
            except KeyError:
                raise RuntimeError(f"{self.module_cls.__name__} pops {name!r}, which has not been stashed") from None
        stashed: dict[str, Tensor | None] = {}

        def handle_stash(name: str, tensor: Tensor | None) -> None:
            self._check_declared(name, self.stashable_names, "stashes")
            stashed[name] = tensor

        def handle_pop(name: str) -> Tensor | None:
            self._check_declared(name, self.poppable_names, "pops")
            if name not in popped:
                raise RuntimeError(f"{self.module_cls.__name__} pops {name!r} twice")
            return popped.pop(name)

        output = self.dispatch(input if batch is None else batch.tensor_or_tensors, handle_stash, handle_pop)
        for verb, names in (("stashes", self.stashable_names - stashed.keys()), ("pops", popped.keys())):
            if names:
                listed = ", ".join(map(repr, sorted(names)))
                raise RuntimeError(f"{self.module_cls.__name__} declares that it {verb} {listed} but did not")
        batch = tracker.batch_of(output)
        for ns, name in self.stashable():
            tracker.save(batch, ns, name, stashed[name])
        return output if batch is None else batch.tensor_or_tensors

    def _check_declared(self, name: str, declared: frozenset[str], verb: str) -> None:
        if name not in declared:
            known = ", ".join(map(repr, sorted(declared))) or "none"
            raise RuntimeError(f"{self.module_cls.__name__} did not declare that it {verb} {name!r}; declared: {known}")


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a class decorator for modules that stash or pop skip tensors.

    Args:
        stash: names that the module stashes, each in every call of its forward.
        pop: names that it pops, each in every call.

    The forward of the decorated class is a generator: it yields ``stash`` and ``pop`` commands, and returns the output.
    Such modules also run outside of any pipeline.

    >>> import torch
    >>> @skippable(stash=["skip"])
    ... class First(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("skip", x)
    ...         return 2 * x
    >>> @skippable(pop=["skip"])
    ... class Last(nn.Module):
    ...     def forward(self, x):
    ...         skip = yield pop("skip")
    ...         return x + skip
    >>> nn.Sequential(First(), nn.ReLU(), Last())(torch.ones(2))
    tensor([3., 3.])
    """
    if isinstance(stash, str) or isinstance(pop, str):
        raise TypeError(f"skippable() takes lists of names: stash=[...], pop=[...]; got {stash!r} and {pop!r}")
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        about = {key: getattr(module_cls, key) for key in ("__module__", "__qualname__", "__doc__")}
        return type(module_cls.__name__, (Skippable,), {"module_cls": module_cls, **names, **about})

    return decorate

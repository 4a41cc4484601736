"""Layout of skip connections: the partition that stashes a name, and the one that pops it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from cudafuture.pipeline.skip._skippable import Skippable
from cudafuture.pipeline.skip._tracker import Key, SkipNamespace

__all__ = ["SkipLayout", "inspect_skip_layout", "verify_skippables"]


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError unless each skip name of the module's children has one stash, and one later pop.

    Raises:
        TypeError: it lists all mistakes.

    >>> from cudafuture.pipeline.skip import skippable
    >>> verify_skippables(nn.Sequential(nn.ReLU(), skippable(pop=["skip"])(nn.Identity)()))
    Traceback (most recent call last):
        ...
    TypeError: stashes and pops do not match:
    * '1' pops 'skip', which no module before it stashes
    """
    stashed: dict[Key, str] = {}
    popped: set[Key] = set()
    mistakes: list[str] = []
    for layer, child in module.named_children():
        if not isinstance(child, Skippable):
            continue
        both = child.stashable_names & child.poppable_names
        mistakes += [f"{layer!r} both stashes and pops {name!r}" for name in sorted(both)]
        for key in child.stashable():
            if key[1] not in both:
                if key in stashed:
                    mistakes.append(
                        f"{layer!r} stashes {key[1]!r} again: isolate() each pair in a namespace of its own"
                    )
                stashed.setdefault(key, layer)
        for key in child.poppable():
            if key[1] not in both:
                if key in popped:
                    mistakes.append(f"{layer!r} pops {key[1]!r} again: isolate() each pair in a namespace of its own")
                elif key not in stashed:
                    mistakes.append(f"{layer!r} pops {key[1]!r}, which no module before it stashes")
                else:
                    popped.add(key)
    mistakes += [
        f"{layer!r} stashes {key[1]!r}, which no module pops" for key, layer in stashed.items() if key not in popped
    ]
    if mistakes:
        raise TypeError("stashes and pops do not match:\n" + "\n".join(f"* {mistake}" for mistake in mistakes))


class SkipLayout:
    """Routes of the skip tensors of a partitioned model.

    Attributes:
        by_ns_name: {(namespace, name): (partition that stashes, partition that pops)}
        by_partition: for each partition the skips that it pops: [(partition that stashes, namespace, name)]

    >>> SkipLayout(2, {(None, "skip"): (0, 1)}).by_partition
    [[], [(0, None, 'skip')]]
    """

    def __init__(self, partitions: int, routes: dict[Key, tuple[int, int]]) -> None:
        self.by_ns_name = routes
        self.by_partition: list[list[tuple[int, SkipNamespace | None, str]]] = [[] for _ in range(partitions)]
        for (ns, name), (stashed_in, popped_in) in sorted(routes.items(), key=lambda route: route[1]):
            self.by_partition[popped_in].append((stashed_in, ns, name))

    def copy_policy(self, partition: int) -> Iterator[tuple[int, SkipNamespace | None, str]]:
        """Return an iterator over the skips to copy to a partition, ordered by the partition that stashes them.

        >>> list(SkipLayout(2, {(None, "far"): (0, 1), (None, "near"): (1, 1)}).copy_policy(1))
        [(0, None, 'far')]
        """
        return (route for route in self.by_partition[partition] if route[0] != partition)

    def requires_copy(self, ns: SkipNamespace | None, name: str) -> bool:
        """Return whether another partition pops the skip than the one that stashes it.

        >>> SkipLayout(2, {(None, "far"): (0, 1)}).requires_copy(None, "far")
        True
        """
        stashed_in, popped_in = self.by_ns_name.get((ns, name), (0, 0))
        return stashed_in != popped_in


def inspect_skip_layout(partitions: Iterable[nn.Module]) -> SkipLayout:
    """Return the routes of the skips between partitions, each a module that has skippable modules at any depth.

    >>> from cudafuture.pipeline.skip import skippable
    >>> first, last = skippable(stash=["skip"])(nn.Identity)(), skippable(pop=["skip"])(nn.Identity)()
    >>> inspect_skip_layout([nn.Sequential(first), nn.Sequential(nn.ReLU(), last)]).by_ns_name
    {(None, 'skip'): (0, 1)}
    """
    routes: dict[Key, tuple[int, int]] = {}
    stashed_in: dict[Key, int] = {}
    partitions = list(partitions)
    for j, partition in enumerate(partitions):
        for module in partition.modules():
            if not isinstance(module, Skippable):
                continue
            stashed_in.update(dict.fromkeys(module.stashable(), j))
            for key in module.poppable():
                i = stashed_in.pop(key, None)
                # A name may be reused in one partition. Only the pair that crosses partitions matters.
                if i is not None and (i != j or key not in routes):
                    routes[key] = i, j
    return SkipLayout(len(partitions), routes)

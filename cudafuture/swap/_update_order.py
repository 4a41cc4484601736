"""Order in which backward updates parameters; the states of the next ones are read ahead in it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["UpdateOrder"]


class UpdateOrder:
    """Order of the updates in the last backward, and the progress of this one in it.

    Args:
        prefetch: the number of parameters that are read ahead.
    """

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._last: list[torch.Tensor] = []
        self._updated: dict[torch.Tensor, None] = {}  # in this backward
        self._read = 0  # the number of the last order's parameters that this backward has read, or is reading

    def begin_update(self, parameter: torch.Tensor) -> None:
        """Begin the update of a parameter; stop reading ahead if it is not the next one of the last order."""
        if parameter in self._updated:  # another backward, and no step between them
            self._begin()
            self.stop_reads()
        position = len(self._updated)
        if position >= len(self._last) or self._last[position] is not parameter:
            self.stop_reads()
        self._updated[parameter] = None

    def end(self) -> None:
        """End this backward; its order is used for the next one."""
        if self._updated:
            self._begin()
        self._read = 0

    def _begin(self) -> None:
        self._last, self._updated = list(self._updated), {}

    def stop_reads(self) -> None:
        """Stop reading ahead in this backward."""
        self._read = len(self._last)

    def next_reads(self) -> Iterator[torch.Tensor]:
        """Yield the parameters whose states must be read now."""
        while self._read < min(len(self._last), len(self._updated) + self._prefetch):
            self._read += 1
            yield self._last[self._read - 1]

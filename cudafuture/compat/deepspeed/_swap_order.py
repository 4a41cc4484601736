"""Order in which a program swaps parameters in; the next ones are read ahead in it."""

from __future__ import annotations

from cudafuture.swap._parameter_state import ParameterState

__all__ = ["SwapOrder"]


class SwapOrder:
    """Order of the last round, or else of the registration. A round swaps each parameter in at most once."""

    def __init__(self) -> None:
        self._registered: list[ParameterState] = []  # by their numbers
        self._successor: dict[ParameterState, ParameterState] = {}  # as in the last round
        self._round: dict[ParameterState, None] = {}
        self._following: ParameterState | None = None

    def register(self, state: ParameterState) -> None:
        """Add a parameter with the next number."""
        self._registered.append(state)

    def unregister(self, states: int) -> None:
        """Remove the newest parameters."""
        del self._registered[len(self._registered) - states :]

    def swap_in(self, state: ParameterState, following: ParameterState | None) -> None:
        """Record that a parameter is swapped in, and the one that the program will swap in next, if it has named it."""
        if state in self._round:
            self._round = {}
        elif self._round:
            self._successor[next(reversed(self._round))] = state
        self._round[state] = None
        self._following = following

    def next_after(self, last: ParameterState, is_first: bool) -> ParameterState | None:
        """Return the parameter that follows, or None if this round has swapped it in, or there is none.

        Args:
            last: the newest parameter that is swapped in, or is being read.
            is_first: no parameter is being read, so the one that the program has named comes first.
        """
        place = last.number + 1
        state = self._registered[place] if place < len(self._registered) else None
        state = self._successor.get(last, state)
        if is_first and self._following is not None:
            state = self._following
        return None if state in self._round else state

"""Checks of the arguments of ``init_rpc``, and their defaults from the environment."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence

__all__ = ["LONGEST_TIMEOUT", "SHORTEST_TIMEOUT", "expect_arguments", "from_environment", "limit"]

# The engine counts milliseconds, as a 32-bit int, of which 0 means no limit.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1e-3, 2e6

_TRANSPORTS = {"ibv", "shm", "uv"}


def limit(timeout: float) -> float:
    """Return the seconds of a timeout as the engine counts them: 0 for no limit.

    Raises:
        ValueError: 0, a negative number, or nan.
    """
    if not timeout > 0:
        raise ValueError(f"a timeout is a positive number of seconds, or math.inf for no limit, not {timeout!r}")
    if timeout > LONGEST_TIMEOUT:
        return 0.0
    return max(float(timeout), SHORTEST_TIMEOUT)


def from_environment(what: str, given: int | None, variable: str) -> int:
    """Return the number that was given, or else the one in an environment variable that torchrun sets."""
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"init_rpc() needs {what}: give it, or start the program with torchrun, which sets {variable}")
    return int(text)


def expect_arguments(
    rank: int,
    world_size: int,
    name: str | None,
    seal: str,
    transports: Sequence[str] | None,
    receive_memory: int,
    **at_least_one: int,
) -> None:
    """Raise ValueError or TypeError unless these arguments of ``init_rpc`` are as it documents them."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} workers'")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a worker's name is a str, not {name!r}")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", name):
        raise ValueError(f"a worker's name has 1 to 127 letters and digits (ASCII), '-', '_' or ':', unlike {name!r}")
    for what, number in at_least_one.items():
        if number < 1:
            raise ValueError(f"{what} is at least 1, not {number}")
    if operator.index(receive_memory) < 0:
        raise ValueError(f"receive_memory is a number of bytes, or 0 for no pool, not {receive_memory}")
    if transports is not None and not (transports and {*transports} <= _TRANSPORTS):
        raise ValueError(f"transports={transports!r}: pass one or more of {', '.join(sorted(_TRANSPORTS))}")
    if seal not in ("descriptions", "contents"):
        raise ValueError(f'seal is "descriptions" or "contents", not {seal!r}')

"""The arguments of ``init_rpc``: their checks, and their defaults from the environment."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cudafuture.config import config, read
from rpc_ext._devices import DeviceMaps, as_json

__all__ = ["LONGEST_TIMEOUT", "SHORTEST_SECRET", "SHORTEST_TIMEOUT", "Options", "check", "limit", "read_secret"]

# The engine counts milliseconds, as a 32-bit int, of which 0 means no limit.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1e-3, 2e6

SHORTEST_SECRET = 16
"""bytes that a secret has at least"""

_TRANSPORTS = {"ibv", "shm", "uv"}


@dataclass(frozen=True)
class Options:
    """The checked arguments of ``init_rpc``. Timeouts are in seconds, as the engine counts them."""

    name: str
    rank: int
    world_size: int
    secret: bytes | None
    seals_contents: bool
    device_maps: Any
    """as JSON"""
    num_worker_threads: int
    rpc_timeout: float
    init_method: str
    max_in_flight: int
    max_bytes_in_flight: int
    start_timeout: float
    transports: list[str] | None
    receive_memory: int


def check(
    *,
    name: str | None,
    rank: int | None,
    world_size: int | None,
    secret: str | bytes | None,
    seal: str,
    device_maps: DeviceMaps | Literal["auto"] | None,
    rpc_timeout: float,
    init_method: str | None,
    start_timeout: float,
    transports: Sequence[str] | None,
    receive_memory: int,
    **at_least_one: int,
) -> Options:
    """Return the options that the arguments of ``init_rpc`` mean; raise what it documents."""
    rank = _from_environment("rank", rank, "RANK")
    world_size = _from_environment("world_size", world_size, "WORLD_SIZE")
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
    found_secret = read_secret(secret)
    return Options(
        name=name or f"worker{rank}",
        rank=rank,
        world_size=world_size,
        secret=found_secret,
        seals_contents=found_secret is not None and seal == "contents",
        device_maps=as_json(device_maps),
        rpc_timeout=limit(rpc_timeout),
        init_method=init_method or "env://",
        start_timeout=limit(start_timeout) or LONGEST_TIMEOUT,
        transports=None if transports is None else list(transports),
        receive_memory=receive_memory,
        **at_least_one,
    )


def _from_environment(what: str, given: int | None, variable: str) -> int:
    """Return the number that was given, or else the one in an environment variable that torchrun sets."""
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"init_rpc() needs {what}: give it, or start the program with torchrun, which sets {variable}")
    return int(text)


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


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Return the secret given, else the one in the file that CUDAFUTURE_RPC_SECRET_FILE names, else None.

    Raises:
        ValueError: it is too short to be one; or CUDAFUTURE_RPC_SECRET_FILE is set to nothing, or names another file
            than when the library was imported: the job would have no secret, or another.
        OSError: the file cannot be read.
    """
    source = "secret"
    if secret is None:
        if os.environ.get("CUDAFUTURE_RPC_SECRET_FILE") == "":
            raise ValueError(
                "CUDAFUTURE_RPC_SECRET_FILE is set to an empty string, so there would be no secret: name the file, or "
                "unset the variable"
            )
        named = read(os.environ).rpc_secret_file
        if named is not None and named != config.rpc_secret_file:
            raise ValueError(
                f"CUDAFUTURE_RPC_SECRET_FILE={named!r} was set after cudafuture was imported, which has read "
                f"{config.rpc_secret_file!r}: set it before, or give init_rpc(secret=...)"
            )
        if config.rpc_secret_file is None:
            return None
        source = f"the secret in {config.rpc_secret_file}"
        secret = Path(config.rpc_secret_file).read_bytes().rstrip(b"\r\n")
    if not isinstance(secret, (str, bytes)):
        raise TypeError(f"secret is a str or bytes, not {type(secret).__name__}")
    found = secret.encode() if isinstance(secret, str) else secret
    if len(found) < SHORTEST_SECRET:
        raise ValueError(
            f"{source} has {len(found)} bytes and needs at least {SHORTEST_SECRET}; `python -c 'import secrets; "
            "print(secrets.token_hex(32))'` makes one"
        )
    return found

"""The checked arguments of ``init_rpc``, with defaults from the environment."""

from __future__ import annotations

import numbers
import operator
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudafuture.config import config, read

__all__ = [
    "LONGEST_TIMEOUT",
    "SHORTEST_SECRET",
    "SHORTEST_TIMEOUT",
    "RpcOptions",
    "from_environment",
    "limit",
    "read_secret",
]

# The engine has timeouts in milliseconds as a 32-bit int; 0 means no limit.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1e-3, 2e6

SHORTEST_SECRET = 16
"""least bytes of a secret"""

_TRANSPORTS = {"ibv", "shm", "uv"}


@dataclass(frozen=True)
class RpcOptions:
    """The arguments of ``init_rpc``. The constructor checks them.

    Raises:
        ValueError, TypeError: see ``init_rpc``.
    """

    name: str
    rank: int
    world_size: int
    secret: bytes | None
    seal: str
    device_maps: Any
    """as JSON"""
    num_worker_threads: int
    rpc_timeout: float
    """seconds, 0 for no limit"""
    init_method: str
    max_in_flight: int
    max_bytes_in_flight: int
    start_timeout: float
    transports: Collection[str] | None
    receive_memory: int

    def __post_init__(self) -> None:
        for what in ("rank", "world_size", "receive_memory"):
            _expect_int(what, getattr(self, what))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, but must be from 0 to world_size - 1 = {self.world_size - 1}")
        if not isinstance(self.name, str):
            raise TypeError(f"a worker's name is a str, not {self.name!r}")
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", self.name):
            raise ValueError(
                f"a worker's name has 1 to 127 letters and digits (ASCII), '-', '_' or ':', unlike {self.name!r}"
            )
        for what in ("num_worker_threads", "max_in_flight", "max_bytes_in_flight"):
            value = getattr(self, what)
            if not isinstance(value, int):
                raise TypeError(f"{what} is an int from 1 to 2**63 - 1, not {value!r}")
            if not 1 <= value < 1 << 63:
                raise ValueError(f"{what} is an int from 1 to 2**63 - 1, not {value}")
        if self.receive_memory < 0:
            raise ValueError(f"receive_memory is a number of bytes, or 0 for no pool, not {self.receive_memory}")
        if not isinstance(self.init_method, str) or "://" not in self.init_method:
            kind = ValueError if isinstance(self.init_method, str) else TypeError
            raise kind(
                f"init_method is a URL, such as 'tcp://HOST:PORT', 'file:///PATH' or 'env://', not {self.init_method!r}"
            )
        if self.transports is not None and not (self.transports and {*self.transports} <= _TRANSPORTS):
            raise ValueError(f"transports={self.transports!r}: pass one or more of {', '.join(sorted(_TRANSPORTS))}")
        if self.seal not in ("descriptions", "contents"):
            raise ValueError(f'seal is "descriptions" or "contents", not {self.seal!r}')

    @property
    def seals_contents(self) -> bool:
        """True if the seal of a message covers the numbers in its tensors."""
        return self.secret is not None and self.seal == "contents"


def _expect_int(what: str, value: Any) -> None:
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {value!r}") from None


def from_environment(what: str, given: int | None, variable: str) -> int:
    """Return the argument, or the number in an environment variable of torchrun if the argument is None."""
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"init_rpc() needs {what}: pass it, or start the program with torchrun, which sets {variable}")
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{variable}={text!r} is not a number: set it to the {what}, or pass {what} to init_rpc()"
        ) from None


def limit(timeout: float, what: str = "a timeout") -> float:
    """Return a timeout in the form of the engine: seconds, 0 for no limit.

    Raises:
        ValueError: the timeout is 0, negative or nan.
        TypeError: it is not a number.
    """
    problem = f"{what} is a positive number of seconds, or math.inf for no limit, not {timeout!r}"
    if not isinstance(timeout, numbers.Real):
        raise TypeError(problem)
    if not timeout > 0:
        raise ValueError(problem)
    if timeout > LONGEST_TIMEOUT:
        return 0.0
    return max(float(timeout), SHORTEST_TIMEOUT)


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Return the argument, or the secret in the file that CUDAFUTURE_RPC_SECRET_FILE names, or None.

    Raises:
        ValueError: the secret is too short; or CUDAFUTURE_RPC_SECRET_FILE is empty, or has changed since the library
            was imported, so that the job would have no secret or another one.
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
                f"{config.rpc_secret_file!r}: set it before, or pass init_rpc(secret=...)"
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

"""What a request of an offload service's client has to be, besides its headers."""

from __future__ import annotations

import math

from cudafuture.errors import AuthenticationError
from rpc_ext._offload_calls import TOKEN
from rpc_ext._offload_order import Stamp
from rpc_ext._offload_wire import Header
from rpc_ext.session import current

__all__ = ["expect_good_company", "expect_worker", "expiries_of", "stamp_of", "time_of", "token_of"]


def expect_worker(client: object) -> None:
    if client not in current().workers:  # nobody would notice when it is gone
        raise AuthenticationError(f"there is no worker {client!r}")


def token_of(token: object) -> bytes:
    if not isinstance(token, bytes) or len(token) != TOKEN:
        raise ValueError(f"a client names its session by {TOKEN} bytes")
    return token


def time_of(value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a time")
    return value


def stamp_of(stamp: object) -> Stamp:
    if not isinstance(stamp, tuple) or len(stamp) != 3 or type(stamp[0]) is not int:
        raise ValueError(f"{stamp!r} is not the stamp of a request")
    return Stamp(stamp[0], time_of(stamp[1]), time_of(stamp[2]))


def expiries_of(expiries: object, stamp: Stamp, headers: list[Header]) -> dict[str, float]:
    """Return when the change of each key expires."""
    if not isinstance(expiries, tuple) or len(expiries) not in (0, len(headers)):
        raise ValueError(f"{expiries!r} are not the expiries of {len(headers)} changes")
    times = map(time_of, expiries) if expiries else [stamp.expires] * len(headers)
    return {header.key: expires for header, expires in zip(headers, times, strict=True)}


def expect_good_company(headers: list[Header]) -> None:
    if len({h.key for h in headers}) != len(headers):
        raise ValueError("a request has each key once")
    if len(headers) > 1 and any(h.pieces > 1 for h in headers):
        raise ValueError("a piece of a tensor comes alone")

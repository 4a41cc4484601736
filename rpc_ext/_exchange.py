"""What workers tell each other before there is RPC: JSON through the job's store, signed where there is a secret.

The store itself takes whatever anybody writes, so a record that is not as it should be is passed over, and one's own is
put back where somebody has written over it. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from cudafuture.errors import AuthenticationError

__all__ = ["Exchange", "Store"]

_logger = logging.getLogger("rpc_ext.authentication")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Exchange:
    """Rounds in which every worker shows a JSON value to all others.

    With a secret, two of them make a session: in the first each shows a fresh nonce; in the second it proves that it
    knows the secret, and has seen the same nonces, by signing with a key that comes of both. An answer to one's own
    nonce cannot be older than the nonce.

    Args:
        store: of the job, of this session alone.
        rank: of this worker, below `world_size`.
        world_size: how many show something.
        secret: None: nothing is signed.
        timeout: seconds for each round.
    """

    def __init__(self, store: Store, rank: int, world_size: int, secret: bytes | None, timeout: float) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._key = secret
        self._shown: dict[str, bytes] = {}  # key in the store -> what this worker has put there
        self.passed_over = 0
        """records that were not as they should be"""

    def begin(self, value: object) -> tuple[list[Any], bytes]:
        """Show `value`; return what each showed, by rank, and the key of the session: empty without a secret."""
        nonce = secrets.token_hex(32)
        shown = self.round("hello", {"nonce": nonce, "value": value}, _is_hello)
        if self._key is not None:
            transcript = json.dumps([self._world_size, shown], sort_keys=True).encode()
            self._key = hmac.digest(self._key, b"cudafuture session" + hashlib.sha256(transcript).digest(), "sha256")
            self.round("proof", "proof")
        key = b"" if self._key is None else hmac.digest(self._key, b"cudafuture messages", "sha256")
        return [one["value"] for one in shown], key

    def round(self, step: str, value: object, is_valid: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """Show `value` under a name that all workers use; return what each showed, by rank.

        Raises:
            TimeoutError: some worker has shown nothing.
            AuthenticationError: what is there in its name is not signed with the same secret.
        """
        self._shown[self._place(step, self._rank)] = self._signed(step, self._rank, value)
        found: dict[int, Any] = {}
        wrong: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        while True:
            self._put_back()
            for rank in set(range(self._world_size)) - set(found):
                self._look(step, rank, is_valid, found, wrong)
            if len(found) == self._world_size:
                return [found[rank] for rank in range(self._world_size)]
            if time.monotonic() > deadline:
                raise self._missing(step, sorted(set(range(self._world_size)) - set(found)), set(wrong))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def meet(self, step: str, timeout: float) -> None:
        """Wait until all workers are here, `timeout` seconds at most; for errors see ``round``."""
        self._timeout = timeout
        self.round(step, True)

    def _look(
        self, step: str, rank: int, is_valid: Callable[[Any], bool], found: dict[int, Any], wrong: dict[int, bytes]
    ) -> None:
        place = self._place(step, rank)
        if not self._store.check([place]):
            return
        record = self._store.get(place)
        value = self._opened(step, rank, record)
        if value is not None and is_valid(value):
            found[rank] = value
        elif wrong.get(rank) != record:
            wrong[rank] = record
            self.passed_over += 1
            _logger.warning(
                "what the store holds in the name of worker %d (%s) was not written by one who knows the secret, or is "
                "damaged; it is passed over",
                rank,
                step,
            )

    def _missing(self, step: str, ranks: list[int], wrong: set[int]) -> Exception:
        which = ", ".join(map(str, ranks))
        if wrong:
            return AuthenticationError(
                f"worker {which} of {self._world_size} has not proven within {self._timeout:g} s that it knows the "
                f"secret ({step}): give all workers the same one"
            )
        return TimeoutError(f"worker {which} of {self._world_size} has not come within {self._timeout:g} s ({step})")

    def _place(self, step: str, rank: int) -> str:
        return f"{step}/{rank}"

    def _put_back(self) -> None:
        for place, record in self._shown.items():
            if not self._store.check([place]) or self._store.get(place) != record:
                self._store.set(place, record.decode())

    def _signed(self, step: str, rank: int, value: object) -> bytes:
        body = json.dumps({"value": value}, sort_keys=True)
        return f"{self._mac(step, rank, body)} {body}".encode()

    def _opened(self, step: str, rank: int, record: bytes) -> Any:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            mac, _, body = record.decode().partition(" ")
            if hmac.compare_digest(mac, self._mac(step, rank, body)):
                return json.loads(body)["value"]
        return None

    def _mac(self, step: str, rank: int, body: str) -> str:
        if self._key is None:
            return "unsigned"
        message = f"cudafuture exchange\0{step}\0{rank}\0{self._world_size}\0{body}".encode()
        return hmac.digest(self._key, message, "sha256").hex()


def _is_hello(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("nonce"), str) and "value" in value

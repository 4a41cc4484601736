"""The handshake of the workers before RPC begins: JSON in the job's store, signed if there is a secret.

Any process may write to the store. So a worker ignores invalid records, and restores its own records if another process
has overwritten them. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cudafuture.errors import AuthenticationError
from rpc_ext._rendezvous import Records

__all__ = ["Handshake", "TorchStore"]

_logger = logging.getLogger("rpc_ext.authentication")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.8  # seconds between two polls of a few requests each
_PATIENCE = 3.0  # seconds after which a record that does not change is that of a worker with another secret


class TorchStore(Protocol):
    """The methods of torch.distributed.Store that this module uses."""

    def set(self, key: str, value: Any, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Handshake:
    """Rounds in which every worker publishes a JSON value to all others.

    With a secret, two rounds establish a session. In the first, each worker publishes a fresh nonce. In the second, it
    signs with a key that is derived from the secret and all nonces. This proves that it knows the secret, and that its
    record is newer than the nonces.

    Args:
        store: the part of the job's store for this session.
        rank: rank of this worker, below `world_size`.
        world_size: number of workers.
        secret: the shared secret; None: nothing is signed.
        timeout: seconds for each round.
    """

    def __init__(self, store: TorchStore, rank: int, world_size: int, secret: bytes | None, timeout: float) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._secret = self._key = secret  # keys of the round "hello" and of the other rounds
        # Other workers need the records of this and the previous round, and the hellos while they wait for proofs.
        self._records = Records(store, most=4)
        self.names: list[str] = []
        """names of the workers by rank, for messages; empty until they are known"""
        self.passed_over = 0
        """number of invalid records"""

    def begin(self, value: object) -> tuple[list[Any], bytes]:
        """Publish `value`; return the values of all workers, by rank, and the session's key: empty without a secret."""
        hellos = self.round("hello", {"nonce": secrets.token_hex(32), "value": value}, _is_hello)
        key = b""
        if self._secret is not None:
            session = self._prove(self._secret, hellos)
            key = hmac.digest(session, b"cudafuture messages", "sha256")
        return [hello["value"] for hello in hellos], key

    def round(
        self,
        step: str,
        value: object,
        is_valid: Callable[[Any], bool] = lambda _: True,
        *,
        deadline: float | None = None,
        absent: str = "has not arrived",
    ) -> list[Any]:
        """Publish `value` in a round; return the values of all workers, by rank.

        Args:
            step: name of the round, the same for all workers.
            value: any JSON.
            is_valid: returns True for a valid value of another worker.
            deadline: deadline on time.monotonic(); default: the timeout of a round from now.
            absent: predicate of the error message for workers without a record.

        Raises:
            TimeoutError: a worker has published nothing.
            AuthenticationError: a record of a worker is not signed with the same secret.
        """
        timeout = self._timeout if deadline is None else max(0.0, deadline - time.monotonic())
        self._show(step, value)
        # A worker does not read its own value back: the store may have an older one, signed with the same secret.
        seen = _Seen(step, self._world_size, {self._rank: json.loads(json.dumps(value))})
        for turn, is_last in self._looks(timeout):
            if self._has_seen_all(seen, turn, is_last, is_valid):
                return [seen.found[rank] for rank in range(self._world_size)]
        raise seen.error(timeout, self.names, absent)

    def leave(self, deadline: float) -> None:
        """Publish that this worker no longer needs the store. The first worker, its possible host, waits for all."""
        if self._rank != 0:
            self._show("left", True)
            return
        with contextlib.suppress(TimeoutError, AuthenticationError):  # then leave without the others
            self.round("left", True, deadline=deadline)

    def close(self) -> None:
        """Stop using the store. Another thread may be in a round."""
        self._records.is_closed = True

    def _prove(self, secret: bytes, hellos: list[Any]) -> bytes:
        """Publish a proof that this worker knows the secret and has seen `hellos`; return the key of the session.

        A hello changes if the first record was of an older session with the same secret.
        """
        seen = _Seen("proof", self._world_size, {self._rank: "proof"})
        shown: list[Any] = []
        for turn, is_last in self._looks(self._timeout):
            missing = sorted(seen.missing())
            # Read all hellos at first, and one in every fourth poll while proofs are missing.
            reread = missing if turn == 0 else [missing[turn // 4 % len(missing)]] if turn % 4 == 0 else []
            for rank, record in self._read("hello", reread).items():
                hello = self._opened("hello", rank, record)
                hellos[rank] = hello if _is_hello(hello) else hellos[rank]
            if shown != hellos:
                shown = list(hellos)
                transcript = json.dumps([self._world_size, shown], sort_keys=True).encode()
                self._key = hmac.digest(secret, b"cudafuture session" + hashlib.sha256(transcript).digest(), "sha256")
                self._show("proof", "proof")
                seen.found = {self._rank: "proof"}
            if self._has_seen_all(seen, turn, is_last, lambda value: bool(value == "proof")):
                assert self._key is not None
                return self._key
        raise seen.error(self._timeout, self.names)

    def _looks(self, timeout: float) -> Iterator[tuple[int, bool]]:
        """Yield the number of each poll of the store, and whether it is the last one; pause in between.

        The pauses grow until the timeout.
        """
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        for turn in itertools.count():
            if self._records.is_closed:
                return
            passed_over = self.passed_over
            is_last = time.monotonic() > deadline
            is_overwritten = self._records.put_back()
            yield turn, is_last
            if is_last:
                return
            if is_overwritten or self.passed_over > passed_over:
                pause = _FIRST_PAUSE  # another process writes records: poll often
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _has_seen_all(self, seen: _Seen, turn: int, is_last: bool, is_valid: Callable[[Any], bool]) -> bool:
        """Read records of missing workers: all when the store has all of them, otherwise one in every fourth poll.

        A poll takes one request or two for any number of workers.
        """
        missing = sorted(seen.missing())
        if missing and not self._records.is_closed:
            if not is_last and not self._store.check(_places(seen.step, missing)):
                missing = [missing[turn // 4 % len(missing)]] if turn % 4 == 0 else []
            for rank, record in self._read(seen.step, missing).items():
                self._look(seen, rank, record, is_valid)
        return not seen.missing()

    def _look(self, seen: _Seen, rank: int, record: bytes, is_valid: Callable[[Any], bool]) -> None:
        value = self._opened(seen.step, rank, record)
        if value is not None and is_valid(value):
            seen.found[rank] = value
            return
        known, since = seen.wrong.get(rank, (None, 0.0))
        if known == record:
            if time.monotonic() >= since + _PATIENCE and _is_hello(_value(record)):
                raise seen.error(_PATIENCE, self.names)
            return
        self.passed_over += 1
        if known is None:
            _logger.warning(
                "the record of worker %d (%s) in the store is damaged, of another session, or not signed with "
                "the secret; it is ignored",
                rank,
                seen.step,
            )
        seen.wrong[rank] = record, time.monotonic()

    def _read(self, step: str, ranks: list[int]) -> dict[int, bytes]:
        """Return the records in the store, by rank."""
        if not ranks:
            return {}
        places = _places(step, ranks)
        if self._store.check(places):
            return dict(zip(ranks, self._store.multi_get(places), strict=True))
        if len(ranks) == 1:
            return {}
        return {rank: record for each in ranks for rank, record in self._read(step, [each]).items()}

    def _show(self, step: str, value: object) -> None:
        body = json.dumps({"value": value}, sort_keys=True)
        (place,) = _places(step, [self._rank])
        self._records.write(place, f"{self._mac(step, self._rank, body)} {body}")

    def _opened(self, step: str, rank: int, record: bytes) -> Any:
        """Return the value in a record; None if the record is damaged or has no valid signature."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            mac, _, body = record.decode().partition(" ")
            if hmac.compare_digest(mac, self._mac(step, rank, body)):
                return _value(record)
        return None

    def _mac(self, step: str, rank: int, body: str) -> str:
        key = self._secret if step == "hello" else self._key
        if key is None:
            return "unsigned"
        message = f"cudafuture handshake\0{step}\0{rank}\0{self._world_size}\0{body}".encode()
        return hmac.digest(key, message, "sha256").hex()


class _Seen:
    """The records of other workers that this worker has read in one round."""

    def __init__(self, step: str, world_size: int, found: dict[int, Any]) -> None:
        self.step, self._world_size, self.found = step, world_size, found
        self.wrong: dict[int, tuple[bytes, float]] = {}  # by rank: the last invalid record, and when it was found

    def missing(self) -> set[int]:
        return set(range(self._world_size)) - set(self.found)

    def error(self, timeout: float, names: list[str], what: str = "has not arrived") -> Exception:
        """Return the error of a round that has timed out."""
        unproven = sorted(self.missing() & set(self.wrong))
        absent = sorted(self.missing() - set(self.wrong))
        parts = []
        if unproven:
            parts.append(
                f"worker {_listed(unproven, names)} of {self._world_size} has not proven within {timeout:g} s that it "
                f"knows the `secret`: give all workers the same one{self._claims(unproven)}"
            )
        if absent:
            parts.append(f"worker {_listed(absent, names)} of {self._world_size} {what} within {timeout:g} s")
        text = f"{'; '.join(parts)} ({self.step})"
        return AuthenticationError(text) if unproven else TimeoutError(text)

    def _claims(self, ranks: list[int]) -> str:
        """Return the names and addresses that workers claim in records without this worker's signature."""
        claims = []
        for rank in ranks:
            record, _ = self.wrong[rank]
            value = _value(record)
            if _is_hello(value) and isinstance(about := value["value"], dict) and "address" in about:
                has = "no secret" if record.startswith(b"unsigned ") else "a secret that this worker does not have"
                claims.append(f"; worker {rank} is {about.get('name')!r} at {about['address']!r} and has {has}"[:400])
        return "".join(claims)


def _value(record: bytes) -> Any:
    """Return the value in a record, signed or not; None if there is none."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return json.loads(record.decode().partition(" ")[2])["value"]
    return None


def _listed(ranks: list[int], names: list[str]) -> str:
    return ", ".join(f"{rank} ('{names[rank]}')" if names else str(rank) for rank in ranks)


def _places(step: str, ranks: list[int]) -> list[str]:
    return [f"{step}/{rank}" for rank in ranks]


def _is_hello(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("nonce"), str) and "value" in value

"""Limits of the messages between a client and a store service; see ``_C/store/wire/message.h``."""

from __future__ import annotations

from cudafuture.store.arguments import encoded_key
from rpc_ext import _C

__all__ = ["LONGEST_KEY", "LONGEST_NAME", "PIECE", "TOKEN", "expect_key"]

PIECE = _C.PART  # most bytes of data in one message. Larger tensors are sent in parts of this size
LONGEST_KEY = _C.LONGEST_KEY  # bytes of UTF-8; the store has the key with the prefix of its namespace
LONGEST_NAME = 255  # bytes of the name of a service
TOKEN = _C.TOKEN  # bytes of the token that identifies a session


def expect_key(key: object) -> None:
    """Check a key.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty, too long, not UTF-8, or contains a NUL.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    encoded = encoded_key(key)
    if not 1 <= len(encoded) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes of UTF-8, not {len(encoded)}")
    if b"\0" in encoded:
        raise ValueError("a key has no NUL")

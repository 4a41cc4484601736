"""Limits of the messages between a client and a store service; see ``_C/store/wire/message.h``."""

from __future__ import annotations

from rpc_ext import _C

__all__ = ["LONGEST_KEY", "LONGEST_NAME", "PART", "TOKEN"]

PART = _C.PART  # most bytes of data in one message. Larger tensors are sent in parts of this size
LONGEST_KEY = _C.LONGEST_KEY  # bytes of UTF-8; the store has the key with the prefix of its namespace
LONGEST_NAME = 255  # bytes of the name of a service
TOKEN = _C.TOKEN  # bytes of the token that identifies a session

"""The secret that the workers of a job share."""

from __future__ import annotations

import os
from pathlib import Path

from cudafuture.config import config, read

__all__ = ["SHORTEST", "read_secret"]

SHORTEST = 16
"""bytes that a secret has at least"""


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Return the secret given, else the one in the file that CUDAFUTURE_RPC_SECRET_FILE names, else None.

    Raises:
        ValueError: it is too short to be one; or CUDAFUTURE_RPC_SECRET_FILE is set to nothing, or names another file
            than when the library was imported.
        OSError: the file cannot be read.
    """
    source = "secret"
    if secret is None:
        if os.environ.get("CUDAFUTURE_RPC_SECRET_FILE") == "":
            raise ValueError(
                "CUDAFUTURE_RPC_SECRET_FILE is set to an empty string, so there would be no secret: name the file, or "
                "unset the variable"
            )
        _expect_unchanged()
        if config.rpc_secret_file is None:
            return None
        source = f"the secret in {config.rpc_secret_file}"
        secret = Path(config.rpc_secret_file).read_bytes().rstrip(b"\r\n")
    if not isinstance(secret, (str, bytes)):
        raise TypeError(f"secret is a str or bytes, not {type(secret).__name__}")
    found = secret.encode() if isinstance(secret, str) else secret
    if len(found) < SHORTEST:
        raise ValueError(
            f"{source} has {len(found)} bytes and needs at least {SHORTEST}; `python -c 'import secrets; "
            "print(secrets.token_hex(32))'` makes one"
        )
    return found


def _expect_unchanged() -> None:
    """Raise ValueError if the variable names another file than at import: the job would have no secret, or another."""
    named = read(os.environ).rpc_secret_file
    if named is not None and named != config.rpc_secret_file:
        raise ValueError(
            f"CUDAFUTURE_RPC_SECRET_FILE={named!r} was set after cudafuture was imported, which has read "
            f"{config.rpc_secret_file!r}: set it before, or give init_rpc(secret=...)"
        )

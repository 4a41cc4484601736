"""Options of ``init_rpc``: the limits of calls in flight, and the source of the secret."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import rpc_ext
from rpc_ext import _options
from rpc_ext._options import SHORTEST_SECRET, read_secret

LONG = "0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "secret"
    monkeypatch.setattr(_options, "config", dataclasses.replace(_options.config, rpc_secret_file=str(file)))  # type: ignore[attr-defined]
    return file


def test_default_secret_is_none() -> None:
    assert _options.config.rpc_secret_file is None  # type: ignore[attr-defined]
    assert read_secret(None) is None


@pytest.mark.parametrize("secret", [LONG, LONG.encode(), "é" * 8, bytes(SHORTEST_SECRET)])
def test_secret_is_text_or_bytes(secret: str | bytes) -> None:
    assert read_secret(secret) == (secret.encode() if isinstance(secret, str) else secret)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_secret_is_file_content_without_newline(file: Path, end: str) -> None:
    file.write_text(LONG + end, newline="")
    assert read_secret(None) == LONG.encode()


def test_blanks_and_binary_belong_to_secret(file: Path) -> None:
    secret = b" \xff\x00 " * 5
    file.write_bytes(secret)
    assert read_secret(None) == secret


def test_given_secret_precedes_file(file: Path) -> None:
    file.write_text(LONG)
    assert read_secret("f" * SHORTEST_SECRET) == b"f" * SHORTEST_SECRET


@pytest.mark.parametrize("secret", ["", b"", "é" * 7, LONG[1:]])
def test_short_secret_is_refused(secret: str | bytes) -> None:
    with pytest.raises(ValueError, match=rf"secret has \d+ bytes and needs at least {SHORTEST_SECRET}; .*token_hex"):
        read_secret(secret)


@pytest.mark.parametrize("content", [b"", b"\n", LONG[1:].encode() + b"\n"])
def test_file_with_short_secret_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"the secret in {file} has"):
        read_secret(None)


def test_unreadable_secret_file_is_error(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match="secret"):
        read_secret(None)


@pytest.mark.parametrize("secret", [1, ["s" * 16], bytearray(16), object()])
def test_secret_of_other_type_is_refused(secret: Any) -> None:
    with pytest.raises(TypeError, match="secret is a str or bytes"):
        read_secret(secret)


def test_error_hides_secret() -> None:
    with pytest.raises(ValueError, match="bytes") as caught:
        read_secret("hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("limit", ["max_in_flight", "max_bytes_in_flight"])
@pytest.mark.parametrize(
    ("value", "error"), [(math.inf, TypeError), (4e3, TypeError), (0, ValueError), (1 << 63, ValueError)]
)
def test_non_positive_limit_is_refused(limit: str, value: float, error: type[Exception]) -> None:
    limits: dict[str, Any] = {limit: value}
    with pytest.raises(error, match=f"{limit} is an int"):
        rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0", **limits)

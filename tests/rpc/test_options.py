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


def test_there_is_none_by_default() -> None:
    assert _options.config.rpc_secret_file is None  # type: ignore[attr-defined]
    assert read_secret(None) is None


@pytest.mark.parametrize("secret", [LONG, LONG.encode(), "é" * 8, bytes(SHORTEST_SECRET)])
def test_it_is_given_as_text_or_bytes(secret: str | bytes) -> None:
    assert read_secret(secret) == (secret.encode() if isinstance(secret, str) else secret)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_it_is_what_the_file_contains_without_the_end_of_its_line(file: Path, end: str) -> None:
    file.write_text(LONG + end, newline="")
    assert read_secret(None) == LONG.encode()


def test_blanks_and_bytes_that_are_no_text_belong_to_it(file: Path) -> None:
    secret = b" \xff\x00 " * 5
    file.write_bytes(secret)
    assert read_secret(None) == secret


def test_what_is_given_goes_before_the_file(file: Path) -> None:
    file.write_text(LONG)
    assert read_secret("f" * SHORTEST_SECRET) == b"f" * SHORTEST_SECRET


@pytest.mark.parametrize("secret", ["", b"", "é" * 7, LONG[1:]])
def test_one_that_is_too_short_is_refused(secret: str | bytes) -> None:
    with pytest.raises(ValueError, match=rf"secret has \d+ bytes and needs at least {SHORTEST_SECRET}; .*token_hex"):
        read_secret(secret)


@pytest.mark.parametrize("content", [b"", b"\n", LONG[1:].encode() + b"\n"])
def test_a_file_with_too_short_a_one_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"the secret in {file} has"):
        read_secret(None)


def test_a_file_that_cannot_be_read_is_an_error_and_not_no_secret(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match="secret"):
        read_secret(None)


@pytest.mark.parametrize("secret", [1, ["s" * 16], bytearray(16), object()])
def test_a_secret_of_another_type_is_refused(secret: Any) -> None:
    with pytest.raises(TypeError, match="secret is a str or bytes"):
        read_secret(secret)


def test_the_error_does_not_show_it() -> None:
    with pytest.raises(ValueError, match="bytes") as caught:
        read_secret("hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("limit", ["max_in_flight", "max_bytes_in_flight"])
@pytest.mark.parametrize(
    ("value", "error"), [(math.inf, TypeError), (4e3, TypeError), (0, ValueError), (1 << 63, ValueError)]
)
def test_a_limit_that_is_no_positive_number_of_64_bits_is_refused(
    limit: str, value: float, error: type[Exception]
) -> None:
    limits: dict[str, Any] = {limit: value}
    with pytest.raises(error, match=f"{limit} is an int"):
        rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0", **limits)

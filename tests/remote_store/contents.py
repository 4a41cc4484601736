"""Tensors whose bytes carry the key and the version, so that a read can be checked exactly."""

from __future__ import annotations

import random
import zlib

import torch

MIB = 1 << 20
SIZES = {"zero": 0, "small": 100, "page": 64 << 10, "meg": MIB, "large": 20 * MIB}  # bytes; the last is in two pieces
KEYS = ("zero", "small a", "small b", "small c", "small d", "page a", "page b", "meg", "large", "any a", "any b")


def size_of(key: str, version: int) -> int:
    """Return the number of bytes of a version of a key. Each version of a key "any" has another size."""
    kind = key.split()[0]
    if kind == "any":
        (kind,) = random.Random(f"{key} {version}").choices([*SIZES], weights=[4, 8, 6, 4, 1])
    return SIZES[kind]


def content_of(key: str, version: int) -> torch.Tensor:
    """Return the tensor of a version of a key. Each 8 bytes depend only on the version and their offset."""
    size = size_of(key, version)
    if size == 0:
        return torch.empty(0, version, dtype=torch.uint8)
    words = torch.arange(-(-size // 8)) * 0x9E37_79B9 + zlib.crc32(key.encode()) * version
    words[0] = version
    return words.view(torch.uint8)[:size].clone()


def version_of(key: str, content: torch.Tensor) -> int:
    """Return the version of a tensor. Raise AssertionError unless all bytes are of this version."""
    version = content.shape[1] if content.dim() == 2 else int(content[:8].clone().view(torch.int64))
    assert torch.equal(content, content_of(key, version)), f"what is under {key!r} was never written there"
    return version

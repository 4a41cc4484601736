"""Checks of the arguments of a store's methods, for classes that have the methods of ``Store``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudafuture._arguments import expect_device, expect_int, expect_mapping, expect_str, expect_tensor, listed

__all__ = [
    "device_to_read_into",
    "encoded_key",
    "expect_one_for_each",
    "expect_readable",
    "expect_tensors",
    "expect_writable",
    "expected_digests",
    "listed_keys",
    "tensors_to_fill",
]


def expected_digests(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, int] | None) -> list[int | None]:
    """Return the expected digest of each tensor, from the arguments of ``Store.writev``.

    Raises:
        ValueError: a digest has none of the keys, or is not an unsigned integer of 64 bits.

    >>> expected_digests({"weight": torch.ones(3), "bias": torch.zeros(3)}, {"bias": 7})
    [None, 7]
    """
    digests = {} if digests is None else digests
    expect_mapping("digests", digests, "{key: digest}")
    for key, digest in digests.items():
        if not isinstance(digest, int) or not 0 <= digest < 1 << 64:
            raise ValueError(f"key {key!r}: a digest is a number of 64 bits, not {digest!r}")
    if unknown := digests.keys() - tensors.keys():
        raise ValueError(f"digests of keys that are not written: {', '.join(sorted(map(repr, unknown)))}")
    return [digests.get(key) for key in tensors]


def expect_one_for_each(tensor: torch.Tensor | None, dtype: torch.dtype, keys: int, what: str) -> None:
    """Raise ValueError unless a tensor is one-dimensional, contiguous and on the host, with an element for each key.

    >>> expect_one_for_each(torch.zeros(3, dtype=torch.bool), torch.bool, 2, "written")
    Traceback (most recent call last):
    ValueError: written: pass a tensor of torch.bool on the host with one dimension, and an element for each key
    """
    if tensor is None:
        return
    expect_tensor(what, tensor)
    is_list = tensor.dim() == 1 and tensor.numel() == keys and tensor.is_cpu and tensor.is_contiguous()
    if tensor.dtype != dtype or not is_list:
        raise ValueError(
            f"{what}: pass a tensor of {dtype} on the host with one dimension, and an element for each key"
        )


def expect_writable(tensors: Mapping[str, Any], priority: Any) -> None:
    """Raise TypeError unless the keys are strings, their values are tensors, and the priority is an int.

    >>> expect_writable({"weight": [1.0]}, priority=0)
    Traceback (most recent call last):
    TypeError: tensor: expected a torch.Tensor, not [1.0]: convert it with torch.as_tensor()
    """
    for key, tensor in tensors.items():
        expect_str("key", key)
        expect_tensor("tensor" if len(tensors) == 1 else f"the tensor of key {key!r}", tensor)
    expect_int("priority", priority)


def expect_readable(keys: Sequence[Any], outs: Sequence[Any] | None, priority: Any) -> None:
    """Raise TypeError unless the keys are strings, `outs` are tensors, and the priority is an int.

    >>> expect_readable(["weight"], ["cpu"], priority=0)
    Traceback (most recent call last):
    TypeError: out is a torch.Tensor, not 'cpu': pass a device by name, device='cpu'
    """
    for key in keys:
        expect_str("key", key)
    for key, out in zip(keys, outs or (), strict=False):
        if isinstance(out, (str, torch.device)):
            raise TypeError(f"out is a torch.Tensor, not {out!r}: pass a device by name, device={str(out)!r}")
        expect_tensor("out" if len(keys) == 1 else f"the tensor to fill from key {key!r}", out)
    expect_int("priority", priority)


def expect_tensors(tensors: Any) -> None:
    """Raise TypeError unless the argument of a ``writev`` is a mapping.

    >>> expect_tensors(["weight"])
    Traceback (most recent call last):
    TypeError: tensors is a mapping, {key: tensor}, not ['weight']
    """
    expect_mapping("tensors", tensors, "{key: tensor}")


def listed_keys(keys: Any) -> list[Any]:
    """Return the keys of a call as a list.

    Raises:
        TypeError: they are not an iterable, or a single key.

    >>> listed_keys(key for key in ("weight", "bias"))
    ['weight', 'bias']
    """
    return listed("keys", keys, "keys")


def encoded_key(key: str) -> bytes:
    """Return a key as UTF-8.

    Raises:
        ValueError: UTF-8 cannot encode it; the message names the key.

    >>> encoded_key("weight")
    b'weight'
    """
    try:
        return key.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the key {key!r} is not UTF-8: {e}") from None


def device_to_read_into(out: object, device: torch.device | str | int) -> torch.device:
    """Return the device of new tensors.

    Raises:
        ValueError: tensors to fill were passed, too; or the device is not usable.
        TypeError: it is not a device.

    >>> device_to_read_into(None, "cpu")
    device(type='cpu')
    """
    if out is not None:
        raise ValueError("pass either out or device, not both: out already has a device")
    return expect_device("device", device)


def tensors_to_fill(outs: Any, keys: int) -> list[Any]:
    """Return the tensors of a ``readv`` as a list.

    Raises:
        TypeError: they are not a list of tensors.
        ValueError: their number differs from that of the keys.

    >>> tensors_to_fill([torch.empty(3)], keys=2)
    Traceback (most recent call last):
    ValueError: 2 keys, and 1 tensors to fill: pass one for each key
    """
    into = listed("outs", outs, "tensors")
    if len(into) != keys:
        raise ValueError(f"{keys} keys, and {len(into)} tensors to fill: pass one for each key")
    return into

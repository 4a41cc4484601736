"""Checks of arguments. Their errors name the argument, the value and the remedy.

A call that is too short for checks makes them only when the native module has raised TypeError.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = [
    "expect_bool",
    "expect_callable",
    "expect_device",
    "expect_dtype",
    "expect_int",
    "expect_mapping",
    "expect_number",
    "expect_str",
    "expect_tensor",
    "expect_timeout",
    "explain_call",
    "listed",
    "parse_device",
    "shown",
]

_usable: set[torch.device] = set()


def shown(value: object) -> str:
    """Return a value in at most 100 characters."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def expect_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a number as an int.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an int, not {shown(value)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name}={number} is {'negative' if least == 0 > number else f'not {bounds}'}")
    return number


def expect_number(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a number, or a tensor of one."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is a number, not {shown(value)}")


def expect_bool(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {shown(value)}")


def expect_timeout(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless a value is None or a number of seconds of at least 0."""
    text = f"{name} is None (no limit) or a number of seconds"
    if value is not None and (isinstance(value, (str, bytes)) or not hasattr(value, "__float__")):
        raise TypeError(f"{text}, not {shown(value)}")
    if value is not None and not value >= 0:
        raise ValueError(f"{text} of at least 0, not {shown(value)}")


def expect_callable(name: str, value: Any, call: str) -> None:
    """Raise TypeError unless a value can be called as `call` shows, such as ``loss(output, target)``."""
    if not callable(value):
        raise TypeError(f"{name} is a callable, which is called as {call}, not {shown(value)}")
    if inspect.iscoroutinefunction(value):
        raise TypeError(
            f"{name}={shown(value)}: {call} would only make a coroutine, which nothing runs; pass a function"
        )
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        raise TypeError(f"{name}={value.__name__} is a class: pass an object of it, such as {value.__name__}()")


def expect_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a tensor."""
    if not isinstance(value, torch.Tensor):
        is_data = isinstance(value, (list, tuple, int, float)) or hasattr(value, "__array__")
        remedy = ": convert it with torch.as_tensor()" if is_data else ""
        raise TypeError(f"{name}: expected a torch.Tensor, not {shown(value)}{remedy}")


def expect_str(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{'a key' if name == 'key' else name} is a str, not {shown(value)}")


def expect_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} is a torch.dtype such as torch.float32, not {shown(value)}")


def expect_mapping(name: str, value: Any, content: str) -> None:
    """Raise TypeError unless a value is a mapping; `content` describes the right one, such as ``{key: tensor}``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a mapping, {content}, not {shown(value)}")


def listed(name: str, values: Any, content: str) -> list[Any]:
    """Return an iterable as a list; `content` describes its elements, such as "keys".

    Raises:
        TypeError: it is not an iterable, or a single str or tensor, whose iteration gives characters or rows.
    """
    if type(values) is list or type(values) is tuple:
        return list(values)
    if isinstance(values, (str, bytes, torch.Tensor)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is a list of {content}, not {shown(values)}: for a single one pass a list of one")
    return list(values)


def parse_device(name: str, value: Any) -> torch.device:
    """Return the device that a value names; this process may not have it.

    Raises:
        TypeError, ValueError: the value is not a device.
    """
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as e:
        if "accelerator" in str(e):  # of an int, where torch has no accelerator
            raise ValueError(f"{name}={value!r} is not usable in this process; use 'cpu'. {e}") from e
        kind = ValueError if isinstance(value, (str, int)) else TypeError
        raise kind(f"{name} is a torch.device, a str such as 'cuda:0' or an int, not {shown(value)}") from e


def expect_device(name: str, value: Any) -> torch.device:
    """Return a device on which tensors can be created.

    Raises:
        TypeError, ValueError: the value is not a device, or this process cannot use the device.
    """
    device = parse_device(name, value)
    if device.type != "cpu" and device not in _usable:
        try:
            torch.empty(0, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as e:  # torch's text may be a list of all its kernels
            reason = f"torch {torch.__version__} cannot create tensors there: {str(e).splitlines()[0][:120]}"
            raise ValueError(f"{name}={value!r} is not usable in this process; use 'cpu'. {reason}") from e
        _usable.add(device)
    return device


def explain_call(
    error: TypeError, method: Callable[..., Any], given: tuple[Any, ...], names: tuple[str, ...]
) -> str | None:
    """Return a text for the error of a native method whose arguments do not fit its signature, or None.

    Args:
        given: the arguments that were given by position, the object first.
        names: of the arguments that were given by name.
    """
    name, owner = method.__name__, method.__objclass__  # type: ignore[attr-defined]
    if not str(error).startswith(f"{name}(): incompatible function arguments. The following"):
        return None  # a future may have failed with a TypeError, which its methods raise
    own = list(inspect.signature(method).parameters.values())[1:]
    positional = [p.name for p in own if p.kind is not p.KEYWORD_ONLY]
    signature = f"{name}({', '.join(map(str, own))})"
    if not given or not isinstance(given[0], owner):
        return f"{name}() is a method of a {owner.__name__}, not of {shown(given[0]) if given else 'nothing'}"
    if len(given) - 1 > len(positional):
        count = f"{len(given) - 1} argument{'s' * (len(given) > 2)}"
        return f"{name}() was given {count} without a name, but takes {len(positional)}: {signature}"
    if twice := [other for other in positional[: len(given) - 1] if other in names]:
        return f"{name}() was given {', '.join(twice)} twice: {signature}"
    if unknown := [other for other in names if other not in {p.name for p in own}]:
        return f"{name}() has no argument {', '.join(map(repr, unknown))}: {signature}"
    if missing := [p.name for p in own[len(given) - 1 :] if p.default is p.empty and p.name not in names]:
        return f"{name}() needs the argument {', '.join(map(repr, missing))}: {signature}"
    by_position = {other: type(value).__name__ for other, value in zip(positional, given[1:], strict=False)}
    if wrong := _wrong_type(str(error), by_position):
        return f"{wrong[0]} of {name}() is {wrong[1]}, not {wrong[2]}: {signature}"
    return None


def _wrong_type(error: str, by_position: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the one argument whose type is not that of the signature in nanobind's text, that type, and the given one.

    Several may seem so, since nanobind also takes what converts itself: then return None.

    Args:
        by_position: the names of the types that were given by position; those that were given by name are in the text.
    """
    declared = dict(re.findall(r"(\w+): ([\w| ]*\w)", "".join(error.splitlines()[1:2])))
    by_name = re.findall(r"(\w+): [\w.]*?(\w+)(?![\w.])", error.partition("kwargs = {")[2])
    found = []
    for argument, given in (*by_position.items(), *by_name):
        types = (
            declared.get(argument, "object").replace("float", "float | int").replace("int", "int | bool").split(" | ")
        )
        if "object" not in types and given.replace("NoneType", "None") not in types:
            found.append((argument, declared[argument].replace(" | ", " or "), given))
    return found[0] if len(found) == 1 else None

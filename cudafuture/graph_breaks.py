"""Graph breaks of torch.compile: Dynamo ends a graph before a call of a marked function, which runs as Python.

All public functions and classes are marked. Dynamo reads the marks when it traces a call or enters a frame. They cost
nothing where Dynamo is not in use, and nothing imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch._C._dynamo import eval_frame

__all__ = ["break_graphs"]

# Neither the frame nor the frames of the calls in it are compiled.
_AS_PYTHON = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def break_graphs(*entries: object) -> None:
    """Mark functions, and the methods and properties of classes, as ``torch.compiler.disable`` does without a wrapper.

    Args:
        entries: functions and classes. The methods that a class inherits from its own package are marked too. Other
            entries, exceptions and tuples stay as they are.

    >>> def log(tensor):
    ...     print("sum", tensor.sum().item())
    >>> break_graphs(log)
    >>> @torch.compile(backend="eager")
    ... def double(tensor):
    ...     log(tensor)
    ...     return tensor * 2
    >>> double(torch.ones(2))
    sum 2.0
    tensor([2., 2.])
    """
    for entry in entries:
        if isinstance(entry, FunctionType):
            _mark(f"{entry.__module__}.{entry.__qualname__}", entry)
        elif isinstance(entry, type) and not issubclass(entry, (BaseException, tuple)):
            for name, function in _methods(entry):
                _mark(f"{entry.__module__}.{entry.__qualname__}.{name}", function)


def _methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    for base in cls.__mro__:
        if _package(base) == _package(cls):
            for name, attribute in vars(base).items():
                for function in (attribute, *(getattr(attribute, part, None) for part in ("__func__", "fget", "fset"))):
                    if isinstance(function, FunctionType) and _package(function) == _package(cls):
                        yield name, function


def _package(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]


def _mark(name: str, function: Any) -> None:
    if hasattr(function, "_torchdynamo_disable_msg"):  # of a class that another one inherits from
        return
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"{name} runs as Python beside the graph"
    while hasattr(function, "__wrapped__"):  # the code of a wrapper belongs to functools or contextlib
        function = function.__wrapped__
    _skip(function.__code__)


def _skip(code: CodeType) -> None:
    eval_frame.set_code_exec_strategy(code, _AS_PYTHON)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function in this one, such as a hook that backward calls
            _skip(constant)

"""Differences between the stub of a native module and the module itself.

nanobind keeps a function's signature as text, in ``__nb_signature__``, and pybind11 in a line of its docstring; both
sides are therefore read as Python source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# Special methods that every class has, or that only the collector calls, and what copyreg leaves on a class when an
# object of it is copied or pickled: a stub does not list them.
UNSAID = {"__del__", "__dict__", "__doc__", "__module__", "__new__", "__repr__", "__slotnames__", "__weakref__"}

ABSENT = object()  # a parameter without a default
UNREADABLE = object()  # a default that is not a literal


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; ``default`` is compared where both sides can be read."""

    name: str
    kind: str
    default: Any

    def same_as(self, other: Parameter) -> bool:
        """Return whether two parameters look alike to a caller."""
        if (self.name, self.kind) != (other.name, other.kind):
            return False
        if UNREADABLE in (self.default, other.default):
            return ABSENT not in (self.default, other.default)
        return type(self.default) is type(other.default) and bool(self.default == other.default)

    def __str__(self) -> str:
        shown = {id(ABSENT): "", id(UNREADABLE): " = ..."}.get(id(self.default), f" = {self.default!r}")
        return f"{self.kind} {self.name}{shown}"


@dataclass(frozen=True)
class Function:
    """A function, method or static method; ``parameters`` is None where the module does not tell."""

    what: str
    parameters: list[Parameter] | None
    returns: str


@dataclass
class Scope:
    """The names in a module or in a class: functions by their overloads, and a word for everything else."""

    functions: dict[str, list[Function]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    classes: dict[str, Scope] = field(default_factory=dict)


def differences(stub: str, module: ModuleType) -> list[str]:
    """Return one sentence for each thing in which a stub and its module differ, private names aside."""
    return sorted(_compare(_stub_scope(ast.parse(stub).body), _module_scope(module), ""))


def _compare(stub: Scope, real: Scope, where: str) -> Iterator[str]:
    said, found = ({**s.functions, **s.others, **s.classes} for s in (stub, real))
    for name in said.keys() - found.keys():
        yield f"{where}{name} is in the stub but not in the module"
    for name in found.keys() - said.keys():
        yield f"{where}{name} is in the module but not in the stub"
    for name in said.keys() & found.keys():
        if name in stub.functions and name in real.functions:
            yield from _compare_functions(stub.functions[name], real.functions[name], where + name)
        elif name in stub.classes and name in real.classes:
            yield from _compare(stub.classes[name], real.classes[name], f"{where}{name}.")
        elif stub.others.get(name) != real.others.get(name):
            kinds = [s.others.get(name) or ("function" if name in s.functions else "class") for s in (stub, real)]
            yield f"{where}{name} is a {kinds[0]} in the stub but a {kinds[1]} in the module"


def _compare_functions(stub: list[Function], real: list[Function], name: str) -> Iterator[str]:
    for said in stub:
        complaints = [list(_compare_function(said, found, name)) for found in real]
        yield from min(complaints, key=len)
    for found in real:
        if all(list(_compare_function(said, found, name)) for said in stub) and len(stub) < len(real):
            yield f"{name} has an overload in the module that the stub has not"


def _compare_function(stub: Function, real: Function, name: str) -> Iterator[str]:
    if stub.what != real.what:
        yield f"{name} is a {stub.what} in the stub but a {real.what} in the module"
        return
    if stub.parameters is not None and real.parameters is not None:
        alike = len(stub.parameters) == len(real.parameters)
        if not alike or not all(map(Parameter.same_as, stub.parameters, real.parameters)):
            texts = [", ".join(map(str, f.parameters or ())) for f in (stub, real)]
            yield f"{name} takes ({texts[0]}) in the stub but ({texts[1]}) in the module"
    if not _may_return(stub.returns, real.returns):
        yield f"{name} returns {stub.returns} in the stub but {real.returns} in the module"


def _may_return(stub: str, real: str) -> bool:
    """Return whether the stub's type is the module's or a more precise one; `object` says nothing."""
    if real in ("bool", "int", "float", "None"):
        return stub == real
    if real == "str":
        return stub == real or stub.startswith("Literal['")
    if real in ("list", "dict", "tuple"):
        return stub.startswith(real + "[")
    if real.startswith(("list[", "dict[", "tuple[")):
        return stub == real
    return True


def _stub_scope(body: list[ast.stmt]) -> Scope:
    scope = Scope()
    for node in body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
            continue  # parameters of functions have no class in the module
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            inner = _stub_scope(node.body)
            inner.others["(class)"] = "final class" if _decorators(node) & {"final"} else "derivable class"
            scope.classes[name] = inner
        elif isinstance(node, ast.FunctionDef) and (not name.startswith("_") or name.startswith("__")):
            decorators = _decorators(node)
            if "property" in decorators:
                scope.others[name] = "property"
            elif f"{name}.setter" in decorators:
                scope.others[name] = "property that can be set"
            else:
                what = "static method" if "staticmethod" in decorators else "function"
                scope.functions.setdefault(name, []).append(_function(node, what))
        elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            scope.others[ast.unparse(node.target)] = f"value of {ast.unparse(node.annotation)}"
    return scope


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    return {ast.unparse(d) for d in node.decorator_list}


def _module_scope(module: ModuleType) -> Scope:
    scope = Scope()
    for name, found in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(found, type):
            scope.classes[name] = _class_scope(found)
        elif _is_native(found):
            scope.functions[name] = _native_functions(found, "function")
        else:
            scope.others[name] = f"value of {type(found).__name__}"
    return scope


def _class_scope(cls: type) -> Scope:
    scope = Scope(others={"(class)": "final class" if _is_final(cls) else "derivable class"})
    for name, found in vars(cls).items():
        if name in UNSAID or (name.startswith("_") and not name.startswith("__")):
            continue
        if isinstance(found, property):
            scope.others[name] = "property" if found.fset is None else "property that can be set"
        elif _is_native(found):
            what = "static method" if type(found).__name__ == "nb_func" else "function"
            scope.functions[name] = _native_functions(found, what)
        elif name != "__init__":  # one that is not nanobind's refuses to construct
            scope.functions[name] = [Function("function", None, "")]
    return scope


def _is_final(cls: type) -> bool:
    try:
        type("Derived", (cls,), {})  # nanobind refuses here; the class's flags do not tell
    except TypeError:
        return True
    return False


def _is_native(found: Any) -> bool:
    return hasattr(found, "__nb_signature__") or bool(_lines_of_pybind(found))


def _lines_of_pybind(function: Any) -> list[str]:
    """Return the lines of a docstring in which pybind11 or nanobind shows the signatures of a native function."""
    if type(function).__name__ not in ("builtin_function_or_method", "instancemethod", "method_descriptor"):
        return []
    return re.findall(rf"^(?:\d+\. )?({function.__name__}\(.*\) -> .*)$", function.__doc__ or "", re.MULTILINE)


def _native_functions(function: Any, what: str) -> list[Function]:
    found = []
    texts = getattr(function, "__nb_signature__", None) or [
        (f"def {line}", "", ()) for line in _lines_of_pybind(function)
    ]
    for text, _, defaults in texts:
        source = re.sub(r"\\(\d+)", r"__default_\1", text)
        (node,) = ast.parse(source + ": ...").body
        assert isinstance(node, ast.FunctionDef)
        found.append(_function(node, what, list(defaults or ())))
    return found


def _function(node: ast.FunctionDef, what: str, defaults: list[Any] | None = None) -> Function:
    def value(default: ast.expr | None) -> Any:
        if default is None:
            return ABSENT
        if isinstance(default, ast.Name) and defaults is not None:
            return defaults[int(default.id.removeprefix("__default_"))]
        literal = isinstance(default, ast.Constant) and default.value is not ...
        return default.value if literal else UNREADABLE  # type: ignore[attr-defined]

    a = node.args
    by_place = [*((p, "positional") for p in a.posonlyargs), *((p, "any") for p in a.args)]
    without = len(by_place) - len(a.defaults)
    place_defaults = [None] * without + list(a.defaults)
    found = [Parameter(p.arg, kind, value(d)) for (p, kind), d in zip(by_place, place_defaults, strict=True)]
    if a.vararg is not None:
        found.append(Parameter("*" + a.vararg.arg, "rest", ABSENT))
    found += [Parameter(p.arg, "keyword", value(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg is not None:
        found.append(Parameter("**" + a.kwarg.arg, "rest", ABSENT))
    if found and found[0].name in ("self", "cls"):
        del found[0]
    return Function(what, found, ast.unparse(node.returns) if node.returns is not None else "")

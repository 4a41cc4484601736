"""Factories of tensors in the packages name a device and a dtype, so that torch's defaults do not matter."""

from __future__ import annotations

import ast

from layout.tree import ROOT, python_files

# The functions of torch that use the default device, and those of them that use the default dtype.
WITH_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
WITH_DEVICE = WITH_DTYPE | {"Generator", "arange", "as_tensor", "asarray", "randint", "randperm", "scalar_tensor"}


def missing(call: ast.Call) -> set[str]:
    """Return the arguments that a call of a factory must have and does not have."""
    match call.func:
        case ast.Attribute(ast.Name("torch"), name) if name in WITH_DEVICE:
            needed = {"device", "dtype"} if name in WITH_DTYPE else {"device"}
            return needed - {keyword.arg for keyword in call.keywords}
    return set()


def test_factories_name_their_device_and_dtype() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} has no {' and no '.join(sorted(missing(node)))}"
        for file in python_files("cudafuture", "rpc_ext")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and missing(node)
    ]
    assert found == []

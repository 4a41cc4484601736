"""Factories of tensors in the packages name a device and a dtype, so that torch's defaults do not matter."""

from __future__ import annotations

import ast

import pytest
import torch
from torch.utils._device import _device_constructors

from layout.tree import PACKAGE, ROOT, python_files

_MODULES = (torch, torch.fft, torch.nested)
# torch's list of the functions that use the default device, and those that are missing in it.
WITH_DEVICE = {
    f"{module.__name__}.{name}"
    for module in _MODULES
    for name, function in vars(module).items()
    if any(function is constructor for constructor in _device_constructors())
} | {"torch.Generator", "torch.normal", *(f"torch.signal.windows.{name}" for name in torch.signal.windows.__all__)}
# The dtype of these is fixed, required or that of the data.
WITHOUT_DTYPE = {
    f"torch.{name}"
    for name in (
        *("Generator", "arange", "as_tensor", "asarray", "empty_quantized", "randint", "randperm"),
        *("tril_indices", "triu_indices"),
    )
}
BENCHMARKS = {"bench", "_bench"}  # programs, whose process has torch's own defaults
LEGACY = {f"torch.{name}" for name in ("Tensor", "FloatTensor", "DoubleTensor", "LongTensor", "ByteTensor")}


def missing(call: ast.Call) -> set[str]:
    """Return the arguments that a call of a factory must have and does not have."""
    name = ast.unparse(call.func)
    if name in LEGACY:
        return {"device", "dtype"}
    if name not in WITH_DEVICE:
        return set()
    needed = {"device"} if name in WITHOUT_DTYPE else {"device", "dtype"}
    return needed - {keyword.arg for keyword in call.keywords}


BOTH = {"device", "dtype"}
LINES = {
    "torch.zeros(3)": BOTH,
    "torch.empty(3, dtype=x.dtype)": {"device"},
    "torch.ones(3, device='cpu')": {"dtype"},
    "torch.logspace(0, 1, 3)": BOTH,
    "torch.range(0, 3)": BOTH,
    "torch.scalar_tensor(3)": BOTH,
    "torch.normal(0.0, 1.0, (3,))": BOTH,
    "torch.empty_permuted((2, 3), (1, 0))": BOTH,
    "torch.sparse_coo_tensor(size=(3,))": BOTH,
    "torch.sparse_csr_tensor(rows, columns, values, device='cpu')": {"dtype"},
    "torch.hann_window(3)": BOTH,
    "torch.signal.windows.hann(3)": BOTH,
    "torch.fft.fftfreq(3)": BOTH,
    "torch.nested.nested_tensor([])": BOTH,
    "torch.FloatTensor(3)": BOTH,
    "torch.Generator()": {"device"},
    "torch.arange(3)": {"device"},
    "torch.as_tensor(3)": {"device"},
    "torch.tril_indices(3, 3)": {"device"},
    "torch.zeros(3, dtype=torch.int64, device='cpu')": set(),
    "torch.tril_indices(3, 3, device='cpu')": set(),
    "torch.Generator(device='cpu')": set(),
    "torch.frombuffer(data, dtype=torch.uint8)": set(),  # in host memory
    "torch.zeros_like(x)": set(),
    "x.new_zeros(3)": set(),
    "np.zeros(3)": set(),
}


@pytest.mark.parametrize("line", LINES)
def test_missing_factory_arguments_are_found(line: str) -> None:
    call = ast.parse(line).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert missing(call.value) == LINES[line]


def test_factories_name_their_device_and_dtype() -> None:
    files = [f for f in python_files("cudafuture", "rpc_ext") if f.parent.name not in BENCHMARKS]
    assert PACKAGE / "data" / "_archive_index.py" in files
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} has no {' and no '.join(sorted(missing(node)))}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and missing(node)
    ]
    assert found == []

"""A run of torch's own samples of its operators, forward and backward, on the simulated device and on the CPU.

A program of its own, since the import of torch's test code changes settings of the process that imports it.
Prints, as JSON, how many operators were run and what is different for which.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cudafuture.testing import sim

# Their results were never written.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# A tensor argument that has to be on the host, whatever the device.
HOST_ARGUMENTS = {"tensor_split"}

_manual_seed = torch.manual_seed


def operators() -> list[Any]:
    """Return those that a CPU can run with float32."""
    if "expecttest" not in sys.modules:  # torch's tests need it, their samples do not
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator_")]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def first_draw(seed: int) -> int:
    """Return the seed that a simulated generator gives to the first operation after manual_seed(seed)."""
    mask = 2**64 - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def move_all(value: Any, device: str) -> Any:
    """Return the arguments on a device, with their strides and as parts of the same storage."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided:
            return leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        whole = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
        whole = whole.clone() if device == "cpu" else whole.to(device)
        part = whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        part = part.conj() if leaf.is_conj() else part
        part = part._neg_view() if leaf.is_neg() else part
        return part.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, value)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def run(op: Any, sample: Any, device: str) -> Any:
    """Return the result and the gradients."""
    kwargs = {key: torch.device(device) if key == "device" else value for key, value in sample.kwargs.items()}
    if op.name in HOST_ARGUMENTS:
        x, args, kwargs = move_all(sample.input, device), sample.args, kwargs
    else:
        x, args, kwargs = move_all((sample.input, sample.args, kwargs), device)
    # Samples seed themselves. The CPU gets the seed that the device will draw.
    torch.manual_seed = _manual_seed if device == "sim" else (lambda seed: _manual_seed(first_draw(seed)))
    try:
        torch.manual_seed(0)
        out = op(x, *args, **kwargs)
    finally:
        torch.manual_seed = _manual_seed
    if not op.supports_autograd:
        return out, None
    results = [t for t in tensors(sample.output_process_fn_grad(out)) if t.requires_grad]
    inputs = [t for t in tensors((x, args, kwargs)) if t.requires_grad]
    if not results or not inputs:
        return out, None
    return out, torch.autograd.grad(results, inputs, [torch.ones_like(t) for t in results], allow_unused=True)


def compare(op: Any, got: Any, expected: Any) -> None:
    got, expected = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        is_tensor = isinstance(theirs, torch.Tensor)
        if op.name not in UNWRITTEN:
            ours = ours.detach().cpu() if is_tensor else ours
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5, equal_nan=True)
        elif is_tensor:
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def difference(op: Any, samples: int | None) -> str | None:
    """Return what is different, or None."""
    _manual_seed(1)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for number, sample in enumerate(itertools.islice(made, samples)):
        expected = run(op, sample, "cpu")
        try:
            compare(op, run(op, sample, "sim"), expected)
            sim.synchronize()
        except Exception as error:  # any error here is a difference from the CPU
            sim.clear_error()
            return f"sample {number}: {type(error).__name__}: {error}"
        if found := sim.races():
            return f"sample {number}: {found[0]}"
    return None


def sweep(ops: list[Any], samples: int | None, progress: Callable[[str], object]) -> dict[str, str]:
    different = {}
    for op in ops:
        progress(name_of(op))
        if (what := difference(op, samples)) is not None:
            different[name_of(op)] = what
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--samples", type=int, help="of each operator; default: all")
    parser.add_argument("--schedule", default="lazy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the name of one operator")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sim.enable(schedule=options.schedule, seed=options.seed)
    ops = operators()[options.shard :: options.shards]
    if options.only is not None:
        ops = [op for op in ops if name_of(op) == options.only]
    different = sweep(ops, options.samples, lambda name: print(name, file=sys.stderr, flush=True))
    print(json.dumps({"names": [name_of(op) for op in ops], "different": different}))


if __name__ == "__main__":
    main()

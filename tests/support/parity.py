"""Marks that name PyTorch's own tests which a test of ours answers, read back without running anything."""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coming-from-torch.md"

# test/test_futures.py of PyTorch, which its wheel does not contain.
TEST_FUTURES = """
    test_set_exception test_set_exception_multithreading test_done test_done_exception test_wait test_wait_multi_thread
    test_mark_future_twice test_pickle_future test_then test_chained_then test_then_wrong_arg test_then_no_arg
    test_then_raise test_add_done_callback_simple test_add_done_callback_maintains_callback_order
    test_add_done_callback_error_is_ignored test_add_done_callback_no_arg_error_is_ignored
    test_interleaving_then_and_add_done_callback_maintains_callback_order
    test_interleaving_then_and_add_done_callback_propagates_error test_collect_all test_wait_all test_wait_none
"""

RPC_TESTS = "testing/_internal/distributed/rpc/rpc_test.py"  # inside the wheel
ABOUT_FUTURES = re.compile(r"    def (test_\w*(?:future|callback|wait_all|collect_all)\w*)")
NOT_ABOUT_FUTURES = re.compile(r"wait_all_workers")  # a barrier at the end of a job

# Newer versions of Python put the module in front of the name of the type.
CANNOT_PICKLE = r"cannot pickle '(cudafuture\._C\.)?CUDAFuture'"

F = TypeVar("F", bound=Callable[..., Any])


def answers(*torch_tests: str) -> Callable[[F], F]:
    """Name the tests of PyTorch whose behaviour the decorated test checks."""
    assert torch_tests
    return lambda test: test


def torch_tests() -> set[str]:
    """Return the names of PyTorch's tests of futures: those of test_futures.py, and those found in its RPC suite."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    suite = Path(spec.origin).with_name(RPC_TESTS.split("/")[0]).parent / RPC_TESTS
    names = set(ABOUT_FUTURES.findall(suite.read_text(encoding="utf-8")))
    return {n for n in names if not NOT_ABOUT_FUTURES.search(n)} | set(TEST_FUTURES.split())


def find_answered() -> set[str]:
    """Return the names that a test of ours answers."""
    names: set[str] = set()
    # A failed future that the collector drops is logged with its source lines, and so parsed: CPython 3.11 cannot parse
    # while it parses.
    gc.collect()
    for file in (ROOT / "tests").rglob("test_torch*parity.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "answers":
                names.update(ast.literal_eval(name) for name in node.args)
    return names


def find_explained() -> set[str]:
    """Return the names that the page for those who come from torch speaks of."""
    return set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))

"""Each of PyTorch's own tests of RPC is answered by a test of ours, or there is a reason why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.parity import ROOT, RPC_TESTS

# Patterns of names, and why no test of ours answers them.
REASONS = {
    r"test_profiler_\w+|test_rpc_profiling_\w+|test_build_rpc_profiling_key|test_server_process_global_profiler": (
        "of torch's profiler"
    ),
    r"test_async_record_function_\w+|test_disable_gil_profiling": "of torch's profiler, too",
    r"test_device_map\w*|test_devices_option\w*|test_cuda_future\w*|test_custom_stream\w*|test_device_mismatch": (
        "of devices: test_device_calls.py and test_simulated_devices.py, and tests/cuda"
    ),
    r"test_(owner_)?rref_\w*synchronization\w*|test_rref_with_unpickleable_attributes|\w+_with_cuda_future": (
        "of devices, too"
    ),
    r"test_dynamic_\w+": "workers do not come and go while others stay",
    r"test_rpc_barrier\w*|test_all_gather\w*|test_wait_all_workers\w*": "of private functions of torch",
    r"test_(re)?init\w*|test_shutdown_\w+|test_local_shutdown\w*|test_graceful_shutdown\w*|test_deadlock": (
        "of the beginning and the end: test_lifecycle.py and test_survival.py"
    ),
    r"test_duplicate_name\w*|test_invalid_names|test_pg_init_no_rpc_init|test_get_worker_infos|test_worker_info_\w+": (
        "of the beginning, too"
    ),
    r"test_set_and_get_\w+|test_tensorpipe_\w+|test_default_timeout_used|test_handle_send_\w+|test_wrong_types": (
        "of options that are given once, at the beginning"
    ),
    r"test_register_rpc_backend\w*|test_(cannot_)?infer_backend\w*|test_mismatched_type\w*|test_use_rpc_pickler": (
        "of torch's backends and picklers, which rpc_ext does not offer"
    ),
    r"test_dist_init_decorator|test_debug_info|test_rref_context_debug_info": "of torch's own insides",
    r"test_rref_type\w*|test_rref_get_type\w*": "RRef has no _get_type()",
    r"test_(ignore_)?rref_leak": "references that are left do not keep a session from ending",
    r"test_wait_all_raise_in\w*": "there is no context that collects futures",
    r"test_(stress|nested|py|my)_\w+_sparse": "the same as with dense tensors, which sparse ones are sent as",
}


def torch_tests() -> set[str]:
    import torch

    suite = Path(torch.__file__).parent / RPC_TESTS
    return set(re.findall(r"    def (test_\w+)", suite.read_text(encoding="utf-8"))) - {"test_func"}


def find_answered() -> set[str]:
    names: set[str] = set()
    for pattern in ("rpc/test_*.py", "*/test_torch*parity.py"):
        for file in (ROOT / "tests").glob(pattern):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "answers":
                    names.update(ast.literal_eval(name) for name in node.args)
    return names


def find_explained(names: set[str]) -> set[str]:
    return {name for name in names if any(re.fullmatch(pattern, name) for pattern in REASONS)}


def test_every_torch_test_has_answer_or_reason() -> None:
    names = torch_tests()
    assert len(names) > 200
    assert sorted(names - find_answered() - find_explained(names)) == []


def test_every_reason_is_of_some_test() -> None:
    names = torch_tests()
    assert [pattern for pattern in REASONS if not any(re.fullmatch(pattern, name) for name in names)] == []

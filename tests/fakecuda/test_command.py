"""The command that starts a program on fake devices, and the environment that it makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cudafuture.testing import fakecuda

pytestmark = pytest.mark.cuda

COMMAND = [sys.executable, "-m", "cudafuture.testing.fakecuda"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    command = [*COMMAND, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def output(program: str, *options: str) -> str:
    """Return what a program of Python prints on fake devices."""
    done = run(*options, "--", sys.executable, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_options_reach_devices() -> None:
    program = """
        import torch
        print(torch.cuda.device_count(), torch.cuda.mem_get_info(0)[1] >> 20)
    """
    assert output(program, "--devices", "5", "--memory", "64") == "5 64"


def test_child_processes_use_fake_devices() -> None:
    program = """
        import subprocess, sys
        print(subprocess.check_output([sys.executable, "-c", '''
        import torch
        print((torch.ones(3, device="cuda:1") * 2).sum().item())
        '''.replace("        ", "")], text=True).strip())
    """
    assert output(program) == "6.0"


def test_untaken_races_are_logged_at_exit() -> None:
    program = """
        import torch
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(4, device="cuda")
        x.sum()
    """
    done = run("--races", "--", sys.executable, "-c", textwrap.dedent(program))
    assert done.returncode == 0
    assert "the program took none of 1 reports of the race detector; the first: race: aten::sum on" in done.stderr
    assert done.stderr.count("<string>:") == 2, "both places are shown"


def test_forked_child_logs_no_races_of_parent() -> None:
    program = """
        import os, sys, torch
        from cudafuture.testing import fakecuda
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(4, device="cuda")
        x.sum()
        child = os.fork()
        if child == 0:
            sys.exit()
        os.waitpid(child, 0)
        fakecuda.races()
    """
    done = run("--races", "--", sys.executable, "-c", textwrap.dedent(program))
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_creates_no_devices() -> None:
    program = """
        import atexit, os
        def use_in_child():
            child = os.fork()  # whose CUDA calls fail if the parent has used its devices
            if child == 0:
                try:
                    torch.ones(1, device="cuda")
                    os._exit(0)
                finally:
                    os._exit(1)
            print(os.waitpid(child, 0)[1])
        atexit.register(use_in_child)  # the last handler to run
        import torch
    """
    assert output(program, "--races") == "0"


def test_exit_status_is_that_of_command() -> None:
    assert run("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_missing_command_is_named() -> None:
    done = run("--", "no-such-command-here")
    assert done.returncode == 1
    assert "no-such-command-here cannot be run" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "65"], "0 to 64 fake devices, not 65"),
        (["--seed", "-1"], f"a seed is 0 to {10**15}, not -1"),
        (["--seed", str(10**16)], f"a seed is 0 to {10**15}, not {10**16}"),
        (["--memory", "0"], "has 1 MiB to"),
        (["--schedule", "late"], "invalid choice: 'late'"),
    ],
)
def test_wrong_option_is_refused(options: list[str], message: str) -> None:
    done = run(*options, "--", "true")
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("FAKECUDA_SCHEDULE", "soon"), ("FAKECUDA_DEVICES", "many"), ("FAKECUDA_DELAY_MS", "-1")]
)
def test_wrong_environment_variable_ends_process(name: str, value: str) -> None:
    variables = fakecuda.environment() | {name: value}
    command = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"{name} is '{value}'; set it to" in done.stderr


def test_libraries_are_built_once() -> None:
    built = [line for line in run("--", "true").stderr.splitlines() if "building" in line]
    assert built == [], "the process that runs this test has built them"


def test_concurrent_builds_do_not_interfere(tmp_path: Path) -> None:
    fast = tmp_path / "fast-compiler"
    fast.write_text('#!/bin/sh\nexec g++ "$@" -O0 -g0\n')
    fast.chmod(0o755)
    variables = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(fast)}
    first, second = (
        subprocess.Popen([*COMMAND, "--", "true"], env=os.environ | variables, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    for process in (first, second):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    (folder,) = (tmp_path / "cudafuture" / "fakecuda").iterdir()
    assert (folder / "libcudart.so.13").exists()


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    done = run("--", "true", CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "a C++ compiler is missing; install g++" in done.stderr


def test_failing_compiler_leaves_cache_clean(tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run("--", "true", CXX=str(broken), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "failed to build the fake CUDA libraries:\nit is broken" in done.stderr
    assert list((tmp_path / "cache" / "cudafuture" / "fakecuda").iterdir()) == []


def test_torch_without_operators_refuses_first_kernel() -> None:
    done = run(
        "--", sys.executable, "-c", "import torch; torch.ones(1, device='cuda')", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert done.returncode != 0
    assert "torch has not loaded the operators of fakecuda" in done.stderr


def with_a_driver(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine that seems to have NVIDIA's driver: in a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to show a driver in /proc to a process of its own")
    script = (
        'mount -t tmpfs none /proc/driver && mkdir /proc/driver/nvidia && touch /proc/driver/nvidia/version && "$@"'
    )
    whole = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_command_refuses_real_driver() -> None:
    done = with_a_driver(*COMMAND, "--", "true")
    assert done.returncode == 1
    assert "this machine has a CUDA driver; run on the real devices instead" in done.stderr


def test_libraries_refuse_real_driver() -> None:
    libraries = fakecuda.environment()["LD_PRELOAD"]
    done = with_a_driver("sh", "-c", f"LD_PRELOAD={libraries} {shutil.which('true')}")
    assert done.returncode == 3
    assert "so this machine has a CUDA driver" in done.stderr

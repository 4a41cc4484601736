"""The marker and the fixture, in test runs of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.child import RUN_PYTEST, run_script

HEAD = """
import pytest
import torch
from cudafuture.testing import sim as sim_module

def race():
    with torch.Stream("sim"):
        x = torch.ones(4, device="sim")
    x.sum()
"""


class Run:
    """Run of pytest over a file with a head and the given tests."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "test_it.py"

    def __call__(self, tests: str, *arguments: str) -> str:
        self.file.write_text(HEAD + tests)
        options = ["-p", "cudafuture.testing.plugin", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.file.parent)
            done = run_script(RUN_PYTEST, *options, *arguments, str(self.file))
        return done.stdout + done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_only_marked_test_has_devices(run: Run) -> None:
    out = run("""
@pytest.mark.sim(devices=3, schedule="lazy", seed=7)
def test_with():
    assert torch.accelerator.device_count() == 3
    assert sim_module.settings().schedule == "lazy"
    assert sim_module.settings().seed == 7

def test_without():
    assert not sim_module.is_enabled()

def test_fixture(sim):
    assert sim is sim_module
    assert torch.ones(2, device="sim").sum().item() == 2
""")
    assert "3 passed" in out


def test_race_fails_passed_test(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_races():
    race()
""")
    assert "1 failed" in out
    assert "RaceError" in out
    assert "in race" in out


def test_report_shows_no_frames_of_the_library(run: Run) -> None:
    out = run("""
from cudafuture.testing import torchrun

@pytest.mark.sim
def test_races():
    race()

@pytest.mark.sim
def test_block():
    with sim_module.detect_races():
        race()

@pytest.mark.sim(schedule="lazy")
def test_synchronize():
    sim_module.fail("the device is on fire")
    sim_module.synchronize()

def test_script():
    torchrun("missing.py", 1)
""")
    assert "4 failed" in out
    assert out.count(">       ") == 3, "the line of the test, in each report but that of a whole test"
    assert re.findall(r"^\S*(?:plugin|contextlib|launch|_reports|_races|_accelerator)\.py:\d+", out, re.MULTILINE) == []


def test_failed_device_work_fails_passed_test(run: Run) -> None:
    out = run("""
@pytest.mark.sim(schedule="lazy")
def test_fails():
    sim_module.fail("the device is on fire")

@pytest.mark.sim
def test_next_is_well():
    assert torch.ones(2, device="sim").sum().item() == 2
""")
    assert "1 failed, 1 passed" in out
    assert "the device is on fire" in out


def test_taken_races_are_forgiven(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_races():
    with pytest.raises(sim_module.RaceError), sim_module.detect_races():
        race()
""")
    assert "1 passed" in out


def test_failing_test_shows_its_races(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_races():
    race()
    assert 1 == 2
""")
    assert "assert 1 == 2" in out
    assert "in race" in out


def test_closed_hold_does_not_hang_run(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_holds():
    global held
    held = sim_module.hold()
    torch.ones(2, device="sim").add_(1)
""")
    assert "1 passed" in out


def test_race_in_fixture_teardown_is_error(run: Run) -> None:
    out = run("""
@pytest.fixture
def late(sim):
    yield
    race()

def test_it(late):
    pass
""")
    assert "1 passed, 1 error" in out
    assert "in race" in out


def test_failed_test_with_hold_does_not_hang(run: Run) -> None:
    out = run("""
@pytest.fixture
def waits(sim):
    yield
    torch.accelerator.synchronize()

def test_it(waits):
    held = sim_module.hold()
    torch.ones(2, device="sim").add_(1)
    assert False, "as it must"
""")
    assert "1 failed in" in out
    assert "as it must" in out


def test_broken_device_is_reported_once(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_it():
    sim_module.fail("gone")
""")
    assert "1 failed in" in out


def test_stacks_begin_in_test(run: Run) -> None:
    out = run("""
@pytest.mark.sim
def test_races():
    race()
""")
    assert "_pytest/python.py" not in out[out.index("RaceError: race") :]


def test_failing_seed_is_shown_and_repeats(run: Run) -> None:
    tests = """
@pytest.mark.sim(schedule="jitter")
def test_sometimes():
    assert sim_module.settings().seed % 1000 == 999_999, f"seed {sim_module.settings().seed}"
"""
    out = run(tests)
    again = re.search(r"to reproduce: pytest (--sim-seed=(\d+) --sim-schedule=jitter)", out)
    assert again, out
    assert f"seed {again[2]}" in out
    assert f"seed {again[2]}" in run(tests, *again[1].split())


def test_options_win_over_marker(run: Run) -> None:
    out = run(
        """
@pytest.mark.sim(schedule="free", seed=1)
def test_settings():
    assert (sim_module.settings().schedule, sim_module.settings().seed) == ("lazy", 5)
""",
        "--sim-schedule=lazy",
        "--sim-seed=5",
    )
    assert "1 passed" in out


def test_everywhere_covers_unaware_tests(run: Run) -> None:
    tests = """
@pytest.fixture
def one():
    return torch.ones(4)

def test_plain(one):
    x = one
    assert x.device.type == "sim"
    assert (x + 1).tolist() == [2, 2, 2, 2]
"""
    assert "1 passed" in run(tests, "--sim-everywhere")
    assert "1 failed" in run(tests)


def test_plugin_prepares_before_first_backward(run: Run) -> None:
    out = run("""
def test_backward():
    torch.ones(1, requires_grad=True).sum().backward()

@pytest.mark.sim
def test_later():
    x = torch.ones(1, device="sim", requires_grad=True)
    x.sum().backward()
    assert x.grad.item() == 1
""")
    assert "2 passed" in out


def test_marker_takes_keywords(run: Run) -> None:
    assert "takes keywords" in run("""
@pytest.mark.sim(2)
def test_it():
    pass
""")

"""Every synchronisation edge is cut in turn, and the device suite must notice: by a report that shows both ends.

Each edge has a test of the device suite that is run once as it is, without a finding, and once with the edge cut. It is
not enough that the test fails: the simulated accelerator has to find the reason, in the lines that are to blame.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudafuture import _C
from cudafuture.testing import sim
from device.scenarios import SCENARIOS, Scenario, cut, process_group, run, shows
from support.harness import Simulated


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with process_group():
        yield


def findings(scenario: Scenario, edge: str | None) -> tuple[list[sim.Report], Exception | None]:
    """Run the test with the edge cut; return what the accelerator reported, and what the test raised."""
    sim.enable(devices=2, schedule="lazy", seed=0, strict_devices=True)
    device = Simulated()
    device.rest()
    try:
        error = run(scenario, edge, device)
        sim.finish()
        return sim.races(), error
    finally:
        device.rest()
        sim.disable()


@pytest.mark.parametrize("edge", _C.sync_edges())
def test_missing_edge_is_found(edge: str) -> None:
    assert edge in SCENARIOS, "a new edge needs a scenario that notices when it is missing"
    scenario = SCENARIOS[edge]
    assert findings(scenario, None) == ([], None)
    reports, error = findings(scenario, edge)
    if scenario.kind == "wrong_data":
        assert isinstance(error, AssertionError)
        return
    found = [report for report in reports if report.kind == scenario.kind]
    assert any(shows(report, scenario) for report in found), [error, *map(str, reports)]


def test_every_scenario_has_edge() -> None:
    assert set(SCENARIOS) == set(_C.sync_edges())


def test_absent_edge_cannot_be_cut() -> None:
    for call in (_C.cut_sync_edge, _C.has_sync_edge):
        with pytest.raises(ValueError, match="no sync edge is named 'wait'"):
            call("wait")


def test_only_tests_cut_edges() -> None:
    assert all(map(_C.has_sync_edge, _C.sync_edges()))
    with cut("wait.stream"):
        assert [edge for edge in _C.sync_edges() if not _C.has_sync_edge(edge)] == ["wait.stream"]
    assert all(map(_C.has_sync_edge, _C.sync_edges()))

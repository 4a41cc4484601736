"""Pytest plugin of tools/gpu_check.sh, which writes the result of each test at once, so that a cut loses none.

    pytest -p gpu_results --results FOLDER --phase NAME

FOLDER/results.jsonl gets a line for each test, with its traceback or the reason of its skip. FOLDER/summary.txt gets a
line for each failure, and the counts every ten seconds and at the end. Tests that need a second device are counted.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest

EVERY = 10.0  # seconds between two counts in the summary
LONGEST = 4000  # characters of a traceback that are kept, from its end
SECOND_DEVICE = re.compile(r"\bneeds? (two|[2-9]) (devices|GPUs)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("gpu_results")
    group.addoption("--results", type=Path, metavar="FOLDER", help="write results.jsonl and summary.txt there")
    group.addoption("--phase", default="tests", metavar="NAME", help="the phase that the results belong to")


def pytest_configure(config: pytest.Config) -> None:
    """Write the results in the process that collects them from all others."""
    folder = config.getoption("--results")
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(folder, config.getoption("--phase")))


class Results:
    """The two files of results, and the counts so far."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.phase = phase
        self.lines = (folder / "results.jsonl").open("a", buffering=1, encoding="utf-8")
        self.summary = (folder / "summary.txt").open("a", buffering=1, encoding="utf-8")
        self.counts: Counter[str] = Counter()
        self.started = time.monotonic()
        self.due = self.started + EVERY
        self.uncollected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test that has ended, or the error of its fixtures."""
        if report.failed:
            self.add("failed" if report.when == "call" else "error", report.nodeid, report.duration, trace(report))
        elif report.skipped:
            outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            self.add(outcome, report.nodeid, report.duration, reason(report))
        elif report.when == "call":
            self.add("passed", report.nodeid, report.duration, "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a file that cannot be collected, once, although each process collects it."""
        if report.outcome == "passed" or report.nodeid in self.uncollected:
            return
        self.uncollected.add(report.nodeid)
        if report.failed:
            self.add("error", report.nodeid, 0.0, trace(report))
        else:
            self.add("skipped", report.nodeid, 0.0, reason(report))

    def pytest_sessionfinish(self) -> None:
        """Write the final counts."""
        self.count("in all")

    def add(self, outcome: str, test: str, seconds: float, text: str) -> None:
        """Write and count a result."""
        line = {"phase": self.phase, "test": test, "outcome": outcome, "seconds": round(seconds, 3)}
        self.lines.write(json.dumps(line | ({"text": text[-LONGEST:]} if text else {})) + "\n")
        self.counts[outcome] += 1
        if outcome == "skipped" and SECOND_DEVICE.search(text):
            self.counts["second device"] += 1
        if outcome in ("failed", "error"):
            self.summary.write(f"    {outcome.upper()} {test}, {seconds:.1f} s: {cause(text)}\n")
        if time.monotonic() > self.due:
            self.due = time.monotonic() + EVERY
            self.count(f"after {time.monotonic() - self.started:.0f} s")

    def count(self, when: str) -> None:
        """Write the counts so far."""
        outcomes = ("passed", "failed", "error", "xfailed", "skipped")
        named = [f"{self.counts[outcome]} {outcome}" for outcome in outcomes if self.counts[outcome]]
        if self.counts["skipped"]:
            named.append(f"{self.counts['second device']} of them need a second device")
        self.summary.write(f"    {when}: {', '.join(named) or 'no test'}\n")


def trace(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the traceback of a failure."""
    return report.longreprtext


def cause(text: str) -> str:
    """Return the line of a traceback that names the error."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return (errors or text.strip().splitlines()[-1:] or [""])[0][:200]


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip."""
    found = report.longrepr
    return str(found[2]) if isinstance(found, tuple | list) else str(getattr(report, "wasxfail", found))

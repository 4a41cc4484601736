"""Warnings of the layout tests, which do not fail a run."""

from __future__ import annotations

import pytest

from layout.code_lines import long_files
from layout.tree import source_files


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files that may be two."""
    for line in long_files(source_files()):
        terminalreporter.write_line(f"warning: {line}", yellow=True)

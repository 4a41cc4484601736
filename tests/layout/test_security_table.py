"""The table of docs/security.md names the tests that show its rows, and every attack among the tests is in it."""

from __future__ import annotations

import re

import pytest

from layout.tree import ROOT

ATTACKS = [ROOT / "tests/rpc/test_middleman.py", ROOT / "tests/rpc/test_authentication.py"]
TESTS = [*ATTACKS, ROOT / "tests/rpc/test_secrets.py", ROOT / "tests/remote_store/test_secrets.py"]
WITHOUT_AN_ATTACK = {"test_tensors_travel_with_closed_listeners"}
UNPROVEN = {"sees the network", "has the secret"}  # nothing keeps these attackers from what the table says


def rows() -> dict[str, list[str]]:
    """Return the tests of each row, by attacker."""
    text = (ROOT / "docs/security.md").read_text()
    table = text.partition("## Threat model")[2].partition("## ")[0]
    found = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return {cells[0].strip(): re.findall(r"`(test_\w+)`", cells[-1]) for cells in found}


def names_of_tests(files: list[object]) -> set[str]:
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("attacker", rows())
def test_row_names_existing_tests(attacker: str) -> None:
    named = set(rows()[attacker])
    assert bool(named) != (attacker in UNPROVEN)
    assert named <= names_of_tests(list(TESTS))


def test_every_attack_is_in_table() -> None:
    named = {name for names in rows().values() for name in names}
    assert names_of_tests(list(ATTACKS)) - WITHOUT_AN_ATTACK <= named

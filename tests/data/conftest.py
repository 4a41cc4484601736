"""Fixtures of the tests of archives of images."""

from __future__ import annotations

import pytest

from cudafuture.data import _index_source
from data.archives import InTurn


@pytest.fixture(autouse=True)
def _nothing_is_logged_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index_source, "_logged", set())


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> InTurn:
    return InTurn(monkeypatch)

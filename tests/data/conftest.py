"""Fixtures of the tests of archives of images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cudafuture.data import _index_source
from data.archives import InTurn


@pytest.fixture(autouse=True)
def _nothing_is_logged_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index_source, "_logged", set())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute in one thread: several test processes with threads that spin slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> InTurn:
    return InTurn(monkeypatch)

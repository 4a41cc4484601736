"""What tests of every kind need."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return pytest's fixture, without what futures that earlier tests have left in cycles say when they are freed."""
    gc.collect()
    caplog.clear()
    return caplog

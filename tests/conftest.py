"""What tests of every kind need."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

from support.soak import SOAK

# The same examples in every run, so that a change is what makes a test fail; new ones each time under soak.
settings.register_profile("repeatable", derandomize=True)
if not SOAK:
    settings.load_profile("repeatable")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return pytest's fixture, without what futures that earlier tests have left in cycles say when they are freed."""
    gc.collect()
    caplog.clear()
    return caplog

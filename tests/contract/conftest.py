"""Settings of the contract."""

import pytest

from kernlib import settings


@pytest.fixture
def nothing_compiles(monkeypatch):
    """A case that would compile raises NotCachedError at once."""
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()

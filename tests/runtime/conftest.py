"""Fixtures of the tests of the runtime."""

import pytest

from tests.support import fakes


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that exist only by name, which no test before has used."""
    fakes.forget()
    yield fakes.install(monkeypatch)
    fakes.forget()

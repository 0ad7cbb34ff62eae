"""Fixtures of the tests of the service, which name this file in ``pytest_plugins``."""

import pytest

from kernlib import events, settings
from kernlib.jit import compiler, service
from tests.jit.process_cases import Lab
from tests.jit.service_cases import Compiler


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own."""
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(tmp_path / "cache"))
    settings.reset()
    service.forget()
    yield tmp_path / "cache"
    service.forget()
    monkeypatch.undo()
    settings.reset()


@pytest.fixture
def fake(cache, monkeypatch):
    compile_spec = Compiler()
    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    return compile_spec


@pytest.fixture
def seen():
    found = []
    stop = events.subscribe(found.append)
    yield found
    stop()


@pytest.fixture
def lab(tmp_path):
    """Processes of this test's own, which share a cache and count their compiles."""
    with Lab(tmp_path) as found:
        yield found

"""Fixtures of the tests of the service, which name this file in ``pytest_plugins``."""

import faulthandler
import signal
import threading

import pytest

from kernlib import events, settings
from kernlib.jit import compiler, service
from tests.jit.process_cases import Lab
from tests.jit.service_cases import Compiler
from tests.support.limits import LIMIT_S

TEST_LIMIT_S = 3 * LIMIT_S


@pytest.fixture(autouse=True)
def no_wait_without_end():
    """A test that waits for what never comes fails, and says where each thread was. It does so
    again where leaving a block waits too."""

    def fail(*_):
        faulthandler.dump_traceback(2)
        raise AssertionError(f"it has not ended in {TEST_LIMIT_S} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT_S, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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

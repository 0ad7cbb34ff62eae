"""A process that forks while other threads import what their first calls need."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from kernlib import forks
from tests.support.paths import ROOT


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """Modules ``kernlib_slow`` and ``other_slow``, whose imports take until a test lets them."""
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(forks, "_test", (begun, go), raising=False)
    text = "from kernlib import forks\nforks._test[0].set()\nassert forks._test[1].wait(20)\n"
    (tmp_path / "kernlib_slow").mkdir()
    for name in ("kernlib_slow/__init__", "other_slow"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "PACKAGES", ("kernlib_slow",))
    yield begun, go
    go.set()
    for name in ("kernlib_slow", "other_slow"):
        sys.modules.pop(name, None)


def importing(name, begun):
    thread = threading.Thread(target=__import__, args=(name,), daemon=True)
    thread.start()
    assert begun.wait(20)
    return thread


def child_ends(work):
    """Exit status of a forked child that does ``work``; a hang is a failure."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_for_an_import_of_another_thread(slow_module):
    begun, go = slow_module
    thread = importing("kernlib_slow", begun)
    assert forks.imports_of_others() == ["kernlib_slow"]
    threading.Timer(0.2, go.set).start()
    assert child_ends(lambda: __import__("kernlib_slow")) == 0
    assert go.is_set()
    thread.join(20)
    assert forks.imports_of_others() == []


def test_a_fork_waits_neither_for_other_packages_nor_for_ever(slow_module, monkeypatch):
    begun, go = slow_module
    thread = importing("other_slow", begun)
    assert forks.imports_of_others() == []
    assert child_ends(lambda: None) == 0 and not go.is_set()
    go.set()
    thread.join(20)
    begun.clear(), go.clear()
    monkeypatch.setattr(forks, "WAIT_S", 0.1)
    thread = importing("kernlib_slow", begun)
    assert child_ends(lambda: None) == 0 and not go.is_set()
    go.set()
    thread.join(20)


def test_a_thread_may_fork_in_the_middle_of_its_own_import(tmp_path, monkeypatch):
    text = "import os\nfrom kernlib import forks\nassert forks.imports_of_others() == []\n"
    text += "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\n"
    (tmp_path / "kernlib_forking.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "PACKAGES", ("kernlib_forking",))
    monkeypatch.setattr(forks, "WAIT_S", 600.0)
    __import__("kernlib_forking")
    del sys.modules["kernlib_forking"]


FIRST_CALLS = """
import os, signal, sys, threading, time
import torch
import kernlib as kl

x = torch.ones(3, 2)  # torch's own first call holds locks of the C library, which a child inherits

def call():
    return kl.run_kernel(kl.gaussian(), x, x, bandwidth=1.0)

thread = threading.Thread(target=call, daemon=True)
thread.start()
time.sleep(int(sys.argv[1]) / 1000)
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    kl.gaussian(), kl.linalg, kl.nn, kl.compile
    import kernlib.families.pairwise.operation, kernlib.jit.service
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child hung"
thread.join(60)
assert not thread.is_alive()
"""


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [0, 2, 5, 10, 20, 40, 80, 160])
def test_a_child_forked_at_any_time_of_a_first_call_can_import(milliseconds):
    command = [sys.executable, "-c", FIRST_CALLS, str(milliseconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr

"""A process that forks while other threads import what their first calls need."""

import os
import subprocess
import sys
import threading

import pytest

from kernlib import forks
from tests.jit.process_cases import forked, succeeds
from tests.support.limits import LIMIT_S
from tests.support.paths import ROOT


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """Modules ``kernlib_slow``, ``kernlib_quick.slow`` and ``other_slow``, whose imports take until
    a test lets them."""
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(forks, "_test", (begun, go), raising=False)
    text = "from kernlib import forks\nforks._test[0].set()\n"
    text += f"assert forks._test[1].wait({LIMIT_S})\n"
    slow = ("kernlib_slow/__init__", "kernlib_quick/slow", "other_slow")
    for name, content in {"kernlib_quick/__init__": "", **dict.fromkeys(slow, text)}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "PACKAGES", ("kernlib_slow", "kernlib_quick"))
    yield begun, go
    go.set()
    for name in ("kernlib_slow", "kernlib_quick", "kernlib_quick.slow", "other_slow"):
        sys.modules.pop(name, None)


def importing(name, begun):
    thread = threading.Thread(target=__import__, args=(name,), daemon=True)
    thread.start()
    assert begun.wait(LIMIT_S)
    return thread


@pytest.mark.parametrize("name", ["kernlib_slow", "kernlib_quick.slow"])
def test_a_fork_waits_for_an_import_of_another_thread(name, slow_module):
    begun, go = slow_module
    thread = importing(name, begun)
    assert forks.imports_of_others() == [name]
    threading.Timer(0.2, go.set).start()
    succeeds(forked(lambda: __import__(name)))
    assert go.is_set()
    thread.join(LIMIT_S)
    assert forks.imports_of_others() == []


def test_a_fork_waits_neither_for_other_packages_nor_for_ever(slow_module, monkeypatch):
    begun, go = slow_module
    thread = importing("other_slow", begun)
    assert forks.imports_of_others() == []
    succeeds(forked(lambda: None))
    assert not go.is_set()
    go.set()
    thread.join(LIMIT_S)
    begun.clear(), go.clear()
    monkeypatch.setattr(forks, "WAIT_S", 0.1)
    thread = importing("kernlib_slow", begun)
    succeeds(forked(lambda: None))
    assert not go.is_set()
    go.set()
    thread.join(LIMIT_S)


def test_a_thread_may_fork_in_the_middle_of_its_own_import(tmp_path, monkeypatch):
    text = "import os\nfrom kernlib import forks\nassert forks.imports_of_others() == []\n"
    text += "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\n"
    (tmp_path / "kernlib_forking.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "PACKAGES", ("kernlib_forking",))
    monkeypatch.setattr(forks, "WAIT_S", 600.0)
    __import__("kernlib_forking")
    del sys.modules["kernlib_forking"]


IMPORTS = """
import builtins
from kernlib import forks
real, imported, inside = builtins.__import__, [], []

def spy(name, scope=None, *arguments):
    before = len(sys.modules)
    inside.append(name)
    try:
        return real(name, scope, *arguments)
    finally:
        inside.pop()
        if not inside and len(sys.modules) > before:
            imported.append(name or scope["__package__"])

builtins.__import__ = spy
build("one")
builtins.__import__ = real
assert imported and {name.partition(".")[0] for name in imported} <= {*forks.PACKAGES}, imported
"""


def test_a_fork_waits_for_all_that_a_first_build_imports(lab):
    """What else it needs is imported with kernlib's own modules, for which a fork waits too."""
    assert lab.run(IMPORTS) == (0, "")


FIRST_CALLS = """
import faulthandler, sys, threading, time
import torch
import kernlib as kl
from tests.jit.process_cases import forked, succeeds
from tests.support.limits import CHILD_LIMIT_S

faulthandler.enable()

x = torch.ones(3, 2)  # torch's own first call holds locks of the C library, which a child inherits

def call():
    return kl.run_kernel(kl.gaussian(), x, x, bandwidth=1.0)

thread = threading.Thread(target=call, daemon=True)
thread.start()
time.sleep(int(sys.argv[1]) / 1000)

def work():
    kl.gaussian(), kl.linalg, kl.nn, kl.compile
    import kernlib.families.pairwise.operation, kernlib.jit.service

succeeds(forked(work))
thread.join(CHILD_LIMIT_S)
assert not thread.is_alive()
"""


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [0, 2, 5, 10, 20, 40, 80, 160])
def test_a_child_forked_at_any_time_of_a_first_call_can_import(milliseconds):
    command = [sys.executable, "-c", FIRST_CALLS, str(milliseconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr

"""Processes that share a cache, none of which imports torch: their compiler leaves a mark each.

What hangs ends by SIGABRT, of which faulthandler writes its stacks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.limits import CHILD_LIMIT_S, LIMIT_S
from tests.support.paths import ROOT

POLL_S = 0.002

PRELUDE = """
import faulthandler, os, pathlib, signal, sys, threading, time, uuid, warnings
faulthandler.enable()
from kernlib import events
from kernlib.jit import compiler, entry, layers, service
from kernlib.jit.spec import KernelSpec

warnings.simplefilter("error")
marks, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
compile_s = float(os.environ.get("COMPILE_S", "0.2"))
REPORT = {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}

def mark(name):
    (marks / f"{name}-{uuid.uuid4()}").touch()

def wait_for(name):
    end = time.monotonic() + 300
    while not any(marks.glob(name)):
        assert time.monotonic() < end, f"nobody has made {name}"
        time.sleep(0.002)

def compile_spec(spec, arch):
    mark(f"compile-{spec.source[3:].strip()}")
    time.sleep(compile_s)
    return entry.Entry(spec.entry, spec.source.encode() * 100, REPORT)

def spec(name):
    return KernelSpec("test", f"// {name}" + chr(10), "entry", 32, description=name)

def build(name):
    made = service.build(spec(name), "sm_90a")
    assert made.cubin == spec(name).source.encode() * 100
    return made

def key(name):
    return service.digest(spec(name), "sm_90a")

nvrtc, compiler.compile_spec = compiler.compile_spec, compile_spec
assert "torch" not in sys.modules
"""
EPILOGUE = "\nassert 'torch' not in sys.modules, 'torch was imported'"

BUILD = "mark('ready'); wait_for('go')\nfor name in arguments: build(name)"


def forked(work: Callable[[], object]) -> int:
    """The id of a child that does ``work()`` and ends with 0, or with 1 if that raises."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(pid: int) -> int:
    """That of a forked child, negative for a signal. One that hangs is ended: it may do so before
    any of its own code runs, where no alarm is set."""
    end = time.monotonic() + CHILD_LIMIT_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def succeeds(pid: int) -> None:
    """Wait for a forked child that must succeed."""
    status = exit_status(pid)
    assert status == 0, f"the child ended with {status}"


class Lab:
    """Starts children on one cache, and counts what they mark."""

    def __init__(self, folder: Path):
        self.cache, self.marks = folder / "cache", folder / "marks"
        self.before: list[str] = []  # words in front of the command
        self.marks.mkdir()
        self._children: list[subprocess.Popen] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.returncode is None:  # else its number may be another's by now
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=LIMIT_S)

    def start(self, code: str, *arguments: str, **variables: str) -> subprocess.Popen:
        """A process that runs code after PRELUDE, in a group of its own; its stderr is a pipe that
        has no end before the last of its children has ended."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
        own = {"KERNLIB_CACHE_DIR": str(self.cache), "PYTHONPATH": str(ROOT)}
        script = [sys.executable, "-c", PRELUDE + code + EPILOGUE]
        command = [*self.before, *script, str(self.marks), *arguments]
        environment = {**inherited, **own, **variables}
        child = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._children.append(child)
        return child

    def run(self, code: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit status, negative for a signal, and stderr of a process."""
        child = self.start(code, *arguments, **variables)
        errors = self.errors_of(child)
        return child.returncode, errors

    def errors_of(self, child: subprocess.Popen) -> str:
        """The stderr of a process that ends, with all its children."""
        try:
            return child.communicate(timeout=LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGABRT)
            errors = child.communicate(timeout=LIMIT_S)[1]
            raise AssertionError(f"it has not ended in {LIMIT_S} s:\n{errors}") from None

    def build(self, *lists: list[str]) -> Counter:
        """A process for each list of kernels, all past their imports before one begins; how often
        each kernel was compiled."""
        self.clear()
        children = [self.start(BUILD, *names) for names in lists]
        self.wait_for("ready", len(lists))
        self.mark("go")
        self.join(children)
        return self.compiles()

    def join(self, children: list[subprocess.Popen]) -> None:
        """Wait for children that must succeed."""
        for child in children:
            errors = self.errors_of(child)
            assert child.returncode == 0, errors

    def mark(self, name: str) -> None:
        (self.marks / name).touch()

    def clear(self) -> None:
        for mark in self.marks.iterdir():
            mark.unlink()

    def wait_for(self, name: str, count: int = 1) -> None:
        end = time.monotonic() + LIMIT_S
        while len(list(self.marks.glob(f"{name}*"))) < count:
            assert time.monotonic() < end, f"fewer than {count} of {name}"
            time.sleep(POLL_S)

    def compiles(self) -> Counter:
        return Counter(mark.name.split("-")[1] for mark in self.marks.glob("compile-*"))

"""Processes that share a cache, none of which imports torch: their compiler leaves a mark each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support.paths import ROOT

LIMIT_S = 60

PRELUDE = """
import os, pathlib, signal, sys, threading, time, uuid, warnings
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
    end = time.monotonic() + 30
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
            child.kill()
            child.communicate()

    def start(self, code: str, *arguments: str, **variables: str) -> subprocess.Popen:
        """A process that runs code after PRELUDE; its stderr is a pipe."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
        own = {"KERNLIB_CACHE_DIR": str(self.cache), "PYTHONPATH": str(ROOT)}
        script = [sys.executable, "-c", PRELUDE + code + EPILOGUE]
        command = [*self.before, *script, str(self.marks), *arguments]
        environment = {**inherited, **own, **variables}
        child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self._children.append(child)
        return child

    def run(self, code: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit status, negative for a signal, and stderr of a process."""
        child = self.start(code, *arguments, **variables)
        errors = child.communicate(timeout=LIMIT_S)[1]
        return child.returncode, errors

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
            errors = child.communicate(timeout=LIMIT_S)[1]
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
            time.sleep(0.002)

    def compiles(self) -> Counter:
        return Counter(mark.name.split("-")[1] for mark in self.marks.glob("compile-*"))

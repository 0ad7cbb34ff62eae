"""Kernels of a first call that it needs later, compiled meanwhile, on a GPU that exists by name."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from kernlib.errors import CompileError
from kernlib.families.sparse.formats import registry
from kernlib.jit import service
from kernlib.runtime import early
from tests.architecture import walks
from tests.support import fakes
from tests.support.early import join

WAYS = ["gaussian", "kernel_matmul", "Kronecker-sparse", "chain", "sparse", "dsd", "attention"]
WAYS += ["kron_matmul"]


class Builds:
    """Kernels that are not in the cache, by the names of the threads that compile them."""

    def __init__(self, monkeypatch):
        walks.install(monkeypatch)
        self.made: list[tuple[str, bool]] = []
        self.refused: set[str] = set()
        inner = service.build

        def build(spec, arch):
            notify = service.missed.get()
            if notify is not None:
                notify()
            is_early = threading.current_thread().name == early.NAME
            self.made.append((spec.description, is_early))
            if spec.description in self.refused:
                raise CompileError("NVRTC refused it", "", "")
            return inner(spec, arch)

        monkeypatch.setattr(service, "build", build)

    def of(self, is_early: bool) -> set[str]:
        return {what for what, by in self.made if by is is_early}


@pytest.fixture
def builds(monkeypatch):
    yield Builds(monkeypatch)
    join()
    fakes.forget()


def backward(y: torch.Tensor) -> None:
    y = y.as_subclass(torch.Tensor)
    y.backward(torch.zeros(y.shape, dtype=y.dtype))


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
def test_kernels_of_a_backward_pass_are_compiled_from_the_first_miss_on(way, builds):
    call = walks.WAYS[f"{way}, recorded"]()
    builds.made.clear()
    y = call()
    join()
    known = builds.of(True)
    assert known - builds.of(False)
    builds.made.clear()
    backward(y)
    assert builds.of(False) <= known


def test_what_writes_a_format_is_compiled_while_formats_are_compared(builds):
    registry.build_counting.cache_clear()
    registry.build_counting(torch.float16, 0)
    join()
    registry.build_counting.cache_clear()
    assert all("count" in what for what in builds.of(False))
    for what in ("write u8", "write u4", "write u2", "bitmap encode", "macko encode"):
        assert any(what in each for each in builds.of(True))


def test_what_fails_is_raised_where_it_is_needed(builds):
    call = walks.WAYS["dsd, recorded"]()
    y = call()
    join()
    builds.refused = builds.of(True) - builds.of(False)
    with pytest.raises(CompileError, match="refused"):
        backward(y)


def test_a_process_that_ends_begins_no_more():
    """It waits for the compile that it is in, and prints nothing."""
    program = """
import os, threading, time, pytest
os.sched_getaffinity = lambda _: {0, 1}  # so that one thread compiles at a time
from kernlib.jit import service
from tests.architecture import walks
walks.install(pytest.MonkeyPatch())
inner, main, begun = service.build, threading.main_thread(), threading.Event()
def build(spec, arch):
    if service.missed.get():
        service.missed.get()()
    if threading.current_thread().name == "kernlib-early":
        if begun.is_set() and not main.is_alive():
            print("another has begun", flush=True)
        begun.set()
        while main.is_alive():
            time.sleep(0.01)
    return inner(spec, arch)
service.build = build
walks.WAYS["dsd, recorded"]()()
begun.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

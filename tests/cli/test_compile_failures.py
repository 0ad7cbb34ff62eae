"""`kernlib compile` of kernels that are not compiled, or not kept."""

from __future__ import annotations

import json
import threading

from kernlib.errors import CompileError, UnsupportedError
from kernlib.jit import compiler, service
from tests.cli.cases import plain

CALL = ("--shape", "1000x64", "--shape", "800x64", "--argument", "bandwidth=8.0")


def test_a_kernel_that_does_not_compile(run, monkeypatch):
    def refuse(spec, arch):
        raise CompileError("NVRTC refused the source", "x.cu(1): error: no", spec.source)

    monkeypatch.setattr(compiler, "compile_spec", refuse)
    result = run("compile", "gaussian", *CALL, "--json")
    plain(result, 1, "NVRTC refused the source", "error: no")
    assert result.stdout == ""


def test_without_a_compiler(run, monkeypatch):
    def refuse(spec, arch):
        raise UnsupportedError("To install it: pip install '.[cu13]'")

    monkeypatch.setattr(compiler, "compile_spec", refuse)
    plain(run("compile", "gaussian", *CALL), 1, "pip install")


def test_kernels_that_are_not_kept(run, compiles, monkeypatch):
    monkeypatch.setattr(type(service.layers().store), "put", lambda self, key, value: False)
    result = run("compile", "gaussian", *CALL)
    plain(result, 1, "1 kernel could not be kept in", "kernlib doctor")
    assert "1 compiled, 0 found" in result.stdout


def test_kernels_that_later_ones_have_driven_out_are_not_kept(run, compiles, monkeypatch):
    """Which the store has said it keeps."""
    store, lock = type(service.layers().store), threading.Lock()
    put = store.put

    def put_alone(self, key, value):
        with lock:
            self.clear()
            return put(self, key, value)

    monkeypatch.setattr(store, "put", put_alone)
    result = run("compile", "gaussian", *CALL, "--arch", "sm_80", "--arch", "sm_90a", "--json")
    facts = json.loads(result.stdout)
    assert facts["kept"] == 1 < facts["compiled"] == len(compiles)
    plain(result, 1, f"{len(compiles) - 1} kernels could not be kept in")

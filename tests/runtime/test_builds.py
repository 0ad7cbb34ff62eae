"""Kernels of one call that are not there yet: compiled side by side, on GPUs that exist by name."""

from __future__ import annotations

import threading

import pytest

from kernlib import events
from kernlib.errors import CompileError
from kernlib.jit import service
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import devices
from tests.support.limits import LIMIT_S

SPECS = [KernelSpec("test", f"// {n}", "entry", 32, description=f"kernel {n}") for n in range(3)]


def test_kernels_of_a_call_are_built_at_the_same_time(gpus, monkeypatch):
    """Each waits for the others to have begun, and would wait for ever were they in turn."""
    together, inner = threading.Barrier(len(SPECS), timeout=LIMIT_S), service.build
    monkeypatch.setattr(service, "build", lambda *a: (together.wait() and None) or inner(*a))
    devices.build([*SPECS, SPECS[0]], 0)
    assert sorted(built.what for built in gpus.builds) == [spec.description for spec in SPECS]


def test_what_is_loaded_or_alone_is_not_built_ahead(gpus):
    devices.load(SPECS[0], 0)
    gpus.builds.clear()
    devices.build(SPECS[:2], 0)
    devices.build(SPECS[2:], 0)
    assert not gpus.builds


def test_nothing_is_built_inside_a_capture(gpus):
    gpus.capturing = True
    devices.build(SPECS, 0)
    assert not gpus.builds


def test_what_fails_is_raised_by_the_load(gpus, monkeypatch):
    def refused(spec, arch):
        raise CompileError("NVRTC refused it", "", "")

    monkeypatch.setattr(service, "build", refused)
    devices.build(SPECS, 0)
    with pytest.raises(CompileError, match="refused"):
        devices.load(SPECS[0], 0)


def test_a_listener_of_the_call_hears_of_every_thread(gpus, monkeypatch):
    heard = []
    monkeypatch.setattr(events, "emit", lambda *a, **b: None)
    monkeypatch.setattr(service, "build", lambda spec, arch: heard.append(events.listening()))
    with events.on_stderr():
        devices.build(SPECS, 0)
    assert heard == [True] * len(SPECS)

"""Kernels compiled together, with what NVRTC said of each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernlib.jit import compiler


def built_with_logs(specs: dict, build: Callable) -> dict:
    """Of each of ``specs``, by name, ``build(spec)`` and NVRTC's log."""
    run, logs = compiler._run_nvrtc, {}

    def logged(wanted, arch, log):
        cubin = run(wanted, arch, log)
        logs[wanted] = log.getvalue()
        return cubin

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_run_nvrtc", logged)
        made = pool.map(build, specs.values())
        return {n: (m, logs[s]) for (n, s), m in zip(specs.items(), made, strict=True)}

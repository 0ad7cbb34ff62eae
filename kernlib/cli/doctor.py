"""``kernlib doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from kernlib.cli.output import size

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
INSTALL = "pip install 'kernlib[cu13]' (driver 580 or later) or 'kernlib[cu12]'"
PROBE_ARCH = "sm_90a"
PROBE = """#include "common/types.cuh"
extern "C" __global__ void probe(float *x) { x[threadIdx.x] += 1.0f; }
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``advice`` says what to do about a line that is not ok; only a ``needed`` one makes
    the command fail."""

    label: str
    text: str
    advice: str = ""
    needed: bool = False

    @property
    def mark(self) -> str:
        return ("FAIL" if self.needed else "note") if self.advice else "ok"


@click.command()
def doctor() -> None:
    """Check torch, GPUs, the compiler and the cache; say what to do about what is missing.

    Exits with 1 if kernels cannot be compiled or cannot be kept on disk.
    """
    failed = False
    for check in (_kernlib, _torch, _gpus, _wheels, _headers, _compile, _settings, _cache):
        for finding in _findings(check):
            _print(finding)
            failed |= finding.mark == "FAIL"
    if failed:
        raise click.exceptions.Exit(1)


def _findings(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check that breaks is a finding, and the others still run
        label = check.__name__.strip("_")
        advice = "fix what this message names, then run kernlib doctor again"
        return [Finding(label, f"{type(error).__name__}: {error}", advice, needed=True)]


def _print(finding: Finding) -> None:
    click.echo(f"{finding.mark:4s}  {finding.label:10s}  {finding.text}")
    if finding.advice:
        click.echo(f"{'':18s}-> {finding.advice}")


def _kernlib() -> list[Finding]:
    import kernlib
    from kernlib.jit import sources

    python = f"Python {platform.python_version()}"
    return [Finding("kernlib", f"{kernlib.__version__}, {python}, sources in {sources.root()}")]


def _torch() -> list[Finding]:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    text = f"{torch.__version__}, {build}"
    if DRIVER_VERSION.exists() and not torch.version.cuda:
        advice = "this machine has an NVIDIA driver: install a CUDA build of torch to use its GPU"
        return [Finding("torch", text, advice)]
    return [Finding("torch", text)]


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        text = "none that torch can use; CPU tensors are computed in PyTorch, kernels can be built"
        return [Finding("GPU", text)]
    found = [_gpu(index) for index in range(torch.cuda.device_count())]
    return found if torch.version.hip else [_driver(), *found]


def _gpu(index: int) -> Finding:
    import torch

    from kernlib.errors import UnsupportedError
    from kernlib.launch import arch_of

    name = torch.cuda.get_device_name(index)
    try:
        return Finding(f"GPU {index}", f"{name}, kernels are compiled for {arch_of(index)}")
    except UnsupportedError as error:
        return Finding(f"GPU {index}", name, f"{error}")


def _driver() -> Finding:
    """The driver's version, and whether it can load what the installed NVRTC makes."""
    from cuda.bindings import driver

    from kernlib.jit import toolchain

    number = int(driver.cuDriverGetVersion()[1])
    version = _driver_text() or "driver"
    text = f"{version}, for CUDA {number // 1000}.{number % 1000 // 10}"
    made_for = toolchain.nvrtc_version().partition(".")[0]
    if made_for.isdecimal() and int(made_for) > number // 1000:
        advice = f"kernels of NVRTC {made_for} do not load there: update it, or use kernlib[cu12]"
        return Finding("driver", text, advice, needed=True)
    return Finding("driver", text)


def _driver_text() -> str:
    found = DRIVER_VERSION.read_text() if DRIVER_VERSION.exists() else ""
    number = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", found)
    return number[0] if number else ""


def _wheels() -> list[Finding]:
    from kernlib.jit import toolchain

    found = [_wheel("cuda.core", "cuda-core"), _wheel("bindings", "cuda-bindings")]
    nvrtc = toolchain.nvrtc_version()
    if nvrtc == toolchain.UNKNOWN_VERSION:
        return [*found, Finding("NVRTC", "not installed", INSTALL, needed=True)]
    return [*found, Finding("NVRTC", nvrtc)]


def _wheel(label: str, name: str) -> Finding:
    try:
        return Finding(label, f"{name} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        return Finding(label, f"{name} is not installed", INSTALL, needed=True)


def _headers() -> list[Finding]:
    from kernlib.errors import UnsupportedError
    from kernlib.jit import toolchain

    try:
        folder = toolchain.header_directory()
    except UnsupportedError:
        return [Finding("headers", "no CUDA headers from pip; no kernel of today needs them")]
    if not (Path(folder) / "cuda_fp16.h").exists():
        text = f"{folder} lacks cuda_fp16.h"
        return [Finding("headers", f"{text}; no kernel of today needs it")]
    return [Finding("headers", folder)]


def _compile() -> list[Finding]:
    """A real compile that includes our headers."""
    from kernlib.errors import CompileError, UnsupportedError
    from kernlib.jit import compiler
    from kernlib.jit.spec import KernelSpec

    spec = KernelSpec("doctor", PROBE, "probe", 32, description="the probe of kernlib doctor")
    try:
        made = compiler.compile_spec(spec, PROBE_ARCH)
    except UnsupportedError as error:
        return [Finding("compile", "not possible", str(error), needed=True)]
    except CompileError as error:
        advice = "reinstall kernlib and its compiler: " + INSTALL
        return [Finding("compile", str(error), advice, needed=True)]
    text = f"{made.meta['compile_ms']} ms for {PROBE_ARCH}, with loading the compiler"
    return [Finding("compile", text)]


def _settings() -> list[Finding]:
    from kernlib import settings

    try:
        settings.Settings.read()
    except ValueError as error:
        return [Finding("settings", str(error), "unset it or give it such a value", needed=True)]
    return [Finding("settings", _setting(variable)) for variable in settings.VARIABLES]


def _setting(variable) -> str:
    value = os.environ.get(variable.name, "")
    return f"{variable.name}={value}" if value else f"{variable.name} is {variable.default}"


def _cache() -> list[Finding]:
    from kernlib import settings
    from kernlib.jit import service

    try:
        directory = settings.current().cache_dir[0]
    except ValueError:
        return []  # said under settings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = service.layer()[0].info()
    if facts["kind"] == "memory":
        said = str(caught[0].message) if caught else f"{directory} cannot be used"
        said = said.partition("; ")[0]  # what follows is the advice below
        advice = "set KERNLIB_CACHE_DIR to a local folder that you own and can write"
        return [Finding("cache", said, advice, needed=True)]
    used = f"{facts['entries']} kernels, {size(facts['bytes_used'])} of {size(facts['budget'])}"
    return [Finding("cache", f"{facts['kind']}, {directory}, {used}")]

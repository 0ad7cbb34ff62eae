"""Compiles the text of kernels for the host, and launches it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernlib.jit.spec import KernelSpec

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[3] / "kernel_sources"
COMPILER = shutil.which("g++")
# Half precision by the processor: in software it took a third of the time of wgmma's kernels. That
# it has multiplications with a sum changes no result: they are taken where the text names them.
OPTIONS = ("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-w", "-fPIC")

# The instruction of a function that kernlib.lowering.wgmma wrote. The flags at its end say whether
# the rows of a, where that is in shared memory, and the columns of b lie side by side.
WGMMA = re.compile(
    r'asm volatile\("\{(?:(?!asm).)*?m64n(\d+)k16\.f32\.(b?f16)\.(?:(?!asm).)*?'
    r"p, 1, 1((?:, [01])+);(?:(?!asm).)*?\);",
    re.DOTALL,
)
TYPES = {"f16": "half_t", "bf16": "bfloat16_t"}
INCLUDE = re.compile(r'#include "(\w+/.*\.cuh)"')
SHARED = re.compile(r"^( +)__shared__", re.MULTILINE)  # in a function


def _of_host(source: str) -> str:
    """The text with calls in place of PTX that is generated, and one memory for all threads where
    the functions of its own file share some."""
    return INCLUDE.sub(_file, WGMMA.sub(_multiply, source))


def _file(found: re.Match) -> str:
    text = (SOURCES / found[1]).read_text()
    return SHARED.sub(r"\1static", text) if SHARED.search(text) else found[0]


def _multiply(found: re.Match) -> str:
    left, right = (["1", *found[3].split(", ")[1:]])[-2:]
    kinds = f"{TYPES[found[2]]}, {found[1]}, {left}, {right}"
    return f"multiply_warpgroup<{kinds}>(d, a, b, accumulate);"


def kernels_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all tests of a run share, those of its other workers too."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    made.mkdir(exist_ok=True)
    return made


def _compile(source: Path, made: Path, *options: str) -> None:
    """By g++, to a file that is there when it is whole."""
    begun = made.with_name(f"{os.getpid()}-{made.name}")
    command = [COMPILER, *OPTIONS, f"-I{HERE}", f"-I{SOURCES}", *options, source, "-o", begun]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    begun.replace(made)


class Emulator:
    """The libraries of kernels, in a folder, beside a header that is compiled once: a third of the
    second that a library takes."""

    def __init__(self, folder: Path):
        self.folder = folder

    def launch(self, spec: KernelSpec, grid: tuple[int, int], block: int) -> None:
        """One launch, of the parameter struct at an address."""
        self._library(spec).launch(ctypes.c_void_p(block), *grid)

    def _library(self, spec: KernelSpec) -> ctypes.CDLL:
        name = hashlib.sha256(spec.canonical()).hexdigest()[:24]
        made, header = self.folder / f"{name}.so", self.folder / "host.h.gch"
        if not made.exists():
            if not header.exists():
                _compile(HERE / "host.h", header, "-x", "c++-header")
            text = self.folder / f"{os.getpid()}-{name}.cpp"
            text.write_text(
                f'#include "host.h"\n{_of_host(spec.source)}\n#define ENTRY {spec.entry}\n'
                '#include "launch.h"\n'
            )
            _compile(text, made, "-shared")
        return ctypes.CDLL(str(made))

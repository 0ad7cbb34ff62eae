"""Compiles the text of kernels for the host, and launches it."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from kernlib.jit.spec import KernelSpec

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[3] / "kernel_sources"
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")

# The instruction of a function that kernlib.lowering.wgmma wrote. The flags at its end say whether
# the rows of a, where that is in shared memory, and the columns of b lie side by side.
WGMMA = re.compile(
    r'asm volatile\("\{(?:(?!asm).)*?m64n(\d+)k16\.f32\.(b?f16)\.(?:(?!asm).)*?'
    r"p, 1, 1((?:, [01])+);(?:(?!asm).)*?\);",
    re.DOTALL,
)
TYPES = {"f16": "half_t", "bf16": "bfloat16_t"}


def _of_host(source: str) -> str:
    """The text with calls in place of PTX that is generated."""
    return WGMMA.sub(_multiply, source)


def _multiply(found: re.Match) -> str:
    left, right = (["1", *found[3].split(", ")[1:]])[-2:]
    kinds = f"{TYPES[found[2]]}, {found[1]}, {left}, {right}"
    return f"multiply_warpgroup<{kinds}>(d, a, b, accumulate);"


class Emulator:
    """The libraries of kernels, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def launch(self, spec: KernelSpec, grid: tuple[int, int], block: int) -> None:
        """One launch, of the parameter struct at an address."""
        self._library(spec).launch(ctypes.c_void_p(block), *grid)

    def _library(self, spec: KernelSpec) -> ctypes.CDLL:
        name = hashlib.sha256(spec.canonical()).hexdigest()[:24]
        made, text = self.folder / f"{name}.so", self.folder / f"{name}.cpp"
        if not made.exists():
            text.write_text(
                f'#include "host.h"\n{_of_host(spec.source)}\n#define ENTRY {spec.entry}\n'
                '#include "launch.h"\n'
            )
            command = [COMPILER, *OPTIONS, f"-I{HERE}", f"-I{SOURCES}", str(text), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(made))

"""What the tests of Kronecker-sparse lowering share: problems on contiguous tensors, parameters
read back by the struct of the CUDA source, and launches on the host."""

from __future__ import annotations

import ctypes
import re
import struct
from functools import cache

import torch

from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.lanes.interleaved import Interleaved
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Problem
from kernlib.lowering.steps import NUMBER, Lowered, Step
from tests.support import cuda_text
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator
from tests.support.kernels import stem

ARCH, PROCESSORS = "sm_90a", 132
DTYPES = ("float16", "bfloat16", "float32")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
KINDS = [("float16", "fp32"), ("bfloat16", "fp32"), ("float32", "fp32"), ("float32", "tf32")]


def problem(blocks=2, lanes=1, rows=25088, columns=96, depth=48, **changes):
    """A factor (blocks, columns, depth, lanes) forward, batch first, on contiguous tensors."""
    features, outputs = blocks * depth * lanes, blocks * columns * lanes
    fields = {
        "left": Layout(depth * lanes, 1, features, lanes),
        "right": Layout(columns * depth * lanes, 1, depth * lanes, lanes),
        "out": OutLayout(columns * lanes, 1, outputs, lanes),
        "dtype": "float16",
    }
    return Problem(blocks, lanes, rows, columns, depth, **(fields | changes))


def batch_last(**changes):
    """A problem, batch last."""
    made = problem(**changes)
    n, lanes = made.rows, made.lanes
    left = Layout(made.depth * lanes * n, n, 1, lanes * n)
    out = OutLayout(made.columns * lanes * n, n, 1, lanes * n)
    return made._replace(left=left, out=out)


def factor(a, b, c, d, last=False, **changes):
    """A factor by its pattern."""
    made = batch_last if last else problem
    return made(blocks=a, lanes=d, columns=b, depth=c, **changes)


def by_x(a, b, c, d, last=False, **changes):
    """The gradient by x of a factor: depths of the weight lie b * d apart."""
    right = Layout(b * c * d, 1, d, c * d)
    return factor(a, c, b, d, last, right=right, **changes)


def weight_gradient(a=2, b=96, c=48, d=1, batch=25088, last=False, **changes):
    """The gradient of a weight on contiguous tensors."""
    feature, n = (batch, 1) if last else (1, None)
    left = Layout(b * d * feature, feature, d * feature, n or a * b * d)
    right = Layout(c * d * feature, feature, d * feature, n or a * c * d)
    fields = {"left": left, "right": right, "out": OutLayout(b * c * d, 1, c * d, d)}
    return Problem(a, d, b, c, batch, **(fields | {"dtype": "float16"} | changes))


@cache
def text_of(source: str) -> cuda_text.Text:
    return cuda_text.Text(source)


ADDRESSES = {"left": 1 << 40, "right": 2 << 40, "out": 3 << 40, "workspace": 4 << 40} | {
    f"vector{k}": (5 + k) << 40 for k in range(8)
}
ADDRESSES["bias"] = 13 << 40
POISON, EDGE = 255, 256  # of memory that is to be written; bytes before and behind it


def block_of(step: Step, addresses: dict[str, int]) -> bytes:
    """A launch's parameters, as a plan fills them with maps full of zeros."""
    own = step.pointers[len(step.maps) :]
    pointers = [addresses[name] + offset for name, offset in own]
    numbers = [x for index in range(step.scalars) for x in (index + 0.5, index + 900)]
    layout = f"<{len(pointers)}Q" + NUMBER * step.scalars
    return bytes(128 * len(step.maps)) + struct.pack(layout, *pointers, *numbers) + step.fixed


def parameters(step: Step):
    """The parameters by the names of the source's struct, as long as which they are."""
    block, made = block_of(step, ADDRESSES), text_of(step.spec.source).parameters()
    said = int(re.search(r"PARAMETER_BYTES = (\d+);", step.spec.source)[1])
    assert len(block) == said == ctypes.sizeof(made)
    assert not step.maps or said % 64 == 0
    return made.from_buffer_copy(block)


def launch(emulator: Emulator, step: Step, memory: dict[str, torch.Tensor]) -> None:
    """One launch on the host, of tensors by the names of pointers."""
    addresses = {name: t.data_ptr() for name, t in memory.items()}
    block = ctypes.create_string_buffer(block_of(step, addresses))
    emulator.launch(step.spec, step.grid, ctypes.addressof(block))


def launch_all(emulator: Emulator, call: Lowered, memory: dict[str, torch.Tensor]) -> torch.Tensor:
    """The launches of a call on the host, of tensors by the names of pointers. Answers the
    workspace, which began as poison; nothing beside it may be written."""
    room = torch.full((call.workspace + 3 * EDGE,), POISON, dtype=torch.uint8)
    first = -room.data_ptr() % EDGE + EDGE
    before, workspace, behind = room.tensor_split((first, first + call.workspace))
    places = {name: t.data_ptr() for name, t in memory.items()}
    places["workspace"] = room.data_ptr() + first
    for step in call.steps:
        maps.launch(emulator, step, [places[name] + at for name, at in step.pointers])
    assert (before == POISON).all() and (behind == POISON).all()
    return workspace


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """By the norms of both."""
    return float((result.double() - exact).norm() / exact.norm())


def entries(found) -> list[str]:
    """The kernels of the launches."""
    return [stem(step.spec).removeprefix("kronecker_sparse_") for step in found.steps]


def kinds_of(given, arch=ARCH) -> list[str]:
    """Of candidates: the one that is taken untuned, then others by rank."""
    others = (choice["kind"] for choice in lowering.candidates(given, arch))
    return list(dict.fromkeys([kind_of(given, arch), *others]))


def kind_of(given, arch=ARCH) -> str:
    return lowering.default(given, PROCESSORS, arch)["kind"]


# What lowering makes of problems on Hopper.


def lowered(given, epilogue=(), **choice):
    known = lowering.candidates(given, ARCH)
    wanted = next(c for c in known if choice.items() <= c.items())
    return lowering.lower(epilogue, given, ARCH, PROCESSORS, wanted)


def main_of(found):
    return found.steps[-1]


def with_lanes(lanes, dtype="float16", **changes):
    return problem(lanes=lanes, dtype=dtype, **changes)


SAMPLE = {
    "batch first": problem(),
    "batch first, several tiles": problem(blocks=3, columns=520, depth=520),
    "batch first, many tiles of resident weights": problem(blocks=40, columns=512, depth=64),
    "batch first, packed": problem(right=Layout(48, 1, 1, 96)),
    "batch first, float32": problem(columns=200, depth=300, dtype="float32"),
    "batch first, tf32": problem(dtype="float32", precision="tf32"),
    "batch last": batch_last(lanes=3, rows=1000),
    "batch last, several tiles": batch_last(lanes=2, columns=520, depth=520, rows=1000),
    "batch last, packed": batch_last(lanes=3, rows=1000, right=Layout(9, 8, 7, 6)),
    "batch last, float32": batch_last(lanes=3, rows=1000, columns=130, dtype="float32"),
    "one of everything": problem(blocks=1, rows=1, columns=1, depth=1),
    "d = 2": with_lanes(2, rows=777, columns=68, depth=52),
    **{f"d = {d}": with_lanes(d, rows=777, columns=70, depth=50) for d in (4, 8, 16, 24, 40)},
    **{
        f"d = {d}, {precision}": with_lanes(d, "float32", rows=777, precision=precision)
        for d in (2, 4, 8, 20)
        for precision in ("fp32", "tf32")
    },
    "d = 16, apart": with_lanes(16, rows=99, left=Layout(48 * 32, 1, 96 * 32, 32)),
}


def choices(given, multiprocessors=PROCESSORS):
    """What lowering makes of a problem with each of its candidates of Hopper's two kinds, whose
    launches are at most two: that of a packed weight, and the product."""
    found = [
        lowering.lower((), given, ARCH, multiprocessors, choice)
        for choice in lowering.candidates(given, ARCH)
        if choice["kind"] in (Hopper.name, Interleaved.name)
    ]
    assert all(len(made.steps) <= 2 for made in found)
    return found

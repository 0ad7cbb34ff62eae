"""What the tests of Kronecker-sparse lowering share: problems on contiguous tensors, and parameter
blocks read back by the struct of the CUDA source."""

from __future__ import annotations

import re
import struct
from functools import cache

import cuda_text

from kernlib.ops import kronecker_sparse_lowering as lowering
from kernlib.ops.kronecker_sparse_lowering import Layout, OutLayout, Problem

DTYPES = ("float16", "bfloat16", "float32")
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
    """The same, batch last."""
    made = problem(**changes)
    n, lanes = made.rows, made.lanes
    left = Layout(made.depth * lanes * n, n, 1, lanes * n)
    out = OutLayout(made.columns * lanes * n, n, 1, lanes * n)
    return made._replace(left=left, out=out)


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


def block(step: lowering.Step, addresses: dict[str, int]) -> bytes:
    """A launch's parameters, as a plan fills them, with maps full of zeros."""
    own = step.pointers[len(step.maps) :]
    pointers = [addresses[name] + offset for name, offset in own]
    numbers = [x for index in range(step.scalars) for x in (index + 0.5, index + 900)]
    layout = f"<{len(pointers)}Q" + lowering.NUMBER * step.scalars
    return bytes(128 * len(step.maps)) + struct.pack(layout, *pointers, *numbers) + step.fixed


ADDRESSES = {"left": 1 << 40, "right": 2 << 40, "out": 3 << 40, "workspace": 4 << 40} | {
    f"vector{k}": (5 + k) << 40 for k in range(8)
}


def parameters(step: lowering.Step):
    """The parameters of a launch by the names of the source's struct."""
    return text_of(step.spec.source).parameters().from_buffer_copy(block(step, ADDRESSES))


def parameter_bytes(step: lowering.Step) -> int:
    return int(re.search(r"PARAMETER_BYTES = (\d+);", step.spec.source)[1])

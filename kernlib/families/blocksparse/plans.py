"""Plans of block-sparse products: the problem that lowering sees, and its kernels, loaded."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from kernlib.canonical import encode
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import NAMES
from kernlib.families.blocksparse.lowering import choose
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd, Spmm, Values
from kernlib.lowering.steps import Lowered
from kernlib.runtime import tuned
from kernlib.runtime.arguments import address_of, folded
from kernlib.runtime.devices import arch_of, lower_on, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.products import Call, ProductPlan, make_plan

FAMILY = BlockSparseMatmul.family
# What kernels call the operands a and b.
OPERANDS = {"sdd": ("a", "b"), "dsd": ("values", "dense"), "dds": ("dense", "values")}

Problem = Spmm | Sdd


class Read(NamedTuple):
    """How kernels read a call's tensors: shapes of the copies that a, b and then the summands need,
    or None, and whether a given ``out`` is written by a copy."""

    copies: tuple[tuple[int, ...] | None, ...]
    apart: bool


def plan(call: Call, descriptor: BlockSparseMatmul, operands, out, parameters) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded; by torch where there is
    nothing to sum."""
    layout, a, b = operands
    device = a.get_device()
    arch_of(device)  # an old device is refused for an empty result too
    problem, read = problem_of(call, descriptor, operands, out, parameters)
    lowered = _lower(descriptor, problem, device) if _is_for_kernels(call, problem) else None
    request = descriptor, operands, out, parameters
    names = (*NAMES, *OPERANDS[descriptor.mode])
    copies, beside = read.copies[:2], read.copies[2:]
    place = partial(_place, copies) if any(copies) else _place_as_given
    compute = None if lowered is not None else _by_torch
    tensors = (a, b, *layout.tensors)
    return make_plan(tensors, call, request, place, names, lowered, read.apart, compute, beside)


def _is_for_kernels(call: Call, problem: Problem) -> bool:
    """Whether there is a result, and something that it is a sum of."""
    blocks = problem.blocks
    depth = problem.depth if isinstance(problem, Sdd) else blocks.capacity
    return bool(call.batch and depth and blocks.grid_rows and blocks.grid_cols)


def _lower(descriptor: BlockSparseMatmul, problem: Problem, device: int) -> Lowered:
    """The kernels of a problem on a device: the tuned ones, else by rule."""
    arch, epilogue = arch_of(device), descriptor.epilogue
    candidates = partial(choose.candidates, problem, arch)
    # The bytes are what calls share that the same kernels are fastest for.
    choice = tuned.choice(FAMILY, model(device), encode((FAMILY, problem)), candidates)
    return lower_on(lambda count: choose.lower(epilogue, problem, arch, count, choice), device)


def kernel_precision(permitted: str | None, dtype: torch.dtype) -> str:
    """The precision for lowering: kernels take "bf16" as "tf32", which it permits."""
    if dtype is not torch.float32:
        return "fp32"
    return "fp32" if (permitted or float32_precision()) == "fp32" else "tf32"


def problem_of(
    call: Call, descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict
) -> tuple[Problem, Read]:
    """The problem of a checked call, and how its tensors are read."""
    problem = _sdd if descriptor.mode == "sdd" else _spmm
    return problem(call, descriptor, operands, out, parameters)


def _place_as_given(operands: tuple) -> tuple[list[int], None]:
    layout, a, b = operands
    return [*layout.addresses, a.data_ptr(), b.data_ptr()], None


def _place(copies: tuple, operands: tuple) -> tuple[list[int], list]:
    """Addresses where a and b are copied to a shape, if one is given, and the tensors."""
    layout, *tensors = operands
    read = [
        t if shape is None else t.expand(shape).contiguous()
        for t, shape in zip(tensors, copies, strict=True)
    ]
    return [*layout.addresses, *(t.data_ptr() for t in read)], read


def _by_torch(descriptor: BlockSparseMatmul, operands: tuple, values: dict, out) -> torch.Tensor:
    """A sum of nothing: by one operation where there is neither an epilogue nor a result to make,
    in 2 us where the reference takes 15."""
    if out is not None and not descriptor.epilogue:
        return out.zero_()
    from kernlib.families.blocksparse import reference  # 2 ms; only torch's way needs it

    return reference.blocksparse_matmul(descriptor, *operands, values)


# Tensors as kernels see them. ``lead`` is what is in front of blocks, heads and matrices.


def _spmm(call: Call, descriptor, operands: tuple, out, parameters) -> tuple[Spmm, Read]:
    layout, a, b = operands
    is_dsd = descriptor.mode == "dsd"
    stored, dense = (a, b) if is_dsd else (b, a)
    across = descriptor.transpose_b if is_dsd else not descriptor.transpose_a
    ends = 2 + (layout.heads is not None)
    lead = call.out_shape[:-ends]
    beside = [parameters[name].expand(call.out_shape) for name in descriptor.summands]
    pairs = [(dense.expand(*lead, *dense.shape[-ends:]), across)]
    pairs += [(t, not is_dsd) for t in (*beside, *([] if out is None else [out]))]
    lines = _Lines(lead, (), ends == 3)
    if _is_one(stored) and ends == 2:
        more = _Lines((), lead, False)  # the batch becomes more columns
        new = (call.out_shape, _contiguous(call.out_shape), not is_dsd)
        views = [(t.shape, t.stride(), turned) for t, turned in pairs]
        if None not in [more.strides(*view) for view in (*views, new)]:
            lines = more
    values, values_copy = _stored(stored, lines.lead)
    (seen, dense_copy), *rest = [lines.seen(*pair) for pair in pairs]
    written = None if out is None else rest.pop()
    apart = written is not None and written[1] is not None
    if written is None or apart:
        written = lines.new(call.out_shape, not is_dsd), None
    problem = Spmm(
        dtype=DTYPE_NAMES[call.dtype],
        precision=kernel_precision(descriptor.precision, call.dtype),
        blocks=layout.sizes,
        batch=math.prod(lines.lead),
        columns=math.prod(lines.outer) * call.out_shape[-1 if is_dsd else -2],
        transposed=descriptor.transposed if is_dsd else not descriptor.transposed,
        values=values,
        dense=seen,
        out=written[0],
        summands=tuple(view for view, _ in rest),
    )
    copies = (values_copy, dense_copy) if is_dsd else (dense_copy, values_copy)
    return problem, Read((*copies, *(copy for _, copy in rest)), apart)


def _sdd(call: Call, descriptor, operands: tuple, out, parameters) -> tuple[Sdd, Read]:
    layout, a, b = operands
    ends = 2 + (layout.heads is not None)
    lead = call.out_shape[:-3]
    lines = _Lines(lead, (), ends == 3)
    turned = descriptor.transpose_a, descriptor.transpose_b
    (left, left_copy), (right, right_copy) = (
        lines.seen(t.expand(*lead, *t.shape[-ends:]), across)
        for t, across in zip((a, b), turned, strict=True)
    )
    written, out_copy = (None, None) if out is None else _stored(out, lead)
    beside = [_stored(parameters[n].expand(call.out_shape), lead) for n in descriptor.summands]
    rows, cols = layout.block
    new = Values(layout.capacity * rows * cols, rows * cols, cols, 1)
    problem = Sdd(
        dtype=DTYPE_NAMES[call.dtype],
        precision=kernel_precision(descriptor.precision, call.dtype),
        blocks=layout.sizes,
        batch=math.prod(lead),
        depth=a.shape[-2 if descriptor.transpose_a else -1],
        a=left,
        b=right,
        values=new if written is None or out_copy else written,
        summands=tuple(view for view, _ in beside),
    )
    copies = (left_copy, right_copy, *(copy for _, copy in beside))
    return problem, Read(copies, out_copy is not None)


def _is_one(stored: torch.Tensor) -> bool:
    """Whether values have no batch."""
    return math.prod(stored.shape[:-3]) == 1


def _stored(t: torch.Tensor, lead: tuple) -> tuple[Values, tuple | None]:
    """Values as kernels read them, and the shape of a copy if their memory has no such strides."""
    shape = (*lead, *t.shape[-3:])
    strides = t.expand(shape).stride() if lead else t.stride()
    batch = folded(lead, strides[: len(lead)]) if lead else 0
    if batch is None:
        slots, rows, cols = t.shape[-3:]
        return Values(slots * rows * cols, rows * cols, cols, 1), shape
    return Values(batch, *strides[-3:], address_of(t) & 15 or 16), None


def _contiguous(shape: tuple) -> list[int]:
    return [math.prod(shape[index + 1 :]) for index in range(len(shape))]


class _Lines(NamedTuple):
    """How a product's dense tensors are seen: dimensions that are its batch, those that are more of
    its columns, and whether heads are in front of the last two."""

    lead: tuple[int, ...]
    outer: tuple[int, ...]
    has_heads: bool

    def seen(self, t: torch.Tensor, across: bool) -> tuple[Dense, tuple | None]:
        """A tensor whose lines are its last dimension if it is seen ``across``, and the shape of a
        copy if its memory has no such strides."""
        view = self.strides(t.shape, t.stride(), across)
        if view is None:
            return self.new(tuple(t.shape), across), tuple(t.shape)
        return view._replace(alignment=address_of(t) & 15 or 16), None

    def new(self, shape: tuple, across: bool) -> Dense:
        """A tensor that is made for the call."""
        return self.strides(shape, _contiguous(shape), across)

    def strides(self, shape: tuple, strides, across: bool) -> Dense | None:
        """The strides of a tensor's dimensions, None where they need a copy."""
        head = strides[-3] if self.has_heads and shape[-3] > 1 else 0
        line, column = (strides[-1], strides[-2]) if across else (strides[-2], strides[-1])
        if not self.outer:
            batch = folded(self.lead, strides[: len(self.lead)])
            return None if batch is None else Dense(batch, head, line, column)
        sizes = (*self.outer, shape[-2 if across else -1])
        column = folded(sizes, (*strides[: len(self.outer)], column))
        return None if column is None else Dense(0, head, line, column)

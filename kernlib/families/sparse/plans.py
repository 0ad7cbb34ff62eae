"""Plans of products with compressed matrices: the problem that lowering sees, and its loaded
kernels; or, for many vectors and for matrices in the dense format, a product by cuBLAS with the
matrix laid out densely."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.sparse import reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.families.sparse.matrix import SparseMatrix, dense_of
from kernlib.families.sparse.tensors import check_frozen, check_place
from kernlib.lowering.arithmetic import round_up
from kernlib.runtime import rehearsal
from kernlib.runtime.arguments import address_of, folded, no_autocast
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.dtypes import KERNEL_TYPES, accumulator
from kernlib.runtime.products import Call, ProductPlan, make_plan

FAMILY = SparseMatmul.family
WIDTH = 8  # kernels read vectors of x whose length is a multiple of this


class Columns(NamedTuple):
    """Strides of a tensor whose leading dimensions are taken as one: from vector to vector, which
    is 0 for a single vector, and from feature to feature."""

    vector: int
    feature: int


def columns_of(t: torch.Tensor) -> Columns | None:
    """A tensor's strides with its leading dimensions taken as one; None if that needs a copy."""
    inner = folded(t.shape[:-1], t.stride()[:-1])
    return None if inner is None else Columns(inner, t.stride(-1))


def _aligned(t: torch.Tensor) -> bool:
    """Whether the first address is a multiple of 16. The storage of a meta tensor counts as
    aligned."""
    return address_of(t) % 16 == 0


def readable(x: torch.Tensor) -> Columns | None:
    """Strides of an x that kernels can read in place: its features lie side by side, their number
    is a multiple of WIDTH, and each vector begins at a multiple of 16 bytes. None for an x that
    must be copied."""
    seen = columns_of(x)
    if seen is None or x.shape[-1] % WIDTH or not _aligned(x):
        return None
    side_by_side = seen.feature == 1 and seen.vector * x.element_size() % 16 == 0
    return seen if side_by_side else None


def padded(sizes: tuple[int, int, int], x: torch.Tensor) -> torch.Tensor:
    """A copy of x. ``sizes`` are its vectors, C, and the multiple of WIDTH to which features are
    padded with zeros. The padding is multiplied by zeros of the matrix, so a NaN there would give
    NaN."""
    columns, cols, width = sizes
    flat = x.reshape(columns, cols)
    if width == cols:
        return flat.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(flat, (0, width - cols))


def problem_of(call: Call, w: SparseMatrix, x: torch.Tensor, out) -> Problem:
    """The problem of a checked call."""
    (rows, cols), seen = w.shape, readable(x)
    width = round_up(cols, WIDTH)
    stride = width if seen is None or call.batch == 1 else seen.vector
    written = columns_of(out) if out is not None else None
    if written is None:
        written = Columns(rows if call.batch > 1 else 0, 1)
    return Problem(
        rows=rows,
        cols=cols,
        columns=call.batch,
        dtype=KERNEL_TYPES[w.dtype],
        x_stride=stride,
        x_padded=seen is None,
        out_strides=(written.vector, written.feature if rows > 1 else 0),
        facts=facts_of(w.facts),
        format=w.format,
        frozen=w.frozen,
    )


def plan(call: Call, descriptor: SparseMatmul, operands: tuple, out, parameters) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    w, x = operands
    device = x.get_device()
    arch = arch_of(device)  # one too old is refused for cuBLAS as well
    problem = problem_of(call, w, x, out)
    lowered = copy = compute = None
    if 0 not in (call.batch, *w.shape) and choose.takes(problem, arch):
        lower = partial(choose.lower, descriptor.epilogue, problem, arch)
        lowered = lower_on(lower, device)
    if lowered is None:
        compute = by_cublas if call.batch else partial(_nothing, call.out_shape)
        if call.batch and rehearsal.of(device) is not None:
            dense_of(w)  # whose kernel is noted
    elif problem.x_padded:
        copy = partial(padded, (call.batch, w.shape[1], round_up(w.shape[1], WIDTH)))
    return make_plan(
        (x, *w.operands),
        call,
        (descriptor, operands, out, parameters),
        partial(_place, copy),
        (*w.tensors, "x"),
        lowered,
        apart=out is not None and not _is_written(descriptor, out, lowered is None),
        compute=compute,
    )


def _is_written(descriptor: SparseMatmul, out: torch.Tensor, by_torch: bool) -> bool:
    """Whether a result is written to ``out`` itself. Kernels do so if its leading dimensions can be
    taken as one; cuBLAS if nothing but a bias follows, which saves a copy of 1.4 us. If the address
    of ``out`` is no multiple of 16, cuBLAS may add in another order, so the result is copied, to
    have the same bits as others."""
    if not by_torch:
        return columns_of(out) is not None
    return out.is_contiguous() and _aligned(out) and _is_cublas(descriptor)


def _is_cublas(descriptor: SparseMatmul) -> bool:
    """Whether cuBLAS computes all of a descriptor's epilogue: none, or a bias alone."""
    return not descriptor.epilogue or _is_biased(descriptor)


def _is_biased(descriptor: SparseMatmul) -> bool:
    return len(descriptor.epilogue) == 1 and isinstance(descriptor.epilogue[0], Bias)


def _place(copy: Callable | None, operands: tuple) -> tuple[list[int], torch.Tensor]:
    """The addresses of the matrix's tensors and of an x that kernels can read, and that x."""
    w, x = operands
    if w._frozen is not None:
        check_frozen(w)
    addresses = [t.data_ptr() for t in w._operands]
    if addresses != w._addresses:
        check_place(w, addresses)
    if copy is not None:
        x = copy(x)
    return [*addresses, x.data_ptr()], x


# Many vectors, and matrices in the dense format.


def by_cublas(
    descriptor: SparseMatmul, operands: tuple, parameters: dict, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A product by torch with the matrix laid out densely, whose sums are float32. A bias alone is
    added by the same call; other epilogues are applied in float32 to the rounded product.
    ``parameters`` are numbers and tensors on the device."""
    w, x = operands
    return by_dense(descriptor, dense_of(w), x, parameters, out)


def _nothing(shape: tuple[int, ...], descriptor, operands: tuple, parameters, out) -> torch.Tensor:
    """The product of no vectors."""
    return operands[1].new_empty(shape)


def by_dense(
    descriptor: SparseMatmul,
    dense: torch.Tensor,
    x: torch.Tensor,
    parameters: dict,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`by_cublas` with a dense matrix of any strides. An ``out``, which must be contiguous
    and have no epilogue but a bias, is written and returned."""
    if x.is_meta:  # in a rehearsal, where a product would import a second of torch
        return x.new_empty((*x.shape[:-1], dense.shape[0]))
    flat = x.reshape(x.shape[:-1].numel(), dense.shape[1])
    bias = parameters[descriptor.epilogue[0].parameter] if _is_biased(descriptor) else None
    into = None if out is None else out.view(flat.shape[0], dense.shape[0])
    with no_autocast(x):
        y = _product(dense, flat, bias, into)
        if not _is_cublas(descriptor):
            wide = y.to(accumulator(y.dtype))
            y = reference.finish(descriptor.epilogue, wide, parameters).to(y.dtype)
    if out is not None:
        return out
    # Not as a view, which autograd would forbid to write in place behind a recorded product.
    return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], dense.shape[0]])


def _product(
    dense: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """The product (N, R) of ``dense`` (R, C) and x (N, C), with a bias (R,) or None. For a single
    vector cuBLAS has a function of its own, whose result is (R,)."""
    if x.shape[0] == 1:
        column, out = x[0], None if out is None else out[0]
        if bias is None:
            return torch.mv(dense, column, out=out)
        return torch.addmv(bias, dense, column, out=out)
    if bias is None:
        return torch.mm(x, dense.t(), out=out)
    return torch.addmm(bias, x, dense.t(), out=out)

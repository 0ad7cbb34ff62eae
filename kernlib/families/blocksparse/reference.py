"""Products with block-sparse matrices in PyTorch, differentiable as often as is asked for.

On a CPU :mod:`kernlib.families.blocksparse.cpu` computes calls, except those with many small blocks
or one matrix for all heads, and those inside of transforms and forward-mode derivatives. The others
lay the sparse operand out as a dense matrix. Stored blocks are multiplied one by one instead where
a dense operand holds NaN or infinities or cannot be read: then entries that meet no block reach no
result and no gradient. Few blocks are multiplied one by one too, as laying out a dense matrix then
takes longer than the product: 5 ms against 0.3 for 2048 x 2048 and one column."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse import cpu
from kernlib.families.blocksparse.cpu import lines_of
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime import expressions
from kernlib.runtime.arguments import no_autocast
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import as_rows, is_wrapped, stand_ins

# Up to this stored part of a matrix its blocks are multiplied one by one, and up to the second with
# FEW_COLUMNS. That takes from a tenth of a dense matrix's time to all of it.
FEW_BLOCKS, FEW_BLOCKS_OF_FEW, FEW_COLUMNS = 1 / 4, 1 / 2, 16
# The part from which a CPU takes a dense matrix for more columns than a block has, of blocks with
# 16 rows or columns: 1.4 times the time of a dense weight, as of 0.6 of its blocks.
MANY_SMALL = 0.6


def blocksparse_matmul(
    descriptor: BlockSparseMatmul,
    layout: Layout,
    a: torch.Tensor,
    b: torch.Tensor,
    parameters: dict | None = None,
) -> torch.Tensor:
    """The result of ``descriptor``, in the operands' dtype; float16 and bfloat16 are computed in
    float32. ``parameters`` of the epilogue are numbers and tensors, vectors of shape (features,).
    """
    dtype, wide = a.dtype, _arithmetic(descriptor, a)
    a, b = a.to(wide), b.to(wide)
    if descriptor.mode == "sdd":
        left = a.mT if descriptor.transpose_a else a
        right = b.mT if descriptor.transpose_b else b
        y = sampled(layout, left, right)
    elif descriptor.mode == "dsd":
        dense = b.mT if descriptor.transpose_b else b
        y = multiply(layout, a, dense, descriptor.transpose_a, False)
    else:
        dense = a.mT if descriptor.transpose_a else a
        y = multiply(layout, b, dense, descriptor.transpose_b, True)
    if descriptor.epilogue:
        y = expressions.apply(descriptor.epilogue, y, parameters or {}, axis=descriptor.axis)
        if descriptor.mode == "sdd":
            y = torch.where(is_stored(layout), y, 0.0)
    return y.to(dtype).contiguous()


def multiply(
    layout: Layout, values: torch.Tensor, dense: torch.Tensor, transposed: bool, right: bool
) -> torch.Tensor:
    """``op(S) dense``, or ``dense op(S)`` where S stands at the ``right``, for each head."""
    columns = dense.shape[-2 if right else -1]
    if _by_cpu(layout, columns, dense) and cpu.takes(values, dense):
        if torch.is_grad_enabled() and (values.requires_grad or dense.requires_grad):
            return _Product.apply(values, dense, layout, transposed, right)
        return cpu.multiply(layout, values, dense, transposed, right)
    if right:
        return multiply(layout, values, dense.mT, not transposed, False).mT
    if not _are_few(layout, columns) and not is_wrapped(values) and _is_finite(dense):
        matrix = layout.to_dense(values)
        return (matrix.mT if transposed else matrix) @ dense
    return _by_blocks(layout, values, dense, transposed)


def _stored(layout: Layout) -> tuple[int, int]:
    """How many numbers a layout has room for, and how many the matrices of all heads have."""
    rows, cols = (n * size for n, size in zip(layout.grid, layout.block, strict=True))
    return layout.capacity * layout.block[0] * layout.block[1], (layout.heads or 1) * rows * cols


def _by_cpu(layout: Layout, columns: int, *dense: torch.Tensor) -> bool:
    """Whether a CPU multiplies stored blocks alone: not where all heads share one matrix, nor where
    small blocks are so many that a dense matrix takes less time."""
    if layout.heads is not None and any([t.shape[-3] != layout.heads for t in dense]):
        return False
    stored, total = _stored(layout)
    small = min(layout.block) == 16 and columns > max(layout.block)
    return not small or stored <= MANY_SMALL * total


def _are_few(layout: Layout, columns: int) -> bool:
    """Whether the slots of a layout are so few that to multiply them by so many columns takes less
    time than a dense matrix, and no more memory."""
    stored, total = _stored(layout)
    part = FEW_BLOCKS_OF_FEW if columns <= FEW_COLUMNS else FEW_BLOCKS
    return stored <= part * total and stored * columns <= total * min(layout.block)


def sampled(layout: Layout, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The stored blocks of ``left right``, for each head."""
    if _by_cpu(layout, left.shape[-1], left, right) and cpu.takes(left, right):
        if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            return _Sampled.apply(left, right, layout)
        return cpu.sampled(layout, left, right)
    if _is_finite(left) and _is_finite(right):
        return layout.to_blocks(left @ right)
    rows, across = lines_of(layout)
    left = _panels(layout, left, layout.block[0], rows)
    right = _panels(layout, right.mT, layout.block[1], across)
    return torch.where(is_stored(layout), left @ right.mT, 0.0)


# What is computed by cpu is recorded by functions, whose gradients are these products again.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, dense, layout, transposed, right):
        ctx.options = cpu.settled(layout), transposed, right
        ctx.save_for_backward(values, dense)
        return cpu.multiply(layout, values, dense, transposed, right)

    @staticmethod
    def backward(ctx, grad):
        layout, transposed, right = ctx.options
        values, dense = ctx.saved_tensors
        to_values = to_dense = None
        with no_autocast(grad):  # as the product was computed
            if ctx.needs_input_grad[0]:
                left, other = _factors(grad, dense, layout, values, right)
                pair = (other.mT, left.mT) if transposed else (left, other)
                to_values = sampled(layout, *pair).sum_to_size(values.shape)
            if ctx.needs_input_grad[1]:
                to_dense = multiply(layout, values, grad, not transposed, right)
                to_dense = to_dense.sum_to_size(dense.shape)
        return to_values, to_dense, None, None, None


def _factors(grad, dense, layout: Layout, values, right: bool) -> tuple:
    """The factors of the gradient of ``op(S)``. For values without a batch and a matrix at the
    right it is one sum over all rows."""
    if not right:
        return grad, dense.mT
    if values.dim() == 3 and layout.heads is None:
        grad, dense = as_rows(grad), as_rows(dense)
    return dense.mT, grad


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, layout):
        ctx.layout = cpu.settled(layout)
        ctx.save_for_backward(left, right)
        return cpu.sampled(layout, left, right)

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        layout, to_left, to_right = ctx.layout, None, None
        with no_autocast(grad):
            if ctx.needs_input_grad[0]:
                to_left = multiply(layout, grad, right.mT, False, False).sum_to_size(left.shape)
            if ctx.needs_input_grad[1]:
                to_right = multiply(layout, grad, left.mT, False, True).sum_to_size(right.shape)
        return to_left, to_right, None


def is_stored(layout: Layout) -> torch.Tensor:
    """Whether each slot holds a block, as (capacity, 1, 1)."""
    return (layout.tensors[3] >= 0)[:, None, None]


def _is_finite(dense: torch.Tensor) -> bool:
    """Whether a tensor is known to hold neither NaN nor infinities. Only for the CPU, as asking a
    GPU would wait for it."""
    if dense.device.type != "cpu" or is_wrapped(dense) or stand_ins(dense):
        return False
    return bool(dense.detach().isfinite().all())


def _by_blocks(
    layout: Layout, values: torch.Tensor, dense: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Each stored block times the lines that it meets, summed by lines of blocks."""
    (grid_rows, grid_cols), heads = layout.grid, layout.heads or 1
    rows, across = lines_of(layout)
    if transposed:
        lines, meets, count, depth = across, rows, heads * grid_cols, layout.block[0]
        values = values.mT
    else:
        lines, meets, count, depth = rows, across, heads * grid_rows, layout.block[1]
    parts = values @ _panels(layout, dense, depth, meets)
    parts = torch.where(is_stored(layout), parts, 0.0)
    y = parts.new_zeros(*parts.shape[:-3], max(count, 1), *parts.shape[-2:])
    y = with_added(y, -3, lines.clamp(min=0), parts)  # of 0 where there is no block
    size = () if layout.heads is None else (heads,)
    size += count // heads * y.shape[-2], y.shape[-1]
    return y.narrow(-3, 0, count).reshape(*y.shape[:-3], *size)


def _panels(layout: Layout, dense: torch.Tensor, depth: int, lines: torch.Tensor) -> torch.Tensor:
    """For each slot the ``depth`` lines of a dense matrix that are its line of blocks, 0 for those
    without a block."""
    if layout.heads is None:
        dense = dense.unsqueeze(-3)
    dense = dense.expand(*dense.shape[:-3], layout.heads or 1, *dense.shape[-2:])
    count = dense.shape[-3] * (dense.shape[-2] // depth)
    panels = dense.reshape(*dense.shape[:-3], count, depth, dense.shape[-1])
    if not count:
        panels = panels.sum(-3, keepdim=True)  # a line of 0 for slots to take
    return torch.where(is_stored(layout), taken(panels, -3, lines.clamp(min=0)), 0.0)


# Sums in a fixed order on a GPU: torch's index_add, and so the gradient of index_select, adds
# entries of one index in any order, index_put in the order of the indices.


def with_added(y: torch.Tensor, dim: int, index: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """``y.index_add(dim, index, parts)``, the same bits each time."""
    if not _is_ordered(y):
        return y.index_add(dim, index, parts)
    at, moved = y.movedim(dim, 0), parts.movedim(dim, 0)
    return at.index_put((index,), moved, accumulate=True).movedim(0, dim)


def taken(t: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``t.index_select(dim, index)``, whose gradient has the same bits each time."""
    if not _is_ordered(t):
        return t.index_select(dim, index)
    return t.movedim(dim, 0)[index].movedim(0, dim)


def _is_ordered(t: torch.Tensor) -> bool:
    """Whether an order is asked for: a CPU has one, and is_grads_batched knows no index_put."""
    return t.device.type == "cuda" and not torch._C._functorch.is_legacy_batchedtensor(t)


def _arithmetic(descriptor: BlockSparseMatmul, x: torch.Tensor) -> torch.dtype:
    """The dtype of the sums: float64 where torch would take float32 in TF32 without leave."""
    wide = accumulator(x.dtype)
    strict = descriptor.precision == "fp32" or x.dtype != torch.float32
    if wide == torch.float32 and x.device.type == "cuda" and strict:
        return torch.float64 if float32_precision() != "fp32" else wide
    return wide

"""What each process has of a layer whose features are dealt out, for
:mod:`kernlib.distributed.tensor_parallel`. Nothing here talks to other processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.sparse.formats.registry import format_of
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_quantised
from kernlib.nn.block_sparse.linear import BlockSparseLinear
from kernlib.nn.indexed import MARK
from kernlib.nn.kronecker_linear import KroneckerLinear
from kernlib.nn.kronecker_sparse import KSLinear
from kernlib.nn.kronecker_sparse_algorithms import Pattern
from kernlib.nn.sparse_linear import SparseLinear

# What a call of a layer goes by besides parameters and matrix: in calls it is that of the part.
_IN_CALLS = {
    BlockSparseLinear: ("_plain", "_biased", "_affine", "_steps"),
    KroneckerLinear: ("_shapes", "_plain", "_biased"),
    KSLinear: ("_patterns", "_descriptors", "_steps"),
    SparseLinear: ("_plain", "_biased"),
}


class Part(NamedTuple):
    """The part of a process.

    - ``attributes``: of the layer, in its calls.
    - ``values``: parameters of the layer by name as all processes have them together, and the
      dimension along which they are dealt out; None for those that each process has.
    - ``reads_part``: whether it reads its part of the input's features, or all of them.
    - ``adds_up``: whether its results are summands of all output features, or its part of these.
    - ``take``: changes in the layer itself what no parameter holds.
    """

    attributes: dict[str, object]
    values: dict[str, tuple[torch.Tensor, int | None]]
    reads_part: bool
    adds_up: bool
    take: Callable[[], None]


def part_of(layer: nn.Module, by_rows: bool, rank: int, size: int) -> Part:
    """The part of process ``rank`` of ``size``: of the input's features ``by_rows`` (as
    RowwiseParallel, after the rows of a transposed weight), else of the output's.

    Raises ValueError for sizes that cannot be dealt out, TypeError for other layers.
    """
    if type(layer) not in _PARTS:
        names = ", ".join(kind.__name__ for kind in _PARTS)
        raise TypeError(
            f"module must be one of {names}, nn.Linear or nn.Embedding, got "
            f"{type(layer).__name__}: name the layers inside of it in the plan"
        )
    if "parametrizations" in layer._modules:
        raise ValueError(
            f"module is a {type(layer).__name__} with parametrizations, which would see a part of "
            "what they compute: remove them before, or split a plain layer"
        )
    return _PARTS[type(layer)](layer, by_rows, rank, size)


def facts_of(layer: nn.Module) -> dict[str, str]:
    """What must be equal in all processes before a layer is split; values of parameters are not
    compared, as those of one process become everybody's."""
    texts = {"layer": f"{type(layer).__name__}({layer.extra_repr()})"}
    for name, p in layer.named_parameters():
        texts[name] = f"{p.dtype} {tuple(p.shape)} requires_grad={p.requires_grad}"
    mark = layer._buffers.get(MARK)  # of a matrix, or of the blocks that are stored
    if mark is not None and not mark.is_meta:
        numbers = mark.detach().to("cpu", torch.float32).contiguous()
        stored = "its matrix" if isinstance(layer, SparseLinear) else "which blocks are stored"
        texts[stored] = f"of checksum {zlib.crc32(numbers.numpy().tobytes())}"
    return texts


def _part(
    layer: nn.Module,
    like: nn.Module,
    values: dict[str, tuple[torch.Tensor, int | None]],
    by_rows: bool,
    *,
    reads_part: bool | None = None,
    adds_up: bool | None = None,
    take: Callable[[], None] = lambda: None,
) -> Part:
    """The part that computes as ``like`` does, with the bias of the layer."""
    attributes = {name: like.__dict__[name] for name in _IN_CALLS[type(layer)]}
    if layer.bias is not None:
        values = {**values, "bias": (layer.bias, None if by_rows else 0)}
    reads_part = by_rows if reads_part is None else reads_part
    adds_up = by_rows if adds_up is None else adds_up
    return Part(attributes, values, reads_part, adds_up, take)


def _options(layer: nn.Module, by_rows: bool) -> dict:
    """Of a layer like a part. A sum over processes has its bias and activation behind it."""
    return {
        "bias": False if by_rows else layer.bias is not None,
        "activation": None if by_rows else layer.activation,
        "device": "meta",
    }


def _of_kronecker(layer: KroneckerLinear, by_rows: bool, rank: int, size: int) -> Part:
    sizes = [list(layer.in_sizes), list(layer.out_sizes)]
    side = 0 if by_rows else 1
    name = ("in_sizes", "out_sizes")[side]
    _check_divides(layer, f"{name}[0] of {name} = {tuple(sizes[side])}", sizes[side][0], size)
    sizes[side][0] //= size
    like = KroneckerLinear(*sizes, precision=layer.precision, **_options(layer, by_rows))
    values = {
        f"factors.{place}": (factor, side if place == 0 else None)
        for place, factor in enumerate(layer.factors)
    }
    return _part(layer, like, values, by_rows)


def _of_chain(layer: KSLinear, by_rows: bool, rank: int, size: int) -> Part:
    if layer.bs_last:
        raise ValueError(
            f"{_described(layer)} has bs_last=True, and features are dealt out along the last "
            "dimension: make it with bs_last=False"
        )
    patterns, dims = list(layer.patterns), [None] * layer.num_mat
    order = range(layer.num_mat) if by_rows else range(layer.num_mat - 1, -1, -1)
    is_through = True  # whether the features on the other side of the chain are dealt out too
    for place in order:
        patterns[place], dims[place] = _cut(layer, place, by_rows, size)
        if dims[place] != 0:  # one block, which reads or makes all features of its other side
            is_through = False
            break
    options = _options(layer, by_rows)
    like = KSLinear(patterns, precision=layer.precision, **options)
    values = {
        f"factors.{place}": (factor, dim)
        for place, (factor, dim) in enumerate(zip(layer.factors, dims, strict=True))
    }
    return _part(
        layer, like, values, by_rows, reads_part=by_rows or is_through,
        adds_up=by_rows and not is_through,
    )  # fmt: skip


def _cut(layer: KSLinear, place: int, by_rows: bool, size: int) -> tuple[Pattern, int]:
    """The pattern of a part of a factor whose input's or output's features are dealt out, and the
    dimension of its weight (a, b, c, d) along which it is. A factor is ``a`` blocks one after the
    other, in which features follow each other by b or c."""
    pattern = list(layer.patterns[place])
    dim = 2 if by_rows else 1
    if pattern[0] % size == 0:
        dim = 0
    elif pattern[0] != 1 or pattern[dim] % size:
        side, letter = ("input", "c") if by_rows else ("output", "b")
        raise ValueError(
            f"{_described(layer)} cannot have its {side} features dealt out to {size} processes: "
            f"factors[{place}] has pattern {tuple(pattern)}, and that takes an a divisible by "
            f"{size}, or a = 1 and a {letter} divisible by {size}"
        )
    pattern[dim] //= size
    return tuple(pattern), dim


def _of_sparse(layer: SparseLinear, by_rows: bool, rank: int, size: int) -> Part:
    rows, cols = _shape_of_part(layer, by_rows, size)
    held = layer._matrix
    matrix = None
    if held is not None and held.device.type != "meta":
        matrix = _cut_matrix(layer.matrix, (rows, cols), by_rows, rank)
        if held.frozen:
            matrix.freeze()
    like = SparseLinear(cols, rows, dtype=layer._dtype, **_options(layer, by_rows))

    def take() -> None:
        layer._sizes = (rows, cols)
        if matrix is None:
            layer._become_empty(layer._place if held is None else held.device)
        else:
            layer._hold(matrix)

    return _part(layer, like, {}, by_rows, take=take)


def _cut_matrix(w: SparseMatrix, shape: tuple[int, int], by_rows: bool, rank: int) -> SparseMatrix:
    """A part of a matrix in its format, or in the best one where that cannot hold it. Raises
    ValueError where values in fewer bits would change."""
    rows, cols = shape
    dense = w.to_dense()
    dense = dense.narrow(1, rank * cols, cols) if by_rows else dense.narrow(0, rank * rows, rows)
    dense = dense.contiguous()
    is_held = format_of(w.format).nbytes(dense) is not None
    part = compressed(dense, w.format if is_held else "auto")
    if is_quantised(w) and not torch.equal(part.to_dense(), dense):
        raise ValueError(
            f"a SparseLinear of {w.format} has scales for columns side by side (256, or 128 of "
            f"int4), which parts of {cols} columns would share: parts must be multiples of these"
        )
    return part


def _of_blocks(layer: BlockSparseLinear, by_rows: bool, rank: int, size: int) -> Part:
    rows, cols = shape = _shape_of_part(layer, by_rows, size)
    layout = layer.layout
    name, block = (("out_features", "in_features")[by_rows], layout.block[by_rows])
    if shape[by_rows] % block:
        raise ValueError(
            f"{_described(layer)} has blocks {layout.block}, and {size} processes would have "
            f"{shape[by_rows]} {name} each: that must be a multiple of {block}"
        )
    if layer.weight.is_meta or layer._blank:
        raise ValueError(
            f"{_described(layer)} comes from meta, without blocks to deal out: load its state, or "
            "call reset_parameters, before"
        )
    if layer.growth_candidates is not None:
        raise ValueError("watch_growth() is of one process: call watch_growth(False) before")
    mask = layout.mask()
    parts = mask.chunk(size, 1 if by_rows else 0)
    capacity = max(int(part.count_nonzero()) for part in parts)
    mine = Layout(parts[rank].contiguous(), layout.block, capacity)
    empty = torch.zeros(mine.grid, dtype=torch.bool, device="meta")
    like = BlockSparseLinear(
        cols, rows, Layout(empty, layout.block, capacity), precision=layer.precision,
        **_options(layer, by_rows),
    )  # fmt: skip
    # The owners of stored blocks, in the order of slots.
    width = mask.shape[by_rows] // size
    owners = mask.nonzero()[:, int(by_rows)] // width
    stored = layer.weight.detach()[: len(owners)]
    every = stored.new_zeros((size, capacity, *layout.block))
    for place in range(size):
        blocks = stored[owners == place]
        every[place, : len(blocks)] = blocks
    weight = nn.Parameter(every.flatten(0, 1), requires_grad=layer.weight.requires_grad)
    return _part(layer, like, {"weight": (weight, 0)}, by_rows, take=lambda: layer._hold(mine))


def _shape_of_part(layer: nn.Module, by_rows: bool, size: int) -> tuple[int, int]:
    """Rows and columns of the part of a matrix (out_features, in_features)."""
    shape = [layer.out_features, layer.in_features]
    name = ("out_features", "in_features")[by_rows]
    _check_divides(layer, name, shape[by_rows], size)
    shape[by_rows] //= size
    return shape[0], shape[1]


def _check_divides(layer: nn.Module, name: str, count: int, size: int) -> None:
    if count % size:
        raise ValueError(
            f"{_described(layer)} cannot be dealt out to {size} processes: {name} must be a "
            f"multiple of {size}, got {count}"
        )


def _described(layer: nn.Module) -> str:
    return f"{type(layer).__name__} of {layer.in_features} features to {layer.out_features}"


_PARTS = {
    BlockSparseLinear: _of_blocks,
    KroneckerLinear: _of_kronecker,
    KSLinear: _of_chain,
    SparseLinear: _of_sparse,
}

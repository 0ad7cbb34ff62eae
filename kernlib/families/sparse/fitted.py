"""Matrices made from other tensors than those that a matrix was first made of.

``torch.func.functional_call`` and recorded programs may pass any tensors with a layout, and
``.data`` may move them. Kernels rely on the layout for sizes and for the end of memory. So such
tensors are checked, which waits for the device. They are then marked, so that this happens once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from kernlib.families.sparse.layout import (
    format_of,
    layout_text,
    parse_layout,
    told,
    untransformed,
)
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import (
    LIVE,
    MARK,
    PLACES,
    kind_of,
    loaded,
    measured,
    next_mark,
    placed,
    refuse_capture,
    said_of,
)


def fitted(layout: str, tensors: Sequence[torch.Tensor]) -> SparseMatrix:
    """The matrix of a layout's format, shape and dtype with these tensors, in order, or of a form
    with tensors that say the rest. Its facts are found in the tensors. If a matrix exists whose
    tensors or memory they are, it is that one. Tensors that kernels cannot read in place are
    copied.

    Raises ValueError that names what is wrong, CaptureError for tensors that have not been checked
    while a CUDA graph is captured.
    """
    mark = getattr(tensors[0], MARK, None)
    matrix = None if mark is None else LIVE.get(mark[0])
    if matrix is not None and matrix._form == layout and _are(matrix.listed, tensors):
        return matrix
    passed = tensors
    layout, tensors = told(layout, tensors)
    if matrix is not None and matrix._layout == layout and _are(matrix._operands, tensors):
        return matrix
    text = _known(passed)
    if tensors[0].is_meta:
        return SparseMatrix.from_layout(layout, tensors)
    if matrix is None:  # autograd of compiled code may detach tensors, which leaves no mark
        matrix = PLACES.get(tensors[0].data_ptr())
    if matrix is not None and kind_of(matrix.layout) == kind_of(layout) and _share(matrix, tensors):
        return matrix
    if text == layout and getattr(passed[0], MARK)[2] is None:
        return SparseMatrix.from_layout(layout, tensors)
    with untransformed():
        if text is not None and kind_of(text) == kind_of(layout):
            return SparseMatrix.from_layout(text, tuple(map(placed, tensors)))
        refuse_capture(tensors)
        format, shape, dtype, facts = parse_layout(layout)
        named = dict(zip(format_of(format).TENSORS, tensors, strict=True))
        with said_of(layout):
            facts = {**facts, **measured(format, named)}
            matrix = loaded(format, shape, dtype, facts, named)
        text = layout_text(format, shape, dtype, facts)
        _mark(passed, text)
        return SparseMatrix.from_layout(text, tuple(matrix.values()))


def _known(tensors: Sequence[torch.Tensor]) -> str | None:
    """The layout of tensors that were checked together and not changed since; None for others."""
    marks = [getattr(t, MARK, None) for t in tensors]
    first = marks[0]
    if first is None:
        return None
    for t, mark in zip(tensors, marks, strict=True):
        if mark is None or mark[0] != first[0]:
            return None
        if mark[2] is not None and mark[2] != (t.data_ptr(), t._version):
            return None
    return first[1]


def _are(own: tuple[torch.Tensor, ...], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are a matrix's own tensors."""
    return len(own) == len(tensors) and all(map(is_, own, tensors))


def _share(w: SparseMatrix, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors share all of the memory of a matrix's own, which lives as long as the
    matrix."""
    return len(tensors) == len(w.operands) and all(
        t.data_ptr() == operand.data_ptr()
        and (t.shape, t.dtype, t.device) == (operand.shape, operand.dtype, operand.device)
        and t.is_contiguous()
        for operand, t in zip(w.operands, tensors, strict=True)
    )


def _mark(tensors: Sequence[torch.Tensor], layout: str) -> None:
    """Mark tensors as they are now, unless torch does not count writes to them."""
    if not any(t.is_inference() for t in tensors):
        number = next_mark()
        for t in tensors:
            setattr(t, MARK, (number, layout, (t.data_ptr(), t._version)))

"""The sparse op for whoever records calls and runs them later: torch.compile, torch.export,
make_fx, fake tensors. Eager calls pass by."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.sparse import checks, operators
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.matrix import SparseMatrix, format_of, parse_layout
from kernlib.runtime.arguments import (
    autocast,
    check_out,
    check_parameters,
    for_operator,
    refuse_out_of_recorded,
    requires_gradient,
)
from kernlib.runtime.tensors import check_dense


def run(
    descriptor: SparseMatmul,
    w: SparseMatrix,
    x: torch.Tensor,
    /,
    *more,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.families.sparse.operation.run` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs. Gradients of few vectors go by the matrix's transpose if ``w.transpose()`` has
    been called before, since nothing is compressed while a program is recorded; else by the matrix
    laid out densely.
    """
    if more:
        raise TypeError(f"{descriptor.describe()} takes w and x, got {2 + len(more)} operands")
    checks.check_matrix(w)
    turned = None
    # Numbers that change are symbols, which Dynamo does not let be asked.
    tensors = [value for value in parameters.values() if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and requires_gradient(tensors, x, out):
        refuse_out_of_recorded(out)
        turned = w.known_transpose()
    operands, layout = w.operands, ""
    if turned is not None:
        operands, layout = (*operands, *turned.operands), turned.layout
    names = " ".join(parameters)
    y = _call(descriptor.text, names, w.layout, layout, debug, x, *operands, *parameters.values())
    if out is None:
        return y
    check_out(out, x, y.shape)
    return out.copy_(y)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _call(text: str, names: str, layout: str, turned_layout: str, debug: bool, x, *tensors):
    descriptor = from_text(text)
    matrix, tensors = _taken(layout, tensors)
    transposed, tensors = _taken(turned_layout, tensors)
    parameters = dict(zip(names.split(), tensors, strict=True))
    check_dense(("x",), x=x)
    _, shape, dtype, _ = parse_layout(layout)
    (x,), parameters = autocast((x,), parameters, dtype)
    checks.check_x(shape, dtype, matrix[0].device, x)
    check_parameters(descriptor, shape[0], parameters, x, look=False)
    given = for_operator(parameters, x.device)
    return operators.whole(x, matrix, transposed, layout, turned_layout, text, *given, debug)


def _taken(layout: str, tensors: tuple) -> tuple[list, tuple]:
    """The tensors of a layout, and those behind them."""
    if not layout:
        return [], tensors
    count = len(format_of(parse_layout(layout)[0]).TENSORS)
    return [*tensors[:count]], tensors[count:]

"""The sparse op as operators of ``torch.library``, for what records calls and runs them later, and
for calls inside transforms of torch.func. Other eager calls do not use them. Their gradients are
those of eager calls.

An operator takes a matrix as tensors, of which the last ones say the numbers of its layout by their
shapes, and the rest of the layout as one text; or as its tensors and all of the layout. It takes
the transpose in the same way, for gradients of few vectors; an empty list says that it is not
known.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.sparse import operation, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.fitted import fitted
from kernlib.families.sparse.layout import count_of, shape_of
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.operation import calls, multiply
from kernlib.families.sparse.tensors import TURNED, check_frozen, state_of
from kernlib.runtime.arguments import (
    autocast,
    by_name,
    check_parameters,
    check_vector,
    for_operator,
    no_autocast,
    refuse_out_of_recorded,
    written,
)
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.tensors import check_dense, stand_ins, takes_derivatives

_MATRIX = "Tensor[] matrix, Tensor[] transposed, str layout, str transposed_layout"


def listed(w: SparseMatrix) -> tuple[list[torch.Tensor], list[torch.Tensor], str, str]:
    """A matrix as an operator takes it: tensors, those of its transpose if that is known, and the
    layouts of both."""
    if w.frozen:
        check_frozen(w)
    turned = w.known_transpose()
    if turned is None:
        return [*w.listed], [], w.form, ""
    return [*w.listed], [*turned.listed], w.form, turned.form


def _call(descriptor: SparseMatmul, operands: tuple, out, parameters: dict) -> torch.Tensor:
    """The result of a request by the operator: for tensors that stand for others, or inside of
    torch.vmap."""
    w, x = operands
    if stand_ins(x, out, *w.operands, *parameters.values()):
        return run(descriptor, w, x, out=out, **parameters)
    y = called(descriptor, w, x, parameters)
    return y if out is None else out.copy_(y)


def called(descriptor: SparseMatmul, w: SparseMatrix, x, parameters: dict) -> torch.Tensor:
    """A checked call by its operator."""
    return whole(x, *listed(w), descriptor.text, *for_operator(parameters), False)


def recorded(descriptor: SparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    """A checked call whose gradient is recorded."""
    w, x = operands
    return _recorded(descriptor, x, listed(w), parameters, False)


def _recorded(descriptor, x, matrix: tuple, parameters: dict, debug: bool) -> torch.Tensor:
    """The product with the leading bias by its operator, the other epilogues by torch's own on the
    rounded result."""
    made = operation.parts(descriptor)
    bias = made.operands(parameters).get("bias")
    return made.finish(product(x, *matrix, bias, False, debug), parameters)


def _whole(
    x, matrix, transposed, layout, transposed_layout, descriptor, names, numbers, tensors, debug
):
    w = fitted(layout, matrix)
    with events.on_stderr() if debug else nullcontext():
        given = by_name(names, numbers, tensors)
        return calls.execute(from_text(descriptor), (w, x), None, given)


def _product(x, matrix, transposed, layout, transposed_layout, bias, turned, debug):
    w = fitted(layout, matrix)
    with events.on_stderr() if debug else nullcontext():
        if not turned:
            return multiply(w, x, bias)
        return operation.turned_product(w, _given_transpose(w, transposed_layout, transposed), x)


def _given_transpose(w: SparseMatrix, layout: str, tensors: list) -> SparseMatrix | None:
    """The transpose that a product was recorded with. None after a write to one of the two that
    torch has counted: a compiled program passes the same tensors each time."""
    if not tensors:
        return None
    turned = fitted(layout, tensors)
    made = getattr(tensors[0], TURNED, None)  # lost where a program was saved and loaded
    return turned if made is None or made == (state_of(w), state_of(turned)) else None


def _whole_recorded(x, *rest) -> torch.Tensor | None:
    """The result where a gradient is recorded, by the operator of the product and torch's own
    operators behind it. None where there is nothing to record."""
    *matrix, descriptor, names, numbers, tensors, debug = rest
    if not requires_gradient(tensors or (), x):
        return None
    values = by_name(names, numbers, tensors)
    return _recorded(from_text(descriptor), x, tuple(matrix), values, debug)


def _fake_whole(x, matrix, transposed, layout, *rest):
    shape, dtype = shape_of(layout, matrix)
    return x.new_empty(operation.check_x(shape, dtype, matrix[0].device, x))


def _fake_product(x, matrix, transposed, layout, transposed_layout, bias, turned, debug):
    shape, dtype = shape_of(layout, matrix)
    shape = shape[::-1] if turned else shape
    made = operation.check_x(shape, dtype, matrix[0].device, x)
    if bias is not None:
        check_vector(shape[0], "bias", bias, x)
    return x.new_empty(made)


def _dense(matrix, layout):
    return fitted(layout, matrix).to_dense()


def _fake_dense(matrix, layout):
    shape, dtype = shape_of(layout, matrix)
    return matrix[0].new_empty(shape, dtype=dtype)


def _save(ctx, inputs, output) -> None:
    _, matrix, transposed, layout, transposed_layout, _, turned, debug = inputs
    ctx.sizes = len(matrix)
    ctx.options = layout, transposed_layout, turned, debug
    ctx.save_for_backward(*matrix, *transposed)


def _backward(ctx, grad):
    layout, transposed_layout, turned, debug = ctx.options
    saved = ctx.saved_tensors
    lists = [*saved[: ctx.sizes]], [*saved[ctx.sizes :]]
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = product(grad, *lists, layout, transposed_layout, None, not turned, debug)
    if ctx.needs_input_grad[5]:
        to_bias = operation.bias_gradient(grad)
    constant = [[None] * len(tensors) for tensors in lists]
    return to_x, *constant, None, None, to_bias, None, None


# vmap: the mapped axis of x is one more of its leading dimensions. Parameters that are mapped over
# meet the rounded product.


def _vmap_whole(info, dims, x, *rest):
    *matrix, descriptor, names, numbers, tensors, debug = rest
    _refuse_mapped_matrix(dims)
    inner = [None] * len(tensors) if dims[8] is None else dims[8]
    if all(dim is None for dim in inner):
        return whole(x.movedim(dims[0], 0), *rest), 0
    y = _mapped_product(info, dims, x, matrix, False, debug)
    values = [_beside(t, dim, y) for t, dim in zip(tensors, inner, strict=True)]
    made, wide = from_text(descriptor), y.to(accumulator(y.dtype))
    v = reference.finish(made.epilogue, wide, by_name(names, numbers, values))
    return v.to(y.dtype), 0


def _vmap_product(info, dims, x, *rest):
    *matrix, bias, turned, debug = rest
    _refuse_mapped_matrix(dims)
    if dims[5] is None:
        return product(x.movedim(dims[0], 0), *rest), 0
    y = _mapped_product(info, dims, x, matrix, turned, debug)
    wide = accumulator(y.dtype)
    return (y.to(wide) + _beside(bias, dims[5], y).to(wide)).to(y.dtype), 0


def _mapped_product(info, dims: tuple, x, matrix, turned: bool, debug: bool) -> torch.Tensor:
    """The product alone, with the mapped axis first, whether x is mapped over or not."""
    if dims[0] is not None:
        return product(x.movedim(dims[0], 0), *matrix, None, turned, debug)
    y = product(x, *matrix, None, turned, debug)
    return y.expand(info.batch_size, *y.shape)


def _beside(t: torch.Tensor, dim: int | None, y: torch.Tensor) -> torch.Tensor:
    """A parameter, in a shape that broadcasts with y, whose first axis is the mapped one. The
    values of a vector lie along the last axis."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (y.dim() - t.dim()), *t.shape[1:])


def _refuse_mapped_matrix(dims: tuple) -> None:
    """Raises RuntimeError for a matrix that is mapped over: all calls must share one."""
    if any(dim is not None for part in dims[1:3] if part is not None for dim in part):
        raise RuntimeError("torch.vmap maps x and the epilogue's parameters, no compressed matrix")


# ``names`` are those of ``numbers``, then those of ``tensors``; one text with spaces, for
# torch.jit.trace takes no list of str.
whole = register(
    "sparse_matmul",
    f"(Tensor x, {_MATRIX}, str descriptor, str names, float[] numbers, Tensor[] tensors, "
    "bool debug) -> Tensor",
    _whole,
    _fake_whole,
    recorded=_whole_recorded,
    vmap=_vmap_whole,
)
product = register(
    "sparse_matmul_product",
    f"(Tensor x, {_MATRIX}, Tensor? bias, bool turned, bool debug) -> Tensor",
    _product,
    _fake_product,
    save=_save,
    backward=_backward,
    vmap=_vmap_product,
)
# The matrix itself, which is a constant to autograd.
dense = register("sparse_to_dense", "(Tensor[] matrix, str layout) -> Tensor", _dense, _fake_dense)
BY_NAME = {"sparse_matmul": _call}


# What Dynamo traces.


def run(
    descriptor: SparseMatmul,
    *operands,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operators.

    Errors in shapes, dtypes and devices are raised here, errors in values when the operator runs.
    Nothing is compressed while a program is recorded. So gradients of few vectors use the matrix's
    transpose only if ``w.transpose()`` has been called before, else the matrix laid out densely.
    """
    operation.check_kinds(descriptor, operands)
    w, x = operands
    turned = None
    # Numbers that change are symbols, which Dynamo does not let be asked.
    tensors = [value for value in parameters.values() if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and requires_gradient(tensors, x, out):
        refuse_out_of_recorded(out)
        turned = w.known_transpose()
    matrix, form = w.listed, ""
    if turned is not None:
        matrix, form = (*matrix, *turned.listed), turned.form
    names = " ".join(parameters)
    y = _traced(descriptor.text, names, w.form, form, debug, x, *matrix, *parameters.values())
    return written(out, y, x)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _traced(text: str, names: str, layout: str, turned_layout: str, debug: bool, x, *tensors):
    descriptor = from_text(text)
    matrix, tensors = _taken(layout, tensors)
    transposed, tensors = _taken(turned_layout, tensors)
    parameters = dict(zip(names.split(), tensors, strict=True))
    check_dense(("x",), x=x)
    shape, dtype = shape_of(layout, matrix)
    (x,), parameters = autocast((x,), parameters, dtype)
    operation.check_x(shape, dtype, matrix[0].device, x)
    check_parameters(descriptor, shape[0], parameters, x, look=False)
    if takes_derivatives():  # where operators that take lists of tensors have no gradients
        with no_autocast(x):
            return reference.sparse_matmul(descriptor, dense(matrix, layout), x, parameters)
    given = for_operator(parameters, x.device)
    return whole(x, matrix, transposed, layout, turned_layout, text, *given, debug)


def _taken(layout: str, tensors: tuple) -> tuple[list, tuple]:
    """The first tensors, which are those of a layout, and the rest."""
    if not layout:
        return [], tensors
    count = count_of(layout)
    return [*tensors[:count]], tensors[count:]

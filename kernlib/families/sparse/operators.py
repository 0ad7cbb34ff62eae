"""The sparse op as operators of ``torch.library``, for calls that are recorded to run later and for
calls inside transforms of torch.func. Other eager calls do not use them. Their gradients are those
of eager calls.

An operator takes a matrix as tensors, of which the last ones say the numbers of its layout by their
shapes, and the rest of the layout as one text; or as its tensors and all of the layout. It takes
the transpose in the same way, for gradients of few vectors; an empty list says that it is not
known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
    check_parameters,
    check_vector,
    no_autocast,
    refuse_out_of_recorded,
    tensors_of,
    written,
)
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.schema import DESCRIPTOR, PARAMETERS, Kind, Schema, all_placed, is_mapped
from kernlib.runtime.tensors import check_dense, stand_ins, takes_derivatives


class Matrix(NamedTuple):
    """A matrix for an operator: its tensors, the transpose's tensors if that is known, and both
    layouts."""

    matrix: list[torch.Tensor]
    transposed: list[torch.Tensor]
    layout: str
    transposed_layout: str

    @classmethod
    def of(cls, w: SparseMatrix) -> Matrix:
        if w.frozen:
            check_frozen(w)
        turned = w.known_transpose()
        if turned is None:
            return cls([*w.listed], [], w.form, "")
        return cls([*w.listed], [*turned.listed], w.form, turned.form)

    @property
    def fitted(self) -> SparseMatrix:
        return fitted(self.layout, self.matrix)

    def transpose_of(self, w: SparseMatrix) -> SparseMatrix | None:
        """The transpose that a product was recorded with. None after a write to one of the two that
        torch has counted: a compiled program passes the same tensors each time."""
        if not self.transposed:
            return None
        turned = fitted(self.transposed_layout, self.transposed)
        state = getattr(self.transposed[0], TURNED, None)
        if state is None and turned._turned is not None:  # autograd hands views on without it
            state = turned._turned[::-1]
        # In a program that was saved and loaded the state is unknown.
        return turned if state is None or state == (state_of(w), state_of(turned)) else None


_FIELDS = "Tensor[] matrix", "Tensor[] transposed", "str layout", "str transposed_layout"
_MATRIX = Kind("matrix", _FIELDS, lambda matrix: matrix, Matrix)


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
    return whole(x, Matrix.of(w), descriptor, parameters, False)


def recorded(descriptor: SparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    """A checked call whose gradient is recorded."""
    w, x = operands
    return _recorded(x, Matrix.of(w), descriptor, parameters, False)


def _recorded(
    x, matrix: Matrix, descriptor: SparseMatmul, parameters: dict, debug: bool
) -> torch.Tensor:
    """The product with the leading bias by its operator, the other epilogues by torch's own on the
    rounded result."""
    parts = operation.parts(descriptor)
    bias = parts.operands(parameters).get("bias")
    return parts.finish(product(x, matrix, bias, False, debug), parameters)


def _whole_recorded(x, matrix, descriptor, parameters: dict, debug) -> torch.Tensor | None:
    if not requires_gradient(parameters.values(), x):  # a matrix is a constant
        return None
    return _recorded(x, matrix, descriptor, parameters, debug)


def _whole(x, matrix: Matrix, descriptor, parameters: dict, debug: bool) -> torch.Tensor:
    return calls.execute(descriptor, (matrix.fitted, x), None, parameters)


def _product(x, matrix: Matrix, bias, turned: bool, debug: bool) -> torch.Tensor:
    w = matrix.fitted
    if not turned:
        return multiply(w, x, bias)
    return operation.turned_product(w, matrix.transpose_of(w), x)


def _fake_whole(x, matrix: Matrix, *rest) -> torch.Tensor:
    return _fake_product(x, matrix, None, False)


def _fake_product(x, matrix: Matrix, bias, turned: bool, debug: bool = False) -> torch.Tensor:
    shape, dtype = shape_of(matrix.layout, matrix.matrix)
    shape = shape[::-1] if turned else shape
    size = operation.check_x(shape, dtype, matrix.matrix[0].device, x)
    if bias is not None:
        check_vector(shape[0], "bias", bias, x)
    return x.new_empty(size)


def _dense(matrix, layout):
    return fitted(layout, matrix).to_dense()


def _fake_dense(matrix, layout):
    shape, dtype = shape_of(layout, matrix)
    return matrix[0].new_empty(shape, dtype=dtype)


def _backward(saved, grad) -> dict:
    grads = {}
    if saved.needs.x:
        grads["x"] = product(grad, saved.matrix, None, not saved.turned, saved.debug)
    if saved.needs.bias:
        grads["bias"] = operation.bias_gradient(grad)
    return grads


# vmap: the mapped axis of x is one more of its leading dimensions. Parameters that are mapped over
# meet the rounded product.


def _vmap_whole(info, dims, x, matrix, descriptor, parameters: dict, debug: bool):
    _refuse_mapped_matrix(dims)
    if not is_mapped(dims.tensors):
        return whole(x.movedim(dims.x, 0), matrix, descriptor, parameters, debug), 0
    y = _mapped_product(info, dims, x, matrix, False, debug)
    mapped = dict(zip(tensors_of(parameters), dims.tensors, strict=True))
    values = parameters | {name: _beside(parameters[name], dim, y) for name, dim in mapped.items()}
    v = reference.finish(descriptor.epilogue, y.to(accumulator(y.dtype)), values)
    return v.to(y.dtype), 0


def _vmap_product(info, dims, x, matrix, bias, turned: bool, debug: bool):
    _refuse_mapped_matrix(dims)
    if dims.bias is None:
        return product(x.movedim(dims.x, 0), matrix, bias, turned, debug), 0
    y = _mapped_product(info, dims, x, matrix, turned, debug)
    wide = accumulator(y.dtype)
    return (y.to(wide) + _beside(bias, dims.bias, y).to(wide)).to(y.dtype), 0


def _mapped_product(info, dims, x, matrix, turned: bool, debug: bool) -> torch.Tensor:
    """The product alone, with the mapped axis first, whether x is mapped over or not."""
    if dims.x is not None:
        return product(x.movedim(dims.x, 0), matrix, None, turned, debug)
    y = product(x, matrix, None, turned, debug)
    return y.expand(info.batch_size, *y.shape)


def _beside(t: torch.Tensor, dim: int | None, y: torch.Tensor) -> torch.Tensor:
    """A parameter, in a shape that broadcasts with y, whose first axis is the mapped one. The
    values of a vector lie along the last axis."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (y.dim() - t.dim()), *t.shape[1:])


def _refuse_mapped_matrix(dims) -> None:
    """Raises RuntimeError for a matrix that is mapped over: all calls must share one."""
    if is_mapped((dims.matrix, dims.transposed)):
        raise RuntimeError("torch.vmap maps x and the epilogue's parameters, no compressed matrix")


whole = register(
    "sparse_matmul",
    Schema("Tensor x", _MATRIX, DESCRIPTOR, PARAMETERS, "bool debug"),
    "Tensor",
    _whole,
    _fake_whole,
    recorded=_whole_recorded,
    vmap=_vmap_whole,
)
product = register(
    "sparse_matmul_product",
    Schema("Tensor x", _MATRIX, "Tensor? bias", "bool turned", "bool debug"),
    "Tensor",
    _product,
    _fake_product,
    saves=("matrix",),
    backward=_backward,
    vmap=_vmap_product,
)
# The matrix itself, which is a constant to autograd.
_TENSORS = Schema("Tensor[] matrix", "str layout")
dense = register("sparse_to_dense", _TENSORS, "Tensor", _dense, _fake_dense).overload
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
    matrix, form = w._listed, ""  # no properties, whose code Dynamo would guard for each matrix
    if turned is not None:
        matrix, form = (*matrix, *turned._listed), turned._form
    names = " ".join(parameters)
    y = _traced(descriptor.text, names, w._form, form, debug, x, *matrix, *parameters.values())
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
    listed = Matrix(matrix, transposed, layout, turned_layout)
    return whole(x, listed, descriptor, all_placed(parameters, x.device), debug)


def _taken(layout: str, tensors: tuple) -> tuple[list, tuple]:
    """The first tensors, as many as a layout has, and the rest."""
    if not layout:
        return [], tensors
    count = count_of(layout)
    return [*tensors[:count]], tensors[count:]

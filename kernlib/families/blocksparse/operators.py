"""Block-sparse products as operators of ``torch.library``, for whoever records calls and runs them
later and inside of torch.vmap. Eager calls pass by. Their gradients are those of eager calls.

A layout goes in as its flat tensors and its form.
"""

from __future__ import annotations

import math

import torch
from torch._C._functorch import is_legacy_batchedtensor

from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse import checks, operation
from kernlib.families.blocksparse.attention import operators as attention
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.contents.given import checked_mask
from kernlib.families.blocksparse.contents.sizes import blocks_of, sizes_shape, tensor_shapes
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.kinds import LAYOUT
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.families.blocksparse.operation import PRODUCT, calls
from kernlib.families.blocksparse.scaled import operators as scaled
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.softmax import operators as softmax
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime import products
from kernlib.runtime.arguments import (
    autocast,
    check_parameters,
    check_vector,
    refuse_recorded_out,
    written,
)
from kernlib.runtime.autograd import bias_gradient
from kernlib.runtime.operators import Operator, in_front, is_one_step, register
from kernlib.runtime.schema import DESCRIPTOR, PARAMETERS, Schema, all_placed, is_mapped
from kernlib.runtime.tensors import takes_derivatives


def multiply(descriptor: BlockSparseMatmul, layout: Layout, a, b, bias=None, debug: bool = False):
    """A product, with a bias if one is given, by its operator; of tensors that ``is_grads_batched``
    parts by the reference, as operators that take lists of tensors end in an error there."""
    if is_legacy_batchedtensor(a) or is_legacy_batchedtensor(b):
        return calls.execute(
            descriptor, (layout, a, b), None, {} if bias is None else {"bias": bias}
        )
    return product(a, b, layout, descriptor, bias, debug)


def recorded(descriptor: BlockSparseMatmul, operands: tuple, parameters: dict, debug: bool = False):
    """A checked call whose gradient is recorded: the product with the leading bias by its operator,
    the other epilogues by torch's own on the rounded result."""
    layout, a, b = operands
    parts = operation.parts(descriptor)
    bias = parts.operands(parameters).get("bias")
    y = parts.finish(multiply(parts.product, layout, a, b, bias, debug), parameters)
    return operation.masked(descriptor, operands, y) if parts.rest else y


def _compute(a, b, layout, descriptor, parameters: dict, debug: bool) -> torch.Tensor:
    return calls.execute(descriptor, (layout, a, b), None, parameters)


def _compute_product(a, b, layout, descriptor, bias, debug: bool) -> torch.Tensor:
    return _compute(a, b, layout, descriptor, {} if bias is None else {"bias": bias}, debug)


def _recorded(a, b, layout, descriptor, parameters: dict, debug: bool) -> torch.Tensor:
    return recorded(descriptor, (layout, a, b), parameters, debug)


def _by_torch(a, b, layout, descriptor, parameters: dict, debug: bool) -> torch.Tensor:
    return products.by_reference(PRODUCT, descriptor, (layout, a, b), None, parameters)


def _fake(a, b, layout, descriptor, *rest) -> torch.Tensor:
    return a.new_empty(checks.check_operands(descriptor, (layout, a, b)))


def _fake_product(a, b, layout, descriptor, bias, debug: bool) -> torch.Tensor:
    y = _fake(a, b, layout, descriptor)
    if bias is not None:
        features = checks.features_of(descriptor, tuple(y.shape))
        check_vector(features, "bias", bias, a, checks.TYPES)
    return y


def _backward(saved, grad) -> dict:
    descriptor, layout, needs = saved.descriptor, saved.layout, (saved.needs.a, saved.needs.b)
    if all(needs) and is_one_step(grad):  # one of them alone does not read its operand
        tensors = saved.a, saved.b
        to_a, to_b = product_gradients(grad, *tensors, layout, descriptor, needs, saved.debug)
    else:
        tensors = {"grad": grad, "a": saved.a, "b": saved.b}
        to_a, to_b = operation.gradients(descriptor, layout, tensors, needs, multiply)
    to_bias = bias_gradient(grad, descriptor.axis) if saved.needs.bias else None
    return {"a": to_a, "b": to_b, "bias": to_bias}


def _compute_gradients(grad, a, b, layout, descriptor, needs, debug: bool) -> list[torch.Tensor]:
    if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
        grad = grad.contiguous()
    tensors = {"grad": grad, "a": a, "b": b}
    grads = operation.gradients_by_plans(descriptor, layout, tensors, tuple(needs))
    return [t.contiguous() for t in grads if t is not None]


def _fake_gradients(grad, a, b, layout, descriptor, needs, debug: bool) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t, need in zip((a, b), needs, strict=True) if need]


def _recorded_gradients(grad, a, b, layout, descriptor, needs, debug: bool) -> list[torch.Tensor]:
    tensors = {"grad": grad, "a": a, "b": b}
    grads = operation.gradients(descriptor, layout, tensors, tuple(needs), multiply)
    return [t.contiguous() for t in grads if t is not None]


def _mapped(operator: Operator, info, dims, a, b, layout, descriptor, *rest):
    """What is mapped over is one more of the dimensions in front."""
    rest_dims = {**vars(dims), "a": None, "b": None}
    if is_mapped([*rest_dims.values()]):
        raise NotImplementedError(
            f"torch.vmap over parameters of {descriptor.text} is not known; apply them to the "
            "product"
        )
    ends = [
        3 if letter == "s" else 2 + (layout.heads is not None) for letter in descriptor.mode[1:]
    ]
    operands = list(zip((a, b), (dims.a, dims.b), ends, strict=True))
    rank = max(t.dim() - (dim is not None) - end for t, dim, end in operands)
    a, b = (in_front(t, dim, rank + end) for t, dim, end in operands)
    return operator(a, b, layout, descriptor, *rest), 0


_OPERANDS = "Tensor a", "Tensor b", LAYOUT, DESCRIPTOR
whole = register(
    "blocksparse_matmul",
    Schema(*_OPERANDS, PARAMETERS, "bool debug"),
    "Tensor",
    _compute,
    _fake,
    recorded=_recorded,
    forward=_by_torch,
    vmap=lambda *call: _mapped(whole, *call),
)
product = register(
    "blocksparse_matmul_product",
    Schema(*_OPERANDS, "Tensor? bias", "bool debug"),
    "Tensor",
    _compute_product,
    _fake_product,
    saves=("a", "b", "layout", "descriptor"),
    backward=_backward,
    vmap=lambda *call: _mapped(product, *call),
)
product_gradients = register(
    "blocksparse_matmul_gradients",
    Schema("Tensor grad", *_OPERANDS, "bool[] needs", "bool debug"),
    "Tensor[]",
    _compute_gradients,
    _fake_gradients,
    recorded=_recorded_gradients,
    batched=_recorded_gradients,
)


# A layout that is parts of a mask inside of a program.


def _layout(mask, rows: int, cols: int, capacity: int) -> list[torch.Tensor]:
    return [*Layout(mask, (rows, cols), capacity).flat]


def _fake_layout(mask, rows, cols, capacity):
    heads, grid = mask.shape[0] if mask.dim() == 3 else None, tuple(mask.shape[-2:])
    shapes = tensor_shapes(blocks_of((rows, cols), grid, heads, capacity))
    flat = [mask.new_empty((math.prod(shape),), dtype=torch.int32) for shape in shapes]
    return [*flat, mask.new_empty(sizes_shape(grid, heads), dtype=torch.int32)]


layout_of_mask = register(
    "blocksparse_layout",
    Schema("Tensor mask", "int rows", "int cols", "SymInt capacity"),
    "Tensor[]",
    _layout,
    _fake_layout,
)


# What Dynamo traces.


@torch.compiler.allow_in_graph
def layout_tensors(mask, rows: int, cols: int, capacity: int) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a layout. What is wrong with a mask is raised here, what is wrong with
    its values and with the capacity when the operator runs."""
    return tuple(layout_of_mask(checked_mask(mask), rows, cols, capacity))


def run(
    descriptor: BlockSparseMatmul
    | BlockSparseScaledMatmul
    | BlockSparseSoftmax
    | BlockSparseAttention,
    *operands,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operators, of scaled products, softmax and
    attention too.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    if isinstance(descriptor, BlockSparseAttention):
        return attention.run(descriptor, *operands, out=out, debug=debug, **parameters)
    if isinstance(descriptor, BlockSparseSoftmax):
        return softmax.run(descriptor, *operands, out=out, debug=debug, **parameters)
    if isinstance(descriptor, BlockSparseScaledMatmul):
        return scaled.run(descriptor, *operands, out=out, debug=debug, **parameters)
    checks.check_kinds(descriptor, operands)
    layout, a, b = operands
    refuse_recorded_out(out, a, b, *parameters.values())
    names = " ".join(parameters)
    inputs = (a, b, *layout.flat, *parameters.values())
    y = _traced(descriptor.text, names, layout.form, debug, *inputs)
    return written(out, y, a)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _traced(text: str, names: str, layout_text: str, debug: bool, a, b, *tensors) -> torch.Tensor:
    descriptor, count = from_text(text), count_of(layout_text)
    layout = Layout.from_layout(layout_text, tensors[:count])
    parameters = dict(zip(names.split(), tensors[count:], strict=True))
    checks.check_kinds(descriptor, (layout, a, b))
    (a, b), parameters = autocast((a, b), parameters)
    shape = checks.check_operands(descriptor, (layout, a, b))
    features = checks.features_of(descriptor, shape)
    check_parameters(descriptor, features, parameters, a, False, checks.TYPES, shape)
    if takes_derivatives():  # where operators that take lists of tensors have no gradients
        return products.by_reference(PRODUCT, descriptor, (layout, a, b), None, parameters)
    return whole(a, b, layout, descriptor, all_placed(parameters, a.device), debug)


def _call(descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {PRODUCT.name: _call}

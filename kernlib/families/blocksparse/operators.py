"""Block-sparse products as operators of ``torch.library``, for whoever records calls and runs them
later and inside of torch.vmap. Eager calls pass by. Their gradients are those of eager calls.

A layout goes in as its flat tensors and its form.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch._C._functorch import is_legacy_batchedtensor

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse import checks, operation
from kernlib.families.blocksparse.attention import operators as attention
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.contents.given import checked_mask
from kernlib.families.blocksparse.contents.sizes import blocks_of, sizes_shape, tensor_shapes
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.families.blocksparse.operation import PRODUCT, calls
from kernlib.families.blocksparse.scaled import operators as scaled
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.softmax import operators as softmax
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime import products
from kernlib.runtime.arguments import (
    autocast,
    by_name,
    check_parameters,
    check_vector,
    for_operator,
    refuse_recorded_out,
    written,
)
from kernlib.runtime.operators import in_front, register
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.tensors import takes_derivatives

_OPERANDS = "(Tensor a, Tensor b, Tensor[] layout, str layout_text, str descriptor, "


def multiply(descriptor: BlockSparseMatmul, layout: Layout, a, b, bias=None, debug: bool = False):
    """A product, with a bias if one is given, by its operator; of tensors that ``is_grads_batched``
    made by the reference, as operators that take lists of tensors end in an error there."""
    if is_legacy_batchedtensor(a) or is_legacy_batchedtensor(b):
        return calls.execute(
            descriptor, (layout, a, b), None, {} if bias is None else {"bias": bias}
        )
    return product(a, b, [*layout.flat], layout.form, descriptor.text, bias, debug)


def recorded(descriptor: BlockSparseMatmul, operands: tuple, parameters: dict, debug: bool = False):
    """A checked call whose gradient is recorded: the product with the leading bias by its operator,
    the other epilogues by torch's own on the rounded result."""
    layout, a, b = operands
    made = operation.parts(descriptor)
    bias = made.operands(parameters).get("bias")
    y = made.finish(multiply(made.product, layout, a, b, bias, debug), parameters)
    return operation.masked(descriptor, layout, y)


def _execute(a, b, layout, layout_text: str, descriptor: str, given: dict, debug: bool):
    with events.on_stderr() if debug else nullcontext():
        made = Layout.from_layout(layout_text, layout)
        return calls.execute(from_text(descriptor), (made, a, b), None, given)


def _whole(a, b, layout, layout_text, descriptor, names, numbers, tensors, debug):
    given = by_name(names, numbers, tensors)
    return _execute(a, b, layout, layout_text, descriptor, given, debug)


def _product(a, b, layout, layout_text, descriptor, bias, debug):
    given = {} if bias is None else {"bias": bias}
    return _execute(a, b, layout, layout_text, descriptor, given, debug)


def _whole_recorded(a, b, layout, layout_text, descriptor, names, numbers, tensors, debug):
    if not requires_gradient((b, *(tensors or ())), a):
        return None
    operands = Layout.from_layout(layout_text, layout), a, b
    return recorded(from_text(descriptor), operands, by_name(names, numbers, tensors), debug)


def _whole_by_torch(a, b, layout, layout_text, descriptor, names, numbers, tensors, debug):
    operands = Layout.from_layout(layout_text, layout), a, b
    values = by_name(names, numbers, tensors)
    return products.by_reference(PRODUCT, from_text(descriptor), operands, None, values)


def _fake_whole(a, b, layout, layout_text, descriptor, *rest):
    operands = Layout.from_layout(layout_text, layout), a, b
    return a.new_empty(checks.check_operands(from_text(descriptor), operands))


def _fake_product(a, b, layout, layout_text, descriptor, bias, debug):
    y = _fake_whole(a, b, layout, layout_text, descriptor)
    if bias is not None:
        features = checks.features_of(from_text(descriptor), tuple(y.shape))
        check_vector(features, "bias", bias, a, checks.TYPES)
    return y


def _save(ctx, inputs, output) -> None:
    a, b, layout, ctx.layout_text, ctx.descriptor, _, ctx.debug = inputs
    ctx.save_for_backward(a, b, *layout)


def _backward(ctx, grad):
    a, b, *tensors = ctx.saved_tensors
    descriptor = from_text(ctx.descriptor)
    layout = Layout.from_layout(ctx.layout_text, tensors)
    needs = ctx.needs_input_grad
    to_bias = operation.bias_gradient(descriptor, grad) if needs[5] else None
    given = {"grad": grad, "a": a, "b": b}
    found = operation.gradients(descriptor, layout, given, needs[:2], multiply)
    return *found, [None] * len(tensors), None, None, to_bias, None


# vmap: what is mapped over is one more of the dimensions in front.


def _mapped(info, dims, a, b, layout, layout_text, descriptor, rest: tuple, run):
    if any(dim is not None for dim in dims[2] or ()):
        raise NotImplementedError("torch.vmap over a layout is not known: it is one for all")
    if any(_is_mapped(dim) for dim in dims[5:]):
        raise NotImplementedError(
            f"torch.vmap over parameters of {descriptor} is not known; apply them to the product"
        )
    made, heads = from_text(descriptor), Layout.from_layout(layout_text, layout).heads
    ends = [3 if letter == "s" else 2 + (heads is not None) for letter in made.mode[1:]]
    operands = list(zip((a, b), dims[:2], ends, strict=True))
    rank = max(t.dim() - (dim is not None) - end for t, dim, end in operands)
    a, b = (in_front(t, dim, rank + end) for t, dim, end in operands)
    return run(a, b, layout, layout_text, descriptor, *rest), 0


def _is_mapped(dim) -> bool:
    return any(map(_is_mapped, dim)) if isinstance(dim, (list, tuple)) else dim is not None


def _mapped_whole(info, dims, a, b, layout, layout_text, descriptor, *rest):
    return _mapped(info, dims, a, b, layout, layout_text, descriptor, rest, whole)


def _mapped_product(info, dims, a, b, layout, layout_text, descriptor, *rest):
    return _mapped(info, dims, a, b, layout, layout_text, descriptor, rest, product)


# ``names`` are those of ``numbers``, then those of ``tensors``; one text with spaces, for
# torch.jit.trace takes no list of str.
whole = register(
    "blocksparse_matmul",
    f"{_OPERANDS}str names, float[] numbers, Tensor[] tensors, bool debug) -> Tensor",
    _whole,
    _fake_whole,
    recorded=_whole_recorded,
    forward=_whole_by_torch,
    vmap=_mapped_whole,
)
product = register(
    "blocksparse_matmul_product",
    f"{_OPERANDS}Tensor? bias, bool debug) -> Tensor",
    _product,
    _fake_product,
    save=_save,
    backward=_backward,
    vmap=_mapped_product,
)


# A layout that is made of a mask inside of a program.


def _layout(mask, rows: int, cols: int, capacity: int) -> list[torch.Tensor]:
    return [*Layout(mask, (rows, cols), capacity).flat]


def _fake_layout(mask, rows, cols, capacity):
    heads, grid = mask.shape[0] if mask.dim() == 3 else None, tuple(mask.shape[-2:])
    shapes = tensor_shapes(blocks_of((rows, cols), grid, heads, capacity))
    flat = [mask.new_empty((math.prod(shape),), dtype=torch.int32) for shape in shapes]
    return [*flat, mask.new_empty(sizes_shape(grid, heads), dtype=torch.int32)]


layout_of_mask = register(
    "blocksparse_layout",
    "(Tensor mask, int rows, int cols, SymInt capacity) -> Tensor[]",
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
    given = for_operator(parameters, a.device)
    return whole(a, b, [*tensors[:count]], layout_text, descriptor.text, *given, debug)


def _call(descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {PRODUCT.name: _call}

"""Scaled block-sparse products as operators of ``torch.library``, for whoever records calls and
runs them later. A layout goes in as its flat tensors and its form."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.families.blocksparse.scaled import operation, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.operation import PRODUCT, calls
from kernlib.runtime.arguments import check_names, refuse_recorded_out
from kernlib.runtime.operators import register
from kernlib.runtime.products import requires_gradient


def _operands(a, b, scale_a, scale_b, layout, layout_text: str) -> tuple:
    return Layout.from_layout(layout_text, layout), a, b, scale_a, scale_b


def _compute(*given):
    *tensors, descriptor, debug = given
    with events.on_stderr() if debug else nullcontext():
        return calls.execute(from_text(descriptor), _operands(*tensors), None, {})


def _fake(a, *rest):
    *tensors, descriptor, _ = rest
    made = from_text(descriptor)
    shape = operation.check_operands(made, _operands(a, *tensors))
    return a.new_empty(shape, dtype=getattr(torch, made.out_dtype))


def _recorded(*given):
    *tensors, descriptor, _ = given
    if not requires_gradient((), *tensors[:4]):
        return None
    return reference.scaled_matmul(from_text(descriptor), *_operands(*tensors))


whole = register(
    PRODUCT.name,
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor[] layout, str layout_text, "
    "str descriptor, bool debug) -> Tensor",
    _compute,
    _fake,
    recorded=_recorded,
)


def run(
    descriptor: BlockSparseScaledMatmul,
    *operands,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operator."""
    operation.check_kinds(descriptor, operands)
    check_names(descriptor, parameters)
    layout, *tensors = operands
    refuse_recorded_out(out, *tensors)
    y = _traced(descriptor.text, layout.form, debug, *tensors, *layout.flat)
    if out is None:
        return y
    operation.check_result(out, y.shape, y.dtype, y.device)
    return out.copy_(y)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _traced(text: str, layout_text: str, debug: bool, *tensors) -> torch.Tensor:
    inputs, layout = tensors[:4], [*tensors[4 : 4 + count_of(layout_text)]]
    operation.check_operands(from_text(text), _operands(*inputs, layout, layout_text))
    return whole(*inputs, layout, layout_text, text, debug)


def _call(descriptor, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {PRODUCT.name: _call}

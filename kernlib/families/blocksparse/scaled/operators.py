"""Scaled block-sparse products as operators of ``torch.library``, for whoever records calls and
runs them later. A layout goes in as its flat tensors and its form."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.kinds import LAYOUT
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.families.blocksparse.scaled import operation, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.operation import PRODUCT, calls
from kernlib.runtime.arguments import check_names, refuse_recorded_out
from kernlib.runtime.operators import register
from kernlib.runtime.schema import DESCRIPTOR, Schema


def _compute(a, b, scale_a, scale_b, layout, descriptor, debug: bool) -> torch.Tensor:
    return calls.execute(descriptor, (layout, a, b, scale_a, scale_b), None, {})


def _fake(a, b, scale_a, scale_b, layout, descriptor, debug: bool) -> torch.Tensor:
    shape = operation.check_operands(descriptor, (layout, a, b, scale_a, scale_b))
    return a.new_empty(shape, dtype=getattr(torch, descriptor.out_dtype))


def _recorded(a, b, scale_a, scale_b, layout, descriptor, debug: bool) -> torch.Tensor:
    return reference.scaled_matmul(descriptor, layout, a, b, scale_a, scale_b)


_TENSORS = "Tensor a", "Tensor b", "Tensor scale_a", "Tensor scale_b"
whole = register(
    PRODUCT.name,
    Schema(*_TENSORS, LAYOUT, DESCRIPTOR, "bool debug"),
    "Tensor",
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
    descriptor, inputs = from_text(text), tensors[:4]
    layout = Layout.from_layout(layout_text, tensors[4 : 4 + count_of(layout_text)])
    operation.check_operands(descriptor, (layout, *inputs))
    return whole(*inputs, layout, descriptor, debug)


def _call(descriptor, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {PRODUCT.name: _call}

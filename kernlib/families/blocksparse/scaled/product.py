"""The primitive: scaled products as they are given, without a record of gradients.

CPU tensors, calls inside transforms of torch.func and whatever the kernel does not take are
computed by the reference.
"""

from __future__ import annotations

import torch

from kernlib.families.blocksparse import checks as products_checks
from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.scaled import checks, plans, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.runtime import products
from kernlib.runtime.operation import KERNELS, REFERENCE
from kernlib.runtime.tensors import UNREADABLE, check_dense, is_wrapped, signature


def _key(descriptor: BlockSparseScaledMatmul, operands: tuple, out, parameters: dict):
    """All that a plan depends on: the descriptor, the layout's sizes and device, but nothing of its
    contents, then shapes, strides, dtypes, device and alignment. None where there can be no plan.
    """
    try:
        layout, a, b, scale_a, scale_b = operands
        if not isinstance(layout, Layout):  # whose own attributes may have these names
            products_checks.check_layout(layout)
        key = (descriptor.text, layout.key)
        for tensor in (a, b, scale_a, scale_b):
            key += signature(tensor)
        if out is not None:
            key += signature(out)
        if parameters:
            key += tuple(parameters)
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def way(call: products.Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """Plans are for CUDA tensors, torch computes all else and what is inside a transform of
    torch.func. Raises UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device):
        return REFERENCE
    return REFERENCE if any(map(is_wrapped, (*operands[1:], out))) else KERNELS


def _reference(descriptor, operands: tuple, parameters: dict) -> torch.Tensor:
    return reference.scaled_matmul(descriptor, *operands)


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    layout, a, b, *scales = operands
    return (a, b, *layout.tensors, *scales)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("a", "b", *(f"layout.{name}" for name in NAMES), *checks.NAMES)


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """As they are: what is quantised is not cast."""
    return operands, parameters


PRODUCT = products.Product(
    name="blocksparse_scaled",
    operators="kernlib.families.blocksparse.scaled.operators",
    key=_key,
    check=checks.check_call,
    way=way,
    plan=plans.plan,
    reference=_reference,
    tensors=_tensors,
    names=_names,
    check_operands=checks.check_kinds,
    cast=_cast,
)
calls = products.bind(PRODUCT)

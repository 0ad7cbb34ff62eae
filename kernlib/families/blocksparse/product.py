"""The primitive of the family: products as they are given, without autocast and without a record of
gradients.

CPU tensors, float64 and calls inside transforms of torch.func are computed by the reference.
"""

from __future__ import annotations

import torch

from kernlib.families.blocksparse import checks, plans, reference
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime import products
from kernlib.runtime.arguments import autocast, parameter_key
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import UNREADABLE, check_dense, is_wrapped, signature


def _key(descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor, the precision, the layout's sizes and device, but
    nothing of its contents, then shapes, strides, dtypes, device, alignment and kinds of numbers.
    None where there can be no plan."""
    try:
        permitted = float32_precision() if descriptor.precision is None else None
        layout, a, b = operands
        if not isinstance(layout, Layout):  # whose own attributes may have these names
            checks.check_layout(layout)
        key = (descriptor.text, permitted, layout.key, *signature(a), *signature(b))
        if out is not None:
            key += signature(out)
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def way(call: products.Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """Kernels compute on CUDA, torch all else and what is inside a transform of torch.func. Raises
    UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device) or call.dtype not in KERNEL_TYPES:
        return REFERENCE
    tensors = (*operands[1:], out, *parameters.values())
    return REFERENCE if any(map(is_wrapped, tensors)) else KERNELS


def _reference(descriptor: BlockSparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    return reference.blocksparse_matmul(descriptor, *operands, parameters)


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    layout, a, b = operands
    return (a, b, *layout.tensors)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("a", "b", *(f"layout.{name}" for name in plans.NAMES))


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    layout, a, b = operands
    (a, b), parameters = autocast((a, b), parameters)
    return (layout, a, b), parameters


PRODUCT = products.Product(
    name="blocksparse_matmul",
    operators="kernlib.families.blocksparse.operators",
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

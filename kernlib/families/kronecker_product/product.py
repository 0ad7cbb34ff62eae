"""The primitive of the family: products as they are given, without autocast and without a record of
gradients.

CPU tensors, factors too large for a kernel's shared memory, and calls inside transforms of
torch.func are computed by the reference.
"""

from __future__ import annotations

import torch

from kernlib.families.kronecker_product import checks, plans, reference
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.runtime import products
from kernlib.runtime.arguments import autocast, parameter_key
from kernlib.runtime.operation import KERNELS, REFERENCE
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import UNREADABLE, check_dense, is_wrapped, signature


def _key(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor; the precision of torch's own products, by which a
    plan may compute whatever the descriptor permits; then shapes, strides, dtypes, device,
    alignment and kinds of numbers. None where there can be no plan."""
    try:
        key = (descriptor.text, float32_precision())
        for operand in operands:
            key += signature(operand)
        if out is not None:
            key += (signature(out),)  # as one entry, lest it pass for an operand too many
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def way(call: products.Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """Who computes a call. Kernels compute what they take on CUDA; torch computes all else, and
    what is inside a transform of torch.func. Raises UnsupportedError for devices that have no
    backend."""
    if not products.is_on_gpu(call.device):
        return REFERENCE
    if any(map(is_wrapped, (*operands, out, *parameters.values()))):
        return REFERENCE
    return KERNELS if plans.takes(call, descriptor, operands) else REFERENCE


def _reference(descriptor: KroneckerProduct, operands: tuple, parameters: dict) -> torch.Tensor:
    x, *factors = operands
    return reference.kronecker_product(descriptor, x, tuple(factors), parameters)


PRODUCT = products.Product(
    name="kronecker_product",
    operators="kernlib.families.kronecker_product.operators",
    key=_key,
    check=checks.check_call,
    way=way,
    plan=plans.plan,
    reference=_reference,
    tensors=tuple,
    names=checks.names,
    check_operands=checks.check_kinds,
    cast=autocast,
)
calls = products.bind(PRODUCT)

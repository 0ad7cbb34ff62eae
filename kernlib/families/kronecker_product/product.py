"""The primitive of the family: products as they are given, without autocast and without a record of
gradients. PyTorch's own operators compute them, on CPUs and on GPUs."""

from __future__ import annotations

import torch

from kernlib.families.kronecker_product import checks, reference
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.runtime import products
from kernlib.runtime.arguments import autocast
from kernlib.runtime.operation import REFERENCE


def _way(call: products.Call, *request) -> str:
    """Torch computes all. Raises UnsupportedError for devices that have no backend."""
    products.is_on_gpu(call.device)
    return REFERENCE


def _reference(descriptor: KroneckerProduct, operands: tuple, parameters: dict) -> torch.Tensor:
    x, *factors = operands
    return reference.kronecker_product(descriptor, x, tuple(factors), parameters)


PRODUCT = products.Product(
    name="kronecker_product",
    operators="kernlib.families.kronecker_product.operators",
    key=lambda *request: None,  # no call has a plan
    check=checks.check_call,
    way=_way,
    plan=None,
    reference=_reference,
    tensors=tuple,
    names=checks.names,
    check_operands=checks.check_kinds,
    cast=autocast,
)
calls = products.bind(PRODUCT)

"""The primitives of the family: the product and the gradient of its weight, as they are given,
without autocast and without a record of gradients.

CPU tensors, float64 and calls inside transforms of torch.func are computed by the reference.
"""

from __future__ import annotations

import torch

from kernlib.families.kronecker_sparse import checks, plans, reference
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.runtime import devices, operation, products
from kernlib.runtime.arguments import autocast, no_autocast, parameter_key
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    check_dense,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
)

_FLOAT32 = torch.float32
_is_deterministic = torch._C._get_deterministic_algorithms
_OPERATORS = "kernlib.families.kronecker_sparse.operators"


# The product.


def _key(descriptor: KroneckerSparse, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: after the descriptor the precision or, with d = 1, torch's own
    settings, whose product a plan may be of, whatever the descriptor permits; then shapes, strides,
    dtypes, device, alignment and kinds of numbers. None where there can be no plan."""
    try:  # signature(x), signature(weight), in 0.2 us less
        x, weight = operands
        dtype, settings = x.dtype, None
        if dtype is _FLOAT32:
            if descriptor.d > 1:
                settings = descriptor.precision or float32_precision()
            else:
                settings = float32_precision(), _is_deterministic()
        key = (
            descriptor.text,  # which a str hashes once
            settings,
            x.shape, x.stride(), dtype, x.get_device(),
            p & 15 if (p := x.data_ptr()) >= LOWEST_ADDRESS else ~p, x.is_neg(),
            weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            p & 15 if (p := weight.data_ptr()) >= LOWEST_ADDRESS else ~p, weight.is_neg(),
        )  # fmt: skip
        if out is not None:
            key += signature(out)
        if parameters:
            for name, value in parameters.items():
                key += (name, parameter_key(value))
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense(("x", "weight"), x=operands[0], weight=operands[1], out=out)
        return None
    return key


def way(call: products.Call, *request) -> str:
    """Kernels compute their dtypes on CUDA, torch all else and what is inside a transform of
    torch.func. Raises UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device) or call.dtype not in KERNEL_TYPES:
        return REFERENCE
    return REFERENCE if any(map(_is_transformed, request)) else KERNELS


def _is_transformed(value) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, tuple)):
        return any(map(_is_transformed, parts))
    return is_wrapped(value)


def _reference(descriptor: KroneckerSparse, operands: tuple, parameters: dict) -> torch.Tensor:
    return reference.kronecker_sparse(descriptor, *operands, parameters)


PRODUCT = products.Product(
    name="kronecker_sparse",
    operators=_OPERATORS,
    key=_key,
    check=checks.check_call,
    way=way,
    plan=plans.plan,
    reference=_reference,
    tensors=tuple,
    names=lambda operands: ("x", "weight"),
    check_operands=checks.check_kinds,
    cast=autocast,
)
calls = products.bind(PRODUCT)


# The gradient of its weight.


def _gradient_key(grad, x, pattern: tuple, batch_last: bool, precision: str | None):
    try:
        precision = plans.precision_of(precision, x)
        return pattern, batch_last, precision, signature(grad), signature(x)
    except (AttributeError, RuntimeError, NotImplementedError):  # as in _key
        return None


def _check_gradient(grad, x, pattern, batch_last: bool, precision) -> products.Call:
    checks.check_gradient(grad, x, pattern, batch_last)
    return products.Call(0, pattern, x.dtype, x.device)


def _gradient_reference(call, grad, x, pattern, batch_last: bool, precision) -> torch.Tensor:
    with no_autocast(x):
        return reference.weight_gradient(pattern, grad, x, batch_last, precision)


def _launch_gradient(plan: plans.GradientPlan, grad, x, *options) -> torch.Tensor:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch_gradient(plan, grad, x, *options)
    addresses, kept = plan.place((grad, x))
    out = plan.result()
    plan.launch([*addresses, out.data_ptr()])
    del kept  # the stream orders the reuse of its memory behind the launch
    return out


def _materialised(grad, x, *options) -> tuple | None:
    if not (is_lazy(grad) or is_lazy(x)):
        return None
    return materialised(grad), materialised(x), *options


GRADIENT = Operation(
    name="kronecker_sparse_weight_gradient",
    operators=_OPERATORS,
    key=_gradient_key,
    check=_check_gradient,
    way=way,
    reference=_gradient_reference,
    plan=plans.gradient_plan,
    launch=_launch_gradient,
    tensors=lambda *request: request,
    materialised=_materialised,
    rehearsed=lambda plan, *request: plan.result(),
)
_gradients = operation.bind(GRADIENT)


def weight_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    pattern: tuple[int, int, int, int],
    batch_last: bool = False,
    precision: str | None = None,
) -> torch.Tensor:
    """``dW[i,j,k,l] = sum_n grad[n,(i,j,l)] * x[n,(i,k,l)]``, contiguous (a, b, c, d): the gradient
    of a product (without its epilogue) with respect to its weight. The sums are float32 for half
    types. Nothing is recorded. Raises ValueError and TypeError that name the argument."""
    return _gradients.execute(grad, x, pattern, batch_last, precision)

"""Gradients of Kronecker products in eager calls on GPUs.

The gradient by x of ``y = x (F1 ⊗ ... ⊗ FN)`` is a product with the transposed factors, by the same
kernels. Where gradients by factors are asked for, other kernels compute these and the one by x.
They compute what they need from x again: nothing but x and the factors is kept between forward and
backward. Torch computes gradients of gradients, and gradients by factors that kernels do not hold.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_product import backward
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.runtime import autograd, operation, products
from kernlib.runtime.autograd import Parts, Recording, is_biased, is_watched, recorder


@lru_cache(maxsize=1024)
def parts(descriptor: KroneckerProduct) -> Parts:
    """The parts of a call whose gradient is recorded."""
    made = descriptor.replace(epilogue=(Bias(),) if is_biased(descriptor) else ())
    return autograd.parts(descriptor, made, descriptor.axis)


@lru_cache(maxsize=1024)
def adjoint(descriptor: KroneckerProduct) -> KroneckerProduct:
    """The product that takes the gradient of a result to that of x, with the same factors."""
    return descriptor.replace(
        shapes=tuple(shape[::-1] for shape in descriptor.shapes),
        transposed=tuple(not turned for turned in descriptor.transposed),
        epilogue=(),
    )


@lru_cache(maxsize=1024)
def _plain(descriptor: KroneckerProduct) -> KroneckerProduct:
    return descriptor.replace(epilogue=())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, plan, bias, *operands):
        ctx.descriptor = descriptor
        ctx.save_for_backward(*operands)
        request = descriptor, operands, None, {} if bias is None else {"bias": bias}
        return calls.execute(*request) if plan is None else calls.launch(plan, *request)

    @staticmethod
    def backward(ctx, grad):
        _, _, of_bias, *needs = ctx.needs_input_grad
        to_bias = None
        if of_bias:
            features = grad.movedim(ctx.descriptor.axis, -1)
            to_bias = features.reshape(-1, features.shape[-1]).sum(0)
        found = _gradients(_plain(ctx.descriptor), grad, ctx.saved_tensors, needs)
        return None, None, to_bias, *found


def _gradients(descriptor: KroneckerProduct, grad: torch.Tensor, operands: tuple, needs: list):
    """The gradients by x and by the factors; None for those that are not needed."""
    if is_watched(grad) or torch.is_grad_enabled():
        return _by_torch(descriptor, grad, operands, needs)
    if not any(needs[1:]):
        return apart(descriptor, grad, operands, tuple(needs))
    found = _all_gradients.execute(descriptor, grad, operands, tuple(needs))
    return [t if need else None for t, need in zip(found, needs, strict=True)]


def apart(descriptor: KroneckerProduct, grad: torch.Tensor, operands: tuple, needs: tuple) -> list:
    """The gradients that are needed, None for others: the one by x by the product that it is, those
    by factors by torch."""
    found = _by_torch(descriptor, grad, operands, [False, *needs[1:]])
    if needs[0]:
        x, *factors = operands
        made = calls.execute(adjoint(descriptor), (grad, *factors), None, {})
        found[0] = made.sum_to_size(x.shape)
    return found


_all_gradients = operation.bind(backward.operation(apart))


def _by_torch(descriptor: KroneckerProduct, grad, operands: tuple, needs: list) -> list:
    if not any(needs):
        return [None] * len(needs)
    recorded = torch.is_grad_enabled()
    pairs = list(zip(operands, needs, strict=True))
    with torch.enable_grad():
        if recorded:  # by aliases, as two of the arguments may be the same tensor
            own = [t.view_as(t) if need else t for t, need in pairs]
        else:
            own = [t.detach().requires_grad_(need) for t, need in pairs]
        y = products.by_reference(PRODUCT, descriptor, tuple(own), None, {})
        wanted = [t for t, need in zip(own, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=recorded))
    return [next(found) if need else None for need in needs]


def _apply(descriptor: KroneckerProduct, operands: tuple, bias, plan) -> torch.Tensor:
    return _Product.apply(descriptor, plan, bias, *operands)


RECORDING = Recording(parts, _apply)
recorded = recorder(PRODUCT, calls, RECORDING)

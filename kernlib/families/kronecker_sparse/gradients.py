"""Gradients of the Kronecker-sparse op: their formulas, stated here alone, and eager calls that
record them.

The product ``y = K(weight) x``, its gradient with respect to x, which is a product again, and that
with respect to the weight are trilinear in (grad, x, weight): the gradient of each is the other
two, to any order.

Eager calls are recorded by functions of ``torch.autograd``: forward and backward then take 75 us of
a host that takes 175 by the operators of ``torch.library``, which are for whoever must see them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_sparse import product as primitives
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.families.kronecker_sparse.product import PRODUCT, calls
from kernlib.runtime import autograd
from kernlib.runtime.autograd import Parts, Recording, is_biased, is_watched, recorder
from kernlib.runtime.operation import operators_of


@lru_cache(maxsize=1024)
def parts(descriptor: KroneckerSparse) -> Parts:
    """What a call with a gradient consists of."""
    last = descriptor.batch_last
    made = _linear(descriptor.pattern, last, descriptor.precision, is_biased(descriptor))
    return autograd.parts(descriptor, made, 0 if last else -1)


@lru_cache(maxsize=1024)
def _linear(pattern: tuple, batch_last: bool, precision: str | None, bias: bool) -> KroneckerSparse:
    """The product with one factor, with or without a bias."""
    epilogue = (Bias(),) if bias else ()
    return KroneckerSparse(*pattern, batch_last=batch_last, epilogue=epilogue, precision=precision)


# Both computations, without a record. Those of the operators and those that are recorded have the
# same arguments.


def product(
    x, weight, bias, batch_last: bool, precision: str | None, debug: bool = False
) -> torch.Tensor:
    """``K(weight) x + bias``, ``bias`` or None."""
    descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
    return calls.execute(descriptor, (x, weight), None, {} if bias is None else {"bias": bias})


def weight_gradient(
    grad, x, pattern, batch_last: bool, precision: str | None, debug: bool = False
) -> torch.Tensor:
    """The gradient of ``K(weight) x`` with respect to a weight of shape ``pattern``."""
    return primitives.weight_gradient(grad, x, tuple(pattern), batch_last, precision)


# The formulas, for a product and a gradient of the weight by either way. ``options`` are
# batch_last, precision and debug.


def product_gradients(
    grad, x, weight, pattern, needs: tuple, options: tuple, product, weight_gradient
) -> tuple:
    """Those with respect to x, weight and bias, None where there is no need. So x may be None
    without need of the weight's, and weight without need of x's."""
    to_x = to_weight = to_bias = None
    if needs[0]:
        to_x = product(grad, weight.transpose(1, 2), None, *options)
    if needs[1]:
        to_weight = weight_gradient(grad, x, pattern, *options)
    if needs[2]:
        features = grad.shape[0 if options[0] else -1]
        flat = grad.reshape(features, -1).mT if options[0] else grad.reshape(-1, features)
        to_bias = flat.sum(0)
    return to_x, to_weight, to_bias


def weight_gradient_gradients(
    to_weight, grad, x, needs: tuple, options: tuple, product: Callable
) -> tuple:
    """Those with respect to grad and x, for ``to_weight``, which stands where the weight would: a
    product with it, and with its transpose."""
    to_grad = to_x = None
    if needs[0]:
        to_grad = product(x, to_weight, None, *options)
    if needs[1]:
        to_x = product(grad, to_weight.transpose(1, 2), None, *options)
    return to_grad, to_x


# Eager calls.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, descriptor, plan):
        needs = ctx.needs_input_grad
        ctx.pattern, ctx.options = weight.shape, (descriptor.batch_last, descriptor.precision)
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        parameters = {} if bias is None else {"bias": bias}
        if plan is None:
            return calls.execute(descriptor, (x, weight), None, parameters)
        return calls.launch(plan, descriptor, (x, weight), None, parameters)

    @staticmethod
    def backward(ctx, grad):
        options = *ctx.options, False
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        ways = _ways(grad)
        return *product_gradients(grad, *saved, ctx.pattern, needs, options, *ways), None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, x, pattern, *options):
        needs, ctx.options = ctx.needs_input_grad, options
        ctx.save_for_backward(grad if needs[1] else None, x if needs[0] else None)
        return weight_gradient(grad, x, pattern, *options)

    @staticmethod
    def backward(ctx, to_weight):
        product, _ = _ways(to_weight)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        grads = weight_gradient_gradients(to_weight, *saved, needs, ctx.options, product)
        return *grads, None, None, None, None


def _recorded_product(x, weight, bias, batch_last, precision, debug):
    descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
    return _Product.apply(x, weight, bias, descriptor, None)


def _ways(grad: torch.Tensor) -> tuple[Callable, Callable]:
    """What a backward pass computes products and gradients of weights by: the operators where
    somebody must see them, functions that record where a gradient of them may be asked for, else
    nothing but the kernels."""
    if is_watched(grad):
        operators = operators_of(PRODUCT)
        return operators.product, operators.weight_gradient
    if torch.is_grad_enabled():
        return _recorded_product, _WeightGradient.apply
    return product, weight_gradient


def _apply(descriptor: KroneckerSparse, operands: tuple, bias, plan) -> torch.Tensor:
    return _Product.apply(*operands, bias, descriptor, plan)


RECORDING = Recording(parts, _apply)
recorded = recorder(PRODUCT, calls, RECORDING)

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

from kernlib import events
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


def product(x, weight, bias, batch_last: bool, precision: str | None, debug: bool) -> torch.Tensor:
    """``K(weight) x + bias``, ``bias`` or None."""
    if debug:
        with events.on_stderr():
            return product(x, weight, bias, batch_last, precision, False)
    descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
    return calls.execute(descriptor, (x, weight), None, {} if bias is None else {"bias": bias})


def weight_gradient(
    grad, x, pattern, batch_last: bool, precision: str | None, debug: bool
) -> torch.Tensor:
    """The gradient of ``K(weight) x`` with respect to a weight of shape ``pattern``."""
    if debug:
        with events.on_stderr():
            return weight_gradient(grad, x, pattern, batch_last, precision, False)
    return primitives.weight_gradient(grad, x, tuple(pattern), batch_last, precision)


# The formulas, for a product and a gradient of the weight by either way.


def save_product(ctx, x, weight, options: tuple) -> None:
    """Keep what :func:`product_gradients` needs. ``options`` are batch_last, precision, debug."""
    needs = ctx.needs_input_grad
    ctx.pattern, ctx.options = tuple(weight.shape), options
    ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)


def product_gradients(ctx, grad, product: Callable, weight_gradient: Callable) -> tuple:
    """Those with respect to x, weight and bias, None where there is no need."""
    x, weight = ctx.saved_tensors
    needs, batch_last = ctx.needs_input_grad, ctx.options[0]
    to_x = to_weight = to_bias = None
    if needs[0]:
        to_x = product(grad, weight.transpose(1, 2), None, *ctx.options)
    if needs[1]:
        to_weight = weight_gradient(grad, x, ctx.pattern, *ctx.options)
    if needs[2]:
        features = grad.shape[0 if batch_last else -1]
        flat = grad.reshape(features, -1).mT if batch_last else grad.reshape(-1, features)
        to_bias = flat.sum(0)
    return to_x, to_weight, to_bias


def save_weight_gradient(ctx, grad, x, options: tuple) -> None:
    """Keep what :func:`weight_gradient_gradients` needs."""
    needs = ctx.needs_input_grad
    ctx.options = options
    ctx.save_for_backward(grad if needs[1] else None, x if needs[0] else None)


def weight_gradient_gradients(ctx, to_weight, product: Callable) -> tuple:
    """Those with respect to grad and x, for ``to_weight``, which stands where the weight would: a
    product with it, and with its transpose."""
    grad, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_grad = to_x = None
    if needs[0]:
        to_grad = product(x, to_weight, None, *ctx.options)
    if needs[1]:
        to_x = product(grad, to_weight.transpose(1, 2), None, *ctx.options)
    return to_grad, to_x


# Eager calls.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, descriptor, plan):
        save_product(ctx, x, weight, (descriptor.batch_last, descriptor.precision, False))
        parameters = {} if bias is None else {"bias": bias}
        if plan is None:
            return calls.execute(descriptor, (x, weight), None, parameters)
        return calls.launch(plan, descriptor, (x, weight), None, parameters)

    @staticmethod
    def backward(ctx, grad):
        return *product_gradients(ctx, grad, *_ways(grad)), None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, x, pattern, *options):
        save_weight_gradient(ctx, grad, x, options)
        return weight_gradient(grad, x, pattern, *options)

    @staticmethod
    def backward(ctx, to_weight):
        product, _ = _ways(to_weight)
        return *weight_gradient_gradients(ctx, to_weight, product), None, None, None, None


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

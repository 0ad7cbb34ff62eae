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
from kernlib.families.kronecker_sparse import operation
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.runtime import autograd
from kernlib.runtime.autograd import ORDINARY, Parts, is_biased, is_watched
from kernlib.runtime.tensors import stand_ins


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
    return operation.execute(descriptor, x, weight, None, {} if bias is None else {"bias": bias})


def weight_gradient(
    grad, x, pattern, batch_last: bool, precision: str | None, debug: bool
) -> torch.Tensor:
    """The gradient of ``K(weight) x`` with respect to a weight of shape ``pattern``."""
    if debug:
        with events.on_stderr():
            return weight_gradient(grad, x, pattern, batch_last, precision, False)
    return operation.weight_gradient(grad, x, tuple(pattern), batch_last, precision)


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


def recorded(descriptor: KroneckerSparse, x, weight, parameters: dict) -> torch.Tensor:
    """A checked call whose gradient is recorded, outside of transforms of torch.func."""
    made = parts(descriptor)
    bias = made.operands(parameters).get("bias")
    return made.finish(_Product.apply(x, weight, bias, made.product, None), parameters)


def known(descriptor: KroneckerSparse, x, weight, parameters: dict) -> torch.Tensor | None:
    """:func:`recorded` of a call that needs no check, since the plan of its product is kept and the
    rest of it has no parameters; else None."""
    made = parts(descriptor)
    if made.names or parameters.keys() != made.needed:
        return None
    if not (type(x) in ORDINARY and type(weight) in ORDINARY) and stand_ins(x, weight):
        return None
    operands = made.operands(parameters)
    plan = operation.find_plan(made.product, x, weight, None, operands)
    if plan is None:
        return None
    y = _Product.apply(x, weight, operands.get("bias"), made.product, plan)
    return made.finish(y, parameters)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, descriptor, plan):
        save_product(ctx, x, weight, (descriptor.batch_last, descriptor.precision, False))
        parameters = {} if bias is None else {"bias": bias}
        if plan is None:
            return operation.execute(descriptor, x, weight, None, parameters)
        return operation.by_plan(plan, descriptor, x, weight, None, parameters)

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
        from kernlib.families.kronecker_sparse import operators

        return operators.product, operators.weight_gradient
    if torch.is_grad_enabled():
        return _recorded_product, _WeightGradient.apply
    return product, weight_gradient

"""Chains of Kronecker-sparse factors as they are called: ``h_0 = x``, ``h_i = K(W_i) h_{i-1}``.

A chain is a call for each factor or, where :mod:`fused` takes it, one for both. What these launch
is decided at the first call of a signature and kept as a :class:`Route`, by which a gradient is one
step of autograd, however many factors there are (:mod:`gradient`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.kronecker_sparse import operation
from kernlib.families.kronecker_sparse.chain import fused, gradient, master_weights
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.operation import (
    calls,
    check_kinds,
    run_factor,
    settings_of,
)
from kernlib.runtime import early, products, rehearsal
from kernlib.runtime.arguments import autocast, check_names, parameter_key
from kernlib.runtime.autograd import Parts, are_here, bias_gradient, is_watched
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.products import ProductPlan, requires_gradient
from kernlib.runtime.tensors import UNREADABLE, refuse_any_overlap, signature

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

__all__ = ["RUNS", "planned", "run", "variants"]


class Route(NamedTuple):
    """What a chain of one signature launches."""

    factors: tuple[KroneckerSparse, ...]  # if a gradient is recorded, without the last epilogues
    plans: tuple[ProductPlan, ...]  # one for each factor, or one for all; none at a first call
    parts: Parts | None  # of the last factor if a gradient is recorded
    options: tuple | None  # of all products then, as :func:`options_of` returns them
    keeps_h: bool = True  # for the gradient
    chain: KroneckerSparseChain | None = None  # of ``factors``, if a recorded one is one kernel
    rounds: bool = False  # whether master weights are rounded before the plans


_routes = PlanCache()


def run(chain: KroneckerSparseChain, *operands, out=None, **parameters) -> torch.Tensor:
    """The factors one after the other, or two of them at once: x and a weight for each."""
    is_recorded = masters = False
    has_key = out is None and forward_ad._current_level < 0
    if has_key:
        is_recorded = torch.is_grad_enabled() and requires_gradient(parameters.values(), *operands)
        has_key = not (is_recorded and _are_functorch_transforms_active())
    if torch._C._is_any_autocast_enabled():
        check_kinds(chain, operands)
        if out is not None:  # before casts, which would hide it
            _refuse_overlap(out, operands, parameters)
        if has_key:
            operands, parameters, masters = master_weights.autocast(chain, operands, parameters)
        else:
            operands, parameters = autocast(operands, parameters)
    key = _key(is_recorded, masters, chain, operands, parameters) if has_key else None
    route = None if key is None else _routes.find(key)
    if route is not None and are_here(operands):
        return _by_route(route, operands, parameters)
    check_kinds(chain, operands)
    check_names(chain, parameters)
    if key is not None and fused.may_take(chain, operands, masters):
        if is_recorded and options_of(chain) is not None:
            if fused.is_sound(chain, operands, parameters, masters):
                return _first_recorded(key, chain, operands, parameters)
        elif not is_recorded and _takes(chain, operands, parameters, masters):
            return _fused(key, chain, operands, parameters)
    if masters:
        operands, parameters = master_weights.rounded(operands, parameters)
    return _first_by_factor(key, chain, operands, out, parameters)


def _first_by_factor(key: tuple | None, chain, operands: tuple, out, parameters: dict):
    """A call for each factor that checks it; what they launch is the route of the key."""
    x, *weights = operands
    if out is not None:  # whose own factor sees neither x nor what belongs to the others
        _refuse_overlap(out, operands, parameters)
    request = chain, x, tuple(weights), out, parameters
    # A thread has none of the autocast that this one has: each factor then begins its own.
    by_factor = torch._C._is_any_autocast_enabled()
    hidden = _by_factor(*request) if by_factor else early.first(_by_factor, *request)
    if key is not None and products.is_on_gpu(x.device):
        _keep(key, chain, hidden, weights, parameters)
    return hidden[-1]


def _refuse_overlap(out, operands: tuple, parameters: dict) -> None:
    x, *weights = operands
    named = {f"weights[{index}]": weight for index, weight in enumerate(weights)}
    refuse_any_overlap(out, x=x, **named, **parameters)


def _on_meta(chain, operands: tuple, out, parameters: dict) -> torch.Tensor:
    if master_weights.are_there(operands):
        return of_masters(chain, operands, parameters)
    return run(chain, *operands, out=out, **parameters)


fused_calls = products.bind(fused.PRODUCT, _on_meta)


def _takes(chain, operands: tuple, parameters: dict, masters: bool) -> bool:
    """Whether one kernel computes a call. Open recordings note the call in either case: it may take
    another number of kernels on other GPUs."""
    if rehearsal.recorders and operands[0].device.type == "cuda":
        request = chain, operands, None, parameters
        rehearsal.note_call(_on_meta, request, operands[0].get_device())
    return fused.takes(chain, operands, parameters, masters)


def of_masters(chain, operands: tuple, parameters: dict) -> torch.Tensor:
    """:func:`run` with master weights as autocast leaves them, nothing recorded."""
    key = _key(False, True, chain, operands, parameters)
    route = _routes.find(key)
    if route is not None:
        return _by_route(route, operands, parameters)
    if key is not None and _takes(chain, operands, parameters, True):
        return _fused(key, chain, operands, parameters)
    operands, parameters = master_weights.rounded(operands, parameters)
    return _first_by_factor(key, chain, operands, None, parameters)


def _fused(key: tuple, chain, operands: tuple, parameters: dict) -> torch.Tensor:
    """The first call of its signature that one kernel computes."""
    y = early.first(fused_calls.execute, chain, operands, None, parameters)
    plan = fused_calls.find(chain, operands, None, parameters)
    if plan is not None:
        _routes.keep(key, Route(chain.factors[-1:], (plan,), None, None))
    return y


@lru_cache(maxsize=1024)
def parts(chain: KroneckerSparseChain) -> Parts:
    """The parts of a call with a gradient: the product is a chain."""
    *before, last = chain.factors
    of_last = operation.parts(last)
    return of_last._replace(product=KroneckerSparseChain((*before, of_last.product)))


def _first_recorded(key: tuple, chain, operands: tuple, parameters: dict) -> torch.Tensor:
    """The first call of its signature of a chain that keeps no h."""
    of_chain = parts(chain)
    linear, values = of_chain.product, of_chain.operands(parameters)
    masters = master_weights.are_there(operands)
    is_fused = _takes(linear, operands, values, masters)
    of_factors = linear.factors, (), of_chain, options_of(chain), False
    route = Route(*of_factors, linear if is_fused else None, masters and not is_fused)
    y = early.first(_by_route, route, operands, parameters)
    rest = [parameters[name] for name in of_chain.names]
    if all(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in rest):
        plans = _plans(route, operands, values)
        if None not in plans:
            _routes.keep(key, route._replace(plans=plans))
    return y


def _plans(route: Route, operands: tuple, values: dict) -> tuple[ProductPlan | None, ...]:
    """The plans of a recorded call after it ran."""
    if route.chain is not None:
        return (fused_calls.find(route.chain, operands, None, values),)
    operands, values = master_weights.stand_ins(operands, values)
    plans, (h, *weights) = [], operands
    for factor, weight in zip(route.factors, weights, strict=True):
        those = {name: values[name] for name in factor.parameters}
        plans.append(calls.find(factor, (h, weight), None, those))
        h = h.new_empty((*h.shape[:-1], factor.out_features))
    return tuple(plans)


RUNS = {KroneckerSparseChain: run}


def _by_factor(chain, x, weights: tuple, out, parameters: dict) -> list[torch.Tensor]:
    """x and the results of all factors, of calls that check them."""
    hidden, last = [x], len(weights) - 1
    for index, (factor, weight) in enumerate(zip(chain.factors, weights, strict=True)):
        values = {name: parameters[name] for name in factor.parameters}
        target = out if index == last else None
        hidden.append(run_factor(factor, hidden[-1], weight, out=target, **values))
    return hidden


def _key(
    is_recorded: bool, masters: bool, chain, operands: tuple, parameters: dict
) -> tuple | None:
    try:
        key = is_recorded, masters, chain.text, settings_of(operands[0]), *map(signature, operands)
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except (*UNREADABLE, IndexError):
        return None
    return key


def _keep(key: tuple, chain, hidden: list, weights: list, parameters: dict) -> None:
    """Keep the route of a call that had no error, if kernels computed it and nothing of the next
    call is left to check."""
    factors, parts, arguments, options = chain.factors, None, parameters, options_of(chain)
    if key[0]:
        if options is None:
            return
        *before, last = factors
        parts = operation.parts(last)
        rest = [parameters[name] for name in parts.names]
        if any(not isinstance(t, torch.Tensor) or t.device.type == "cpu" for t in rest):
            return
        factors = (*before, parts.product)
        arguments = parts.operands(parameters)
    plans = []
    for factor, x, weight in zip(factors, hidden[:-1], weights, strict=True):
        values = {name: arguments[name] for name in factor.parameters}
        plans.append(calls.find(factor, (x, weight), None, values))
    if None not in plans:
        _routes.keep(key, Route(factors, tuple(plans), parts, options, rounds=key[1]))


def options_of(chain: KroneckerSparseChain) -> tuple[bool, str | None, bool] | None:
    """``batch_last``, ``precision`` and ``debug`` of the products of a chain whose gradient is one
    step. None for a chain that has epilogues before its end, which gradients pass through, or
    several precisions."""
    *before, last = chain.factors
    if any(factor.epilogue or factor.precision != last.precision for factor in before):
        return None
    return last.batch_last, last.precision, False


def _by_route(route: Route, operands: tuple, parameters: dict) -> torch.Tensor:
    if route.rounds and route.keeps_h:
        operands, parameters = master_weights.rounded(operands, parameters)
    x, *weights = operands
    parts = route.parts
    if parts is not None:
        bias = None if parts.bias is None else parameters[parts.bias]
        return parts.finish(_Chain.apply(route, x, bias, *weights), parameters)
    if len(route.plans) < len(weights):
        (plan,), (last,) = route.plans, route.factors
        return calls.launch(plan, last, operands, None, parameters)
    for plan, factor, weight in zip(route.plans, route.factors, weights, strict=True):
        values = {name: parameters[name] for name in factor.parameters} if parameters else {}
        x = calls.launch(plan, factor, (x, weight), None, values)
    return x


# Ahead of calls.


def planned(chain: KroneckerSparseChain, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan: the whole chain, or the product of each factor. Raises
    TypeError for tensors that are too few or too many."""
    from kernlib.runtime.ahead import planned_product

    if arguments.get("out") is None:
        parameters = {name: value for name, value in arguments.items() if name != "out"}
        check_kinds(chain, tensors)
        check_names(chain, parameters)
        cast, values, masters = master_weights.autocast(chain, tensors, parameters)
        is_recorded = torch.is_grad_enabled() and requires_gradient(values.values(), *cast)
        linear, of_linear = chain, values
        if is_recorded and fused.may_take(chain, cast, masters):
            linear, of_linear = parts(chain).product, parts(chain).operands(values)
        if fused.takes(linear, cast, of_linear, masters):
            return [planned_product(fused.PRODUCT, fused_calls, parts, chain, cast, values)]
    return operation.planned(chain, tensors, arguments)


def variants(chain: KroneckerSparseChain, arch: str, dtypes: tuple) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a chain, its gradient included, and inputs of
    ``dtypes``. Raises KeyError for dtypes that kernels do not have."""
    specs = dict.fromkeys(operation.variants(chain, arch, dtypes))
    for form in (chain, parts(chain).product):
        specs |= dict.fromkeys(fused.variants(form, arch, dtypes))
    return list(specs | dict.fromkeys(gradient.variants(chain, arch, dtypes)))


# Recorded calls.


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, route, x, bias, *weights):
        _, by_x, _, *by_weights = ctx.needs_input_grad
        ctx.route, hidden, h = route, [], x
        if not route.keeps_h:
            is_needed = by_x or any(by_weights)  # else the bias alone has a gradient
            saved = weights if is_needed else [None] * len(weights)
            ctx.save_for_backward(x if any(by_weights) else None, *saved)
            return _product(route, x, bias, weights)
        for index, (plan, factor) in enumerate(zip(route.plans, route.factors, strict=True)):
            hidden.append(h if by_weights[index] else None)
            values = {"bias": bias} if factor.epilogue else {}
            h = calls.launch(plan, factor, (h, weights[index]), None, values)
        if by_x and any(by_weights):  # whose gradients have derivatives by x
            hidden[0] = x
        ctx.save_for_backward(*hidden, *weights)
        return h

    @staticmethod
    def backward(ctx, grad):
        route, saved = ctx.route, ctx.saved_tensors
        _, by_x, by_bias, *by_weights = ctx.needs_input_grad
        if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
            grad = grad.contiguous()
        count, needs = len(saved) - len(by_weights), (by_x, *by_weights, by_bias)
        request = grad, saved[:count], saved[count:], needs, route.options
        if is_watched(grad):
            grads = gradient.gradients(*request, *operation.ways(grad))
        elif torch.is_grad_enabled():
            grads = _recorded(route, *request[:-1])
        else:
            grads = gradient.by_plans(*request, route)
        to_x, *to_weights, to_bias = grads
        return None, to_x, to_bias, *to_weights


def _product(route: Route, x, bias, weights: tuple) -> torch.Tensor:
    """The result of a chain that keeps no h, by its plans unless it is the first call."""
    h, values = x, {} if bias is None else {"bias": bias}
    if route.chain is not None:
        if not route.plans:
            return fused_calls.execute(route.chain, (x, *weights), None, values)
        (plan,), last = route.plans, route.factors[-1]
        return calls.launch(plan, last, (x, *weights), None, values)
    if route.rounds:
        (_, *weights), values = master_weights.rounded((x, *weights), values)
    for index, (factor, weight) in enumerate(zip(route.factors, weights, strict=True)):
        request = factor, (h, weight), None, values if factor.epilogue else {}
        h = calls.launch(route.plans[index], *request) if route.plans else calls.execute(*request)
    return h


def results(x, weights, bias, options: tuple, product: Callable, *_) -> list[torch.Tensor]:
    """h_1 to h_n, the last with the bias, by ``product`` of a factor."""
    hidden = [x]
    for index, weight in enumerate(weights, 1 - len(weights)):
        hidden.append(product(hidden[-1], weight, None if index else bias, *options))
    return hidden[1:]


def results_by_plans(x, weights, bias, options: tuple) -> list[torch.Tensor]:
    """:func:`results` by the kernels alone."""
    of_bias = None if bias is None else signature(bias)
    key = "results", settings_of(x), options, of_bias, *map(signature, (x, *weights))
    return operation.by_plans(None, key, partial(results, x, weights, bias, options))


def _recorded(route: Route, grad, hidden, weights, needs: tuple) -> list:
    """The gradients, recorded: of the chain computed again, from the first h that was saved."""
    first = next((index for index, h in enumerate(hidden) if h is not None), None)
    if first is None:  # by x alone
        ways = operation.ways(grad)
        return gradient.gradients(grad, hidden, weights, needs, route.options, *ways)
    *needs, by_bias = needs
    by_x, *by_weights = needs
    with torch.enable_grad():  # by aliases, as two of the arguments may be one tensor
        h = hidden[first].view_as(hidden[first]) if by_x else hidden[first].detach()
        leaves = [
            h,
            *(t.view_as(t) if need else t for t, need in zip(weights, by_weights, strict=True)),
        ]
        for weight in leaves[first + 1 :]:
            h = operation.recorded_product(h, weight.to(h.dtype), None, *route.options)
        inputs = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(h, inputs, grad, create_graph=True))
    to_bias = bias_gradient(grad, -grad.dim() if route.options[0] else -1) if by_bias else None
    return [*(next(grads) if need else None for need in needs), to_bias]

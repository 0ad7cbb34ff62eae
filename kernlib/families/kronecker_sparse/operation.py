"""Products with Kronecker-sparse factors, of support ``I_a ⊗ 1_{b×c} ⊗ I_d``: checks of a call, the
choice between kernels and torch, gradients, and the call itself.

The product ``y = K(weight) x``, its gradient with respect to x, which is a product again, and that
with respect to the weight are trilinear in (grad, x, weight): the gradient of each is the other
two, to any order. Their formulas are stated here alone, for eager calls and for operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_sparse import plans, reference
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.runtime import autograd, devices, operation, products
from kernlib.runtime.arguments import (
    autocast,
    check_names,
    check_out,
    check_parameters,
    check_same_kind,
    no_autocast,
    parameter_key,
)
from kernlib.runtime.autograd import (
    Parts,
    Recording,
    bias_gradient,
    is_biased,
    is_watched,
    recorder,
)
from kernlib.runtime.dtypes import FLOAT_TYPES, KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation, operators_of
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import float32_precision, kernel_precision
from kernlib.runtime.products import Call, front_door
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    check_dense,
    check_memory,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

_FLOAT32 = torch.float32
_is_deterministic = torch._C._get_deterministic_algorithms
_OPERATORS = "kernlib.families.kronecker_sparse.operators"


# Checks.


def check_call(descriptor: KroneckerSparse, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    x, weight = operands
    check_dense(("x", "weight"), x=x, weight=weight, out=out)
    shape = check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    check_parameters(descriptor, descriptor.out_features, parameters, x, True, FLOAT_TYPES)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape) // descriptor.out_features, shape, x.dtype, x.device)


def check_kinds(descriptor: KroneckerSparse | KroneckerSparseChain, operands: tuple) -> None:
    """An x and one weight a factor. Raises TypeError."""
    count = len(descriptor.factors)
    if len(operands) != 1 + count:
        expected = "one weight" if count == 1 else f"{count} weights, one a factor in its order"
        count_text = f"got {len(operands) - 1}" if operands else "got neither"
        raise TypeError(f"{descriptor.describe()} takes x and {expected}, {count_text}")


def check_operands(pattern: tuple, batch_last: bool, x, weight) -> tuple[int, ...]:
    """The output's shape. Raises ValueError and TypeError; sizes may be symbols."""
    check_same_kind("x", x, "weight", weight, FLOAT_TYPES)
    if tuple(weight.shape) != tuple(pattern):
        raise ValueError(
            f"weight must have shape {tuple(pattern)}, the pattern, got {tuple(weight.shape)}"
        )
    a, b, c, d = pattern
    if x.dim() == 0 or x.shape[0 if batch_last else -1] != a * c * d:
        expected = f"({a * c * d}, ...)" if batch_last else f"(..., {a * c * d})"
        raise ValueError(
            f"x must be {expected} for the pattern {tuple(pattern)}, got shape {tuple(x.shape)}"
        )
    return (a * b * d, *x.shape[1:]) if batch_last else (*x.shape[:-1], a * b * d)


def check_gradient(grad, x, pattern: tuple[int, ...], batch_last: bool) -> None:
    """The operands of a weight's gradient fit its pattern and each other. Raises ValueError and
    TypeError; sizes of the batch may be symbols."""
    check_dense(("grad", "x"), grad=grad, x=x)
    check_same_kind("x", x, "grad", grad, FLOAT_TYPES)
    a, b, c, d = pattern
    axis = 0 if batch_last else -1
    for name, tensor, features in (("grad", grad, a * b * d), ("x", x, a * c * d)):
        if tensor.dim() == 0 or tensor.shape[axis] != features:
            raise ValueError(
                f"{name} must have {features} features for the pattern {tuple(pattern)}, got shape "
                f"{tuple(tensor.shape)}"
            )
    batches = [t.shape[1:] if batch_last else t.shape[:-1] for t in (grad, x)]
    if batches[0] != batches[1]:
        raise ValueError(
            f"grad and x must have one batch, got {tuple(grad.shape)} and {tuple(x.shape)}"
        )


# The product, without autocast and without a record of gradients.


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
            descriptor.text,  # a str is hashed once
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
        check_kinds(descriptor, operands)
        check_dense(("x", "weight"), x=operands[0], weight=operands[1], out=out)
        return None
    return key


def way(call: Call, *request) -> str:
    """Kernels compute their dtypes on CUDA; torch computes all else, and calls inside a transform
    of torch.func. Raises UnsupportedError for devices that have no backend."""
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
    check=check_call,
    way=way,
    plan=plans.plan,
    reference=_reference,
    tensors=tuple,
    names=lambda operands: ("x", "weight"),
    check_operands=check_kinds,
    cast=autocast,
)
calls = products.bind(PRODUCT)


# The gradient of its weight, likewise.


def _gradient_key(grad, x, pattern: tuple, batch_last: bool, precision: str | None):
    try:
        precision = kernel_precision(precision, x.dtype)
        return pattern, batch_last, precision, signature(grad), signature(x)
    except (AttributeError, RuntimeError, NotImplementedError):  # as in _key
        return None


def _check_gradient(grad, x, pattern, batch_last: bool, precision) -> Call:
    check_gradient(grad, x, pattern, batch_last)
    return Call(0, pattern, x.dtype, x.device)


def _gradient_reference(call, grad, x, pattern, batch_last: bool, precision) -> torch.Tensor:
    with no_autocast(x):
        return reference.weight_gradient(pattern, grad, x, batch_last, precision)


def _launch_gradient(plan: plans.GradientPlan, grad, x, *options) -> torch.Tensor:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch_gradient(plan, grad, x, *options)
    addresses, copies = plan.place((grad, x))
    out = plan.result()
    plan.launch([*addresses, out.data_ptr()])
    del copies  # the stream orders the reuse of their memory behind the launch
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


# Both computations as operators and functions of autograd call them, with the same arguments.


@lru_cache(maxsize=1024)
def _linear(pattern: tuple, batch_last: bool, precision: str | None, bias: bool) -> KroneckerSparse:
    """The product with one factor, with or without a bias."""
    epilogue = (Bias(),) if bias else ()
    return KroneckerSparse(*pattern, batch_last=batch_last, epilogue=epilogue, precision=precision)


def product(
    x, weight, bias, batch_last: bool, precision: str | None, debug: bool = False
) -> torch.Tensor:
    """``K(weight) x + bias``, ``bias`` or None."""
    descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
    return calls.execute(descriptor, (x, weight), None, {} if bias is None else {"bias": bias})


def weight_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    pattern: tuple[int, int, int, int],
    batch_last: bool = False,
    precision: str | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``dW[i,j,k,l] = sum_n grad[n,(i,j,l)] * x[n,(i,k,l)]``, contiguous (a, b, c, d): the gradient
    of a product (without its epilogue) with respect to its weight. The sums are float32 for half
    types. Nothing is recorded. Raises ValueError and TypeError that name the argument."""
    return _gradients.execute(grad, x, tuple(pattern), batch_last, precision)


# The formulas, for a product and a gradient of the weight by either way.


def product_gradients(
    grad, x, weight, pattern, needs: tuple, options: tuple, product, weight_gradient
) -> tuple:
    """The gradients by x, weight and bias, None where not needed. x may be None where the weight's
    gradient is not needed, and the weight where that of x is not. ``options`` are batch_last,
    precision and debug."""
    to_x = to_weight = to_bias = None
    if needs[0]:
        to_x = product(grad, weight.transpose(1, 2), None, *options)
    if needs[1]:
        to_weight = weight_gradient(grad, x, pattern, *options)
    if needs[2]:
        to_bias = bias_gradient(grad, -grad.dim() if options[0] else -1)
    return to_x, to_weight, to_bias


def weight_gradient_gradients(
    to_weight, grad, x, needs: tuple, options: tuple, product: Callable
) -> tuple:
    """The gradients by grad and x, for ``to_weight`` in the place of the weight: a product with it,
    and one with its transpose."""
    to_grad = to_x = None
    if needs[0]:
        to_grad = product(x, to_weight, None, *options)
    if needs[1]:
        to_x = product(grad, to_weight.transpose(1, 2), None, *options)
    return to_grad, to_x


# Eager calls that record gradients. Forward and backward by functions of torch.autograd take 75 us
# of a host that takes 175 by the operators of torch.library, which are for whoever must see them.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, descriptor, plan):
        needs = ctx.needs_input_grad
        ctx.pattern, ctx.plan = weight.shape, plan
        ctx.options = descriptor.batch_last, descriptor.precision
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        parameters = {} if bias is None else {"bias": bias}
        if plan is None:
            return calls.execute(descriptor, (x, weight), None, parameters)
        return calls.launch(plan, descriptor, (x, weight), None, parameters)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
            grad = grad.contiguous()
        needs, options = ctx.needs_input_grad[:3], (*ctx.options, False)
        compute = partial(product_gradients, grad, x, weight, ctx.pattern, needs, options)
        if ctx.plan is None or torch.is_grad_enabled() or is_watched(grad):
            return *compute(*ways(grad)), None, None
        tensors = [None if t is None else signature(t) for t in (grad, x, weight)]
        key = id(ctx.plan), settings_of(grad), needs, *tensors
        return *by_plans(ctx.plan, key, compute), None, None


_backwards = PlanCache()


def by_plans(forward: object, key: tuple, compute: Callable) -> Any:
    """What ``compute(product, weight_gradient)`` returns, by the kernels alone. Their plans are
    decided once for a key, which has the id of ``forward``: the plan of a forward pass, or None."""
    entry = _backwards.plans.get(key)
    if entry is not None:
        plans = iter(entry[1])

        def planned_product(x, weight, bias, *rest) -> torch.Tensor:
            plan, descriptor = next(plans)
            parameters = {} if bias is None else {"bias": bias}
            return calls.launch(plan, descriptor, (x, weight), None, parameters)

        def planned_gradient(grad, x, *rest) -> torch.Tensor:
            return _launch_gradient(next(plans), grad, x)

        return compute(planned_product, planned_gradient)
    plans = []

    def first_product(x, weight, bias, batch_last, precision, debug) -> torch.Tensor:
        descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
        request = descriptor, (x, weight), None, {} if bias is None else {"bias": bias}
        y = calls.execute(*request)
        plan = calls.find(*request)
        plans.append(None if plan is None else (plan, descriptor))
        return y

    def first_gradient(grad, x, pattern, batch_last, precision, debug) -> torch.Tensor:
        request = grad, x, tuple(pattern), batch_last, precision
        to_weight = _gradients.execute(*request)
        plans.append(_gradients.find(*request))
        return to_weight

    grads = compute(first_product, first_gradient)
    if None not in plans:
        _backwards.keep(key, (forward, plans))  # while that is there, no other has its id
    return grads


def settings_of(x: torch.Tensor) -> tuple | None:
    """Torch's settings that a product of this dtype depends on."""
    return (float32_precision(), _is_deterministic()) if x.dtype is _FLOAT32 else None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, x, pattern, *options):
        needs, ctx.options = ctx.needs_input_grad, options
        ctx.save_for_backward(grad if needs[1] else None, x if needs[0] else None)
        return weight_gradient(grad, x, pattern, *options)

    @staticmethod
    def backward(ctx, to_weight):
        product, _ = ways(to_weight)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        grads = weight_gradient_gradients(to_weight, *saved, needs, ctx.options, product)
        return *grads, None, None, None, None


def recorded_product(x, weight, bias, batch_last, precision, debug):
    descriptor = _linear(tuple(weight.shape), batch_last, precision, bias is not None)
    return _Product.apply(x, weight, bias, descriptor, None)


def ways(grad: torch.Tensor) -> tuple[Callable, Callable]:
    """What a backward pass computes products and gradients of weights by: the library's operators
    where a mode watches, recording functions where they may be differentiated again, else the
    kernels alone."""
    if is_watched(grad):
        operators = operators_of(PRODUCT)
        return operators.product, operators.weight_gradient
    if torch.is_grad_enabled():
        return recorded_product, _WeightGradient.apply
    return product, weight_gradient


@lru_cache(maxsize=1024)
def parts(descriptor: KroneckerSparse) -> Parts:
    """The parts of a call with a gradient."""
    last = descriptor.batch_last
    linear = _linear(descriptor.pattern, last, descriptor.precision, is_biased(descriptor))
    return autograd.parts(descriptor, linear, 0 if last else -1)


def _apply(descriptor: KroneckerSparse, operands: tuple, bias, plan) -> torch.Tensor:
    return _Product.apply(*operands, bias, descriptor, plan)


# The call as it is made.


run_factor = front_door(PRODUCT, calls, recorder(PRODUCT, calls, Recording(parts, _apply)))
RUNS = {KroneckerSparse: run_factor}


def planned(
    descriptor: KroneckerSparse | KroneckerSparseChain, tensors: tuple, arguments: dict
) -> list[Planned]:
    """The parts of a call that have a plan: the product of each factor. Raises TypeError for
    tensors that are too few or too many."""
    from kernlib.runtime.ahead import planned_product

    parameters = dict(arguments)
    out = parameters.pop("out", None)
    check_kinds(descriptor, tensors)
    check_names(descriptor, parameters)
    x, factors = tensors[0], []
    for factor, weight in zip(descriptor.factors, tensors[1:], strict=True):
        if factors:
            call = PRODUCT.check(*factors[-1].request)
            x = x.new_empty(call.out_shape, dtype=call.dtype)
            x.requires_grad_(factors[-1].recorded)
        check_dense(("x", "weight"), x=x, weight=weight)
        values = {name: parameters[name] for name in factor.parameters}
        values |= {"out": out} if len(factors) + 2 == len(tensors) else {}
        factors.append(planned_product(PRODUCT, calls, parts, factor, (x, weight), values))
    return factors


def variants(
    descriptor: KroneckerSparse | KroneckerSparseChain, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, its gradient included, and inputs of
    ``dtypes``; none for float64, which torch computes. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    specs: dict[KernelSpec, None] = {}
    for factor in descriptor.factors:
        precision = factor.precision and kernel_precision(factor.precision, torch.float32)
        shape = factor.epilogue, factor.pattern
        specs |= dict.fromkeys(choose.variants(*shape, arch, names, precision))
    return list(specs)

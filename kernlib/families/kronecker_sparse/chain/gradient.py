"""Gradients of chains of Kronecker-sparse factors: the gradient of W_i is a single factor's, from
``h_{i-1}`` and the gradient of ``h_i``.

Of two factors in half precision, batch first, no h is kept: the backward pass computes it again,
and all its launches are one plan (:mod:`..lowering.chain_gradient`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.families.kronecker_sparse import operation, plans
from kernlib.families.kronecker_sparse.chain import master_weights
from kernlib.families.kronecker_sparse.chain.kind import HALVES
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.kernels.steps.cast import Cast
from kernlib.families.kronecker_sparse.lowering import chain_gradient
from kernlib.families.kronecker_sparse.lowering.chain_gradient import NAMES, RESULTS, Needs
from kernlib.families.kronecker_sparse.lowering.problem import Problem
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices
from kernlib.runtime.arguments import no_autocast
from kernlib.runtime.autograd import bias_gradient
from kernlib.runtime.devices import allocator, arch_of, lower_on
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import Operation, bind
from kernlib.runtime.products import Call
from kernlib.runtime.sequence import launcher, load_steps
from kernlib.runtime.tensors import UNREADABLE, is_lazy, materialised, signature

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec


def keeps_h(x: torch.Tensor, count: int, batch_last: bool) -> bool:
    """Whether a recorded chain of so many factors keeps what lies between them for its gradient. It
    is a matter of no sizes, which may be symbols."""
    return count != 2 or batch_last or x.dtype not in HALVES or x.device.type == "cpu"


# By a product and a gradient of the weight of either way.


def gradients(
    grad, hidden, weights, needs: tuple, options: tuple, product, weight_gradient, inner=None
) -> list:
    """The gradients by x, the weights and a bias, None where not needed, from that of h_n and, in
    ``inner``, those of h_1 to ``h_(n-1)`` if there are any. ``hidden`` holds x and these h, None
    where the weight's gradient is not needed; or x alone, where h is computed again. Gradients of
    master weights are rounded and then widened, as autocast does."""
    dtype = grad.dtype if weights[0] is None else weights[0].dtype
    if dtype is not grad.dtype:
        weights = [weight.to(grad.dtype) for weight in weights]
        request = grad, hidden, weights, needs, options, product, weight_gradient, inner
        to_x, *rest = gradients(*request)
        return [to_x, *(None if t is None else t.to(dtype) for t in rest)]
    *needs, by_bias = needs
    if len(hidden) < len(weights):
        (x,), (first, _) = hidden, weights
        hidden = [x, product(x, first, None, *options) if needs[2] else None]
    grads: list = [None] * len(needs)
    to_bias = bias_gradient(grad, -grad.dim() if options[0] else -1) if by_bias else None
    leads_on = [*accumulate(needs, max)]  # whether there is need of something before a factor
    for index in reversed(range(len(weights))):
        weight = weights[index]
        if needs[index + 1]:
            grads[index + 1] = weight_gradient(grad, hidden[index], weight.shape, *options)
        if not leads_on[index]:
            break
        grad = product(grad, weight.transpose(1, 2), None, *options)
        if inner and index and inner[index - 1] is not None:
            grad = grad + inner[index - 1]
    if needs[0]:
        grads[0] = grad
    return [*grads, to_bias]


# By the kernels alone.


def by_plans(grad, hidden, weights, needs: tuple, options: tuple, forward: object = None) -> list:
    """:func:`gradients` by the kernels alone, for the route of the forward pass if it has one."""
    if weights[0] is not None and weights[0].dtype is not grad.dtype:
        weights = [weight.contiguous() for weight in weights]  # as plans read master weights
    if len(hidden) < len(weights) and any(needs[1:-1]) and grad.numel():
        return calls.execute(grad, *hidden, tuple(weights), needs, options)
    tensors = [None if t is None else signature(t) for t in (grad, *hidden, *weights)]
    key = id(forward), operation.settings_of(grad), options, needs, *tensors
    compute = partial(gradients, grad, hidden, weights, needs, options)
    return operation.by_plans(forward, key, compute)


class _Plan(NamedTuple):
    """What gradients of one signature need besides their pointers."""

    index: int  # of the device
    place: Callable  # of grad and x: their addresses, and what to keep until the launch
    results: tuple[Callable | None, ...]  # make new ones, in the order of RESULTS
    launch: Callable[..., None]  # of the steps, given addresses: NAMES, RESULTS
    biased: bool  # whether one is the bias's gradient


def _key(grad, x, weights: tuple, needs: tuple, options: tuple) -> tuple | None:
    try:
        return needs, options, signature(grad), signature(x), *map(signature, weights)
    except UNREADABLE:
        return None


def _check(grad, x, weights: tuple, needs: tuple, options: tuple) -> Call:
    return Call(math.prod(grad.shape[:-1]), grad.shape, grad.dtype, grad.device)


def _way(call: Call, grad, x, weights: tuple, needs: tuple, options: tuple) -> str:
    return operation.way(call, (grad, x, *weights))


def _reference(call: Call, grad, x, weights: tuple, needs: tuple, options: tuple) -> list:
    with no_autocast(x):
        request = grad, [x], weights, needs, options
        return gradients(*request, operation.product, operation.weight_gradient)


def _plan(call: Call, grad, x, weights: tuple, needs: tuple, options: tuple) -> _Plan:
    device = grad.get_device()
    arch = arch_of(device)
    (_, *halves), _ = master_weights.stand_ins((x, *weights), {})
    problems, copies = _problems(call, grad, x, *halves)
    *by_operands, by_bias = needs
    biased = []

    def lower_one(problem: Problem) -> Lowered:
        return plans.lower((), problem, device)

    def lower(multiprocessors: int) -> Lowered:
        gpu = Gpu(arch, multiprocessors)
        lowered, has_bias = chain_gradient.lower(problems, Needs(*needs), gpu, lower_one)
        biased.append(has_bias)
        return lowered

    lowered = lower_on(lower, device)
    shapes = x.shape, *(weight.shape for weight in weights), grad.shape[-1:]
    some = *by_operands, by_bias and biased[0]
    dtypes = x.dtype, *[weights[0].dtype] * 3
    if master_weights.are_there((x, *weights)):
        lowered = _with_masters(lowered, x.dtype, weights, shapes, some)
    steps, inner = load_steps(lowered.steps, (*NAMES, *RESULTS), device)
    results = tuple(
        allocator(tuple(shape), dtype, x.device) if need else None
        for shape, dtype, need in zip(shapes, dtypes, some, strict=True)
    )
    place = plans.place if copies == [None, None] else partial(plans.placed_copies, copies)
    return _Plan(
        device, place, results, launcher(steps, inner, x.device, lowered.workspace), biased[0]
    )


def _with_masters(
    lowered: Lowered, dtype: torch.dtype, weights: tuple, shapes: tuple, needs: tuple
) -> Lowered:
    """The launches of the gradients of master weights that are needed."""
    masters = dict(zip(NAMES[2:], weights, strict=True))
    results = zip(RESULTS[1:], shapes[1:], needs[1:], strict=True)
    return master_weights.lower(
        lowered, dtype, masters, {name: shape for name, shape, need in results if need}
    )


def _problems(call: Call, grad, x, first, second) -> tuple[chain_gradient.Problems, list]:
    """What is computed, and for grad and x the shape of the copy that is read in their place, or
    None."""
    batch = grad.shape[:-1]
    h = grad.new_empty((*batch, math.prod(first.shape) // first.shape[2]), device="meta")

    def product(x, weight) -> Problem:
        pattern = KroneckerSparse(*weight.shape)
        of_shape = call._replace(out_shape=(*batch, pattern.out_features))
        problem, *_ = plans.problem_of(pattern, of_shape, x, weight, None)
        return problem

    def of_weight(grad, x, weight) -> tuple[Problem, list]:
        return plans.gradient_problem(grad, x, tuple(weight.shape), False, None)

    to_second, (grad_copy, _) = of_weight(grad, h, second)
    to_first, (_, x_copy) = of_weight(h, x, first)
    problems = chain_gradient.Problems(
        hidden=product(x, first),
        to_second=to_second,
        to_hidden=product(grad, second.transpose(1, 2)),
        to_first=to_first,
        to_x=product(h, first.transpose(1, 2)),
    )
    return problems, [grad_copy, x_copy]


def _launch(plan: _Plan, grad, x, weights: tuple, needs: tuple, options: tuple) -> list:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch(plan, grad, x, weights, needs, options)
    addresses, copies = plan.place((grad, x))
    results = [None if make is None else make() for make in plan.results]
    addresses += [weight.data_ptr() for weight in weights]
    addresses += [0 if t is None else t.data_ptr() for t in results]
    plan.launch(addresses)
    del copies  # the stream orders the reuse of their memory behind the launch
    if needs[-1] and not plan.biased:
        results[-1] = bias_gradient(grad, -1).to(weights[0].dtype)
    return results


def _rehearsed(plan: _Plan, grad, x, weights: tuple, needs: tuple, options: tuple) -> list:
    results = [None if make is None else make() for make in plan.results]
    if needs[-1] and not plan.biased:
        results[-1] = bias_gradient(grad, -1).to(weights[0].dtype)
    return results


def _tensors(grad, x, weights: tuple, needs: tuple, options: tuple) -> tuple:
    return grad, x, *weights


def _materialised(grad, x, weights: tuple, needs: tuple, options: tuple) -> tuple | None:
    if not any(map(is_lazy, (grad, x, *weights))):
        return None
    return materialised(grad), materialised(x), tuple(map(materialised, weights)), needs, options


calls = bind(
    Operation(
        name="kronecker_sparse_chain_gradients",
        operators="kernlib.families.kronecker_sparse.operators",
        key=_key,
        check=_check,
        way=_way,
        reference=_reference,
        plan=_plan,
        launch=_launch,
        tensors=_tensors,
        materialised=_materialised,
        rehearsed=_rehearsed,
    )
)


def variants(chain: KroneckerSparseChain, arch: str, dtypes: tuple) -> list[KernelSpec]:
    """The kernels of the gradient of a chain that keeps no h, besides those of its factors."""
    if len(chain.factors) != 2 or chain.batch_last:
        return []
    first, last = (factor.pattern for factor in chain.factors)
    names = [KERNEL_TYPES[dtype] for dtype in dtypes if dtype in HALVES]
    return chain_gradient.variants((first, last), arch, names) + Cast().specs_of(names)

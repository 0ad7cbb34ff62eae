"""The Kronecker-sparse op: products with factors of support ``I_a ⊗ 1_{b×c} ⊗ I_d``.

The steady state is a dict hit: signature to plan, fresh pointers into the plan's blocks, launch.
Everything else (checks, lowering, loading) happens when a signature is new. CPU tensors, float64
and calls inside transforms of torch.func are computed by the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from kernlib.families.kronecker_sparse import checks, reference
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import devices
from kernlib.runtime.arguments import (
    autocast,
    check_device,
    check_names,
    kind_of,
    no_autocast,
    parameter_ranges,
    parameters_of,
    positive,
    refuse_out_of_recorded,
    requires_gradient,
    tensors_of,
)
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    check_dense,
    is_lazy,
    materialised,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.families.kronecker_sparse.plans import KroneckerPlan
    from kernlib.runtime.candidates import Candidates

_plans = PlanCache()
_FLOAT32 = torch.float32


def run(
    descriptor: KroneckerSparse | KroneckerSparseChain,
    x: torch.Tensor,
    weight: torch.Tensor,
    *more: torch.Tensor,
    out: torch.Tensor | None = None,
    **parameters,
) -> torch.Tensor:
    """``y[..., i*b*d + j*d + l] = epilogue(sum_k W[i,j,k,l] * x[..., i*c*d + k*d + l])``.

    - ``x`` (..., in_features), or (in_features, ...) with ``batch_last``, of any strides and any
      number of further dimensions, none included; ``weight`` (a, b, c, d), of any strides. A chain
      takes a weight for each of its factors, in their order.
    - float32, float16, bfloat16 or float64, the same for all tensors, computed in float32 for half
      types. Under autocast they are cast as those of ``torch.nn.Linear`` are.
    - ``out``: the shape and dtype of the result, any strides, written in place; without it a new
      contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (out_features,), scalars as
      real numbers or tensors of shape () that stay on the device and are not looked at there.

    Gradients of all tensors are recorded, and those of the gradients; then an activation is not
    fused with the product but applied to its rounded result, so that the gradient is exact. Weights
    (a, b, c, d) are those of the KSMM project.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.
    """
    if type(descriptor) is KroneckerSparseChain:
        return _run_chain(descriptor, x, (weight, *more), out, parameters)
    if more:
        checks.check_weights(descriptor, (weight, *more))
    if torch._C._is_any_autocast_enabled():
        if out is not None:
            refuse_any_overlap(out, x=x, weight=weight, **parameters)  # which casts would hide
        (x, weight), parameters = autocast((x, weight), parameters)
    recorded = torch.is_grad_enabled() and requires_gradient(parameters.values(), x, weight, out)
    if recorded or forward_ad._current_level >= 0:
        return _run_recorded(descriptor, x, weight, out, parameters)
    return execute(descriptor, x, weight, out, parameters)


def _run_chain(chain: KroneckerSparseChain, x, weights: tuple, out, parameters: dict):
    checks.check_weights(chain, weights)
    check_names(chain, parameters)
    last = len(weights) - 1
    if out is not None:  # whose own factor sees neither x nor what belongs to the others
        named = {f"weights[{index}]": weight for index, weight in enumerate(weights)}
        refuse_any_overlap(out, x=x, **named, **parameters)
    for index, (factor, weight) in enumerate(zip(chain.factors, weights, strict=True)):
        own = {name: parameters[name] for name in factor.parameters}
        x = run(factor, x, weight, out=out if index == last else None, **own)
    return x


def _run_recorded(descriptor: KroneckerSparse, x, weight, out, parameters: dict) -> torch.Tensor:
    """A call whose derivatives torch wants to know."""
    refuse_out_of_recorded(out)
    eager = forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
    if eager:
        from kernlib.families.kronecker_sparse import gradients

        known = gradients.known(descriptor, x, weight, parameters)
        if known is not None:
            return known
    if stand_ins(x, weight):
        from kernlib.families.kronecker_sparse import library

        return library.run(descriptor, x, weight, **parameters)
    call = checks.check_call(descriptor, x, weight, out, parameters)
    if forward_ad._current_level >= 0 or by_reference(call, x, weight, parameters):
        return _reference(descriptor, x, weight, out, parameters)
    if eager:
        return gradients.recorded(descriptor, x, weight, parameters)
    from kernlib.families.kronecker_sparse import operators

    return operators.recorded(descriptor, x, weight, parameters)


def by_reference(call: checks.Call, *tensors) -> bool:
    """Whether torch computes a checked call: all but the kernels' dtypes on CUDA, and whatever is
    inside a transform of torch.func. Raises UnsupportedError for devices that have no backend."""
    check_device(call.device)
    return (
        call.device.type != "cuda"
        or call.dtype not in KERNEL_TYPES
        or any(map(_is_transformed, tensors))
    )


def _is_transformed(value) -> bool:
    if isinstance(value, dict):
        return any(map(_is_transformed, value.values()))
    if not isinstance(value, torch.Tensor):
        return False
    functorch = torch._C._functorch  # and what is_grads_batched is made of
    return functorch.is_functorch_wrapped_tensor(value) or functorch.is_legacy_batchedtensor(value)


def _reference(descriptor: KroneckerSparse, x, weight, out, parameters: dict) -> torch.Tensor:
    """A checked call by torch's own operators, which are differentiable as they are."""
    if out is not None and not out.is_meta:
        refuse_overlap(out, x=x, weight=weight, **tensors_of(parameters))
    with no_autocast(x):
        y = reference.kronecker_sparse(descriptor, x, weight, parameters)
    return y if out is None else out.copy_(y)


def execute(descriptor: KroneckerSparse, x, weight, out, parameters: dict) -> torch.Tensor:
    """A call as it is given: without autocast, and without a record of gradients."""
    key = _key(descriptor, x, weight, out, parameters)
    plan = _plans.plans.get(key)
    if plan is None:
        return _first(key, descriptor, x, weight, out, parameters)
    return by_plan(plan, descriptor, x, weight, out, parameters)


def by_plan(plan: KroneckerPlan, descriptor, x, weight, out, parameters: dict) -> torch.Tensor:
    """A call by its plan."""
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return by_plan(plan, descriptor, x, weight, out, parameters)
    vectors = numbers = kept = ()
    if parameters:
        vectors, numbers, kept = parameters_of(plan, descriptor, x, parameters)
    target = plan.result() if out is None else _target(plan, x, weight, out, parameters)
    if plan.left is not None:
        x = x.reshape(plan.left)
    addresses = [x.data_ptr(), weight.data_ptr(), target.data_ptr()]
    for vector in vectors:
        addresses.append(vector.data_ptr())
    plan.launch(addresses, numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
    if out is None or out is target:
        return target
    return out.copy_(target)


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
    try:
        precision = precision_of(precision, x)
        key = (pattern, batch_last, precision, signature(grad), signature(x))
        plan = _plans.plans.get(key)
    except (AttributeError, RuntimeError, NotImplementedError):  # as in _key
        plan = None
    if plan is None:
        checks.check_gradient(grad, x, pattern, batch_last)
        call = checks.Call(0, pattern, x.dtype, x.device)
        if by_reference(call, grad, x):
            with no_autocast(x):
                return reference.weight_gradient(pattern, grad, x, batch_last)
        if is_lazy(grad) or is_lazy(x):
            given = materialised(grad), materialised(x)
            return weight_gradient(*given, pattern, batch_last, precision)
        from kernlib.families.kronecker_sparse import plans

        plan = plans.gradient_plan(grad, x, pattern, batch_last, precision)
        _plans.keep(key, plan)
    return _weight_gradient_by_plan(plan, grad, x)


def _weight_gradient_by_plan(plan: KroneckerPlan, grad, x) -> torch.Tensor:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _weight_gradient_by_plan(plan, grad, x)
    left = grad if plan.left is None else grad.reshape(plan.left)
    right = x if plan.right is None else x.reshape(plan.right)
    if not plan.steps:  # an empty sum
        return torch.zeros(plan.shape, dtype=plan.dtype, device=plan.device)
    out = plan.result()
    plan.launch([left.data_ptr(), right.data_ptr(), out.data_ptr()])
    return out


def _first(key, descriptor, x, weight, out, parameters: dict) -> torch.Tensor:
    """A call that has no plan: one of a new signature, or one that takes none."""
    if stand_ins(x, weight, out, *parameters.values()):
        from kernlib.families.kronecker_sparse import library

        return library.run(descriptor, x, weight, out=out, **parameters)
    call = checks.check_call(descriptor, x, weight, out, parameters)
    if by_reference(call, x, weight, out, parameters):
        return _reference(descriptor, x, weight, out, parameters)
    if any(map(is_lazy, (x, weight, *tensors_of(parameters).values()))):
        if out is not None:
            refuse_any_overlap(out, x=x, weight=weight, **parameters)
        (x, weight), parameters = positive((x, weight), parameters)
        return execute(descriptor, x, weight, out, parameters)
    make_plan(descriptor, x, weight, out, parameters, call)
    return execute(descriptor, x, weight, out, parameters)


def make_plan(descriptor: KroneckerSparse, x, weight, out, parameters: dict, call) -> None:
    """Make and keep the plan of a checked call on CUDA tensors, its kernels loaded."""
    from kernlib.families.kronecker_sparse import plans

    key = _key(descriptor, x, weight, out, parameters)
    made = plans.plan(descriptor, call, x, weight, out, parameters, key[1])
    _plans.keep(key, made)


def find_plan(
    descriptor: KroneckerSparse, x, weight, out, parameters: dict
) -> KroneckerPlan | None:
    """The plan of a call if it is kept."""
    return _plans.plans.get(_key(descriptor, x, weight, out, parameters))


def _key(descriptor: KroneckerSparse, x, weight, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: after the descriptor the precision, then shapes, strides, dtypes,
    device, alignment and kinds of numbers. None where there can be no plan."""
    try:  # signature(x), signature(weight), in 0.2 us less
        dtype = x.dtype
        key = (
            descriptor,
            (descriptor.precision or float32_precision()) if dtype is _FLOAT32 else None,
            x.shape, x.stride(), dtype, x.get_device(),
            p & 15 if (p := x.data_ptr()) >= LOWEST_ADDRESS else ~p, x.is_neg(),
            weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            p & 15 if (p := weight.data_ptr()) >= LOWEST_ADDRESS else ~p, weight.is_neg(),
        )  # fmt: skip
        if out is not None:
            key += signature(out)
        if parameters:
            for name, value in parameters.items():
                key += (name, kind_of(value))
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        check_dense(("x", "weight"), x=x, weight=weight, out=out)
        return None
    return key


def precision_of(permitted: str | None, x: torch.Tensor) -> str | None:
    """What the products of float32 tensors may be, None for others."""
    return (permitted or float32_precision()) if x.dtype is torch.float32 else None


def _target(plan: KroneckerPlan, x, weight, out, parameters: dict) -> torch.Tensor:
    """Where the kernel writes: ``out``, or a new tensor where its batch is not one of strides.
    Raises ValueError for an ``out`` that shares memory with an argument as it was given, copied for
    the kernel or not."""
    ranges = [(x.data_ptr(), plan.spans[0]), (weight.data_ptr(), plan.spans[1])]
    if parameters:
        ranges += parameter_ranges(plan, plan.spans[2:], parameters)
    if ranges_meet(out.data_ptr(), plan.out_span, ranges):
        refuse_overlap(out, x=x, weight=weight, **tensors_of(parameters))
    if plan.apart:
        return plan.result()
    if not out.is_inference():  # those have no version to count
        torch.autograd.graph.increment_version(out)
    return out


# What does without calls is in a module of its own, which those do not load.


def prepare(descriptor, *tensors, **arguments) -> None:
    """Build the plans of a call, compiling and loading its kernels, and load those of its gradient
    where one would be recorded; see :func:`kernlib.prepare`."""
    from kernlib.families.kronecker_sparse import ahead

    for request in ahead.requests(descriptor, tensors, arguments):
        ahead.prepare(request)


def prepared(descriptor, *tensors, **arguments) -> bool:
    """Whether the plans of a call are there, so that it needs nothing but its launches. One whose
    gradient would be recorded is never: its kernels are looked for each time."""
    from kernlib.families.kronecker_sparse import ahead

    return all(map(ahead.prepared, ahead.requests(descriptor, tensors, arguments)))


def specs(
    descriptor, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned; on ``device`` alone, if it is given, as it is tuned. Those of its gradient are
    among them where one would be recorded."""
    from kernlib.families.kronecker_sparse import ahead

    requests = ahead.requests(descriptor, tensors, arguments)
    found = [spec for request in requests for spec in ahead.specs(request, arch, device)]
    return list(dict.fromkeys(found))


def variants(descriptor, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, its gradient included, and inputs of
    ``dtypes``; none for float64, which torch computes. Raises KeyError for other dtypes."""
    from kernlib.families.kronecker_sparse import ahead

    return ahead.variants(descriptor, arch, dtypes)


def choices(descriptor, *tensors, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what :func:`run` raises, UnsupportedError for tensors that are on no GPU, and TypeError
    for a chain, of which one factor is tuned at a time.
    """
    from kernlib.families.kronecker_sparse import ahead
    from kernlib.families.kronecker_sparse.choices import choices as choices_of

    if type(descriptor) is KroneckerSparseChain:
        raise TypeError(
            f"{descriptor.describe()} is several kernels: tune its factors one at a time"
        )
    (request,) = ahead.requests(descriptor, tensors, arguments)
    return choices_of(request)

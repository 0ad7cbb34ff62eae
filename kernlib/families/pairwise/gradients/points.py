"""Gradients of pairwise sums with respect to points, summed over the other points with weights."""

from __future__ import annotations

import math

import torch
from torch.compiler import is_dynamo_compiling

from kernlib import events
from kernlib.descriptors.base import check_flag
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.gradients import arguments, plans, reference
from kernlib.families.pairwise.gradients.arguments import Call, Kind, Operands
from kernlib.families.pairwise.gradients.plans import GradientPlan
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.runtime import operation, rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_kind, host_value, on_device, plain
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    is_lazy,
    materialised,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    span,
)

_PLAIN = Kind("difference", stages.Power(), False, True)


def cdist_grad(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    eps: float = 1e-8,
    debug: bool = False,
) -> torch.Tensor:
    """``out[l,o,n,m] = sum_k c[o,k] a[k,m] sign(d[n,m] - b[n,k]) |d[n,m] - b[n,k]|^(p-1)``.

    The gradient of ``1/p sum_k c[o,k] a[k,m] |d[:,m] - b[:,k]|_p^p`` with respect to the queries
    ``d``, of the kermac project.

    - ``a`` (K, M) weights of the pairs of a training point k and a query m, ``b`` (N, K) and ``d``
      (N, M) points, feature first, ``c`` (O, K) coefficients; each with an optional batch L in
      front, 1 of which broadcasts. Any strides; float32, float64, float16 or bfloat16, summed in
      float64 for float64 and float32 for the others.
    - ``out`` (O, N, M) or (L, O, N, M), any strides; without it a new tensor, 4-D when something
      has a batch.
    - ``p`` is 0 or greater, and finite: a real number, or a tensor of shape () or (L,) that stays
      on the device and is not looked at. For p < 1 differences other than 0 count as ``eps`` at
      least. A NaN reaches every sum that it is part of.
    - Equal coordinates add exactly 0, but in large calls on a GPU with the number 2 for p: those
      are matrix products of columns without their mean, of an error of about 2^-22 of
      ``sum_k |c a| (|d| + |b|)``, where equal coordinates cancel to that and no further. p as a
      tensor is always computed by differences.

    Raises ValueError and TypeError that name the argument, RuntimeError for inputs that require a
    gradient while gradients are recorded.
    """
    if is_dynamo_compiling():
        from kernlib.eager import eagerly

        return eagerly(cdist_grad, a, b, c, d, out, p, eps, debug)
    if debug is not False:
        check_flag("debug", debug)
        with events.on_stderr():
            return cdist_grad(a, b, c, d, out, p, eps)
    values = {"p": p, "eps": arguments.check_eps(eps)}
    return _run(_PLAIN, Operands(d, b, a, c), out, False, values)


def pair_gradient(
    operator: str,
    inner: object,
    x: torch.Tensor,
    z: torch.Tensor,
    weights: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    *,
    p: float | torch.Tensor | None = None,
    inner_scale: float | torch.Tensor | None = None,
    first: bool = True,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    eps: float = 0.0,
) -> torch.Tensor:
    """``out[l,(o,)q,k] (+)= sum_t [c[l,o,t]] W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``.

    ``x`` (Q, K), ``z`` (T, K), ``weights`` (Q, T) and ``coefficients`` (O, T), each with a batch in
    front or not, give (Q, K) or (O, Q, K), with a batch in front when something has one. Strides,
    dtypes, batches and ``out`` as in :func:`cdist_grad`. ``op`` is ``z - x`` where x is the
    ``first`` operand of ``"difference"``, else ``x - z``. ``inner`` is Identity, Abs, Square, Sqrt,
    Power, which needs ``p``, or ExpPower, which needs ``p`` and ``inner_scale``: numbers or tensors
    of shape () or (L,). The derivative at equal coordinates is exactly 0, for p = 0 everywhere, but
    in large calls with Square, or Power and the number 2, as :func:`cdist_grad` says. ``eps`` is
    the smallest ``|v|`` that counts where p < 1, 0 for the smallest normal number.

    Raises ValueError and TypeError that name the argument, RuntimeError as :func:`cdist_grad` does.
    """
    kind = Kind(operator, inner, bool(first), False)
    values = {}
    if p is not None:
        values["p"] = p
    if inner_scale is not None:
        values["inner_scale"] = inner_scale
    if eps:
        values["eps"] = arguments.check_eps(eps)
    return _run(kind, Operands(x, z, weights, coefficients), out, accumulate, values)


# The operation. A request is (kind, operands, out, accumulate, values).


def _run(kind: Kind, operands: Operands, out, accumulate: bool, values: dict) -> torch.Tensor:
    if torch.is_grad_enabled() and requires_gradient(values.values(), *operands, out):
        _key(kind, operands, out, accumulate, values)  # raises what is wrong with them first
        arguments.refuse_gradients(kind, operands, out, values)
    return execute(kind, operands, out, accumulate, values)


def _way(call: Call, *request) -> str:
    return REFERENCE if call.device.type in ("cpu", "meta") else KERNELS


def _launch(plan: GradientPlan, kind: Kind, operands: Operands, out, accumulate, values: dict):
    numbers, kept = _numbers(plan, kind, operands.x, values)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.device)
    else:
        _refuse_overlap(kind, operands, out, plan.spans, plan.out_span, values)
    if plan.compute is not None:
        plan.compute(operands, out, numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
    return out


def _materialised(kind: Kind, operands: Operands, out, accumulate, values: dict) -> tuple | None:
    if not any(is_lazy(t) for t in operands if t is not None):
        return None
    refuse_any_overlap(out, **dict(zip(kind.names, operands, strict=True)))
    read = Operands(*(t if t is None else materialised(t) for t in operands))
    return kind, read, out, accumulate, values


def _refuse_overlap(
    kind: Kind, operands: Operands, out, spans, out_span: int, values: dict
) -> None:
    """Raises ValueError when a given ``out`` shares memory with an operand or a number; else counts
    a version of it."""
    refuse_overlap(out, **{k: v for k, v in values.items() if isinstance(v, torch.Tensor)})
    ranges = [
        (t.data_ptr(), length) for t, length in zip(operands, spans, strict=True) if t is not None
    ]
    if ranges_meet(out.data_ptr(), out_span, ranges):
        named = zip(kind.names, operands, strict=True)
        refuse_overlap(out, **{name: t for name, t in named if t is not None})
    if not out.is_inference():  # those have no version to count
        torch.autograd.graph.increment_version(out)


def _key(kind: Kind, operands: Operands, out, accumulate, values: dict) -> tuple:
    """All that a plan depends on: shapes, strides, dtypes, device, alignment, kinds of numbers."""
    key = (kind, accumulate)
    try:
        for t in operands:
            key += (None,) if t is None else signature(t)
        if out is not None:
            key += signature(out)
    except UNREADABLE:
        arguments.check_tensors(kind, operands, out)
        named = dict(zip(kind.names, operands, strict=True))
        refuse_transforms(arguments.NO_TRANSFORMS, **named, out=out)
        raise
    for name, value in values.items():
        key += (name, _kind(name, value))
    return key


def _kind(name: str, value: object):
    """Of a number only its kind; of an exponent the value, where it has code of its own."""
    if isinstance(value, torch.Tensor):
        try:
            return value.shape, value.stride(), value.dtype, value.get_device()
        except (RuntimeError, NotImplementedError):  # of what is not dense
            check_kind(name, value)
            raise
    if name != "p":
        return None
    number = value if type(value) is float else host_value(name, value)  # which saves a call
    if not number >= 0:
        arguments.check_host(name, number)
    return lowering.exponent_kind(number)


def _reference(call: Call, kind: Kind, operands: Operands, out, accumulate, values: dict):
    if call.device.type == "meta":
        return operands.x.new_empty(call.out_shape) if out is None else out
    wide = accumulator(call.dtype)
    given = [
        None if t is None else (t if t.dim() == 3 else t[None]).expand(call.batch, -1, -1).to(wide)
        for t in operands.transposed(kind)
    ]
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=call.device)
    else:
        spans = [0 if t is None else span(t) for t in operands]
        _refuse_overlap(kind, operands, out, spans, span(out), values)
    if call.empty:
        return out
    options = {name: plain(name, values[name]) for name in ("p", "inner_scale") if name in values}
    without_p = kind.plain or kind.scaled
    options |= {"first": kind.first, "plain": without_p, "eps": values.get("eps", 0.0)}
    with without_autocast(call.device):
        result = reference.pair_gradient(kind.operator, kind.inner, *given, **options)
    target = arguments.transposed_out(kind, out, call.sets)
    target.copy_(target.to(wide) + result if accumulate else result)
    return out


def _numbers(plan: GradientPlan, kind: Kind, x, values: dict) -> tuple[list, list]:
    """A number and a pointer for each of SCALARS, and tensors to keep until the launch."""
    wide, numbers, kept = plan.wide, [], []
    for name in lowering.SCALARS:
        value = values.get(name)
        if name == "eps":
            numbers += [max(value or 0.0, arguments.SMALLEST[wide]), 0]
            continue
        number = 0.0 if value is None else value
        if type(number) is not float:  # else it would be a call for nothing
            number = host_value(name, number)
        if number is not None:
            if value is not None and not 0 < number < math.inf:
                arguments.check_host(name, number)
            numbers += [number, 0]
            continue
        if value.device.type == "cpu":
            arguments.check_number(kind, name, value, x.device)
        tensor = on_device(name, value, x.device, wide)
        address = tensor.data_ptr()
        known = address >= LOWEST_ADDRESS or not tensor._is_zerotensor()  # else its number is 0
        numbers += [0.0, address if known else 0]
        kept.append(tensor)
    return numbers, kept


def rehearsed(kind: Kind, operands: Operands, out, accumulate, values: dict) -> torch.Tensor:
    """A call of meta tensors, which notes its kernels in a rehearsal."""
    request = kind, operands, out, accumulate, values
    kind, operands, *_ = request = _materialised(*request) or request
    call = arguments.check_call(*request)
    if rehearsal.current() is None:
        return _reference(call, *request)
    plan = plans.make_plan(call, *request)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.device)
    if plan.compute is not None:
        plan.compute(operands, out, [])
    return out


PAIR_GRADIENT = Operation(
    name="pair_gradient",
    operators=None,
    key=_key,
    check=arguments.check_call,
    way=_way,
    reference=_reference,
    plan=plans.make_plan,
    launch=_launch,
    tensors=lambda *request: (),  # those without memory have no key
    materialised=_materialised,
)
execute = operation.bind(PAIR_GRADIENT).execute

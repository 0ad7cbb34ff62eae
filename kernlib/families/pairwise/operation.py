"""The pairwise op: distance and kernel matrices of two sets of points.

The steady state is a dict hit: signature to plan, fresh pointers and numbers into the plan's block,
launch. Everything else (checks, lowering, loading) happens when a signature is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.errors import KernlibError
from kernlib.families.pairwise import checks, plans, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.lowering import direct as lowering
from kernlib.families.pairwise.lowering.finish import EXPONENT_CODE
from kernlib.families.pairwise.request import Request, is_empty, problem_of
from kernlib.jit.spec import KernelSpec
from kernlib.run import run_kernel
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.numbers import check_kind, host_value
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.tensors import (
    check_dense,
    check_flag,
    check_out_shape,
    is_lazy,
    materialised,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.runtime.candidates import Candidates

_plans = PlanCache()


def run(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    *more: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    **hyperparameters,
) -> torch.Tensor:
    """``out[l,m,n] (+)= epilogue(outer(sum_k inner(op(a[l,m,k], b[l,n,k]))))``.

    - ``a`` (M, K) or (L, M, K), ``b`` (N, K) or (L, N, K), any strides; float32, float64, float16
      or bfloat16, computed in float64 for float64 and float32 for the others. With a ``symmetric``
      descriptor ``b`` is left out.
    - ``out`` (M, N) or (L, M, N), any strides, written in place; without it a new tensor, 2-D when
      nothing has a batch. float16 and bfloat16 inputs also take a float32 ``out``.
      ``accumulate=True`` adds to ``out``.
    - Batches of size 1 broadcast, of hyperparameters too.
    - ``p``, or ``inner_p`` and ``outer_p``, for Power stages: 0 counts nonzero terms, inf takes
      the largest; and one argument for each parameter of the epilogue (``bandwidth`` ...). Real
      numbers, or tensors of shape () or (L,) that stay on the device. Device tensors are not
      looked at: a negative p gives whatever its formula gives.
    - ``feature_map``: a weight for each feature, (K,), or a matrix (K, K2), by which the points are
      multiplied first (:func:`kernlib.families.pairwise.functions.feature_map.apply`).
    - ``epsilon`` (default 0): with an epilogue, values smaller than it in magnitude count as 0.
    - ``regularization``: with an epilogue, added where ``m + row_offset == n + col_offset``, so
      that a block of a larger K(X, X) finds its diagonal.

    Gradients of all tensors are recorded, and those of the gradients: see
    ``docs/concepts/gradients.md``.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.
    """
    if more:
        checks.refuse_more(descriptor, more)
    if feature_map is not None:
        from kernlib.families.pairwise.functions import (
            feature_map as pairwise_features,  # which most calls do without
        )

        a, b = pairwise_features.apply(feature_map, a, b, out)
    if torch.is_grad_enabled() and _requires_gradient(a, b, out, hyperparameters):
        from kernlib.families.pairwise.gradients import (
            eager,  # which calls without a gradient do without
        )

        return eager.run(descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters)
    key = _signature(descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters)
    try:
        plan = _plans.plans.get(key)
    except TypeError:  # something in the call cannot be hashed, and is wrong for that alone
        checks.check_call(
            descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
        )
        raise
    if plan is None:
        request = Request(
            descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
        )
        if a.is_meta or stand_ins(a, b, out):
            from kernlib.families.pairwise import library

            if a.is_meta:  # of which operators would say less
                checks.check_call(*request)
            return library.run(descriptor, a, b, **request.keywords())
        if is_lazy(a) or (b is not None and is_lazy(b)):
            refuse_any_overlap(out, a=a, b=b)
            a, b = _readable(request)[1:3]
            return run(descriptor, a, b, **request.keywords())
        if a.device.type == "cpu":
            from kernlib.families.pairwise import cpu

            return cpu.run(*request)
        plan = plans.plan(request)
        _plans.keep(key, plan)
    numbers = kept = None
    if hyperparameters:
        numbers, kept = plans.numbers_of(plan, descriptor, a, hyperparameters)
    second = a if b is None else b
    given = out is not None
    if not given:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)
    pointers = a.data_ptr(), second.data_ptr(), out.data_ptr()
    if given and checks.ranges_meet(pointers, plan.spans):
        refuse_overlap(out, a=a, b=second)
    if given and kept:
        _refuse_overlap_of_values(out, hyperparameters)
    if given and not out.is_inference():  # those have no version to count
        torch.autograd.graph.increment_version(out)
    if plan.launch is None:
        return out
    if plan.swapped:
        pointers = pointers[1], pointers[0], pointers[2]
    plan.launch.launch(pointers, numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
    return out


def _requires_gradient(a, b, out, values: dict) -> bool:
    """Whether one of a call's tensors requires a gradient; others than tensors do not."""
    if getattr(a, "requires_grad", False) or getattr(b, "requires_grad", False):
        return True
    if not values:
        return getattr(out, "requires_grad", False)
    # any() over a generator would double the time
    return True in [getattr(t, "requires_grad", False) for t in (out, *values.values())]


def _refuse_overlap_of_values(out: torch.Tensor | None, values: dict) -> None:
    """Raises ValueError when ``out`` shares memory with a hyperparameter that is a tensor."""
    if out is not None:
        refuse_overlap(out, **{k: v for k, v in values.items() if isinstance(v, torch.Tensor)})


def prepared(descriptor: Pairwise, a, b=None, *more, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch."""
    request = Request.of(descriptor, a, b, arguments, more)
    key = _signature(*request)
    try:
        return key in _plans.plans
    except TypeError:  # as in run
        checks.check_call(*request)
        raise


def prepare(descriptor: Pairwise, a, b=None, *more, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernel; see :func:`kernlib.prepare`."""
    request = _readable(Request.of(descriptor, a, b, arguments, more))
    key = _signature(*request)
    if request.a.device.type == "cpu":
        checks.check_call(*request)
    elif key not in _plans.plans:
        _plans.keep(key, plans.plan(request))


def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float | torch.Tensor = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
    *,
    root: bool = True,
    out: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """p-norm distances between rows, with the signature and shapes of ``torch.cdist``.

    ``x1`` (*B, P, M) and ``x2`` (*B', R, M) give (broadcast of B and B', P, R);
    ``(sum_k |x1 - x2|^p)^(1/p)``, the count of differing coordinates for p = 0, the largest
    difference for p = inf. ``root=False`` returns the power sums themselves (for p = inf there are
    none: ValueError, but for a p on a device, at which nobody looks). Large float32 problems with
    p = 2 are computed by products of tensor cores at the accuracy of float32: columns are centred
    first, and pairs that lie close together beside their distance from the centre are computed from
    differences; the ``compute_mode`` "donot_use_mm_for_euclid_dist" computes all from differences.
    A NaN reaches the result for every p, where torch drops some for p = inf, and autocast does not
    change the dtype.
    """
    checks.compute_mode(compute_mode)
    descriptor, arguments = _distance(p, root, compute_mode == "donot_use_mm_for_euclid_dist")
    try:
        if checks.are_matrices(x1, x2):
            return run_kernel(descriptor, x1, x2, out=out, debug=debug, **arguments)
        return _batched_cdist(descriptor, x1, x2, p, out, debug, arguments)
    except (KernlibError, RuntimeError, TypeError, ValueError):
        checks.check_distance(x1, x2, out)  # in the words of this call
        raise


def _batched_cdist(descriptor: Pairwise, x1, x2, p, out, debug: bool, arguments: dict):
    batch, first, second = checks.broadcast_batches(x1, x2)
    if len(batch) > 1 and isinstance(p, torch.Tensor) and p.numel() > 1:
        raise ValueError(
            f"p of shape {tuple(p.shape)} needs inputs with one batch dimension, got {batch}"
        )
    shape = (*batch, x1.shape[-2], x2.shape[-2])
    flat = None
    if out is not None:
        check_dense((), out=out)
        check_out_shape(out, shape)
        flat = checks.flat_out(out)
        refuse_any_overlap(out, x1=x1, x2=x2)
    result = run_kernel(descriptor, first, second, out=flat, debug=debug, **arguments)
    if out is not None:
        return out
    # A p of shape (L,) may have widened a single batch dimension of size 1.
    return result.view(shape) if len(batch) > 1 else result


_L1 = Pairwise(inner=stages.Abs())
_NORM = Pairwise(inner=stages.Power(), outer=stages.Root())
_POWER_SUM = Pairwise(inner=stages.Power())
_EUCLIDEAN = {  # by root and direct
    (root, direct): Pairwise(inner=stages.Square(), outer=outer, direct=direct)
    for root, outer in ((True, stages.Sqrt()), (False, stages.Identity()))
    for direct in (True, False)
}


def _distance(p, root: bool, direct: bool) -> tuple[Pairwise, dict]:
    if type(root) is not bool:
        check_flag("root", root)
    value = host_value("p", p)
    if value == 1:
        return _L1, {}
    if value == 2:
        return _EUCLIDEAN[root, direct], {}
    if not root:
        checks.check_has_sums(p, "root=False")
    return (_NORM if root else _POWER_SUM), {"p": p}


def _signature(descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters) -> tuple:
    """All that a plan depends on: shapes, strides, dtypes, device, alignment, kinds of numbers."""
    try:
        key = (
            descriptor,
            signature(a),
            None if b is None else signature(b),
            None if out is None else signature(out),
            accumulate,
            row_offset,
            col_offset,
            plans.precision(descriptor),
        )
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        checks.check_tensors(a, b, out)
        refuse_transforms(checks.NO_TRANSFORMS, a=a, b=b, out=out)
        raise
    if hyperparameters:
        key += tuple((name, kind_of_number(name, value)) for name, value in hyperparameters.items())
    return key


def _readable(request: Request) -> Request:
    """A request with inputs that a kernel may read, zero tensors among them. Raises TypeError for
    what is no dense tensor."""
    made = request.positive()
    b = made.b if made.b is None else materialised(made.b)
    return made._replace(a=materialised(made.a), b=b)


_EXPONENTS = frozenset(("p", "inner_p", "outer_p"))


def kind_of_number(name: str, value: object):
    """Of a number only its kind; of an exponent the value, where it has code of its own."""
    if isinstance(value, torch.Tensor):
        try:
            return value.shape, value.stride(), value.dtype, value.get_device()
        except (RuntimeError, NotImplementedError):  # of what is not dense
            check_kind(name, value)
            raise
    if name not in _EXPONENTS:
        return None
    number = host_value(name, value)
    own = EXPONENT_CODE if name == "outer_p" else lowering.INNER_CODE
    return number if number in own else "any"


def specs(
    descriptor: Pairwise, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned; on ``device`` alone, if it is given, as it is tuned."""
    if len(tensors) > 2:
        raise TypeError(f"specs must be the tensors of one call, got {len(tensors)}: {tensors!r}")
    request = _readable(Request.of(descriptor, *(*tensors, None)[:2], arguments))
    call = checks.check_call(*request)
    if is_empty(call):
        return []
    if device is not None:
        return plans.lower(request, call, device).specs
    problem, strides = problem_of(request, call)
    permitted = plans.precision(descriptor) or "fp32"
    return choose.specs(descriptor, problem, arch, strides, permitted)


def choices(descriptor: Pairwise, a, b=None, *more, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty out; see :func:`kernlib.tune`.

    Raises what :func:`run` raises, and UnsupportedError for tensors that are on no GPU.
    """
    # Which calls themselves do without.
    from kernlib.families.pairwise.choices import choices as choices_of

    return choices_of(_readable(Request.of(descriptor, a, b, arguments, more)))


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and inputs of ``dtypes``."""
    return choose.variants(descriptor, arch, tuple(DTYPE_NAMES[dtype] for dtype in dtypes))

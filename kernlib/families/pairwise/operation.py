"""The pairwise op: distance and kernel matrices of two sets of points, as they are called."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from kernlib.descriptors.base import check_flag, shown
from kernlib.errors import KernlibError
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.matrix import calls, key_of
from kernlib.families.pairwise.request import Request
from kernlib.run import run_kernel
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.numbers import host_value
from kernlib.runtime.tensors import check_dense, check_out_shape, refuse_any_overlap

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

    _Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])

_OPTIONS = {"out": None, "accumulate": False, "row_offset": 0, "col_offset": 0}
_plans, _launch, _first = calls.plans, calls.launch, calls.first


def _execute(*request) -> torch.Tensor:
    """:func:`calls.execute` of a request as the caller has it, whose hyperparameters may mean
    something else than kernels take. That is seen before there is a plan."""
    key = key_of(*request)
    try:
        plan = _plans.plans.get(key)
    except TypeError:  # an argument cannot be hashed, which is said there
        return calls.execute(*request)
    return _respelled(key, *request) if plan is None else _launch(plan, *request)


def _recorded(*request) -> torch.Tensor:
    """The result of a request whose gradient is recorded."""
    from kernlib.families.pairwise.gradients import autograd  # most calls need none

    _, _, _, out, *_, values = request
    several = [isinstance(value, torch.Tensor) and value.dim() > 0 for value in values.values()]
    if out is None and True in several:
        from kernlib.families.pairwise import per_point  # most calls need none

        respelled = per_point.computed(run, *request)
        if respelled is not None:
            return respelled
    return autograd.record(*request)


def _respelled(key, *request) -> torch.Tensor:
    """The result of a request for whose key there is no plan."""
    if not any(isinstance(t, torch.Tensor) and t.dim() for t in request[-1].values()):
        return _first(key, *request)
    from kernlib.families.pairwise import per_point  # calls with a plan need none

    result = per_point.computed(run, *request)
    return _first(key, *request) if result is None else result


def run(
    descriptor: Pairwise,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *more: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    lengthscale: torch.Tensor | None = None,
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
      numbers, or tensors of shape (), (L,) or (L, 1, 1) that stay on the device: L values give a
      result (L, M, N), even where there are as many features; one that has a value for each feature
      is a ``lengthscale``. Beside points without a batch (L,) is refused where L is M or N, since a
      value for each point may be meant. Device tensors are not looked at: a negative p gives
      whatever its formula gives.
    - ``feature_map``: a weight for each feature, (K,), or a matrix (K, K2), by which the points are
      multiplied first (:func:`kernlib.families.pairwise.feature_map.apply`).
    - ``lengthscale``: a value for each feature, (K,), or (L, 1, K), greater than 0, by which the
      points are divided first (automatic relevance determination); with it ``bandwidth`` is 1
      unless it is given too. In place of a ``feature_map``.
    - ``a_codes``, ``b_codes`` and ``tables``, with a descriptor that has ``categories``: see
      :func:`kernlib.families.pairwise.categories.operation.run`.
    - ``epsilon`` (default 0): with an epilogue, values smaller than it in magnitude count as 0.
    - ``regularization``: with an epilogue, added where ``m + row_offset == n + col_offset``, so
      that a block of a larger K(X, X) finds its diagonal. Of a square matrix without a batch it
      may be (N,), a value for each point, where ``row_offset == col_offset``.

    Gradients of all tensors are recorded, and those of the gradients: see
    ``docs/concepts/gradients.md``.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.
    """
    if more:
        checks.refuse_more(descriptor, more)
    if a is None:
        checks.refuse_missing(descriptor)
    if lengthscale is not None:
        from kernlib.families.pairwise.feature_map import scaled

        a, b, hyperparameters = scaled(
            descriptor, lengthscale, feature_map, a, b, out, hyperparameters
        )
    elif feature_map is not None:
        from kernlib.families.pairwise import (
            feature_map as pairwise_features,  # most calls need none
        )

        a, b = pairwise_features.apply(feature_map, a, b, out)
    request = descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
    if descriptor.categories:
        from kernlib.families.pairwise import per_point
        from kernlib.families.pairwise.categories import (
            operation as categories,  # most calls need none
        )

        result = per_point.computed(run, *request)
        return categories.run(*request) if result is None else result
    # any() over a generator would double the time
    if torch.is_grad_enabled() and True in [
        getattr(value, "requires_grad", False) for value in (a, b, out, *hyperparameters.values())
    ]:
        return _recorded(*request)
    return _execute(*request)


def _with_own_names(function: _Function) -> _Function:
    """cdist with an error for run_kernel's names of points, which says cdist's."""

    @functools.wraps(function)
    def cdist(*values, **given):
        for name in given:
            if name in ("a", "b"):
                raise TypeError(
                    f"cdist() got an unexpected keyword argument {name!r}: its points are x1 and "
                    "x2, as those of torch.cdist; a and b are those of run_kernel"
                )
        return function(*values, **given)

    return cdist


@_with_own_names
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

    ``p`` is 0 or greater: a real number, or a tensor of shape (), or (L,) for one batch dimension.
    float32, float64, float16 or bfloat16. ``out``, of the result's shape and dtype and any strides,
    is written in place. ``debug=True`` writes a line to stderr for each event.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> kl.cdist(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[5.]])
        >>> kl.cdist(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), p=float("inf"))
        tensor([[4.]])
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


RUNS = {Pairwise: run}


# Calls before anybody makes them.


def reductions() -> dict[str, Callable]:
    """The functions that a ``reduction`` may name in calls ahead of time."""
    from kernlib.families.pairwise.functions import reductions as module

    functions = (
        module.kernel_matmul, module.kernel_sum, module.kernel_logsumexp, module.kernel_min,
        module.kernel_argmin, module.kernel_topk,
    )  # fmt: skip
    return {function.__name__: function for function in functions}


def call_of(descriptor: Pairwise, tensors: tuple, arguments: dict) -> Callable:
    """The call that is meant, which a ``reduction`` among the arguments names. Raises TypeError and
    ValueError for another one and for tensors that are not its own."""
    arguments = dict(arguments)
    if "reduction" not in arguments:
        if len(tensors) > 2:
            raise TypeError(
                f"specs must be the tensors of one call, got {len(tensors)}: {tensors!r}"
            )
        return functools.partial(run, descriptor, *tensors, **arguments)
    name, functions = arguments.pop("reduction"), reductions()
    name = getattr(name, "__name__", name)
    if not isinstance(name, str) or name not in functions:
        raise ValueError(f"reduction must be one of {', '.join(functions)}, got {shown(name)}")
    names = operands_of(descriptor, name)
    if len(tensors) != len(names):
        raise TypeError(
            f"{name} of {descriptor.describe()} takes {', '.join(names)}, got {len(tensors)} "
            "tensors; k, largest, out and the rest go by name"
        )
    points = tensors if "b" in names else (tensors[0], None, *tensors[1:])
    return functools.partial(functions[name], descriptor, *points, **arguments)


def operands_of(descriptor: Pairwise, reduction: str) -> tuple[str, ...]:
    """The tensors that a reduction takes by place; those of a symmetric descriptor have no b."""
    return (*descriptor.operands, *["v"] * (reduction == "kernel_matmul"))


def planned(descriptor: Pairwise, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan. A reduction makes its own where it is called, of
    kernels that are loaded."""
    if "reduction" in arguments:
        return []
    from kernlib.families.pairwise.matrix import MATRIX, repeated
    from kernlib.runtime.ahead import Planned, is_recorded

    if not tensors:
        checks.refuse_missing(descriptor)
    a, b, *more = (*tensors, None) if len(tensors) == 1 else tensors
    checks.refuse_out(arguments.get("out"), **{"a": a, "b": b, **arguments})
    recorded = is_recorded(None, *tensors, *arguments.values())
    request = tuple(_request_of(descriptor, a, b, arguments, tuple(more)).readable())
    return [Planned(MATRIX, calls, request, request, recorded, repeated)]


def _request_of(descriptor: Pairwise, a, b, arguments: dict, more: tuple) -> Request:
    """The request of a call with keyword ``arguments``, mapped and spelt as kernels take it. Raises
    TypeError for ``more`` tensors."""
    if more:
        checks.refuse_more(descriptor, more)
    if descriptor.categories:
        checks.refuse_categories(descriptor)
    if arguments.get("lengthscale") is not None:
        from kernlib.families.pairwise.feature_map import scaled

        out, mapped = arguments.get("out"), arguments.get("feature_map")
        a, b, arguments = scaled(descriptor, arguments["lengthscale"], mapped, a, b, out, arguments)
    elif arguments.get("feature_map") is not None:
        from kernlib.families.pairwise import feature_map  # most calls need none

        a, b = feature_map.apply(arguments["feature_map"], a, b, arguments.get("out"))
    options = [arguments.get(name, default) for name, default in _OPTIONS.items()]
    option_names = (*_OPTIONS, "feature_map", "lengthscale")
    values = {name: arguments[name] for name in arguments if name not in option_names}
    if any(isinstance(value, torch.Tensor) and value.dim() for value in values.values()):
        from kernlib.families.pairwise import per_point  # most calls need none

        respelled = per_point.respelled(a, b, values, options[0], tuple(options[2:]))
        if respelled is not None:  # the diagonal is added behind the kernel
            a, b, values, _ = respelled
    return Request(descriptor, a, b, *options, values)


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and inputs of ``dtypes``."""
    from kernlib.families.pairwise.lowering import choose

    return choose.variants(descriptor, arch, tuple(DTYPE_NAMES[dtype] for dtype in dtypes))

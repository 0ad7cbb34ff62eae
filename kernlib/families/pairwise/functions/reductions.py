"""Reductions of a kernel matrix that is never stored: products with it, sums, log-sum-exp, the
smallest entry and the k nearest of each row.

Memory is O(M + N), of results, partial results and at most one block of the matrix of 64 MB.
Gradients take half a gigabyte more at most; those that are differentiated themselves, O(M N).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import as_int, check_flag, real, refuse_descriptor
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions import arguments, operation
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.rehearsal import is_traced
from kernlib.runtime.tensors import (
    check_layout,
    check_memory,
    refuse_any_overlap,
)

if TYPE_CHECKING:
    from kernlib.families.pairwise.formula.descriptor import Formula
    from kernlib.families.pairwise.formula.pairs import Pairs

FORMULA = "formula"  # the package of formulas, of which not all that follows holds
_USUAL = 1e-18, 1e18  # bandwidths whose squares have reciprocals in float32
_WIDE_RANGE = (torch.float32, torch.float64, torch.bfloat16)  # float16 has no such points


def kernel_matmul(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[l,m,c] = sum_n K[l,m,n] v[l,n,c]`` with ``K = run_kernel(descriptor, a, b, ...)``.

    - ``a`` (M, K) or (L, M, K), ``b`` (N, K) or (L, N, K), and the keyword arguments are those of
      :func:`kernlib.families.pairwise.operation.run`; with a ``symmetric`` descriptor ``b`` may be
      None. float32, float64, float16 or bfloat16, any strides. ``hyperparameters`` are those of
      the descriptor, such as ``bandwidth``.
    - ``v`` (N,), (N, C) or (L, N, C), of the inputs' dtype. The result is (M,), (M, C) or
      (L, M, C), with a batch where an argument has one, of the inputs' dtype.
    - ``out``, of the result's shape, is written in place; half types also take a float32 one.
    - ``feature_map``: a weight for each feature, (K,), or a matrix (K, K2), by which the points are
      multiplied first (:func:`kernlib.families.pairwise.feature_map.apply`);
      ``lengthscale``: a value for each feature, (K,), by which they are divided first.
    - ``pairs``: a :class:`kernlib.Pairs`, ragged batches or blocks of pairs, by default all pairs.
    - ``row_offset``, ``col_offset``: ints by which the diagonal that ``regularization`` is added to
      is shifted. ``debug=True`` writes a line to stderr for each event.

    Half types are summed in float32. On a GPU, kernels that keep no entry of K compute up to 16
    columns of v (64 of them for up to 16 features), and on sm_90 any number for squared differences
    and dot products of up to 128 features. float64 has one kernel, for up to 16 columns, or 8 of
    most norms of more than 16 features. Everything else goes by blocks of K that are multiplied as
    the descriptor's ``precision`` says, or torch's setting without one.
    Differentiable by tensors among a, b, v, feature_map and the hyperparameters, without storing K
    either. ``torch.compile`` and its like see one operator.

    Raises ValueError and TypeError that name the argument; RuntimeError for an ``out`` where a
    gradient is asked for. After the kernel products of the KeOps and kermac projects.

    Example:
        >>> a, b, v = torch.zeros(1, 2), torch.eye(2), torch.tensor([1.0, 2.0])
        >>> kl.kernel_matmul(kl.squared_distance(), a, b, v)
        tensor([3.])
    """
    if v is None:
        raise TypeError("v must be a tensor, got NoneType")
    offsets = row_offset, col_offset
    return _run(
        "matmul", descriptor, a, b, v, out, *offsets, feature_map, hyperparameters, pairs, debug
    )


def kernel_sum(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[l,m] = sum_n K[l,m,n]``, (M,) or (L, M): the product with ones.

    ``descriptor``, ``a``, ``b``, ``row_offset``, ``col_offset``, ``feature_map``, ``pairs``,
    ``debug`` and ``hyperparameters`` are those of :func:`kernel_matmul`, as are dtypes, gradients
    and what it raises. After the Sum reduction of the KeOps project.

    Example:
        >>> kl.kernel_sum(kl.l1_distance(), torch.zeros(1, 2), torch.eye(2))
        tensor([2.])
    """
    offsets = row_offset, col_offset
    return _run(
        "sum", descriptor, a, b, None, None, *offsets, feature_map, hyperparameters, pairs, debug
    )


def kernel_logsumexp(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    row_potential: torch.Tensor | None = None,
    col_potential: torch.Tensor | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[l,m] = f[l,m] + log sum_n exp(K[l,m,n] + g[l,n])``, (M,) or (L, M), with no overflow on
    the way; -inf for no n. Values of ``gaussian()`` and its like are exponentials already: for the
    logarithm of a sum of kernel values pass their exponent,
    ``squared_distance(epilogue=Custom("-s * v", ("s",)))``.

    - ``row_potential``, f, (M,) or (L, M), and ``col_potential``, g, (N,) or (L, N), are 0 where
      they are None: the potentials of entropic optimal transport, or logarithms of weights; a
      column whose g is -inf is left out. Of the inputs' dtype or, beside half types, float32, which
      makes the result float32. g is added in the kernels, in the arithmetic's dtype.

    ``descriptor``, ``a``, ``b``, ``row_offset``, ``col_offset``, ``feature_map``, ``pairs``,
    ``debug`` and ``hyperparameters`` are those of :func:`kernel_matmul`, as are dtypes, gradients,
    those of both potentials too, and what it raises. ValueError and TypeError name a potential of
    another shape, dtype or device. float64 on a GPU goes by blocks of K from 11 features on, and
    where powers take logarithms. After the LogSumExp reduction of the KeOps project.

    Example:
        >>> kl.kernel_logsumexp(kl.l1_distance(), torch.zeros(1, 2), torch.eye(2))  # ln(2 e)
        tensor([1.6931])
    """
    offsets = row_offset, col_offset

    def run(v: torch.Tensor | None = None, wide: bool = False) -> torch.Tensor:
        maps = feature_map, hyperparameters, pairs, debug
        return _run("logsumexp", descriptor, a, b, v, None, *offsets, *maps, wide)

    if row_potential is None and col_potential is None:
        return run()
    from kernlib.families.pairwise.reductions import potentials  # most calls need none

    if pairs is not None or _is_formula(descriptor):
        values = hyperparameters | ({"feature_map": feature_map} if feature_map is not None else {})
        options = {"row_offset": row_offset, "col_offset": col_offset, "pairs": pairs}
        again = partial(kernel_logsumexp, debug=debug, **options, **values)
        return potentials.of_formula(again, descriptor, a, b, row_potential, col_potential)
    return potentials.added(run, descriptor, a, b, (row_potential, col_potential), offsets)


def kernel_min(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest entry of each row of K and its column: values of the inputs' dtype, and int64
    indices, both (M,) or (L, M). The lowest index of equal ones; a NaN is smaller than any number,
    as in ``torch.min``.

    ``descriptor``, ``a``, ``b``, ``row_offset``, ``col_offset``, ``feature_map``, ``pairs``,
    ``debug`` and ``hyperparameters`` are those of :func:`kernel_matmul`. Raises what that raises,
    and ValueError where b has no points. Blocks of K are those of :func:`kernel_logsumexp`. Values
    are differentiable, each by its own pair. After the Min_ArgMin reduction of the KeOps project.

    Example:
        >>> kl.kernel_min(kl.l2_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0], [0, 2]]))
        (tensor([2.]), tensor([1]))
    """
    if debug is not False:
        maps = {"row_offset": row_offset, "col_offset": col_offset, "feature_map": feature_map}
        maps |= {"pairs": pairs}
        return _heard(debug, kernel_min, descriptor, a, b, **maps, **hyperparameters)
    if pairs is not None or _is_formula(descriptor):
        formulas, offsets = _formulas(), (row_offset, col_offset)
        request = descriptor, a, b, None, *offsets, feature_map, hyperparameters
        formula, values = formula_call(*request)
        if pairs is None and (plain := formulas.plain_of(formula.text, values)) is not None:
            formulas.arguments.checked(formula, values)
            return kernel_min(plain.descriptor, plain.a, plain.b, **plain.values)
        return formulas.extreme(formula, values, pairs=pairs)
    a, b, hyperparameters = _placed(descriptor, feature_map, a, b, hyperparameters)
    again = _respelled(a, b, None, (row_offset, col_offset), hyperparameters)
    if again is not None:
        a, b, hyperparameters, diagonal = again
        if diagonal is not None:
            _refuse_diagonal("kernel_min")
    offsets = row_offset, col_offset
    if isinstance(descriptor, Pairwise) and descriptor.categories:
        return _with_categories("min", descriptor, a, b, None, None, *offsets, hyperparameters)
    recorded = torch.is_grad_enabled() and _requires_gradient(a, b, None, None, hyperparameters)
    if recorded or is_traced():
        return operation.choose("min", descriptor, a, b, 1, False, *offsets, hyperparameters)
    return operation.run("min", descriptor, a, b, None, None, *offsets, hyperparameters)


def kernel_argmin(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """The column of the smallest entry of each row of K, int64, (M,) or (L, M): the nearest point,
    for a distance.

    ``descriptor``, ``a``, ``b``, ``row_offset``, ``col_offset``, ``feature_map``, ``pairs``,
    ``debug`` and ``hyperparameters`` are those of :func:`kernel_matmul`. The indices are those of
    :func:`kernel_min`, which says what is raised: a call raises the same.

    Example:
        >>> kl.kernel_argmin(kl.l2_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4], [0, 2]]))
        tensor([1])
    """
    maps = {"row_offset": row_offset, "col_offset": col_offset, "feature_map": feature_map}
    maps |= {"pairs": pairs}
    if debug is not False:
        return _heard(debug, kernel_argmin, descriptor, a, b, **maps, **hyperparameters)
    # What Dynamo records within torch.no_grad() leaves gradients off where it raises (torch 2.13).
    with nullcontext() if is_dynamo_compiling() else torch.no_grad():
        return kernel_min(descriptor, a, b, **maps, **hyperparameters)[1]


def kernel_topk(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    k: int = 1,
    largest: bool = False,
    *,
    row_offset: int = 0,
    col_offset: int = 0,
    feature_map: torch.Tensor | None = None,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` smallest (or ``largest``) entries of each row of K in order, and their columns:
    values of the inputs' dtype, and int64 indices, both (M, k) or (L, M, k), as of ``torch.topk``.
    For a distance the k nearest points. Of equal entries those of the lowest index, in its order; a
    NaN is larger than any number. On a GPU, up to 128 of half types and float32 (of more than 16
    features fewer, as shared memory has room) are kept beside the distances, without storing an
    entry of K; more, and float64, are found by sorting blocks of it.

    ``descriptor``, ``a``, ``b``, ``row_offset``, ``col_offset``, ``feature_map``, ``pairs``,
    ``debug`` and ``hyperparameters`` are those of :func:`kernel_matmul`. Raises what that raises,
    and ValueError for a k that is not from 1 to N. Values are differentiable, each by its own pair.
    After the KMin_ArgKMin reduction of the KeOps project.

    Example:
        >>> points = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 1.0]])
        >>> kl.kernel_topk(kl.l2_distance(), torch.zeros(1, 2), points, k=2)
        (tensor([[1., 2.]]), tensor([[2, 1]]))
    """
    if debug is not False:
        maps = {"row_offset": row_offset, "col_offset": col_offset, "feature_map": feature_map}
        maps |= {"pairs": pairs}
        return _heard(debug, kernel_topk, descriptor, a, b, k, largest, **maps, **hyperparameters)
    arguments.refuse_own_names("kernel_topk", descriptor, ("k", "largest"))
    check_flag("largest", largest)
    k = k if type(k) is int else as_int("k", k)
    if pairs is not None or _is_formula(descriptor):
        formulas, offsets = _formulas(), (row_offset, col_offset)
        request = descriptor, a, b, None, *offsets, feature_map, hyperparameters
        formula, values = formula_call(*request)
        if pairs is None and (plain := formulas.plain_of(formula.text, values)) is not None:
            formulas.arguments.checked(formula, values)
            return kernel_topk(plain.descriptor, plain.a, plain.b, k, largest, **plain.values)
        return formulas.topk(formula, values, k, largest, pairs)
    a, b, hyperparameters = _placed(descriptor, feature_map, a, b, hyperparameters)
    again = _respelled(a, b, None, (row_offset, col_offset), hyperparameters)
    if again is not None:
        a, b, hyperparameters, diagonal = again
        if diagonal is not None:
            _refuse_diagonal("kernel_topk")
    offsets = row_offset, col_offset
    if isinstance(descriptor, Pairwise) and descriptor.categories:
        nearest = arguments.Nearest(k, largest)
        return _with_categories(nearest, descriptor, a, b, None, None, *offsets, hyperparameters)
    return operation.choose("topk", descriptor, a, b, k, largest, *offsets, hyperparameters)


def _run(
    reduction,
    descriptor,
    a,
    b,
    v,
    out,
    row_offset,
    col_offset,
    feature_map,
    values,
    pairs=None,
    debug=False,
    wide=False,
) -> torch.Tensor:
    """A reduction that has one tensor for its result, if ``wide`` of the arithmetic's dtype."""
    if debug is not False:
        request = (reduction, descriptor, a, b, v, out, row_offset, col_offset, feature_map, values)
        call = partial(_run, *request, pairs, wide=wide)
        call.__name__ = f"kernel_{reduction}"  # in the line that is written
        return _heard(debug, call)
    # The second written out: it is asked of every call.
    if pairs is not None or getattr(descriptor, "package", "") == FORMULA:
        formulas = _formulas()
        offsets = row_offset, col_offset
        formula, values = formula_call(descriptor, a, b, v, *offsets, feature_map, values)
        if pairs is None and (plain := formulas.plain_of(formula.text, values)) is not None:
            formulas.arguments.checked(formula, values)
            points = plain.descriptor, plain.a, plain.b
            return _run(reduction, *points, v, out, 0, 0, None, plain.values)
        options = {"out": out} if reduction == "matmul" else {}
        return formulas.reduced(reduction, formula, v, values, pairs=pairs, **options)
    a, b, values = _placed(descriptor, feature_map, a, b, values, out)
    again = _respelled(a, b, v, (row_offset, col_offset), values)
    if again is not None:
        return _again(again, reduction, descriptor, v, out, row_offset, col_offset, wide)
    request = (reduction, descriptor, a, b, v, out, row_offset, col_offset, values, wide)
    if isinstance(descriptor, Pairwise) and descriptor.categories:
        return _with_categories(*request)
    if is_traced():
        from kernlib import run

        return run.pairwise_reduce_operators.run(*request)
    if torch.is_grad_enabled() and _requires_gradient(a, b, v, out, values):
        from kernlib.families.pairwise.reductions import gradients

        return gradients.run(*request)
    return operation.run(*request)


def _is_formula(descriptor) -> bool:
    """Whether a descriptor is a :class:`kernlib.Formula`."""
    return getattr(descriptor, "package", "") == FORMULA


def _formulas() -> ModuleType:
    """The module that runs formulas."""
    from kernlib.families.pairwise.formula import operation  # most calls need none

    return operation


def formula_call(
    descriptor, a, b, v, row_offset: int, col_offset: int, feature_map, values: dict
) -> tuple[Formula, dict]:
    """A descriptor as a formula, and its tensors. Raises what a call of a ``Pairwise`` raises, and
    ValueError for offsets, which formulas do not have."""
    from kernlib.families.pairwise.formula import algebra, operation  # most calls need none

    if isinstance(descriptor, Pairwise) and not descriptor.categories:
        _check_pairwise(descriptor, a, b, v, feature_map, values)
        b = a if b is None else b
        values = {
            name: x.reshape(()) if isinstance(x, torch.Tensor) and x.numel() == 1 else x
            for name, x in values.items()
        }
    elif not isinstance(descriptor, Pairwise) and not _is_formula(descriptor):
        refuse_descriptor("Pairwise or Formula", descriptor)
    if row_offset != 0 or col_offset != 0:
        raise ValueError(
            "row_offset and col_offset shift a diagonal that is regularized, and a formula says "
            "itself where it is: where(row + 5 == col, 0.1, 0)"
        )
    formula = algebra.formula_of(descriptor)
    values = values if feature_map is None else {**values, "feature_map": feature_map}
    return formula, operation.mapped(formula, a, b, values)


def _check_pairwise(descriptor: Pairwise, a, b, v, feature_map, values: dict) -> None:
    """Raises what a product of no points raises, and for a v of another length than b."""
    arguments.check_tensors(descriptor, a, b, v)
    none = [t[..., :0, :] if t is not None and t.dim() > 1 else t for t in (a, b)]
    with torch.no_grad():
        if v is None:
            _run("sum", descriptor, *none, None, None, 0, 0, feature_map, values)
            return
        no_v = v[..., :0, :] if v.dim() > 1 else v[:0] if v.dim() else v
        _run("matmul", descriptor, *none, no_v, None, 0, 0, feature_map, values)


def _heard(debug: bool, *call, **named):
    from kernlib.debug import heard  # most calls need none

    return heard(debug, *call, **named)


def _respelled(a, b, v, offsets: tuple, values: dict):
    """The call as kernels take it where hyperparameters are spelt otherwise, else None."""
    for name, value in values.items():
        try:
            is_several = isinstance(value, torch.Tensor) and value.dim() > 0
        except ValueError:  # of a parameter without its values yet
            check_layout(name, value)
            raise
        if is_several:
            from kernlib.families.pairwise import per_point  # most calls need none

            return per_point.respelled(a, b, values, v, offsets)
    return None


def _again(made, reduction: str, descriptor, v, out, row_offset: int, col_offset: int, wide: bool):
    """A reduction that is called again as kernels take it."""
    from kernlib.families.pairwise import per_point

    def call(a, b, v, values, out=None, wide=False):
        rest = row_offset, col_offset, None, values
        return _run(reduction, descriptor, a, b, v, out, *rest, wide=wide)

    a, b, values, diagonal = made
    if diagonal is None:
        return call(a, b, v, values, out, wide)
    if reduction == "logsumexp":
        _refuse_diagonal("kernel_logsumexp")
    result = per_point.products(call, made, v)
    if out is None:
        return result
    if result.requires_grad:
        raise RuntimeError("out takes no gradient: leave it out, or call under torch.no_grad()")
    arguments.check_result(out, tuple(result.shape), a)
    check_memory(out)
    refuse_any_overlap(out, a=a, b=b, v=v)
    return out.copy_(result)


def _refuse_diagonal(name: str) -> NoReturn:
    raise ValueError(
        f"regularization of {name} must be one value for all points; kernel_matmul, kernel_sum and "
        "run_kernel take one for each"
    )


def _with_categories(reduction, *request):
    """A reduction by blocks of a matrix with categories."""
    from kernlib.families.pairwise.reductions import categories

    nearest = isinstance(reduction, arguments.Nearest)
    named = categories.Reduction("topk", reduction) if nearest else categories.Reduction(reduction)
    return categories.run(named, *request)


def _placed(descriptor, feature_map, a, b, values: dict, out=None) -> tuple:
    """Points and hyperparameters, mapped, and in a unit near a bandwidth whose square has no
    reciprocal, which kernels of squared distances multiply by."""
    lengthscale = values.get("lengthscale")
    if "lengthscale" in values:
        values = {name: value for name, value in values.items() if name != "lengthscale"}
    if lengthscale is not None:
        arguments.check_tensors(descriptor, a, b, None)
        from kernlib.families.pairwise.feature_map import scaled  # most calls need none

        a, b, values = scaled(descriptor, lengthscale, feature_map, a, b, out, values)
    elif feature_map is not None:
        from kernlib.families.pairwise import feature_map as pairwise_features

        a, b = pairwise_features.apply(feature_map, a, b, out)
    bandwidth = _far_bandwidth(values.get("bandwidth"))
    if bandwidth is None:
        return a, b, values
    from kernlib.families.pairwise import units

    values = values | {"bandwidth": bandwidth}
    points = (a,) if b is None else (a, b)
    are_wide = all(isinstance(t, torch.Tensor) and t.dtype in _WIDE_RANGE for t in points)
    if not are_wide or not isinstance(descriptor, Pairwise):  # checks will say so
        return a, b, values
    if not units.is_of_squares(descriptor, values):
        return a, b, values
    unit = units.unit_of(descriptor, values, accumulator(a.dtype))
    return (a, b, values) if unit is None else units.in_unit(unit, a, b, values)[:3]


def _far_bandwidth(bandwidth: object) -> float | None:
    """A bandwidth if it is a number far from the usual range, else None."""
    if type(bandwidth) is float and _USUAL[0] <= bandwidth <= _USUAL[1]:
        return None  # before what takes 0.4 us
    if isinstance(bandwidth, torch.Tensor) or real(bandwidth) is None:
        return None
    try:
        bandwidth = float(bandwidth)
    except OverflowError:
        return None
    return None if _USUAL[0] <= bandwidth <= _USUAL[1] or not 0 < bandwidth < inf else bandwidth


def _requires_gradient(a, b, v, out, values: dict) -> bool:
    """Whether one of a call's tensors requires a gradient; others than tensors do not."""
    for t in (a, b, v, out, *values.values()):  # any() over a generator would double the time
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return True
    return False

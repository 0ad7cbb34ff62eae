"""The average gradient outer product of a kernel machine, whose gradients are never all stored."""

from __future__ import annotations

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import check_flag, refuse_descriptor
from kernlib.families.pairwise import checks, per_point
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import backward, formula, norms, primitive
from kernlib.families.pairwise.gradients.arguments import Kind, Operands
from kernlib.families.pairwise.gradients.backward import Block, Call
from kernlib.families.pairwise.gradients.weights import by_norms, by_sums, is_plain
from kernlib.families.pairwise.reductions.arguments import refuse_own_names
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.numbers import check_kind, plain
from kernlib.runtime.precision import times, without_autocast
from kernlib.runtime.tensors import (
    check_dense,
    check_memory,
    check_out_shape,
    common_batch,
    is_lazy,
    materialised,
    refuse_any_overlap,
    refuse_distributed,
    refuse_gradients,
    refuse_transforms,
)


@torch.no_grad()
def _sum_products(call: Call, total, x, z, coefficients, tensors: dict, centred: bool):
    """The averages, into ``total`` of zeros, (L, K, K) or of diagonals (L, K), for checked
    arguments that all have a batch, in its dtype."""
    outputs, (queries, features) = coefficients.shape[1], x.shape[1:]
    precision = call.descriptor.precision
    diagonal, largest = total.dim() == 2, max(z.shape[1], outputs * features)
    for block in backward.blocks(total.shape[0], queries, largest, backward.BLOCK_ENTRIES):
        part = total[block.part]
        grads = _gradients(call, block, len(part), x, z, coefficients, tensors)
        if centred:
            if block.rows.start == 0:  # a shift near the mean: what follows does not cancel
                shift, moved = grads.mean(2, keepdim=True), 0
            grads = grads - shift
            moved = moved + grads.sum(2)
        flat = grads.flatten(1, 2)
        part += flat.square().sum(1) if diagonal else times(precision, flat.mT, flat)
        if centred and block.rows.stop >= queries:
            squares = moved.square().sum(1) if diagonal else times(precision, moved.mT, moved)
            part -= squares / queries
    total /= outputs * queries
    return total


def _gradients(call: Call, block: Block, batch: int, x, z, coefficients, tensors: dict):
    """``d/dx_q sum_t c[o,t] K(x_q, z_t)`` of a block of queries: (L, O, Q, K) or (1, O, Q, K)."""
    rows, points, c = block.of(x), block.entries(z), block.entries(coefficients)
    values = call.numbers | {name: block.entries(t) for name, t in tensors.items()}
    sums = formula.sums_of(call.descriptor, values)
    shape = max(t.shape[0] for t in (rows, points, c)), c.shape[1], *rows.shape[1:]
    scales = None
    if is_plain(call.descriptor, values):
        sides = max(rows.shape[0], points.shape[0])
        weights = x.new_ones(()).expand(sides, rows.shape[1], points.shape[1])
    elif x.device.type == "cpu" and norms.are_values(call.descriptor, values):
        # On a GPU no kernel of tensor cores takes scales.
        n = norms.of(sums, rows, points)
        weights = by_norms(call.descriptor, sums, values, n)
        if weights is not None:
            weights, scales = norms.shared(sums.p, weights, n)
    else:
        weights = by_sums(call.descriptor, sums, values, rows, points)
    if weights is None or 0 in (*weights.shape, *shape):
        return x.new_zeros(shape)
    if scales is None and backward.by_formula(sums):
        by_output = [backward.points_gradient(sums, rows, points, weights * column[:, None], True)
                for column in c.unbind(1)]  # fmt: skip
        return torch.stack(by_output, 1)
    operator, inner = sums.descriptor.operator, sums.descriptor.inner
    kind = Kind(operator, inner, True, False, scales is not None)
    return primitive.execute(
        kind, Operands(rows, points, weights, c, scales), None, False, sums.given
    )


@eager_only
def agop(
    descriptor: Pairwise,
    x: torch.Tensor,
    z: torch.Tensor,
    coefficients: torch.Tensor,
    *,
    diagonal: bool = False,
    centred: bool = False,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """The average gradient outer product of ``f_o(x) = sum_t coefficients[o,t] K(x, z_t)``:
    ``sum_oq G[o,q] G[o,q]^T / (O Q)`` with ``G[o,q] = d f_o / d x`` at ``x[q]``.

    - ``x`` (Q, K) or (L, Q, K), the queries; ``z`` (T, K) or (L, T, K), the points of the machine;
      ``coefficients`` (O, T) or (L, O, T), one row for each output, or (T,) for one. One dtype, any
      strides; half types are computed in float32. Batches of size 1 broadcast.
    - The result is (K, K), or with ``diagonal=True`` its diagonal (K,); behind a batch if there is
      one. It is written to ``out``, if that is given, which for half types may be float32.
    - ``centred=True`` subtracts from each gradient the mean over the queries of its output.
    - ``hyperparameters`` are the descriptor's, such as ``bandwidth``: numbers, or tensors of shape
      (), (L,) or (L, 1, 1). In place of a ``feature_map`` M pass the mapped points: of the points
      themselves the result is then ``M A M^T``. ``descriptor`` is a kernel such as ``gaussian()``.
    - ``debug=True`` writes a line to stderr for each event.

    Gradients exist for a block of queries at a time, so memory is O(block (T + O K) + K^2). Where
    a query is one of the points, a distance that is not smooth at 0 contributes 0. Descriptors are
    not ``symmetric``: for the points themselves pass them twice.

    This is the step of recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin
    2024), and what xRFM asks for: the metric of the next round is the result, a root of it, or its
    diagonal.

    Raises ValueError and TypeError that name the argument, RuntimeError for tensors that require a
    gradient while gradients are recorded.

    Example:
        >>> x, z = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
        >>> kl.agop(kl.squared_distance(), x, z, torch.ones(1))  # the gradient is 2 (x - z)
        tensor([[ 4.,  8.], [ 8., 16.]])
    """
    check_dense(("x", "z", "coefficients"), x=x, z=z, coefficients=coefficients, out=out)
    refuse_own_names("agop", descriptor, ("z", "coefficients", "diagonal", "centred"))
    _refuse_maps(hyperparameters)
    check_flag("diagonal", diagonal)
    check_flag("centred", centred)
    refuse_transforms(checks.NO_TRANSFORMS, x=x, z=z, coefficients=coefficients, out=out)
    refuse_distributed(x=x, z=z, coefficients=coefficients)
    refuse_gradients("agop", x=x, z=z, coefficients=coefficients, out=out, **hyperparameters)
    _check_points(x, z, coefficients)
    again = per_point.respelled(x, z, hyperparameters, coefficients)
    if again is not None:  # of a constant the gradient is 0
        x, z, hyperparameters, _ = again
    values = {k: v for k, v in hyperparameters.items() if isinstance(v, torch.Tensor)}
    batch = _check_batch(x, z, coefficients, values)
    _check_call(descriptor, x, z, hyperparameters)
    shape = (x.shape[-1],) if diagonal else (x.shape[-1],) * 2
    shape = shape if batch is None else (batch, *shape)
    if out is not None:
        _check_out(out, x, shape)
        refuse_any_overlap(out, x=x, z=z, coefficients=coefficients, **values)
    if x.is_meta:
        return x.new_empty(shape) if out is None else out
    numbers = {k: plain(k, v) for k, v in hyperparameters.items() if k not in values}
    wide = accumulator(x.dtype)
    tensors = {name: value.to(x.device, wide) for name, value in values.items()}
    points = (_ready(t, wide) for t in (x, z, coefficients))
    call = Call(descriptor, 0, 0, numbers, tuple(tensors))
    total = x.new_zeros(1 if batch is None else batch, *shape[-1 if diagonal else -2 :], dtype=wide)
    with without_autocast(x.device):
        average = _sum_products(call, total, *points, tensors, centred).view(shape)
    return average.to(x.dtype) if out is None else out.copy_(average)


def _ready(t: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    t = (t[None] if t.dim() == 1 else t).to(wide)
    return backward.batched(materialised(t) if is_lazy(t) else t)


# Checks.


def _check_points(x, z, coefficients) -> None:
    """Shapes, dtypes and devices. Raises ValueError and TypeError."""
    for name, t in (("x", x), ("z", z)):
        if t.dim() not in (2, 3):
            raise ValueError(f"{name} must be (N, K) or (L, N, K), got shape {tuple(t.shape)}")
        if t.dtype not in DTYPE_NAMES:
            dtypes = ", ".join(map(str, DTYPE_NAMES))
            raise TypeError(f"{name} must be one of {dtypes}, got {t.dtype}")
    if coefficients.dim() not in (1, 2, 3):
        raise ValueError(
            f"coefficients must be (T,), (O, T) or (L, O, T), got shape {tuple(coefficients.shape)}"
        )
    for name, t in (("z", z), ("coefficients", coefficients)):
        if t.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {t.device}")
    if x.shape[-1] != z.shape[-1]:
        raise ValueError(f"x and z must have as many features, got {x.shape[-1]}, {z.shape[-1]}")
    if coefficients.shape[-1] != z.shape[-2]:
        raise ValueError(
            f"coefficients must have one column for each of the {z.shape[-2]} points of z, got "
            f"shape {tuple(coefficients.shape)}"
        )
    if x.shape[-2] == 0 or 0 in coefficients.shape[:-1]:
        raise ValueError("an average needs a query in x and a row in coefficients, got none")


def _refuse_maps(values: dict) -> None:
    """Raises TypeError for a map of the features."""
    for name, mapped in (("feature_map", "multiplied"), ("lengthscale", "divided")):
        if name in values:
            raise TypeError(
                f"agop takes no {name}: give it the points {mapped} by it, which the gradients "
                "are by then"
            )


def _check_call(descriptor: Pairwise, x, z, values: dict) -> None:
    """Raises TypeError for another descriptor, and what a call of it would raise."""
    if not isinstance(descriptor, Pairwise):
        refuse_descriptor("Pairwise such as gaussian()", descriptor)
    if descriptor.symmetric:
        raise ValueError("agop differentiates by x alone: use symmetric=False, and pass x twice")
    if descriptor.categories:
        raise ValueError(
            f"{descriptor.describe()} has categories, and agop takes no categories, whose codes "
            "have no derivative: give it a descriptor of the points alone"
        )
    checks.check_call(descriptor, x, z, None, False, 0, 0, values)


def _check_batch(x, z, coefficients, values: dict) -> int | None:
    """The batch, None if nothing has one. Raises ValueError when two differ."""
    named = {"x": x, "z": z, "coefficients": coefficients}
    sizes = {name: t.shape[0] for name, t in named.items() if t.dim() == 3}
    for name, value in values.items():
        check_kind(name, value)
        if value.dim():
            sizes[name] = value.shape[0]
    batch = common_batch(sizes)
    return batch if batch != 1 or any(t.dim() == 3 for t in named.values()) else None


def _check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple) -> None:
    check_out_shape(out, shape)
    if out.dtype not in (x.dtype, accumulator(x.dtype)):
        raise TypeError(f"out must be {x.dtype}, as x is, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}")
    check_memory(out)

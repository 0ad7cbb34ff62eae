"""Reductions that all descriptors of pairs go as formulas for: softmax-weighted sums, means, counts
below a threshold, and neighbours within a radius."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.families.pairwise.formula import operation
from kernlib.families.pairwise.functions.reductions import formula_call

if TYPE_CHECKING:
    from kernlib.families.pairwise.descriptor import Pairwise
    from kernlib.families.pairwise.formula.descriptor import Formula
    from kernlib.families.pairwise.formula.pairs import Pairs


def kernel_softmax_matmul(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[m,c] = sum_n p[m,n] v[n,c]`` with ``p[m,n] = exp(K[m,n]) / sum_n exp(K[m,n])``: a mean
    of v by weights that add up to 1, with no overflow on the way, and without storing K.

    - ``descriptor``, ``a`` (M, K), ``b`` (N, K), ``hyperparameters`` and ``debug`` are those of
      :func:`kernlib.kernel_matmul`, for a :class:`kernlib.Formula` too.
    - ``v`` (N,), (N, C) or (L, N, C). The result is (M,), (M, C) or (L, M, C).
    - ``pairs``: a :class:`kernlib.Pairs`, by default all. A row without pairs, or all of whose
      values are -inf, is 0.

    It is a log-sum-exp, which both passes of gradients share, and a sum. Gradients of every order
    go to all tensors. Raises ValueError and TypeError that name the argument. After the
    SumSoftMaxWeight reduction of the KeOps project.

    Example:
        >>> a, b, v = torch.zeros(1, 2), torch.eye(2), torch.tensor([1.0, 3.0])
        >>> kl.kernel_softmax_matmul(kl.squared_distance(), a, b, v)
        tensor([2.])
    """
    if debug is not False:
        return _heard(
            debug, kernel_softmax_matmul, descriptor, a, b, v, pairs=pairs, **hyperparameters
        )
    if v is None:
        raise TypeError("v must be a tensor, got NoneType")
    formula, values = formula_call(descriptor, a, b, v, 0, 0, None, hyperparameters)
    return operation.softmax_matmul(formula, v, values, pairs=pairs)


def kernel_mean(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[m] = sum_n K[m,n] / N``, or with v ``sum_n K[m,n] v[n,c] / N``; of a row's ``pairs``
    where they are given, and NaN for a row that has none.

    ``descriptor``, ``a``, ``b``, ``v``, ``debug`` and ``hyperparameters`` are those of
    :func:`kernlib.kernel_matmul`, of a :class:`kernlib.Formula` too, as are dtypes and what it
    raises; ``pairs`` is a :class:`kernlib.Pairs`. Gradients of every order go to all tensors.
    Raises ValueError and TypeError that name the argument.

    Example:
        >>> kl.kernel_mean(kl.l1_distance(), torch.zeros(1, 2), torch.tensor([[1.0, 1], [0, 4]]))
        tensor([3.])
    """
    if debug is not False:
        return _heard(debug, kernel_mean, descriptor, a, b, v, pairs=pairs, **hyperparameters)
    formula, values = formula_call(descriptor, a, b, v, 0, 0, None, hyperparameters)
    if v is None:
        result = operation.total(formula, values, pairs=pairs)
    else:
        result = operation.matmul(formula, v, values, pairs=pairs)
    if pairs is None:
        return result / operation.columns_of(formula, values)
    counts = (pairs.rows[..., 1] - pairs.rows[..., 0]).clamp(min=0).sum(0).to(result.dtype)
    return result / (counts if v is None or v.dim() == 1 else counts[:, None])


def kernel_count(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    threshold: float | torch.Tensor,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """``out[m]``, int64: how many n have ``K[m,n] <= threshold``; of a distance, how many points
    lie within a radius.

    ``descriptor``, ``a``, ``b``, ``debug`` and ``hyperparameters`` are those of
    :func:`kernlib.kernel_matmul`, of a :class:`kernlib.Formula` too; ``threshold`` is a number or
    a tensor of shape (); ``pairs`` is a :class:`kernlib.Pairs`. A NaN is not counted. Raises
    ValueError and TypeError that name the argument, and for more than 16,777,216 columns.

    Example:
        >>> a, b = torch.zeros(1, 2), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> kl.kernel_count(kl.l2_distance(), a, b, threshold=2.0)
        tensor([1])
    """
    if debug is not False:
        return _heard(
            debug,
            kernel_count,
            descriptor,
            a,
            b,
            threshold=threshold,
            pairs=pairs,
            **hyperparameters,
        )
    formula, values = formula_call(descriptor, a, b, None, 0, 0, None, hyperparameters)
    return operation.count(formula, values, threshold, pairs=pairs)


def kernel_neighbors(
    descriptor: Pairwise | Formula,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    threshold: float | torch.Tensor,
    pairs: Pairs | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All n with ``K[m,n] <= threshold`` of each row m, as ``(splits, columns, values)``: those of
    row m are ``columns[splits[m]:splits[m + 1]]``, in order. Splits (M + 1,) and columns are int64,
    values of the inputs' dtype. They are the parts of a ``torch.sparse_csr_tensor``.

    ``descriptor``, ``a``, ``b``, ``debug`` and ``hyperparameters`` are those of
    :func:`kernlib.kernel_matmul`, of a :class:`kernlib.Formula` too; ``threshold`` is a number or
    a tensor of shape (); ``pairs`` is a :class:`kernlib.Pairs`. Memory is that of the result and
    of a block of 64 MB. On a GPU it waits for the number of neighbours of each block. Values are
    differentiable, each by its own pair. Raises ValueError and TypeError that name the argument.

    Example:
        >>> a, b = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> kl.kernel_neighbors(kl.l2_distance(), a, b, threshold=2.0)
        (tensor([0, 1, 2]), tensor([1, 1]), tensor([2., 2.]))
    """
    if debug is not False:
        named = {"threshold": threshold, "pairs": pairs, **hyperparameters}
        return _heard(debug, kernel_neighbors, descriptor, a, b, **named)
    formula, values = formula_call(descriptor, a, b, None, 0, 0, None, hyperparameters)
    return operation.neighbors(formula, values, threshold, pairs)


def _heard(debug, *call, **named):
    from kernlib.debug import heard  # most calls need none

    return heard(debug, *call, **named)

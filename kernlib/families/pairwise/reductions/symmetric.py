"""Gradients of products of a symmetric kernel matrix by some of its points, from their rows of the
matrix alone: what a process computes that has these rows."""

from __future__ import annotations

import torch

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions import fused
from kernlib.families.pairwise.reductions.arguments import request_of, shape_of
from kernlib.families.pairwise.reductions.gradients import computed, gradients
from kernlib.runtime.dtypes import accumulator


def gradients_of_rows(
    descriptor: Pairwise,
    points: tuple[torch.Tensor, torch.Tensor],
    v: tuple[torch.Tensor, torch.Tensor],
    gradient: tuple[torch.Tensor, torch.Tensor],
    names: list[str],
    row_offset: int,
    col_offset: int,
    hyperparameters: dict,
) -> dict[str, torch.Tensor]:
    """The gradients of the tensors ``names``, "a" for x, "v" or hyperparameters, of
    ``out = K(x, x) v`` from g, that of out. Pairs hold some rows, (M, K) of x or (M, C), and all of
    them, (N, ...). Those of x and v are of the M rows; those of hyperparameters, summed over all
    parts of the rows, are the gradients. They are not recorded.

    ``sum_m,n g_m v_n k_mn`` has by x_m, in either place of k, the gradient of
    ``sum_n (g_m v_n + v_m g_n) k_mn`` by its first one, and by v that is ``K g``.
    """
    rows = torch.cat([gradient[0], v[0]], 1)
    every = torch.cat([v[1], gradient[1]], 1)
    wide, count = accumulator(rows.dtype), v[0].shape[1]
    request = request_of(descriptor, *points, every, row_offset, col_offset, hyperparameters)
    shape = shape_of(request)
    others = [name for name in names if name not in ("a", "v")]
    if "a" in names and not others and fused.takes(request, shape):
        # By the second place of k a kernel leaves K g beside the gradient of points, in one pass.
        turned = request.transposed()._replace(v=rows)
        shape = shape._replace(m=shape.n, n=shape.m)
        through = ["b", *(["v"] if "v" in names else [])]
        grads = gradients("matmul", turned, shape, through, every.to(wide)[None], None)
        return {"a": grads["b"], **({"v": grads["v"][:, count:]} if "v" in names else {})}
    through, results = [*(["a"] if "a" in names else []), *others], {}
    if through:
        grads = gradients("matmul", request, shape, through, rows.to(wide)[None], None)
        results = {name: grads[name] / 2 for name in others}  # a pair counts from both its points
        results |= {"a": grads["a"]} if "a" in names else {}
    if "v" in names:
        product = request._replace(v=gradient[1]), shape._replace(columns=count)
        results["v"] = computed("matmul", *product)[0].to(rows.dtype)
    return results

"""Pruning of a model's linear layers in place: by magnitude, by Wanda, by SparseGPT."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from kernlib.descriptors.base import as_int, as_number, shown
from kernlib.families.sparse.formats.encoding import entries_in
from kernlib.families.sparse.prune import PIECE, largest, n_m, prune_n_m, prune_together
from kernlib.families.sparse.prune import magnitude as prune_weight
from kernlib.hints.calls import hinted
from kernlib.nn.pruning.calibration import as_list, prune_by_inputs
from kernlib.nn.pruning.compensation import compensated
from kernlib.nn.pruning.statistics import Hessian, Norms
from kernlib.nn.pruning.targets import COMPUTED, Density, Target, share_of, targets_of

Match = str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None
PER = ("model", "matrix", "row")


@hinted
def magnitude(
    model: nn.Module,
    *,
    density: Density | None = None,
    pattern: tuple[int, int] | None = None,
    match: Match = None,
    per: str = "matrix",
) -> dict[str, float]:
    """Keep the entries of largest magnitude of the linear layers of ``model``, in place, and return
    the density of each by its name.

    - ``model``: an ``nn.Module``, of which ``nn.Linear`` itself and transformers' ``Conv1D`` are
      pruned. Parameters stay the same tensors. :func:`kernlib.sparse.magnitude` takes tensors.
    - ``density``: the part that stays, from 0 to 1, as one number; by layer, as a dict of regular
      expressions and numbers, of which the first that is found in a layer's name holds; or as a
      function of name and layer. None is 0.5. Exactly ``round(density * n)`` of n entries stay.
    - ``pattern``: (n, m) in place of a density: of each m consecutive entries of a row n stay.
    - ``match``: which layers, as of :func:`kernlib.nn.sparsify`.
    - ``per``: what the n entries are: those of a "matrix", of a "row", or of all layers of the
      "model" together, for which one density holds. Then entries of layers are compared with each
      other, by histograms of all magnitudes: nothing of the size of a weight is held.

    Of equal magnitudes the first ones stay, in the order of the model's layers, in each in
    row-major order (of a ``Conv1D``, whose weight is transposed, its columns are the rows). NaN is
    the largest of all. Warns with a :class:`kernlib.KernlibWarning` where no layer is taken, and of
    layers that are no ``nn.Linear`` itself.

    Raises, with ``model`` as it was, TypeError for a ``model`` that is no module and for weights
    that are no dense floats, ValueError for a weight that another module holds too, that is
    computed by a parametrization, or is on meta; TypeError and ValueError for a ``density``,
    ``pattern``, ``match`` or ``per`` that is none, for both of the first two, and for expressions
    that fit no layer; and :class:`kernlib.errors.CaptureError` while a CUDA graph is captured, as
    densities are counted on the host. Magnitude pruning is that of S. Han and others, Learning both
    Weights and Connections for Efficient Neural Networks, arXiv 1506.02626.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10))
        >>> kl.sparse.prune.magnitude(model, density={"0": 0.25, "1": 0.5})
        {'0': 0.25, '1': 0.5}
        >>> kl.nn.sparsify(model)["0"].matrix.density
        0.25
    """
    if not isinstance(per, str) or per not in PER:
        raise ValueError(f"per must be one of {', '.join(PER)}, got {shown(per)}")
    if pattern is not None and per != "matrix":
        raise ValueError(f"per must be left out beside a pattern, which has groups, got {per!r}")
    if per == "model" and (callable(density) or hasattr(density, "items")):
        raise ValueError(
            f"density must be one number with per='model', which counts over all layers, got "
            f"{shown(density)}"
        )
    targets = targets_of("magnitude", model, match)
    share = share_of(targets, density, pattern)
    if per == "model":
        part = next(iter(share.densities.values()), 0.0)
        count = round(part * sum(target.weight.numel() for target in targets))
        prune_together([target.weight for target in targets], count)
    for target in targets if per != "model" else ():
        if share.pattern is not None:
            prune_n_m(target.weight, *share.pattern)
        else:
            prune_weight(target.weight, share.densities[target.name], per, inplace=True)
    return _densities(targets)


@hinted
def wanda(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: Density | None = None,
    pattern: tuple[int, int] | None = None,
    match: Match = None,
    progress: bool | None = None,
) -> dict[str, float]:
    """Keep the entries of largest ``|W_ij| * ||X_j||_2`` of each row of the linear layers of
    ``model``, in place, and return the density of each by its name. X_j is what input feature j of
    the layer is over all samples.

    - ``model``, ``density``, ``pattern``, ``match``: as of :func:`magnitude`; exactly
      ``round(density * C)`` of the C entries of each row stay, and of equal scores the first.
    - ``batches``: any iterable of inputs of the model, on its device: tensors, tuples of arguments,
      or dicts of keyword arguments. It is gone through once and held. 128 sequences of the length
      that the model reads are what the paper takes; each row counts, so leave padding out.
    - ``progress``: a bar on stderr: True always, False never, None if somebody looks on.

    Blocks of the ``nn.ModuleList`` that holds most of these weights, such as a decoder's, are
    pruned one after the other, each by inputs that the pruned ones in front of it make. That takes
    three runs of each block over all batches, and memory for the samples' activations and one
    block. Layers outside of the blocks are pruned last, by a pass of the model as it is then. So
    are all layers, by one pass of the dense model, where there is no such list, or its blocks are
    no chain: each called once with what the one in front returned. The model runs in evaluation
    mode and without gradients, transformers' models without caches. Norms are in float32 or more.

    Warns as :func:`magnitude` does, and of layers that no batch reaches, which stay as they are.
    Raises what :func:`magnitude` raises, TypeError for ``batches`` that are no iterable of inputs,
    ValueError for none, for one that the model does not take, and for inputs of a layer that are
    not finite, of which the blocks in front are pruned then. The method is that of M. Sun and
    others, A Simple and Effective Pruning Approach for Large Language Models, arXiv 2306.11695.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10))
        >>> batches = [torch.randn(32, 64) for _ in range(4)]
        >>> kl.sparse.prune.wanda(model, batches, density=0.25)
        {'0': 0.25, '1': 0.25}
    """
    targets = targets_of("wanda", model, match, COMPUTED)
    share = share_of(targets, density, pattern)
    inputs = as_list(batches)

    def prune(target: Target, statistic: Norms) -> None:
        norms = statistic.norms()
        _check_finite(target, norms)
        step = max(1, PIECE // max(1, target.weight.shape[1]))
        for rows in target.weight.split(step):
            scores = rows.to(norms.dtype).abs() * norms
            if share.pattern is None:
                mask = largest(scores, share.densities[target.name], "row")
            else:
                mask = n_m(scores, *share.pattern)
            rows.masked_fill_(~mask, 0)

    pruned = prune_by_inputs("wanda", model, inputs, targets, Norms, prune, progress)
    return _densities(pruned)


@hinted
def sparsegpt(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: Density | None = None,
    pattern: tuple[int, int] | None = None,
    match: Match = None,
    block_size: int = 128,
    dampening: float = 0.01,
    progress: bool | None = None,
) -> dict[str, float]:
    """Prune the linear layers of ``model`` by SparseGPT, in place, and return the density of each
    by its name: entries that stay are changed so that ``W x`` stays near what it was.

    With ``H = 2 X X^T`` of a layer's inputs and U the upper Cholesky factor of its inverse, each
    block of columns keeps its entries of largest ``W_ij^2 / U_jj^2``, and the error of each dropped
    one is made up for by the columns behind it.

    - ``model``, ``batches``, ``match``, ``progress``: as of :func:`wanda`, with the same order of
      layers. H takes 4 C^2 bytes of each layer of C inputs in a block, or outside of the blocks;
      pruning a layer takes twice as much beside it.
    - ``density``: as of :func:`magnitude`. Exactly ``round(density * n)`` of the n entries of a
      matrix are not dropped, in equal parts of its blocks of columns.
    - ``pattern``: (n, m), chosen at the first column of each group by what its entries are then.
    - ``block_size``: columns that share a mask, and whose errors reach the rest by one product.
    - ``dampening``: the part of the mean of H's diagonal that is added to it.

    Weights are computed in float32 at least, and written in their dtype. Inputs that are 0 in all
    samples make zeros of their columns, which count among the dropped ones.

    Warns and raises as :func:`wanda` does, also TypeError and ValueError for a ``block_size`` that
    is no positive int, or no multiple of a pattern's m, and a ``dampening`` that is no number from
    0 on, and torch.linalg.LinAlgError, which names the layer, for an H that is not positive
    definite. The method is that of E. Frantar and D. Alistarh, SparseGPT: Massive Language Models
    Can Be Accurately Pruned in One-Shot, arXiv 2301.00774.

    Example:
        >>> layer = torch.nn.Linear(64, 128)
        >>> x = torch.randn(256, 16) @ torch.randn(16, 64)
        >>> y = layer(x)
        >>> kl.sparse.prune.sparsegpt(torch.nn.Sequential(layer), [x], density=0.5)
        {'0': 0.5}
        >>> ((layer(x) - y).norm() / y.norm()).item() < 0.2
        True
    """
    block_size, dampening = as_int("block_size", block_size), as_number("dampening", dampening)
    if block_size < 1:
        raise ValueError(f"block_size must be 1 or more, got {shown(block_size)}")
    if not 0 <= dampening < math.inf:
        raise ValueError(f"dampening must be a finite number from 0 on, got {dampening}")
    targets = targets_of("sparsegpt", model, match, COMPUTED)
    share = share_of(targets, density, pattern)
    if share.pattern is not None and block_size % share.pattern[1]:
        raise ValueError(
            f"block_size must be a multiple of m = {share.pattern[1]} of pattern, got {block_size}"
        )
    inputs = as_list(batches)

    def prune(target: Target, statistic: Hessian) -> None:
        _check_finite(target, statistic.matrix.diagonal())
        part = share.densities[target.name]
        try:
            weight = compensated(
                target.weight, statistic.matrix, part, share.pattern, block_size, dampening
            )
        except torch.linalg.LinAlgError as error:
            raise torch.linalg.LinAlgError(f"{target.name or 'model'}: {error}") from None
        target.weight.copy_(weight)

    return _densities(
        prune_by_inputs("sparsegpt", model, inputs, targets, Hessian, prune, progress)
    )


def _check_finite(target: Target, sums: torch.Tensor) -> None:
    if not bool(sums.isfinite().all()):
        raise ValueError(
            f"{target.name or 'model'}: its inputs over batches must be finite, and hold NaN or "
            "infinities, or squares that overflow: leave out the batches that do"
        )


def _densities(targets: list[Target]) -> dict[str, float]:
    return {
        target.name: entries_in(target.weight) / max(1, target.weight.numel()) for target in targets
    }

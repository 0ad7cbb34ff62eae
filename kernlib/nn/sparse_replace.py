"""Swap the ``nn.Linear`` layers of a model for :class:`kernlib.nn.SparseLinear`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from kernlib.errors import warn
from kernlib.families.sparse.formats.registry import with_values
from kernlib.hints.calls import former, hinted
from kernlib.hooks import swapped
from kernlib.nn.fusing import fuse_groups, groups_of
from kernlib.nn.linears import check_model, checked_match, swap
from kernlib.nn.sparse_linear import SparseLinear
from kernlib.nn.sparse_weights import check_linear, check_options, is_silently_dense, matrix_of


@hinted
@former("match", "density", "format", "per", "columns", filter="match")
def sparsify(
    model: nn.Module,
    *,
    match: str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None = None,
    density: float | None = None,
    format: str = "auto",
    per: str = "matrix",
    columns: int = 1,
    fuse: bool | Sequence[Sequence[str]] | None = None,
    values: str | None = None,
) -> dict[str, SparseLinear]:
    """Swap the ``nn.Linear`` layers of ``model`` for :class:`SparseLinear` in place, and return the
    new ones by their names.

    - ``model``: an ``nn.Module``.
    - ``match``: which layers: those in whose name this regular expression is found, such as
      ``r"mlp|[qkvo]_proj"``, or for which this function of name and layer is true; None takes all.
      Leave out a head that shares the weight of an embedding.
    - ``density``, ``format``, ``per``, ``columns``, ``values``: as of
      :meth:`SparseLinear.from_linear`.
    - ``fuse``: layers that read the same x and become one product. None takes ``q_proj``,
      ``k_proj``, ``v_proj``, and ``gate_proj``, ``up_proj``, of the attention and MLP modules of
      transformers' llama, mistral, qwen, gemma and phi, known by their classes' names, if there are
      some; True does too, and warns if there are none. False takes none. A list of groups takes
      others, each a list of names: whole ones, or their last parts, as in
      ``[["query", "key", "value"]]``, for a group in every module that has all of them.

    Each weight is compressed where it lies, and its dense tensor is let go before the next one. The
    bias stays the same parameter, and training mode as it was; a layer that stands in several
    places is swapped in all of them. Swapped are ``nn.Linear`` itself and transformers' ``Conv1D``:
    what derives from ``nn.Linear`` may be more. Weights that parametrizations, torch's pruning,
    weight_norm or spectral_norm compute are taken as the next call would. A weight on "meta" makes
    an empty layer, which a state fills. Where layers of an ``nn.TransformerEncoderLayer`` are
    swapped, torch's fused path of evaluation, which would lay their weights out, is turned off for
    it.

    Layers of a group stay where they are, under their names, with the same ``state_dict`` as those
    that are not fused, and hold one matrix together, in place of their own. They compute one
    product as long as they are called with the same x, and what they should if they are not.

    Warns with a :class:`kernlib.KernlibWarning` where nothing is swapped; of layers that are kept
    dense because nobody has pruned them: constant all the same, and no smaller; of those that stay
    because they are no ``nn.Linear`` itself, such as quantized ones; where ``fuse=True`` finds no
    group; and of groups that stay apart, with the reason: a layer is not swapped, has hooks, stands
    in several places, or they differ in inputs, dtype, device or whether there is a bias.

    Raises, with ``model`` as it was, ValueError that names the layer for a weight that another
    module holds too, for one without values, and for a bias of another shape or device, TypeError
    that names it for a weight of another dtype than float16, bfloat16 and float32 and for a bias of
    another dtype than its weight, and TypeError for a ``model`` that is an ``nn.Linear`` itself.
    ValueError for a group that names a layer that does not exist, TypeError for one that is no list
    of names.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10))
        >>> new = kl.nn.sparsify(model, match="0", density=0.5)
        >>> new["0"] is model[0], model[0].matrix.density
        (True, 0.5)
    """
    check_model(model, "use SparseLinear.from_linear")
    match, format = checked_match(match), with_values(format, values)
    check_options(density, format, per, columns)
    groups = groups_of(model, fuse)
    dense: list[str] = []

    def compressed(linear: nn.Linear, names: list[str]) -> SparseLinear:
        matrix = matrix_of(linear, format, density, per, columns)
        if is_silently_dense(matrix, density, format):
            dense.extend(names)
        return SparseLinear._of(linear, matrix)

    check = partial(check_linear, density=density)
    new = swap("sparsify", model, match, SparseLinear, check, compressed)
    _warn_of_dense(dense, new)
    fuse_groups(model, groups, new, format, columns, fuse is not None)
    if new:
        swapped(model)
    return new


def _warn_of_dense(dense: list[str], new: dict[str, SparseLinear]) -> None:
    """Warns of unpruned weights, which compression only makes constant."""
    if dense:
        some = ", ".join(map(repr, dense[:3])) + (", ..." if len(dense) > 3 else "")
        warn(
            f"sparsify leaves {len(dense)} of {len(new)} layers dense ({some}), whose weights have "
            "too few zeros to compress, and makes them constants without gradients. density=0.5 "
            "prunes them; format='dense' says that this is meant"
        )

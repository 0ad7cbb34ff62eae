"""Swap the ``nn.Linear`` layers of a model for :class:`kernlib.nn.SparseLinear`."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from kernlib.calls import former, hinted
from kernlib.errors import warn
from kernlib.nn.linears import (
    as_linear,
    check_each,
    check_model,
    checked_match,
    linears,
    matches,
    rest_of,
    warn_of_nothing,
    warn_of_rest,
    without_fused_path,
)
from kernlib.nn.sparse_linear import SparseLinear
from kernlib.nn.sparse_weights import (
    check_linear,
    check_options,
    is_silently_dense,
    matrix_of,
)


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
) -> dict[str, SparseLinear]:
    """Swap the ``nn.Linear`` layers of ``model`` for :class:`SparseLinear` in place, and return the
    new ones by their names.

    - ``match``: which layers: those in whose name this regular expression is found, such as
      ``r"mlp|[qkvo]_proj"``, or for which this function of name and layer is true; None takes all.
      Leave out a head that shares the weight of an embedding.
    - ``density``, ``format``, ``per``, ``columns``: as of :meth:`SparseLinear.from_linear`.

    Each weight is compressed where it lies, and its dense tensor is let go before the next one. The
    bias stays the same parameter, and training mode as it was; a layer that stands in several
    places is swapped in all of them. Swapped are ``nn.Linear`` itself and transformers' ``Conv1D``:
    what derives from ``nn.Linear`` may be more. Weights that parametrizations, torch's pruning,
    weight_norm or spectral_norm compute are taken as the next call would. A weight on "meta" makes
    an empty layer, which a state fills. Where layers of an ``nn.TransformerEncoderLayer`` are
    swapped, torch's fused path of evaluation, which would lay their weights out, is turned off for
    it.

    Warns with a :class:`kernlib.KernlibWarning` where nothing is swapped, of layers that are kept
    dense because nobody has pruned them: constant all the same, and no smaller; and of those that
    stay because they are no ``nn.Linear`` itself, such as quantized ones.

    Raises, with ``model`` as it was, ValueError that names the layer for a weight that another
    module holds too, for one without values, and for a bias of another shape or device, TypeError
    that names it for a weight of another dtype than float16, bfloat16 and float32 and for a bias of
    another dtype than its weight, and TypeError for a ``model`` that is an ``nn.Linear`` itself.
    """
    check_model(model, "use SparseLinear.from_linear")
    match = checked_match(match)
    check_options(density, format, per, columns)
    places, rest = places_of(model, match), rest_of(model, match)
    check_each(model, places, lambda linear: check_linear(linear, density))
    if not places:
        warn_of_nothing("sparsify", model, match)
    new: dict[str, SparseLinear] = {}
    dense: list[str] = []
    while places:
        layer, where = next(iter(places.items()))
        linear = as_linear(layer)
        matrix = matrix_of(linear, format, density, per, columns)
        if is_silently_dense(matrix, density, format):
            dense += [name for _, _, name in where]
        sparse = SparseLinear._of(linear, matrix)
        for parent, child, name in where:
            setattr(parent, child, sparse)
            new[name] = sparse
        del places[layer], layer, linear  # and with it the dense weight
    without_fused_path(model, SparseLinear)
    _warn_of_dense(dense, new)
    warn_of_rest("sparsify", rest, new)
    return new


def _warn_of_dense(dense: list[str], new: dict[str, SparseLinear]) -> None:
    """Warns of weights that nobody has pruned, which compression only makes constant."""
    if dense:
        some = ", ".join(map(repr, dense[:3])) + (", ..." if len(dense) > 3 else "")
        warn(
            f"sparsify leaves {len(dense)} of {len(new)} layers dense ({some}), whose weights have "
            "too few zeros to compress, and makes them constants without gradients. density=0.5 "
            "prunes them; format='dense' says that this is meant"
        )


def places_of(model: nn.Module, match) -> dict[nn.Module, list[tuple[nn.Module, str, str]]]:
    """The layers that ``match`` takes in one of their places, and all places of each: its parent,
    its name there, its whole name."""
    every = list(linears(model))
    accepted = {layer for _, _, name, layer in every if matches(match, name, layer)}
    places: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
    for parent, child, name, layer in every:
        if layer in accepted:
            places.setdefault(layer, []).append((parent, child, name))
    return places

"""Swap the ``nn.Linear`` layers of a model for :class:`kernlib.nn.BlockSparseLinear`."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from kernlib.calls import former, hinted
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.nn.block_sparse.linear import BlockSparseLinear, check_linear
from kernlib.nn.block_sparse.weight import check_multiple, check_options
from kernlib.nn.linears import (
    as_linear,
    check_each,
    check_model,
    checked_match,
    rest_of,
    warn_of_nothing,
    warn_of_rest,
    without_fused_path,
)
from kernlib.nn.sparse_replace import places_of


@hinted
@former("density", "match", "criterion", "per", "precision", filter="match")
def block_sparsify(
    model: nn.Module,
    block: int | tuple[int, int],
    *,
    match: str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None = None,
    density: float,
    criterion: str = "magnitude",
    per: str = "matrix",
    precision: str | None = None,
) -> dict[str, BlockSparseLinear]:
    """Swap the ``nn.Linear`` layers of ``model`` for :class:`BlockSparseLinear` in place, and
    return the new ones by their names.

    - ``block``, ``density``, ``criterion``, ``per``, ``precision``: as of
      :meth:`BlockSparseLinear.from_linear`.
    - ``match``: which layers, as of :func:`sparsify`. Leave out a head that shares the weight of an
      embedding, and layers whose features are no multiple of the block's.

    The dense weight of each layer is let go before the next one. dtype, device, training mode and
    what requires a gradient stay as they were; weight and bias are new parameters, so make an
    optimizer after this. A layer that stands in several places is swapped in all of them. Swapped
    are ``nn.Linear`` itself and transformers' ``Conv1D``: what derives from ``nn.Linear`` may be
    more. Of a parametrized weight the values count, and the parametrization ends. A weight on
    "meta" makes a layer without blocks, which a state fills, or ``reset_parameters`` draws. Where
    layers of an ``nn.TransformerEncoderLayer`` are swapped, torch's fused path of evaluation is
    turned off for it: one that is put there by hand needs
    ``torch.backends.mha.set_fastpath_enabled(False)``.

    Warns with a :class:`kernlib.KernlibWarning` where nothing is swapped, and of layers that stay
    because they are no ``nn.Linear`` itself, such as quantized ones.

    Raises, with ``model`` as it was, ValueError that names the layer for features that are no
    multiple of the block's, for a weight that another module holds too and for one without values,
    TypeError that names it for one of another dtype than float16, bfloat16, float32 and float64,
    and TypeError for a ``model`` that is an ``nn.Linear`` itself.
    """
    check_model(model, "use BlockSparseLinear.from_linear")
    match = checked_match(match)
    block = check_options(block, density, criterion, per)
    BlockSparseMatmul("dds", precision=precision)  # which says what is wrong with a precision
    places, rest = places_of(model, match), rest_of(model, match)
    check_each(
        model,
        places,
        lambda linear: check_multiple(tuple(check_linear(linear).weight.shape), block),
    )
    if not places:
        warn_of_nothing("block_sparsify", model, match)
    new = {}
    while places:
        layer, where = next(iter(places.items()))
        sparse = BlockSparseLinear.from_linear(
            as_linear(layer), block, density=density, criterion=criterion, per=per,
            precision=precision,
        )  # fmt: skip
        for parent, child, name in where:
            setattr(parent, child, sparse)
            new[name] = sparse
        del places[layer], layer  # and with it the dense weight
    without_fused_path(model, BlockSparseLinear)
    warn_of_rest("block_sparsify", rest, new)
    return new

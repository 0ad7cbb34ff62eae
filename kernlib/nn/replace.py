"""Swap the ``nn.Linear`` layers of a model for :class:`kernlib.nn.KSLinear`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from kernlib.descriptors.base import check_flag, shown
from kernlib.errors import warn
from kernlib.hints.calls import former, hinted
from kernlib.nn.chains import DTYPES, as_count
from kernlib.nn.kronecker_sparse import KSLinear
from kernlib.nn.kronecker_sparse_algorithms import Pattern
from kernlib.nn.linears import (
    as_linear,
    check_model,
    check_unshared,
    checked_match,
    class_name,
    holders_of,
    linears,
    matches,
    rest_of,
    warn_of_nothing,
    warn_of_rest,
)

Chain = Sequence[Pattern]

# The chains of KSMM's ViT-S/16 by (in_features, out_features), each with the factor that meets the
# input first: query, key and value; up; down.
VIT_S16: dict[tuple[int, int], tuple[Pattern, ...]] = {
    (384, 384): ((2, 48, 192, 1), (1, 192, 48, 2)),
    (384, 1536): ((6, 64, 64, 1), (1, 768, 192, 2)),
    (1536, 384): ((6, 64, 256, 1), (1, 128, 128, 3)),
}
# The same structure in the sizes of ViT-B/16.
VIT_B16: dict[tuple[int, int], tuple[Pattern, ...]] = {
    (768, 768): ((2, 96, 384, 1), (1, 384, 96, 2)),
    (768, 3072): ((12, 64, 64, 1), (1, 1536, 384, 2)),
    (3072, 768): ((6, 128, 512, 1), (1, 256, 256, 3)),
}


@hinted
@former(module="model")
def replace_linear(
    model: nn.Module,
    patterns: Mapping[tuple[int, int], Chain] | Callable[[str, int, int], Chain | None],
    *,
    match: str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None = None,
    approximate: bool = False,
    rows: int | None = None,
    **options: Any,
) -> dict[str, KSLinear]:
    """Swap the ``nn.Linear`` layers of ``model`` for :class:`KSLinear` in place, and return the new
    ones by their names.

    - ``model``: an ``nn.Module``.
    - ``patterns``: chains by ``(in_features, out_features)``, such as :data:`VIT_S16` and
      :data:`VIT_B16`, or a function of a layer's name, ``in_features`` and ``out_features``. A
      layer without a chain, or with None, stays.
    - ``match``: which layers are looked at: those in whose name this regular expression is found,
      such as ``"mlp|to_[qkv]"``, or for which this function of name and layer is true.
    - ``approximate``: False draws the factors anew. True takes them from the layer's weight, for
      chains of one factor: of the matrices with its support the nearest to the weight, which for
      (1, out, in, 1) is the weight.
    - ``rows``: how many rows the layers' inputs will have, such as batch times length. With it a
      warning lists the layers that are estimated to take longer than the dense ones, as
      :meth:`KSLinear.estimate` has it; :func:`suggest_chains` proposes others.
    - ``options``: more arguments of :class:`KSLinear` (``algo``, ``precision``, ``activation``,
      ``init``).

    dtype, device, the bias and its values, training mode and what requires a gradient stay as they
    were, and a layer that stands in several places is swapped in all of them. Swapped are
    ``nn.Linear`` itself, parametrized or not, and transformers' ``Conv1D``: what derives from
    ``nn.Linear`` may be more, as in ``nn.MultiheadAttention``, which uses the weight of its
    ``out_proj`` itself.

    Warns with a :class:`kernlib.KernlibWarning` where nothing is swapped, and of layers that stay
    because they are no ``nn.Linear`` itself, such as quantized ones.

    Raises, with ``model`` as it was, ValueError that names the layer: for a chain of other sizes,
    for ``approximate`` with several factors, and for a weight that another module holds too, such
    as an embedding's; ValueError for a ``match`` that is no regular expression; and TypeError for a
    ``model`` that is none, or an ``nn.Linear`` itself, and for arguments of another kind.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(384, 1536), torch.nn.Linear(1536, 384))
        >>> new = kl.nn.replace_linear(model, kl.nn.VIT_S16, match="0")
        >>> new["0"] is model[0], model[0].patterns
        (True, ((6, 64, 64, 1), (1, 768, 192, 2)))
    """
    check_model(model, "use KSLinear.from_linear")
    check_flag("approximate", approximate)
    rows = None if rows is None else as_count("rows", rows)
    match = checked_match(match)
    is_function = callable(patterns) and not isinstance(patterns, type)
    chain_of = patterns if is_function else _by_sizes(patterns)
    holders = holders_of(model)
    listed, rest, new = list(linears(model)), rest_of(model, match), {}
    for _, _, name, layer in listed:
        if layer in new or not matches(match, name, layer):
            continue
        linear = as_linear(layer)
        chain = chain_of(name, linear.in_features, linear.out_features)
        if chain is None:
            continue
        check_unshared(holders, name, layer)
        new[layer] = _replacement(name, linear, chain, approximate, options)
    if not new:
        _warn_of_nothing(model, match, patterns)
    places = [(*place, name, new[layer]) for *place, name, layer in listed if layer in new]
    for parent, child, _, layer in places:
        setattr(parent, child, layer)
    warn_of_rest("replace_linear", rest, new)
    replaced = {name: layer for _, _, name, layer in places}
    if rows is not None:
        _warn_of_slow(replaced, rows)
    return replaced


def _warn_of_slow(replaced: dict[str, KSLinear], rows: int) -> None:
    """Warns of layers that are estimated to take longer than dense ones, by sizes and chain."""
    slow: dict[tuple, list[str]] = {}
    for name, layer in replaced.items():
        if layer.factors[0].dtype not in DTYPES:  # not measured
            continue
        estimate = layer.estimate(rows)
        if estimate.speedup < 1:
            slow.setdefault((layer.patterns, str(estimate)), []).append(name)
    if not slow:
        return
    words = [
        f"{shown(names[0])}{f' and {len(names) - 1} more' if names[1:] else ''} with "
        f"{shown(list(chain))} ({times})"
        for (chain, times), names in slow.items()
    ]
    warn(
        f"by estimates for an H200 and {rows} rows, these layers take longer than the dense ones: "
        f"{'; '.join(words)}. kernlib.nn.suggest_chains(model, {rows}) proposes chains, before "
        "layers are replaced"
    )


def _warn_of_nothing(model: nn.Module, match, patterns) -> None:
    """Warns that no layer is swapped: none is matched, or none has a chain."""
    matched = [layer for _, _, name, layer in linears(model) if matches(match, name, layer)]
    if not matched:
        warn_of_nothing("replace_linear", model, match)
        return
    matched = [as_linear(layer) for layer in matched]
    sizes = sorted({(layer.in_features, layer.out_features) for layer in matched})
    chains = "" if callable(patterns) else f", and patterns has {shown(list(patterns))}"
    warn(
        "replace_linear swaps nothing: patterns has no chain for the (in_features, out_features) "
        f"of a layer. They are {shown(sizes)}{chains}"
    )


def _by_sizes(patterns) -> Callable[[str, int, int], Chain | None]:
    if not isinstance(patterns, Mapping):
        raise TypeError(
            "patterns must be a mapping from (in_features, out_features) to chains, or a function "
            f"of a layer's name and these sizes, got {class_name(patterns)}"
        )
    return lambda name, in_features, out_features: patterns.get((in_features, out_features))


def _replacement(
    name: str, layer: nn.Linear, chain: Chain, approximate: bool, options: dict
) -> KSLinear:
    try:
        return KSLinear.from_linear(layer, chain, approximate=approximate, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error

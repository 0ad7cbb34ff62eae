"""Groups of a model's layers that read the same x, and how they become one product."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from kernlib.descriptors.base import shown
from kernlib.errors import warn
from kernlib.nn.fused_linear import fused
from kernlib.nn.linears import has_hooks
from kernlib.nn.sparse_linear import SparseLinear

# Modules of transformers whose forward calls these layers with one x, and does not write x.
_FAMILIES = "Llama|Mistral|Mixtral|Qwen2|Qwen2Moe|Qwen3|Qwen3Moe|Gemma|Gemma2|Gemma3|Phi"
_ATTENTION = re.compile(rf"({_FAMILIES})(Sdpa|Flash)?Attention2?")
_MLP = re.compile(rf"({_FAMILIES})MLP")
_GROUPS = ((_ATTENTION, ("q_proj", "k_proj", "v_proj")), (_MLP, ("gate_proj", "up_proj")))


class GroupNames(NamedTuple):
    """Whole names of layers; whether nothing writes their x between their calls; why they are to
    stay apart, if they are."""

    names: tuple[str, ...]
    is_trusted: bool
    reason: str | None


def groups_of(model: nn.Module, fuse: bool | Sequence[Sequence[str]] | None) -> list[GroupNames]:
    """The groups of a model that ``fuse`` of ``sparsify`` says, before any layer is swapped; none
    for False. Raises TypeError for what is neither None, a bool nor lists of names, ValueError for
    a name of no layer. Warns where True finds none."""
    if fuse is False:
        return []
    modules = dict(model.named_modules(remove_duplicate=False))
    groups = _of_known(modules) if fuse is None or fuse is True else _listed(modules, fuse)
    if not groups and fuse is True:
        joined = [name for name in modules if name.endswith(("qkv_proj", "gate_up_proj"))]
        which = f"; {joined[0]!r} is one product already" if joined else ""
        warn(
            f"sparsify fuses nothing: {type(model).__name__} has no attention or MLP that is known"
            f"{which}. fuse=[['query', 'key', 'value']] names layers that read one x"
        )
    places: dict[int, int] = {}
    for layer in modules.values():
        places[id(layer)] = places.get(id(layer), 0) + 1
    result = []
    for names, is_trusted in groups:
        layers = [modules[name] for name in names]
        reason = None
        if any(places[id(layer)] > 1 for layer in layers):
            reason = "a layer stands in several places"
        elif any(map(has_hooks, layers)):
            reason = "a layer has hooks"
        result.append(GroupNames(names, is_trusted, reason))
    return result


def _of_known(modules: dict[str, nn.Module]) -> list[tuple[tuple[str, ...], bool]]:
    groups = []
    for prefix, module in modules.items():
        for kind, children in _GROUPS:
            if kind.fullmatch(type(module).__name__) is None:
                continue
            names = tuple(f"{prefix}.{child}" if prefix else child for child in children)
            if all(name in modules for name in names):
                origin = type(module).__module__
                groups.append((names, origin.startswith("transformers.models.")))
    return groups


def _listed(modules: dict[str, nn.Module], fuse) -> list[tuple[tuple[str, ...], bool]]:
    """The groups that a list names: for each, that of whole names, or one in every module that has
    layers of all these names."""
    if isinstance(fuse, str) or not isinstance(fuse, Sequence):
        raise TypeError(f"fuse must be a bool or a list of groups of names, got {shown(fuse)}")
    groups: list[tuple[tuple[str, ...], bool]] = []
    seen: set[str] = set()
    for group in fuse:
        is_list = isinstance(group, Sequence) and not isinstance(group, str)
        if not is_list or not all(isinstance(name, str) and name for name in group):
            raise TypeError(
                "a group of fuse must be a list of names of layers, such as "
                f"['q_proj', 'k_proj', 'v_proj'], got {shown(group)}"
            )
        if len(set(group)) < max(2, len(group)):
            raise ValueError(f"a group of fuse must name two layers or more, got {shown(group)}")
        for names in _places_of(modules, tuple(group)):
            if again := seen.intersection(names):
                raise ValueError(f"fuse has {again.pop()!r} in two groups: leave one out")
            seen.update(names)
            groups.append((names, False))
    return groups


def _places_of(modules: dict[str, nn.Module], group: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Whole names of the layers that a group names. Raises ValueError."""
    if all(name in modules for name in group):
        return [group]
    prefixes: dict[str, int] = {}
    for child in group:
        ends = [name.removesuffix(child) for name in modules if f".{name}".endswith(f".{child}")]
        if not ends:
            kinds = (nn.Linear, SparseLinear)
            some = [name for name, module in modules.items() if isinstance(module, kinds)]
            raise ValueError(
                f"fuse names {child!r}, and the model has no such layer: names, whole or their last"
                f" parts, are those of {shown(some)}"
            )
        for prefix in ends:
            prefixes[prefix] = prefixes.get(prefix, 0) + 1
    homes = [prefix for prefix, count in prefixes.items() if count == len(group)]
    if not homes:
        raise ValueError(
            f"fuse names the group {shown(list(group))}, and no module has all of these layers: "
            "give their whole names"
        )
    return [tuple(prefix + child for child in group) for prefix in homes]


def fuse_groups(
    model: nn.Module,
    groups: list[GroupNames],
    swapped: dict[str, SparseLinear],
    format: str,
    columns: int,
    is_asked: bool = True,
    is_sole: bool = False,
) -> None:
    """Put fused layers in the place of swapped ones, in the model and under their names. Warns of
    groups that stay apart. If groups were not asked for, it does not warn of those with a layer
    left out or swapped before. ``is_sole``: no swapped layer, nor its matrix, is in use
    elsewhere."""
    apart: list[str] = []
    for names, is_trusted, reason in groups:
        missing = [model.get_submodule(name) for name in names if name not in swapped]
        if not is_asked and any(isinstance(layer, (nn.Linear, SparseLinear)) for layer in missing):
            continue
        reason = reason or _reason(names, swapped)
        if reason is not None:
            apart.append(f"{', '.join(names)} ({reason})")
            continue
        layers = [swapped[name] for name in names]
        members = fused(layers, format, columns, is_trusted, is_sole)
        for name, layer in zip(names, members, strict=True):
            prefix, _, child = name.rpartition(".")
            setattr(model.get_submodule(prefix), child, layer)
            swapped[name] = layer
        del layers, members  # and with them the matrices that are joined now
    if apart:
        some = "; ".join(apart[:3]) + ("; ..." if len(apart) > 3 else "")
        warn(f"sparsify leaves {len(apart)} of {len(groups)} groups apart: {some}")


def _reason(names: tuple[str, ...], swapped: dict[str, SparseLinear]) -> str | None:
    """Why layers cannot be one product, None if they can."""
    missing = [name for name in names if name not in swapped]
    if missing:
        return f"{missing[0]} is not swapped"
    layers = [swapped[name] for name in names]
    for what, values in {
        "inputs": {layer.in_features for layer in layers},
        "dtype": {layer._dtype for layer in layers},
        "device": {layer._place for layer in layers},
    }.items():
        if len(values) > 1:
            return f"they differ in {what}: {', '.join(sorted(map(str, values)))}"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some have a bias"
    return None

"""The layers of a model to prune, and the share of their entries that stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from kernlib.descriptors.base import shown
from kernlib.errors import CaptureError, warn
from kernlib.families.sparse.prune import (
    check_density,
    check_groups,
    check_weight,
    checked_pattern,
)
from kernlib.nn.linears import (
    check_unshared,
    checked_match,
    class_name,
    holders_of,
    is_conv1d,
    is_linear,
    places_of,
    refuse_stand_in,
    rest_of,
    warn_of_rest,
)
from kernlib.runtime.tensors import overlaps_itself

Density = float | Mapping[str, float] | Callable[[str, nn.Module], float]
DEFAULT = 0.5
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # with inputs


class Target(NamedTuple):
    """A weight to prune: the name of its layer, the layer, and a view (out_features, in_features)
    that is written."""

    name: str
    layer: nn.Module
    weight: torch.Tensor


class Share(NamedTuple):
    """How much stays of each weight, by the name of its layer, or of each group of a pattern."""

    densities: dict[str, float]
    pattern: tuple[int, int] | None


def targets_of(task: str, model: object, match, dtypes=None) -> list[Target]:
    """The layers of a model that ``match`` takes, in its order. Raises TypeError and ValueError,
    which name the layer, and CaptureError while a CUDA graph is captured, before anything is
    written."""
    if not isinstance(model, nn.Module):
        advice = "; kernlib.sparse.magnitude and n_m take tensors"
        advice = advice if isinstance(model, torch.Tensor) else ""
        raise TypeError(f"model must be an nn.Module, got {class_name(model)}{advice}")
    match = checked_match(match)
    if is_linear(model):  # in no place, and pruned in its own
        layers = {"": model}
    else:
        layers = {where[0][2]: layer for layer, where in places_of(model, match).items()}
    holders = holders_of(model)
    targets = [_target(name, layer, dtypes) for name, layer in layers.items()]
    for target in targets:
        check_unshared(holders, _label(target.name), target.layer)
    if any(t.weight.is_cuda for t in targets) and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{task} waits for the device, which cannot be while a CUDA graph is captured: prune "
            "before the capture"
        )
    if not targets:
        warn(
            f"{task} prunes nothing: match={shown(getattr(match, 'pattern', match))} takes no "
            f"nn.Linear of {type(model).__name__}"
        )
    warn_of_rest(task, rest_of(model, match), layers)
    return targets


def _label(name: str) -> str:
    return name or "model"


def _target(name: str, layer: nn.Module, dtypes) -> Target:
    weight = layer._parameters.get("weight")
    label = f"{_label(name)}: the weight"
    if weight is None:
        raise ValueError(
            f"{label} is computed, by a parametrization or a hook, so that it cannot be written: "
            "make it a parameter first, as by torch.nn.utils.parametrize.remove_parametrizations "
            "or torch.nn.utils.prune.remove, which prunes layers that share the weight too"
        )
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"{label} is one of a lazy layer that has not been called: call it once")
    check_weight(weight, label)
    try:
        refuse_stand_in(weight)
    except ValueError as error:
        raise ValueError(f"{_label(name)}: {error}") from error
    if weight.is_meta:
        raise ValueError(f"{label} is on meta and has no values to prune: load it first")
    if overlaps_itself(weight):
        raise ValueError(f"{label} overlaps itself, so that it cannot be written: clone it")
    if dtypes is not None and weight.dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise TypeError(f"{label} must be one of {names}, got {weight.dtype}")
    view = weight.detach()
    return Target(name, layer, view.t() if is_conv1d(type(layer)) else view)


def share_of(targets: list[Target], density: Density | None, pattern) -> Share:
    """The share of each weight that stays. Raises TypeError and ValueError for an invalid
    ``density`` or ``pattern``, for both together, and for layers that they do not fit."""
    if pattern is None:
        return Share(_densities(targets, DEFAULT if density is None else density), None)
    if density is not None:
        raise ValueError(
            f"density = {shown(density)} and pattern = {shown(pattern)} both say how much stays: "
            "leave one of them out"
        )
    if not isinstance(pattern, (tuple, list)) or len(pattern) != 2:
        raise TypeError(f"pattern must be a pair (n, m) such as (2, 4), got {shown(pattern)}")
    n, m = checked_pattern(*pattern, names=("n of pattern", "m of pattern"))
    for target in targets:
        check_groups(f"the weight of {_label(target.name)}", target.weight, m, "m of pattern")
    return Share({target.name: n / m for target in targets}, (n, m))


def _densities(targets: list[Target], density: Density) -> dict[str, float]:
    if isinstance(density, Mapping):
        return _of_expressions(targets, density)
    if isinstance(density, type) or not callable(density):
        check_density(density)
        return {target.name: float(density) for target in targets}
    densities = {}
    for target in targets:
        densities[target.name] = _checked(density(target.name, target.layer), target.name)
    return densities


def _of_expressions(targets: list[Target], density: Mapping[str, float]) -> dict[str, float]:
    """By the first expression that is in the name of a layer."""
    expressions = {key: checked_expression(key) for key in density}
    densities, used = {}, set()
    for target in targets:
        fitting = [key for key, expression in expressions.items() if expression.search(target.name)]
        if not fitting:
            raise ValueError(
                f"density has no expression that is in the name of {_label(target.name)}: add one, "
                "such as '' for all others as the last, or leave the layer out by match"
            )
        densities[target.name] = _checked(density[fitting[0]], target.name)
        used.update(fitting)
    unused = [key for key in expressions if key not in used]
    if unused and targets:
        raise ValueError(
            f"density has the expression {shown(unused[0])}, which is in no name of a layer to "
            "prune: leave it out or correct it"
        )
    return densities


def checked_expression(key: object) -> re.Pattern[str]:
    """A compiled expression. Raises TypeError and ValueError for what is none."""
    if not isinstance(key, (str, re.Pattern)):
        raise TypeError(
            f"density must have regular expressions as its keys, got {shown(key)}: write it as text"
        )
    try:
        return re.compile(key)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"density: {shown(key)} is no regular expression: {error}") from None


def _checked(density: object, name: str) -> float:
    try:
        check_density(density)
    except (TypeError, ValueError) as error:
        raise type(error)(f"density of {_label(name)}: {error}") from None
    return float(density)

"""Tensors of a call of a formula: their checks, and the shapes in which operators take them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import refuse_argument
from kernlib.descriptors.score.kinds import KINDS
from kernlib.families.pairwise.formula.descriptor import Bounds, Formula, Group
from kernlib.families.pairwise.formula.plain import positive_of
from kernlib.families.pairwise.formula.spec import AXES, COL, FEATURE, ROW
from kernlib.runtime.numbers import check_host, host_value
from kernlib.runtime.schema import placed
from kernlib.runtime.tensors import check_dense, refuse_distributed

_DTYPES = {getattr(torch, name): kind for name, kind in KINDS.items()}


class Call(NamedTuple):
    """A checked call. ``tensors`` have a batch in front and then the axes in the order of AXES, and
    are those that are no numbers of the host; ``features`` are of the last of them if it weights
    the scores."""

    tensors: list[torch.Tensor]
    numbers: list[float]
    on_host: list[str]
    batch: int
    rows: int
    cols: int
    features: int
    is_batched: bool  # whether a tensor had a batch
    dtype: torch.dtype  # of the result


class _View(NamedTuple):
    """How a tensor of the caller becomes one that has a batch and then axes in the order of AXES:
    or, with no ``rank``, that it is a number of the host."""

    name: str
    rank: int | None = None  # of dimensions behind a batch that it lacks, else -1
    order: tuple[int, ...] = ()  # of its dimensions behind the batch, if it is another
    bounds: Bounds = None

    def of(self, t: torch.Tensor) -> torch.Tensor:
        if self.rank >= 0:
            t = t.unsqueeze(0)
        if self.order:
            t = t.permute(self.order)
        return t if self.bounds is None else t[..., self.bounds[0] : self.bounds[1]]


class _Recipe(NamedTuple):
    """What tensors of some shapes, dtypes and devices make: a call without its tensors."""

    views: tuple[_View, ...]
    rest: tuple  # of a Call; Dynamo of torch 2.8 knows no part of a named tuple
    device: torch.device
    positive: frozenset[str]


_recipes: dict[tuple, _Recipe] = {}
MOST_RECIPES = 4096


def checked(formula: Formula, values: dict, v: torch.Tensor | None = None, v_axes=()) -> Call:
    """The tensors of a call. ``v`` has axes ``v_axes``. Raises TypeError and ValueError that name
    the argument."""
    key = None if is_dynamo_compiling() else _key(formula, values, v, v_axes)
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = _new_recipe(formula, values, v, v_axes)
        if key is not None and len(_recipes) < MOST_RECIPES:
            _recipes[key] = recipe
    tensors, numbers = [], []
    for view in recipe.views:
        value = v if view.name == "v" else values[view.name]
        if view.rank is None:
            numbers.append(_number(view.name, value, recipe.positive))
            continue
        tensors.append(view.of(placed(value, recipe.device)))
    return Call(tensors, numbers, *recipe.rest)


def _key(formula: Formula, values: dict, v, v_axes: tuple) -> tuple | None:
    """What a recipe depends on; None of what is looked at each time."""
    key = [formula.text, v_axes, v is None]
    for name, value in (*values.items(), *[("v", v)] * (v is not None)):
        if isinstance(value, (int, float)):
            key += (name, None)
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            key += (name, value.shape, value.dtype, value.device)
        else:
            return None
    try:
        hash(key := tuple(key))
    except TypeError:  # of symbols in a trace
        return None
    return key


def _new_recipe(formula: Formula, values: dict, v: torch.Tensor | None, v_axes) -> _Recipe:
    _check_names(formula, values)
    for group in formula.groups:
        _check_features(formula, group, values)
    named = [(name, axes, bounds, values[name]) for name, axes, bounds in formula.reads]
    if v is not None:
        check_dense(("v",), v=v)
        named.append(("v", v_axes, None, v))
    device, positive = _device(named), positive_of(formula.text)
    sizes: dict[str, tuple[int, str]] = {}
    views, floats, is_batched, alone = [], [], False, ""
    for name, axes, bounds, value in named:
        if not axes and not isinstance(value, torch.Tensor):
            _number(name, value, positive)
            views.append(_View(name))
            continue
        check_dense((name,), **{name: value})
        if type(value) is not torch.Tensor:
            refuse_distributed(**{name: value})
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} must be of {', '.join(KINDS)}, got {value.dtype}")
        if value.device != device and (axes or value.device.type != "cpu"):
            raise ValueError(f"{name} is on {value.device}, others on {device}: move it there")
        view = _view(name, axes, bounds, value)
        is_batched = is_batched or (view.rank < 0 and bool(axes))
        alone = name if view.rank < 0 and not axes else alone
        if axes and value.is_floating_point():
            floats.append(value.dtype)
        for axis, size in zip(("batch", *AXES), _sizes(view.of(value), axes), strict=True):
            _meet(sizes, axis, size, name)
        views.append(view)
    if alone and not is_batched:
        _check_alone(alone, sizes["batch"][0], sizes[ROW][0], sizes[COL][0])
        is_batched = True
    features = v.shape[-1] if v is not None and FEATURE in v_axes else 1
    rest = (
        [view.name for view in views if view.rank is None],
        sizes.get("batch", (1, ""))[0], sizes[ROW][0], sizes[COL][0], features, is_batched,
        _widest(floats),
    )  # fmt: skip
    return _Recipe(tuple(views), rest, device, positive)


def _check_names(formula: Formula, values: dict) -> None:
    for name in values:
        if name not in formula.names:
            refuse_argument(formula, name, formula.names)
    missing = [name for name in formula.names if name not in values]
    if missing:
        listed = ", ".join(f"{name}=..." for name in missing)
        raise TypeError(f"{formula.describe()} reads {missing}: pass {listed}")


def _device(named: list) -> torch.device:
    """That of the first tensor that has axes."""
    for name, axes, _, value in named:
        if axes:
            check_dense((name,), **{name: value})
            return value.device
    raise AssertionError("a formula has rows and columns")


def _view(name: str, axes: tuple[str, ...], bounds: Bounds, t: torch.Tensor) -> _View:
    """How a tensor gets a batch in front and its axes in the order of AXES."""
    if t.dim() not in (len(axes), len(axes) + 1):
        shape = f"({', '.join(axes)}{',' * (len(axes) == 1)})"
        raise ValueError(f"{name} must have shape {shape}, or a batch of it, got {tuple(t.shape)}")
    order = sorted(axes, key=AXES.index)
    places = (0, *(1 + axes.index(axis) for axis in order)) if order != list(axes) else ()
    return _View(name, len(axes) if t.dim() == len(axes) else -1, places, bounds)


def _sizes(t: torch.Tensor, axes: tuple[str, ...]) -> tuple[int | None, ...]:
    """Of batch, rows, columns and features; None where it has none. Features meet in each sum."""
    order = sorted(axes, key=AXES.index)
    by_axis = dict(zip(order, t.shape[1:], strict=True))
    return t.shape[0], by_axis.get(ROW), by_axis.get(COL), None


def _meet(sizes: dict, axis: str, size: int | None, name: str) -> None:
    """Note the size of an axis. Raises ValueError where another tensor has another one."""
    if size is None:
        return
    before, of = sizes.get(axis, (size, name))
    if axis == "batch" and 1 in (before, size):
        before, of = (before, of) if size == 1 else (size, name)
    elif before != size:
        what = {"batch": "batch", ROW: "rows", COL: "columns"}[axis]
        raise ValueError(f"{name} has {what} {size}, and {of} has {before}: they must be equal")
    sizes[axis] = (before, of)


def _check_alone(name: str, batch: int, rows: int, cols: int) -> None:
    """Raises ValueError where nothing but numbers has a batch, of as many as there are rows or
    columns: then they may be meant for these."""
    for axis, size in ((ROW, rows), (COL, cols)):
        if batch == size > 1:
            raise ValueError(
                f"{name} must have shape (), got ({batch},), as many as {axis}s: for a number of "
                f"each its axes are {axis!r}; for a batch of formulas give another tensor a batch"
            )


def _check_features(formula: Formula, group: Group, values: dict) -> None:
    """Raises ValueError unless the tensors of a sum have as many features each, or those of its
    first and end."""
    axes, (wide, bounds) = dict(formula.axes), group
    counts = {}
    for name in wide:
        check_dense((name,), **{name: values[name]})
        place = axes[name].index(FEATURE) - len(axes[name])
        counts[name] = values[name].shape[place] if -place <= values[name].dim() else None
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    sizes = [count for count in counts.values() if count is not None]
    if bounds is None and any(size != sizes[0] for size in sizes):
        raise ValueError(f"tensors of one sum must have as many features each, got {listed}")
    if bounds is not None and any(size < bounds[1] for size in sizes):
        raise ValueError(f"a sum reads the features {bounds[0]} to {bounds[1] - 1}, got {listed}")


def _number(name: str, value: object, positive: frozenset[str]) -> float:
    number = host_value(name, value, 0)
    if not -math.inf < number < math.inf:  # Dynamo knows no isfinite of a symbol
        raise ValueError(f"{name} must be finite, got {number}")
    check_host(name, number, positive)
    return number


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype that torch promotes all of them to; its default one for none."""
    if not dtypes:
        return torch.get_default_dtype()
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest

"""Tensors of a call of a formula: their checks, and the shapes in which operators take them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.descriptors.base import refuse_argument
from kernlib.descriptors.score.kinds import KINDS
from kernlib.families.pairwise.formula.descriptor import Formula, Group
from kernlib.families.pairwise.formula.spec import AXES, COL, FEATURE, ROW
from kernlib.runtime.numbers import host_value
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


def checked(formula: Formula, values: dict, v: torch.Tensor | None = None, v_axes=()) -> Call:
    """The tensors of a call. ``v`` has axes ``v_axes``. Raises TypeError and ValueError that name
    the argument."""
    _check_names(formula, values)
    sizes: dict[object, tuple[int, str]] = {}
    tensors, numbers, on_host, floats = [], [], [], []
    for group in formula.groups:
        _check_features(formula, group, values)
    named = [(name, axes, bounds, values[name]) for name, axes, bounds in formula.reads]
    if v is not None:
        check_dense(("v",), v=v)
        named.append(("v", v_axes, None, v))
    device = _device(named)
    is_batched, alone = False, ""
    for name, axes, bounds, value in named:
        if not axes and not isinstance(value, torch.Tensor):
            numbers.append(_number(name, value))
            on_host.append(name)
            continue
        check_dense((name,), **{name: value})
        if type(value) is not torch.Tensor:
            refuse_distributed(**{name: value})
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} must be of {', '.join(KINDS)}, got {value.dtype}")
        if value.device != device:
            if axes or value.device.type != "cpu":
                raise ValueError(f"{name} is on {value.device}, others on {device}: move it there")
            value = value.to(device)
        t, has_batch = _placed(name, axes, value)
        t = t if bounds is None else t[..., bounds[0] : bounds[1]]
        is_batched = is_batched or (has_batch and bool(axes))
        alone = name if has_batch and not axes else alone
        if axes and value.is_floating_point():
            floats.append(value.dtype)
        for axis, size in zip(("batch", *AXES), _sizes(t, axes), strict=True):
            _meet(sizes, axis, size, name)
        tensors.append(t)
    rows, cols = sizes[ROW][0], sizes[COL][0]
    if alone and not is_batched:
        _check_alone(alone, sizes["batch"][0], rows, cols)
        is_batched = True
    features = v.shape[-1] if v is not None and FEATURE in v_axes else 1
    batch = sizes.get("batch", (1, ""))[0]
    dtype = _widest(floats)
    return Call(tensors, numbers, on_host, batch, rows, cols, features, is_batched, dtype)


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


def _placed(name: str, axes: tuple[str, ...], t: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor with a batch in front and its axes in the order of AXES."""
    has_batch = t.dim() == len(axes) + 1
    if t.dim() != len(axes) and not has_batch:
        shape = f"({', '.join(axes)}{',' * (len(axes) == 1)})"
        raise ValueError(f"{name} must have shape {shape}, or a batch of it, got {tuple(t.shape)}")
    t = t if has_batch else t[None]
    order = sorted(axes, key=AXES.index)
    if order != list(axes):
        t = t.permute(0, *(1 + axes.index(axis) for axis in order))
    return t, has_batch


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


def _number(name: str, value: object) -> float:
    number = host_value(name, value, 0)
    if not -math.inf < number < math.inf:  # Dynamo knows no isfinite of a symbol
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype that torch promotes all of them to; its default one for none."""
    if not dtypes:
        return torch.get_default_dtype()
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest

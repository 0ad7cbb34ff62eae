"""Everything that can be wrong with block-sparse attention, said in the caller's words."""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn

import torch

from kernlib import events
from kernlib.descriptors.base import check_flag, shown, whole
from kernlib.families.blocksparse import checks
from kernlib.families.blocksparse.attention.descriptor import (
    AXES,
    BY_DIMENSIONS,
    BlockSparseAttention,
)
from kernlib.families.blocksparse.attention.dropout import ALL, LEVELS
from kernlib.families.blocksparse.checks import (
    LAYOUT_NAMES,
    TYPES,
    Call,
    check_dtype,
    check_layout,
    check_place,
)
from kernlib.families.blocksparse.contents.sizes import is_int
from kernlib.families.blocksparse.layout import Layout
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.arguments import autocast_device, check_out
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.numbers import host_value
from kernlib.runtime.tensors import (
    check_dense,
    check_memory,
    is_wrapped,
    materialised,
    refuse_any_overlap,
    refuse_gradients,
)

LENGTH_TYPES = (torch.int32, torch.int64)
CAPTURED_TYPES = (*TYPES, *LENGTH_TYPES, torch.bool)
NAMES = ("q", "k", "v")
TENSORS = ("scale", "q_lengths", "kv_lengths", "seed")  # options that may be tensors
NUMBERS = ("scale", "window", "q_lengths", "kv_lengths", "dropout_p", "seed", "return_lse")
OPEN = 2**30  # of a window without an end on one side, more than there are rows or columns
MOST_SEED = 2**53  # which a float64 holds, as launches take numbers


class Options(NamedTuple):
    """The arguments of a call besides its operands and captured tensors."""

    scale: float | torch.Tensor
    window: tuple[int, int]
    q_lengths: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    dropout_p: float
    seed: int | torch.Tensor
    lse: bool  # whether that is wanted

    @property
    def tensors(self) -> tuple:
        """The options that ``TENSORS`` names."""
        return self.scale, self.q_lengths, self.kv_lengths, self.seed

    @property
    def has_tensors(self) -> bool:
        """Whether one of the options is a tensor."""
        return (
            isinstance(self.scale, torch.Tensor)
            or self.q_lengths is not None
            or self.kv_lengths is not None
            or isinstance(self.seed, torch.Tensor)
        )

    def materialised(self) -> Options:
        """With tensors that a kernel may read."""
        tensors = zip(TENSORS, self.tensors, strict=True)
        return self._replace(
            **{name: materialised(t) for name, t in tensors if isinstance(t, torch.Tensor)}
        )


class Sizes(NamedTuple):
    """The sizes of a call: ``group`` query heads read each of ``kv_heads``."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    features: int
    values: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def out(self) -> tuple[int, int, int, int]:
        """The shape of the result."""
        return self.batch, self.heads, self.queries, self.values

    def of_axis(self, axis: str) -> int:
        """How many places an axis of a captured tensor has."""
        places = self.batch, self.heads, self.queries, self.keys
        return places[AXES.index(axis)]


def sizes_of(operands: tuple) -> Sizes:
    """The sizes of checked operands."""
    _, q, k, v = operands
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    return Sizes(q.shape[0], k.shape[1], group, q.shape[2], k.shape[2], q.shape[3], v.shape[3])


def options_of(
    descriptor: BlockSparseAttention,
    operands: tuple,
    scale=None,
    window=None,
    q_lengths=None,
    kv_lengths=None,
    dropout_p=None,
    seed=None,
    return_lse=False,
) -> Options:
    """The numbers of a call. Operands are checked only as far as a default depends on them. Raises
    TypeError and ValueError for numbers that the descriptor does not take and for values that are
    no numbers."""
    if scale is None:
        scale = _scale(descriptor, operands)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    sides = (OPEN, OPEN)
    if window is not None or descriptor.window:
        _check_given(descriptor, "window", window is not None, "window")
        sides = checked_window(window)
    has_lengths = q_lengths is not None or kv_lengths is not None
    if has_lengths or descriptor.lengths:
        _check_given(descriptor, "q_lengths or kv_lengths", has_lengths, "lengths")
    if descriptor.dropout:
        check_kinds(descriptor, operands)
        _check_given(descriptor, "dropout_p", dropout_p is not None, "dropout")
        dropout_p, seed = checked_dropout(dropout_p), checked_seed(operands[1], seed)
    elif seed is not None or (dropout_p is not None and checked_dropout(dropout_p) != 0.0):
        _refuse(descriptor, "dropout_p or seed", "dropout")
    else:
        dropout_p = 0.0
    return Options(
        scale, sides, q_lengths, kv_lengths, dropout_p, 0 if seed is None else seed, return_lse
    )


def _scale(descriptor: BlockSparseAttention, operands: tuple) -> float:
    try:
        return 1.0 / math.sqrt(max(1, operands[1].shape[-1]))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        check_kinds(descriptor, operands)
        raise


def _check_given(descriptor, name: str, is_given: bool, flag: str) -> None:
    """Raises ValueError for an argument that the descriptor needs and the call lacks, or the other
    way round."""
    if not is_given:
        raise ValueError(f"{descriptor.describe()} needs {name}")
    if not getattr(descriptor, flag):
        _refuse(descriptor, name, flag)


def _refuse(descriptor: BlockSparseAttention, name: str, flag: str) -> NoReturn:
    raise ValueError(
        f"{name} is given, and {descriptor.describe()} takes none: make one with {flag}=True"
    )


def checked_window(window) -> tuple[int, int]:
    """The columns to the left and right of each row. Raises TypeError and ValueError."""
    if window is None:
        return OPEN, OPEN
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    are_sides = [side is None or _is_int(side) for side in pair]
    pair = [side if side is None else _plain(side) for side in pair]
    if len(pair) != 2 or not all(are_sides):
        raise TypeError(
            f"window must be an int or two (left, right), None for an open side, got "
            f"{shown(window)}"
        )
    if any(side is not None and side < 0 for side in pair):
        raise ValueError(
            f"window must be at least 0 on both sides, got {shown(window)}; None leaves a side open"
        )
    left, right = (OPEN if side is None else min(side, OPEN) for side in pair)
    return left, right


def _is_int(value) -> bool:
    return is_int(value) or isinstance(value, torch.SymInt)


def _plain(value):
    """A whole number as an int, anything else as it is."""
    number = whole(value)
    return value if number is None else number


def checked_dropout(p) -> float:
    """Raises TypeError and ValueError."""
    if isinstance(p, torch.SymFloat):
        return p
    if isinstance(p, torch.Tensor):
        raise TypeError("dropout_p must be a number from 0 to 1, without 1, got a tensor")
    number = host_value("dropout_p", p, 0)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"dropout_p must be a number from 0 to 1, without 1, got {number}")
    if number >= ALL:  # nothing of it would be kept
        raise ValueError(
            f"dropout_p must be at most {LEVELS - 1} / {LEVELS}, as it is rounded to a whole "
            f"number of {LEVELS}ths, got {number}, which rounds to 1"
        )
    return number


def checked_seed(q: torch.Tensor, seed) -> int | torch.Tensor:
    """A given seed, or one of torch's generator, on q's device without waiting for it. Raises
    TypeError and ValueError."""
    if seed is None:
        return torch.randint(MOST_SEED, (), dtype=torch.int64, device=q.device)
    if isinstance(seed, torch.Tensor):
        check_dense(("seed",), seed=seed)
        if seed.dim() or seed.dtype != torch.int64:
            raise ValueError(
                f"seed must be an int, or int64 of shape (), got {seed.dtype} of shape "
                f"{tuple(seed.shape)}"
            )
        if seed.device != q.device:
            raise ValueError(f"seed must be on the device of q, {q.device}, got {seed.device}")
        return seed
    if not _is_int(seed):
        raise TypeError(f"seed must be an int, or int64 of shape (), got {shown(seed)}")
    if not 0 <= seed < MOST_SEED:
        raise ValueError(
            f"seed must be an int from 0 to 2**53 - 1, or an int64 tensor, got {shown(seed)}"
        )
    return _plain(seed)


def check_kinds(descriptor: BlockSparseAttention, operands: tuple) -> None:
    """A layout and three dense tensors of four dimensions. Raises TypeError and ValueError."""
    if len(operands) != 4:
        raise TypeError(
            f"{descriptor.describe()} takes layout, q, k and v, got {len(operands)} operands"
        )
    layout, *tensors = operands
    if not isinstance(layout, Layout) and any(isinstance(t, Layout) for t in tensors):
        raise TypeError(
            f"layout must be a kernlib.blocksparse.Layout, got {type(layout).__name__}: the order "
            "is attention(q, k, v, layout), but run_kernel(descriptor, layout, q, k, v)"
        )
    check_layout(layout)
    named = dict(zip(NAMES, tensors, strict=True))
    check_dense(NAMES, **named)
    ends = {"q": "(B, H, LQ, E)", "k": "(B, HK, LK, E)", "v": "(B, HK, LK, EV)"}
    for name, t in named.items():
        if t.dim() != 4:
            raise ValueError(f"{name} must be {ends[name]}, got {tuple(t.shape)}")


def check_call(descriptor, operands: tuple, out, options: Options, captured: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    sizes = check_operands(descriptor, operands, options, captured)
    q = operands[1]
    check_scale(options.scale, q, True)
    check_lengths(options, sizes)
    if out is not None:
        check_dense((), out=out)
        check_out(out, q, sizes.out, "q")
        check_memory(out)
    return Call(math.prod(sizes.out), sizes.out, q.dtype, q.device)


def check_operands(descriptor, operands: tuple, options: Options, captured: dict) -> Sizes:
    """Shapes, dtypes and devices. Raises ValueError and TypeError; sizes may be symbols."""
    layout, q, k, v = operands
    check_dtype("q", q)
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q is, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k must have batch and features of q, {q.shape[0]} and {q.shape[3]}, got "
            f"{tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have {tuple(k.shape[:3])} in front as k has, got {tuple(v.shape)}"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(
            f"q must have a multiple of k's {kv_heads} heads, got {heads}"
            f"{_turned(layout, heads, kv_heads)}"
        )
    sizes = sizes_of(operands)
    _check_layout(layout, q, sizes)
    for name, length in (("q_lengths", options.q_lengths), ("kv_lengths", options.kv_lengths)):
        if length is not None:
            _check_lengths(name, length, q)
    _check_captured(descriptor, captured, q, sizes)
    return sizes


def _check_layout(layout: Layout, q: torch.Tensor, sizes: Sizes) -> None:
    """Raises ValueError."""
    check_place(layout, "q", q)
    rows, cols = layout.block
    grid = ceil_div(sizes.queries, rows), ceil_div(sizes.keys, cols)
    if layout.grid != grid:
        raise ValueError(
            f"layout must have a grid of {grid[0]}x{grid[1]} blocks of {rows}x{cols} for "
            f"{sizes.queries} queries and {sizes.keys} keys, got {layout.text}"
            f"{_turned(layout, sizes.heads, sizes.kv_heads)}"
        )
    if layout.heads is not None and layout.heads not in (sizes.heads, sizes.batch * sizes.heads):
        raise ValueError(
            f"layout must have no heads, H = {sizes.heads} or B * H = "
            f"{sizes.batch * sizes.heads}, got {layout.heads}"
        )


def _turned(layout: Layout, queries: int, keys: int) -> str:
    """What to do where so many heads are as many rows as the layout has, or nothing."""
    rows, cols = layout.block
    if layout.grid != (ceil_div(queries, rows), ceil_div(keys, cols)):
        return ""
    return "; q is (B, H, LQ, E) and k (B, HK, LK, E): are they transposed? x.transpose(1, 2) fits"


def _check_lengths(name: str, value: torch.Tensor, q: torch.Tensor) -> None:
    """Raises TypeError and ValueError."""
    check_dense((name,), **{name: value})
    if value.dtype not in LENGTH_TYPES:
        raise TypeError(f"{name} must be int32 or int64, got {value.dtype}")
    if tuple(value.shape) != (q.shape[0],):
        raise ValueError(f"{name} must have shape {(q.shape[0],)}, got {tuple(value.shape)}")
    if value.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {value.device}")


def check_lengths(options: Options, sizes: Sizes) -> None:
    """Check that lengths lie within the rows: those in host memory, and with ``debug=True`` those
    on a GPU too, which waits for it. Raises ValueError."""
    bounds = ("q_lengths", sizes.queries, "queries"), ("kv_lengths", sizes.keys, "keys")
    for (name, most, what), value in zip(
        bounds, (options.q_lengths, options.kv_lengths), strict=True
    ):
        if value is None or is_wrapped(value) or not value.numel():
            continue
        if value.device.type == "cpu" or (events.is_debugging() and not _is_capturing()):
            low, high = (int(n) for n in value.detach().aminmax())
            if low < 0 or high > most:
                length = low if low < 0 else high
                raise ValueError(f"{name} must be from 0 to the {most} {what}, got {length}")


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _check_captured(descriptor: BlockSparseAttention, captured: dict, q, sizes: Sizes) -> None:
    """Raises TypeError and ValueError."""
    axes = dict(descriptor.captured)
    for name in axes:
        if name not in captured:
            raise ValueError(f"{descriptor.describe()} needs {name}, a tensor of {axes[name]}")
    for name, value in captured.items():
        if name not in axes:
            refuse_name(descriptor, name)
        check_dense((name,), **{name: value})
        if value.dtype not in CAPTURED_TYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in CAPTURED_TYPES)
            raise TypeError(f"{name} must be one of {kinds}, got {value.dtype}")
        if value.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {value.device}")
        expected = tuple(sizes.of_axis(axis) for axis in axes[name])
        if value.dim() != len(expected) or any(
            extent not in (1, size) for extent, size in zip(value.shape, expected, strict=True)
        ):
            raise ValueError(
                f"{name} must have shape {expected} of its axes {axes[name]}, or 1 there, got "
                f"{tuple(value.shape)}{_by_default(name, axes[name], value)}"
            )
    descriptor.expression.trees(dtypes_of(descriptor, captured))  # which says what is of no use


def _by_default(name: str, axes: tuple[str, ...], value: torch.Tensor) -> str:
    """The remark on axes that may not have been chosen, or nothing."""
    count = value.dim()
    if axes != BY_DIMENSIONS.get(count):
        return ""
    return (
        f"; these are the axes of {count} dimensions by default, axes={{{name!r}: (...)}} says "
        "others"
    )


def refuse_name(descriptor: BlockSparseAttention, name: str) -> None:
    """Raises TypeError for a keyword that a call does not take."""
    names = ", ".join((*NUMBERS, "out", *descriptor.names))
    raise TypeError(
        f"{name} is no argument of {descriptor.describe()}; it takes {names}. A tensor that score "
        "or mask names stands among captured, with its axes"
    )


def dtypes_of(descriptor: BlockSparseAttention, captured: dict) -> tuple[str, ...]:
    """The dtypes of the captured tensors, in the order of their names."""
    return tuple(str(captured[n].dtype).removeprefix("torch.") for n in descriptor.names)


def differentiable(descriptor, captured: dict) -> tuple[str, ...]:
    """The captured tensors that have gradients."""
    return descriptor.expression.differentiable(dtypes_of(descriptor, captured))


def check_scale(scale, q: torch.Tensor, look: bool) -> None:
    """A number, or a tensor without a gradient; ``look`` at values in host memory. Raises
    ValueError, TypeError and RuntimeError."""
    checks.check_scale(scale, "q", q, look)
    if isinstance(scale, torch.Tensor):
        refuse_gradients(
            "attention (but of a captured tensor, as score='v * gain' has it)", scale=scale
        )


def refuse_overlap(operands: tuple, out, options: Options, captured: dict) -> None:
    """Raises ValueError for an ``out`` that shares memory with an argument."""
    if out is None or out.is_meta:
        return
    layout, *tensors = operands
    named = dict(zip(NAMES, tensors, strict=True))
    optional = dict(zip(TENSORS, options.tensors, strict=True))
    listed = dict(zip(LAYOUT_NAMES, layout.tensors, strict=True))
    refuse_any_overlap(out, **named, **optional, **captured, **listed)


def autocast(operands: tuple) -> tuple:
    """q, k and v in autocast's dtype, except float64, as in torch's attention."""
    layout, *tensors = operands
    kind = autocast_device(tensors[0].device)
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return layout, *(t.to(dtype) if t.dtype in KERNEL_TYPES else t for t in tensors)

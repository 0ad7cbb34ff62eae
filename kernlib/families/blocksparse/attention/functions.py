"""Block-sparse attention as a function."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from kernlib import run
from kernlib.descriptors.base import render, shown
from kernlib.descriptors.score.expression import MEANT
from kernlib.families.blocksparse.attention.arguments import check_kinds, checked_seed
from kernlib.families.blocksparse.attention.descriptor import (
    AXES,
    BY_DIMENSIONS,
    FIELDS,
    BlockSparseAttention,
    Captured,
)
from kernlib.families.blocksparse.conditions import BEYOND_CAUSAL, warn_of_whole_blocks
from kernlib.families.blocksparse.layout import Layout
from kernlib.run import run_kernel


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    scale: float | torch.Tensor | None = ...,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    score: str | None = ...,
    mask: str | None = ...,
    q_lengths: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    axes: dict[str, str | tuple[str, ...]] | None = ...,
    out: torch.Tensor | None = ...,
    debug: bool = ...,
    **captured: torch.Tensor,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    scale: float | torch.Tensor | None = ...,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    score: str | None = ...,
    mask: str | None = ...,
    q_lengths: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | torch.Tensor | None = ...,
    return_lse: Literal[True],
    axes: dict[str, str | tuple[str, ...]] | None = ...,
    out: torch.Tensor | None = ...,
    debug: bool = ...,
    **captured: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    scale: float | torch.Tensor | None = ...,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    score: str | None = ...,
    mask: str | None = ...,
    q_lengths: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | torch.Tensor | None = ...,
    return_lse: bool,
    axes: dict[str, str | tuple[str, ...]] | None = ...,
    out: torch.Tensor | None = ...,
    debug: bool = ...,
    **captured: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    scale: float | torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    score: str | None = None,
    mask: str | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    axes: dict[str, str | tuple[str, ...]] | None = None,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **captured: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(score(scale * q k^T)) v`` over the stored blocks of a ``layout``, without storing
    scores.

    q (B, H, LQ, E), k (B, HK, LK, E) and v (B, HK, LK, EV), H a multiple of HK, give (B, H, LQ,
    EV). ``score`` is an expression of ``v``, the scaled product, of ``row``, ``col``, ``head`` and
    ``batch``, and of captured tensors, which are further keyword arguments (``captured``); ``mask``
    is a condition of the others alone, and leaves out where it does not hold, as do ``causal``,
    ``window`` (left, right) and the lengths ``q_lengths`` and ``kv_lengths``, ints (B,). ``axes``
    names the dimensions of captured tensors, such as ``{"slope": "head"}``; without it those of 4,
    3, 2 and 0 dimensions are (batch, head, row, col), (head, row, col), (row, col) and ().
    ``dropout_p`` is the part of the probabilities that is dropped, by the int ``seed`` or one that
    torch's generator draws. With ``return_lse`` the result is the pair of it and the log-sum-exp of
    each row. ``out`` is written in place; ``debug=True`` writes what runs to stderr.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseAttention`, which has the rest.
    Raises ValueError for shapes, devices, a layout and numbers that do not fit, TypeError for other
    dtypes, kinds of arguments and names, RuntimeError for an ``out`` while gradients are recorded.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
        >>> layout = kl.blocksparse.sliding_window(64, block=16, window=(16, 0))
        >>> slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])  # of ALiBi, one a head
        >>> bias = dict(score="v - slope * (row - col)", axes={"slope": "head"}, slope=slope)
        >>> kl.blocksparse.attention(q, k, v, layout, window=(16, 0), **bias).shape
        torch.Size([1, 4, 64, 16])
    """
    named = _axes(axes, captured, (score, mask)) if captured or axes is not None else ()
    lengths = q_lengths is not None or kv_lengths is not None
    has_dropout = not (type(dropout_p) in (float, int) and dropout_p == 0)
    fields = score, mask, named, causal, window is not None, lengths, has_dropout
    # Only keywords other than their defaults: a hot call binds each twice.
    rest = captured
    if lengths:
        rest = dict(q_lengths=q_lengths, kv_lengths=kv_lengths, **rest)
    if has_dropout:
        rest = dict(dropout_p=dropout_p, seed=seed, **rest)
    if out is not None or scale is not None or window is not None:
        rest = dict(out=out, scale=scale, window=window, **rest)
    if return_lse is not False or debug is not False:
        rest = dict(return_lse=return_lse, debug=debug, **rest)
    if is_dynamo_compiling():
        return _traced(fields, (layout, q, k, v), rest)
    # What is no layout has no condition, and raises later.
    condition = getattr(layout, "condition", None)
    if (
        condition
        and mask is None
        and score is None
        and window is None
        and (causal is False or (condition == BEYOND_CAUSAL and not lengths))
    ):
        warn_of_whole_blocks(condition)
    if seed is not None and not has_dropout:  # which evaluation may leave there
        check_kinds(None, (layout, q, k, v))
        checked_seed(q, seed)
    try:
        descriptor = _cached(*fields) if type(causal) is bool else _new(*fields)
    except TypeError:  # for unhashable or wrong arguments
        descriptor = _new(*fields)
    return run_kernel(descriptor, layout, q, k, v, **rest)


def _traced(fields: tuple, operands: tuple, rest: dict):
    """By the text of a descriptor, as Dynamo does not follow what reads an expression."""
    check_kinds(None, operands)
    arguments = [f"{name}={render(value)}" for name, value in zip(FIELDS, fields, strict=True)]
    text = f"{BlockSparseAttention.__name__}({', '.join(arguments)})"
    return run.blocksparse_operators.attention.attend(text, operands, **rest)


def _axes(axes, captured: dict, texts: tuple) -> Captured:
    """Names and axes of the tensors that ``texts`` read. Raises TypeError and ValueError."""
    if axes is not None and not isinstance(axes, dict):
        raise TypeError(f"axes must map names to axes, got {shown(axes)}")
    axes = axes or {}
    for name in axes:
        if name not in captured:
            raise ValueError(f"axes has {name!r}, which is no argument of the call")
    return tuple([(name, _axes_of(name, axes, captured[name], texts)) for name in captured])


def _axes_of(name: str, axes: dict, value, texts: tuple) -> tuple[str, ...]:
    if name in axes:
        return axes[name] if not isinstance(axes[name], str) else (axes[name],)
    if not isinstance(value, torch.Tensor):
        if not _is_named(name, texts):
            from kernlib.hints import scores  # only errors need it

            is_plain = value is None or isinstance(value, (int, float, str))
            text = shown(value) if is_plain else f"a {type(value).__name__}"
            raise TypeError(f"{scores.unknown_argument(name, MEANT)}; it was {text}")
        raise TypeError(
            f"{name} must be a tensor that score or mask names, got {shown(value)}"
            f"{_as_tensor(value)}"
        )
    if value.dim() not in BY_DIMENSIONS:
        _refuse_index(name, texts)
        raise ValueError(
            f"axes must say what the {value.dim()} dimension(s) of {name} are: axes={{{name!r}: "
            f"(...)}} of {AXES}{_meant(name, texts)}"
        )
    return BY_DIMENSIONS[value.dim()]


def _refuse_index(name: str, texts: tuple) -> None:
    """Raises ValueError where a score or mask reads a tensor by an index: no axes would help."""
    for what, text in zip(("score", "mask"), texts, strict=True):
        place = re.search(rf"\b{re.escape(name)}\s*\[([^\[\]]*)\]", text) if text else None
        if place is not None:
            from kernlib.hints import scores  # only errors need it

            why = scores.indexed(name, place[1])
            raise ValueError(f"{what} {shown(text)}: {shown(place[0])} {why}")


def _as_tensor(value) -> str:
    """What a number would be as a tensor."""
    is_number = type(value) in (int, float)
    return f"; torch.tensor({value}) is one" if is_number else ""


def _meant(name: str, texts: tuple) -> str:
    """The argument that may have been meant by a name, unless a score or mask has it."""
    from kernlib.hints import scores  # only errors need it

    return "" if _is_named(name, texts) else scores.unread(name, MEANT)


def _is_named(name: str, texts: tuple) -> bool:
    """Whether a score or mask has the name as a word."""
    word = rf"\b{re.escape(name)}\b"
    return any(isinstance(text, str) and re.search(word, text) is not None for text in texts)


def _new(*fields) -> BlockSparseAttention:
    return BlockSparseAttention(**dict(zip(FIELDS, fields, strict=True)))


_cached = lru_cache(maxsize=64)(_new)  # Dynamo does not look into it

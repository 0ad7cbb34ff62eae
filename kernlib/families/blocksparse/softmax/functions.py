"""Block-sparse softmax as a function."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import shown
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.descriptor import MODES, BlockSparseSoftmax
from kernlib.run import run_kernel


def softmax(
    x: torch.Tensor,
    layout: Layout,
    scale: float | torch.Tensor = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
    causal: bool = False,
    out: torch.Tensor | None = None,
    *,
    debug: bool = False,
) -> torch.Tensor:
    """Softmax of ``x * scale + rpe + key_padding_mask + attn_mask`` over the stored blocks of each
    row of a block-sparse matrix (R, C), or of one matrix a head.

    ``x`` are values (..., capacity, block rows, block columns) of the ``layout``, float32, float16,
    bfloat16 or float64, and so is the result; with Z for the dimensions in front of these, ``rpe``
    broadcasts to (Z, [heads,] R, C), ``key_padding_mask`` to (Z, C), and ``attn_mask`` is (R, C).
    ``scale`` is a number or a tensor (). ``key_padding_mask_mode`` and ``attn_mask_mode`` are "add"
    or "mul": a mask of mode "add" is added, one of "mul" leaves out what it is 0 for; of a mask of
    bools True takes part in either mode. ``causal`` leaves out columns behind the row. Rows that
    nothing is left of are 0. ``out`` may be x itself. ``debug=True`` writes what runs to stderr.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseSoftmax`, which has the rest.
    Raises ValueError for another mode and for shapes and devices that do not fit the layout,
    TypeError for other dtypes and kinds of arguments, RuntimeError for an ``out`` while gradients
    are recorded. The operation is Torch-Blocksparse's ``Softmax``.

    Example:
        >>> layout = kl.blocksparse.sliding_window(32, block=16, window=(0, 0))
        >>> p = kl.blocksparse.softmax(torch.zeros(2, 16, 16), layout, causal=True)
        >>> p[0, :3, :3]  # row r sees r + 1 columns
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    modes = key_padding_mask_mode, attn_mask_mode
    for name, mode in zip(("key_padding_mask_mode", "attn_mask_mode"), modes, strict=True):
        if not isinstance(mode, str) or mode not in MODES:
            raise ValueError(f"{name} must be one of {MODES}, got {shown(mode)}")
    masks = [
        mode if mask is not None else None
        for mode, mask in zip(modes, (key_padding_mask, attn_mask), strict=True)
    ]
    make = _new if is_dynamo_compiling() or type(causal) is not bool else _cached
    descriptor = make(causal, *masks, rpe is not None)
    return run_kernel(
        descriptor, layout, x, out=out, debug=debug, scale=scale, rpe=rpe,
        key_padding_mask=key_padding_mask, attn_mask=attn_mask,
    )  # fmt: skip


def _new(causal: bool, key: str | None, attn: str | None, rpe: bool) -> BlockSparseSoftmax:
    return BlockSparseSoftmax(causal=causal, key_padding_mask=key, attn_mask=attn, rpe=rpe)


_cached = lru_cache(maxsize=64)(_new)  # Dynamo does not look into it

"""Block-sparse matrices and their softmax by its formula in float64, on the matrix laid out."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout

GATES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAMES = ("rpe", "key_padding_mask", "attn_mask")


def layout(mask, block, spare: int = 2) -> Layout:
    """That of a mask, with slots behind the live ones."""
    mask = torch.as_tensor(mask).bool()
    return Layout(mask, block, capacity=int(mask.sum()) + spare)


def chance(*shape: int, density: float = 0.5) -> torch.Tensor:
    """A mask of which the first row of blocks is empty and the last one full."""
    mask = torch.rand(*shape) < density
    mask[..., 0, :], mask[..., -1, :] = False, True
    return mask


def values(made: Layout, *batch: int, dtype=torch.float64, grad: bool = False) -> torch.Tensor:
    """Any, in the slots behind the live ones too."""
    shape = (*batch, made.capacity, *made.block)
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def dense(made: Layout, *batch: int, dtype=torch.float64, grad: bool = False) -> torch.Tensor:
    """Of the matrices' shape."""
    heads = () if made.heads is None else (made.heads,)
    shape = (*batch, *heads, *made.shape)
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def stored(made: Layout) -> torch.Tensor:
    """Of each element whether it is."""
    mask = made.mask()
    return mask.repeat_interleave(made.block[0], -2).repeat_interleave(made.block[1], -1)


def kept(mask: torch.Tensor) -> torch.Tensor:
    """What a mask leaves: bools as they are, else what is not 0."""
    return mask if mask.dtype == torch.bool else mask != 0


def formula(
    made: Layout, x, scale=1.0, rpe=None, key_padding_mask=None, attn_mask=None,
    key_padding_mask_mode="add", attn_mask_mode="add", causal=False,
) -> torch.Tensor:  # fmt: skip
    """The whole matrices of y in float64."""
    logits = made.to_dense(x.double()) * scale
    taken = [stored(made)]
    if rpe is not None:
        logits = logits + rpe.double()
    heads = made.heads is not None
    for mask, mode, is_key in (
        (key_padding_mask, key_padding_mask_mode, True),
        (attn_mask, attn_mask_mode, False),
    ):
        if mask is None:
            continue
        if is_key:
            mask = mask[..., None, None, :] if heads else mask[..., None, :]
        if mask.dtype == torch.bool or mode == "mul":
            taken.append(kept(mask))
        else:
            logits = logits + mask.double()
    if causal:
        taken.append(torch.ones(made.shape, dtype=torch.bool).tril())
    for keep in taken:
        logits = torch.where(keep, logits, -torch.inf)
    alone = (logits == -torch.inf).all(-1, keepdim=True)
    found = torch.softmax(torch.where(alone, 0.0, logits), -1)
    return torch.where(alone, 0.0, found)


def check(made: Layout, y: torch.Tensor, wanted: torch.Tensor, gate: float) -> None:
    """Values at the stored blocks, and 0 in other slots."""
    live = made.nnz
    assert not y[..., live:, :, :].any()
    assert y.shape[-3:] == (made.capacity, *made.block)
    found = made.to_dense(y.double())
    # Of all elements together: 2.1e-4 in float16 for one rounding, 3.5e-4 for two.
    share = 0.26 if y.dtype in (torch.float16, torch.bfloat16) else 1.0
    assert (found - wanted).norm() <= share * gate * wanted.norm()
    assert (found - wanted).abs().max() <= gate * float(wanted.abs().max())


def check_gradients(found, wanted, x: torch.Tensor, gate: float) -> None:
    """Each beside its size, the first being that by x; that of the scale, a sum of as many terms as
    x has elements, beside theirs."""
    for ours, theirs in zip(found, wanted, strict=True):
        size = theirs.norm() if theirs.dim() else (wanted[0] * x.double()).abs().sum()
        assert (ours.double() - theirs).norm() <= gate * size

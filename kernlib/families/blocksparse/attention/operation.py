"""Block-sparse attention as it is called."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention.arguments import autocast, check_kinds, options_of
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.primitive import calls, refuse_overlap
from kernlib.runtime.products import requires_gradient


def run(
    descriptor: BlockSparseAttention,
    *operands,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float | None = None,
    seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    **captured: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What ``descriptor`` describes of ``operands``, layout, q, k and v, as it says itself."""
    options = options_of(
        descriptor, operands, scale, window, q_lengths, kv_lengths, dropout_p, seed, return_lse
    )
    if torch._C._is_any_autocast_enabled():
        check_kinds(descriptor, operands)
        if isinstance(out, torch.Tensor):  # which casts would hide
            refuse_overlap(operands, out, options, captured)
        operands = autocast(operands)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and requires_gradient(captured.values(), *operands[1:], out, *options.tensors)
    ):
        from kernlib.families.blocksparse.attention import (
            gradients,  # which calls without a gradient do without
        )

        y, lse = gradients.recorded(descriptor, operands, out, options, captured)
    else:
        y, lse, _ = calls.execute(descriptor, operands, out, options, captured)
    return (y, lse) if return_lse else y


RUNS = {BlockSparseAttention: run}

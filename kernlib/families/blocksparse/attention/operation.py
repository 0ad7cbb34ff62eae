"""Block-sparse attention as it is called."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention import arguments
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.primitive import calls, refuse_overlap
from kernlib.runtime.products import requires_gradient


def run(
    descriptor: BlockSparseAttention,
    *operands,
    out: torch.Tensor | None = None,
    **given,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What ``descriptor`` describes of ``operands``, layout, q, k and v, as it says itself."""
    captured = {name: value for name, value in given.items() if name not in arguments.NUMBERS}
    options = arguments.options_of(descriptor, operands, given)
    if torch._C._is_any_autocast_enabled():
        if isinstance(out, torch.Tensor):  # which casts would hide
            refuse_overlap(operands, out, options, captured)
        operands = arguments.autocast(operands)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and requires_gradient(captured.values(), *operands[1:], out, *options.tensors)
    ):
        from kernlib.families.blocksparse.attention import (
            gradients,  # which calls without a gradient do without
        )

        y, lse = gradients.recorded(descriptor, operands, out, options, captured)
    else:
        y, lse = calls.execute(descriptor, operands, out, options, captured)
    return (y, lse) if options.lse else y

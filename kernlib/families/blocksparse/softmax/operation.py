"""Block-sparse softmax as it is called."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernlib.families.blocksparse.softmax import arguments
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.primitive import calls, refuse_overlap
from kernlib.runtime.products import requires_gradient


def run(
    descriptor: BlockSparseSoftmax,
    *operands,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What ``descriptor`` describes of ``operands``, layout and x, as it says itself."""
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    if torch._C._is_any_autocast_enabled():
        arguments.check_kinds(descriptor, operands)
        if isinstance(out, torch.Tensor):  # which casts would hide
            refuse_overlap(operands, out, scale, parameters)
        parameters = arguments.autocast(operands, parameters)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and requires_gradient(parameters.values(), *operands[1:], out, scale)
    ):
        arguments.check_kinds(descriptor, operands)
        from kernlib.families.blocksparse.softmax import (
            gradients,  # which calls without a gradient do without
        )

        return gradients.recorded(descriptor, operands, out, scale, parameters)
    return calls.execute(descriptor, operands, out, scale, parameters)


RUNS = {BlockSparseSoftmax: run}

"""Block-sparse softmax as it is called."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from kernlib.families.blocksparse.softmax import arguments
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.primitive import SOFTMAX, calls, refuse_overlap
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import requires_gradient

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


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


# Calls before anybody makes them.


def planned(descriptor: BlockSparseSoftmax, tensors: tuple, keywords: dict) -> list[Planned]:
    """What of a call has a plan. Raises TypeError for an argument that is not known."""
    from kernlib.runtime.ahead import Planned, is_recorded, repeated_launch

    rest = dict(keywords)
    out, scale = rest.pop("out", None), rest.pop("scale", 1.0)
    for name in rest:
        if name not in arguments.NAMES:
            names = ", ".join(("out", "scale", *arguments.NAMES))
            raise TypeError(f"{name} is no argument of {descriptor.describe()}; it takes {names}")
    arguments.check_kinds(descriptor, tensors)
    parameters = arguments.given(*(rest.get(name) for name in arguments.NAMES))
    parameters = arguments.autocast(tensors, parameters)
    recorded = is_recorded(out, scale, *tensors[1:], *parameters.values())
    request = descriptor, tensors, out, scale, parameters
    request = SOFTMAX.materialised(*request) or request
    repeated = partial(repeated_launch, SOFTMAX.launch)
    return [Planned(SOFTMAX, calls, request, request, recorded, repeated)]


def variants(
    descriptor: BlockSparseSoftmax, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and x of ``dtypes``, masks being bools
    or not, and for its gradients; none for float64. Raises KeyError for other dtypes."""
    from kernlib.families.blocksparse.lowering import softmax as lowering

    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    modes = descriptor.key_padding_mask, descriptor.attn_mask
    kinds = [(None,) if mode is None else (mode, "bool") for mode in modes]
    options = [
        lowering.Options(descriptor.causal, descriptor.rpe, *masks) for masks in product(*kinds)
    ]
    return list(lowering.variants(options, names))

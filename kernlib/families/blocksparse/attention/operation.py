"""Block-sparse attention as it is called."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention import plans
from kernlib.families.blocksparse.attention.arguments import (
    NUMBERS,
    autocast,
    check_kinds,
    options_of,
    refuse_name,
)
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.primitive import ATTENTION, calls, refuse_overlap
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import requires_gradient

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


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


# Calls before anybody makes them.


def planned(descriptor: BlockSparseAttention, tensors: tuple, arguments: dict) -> list[Planned]:
    """What of a call has a plan. Raises TypeError for an argument that is not known."""
    from kernlib.runtime.ahead import Planned, is_recorded, repeated_launch

    captured = dict(arguments)
    out = captured.pop("out", None)
    numbers = {name: captured.pop(name) for name in NUMBERS if name in captured}
    for name in captured:
        if name not in descriptor.names:
            refuse_name(descriptor, name)
    check_kinds(descriptor, tensors)
    options = options_of(descriptor, tensors, **numbers)
    recorded = is_recorded(out, *tensors[1:], *options.tensors, *captured.values())
    request = descriptor, autocast(tensors), out, options, captured
    request = ATTENTION.materialised(*request) or request
    repeated = partial(repeated_launch, ATTENTION.launch)
    return [Planned(ATTENTION, calls, request, request, recorded, repeated)]


def variants(
    descriptor: BlockSparseAttention, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and tensors of ``dtypes``, of the
    usual widths and captured ones of one dtype, and for gradients by q, k and v; none for float32
    and float64. Raises KeyError for other dtypes."""
    from kernlib.families.blocksparse.lowering.attention import choose
    from kernlib.families.blocksparse.lowering.attention.score_source import CAPTURED

    names = [KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64]
    names = tuple(name for name in names if name != "float32")
    kinds = CAPTURED if descriptor.names else ("",)
    across = [name for name, axes in descriptor.captured if "col" in axes]
    specs: dict[KernelSpec, None] = {}
    for kind, by, packed in product(kinds, ((), ("v",)), [()] + [across] * bool(across)):
        try:
            score = plans.score_of(descriptor, (kind,) * len(descriptor.names), by, packed)
        except ValueError:  # of a dtype that the expressions have no use for
            continue
        specs.update(dict.fromkeys(choose.variants(score, names, arch)))
    return list(specs)

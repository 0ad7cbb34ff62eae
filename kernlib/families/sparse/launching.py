"""Launches of the kernels that make and undo formats on GPUs."""

from __future__ import annotations

import torch

from kernlib.families.sparse.kernels.codecs.codec import Codec
from kernlib.lowering.steps import Lowered
from kernlib.runtime.sequence import StepsCache

_plans = StepsCache()


def launch(codec: Codec, sizes: tuple, *tensors: torch.Tensor) -> None:
    """The kernel of ``codec.step(*sizes)`` on tensors; behind these it may ask for the end of the
    first."""

    def lower() -> Lowered:
        return Lowered((codec.step(*sizes),))

    plan = _plans.of((codec.name, sizes), codec.operands, tensors[0].device, lower)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if len(addresses) < len(codec.operands):
        addresses.append(addresses[0] + tensors[0].numel() * tensors[0].element_size())
    plan.launch(addresses)

"""Scaled block-sparse products, as they are called."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.scaled import checks, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.product import PRODUCT, calls
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.operation import by_operator
from kernlib.runtime.products import front_door
from kernlib.runtime.tensors import stand_ins


def recorded(descriptor, operands: tuple, out, parameters: dict) -> torch.Tensor:
    """A call whose gradient is recorded, by torch's own operators."""
    if stand_ins(*PRODUCT.tensors(operands)):
        return by_operator(PRODUCT, (descriptor, operands, out, parameters))
    refuse_out_of_recorded(out)
    checks.check_call(descriptor, operands, None, parameters)
    return reference.scaled_matmul(descriptor, *operands)


run = front_door(PRODUCT, calls, recorded)
RUNS = {BlockSparseScaledMatmul: run}

"""Scaled block-sparse products, as they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.families.blocksparse.scaled import checks, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.product import PRODUCT, calls
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.operation import by_operator
from kernlib.runtime.products import front_door
from kernlib.runtime.tensors import stand_ins

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


def recorded(descriptor, operands: tuple, out, parameters: dict) -> torch.Tensor:
    """A call whose gradient is recorded, by torch's own operators."""
    if stand_ins(*PRODUCT.tensors(operands)):
        return by_operator(PRODUCT, (descriptor, operands, out, parameters))
    refuse_out_of_recorded(out)
    checks.check_call(descriptor, operands, None, parameters)
    return reference.scaled_matmul(descriptor, *operands)


run = front_door(PRODUCT, calls, recorded)
RUNS = {BlockSparseScaledMatmul: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseScaledMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """What of a call has a plan: nothing where a gradient is recorded, which torch computes."""
    from kernlib.runtime.ahead import planned_product

    call = planned_product(PRODUCT, calls, None, descriptor, tensors, arguments)
    PRODUCT.check(*call.request)
    return [] if call.recorded else [call]


def variants(
    descriptor: BlockSparseScaledMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, whose inputs are of float8 whatever
    ``dtypes`` are: none but on sm_90a, and where the sum runs along rows of stored blocks."""
    from kernlib.families.blocksparse.lowering import hopper, scaled

    if arch != hopper.ARCH or descriptor.transposed != (descriptor.mode == "dds"):
        return []
    return scaled.variants(descriptor.out_dtype)

"""Products with block-sparse matrices, as they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.families.blocksparse import plans
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.product import PRODUCT, calls
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import front_door

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

SIZES = (16, 32, 64, 128)  # of blocks


def _recorded(*request):
    from kernlib.families.blocksparse import gradients  # which calls without a gradient do without

    return gradients.recorded(*request)


run = front_door(PRODUCT, calls, _recorded)
RUNS = {BlockSparseMatmul: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """What of a call has a plan."""
    from kernlib.families.blocksparse.gradients import parts
    from kernlib.runtime.ahead import planned_product

    return [planned_product(PRODUCT, calls, parts, descriptor, tensors, arguments)]


def variants(
    descriptor: BlockSparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included,
    inputs of ``dtypes`` and square blocks of any size; none for float64. Raises KeyError for other
    dtypes."""
    from kernlib.families.blocksparse.gradients import parts, terms
    from kernlib.families.blocksparse.lowering import choose

    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    precision = None
    if descriptor.precision is not None:
        precision = plans.kernel_precision(descriptor.precision, torch.float32)
    products = dict.fromkeys((descriptor, parts(descriptor).product))
    products |= dict.fromkeys(term.descriptor for term in terms(descriptor))
    specs: dict[KernelSpec, None] = {}
    for each in products:
        for size in SIZES:
            shape = each.epilogue, each.mode, (size, size)
            specs |= dict.fromkeys(choose.variants(*shape, names, arch, precision))
    return list(specs)

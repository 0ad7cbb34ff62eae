"""The kernel slabs.cuh of half-precision numbers: several runs of factors in one launch."""

from __future__ import annotations

from typing import ClassVar

from kernlib.families.kronecker_product.kernels.halves import (
    HALVES,
    HalvesKernel,
    Variant,
    most_columns,
)
from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.families.kronecker_product.lowering.runs import Part
from kernlib.families.kronecker_product.lowering.slabs import InSlabs
from kernlib.jit import targets


class HalfSlabs(HalvesKernel, InSlabs):
    """Several runs, one behind the other in slabs that stay in the L2 cache."""

    header = "kronecker_product/halves/slabs.cuh"
    entry = "kronecker_product_half_slabs"
    rank = 3
    reason = (
        "the same for rows that no block keeps: runs of factors in one launch, by slabs that "
        "stay in the L2 cache"
    )
    kinds: ClassVar = {1: "half_slabs", 2: "pair_slabs"}
    of_run = HALVES

    def variant_of(
        self, groups: tuple[tuple[Size, ...], ...], kind: Group, restaged: bool, blocks: int, arch
    ) -> Variant | None:
        """The kernel of runs of factors of these sizes, for so many blocks of a multiprocessor."""
        room, dtype, parts = targets.SHARED_BYTES[arch] // blocks, kind.dtype, []
        for index, sizes in enumerate(groups):
            within = kind.inside or index > 0
            columns = most_columns(sizes, dtype, within, arch, room)
            parts.append(Part(dtype, dtype, columns, within, sizes))
        variant = Variant(dtype, tuple(parts), 8, restaged=restaged)
        return variant if blocks > 1 else variant.widened()

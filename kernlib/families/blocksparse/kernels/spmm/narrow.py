"""Products with blocks of 16 and 32 in half types, for Hopper.

Operands are copied by 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Scope, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered
from kernlib.lowering.wgmma import multiply

SIZES = (16, 32)  # of square blocks
STEPS = {16: 1.07, 32: 0.96}  # microseconds of 64 along the depth, by blocks, on an H100
CHUNK = 8  # elements of 16 bytes
WORDS = 4  # of a stage
OPERANDS = ("out", "values", "dense")
STRIDES = (
    "i64 value_batch", "i64 value_slot", "i64 value_row",
    "i64 dense_batch", "i64 dense_head",
    "i64 dense_row",  # of columns where the depth lies side by side
)  # fmt: skip


class Narrow(Kernel):
    """Wgmma's columns are a block's lines; all blocks of a step share the dense operand."""

    role = "spmm"
    name = "narrow"
    header = "blocksparse/narrow/narrow.cuh"
    entry = "blocksparse_narrow"
    rank = 4
    reason = "wgmma of sm_90a, half types, blocks of 16 and 32: chosen as `hopper` is"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        block: int
        transposed: bool
        depth_last: bool
        lines_last: bool

    def takes(self, problem: Spmm, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        blocks, values, dense = problem.blocks, problem.values, problem.dense
        if blocks.rows not in SIZES or blocks.cols != blocks.rows:
            return False
        if not hopper.is_for_tiles(problem, arch) or values.column != 1:
            return False
        is_aligned = not any(stride % CHUNK for stride in _strides(problem).values())
        return is_aligned and values.alignment == dense.alignment == 16

    def pays(self, problem: Spmm, gpu: Gpu) -> bool:
        """As for larger blocks."""
        step, count = STEPS[problem.blocks.rows], gpu.multiprocessors
        time = hopper.microseconds(problem, step, hopper.WIDTHS[0], count)
        return time <= portable.best_microseconds(problem, hopper.ARCH, count)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem."""
        count, maps = gpu.multiprocessors, (hopper.out_map(problem),)
        variant = self.Variant(
            problem.dtype,
            problem.blocks.rows,
            problem.transposed,
            bool(hopper.is_across(problem.dense)),
            bool(hopper.is_across(problem.out)),
        )
        fields = hopper.fields(epilogue, *STRIDES)
        numbers = fields.values(**_strides(problem), **hopper.numbers(problem, count))
        fixed, spec = _parameters(epilogue).pack(*numbers), self.spec(epilogue, variant, gpu.arch)
        return hopper.launch(epilogue, problem, spec, fixed, OPERANDS, maps, count)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of square blocks of one size."""
        rows, cols = scope.block
        flags = (False, True)
        return {
            "dtype": hopper.halves(scope) if rows == cols and rows in SIZES else (),
            "block": [rows],
            "transposed": flags,
            "depth_last": flags,
            "lines_last": flags,
        }

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, and of the order of their tiles."""
        return ORDER.before(super().specs(epilogue, scope, arch), scope)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, block, transposed, depth_last, lines_last = variant
        words = [f"{block}x{block}"] + ["transposed"] * transposed
        words += ["depth_last"] * depth_last + ["lines_last"] * lines_last
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **hopper.walk(block, transposed),
            **hopper.ring(hopper.stage_bytes(hopper.WIDTHS[0]), WORDS),
            "BLOCK": block,
            "DEPTH_LAST": depth_last,
            "LINES_LAST": lines_last,
            "SUMS_ACROSS": True,
            "BY_MAPS": False,
            "SCALED": False,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        source = self.source(
            facts,
            hopper.fields(epilogue, *STRIDES).text(),
            text.typed_finish(epilogue),
            multiply(dtype, block, True, right_lines=transposed),
            includes=hopper.INCLUDES,
        )
        return self.named_spec(source, hopper.THREADS, hopper.SHARED_BYTES, dtype, words, epilogue)


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The map of the result, operands, the layout's bits and ranks, the epilogue's, strides and
    sizes."""
    fields = hopper.fields(epilogue, *STRIDES)
    return text.parameters(2 + len(hopper.LISTS), fields.format, epilogue, maps=1)


def _strides(problem: Spmm) -> dict[str, int]:
    """The values of STRIDES."""
    values, dense = problem.values, problem.dense
    return {
        "value_batch": values.batch,
        "value_slot": values.slot,
        "value_row": values.row,
        "dense_batch": dense.batch,
        "dense_head": dense.head,
        "dense_row": dense.column if hopper.is_across(dense) else dense.line,
    }

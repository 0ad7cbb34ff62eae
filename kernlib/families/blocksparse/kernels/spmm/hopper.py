"""Products with blocks of 64 and 128 in half types, on Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered
from kernlib.lowering.wgmma import multiply

STEPS = {64: 0.5, 128: 0.6, 256: 0.95}  # microseconds of 64 along the depth, by columns, of an H100
WORDS = 3  # of a stage


class Hopper(Kernel):
    """Tiles of 128 lines and up to 256 columns, whose operands the copy engine brings."""

    role = "spmm"
    name = "hopper"
    header = "blocksparse/hopper/hopper.cuh"
    entry = "blocksparse_hopper"
    rank = 2
    reason = (
        "wgmma of sm_90a, half types, blocks of 64 and 128: chosen where columns and tiles are "
        "estimated to be enough to beat `portable`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        lines: int  # of a block of op(S)
        depth: int
        columns: int  # of a tile
        transposed: bool
        depth_last: bool
        lines_last: bool

    def takes(self, problem: Spmm, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        return hopper.is_for_maps(problem, arch)

    def choices(self, problem: Spmm, arch: str) -> list[Choice]:
        """The columns of a tile."""
        return hopper.widths(problem, hopper.WIDTHS)

    def default(self, problem: Spmm, gpu: Gpu) -> Choice:
        """The choice taken untuned."""
        return hopper.best_width(problem, self.choices(problem, gpu.arch), gpu.multiprocessors)

    def pays(self, problem: Spmm, gpu: Gpu) -> bool:
        """Whether columns are so many, and tiles, that it takes less time than the portable one."""
        width, count = int(self.default(problem, gpu)["columns"]), gpu.multiprocessors
        time = hopper.microseconds(problem, STEPS[width], width, count)
        return time <= portable.best_microseconds(problem, hopper.ARCH, count)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem."""
        width, count = int(choice["columns"]), gpu.multiprocessors
        deep, across = hopper.is_across(problem.dense), hopper.is_across(problem.out)
        ends = problem.transposed, bool(deep), bool(across)
        spec = self.spec(
            epilogue, self.Variant(problem.dtype, *problem.op[:2], width, *ends), gpu.arch
        )
        # Rows of the box of a panel: its columns, or as many of the depth as a stage has.
        maps = hopper.operand_maps(problem, width if deep else hopper.ROW)
        numbers = hopper.fields(epilogue).values(**hopper.numbers(problem, count, width))
        fixed = _parameters(epilogue).pack(*numbers)
        names = ("values", "dense", "out")
        return hopper.launch(epilogue, problem, spec, fixed, names, maps, count, width)

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size and their transposes."""
        sizes, flags = dict.fromkeys(scope.block), (False, True)
        return {
            "dtype": hopper.halves(scope) if set(sizes) <= set(hopper.SIZES) else (),
            "lines": sizes,
            "depth": sizes,
            "columns": hopper.WIDTHS,
            "transposed": flags,
            "depth_last": flags,
            "lines_last": flags,
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope) -> bool:
        """Whether op(S) has such blocks."""
        block = (variant.lines, variant.depth)
        return (block[::-1] if variant.transposed else block) == tuple(scope.block)

    def specs(self, epilogue: tuple[Epilogue, ...], scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, and of the order of their tiles."""
        return ORDER.before(super().specs(epilogue, scope, arch), scope)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, lines, depth, columns, transposed, depth_last, lines_last = variant
        words = [f"{lines}x{depth}", f"{hopper.TILE_LINES}x{columns}"]
        words += ["transposed"] * transposed
        words += ["depth_last"] * depth_last + ["lines_last"] * lines_last
        stage_bytes = hopper.stage_bytes(columns)
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **hopper.walk(lines, transposed),
            **hopper.ring(stage_bytes, WORDS),
            "LINES": lines,
            "DEPTH": depth,
            "TILE_COLUMNS": columns,
            "DEPTH_LAST": depth_last,
            "LINES_LAST": lines_last,
            "SUMS_ACROSS": False,
            "BY_MAPS": True,
            "SCALED": False,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        texts = (
            hopper.fields(epilogue).text(),
            text.typed_finish(epilogue),
            multiply(dtype, columns, False, transposed, not depth_last),
        )
        source = self.source(facts, *texts, includes=hopper.INCLUDES)
        shared = hopper.shared_bytes(stage_bytes)
        return self.named_spec(source, hopper.THREADS, shared, dtype, words, epilogue)


def _parameters(epilogue: tuple[Epilogue, ...]):
    """Maps, the layout's bits and ranks, the epilogue's, sizes."""
    return text.parameters(len(hopper.LISTS), hopper.fields(epilogue).format, epilogue, maps=3)

"""The product of a bitmap matrix with few vectors: bitmap/bitmap.cuh, and sum.cuh behind it where
its columns are more than the warps of a CTA take side by side, and CTAs do not take one range of
those after the other. Where it can, the class :class:`BitmapMany` multiplies more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.families.sparse.kernels.bitmap import many
from kernlib.families.sparse.kernels.bitmap.many import (
    CHUNK_COLUMNS,
    CHUNK_ROWS,
    RING_OFFSET,
    WORD_BYTES,
    slot_of,
)
from kernlib.families.sparse.kernels.sum import Sum
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Constant
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered

AT_ONCE = 16  # vectors of a launch
# In two launches: 215 us for 32 of them with 8192 x 28672 at density .5, beside 304 of laying the
# matrix out and cuBLAS on an H200, by the measured time of 16.
MOST_COLUMNS = 2 * AT_ONCE
MAX_STAGES = 8
# Of codes, which memory brings faster than warps decode them: with 4, int4 at density .5 took 48.9
# us where 2 take 46.1 on an H200 (8192 x 28672), as the second to fourth chunks delay the first.
MAX_STAGES_OF_CODES = 2
WARPS = (16, 12, 8)  # of a CTA
# Of one that multiplies codes, which are fewer bytes and take fewer registers: 28 were 3 to 13 %
# faster than 16 on an H200 at 8192 x 28672, 20 and 24 slower.
WARPS_OF_CODES = (28, 16, 8)
MAX_UNITS = 2**31 - 1
# CTAs take all ranges of their slabs up to this many vectors times ranges behind the first, as each
# of those is read anew by all CTAs. On an H200 with a launch of something else between products
# 4096 x 11008 at density .5, of 3 ranges, takes 21.0, 21.6, 23.0 and 26.1 us for 1, 2, 4 and 8
# vectors so, and 21.8, 22.2, 23.1 and 25.1 with a second launch for the sums; one behind the other
# 18.3, 18.8, 19.7 and 22.6 so, and 20.3, 21.0, 21.8 and 23.8.
MOST_READ_ANEW = 8
MOST_RANGES_OF_CODES = 2  # with int8 and one vector 4 ranges take 4 % longer, as x becomes digits
LEAST_STAGES = 3  # that are left beside the sums that CTAs hold, if there were more
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")  # targets without an instruction that makes halves of it


class Bitmap(SparseKernel):
    """Multiplies by up to 16 vectors a launch, of matrices whose values have all of their bits, or
    fewer: codes such as "int8"."""

    role = "product"
    name = "bitmap"
    header = "sparse/bitmap/bitmap.cuh"
    entry = "sparse_bitmap"
    reason = (
        "the matrix's format decides: `bitmap`, of up to 8 vectors, or 32 where there is no "
        "wgmma of sm_90a"
    )
    operands = ("data", "offsets", "x", "out")  # or the workspace in the place of the last
    fixed = Fields((
        "i64 rows", "i64 x_stride", "i64 out_vector_stride", "i64 out_row_stride",
        "int cols", "int columns", "int kchunks", "int slabs",
        "int stages", "int slot_bytes",          # of a warp's ring
        "int cta_units", "int longer_ctas",      # units of a CTA, or slabs: the first have one more
        "int range_chunks", "int wider_ranges",  # and chunks of a range
        "int ranges",
        "int running",                           # where those sums are, in bytes of shared memory
    ))  # fmt: skip
    includes = ("common/math.cuh", "sparse/quantised/kinds.cuh")
    steps = (Sum,)

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue. ``tiles`` of 8 vectors, 0
        for a single vector; ``sums``, whether the result goes to the workspace; ``codes``, or ""
        where values have all of their bits."""

        dtype: str
        warps: int
        tiles: int
        sums: bool
        codes: str = ""

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem: half types, and up to MOST_COLUMNS vectors, or
        fewer than :class:`BitmapMany` takes; of codes AT_ONCE."""
        most = many.LEAST_COLUMNS - 1 if arch in many.ARCHS else MOST_COLUMNS
        most = AT_ONCE if codes_of(problem.format) else most
        if problem.dtype not in ("float16", "bfloat16") or not 0 < problem.columns <= most:
            return False
        units = _slabs(problem) * _ranges(problem, _warps(problem, arch))
        return 0 < units <= MAX_UNITS and problem.cols <= MAX_UNITS - CHUNK_COLUMNS

    def launch(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        gpu: Gpu,
        choice: Mapping[str, Any],
    ) -> Lowered:
        """The launches of a problem, of up to AT_ONCE vectors each, one behind the other, which
        share the workspace."""
        item, steps, workspace = DTYPES[problem.dtype].bytes, [], 0
        for first in range(0, problem.columns, AT_ONCE):
            columns = min(AT_ONCE, problem.columns - first)
            part = problem._replace(columns=columns, frozen=problem.frozen and not first)
            lowered = self._launch(epilogue, part, gpu)
            places = {
                "x": ("x", first * problem.x_stride * item),
                "out": ("out", first * problem.out_strides[0] * item),
            }
            steps += [step.placed(places) for step in lowered.steps]
            workspace = max(workspace, lowered.workspace)
        return Lowered(tuple(steps), workspace)

    def _launch(self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu) -> Lowered:
        warps = _warps(problem, gpu.arch)
        ranges, variant = _ranges(problem, warps), _variant(problem, warps, False)
        if not has_all_ranges(problem, variant, ranges, *gpu):
            variant = variant._replace(sums=True)
        slabs, chunks = _slabs(problem), _chunks(problem)
        units = slabs * ranges if variant.sums else slabs  # that are shared out
        ctas = min(units, gpu.multiprocessors)
        running = 0 if variant.sums else _running(variant, slabs, ranges, ctas)
        cta_units, longer_ctas = divmod(units, ctas)
        range_chunks, wider_ranges = divmod(chunks, ranges)
        main = self.step_of(
            () if variant.sums else epilogue,
            problem,
            variant,
            gpu.arch,
            (ctas, 1),
            overlaps=problem.frozen,
            kchunks=chunks,
            slabs=slabs,
            stages=_stages(problem, variant, gpu.arch, running),
            slot_bytes=slot_of(problem),
            cta_units=cta_units,
            longer_ctas=longer_ctas,
            range_chunks=range_chunks,
            wider_ranges=wider_ranges,
            ranges=ranges,
            running=_dynamic(variant, gpu.arch) - running,
        )
        if not variant.sums:
            return Lowered((main,))
        size, last = 4 * ranges * problem.columns * problem.rows, Sum()
        sums = main.placed({"out": (WORKSPACE, 0)})
        return Lowered((sums, last.step(epilogue, problem, gpu.arch, ranges)), size)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of a format, in half types."""
        codes = codes_of(scope.format)
        most = 1 if scope.arch in many.ARCHS and not codes else AT_ONCE // 8
        return {
            "dtype": scope.halves.dtypes,
            "warps": WARPS_OF_CODES if codes else WARPS,
            "tiles": range(most + 1),
            "sums": (False, True),
            "codes": (codes,),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether registers hold what it needs."""
        return _has_registers(variant, scope.arch)

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, and of sums in half types."""
        return super().specs(epilogue, scope.halves, arch)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant, without the epilogue where the result is sums."""
        dtype, warps, tiles, sums, codes = variant
        epilogue = () if sums else epilogue
        facts = {
            **text.facts(dtype, "float32" if sums else dtype, epilogue),
            "WARPS": warps,
            "COLUMN_TILES": tiles,
            "SUMS": sums,
            "COPY_ENGINE": arch in OVERLAPPING,
            "CODES": Constant(codes.upper() or "PLAIN"),
            "IN_DIGITS": codes in ("int8", "int4") and not tiles,  # by tensor cores of integers
            "E4M3": arch not in WITHOUT_E4M3,
        }
        words = [codes] * bool(codes)
        words += [f"warps={warps}", f"vectors={8 * tiles or 1}", *["sums"] * sums]
        shared = _dynamic(variant, arch)
        return self.spec_of(epilogue, facts, 32 * warps, shared, dtype, words)


def codes_of(format: str) -> str:
    """What values of a format in fewer bits are made of, "" of one in all of them."""
    return QUANTISED[format].values if format in QUANTISED else ""


def _stages(problem: Problem, variant: Bitmap.Variant, arch: str, running: int = 0) -> int:
    """Chunks of a warp's ring that fit beside ``running`` bytes of sums, at most MAX_STAGES."""
    most = MAX_STAGES_OF_CODES if variant.codes else MAX_STAGES
    return min(most, (_ring(variant, arch) - running) // (variant.warps * slot_of(problem)))


def _running(variant: Bitmap.Variant, slabs: int, ranges: int, ctas: int) -> int:
    """Bytes of the sums that a CTA holds from range to range."""
    of_slab = 512 * variant.tiles or 64
    return round_up(ceil_div(slabs, ctas) * of_slab, 128) if ranges > 1 else 0


def has_all_ranges(
    problem: Problem, variant: Bitmap.Variant, ranges: int, arch: str, multiprocessors: int
) -> bool:
    """Whether CTAs take all ranges of their slabs, in one launch: where none has more units by
    that than by cutting a slab's ranges apart, and x is small enough to be read for each range."""
    if ranges == 1:
        return True
    most_ranges = MOST_RANGES_OF_CODES if variant.codes else ranges
    if ranges > most_ranges or (ranges - 1) * problem.columns > MOST_READ_ANEW:
        return False
    slabs = _slabs(problem)
    running = _running(variant, slabs, ranges, min(slabs, multiprocessors))
    stages = _stages(problem, variant, arch)
    if _stages(problem, variant, arch, running) < min(stages, LEAST_STAGES):
        return False
    units = ceil_div(slabs * ranges, multiprocessors)  # of the CTA with most, cut anywhere
    return ceil_div(slabs, multiprocessors) * ranges <= units


def _warps(problem: Problem, arch: str) -> int:
    """Warps of a CTA: of those that leave room for two stages the fewest that make as few ranges as
    any, as others stand idle."""
    every = WARPS_OF_CODES if codes_of(problem.format) else WARPS
    variants = (_variant(problem, warps) for warps in every)
    fitting = [
        v.warps for v in variants if _has_registers(v, arch) and _stages(problem, v, arch) >= 2
    ]
    return min(fitting or every[-1:], key=lambda warps: (_ranges(problem, warps), warps))


def _has_registers(variant: Bitmap.Variant, arch: str) -> bool:
    """Whether its kernel spills none, or of codes next to none: 16 vectors take up to 168. ptxas
    takes more for Blackwell's sm_12x."""
    if variant.codes and arch.startswith("sm_12") and variant.warps > 16:
        return False
    return variant.tiles < 2 or variant.warps <= (16 if variant.codes else 12)


def _variant(problem: Problem, warps: int, sums: bool = True) -> Bitmap.Variant:
    tiles = 0 if problem.columns == 1 else ceil_div(problem.columns, 8)
    return Bitmap.Variant(problem.dtype, warps, tiles, sums, codes_of(problem.format))


def _slabs(problem: Problem) -> int:
    return ceil_div(problem.rows, CHUNK_ROWS)


def _chunks(problem: Problem) -> int:
    return ceil_div(problem.cols, CHUNK_COLUMNS)


def _ranges(problem: Problem, warps: int) -> int:
    return ceil_div(_chunks(problem), warps)


def _static(variant: Bitmap.Variant) -> int:
    """Shared memory that the kernel declares: ranks, and the barriers of sums."""
    return variant.warps * WORD_BYTES + 128


def _sums(variant: Bitmap.Variant, arch: str) -> int:
    """Bytes of the slabs' sums that wait, in front of the ring."""
    depth = 2 if arch in OVERLAPPING else 3
    return variant.warps * (depth * 512 * variant.tiles if variant.tiles else 4 * 64)


def _dynamic(variant: Bitmap.Variant, arch: str) -> int:
    """All that is left of a CTA's shared memory: sums and the ring."""
    return (targets.SHARED_BYTES[arch] - _static(variant)) // 128 * 128


def _ring(variant: Bitmap.Variant, arch: str) -> int:
    return _dynamic(variant, arch) - _sums(variant, arch) - RING_OFFSET

"""What kernels that multiply by wgmma have in common: variants, and the text in front of headers
of kernel_sources/kronecker_product/hopper."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.kernels.base import ProductKernel
from kernlib.families.kronecker_product.lowering import grouping, parameters, passes
from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.families.kronecker_product.lowering.passes import ARCH, PANEL, WIDEST, Pass
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.slabs import EXPONENT_BYTES, MOST_TICKETS
from kernlib.jit.spec import KernelSpec
from kernlib.jit.targets import SHARED_BYTES
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.wgmma import multiply

MOST_PASSES = 3  # of one launch
WORKERS, WIDE_WORKERS = 512, 256  # threads that have a tile; where each has 64 sums of it
HELPER_REGISTERS, REGISTERS = 40, 65536  # of a thread that has none; of a multiprocessor
MOST_STAGES, SLAB_STAGES = 4, 2  # tiles that a group has under way; where they wait for others
ALIGNMENT, BARRIERS, NOTE_BYTES = 1024, 16, 32  # of a panel; bytes of a stage; of a tile under way
MORE_NOTES = 2  # tiles that are under way and have left their stage
LARGEST_EXPONENT = 14  # exponent of float16's large numbers
BOUND_ARRAYS = 2  # as in bounds.cuh


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the dtype, words of an operand,
    passes of a launch, first to last, and the rows of a slab where there are several; launches
    ``before`` and ``behind`` it that float16 is handed on between."""

    dtype: str
    words: int
    passes: tuple[Pass, ...]
    slab: int = 0
    before: int = 0
    behind: int = 0

    @property
    def sizes(self) -> list[Size]:
        """Of the factors, as a launch has them."""
        return [(rows, rows) for each in self.passes for rows in each.factors]

    @property
    def workers(self) -> int:
        """As many as registers last for."""
        is_wide = any(each.tile[1] > PANEL for each in self.passes)
        return WIDE_WORKERS if is_wide else WORKERS

    @property
    def groups(self) -> int:
        """Tiles that a block computes at a time."""
        return self.workers // (2 * self.passes[0].tile[0])

    @property
    def threads(self) -> int:
        """With a warp for each group that copies its tiles, and one that tells of them if there are
        several passes: in whole warpgroups, which share out registers."""
        return self.workers + round_up(32 * self.groups * min(2, len(self.passes)), 128)

    @property
    def worker_registers(self) -> int:
        """What helpers leave of those that a block begins with."""
        begins = min(REGISTERS // self.threads, 255) // 8 * 8 * self.threads
        helpers = self.threads - self.workers
        return min(240, (begins - helpers * HELPER_REGISTERS) // self.workers // 8 * 8)

    @property
    def panel(self) -> int:
        """Numbers of a tile."""
        return max(math.prod(each.tile) for each in self.passes)

    @property
    def matrices(self) -> int:
        """Bytes of all matrices."""
        return 2 * self.words * sum(each.matrices for each in self.passes)

    @property
    def scales(self) -> int:
        """Columns of a tile that are scaled each for itself, or 1 for all."""
        return PANEL if self.passes[0].inside else 1

    @property
    def powers(self) -> int:
        """How many arrays of powers of two go from pass to pass."""
        return len(self.passes) - 1 if self.dtype == "float16" else 0

    @property
    def bounds(self) -> int:
        """How many arrays there are of what scales numbers that launches hand on."""
        return BOUND_ARRAYS if self.before + self.behind else 0

    @property
    def stage_bytes(self) -> int:
        """Of a tile as it arrives, and as a panel."""
        return self.panel * max(2 * self.words, DTYPES[self.dtype].bytes)

    @property
    def stages(self) -> int:
        """As many as there is room for; 0 where there is none."""
        most = SLAB_STAGES if len(self.passes) > 1 else MOST_STAGES
        return max(0, min(most, self._room // (self.groups * self._bytes_of_stage)))

    @property
    def _bytes_of_stage(self) -> int:
        powers = self.panel // PANEL * EXPONENT_BYTES * (self.powers > 0)
        return self.stage_bytes + BARRIERS + NOTE_BYTES + powers

    @property
    def _room(self) -> int:
        """For stages, beside what else there is."""
        return SHARED_BYTES[ARCH] - self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        numbers = 2 * len(self.passes) + 4 * self.scales * self.groups
        numbers += 2 * (1 + WIDEST) * (self.behind > 0)  # growths of matrices, sums of columns
        notes = MORE_NOTES * self.groups * NOTE_BYTES
        return self.matrices + 4 * round_up(numbers, 4) + notes + ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed_bytes + self.groups * self.stages * self._bytes_of_stage


class PassesKernel(ProductKernel):
    """What the kernels of one pass and of several have in common. ``kind`` is what descriptions
    call them."""

    role = "product"
    name = "hopper"
    Variant = Variant
    kind: ClassVar[str]

    def pays(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether it is faster than kernels for every GPU."""
        return passes.is_faster(grouping.product_of(problem), gpu.arch)

    def variants_of(self, product: Group, arch: str) -> list[Variant]:
        """The kernels of a product, in the order of their launches; none where others take it."""
        raise NotImplementedError

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether factors are wide enough, and the same in each of a batch."""
        each = self.variants_of(grouping.product_of(problem), arch) if problem.batch == 1 else []
        tiles = [part.tiles(problem.columns) for one in each for part in one.passes]
        return bool(tiles) and max(tiles) * MOST_PASSES < MOST_TICKETS

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a launch."""
        first, dtype = variant.passes[0], variant.dtype
        words = [
            "x".join(map(str, rows))
            for part in variant.passes
            for rows in (part.lines, part.columns)
            if rows
        ]
        several = len(variant.passes) > 1
        words += [f"{variant.slab}s"] if several else [f"{first.left}l", f"{first.right}r"]
        words += ["i"] * first.inside
        if variant.bounds:
            words.append(f"{variant.before + 1}of{variant.before + 1 + variant.behind}")
        precision = "tf32" if dtype == "float32" and variant.words == 1 else "fp32"
        size, numbers = (variant.threads, variant.shared_bytes), (dtype, precision)
        said = [precision] * (dtype == "float32") + words
        source = self._text(epilogue, variant)
        return self.product_spec(self.kind, source, *size, numbers, words, said, arch, epilogue)

    def _text(self, epilogue: tuple[Epilogue, ...], variant: Variant) -> str:
        """The generated text: facts, ``Fixed``, ``Finish``, wgmma and passes."""
        half = "bfloat16" if variant.dtype == "bfloat16" else "float16"
        sizes, count, dtypes = variant.sizes, len(variant.passes), (variant.dtype, variant.dtype)
        powers = variant.powers + variant.bounds
        facts = {
            **parameters.facts(dtypes, sizes, count, epilogue, powers),
            "HalfT": DTYPES[half].cuda,
            "WORDS": variant.words,
            "SCALED": half == "float16",
            "LINES": variant.passes[0].tile[0],
            "PANEL": variant.panel,
            "MATRIX_BYTES": variant.matrices,
            "SCALES": variant.scales,
            "THREADS": variant.threads,
            "WORKERS": variant.workers,
            "WORKER_REGISTERS": variant.worker_registers,
            "HELPER_REGISTERS": HELPER_REGISTERS,
            "GROUPS": variant.groups,
            "STAGES": variant.stages,
            "STAGE_BYTES": variant.stage_bytes,
            "BEFORE": variant.before,
            "BEHIND": variant.behind,
            "SLAB_ROWS": variant.slab,
        }
        matrices = [f"Run{index}::First" for index in range(count)]
        matrices[1:1] = ["Run0::Second"] * bool(variant.passes[0].columns)
        texts = (
            parameters.fixed_text(parameters.fields(count, len(sizes), epilogue, powers)),
            text.typed_finish(epilogue),
            _multiply(variant, half),
            parameters.runs_text(_runs(variant)),
            f"using AllMatrices = MatrixList<{', '.join(matrices)}>;\n",
        )
        includes = "common/math.cuh", "common/hopper.cuh", parameters.HEADER
        return self.source(facts, *texts, includes=includes)


def exponents(part: Pass) -> tuple[int, int]:
    """Of the largest number of a tile, and of the matrix along its lines: what this makes of that
    is below 2^15 where it is multiplied again."""
    if not part.columns:
        return LARGEST_EXPONENT, LARGEST_EXPONENT
    both = LARGEST_EXPONENT - 1 - (part.rows - 1).bit_length()
    return both - both // 2, both // 2


def _multiply(variant: Variant, half: str) -> str:
    """The wgmma of panels and, where there are any, fragments."""
    texts = multiply(half, PANEL, registers=False, left_lines=True, right_lines=True)
    if any(part.columns for part in variant.passes):
        texts += multiply(half, PANEL, registers=True, right_lines=True)
    return texts


def _runs(variant: Variant) -> list[dict[str, Fact]]:
    """The facts of each pass."""
    runs, first, number, at = [], 0, 0, 0
    storage, several = DTYPES[variant.dtype], variant.powers
    for index, part in enumerate(variant.passes):
        count, behind, (lines, columns) = len(part.lines), len(part.columns), part.tile
        most, exponent = exponents(part)
        quads = not part.inside and storage.bytes == 4
        one = part.rows, first, count, lines, exponent, False
        other = math.prod(part.columns), first + count, behind, columns, LARGEST_EXPONENT, quads
        facts = {
            "SourceT": storage.cuda,
            "TargetT": storage.cuda,
            "First": parameters.numbered("Merged", one),
            "Second": parameters.numbered("Merged", other),
            "SECOND": behind > 0,
            "INSIDE": part.inside,
            "QUADS": quads,
            "BEGINS": index == 0,
            "ENDS": index == len(variant.passes) - 1,
            "Before": f"Run{index - 1}" if index else "void",
            "HANDS": several > index,
            "TAKES": 0 < index <= several,
            "INDEX": index,
            "COLUMNS": columns,
            "ROW_TILES": part.row_tiles,
            "MATRIX": number,
            "MATRICES": at,
            "MOST_EXPONENT": most,
            **_places(part),
        }
        runs.append(facts)
        first += count + behind
        number += 1 + bool(behind)
        at += 2 * variant.words * part.matrices
    return runs


def _places(part: Pass) -> dict[str, Fact]:
    """Where the elements of a tile lie."""
    lines, columns = part.tile
    copies, unit = lines // part.rows, part.rows * part.right
    width, group_step = columns, 0
    if part.columns:
        unit_step, width, group_step = unit, part.right, lines * part.right
        chunks, left_step, chunk_step = 1, lines * columns, 0
    elif not part.inside:
        unit_step, chunk_step = columns, columns * copies
        chunks, left_step = part.right // chunk_step, unit
    elif part.right >= copies:
        unit_step, chunk_step, chunks, left_step = 1, copies, part.right // copies, unit
    else:
        unit_step, chunk_step, chunks, left_step = unit, 1, part.right, unit * copies
    return {
        "PITCH": part.right,
        "UNIT_STEP": unit_step,
        "WIDTH": width,
        "GROUP_STEP": group_step,
        "CHUNKS": chunks,
        "LEFT_STEP": left_step,
        "CHUNK_STEP": chunk_step,
    }

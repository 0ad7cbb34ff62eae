"""What kernels of Kronecker products have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import parameters
from kernlib.families.kronecker_product.lowering.grouping import Group
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.steps import Lowered, Step

FAMILY = "kronecker_product"
WORDS = 4  # the last of a variant's, that names say: there may be many factors


class ProductKernel(Kernel):
    """A kernel of a product's factors, or of their gradients."""

    def product_spec(
        self,
        kind: str,
        source: str,
        threads: int,
        shared: int,
        numbers: tuple[str, str],
        words: list[str],
        said: list[str],
        arch: str,
        epilogue: tuple[Epilogue, ...] = (),
    ) -> KernelSpec:
        """The specification of a source for numbers of a dtype and a precision. Descriptions call
        it ``kind`` and say all ``words``, names those of ``said``. Raises UnsupportedError where
        its shared memory does not fit a block."""
        line = text.describe(FAMILY, kind, *numbers, words, epilogue)
        if shared > targets.SHARED_BYTES[arch]:
            raise UnsupportedError(
                f"{line} needs {shared} bytes of shared memory, a block of {arch} has "
                f"{targets.SHARED_BYTES[arch]}"
            )
        spec = KernelSpec(FAMILY, source, self.entry, threads, shared, description=line)
        return named(spec, numbers[0], *said, epilogue=epilogue)


class PartsKernel(ProductKernel):
    """A kernel of one run of factors or of several, which are the ``parts`` of its variants."""

    is_numbered: ClassVar[bool] = False  # whether modes know their number

    def number_facts(self, variant: Any) -> dict[str, Fact]:
        """Facts of its numbers."""
        raise NotImplementedError

    def part_facts(self, part: Part) -> dict[str, Fact]:
        """Facts of a run, beside those of every kernel."""
        return {}

    def words(self, variant: Any) -> tuple[str, list[str]]:
        """What descriptions call it, and what names say of its numbers besides the dtype."""
        raise NotImplementedError

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Any, arch: str) -> KernelSpec:
        """The specification of a variant. Raises UnsupportedError where its shared memory does not
        fit."""
        parts, dtype, powers = variant.parts, variant.dtype, variant.powers
        words = [word for part in parts for word in part.words]
        words += [f"{variant.warps}w"] + [f"{variant.ahead}a"] * bool(variant.ahead)
        words += ["restaged"] * variant.restaged
        ends = parts[0].source, parts[-1].target
        words += ends if ends != (dtype, dtype) else ()
        sizes = [size for part in parts for size in part.sizes]
        facts = {
            **parameters.facts((dtype, ends[1]), sizes, len(parts), epilogue, powers),
            **parameters.ticket_facts(variant.restaged),
            **self.number_facts(variant),
            "WARPS": variant.warps,
            "MIN_BLOCKS": max(1, variant.resident(arch)),
            "TILE": variant.tile,
            "TILES": variant.tiles,
            "AHEAD": variant.ahead,
            "MATRICES": variant.matrices,
            "MODES": sum(len(part.modes) for part in parts),
            "COLUMNS_SCALED": max(part.columns for part in parts),
        }
        fixed = parameters.fields(len(parts), len(sizes), epilogue, powers)
        runs = parameters.runs_text(self._runs(variant))
        texts = parameters.fixed_text(fixed), text.typed_finish(epilogue), runs
        source = self.source(facts, *texts, includes=("common/math.cuh", parameters.HEADER))
        size, numbers = (32 * variant.warps, variant.shared_bytes), (dtype, variant.precision)
        kind, said = self.words(variant)
        said = said + words[-WORDS:]
        return self.product_spec(kind, source, *size, numbers, words, said, arch, epilogue)

    def _runs(self, variant: Any) -> list[dict[str, Fact]]:
        """The facts of each run."""
        runs, at, first, number = [], 0, 0, 0
        for index, part in enumerate(variant.parts):
            modes, at = [], at * (not variant.restaged)
            for mode in part.modes:
                left, rows, columns, right, offset, count = mode
                numbers = [left, rows, columns, right, first + offset, count]
                numbers += [mode == part.modes[-1], at, *[number] * self.is_numbered]
                modes.append(parameters.numbered("Mode", numbers))
                at += variant.stored(mode)
                number += 1
            first += len(part.sizes)
            facts = parameters.run_facts(part, index, len(variant.parts))
            modes_text = f"List<{', '.join(modes)}>"
            runs.append({**facts, **self.part_facts(part), "Modes": modes_text})
        return runs


class OneRun(PartsKernel):
    """A kernel of one run of factors, whose tiles have as many columns as a choice says."""

    role = "run"

    def most_columns(self, group: Group | Run, arch: str) -> int:
        """The widest tile, in columns: a power of two."""
        raise NotImplementedError

    def variant(self, run: Group | Run, columns: int, arch: str) -> Any:
        """The kernel of a run, for tiles of so many columns."""
        raise NotImplementedError

    def choices(self, group: Group | Run, arch: str) -> list[dict[str, int]]:
        """The columns of a tile: powers of two."""
        bits = self.most_columns(group, arch).bit_length()
        return [{"columns": 1 << bit} for bit in range(bits)]

    def blocks(self, run: Run, variant: Any, gpu: Gpu) -> int:
        """Of a launch, each of which takes tile after tile."""
        resident = max(1, variant.resident(gpu.arch))
        return min(tiles(run, variant), resident * gpu.multiprocessors)

    def launch(
        self, epilogue: tuple[Epilogue, ...], run: Run, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a run from "x" to "out"."""
        variant = self.variant(run, choice["columns"], gpu.arch)
        numbers, count = parameters.run_values(run, variant.parts[0]), tiles(run, variant)
        fixed = parameters.pack(epilogue, [run], [numbers], (run.batch, 1, count, 0))
        pointers = (("x", 0), ("out", 0), *run.names)
        pointers += (*text.vector_pointers(epilogue), *text.summand_pointers(epilogue))
        grid = self.blocks(run, variant, gpu), min(run.batch, parameters.GRID_BATCH)
        spec = self.spec(epilogue, variant, gpu.arch)
        return Lowered((Step(spec, grid, fixed, pointers, text.scalar_count(epilogue)),))

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Group, arch: str) -> list[KernelSpec]:
        """The specifications of a group's variants, for tiles of any width."""
        columns = [choice["columns"] for choice in self.choices(scope, arch)]
        return [self.spec(epilogue, self.variant(scope, each, arch), arch) for each in columns]


def tiles(run: Run, variant: Any) -> int:
    """Of one batch."""
    return run.outer * run.inner * ceil_div(run.columns, variant.parts[0].columns)

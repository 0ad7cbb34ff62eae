"""What products with many columns are launched behind: v as words, points of few features in lines,
and points whose products are exponents."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import wide
from kernlib.families.pairwise.lowering.exponents import exponent_of
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.problem import ARCH, TYPES, PairKernel, scalar_count, types
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.families.pairwise.lowering.wide import TILE_N
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

if TYPE_CHECKING:
    from kernlib.families.pairwise.kernels.product import Place

FAR = 4  # bytes from the count of doubtful pairs on: struct Gate
EIGHT = 8  # columns that a block packs
PACK = Fields((
    "View b_view", "View v_view",
    "i64 n", "i64 v_stride", "i64 lines_stride",  # of batch entries: bytes, numbers
    "int groups", "int columns",  # GROUPs of n; columns that exist
))  # fmt: skip
PACK_THREADS = 256
FOLD_POINTS, FOLD_THREADS = 16, 128  # of a block
SIDE = Fields((
    "View view",
    "i64 points", "i64 packed_stride",  # of batch entries, in bytes
    "int tile", "int blocks",  # points of a tile; blocks of a batch entry
))  # fmt: skip


class ProductPack(Kernel):
    """Words of v, and lines of points."""

    role = "step"
    name = "product pack"
    header = "pairwise/product/pack.cuh"
    entry = "pairwise_product_pack"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        width: int
        v_copies: int
        features: int

    def step(self, problem: Problem, variant: wide.Variant, place: Place) -> Step:
        """The launch in front of a product."""
        one = self.Variant(variant.dtype, variant.width, variant.v_copies, variant.features)
        fixed = PACK.pack(
            b_view=problem.b[:3],
            v_view=problem.v[:3],
            n=problem.n,
            v_stride=place.v_stride,
            lines_stride=place.lines_stride,
            groups=place.groups,
            columns=problem.columns,
        )
        parts = variant.width // EIGHT + (variant.features > 0)
        entries = problem.batch if place.v_stride or place.lines_stride else 1
        offsets = (place.points.doubtful, place.v, place.lines)
        pointers = (("b", 0), ("v", 0), *((WORKSPACE, offset) for offset in offsets))
        return Step(self.spec(None, one, ARCH), (place.groups * parts, entries), fixed, pointers)

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, width, v_copies, features = variant
        facts = {
            **types(dtype),
            "WIDTH": width,
            "V_COPIES": v_copies,
            "FEATURES": features,
            "PARAMETER_BYTES": Parameters(5, PACK.format).size,
        }
        source = self.source(facts, PACK.text(), includes=("pairwise/view.cuh",))
        words = [f"columns={width} words={v_copies}"]
        words += [f"lanes={features}"] * (features > 0)
        return self.named_spec(source, PACK_THREADS, 0, dtype, words)


class ProductFold(PairKernel):
    """Points whose products are exponents."""

    role = "step"
    name = "product fold"
    header = "pairwise/product/fold.cuh"
    entry = "pairwise_product_fold"

    def step(
        self,
        descriptor: Pairwise,
        problem: Problem,
        strides: tuple[int, ...],
        place: Place,
        variant: wide.Variant,
    ) -> Step:
        """The launch in front of a product of such points."""
        sides = [
            {
                "view": layout[:3],
                "points": count,
                "packed_stride": stride,
                "tile": tile,
                "blocks": round_up(count, tile) // FOLD_POINTS,
            }
            for layout, count, tile, stride in (
                (problem.a, problem.m, variant.rows, place.a_stride),
                (problem.b, problem.n, TILE_N, place.b_stride),
            )
        ]
        points = place.points
        fixed = _fold_fields(len(strides)).pack(
            scalar_strides=strides,
            a_side=SIDE.values(**sides[0]),
            b_side=SIDE.values(**sides[1]),
            centre_stride=points.centre_pitch if points.centres > 1 else 0,
            k=problem.k,
            padding=0,
        )
        offsets = (points.centre, points.doubtful + FAR, place.folded_a, place.folded_b)
        pointers = (("a", 0), ("b", 0), *((WORKSPACE, offset) for offset in offsets))
        entries = problem.batch if place.a_stride or place.b_stride else 1
        grid = (sum(side["blocks"] for side in sides), entries)
        spec = self.fold_spec(descriptor, problem, variant)
        return Step(spec, grid, fixed, pointers, scalar_count(descriptor))

    def fold_spec(
        self, descriptor: Pairwise, problem: Problem, variant: wide.Variant
    ) -> KernelSpec:
        """The specification for the exponents of a problem."""
        scalars = scalar_count(descriptor)
        fields = _fold_fields(scalars)
        facts = {
            **types(variant.dtype),
            "DEPTH": variant.depth,
            "SCALARS": scalars,
            "PARAMETER_BYTES": Parameters(6, fields.format, scalars).size,
        }
        factor = f"""__device__ __forceinline__ float exponent_factor(const Finish& finish) {{
    return finish.{exponent_of(descriptor, problem)};
}}
"""
        finish = finish_reduced(descriptor, problem)
        texts = SIDE.text("Side"), fields.text(), finish, factor
        source = self.source(facts, *texts, includes=(*TYPES, "pairwise/reduce/math.cuh"))
        words = [variant.dtype, f"entries={variant.depth}"]
        spec = self.described(descriptor, source, FOLD_THREADS, 0, words)
        return spec._replace(description=f"pairwise product fold {spec.description}")


@cache
def _fold_fields(scalars: int) -> Fields:
    members = (
        f"i64 scalar_strides[{scalars}]",
        "Side a_side", "Side b_side",
        "i64 centre_stride",
        "int k", "int padding",
    )  # fmt: skip
    return Fields(members, {"Side": SIDE})

"""The order in which blocks of threads take a product's tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS, MOST_UNITS = 1024, 4096
KEYS = THREADS  # lengths that are told apart
WARP = 32
TILE_LINES = 128
FIELDS = Fields((
    "int groups", "int units", "int lines", "int words",  # of a head, of all; lines of blocks of a
                                                          # head, their words
    "u32 first",                    # tile that the counter gives first
    "int share",                    # 1 << share lanes count a unit, as many as it has words
    "int shift", "int keys",        # steps >> shift is a unit's key in its group; all keys
    # units of a group, which follow each other; the last group, that has the rest too; keys of one
    "int per_group", "int last_group", "int group_keys",
    "int unused",
))  # fmt: skip
PARAMETERS = Parameters(2, FIELDS.format)
SHARED_BYTES = 4 * WARP + 2 * (MOST_UNITS + KEYS + THREADS // WARP * KEYS)  # struct Shared


class Order(Kernel):
    """Sorts units, groups of lines of blocks of a head, by falling number of steps; one block."""

    role = "step"
    name = "order"
    header = "blocksparse/order/order.cuh"
    entry = "blocksparse_order"
    reason = "the order of tiles by falling length of their lines, at each call"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        group: int  # lines of blocks of a tile

    def workspace(self, problem: Spmm) -> int:
        """Bytes for the counter and the order."""
        return 4 * (1 + _groups(problem) * problem.blocks.heads)

    def step(self, units: int, problem: Spmm, first: int) -> Step:
        """The launch for a problem of so many units, whose counter gives ``first`` first."""
        op, name = problem.op, "col_bits" if problem.transposed else "row_bits"
        numbers = {"groups": _groups(problem), "units": units, "lines": op.grid_rows}
        numbers |= {"words": op.row_words, **keys(op.grid_cols)}
        return self.step_of(TILE_LINES // op.rows, name, first, **numbers)

    def step_of(self, group: int, name: str, first: int, words: int, **numbers: int) -> Step:
        """The launch for tiles of so many lines of blocks, whose bits are called ``name``, and with
        members of struct Fixed."""
        share = (min(WARP, words) - 1).bit_length()  # of a warp's lanes
        values = FIELDS.values(first=first, share=share, words=words, unused=0, **numbers)
        spec = self.spec((), self.Variant(group), "")
        return Step(spec, (1, 1), PARAMETERS.pack(*values), ((name, 0), (WORKSPACE, 0)))

    def axes(self, subject, scope) -> Mapping[str, Iterable]:
        """Of lines of blocks of a size and of their transposes."""
        return {"group": [TILE_LINES // size for size in dict.fromkeys(scope.block)]}

    def before(self, specs: list[KernelSpec], scope) -> list[KernelSpec]:
        """The specifications of products of a scope behind those of their order; none of none."""
        return self.specs((), scope, "") + specs if specs else []

    def spec(self, subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant, one for every GPU."""
        (group,) = variant
        facts = {"THREADS": THREADS, "GROUP": group, "PARAMETER_BYTES": PARAMETERS.size}
        source, line = self.source(facts, FIELDS.text()), f"order of tiles of {group} lines"
        line = f"blocksparse {line} of blocks"
        spec = KernelSpec(
            "blocksparse", source, self.entry, THREADS, SHARED_BYTES, description=line
        )
        return named(spec, f"lines={group}")


ORDER = Order()


def keys(depth: int, per_group: int = 1, last_group: int = 0) -> dict[str, int]:
    """What units of ``depth`` steps at most are sorted by, as members of struct Fixed.

    Nothing for fewer than 1024 blocks along the depth, 65536 elements of blocks of 64; of more, or
    in several groups, units come as equals whose lengths differ by less than a 512th, of so many
    groups, of the longest possible."""
    room = KEYS // (last_group + 1)
    shift = 0
    while (depth >> shift) >= room:
        shift += 1
    each = (depth >> shift) + 1
    return {
        "shift": shift,
        "keys": each * (last_group + 1),
        "per_group": per_group,
        "last_group": last_group,
        "group_keys": each,
    }


def _groups(problem: Spmm) -> int:
    return ceil_div(problem.lines, TILE_LINES)

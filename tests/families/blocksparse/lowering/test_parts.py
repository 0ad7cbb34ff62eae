"""The kernel that adds up parts of sums: which stores it takes, what NVRTC makes of it and of the
kernels that leave parts. That sums come out right is in test_portable.py and test_sampled.py."""

import itertools

import pytest

import kernlib as kl
from kernlib.descriptors.epilogues import Add
from kernlib.families.blocksparse.kernels import parts
from kernlib.families.blocksparse.kernels.sdd import sampled
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Spmm, Values
from kernlib.jit import targets
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

BLOCKS = Blocks(32, 32, 4, 60, 2, 100)
VALUES = Values(100 * 1024, 1024, 32, 1)
DENSE, OUT = Dense(60 * 32 * 41, 0, 41, 1), Dense(128 * 41, 0, 41, 1)
SPMM = Spmm("float16", "fp32", BLOCKS, 3, 41, False, VALUES, DENSE, OUT)
SDD = Sdd("float16", "fp32", BLOCKS, 3, 4096, Dense(0, 0, 4096, 1), DENSE, VALUES)


def test_runs_are_stored_whole_where_they_are_aligned():
    def whole(problem, along_lines=False) -> int:
        step = parts.PARTS.step((), problem, parts.sums_of(problem, along_lines), 4, "sm_90a")
        return int.from_bytes(step.fixed[-8:-4], "little")

    even = SPMM._replace(columns=40, out=Dense(128 * 40, 0, 40, 1))
    assert whole(SDD) and whole(even) and not whole(SPMM)
    assert not whole(even._replace(out=Dense(128 * 40, 0, 42, 1)))
    assert not whole(even._replace(out=Dense(128 * 40, 0, 40, 1, 4)))
    assert not whole(even._replace(out=Dense(128 * 80, 0, 80, 2)))
    turned = SPMM._replace(out=Dense(128 * 41, 0, 1, 128))
    assert whole(turned, True) and not whole(turned._replace(dtype="float32"), False)
    assert not whole(even._replace(dtype="float32", out=even.out._replace(alignment=8)))


SPECS = {
    f"{arch} {dtype} {'sdd' * slotted} {order}": (arch, dtype, slotted, order)
    for arch, dtype in itertools.product(targets.SHARED_BYTES, ("float16", "bfloat16", "float32"))
    for slotted, order in ((True, False), (False, False), (False, True))
}
FAST = ("sm_80 float32 sdd False", "sm_90a float16  True")


@pytest.mark.parametrize("case", slow_but(FAST, SPECS))
def test_the_sum_compiles_without_spills(case):
    arch, *rest = SPECS[case]
    for epilogue in ((), (kl.Scale(), kl.Gelu(), Add())):
        made = compiled(parts.PARTS.spec(epilogue, parts.Parts.Variant(*rest)), arch)
        assert made.spilled == 0 and made.shared == parts.SHARED_BYTES


KINDS = (("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32"))
PARTIAL = {
    f"{kind} {dtype} {precision} {size} {arch}": (kind, dtype, precision, size, arch)
    for kind in ("portable", "sampled")
    for dtype, precision in KINDS
    for size in (16, 32, 64, 128)
    for arch in ("sm_80", "sm_90a", "sm_120")
}
FAST = ("portable float32 fp32 32 sm_90a", "sampled float16 fp32 64 sm_80")


@pytest.mark.parametrize("case", slow_but(FAST, PARTIAL))
def test_kernels_that_leave_parts_compile(case):
    """Without spills on sm_90a; elsewhere 3xTF32 has up to 24 bytes of these, as whole sums have on
    sm_120."""
    kind, dtype, precision, size, arch = PARTIAL[case]
    if kind == "sampled":
        made = sampled.Sampled.Variant(dtype, precision, size, size, "depth", "line", True)
        specs = [sampled.SAMPLED.spec((), made, arch)]
    else:
        known = [t for t in portable.tiles(dtype, precision) if t.columns <= portable.PARTS_COLUMNS]
        ends = ("depth", "line", False, True)
        specs = [
            portable.PORTABLE.spec(
                (), portable.Portable.Variant(dtype, precision, size, size, False, t, *ends), arch
            )
            for t in known
        ]
    for spec in specs:
        bound = 24 if precision == "fp32" and dtype == "float32" and arch != "sm_90a" else 0
        assert "partial" in spec.description and compiled(spec, arch).spilled <= bound

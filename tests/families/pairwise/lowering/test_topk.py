"""Lowering of the k smallest or largest of each row: code, grids, parameters and workspace, and
what NVRTC makes of it."""

import ctypes
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.lowering import topk as lowering
from kernlib.families.pairwise.lowering.direct import scalar_count
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.jit import sources, targets
from kernlib.jit.compiler import compile_spec
from kernlib.lowering.steps import WORKSPACE
from tests.families.pairwise.lowering.test_direct import KINDS
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

SQUARES = kl.squared_distance()
HERE = "sm_90a"


def problem(k=3, kept=10, m=5000, n=7000, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    fields = {"a": Layout(m * k, k, 1), "b": Layout(n * k, k, 1), "v": Layout(0, 0, 0)}
    fields |= {"columns": kept, "out_columns": kept}
    return Problem("topk", m, n, k, batch, **(fields | changes))


def lowered(descriptor=SQUARES, largest=False, arch=HERE, processors=132, rows=None, **changes):
    strides = (0,) * scalar_count(descriptor)
    return lowering.lower(descriptor, problem(**changes), largest, arch, processors, strides, rows)


@pytest.mark.parametrize(("k", "kind"), [(1, "small"), (16, "small"), (17, "tile"), (200, "tile")])
@pytest.mark.parametrize("largest", [False, True])
def test_few_features_stay_in_registers(k, kind, largest):
    first, last = lowered(k=k, largest=largest).steps
    assert stem(first.spec) == f"pairwise_topk_{kind}" and stem(last.spec) == "pairwise_topk_merge"
    assert f'#include "pairwise/topk/{kind}.cuh"' in first.spec.source
    order = f"constexpr bool LARGEST = {str(largest).lower()};"
    assert order in first.spec.source and order in last.spec.source


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"kept": 128}, True),
        ({"kept": 129}, False),
        ({"dtype": "float64"}, False),
        ({"dtype": "bfloat16"}, True),
        ({"k": 0}, False),
        ({"n": 0}, False),
        ({"k": 64, "kept": 64}, True),
        ({"k": 64, "kept": 65}, False),
        ({"k": 257}, False),
    ],
    ids=str,
)
def test_what_the_kernels_take(changes, taken):
    assert lowering.takes(SQUARES, problem(**changes), HERE) == taken


def test_tiles_take_any_number_of_features_without_products():
    assert lowering.takes(kl.l1_distance(), problem(k=2000), HERE)
    assert lowering.takes(kl.squared_distance(direct=True), problem(k=2000), HERE)


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_gpu_has_room_for_the_lists_of_few_features(arch):
    for kept in range(1, lowering.MOST_KEPT + 1):
        assert lowering.takes(SQUARES, problem(k=16, kept=kept), arch)
        step = lowered(k=16, kept=kept, arch=arch).steps[0]
        static = step.spec.threads * 64 + 16
        shared = step.spec.shared_bytes + static
        assert targets.resident_blocks(arch, step.spec.threads, lowering.REGISTERS, shared) >= 1


def test_sizes_do_not_reach_the_source():
    small, large = (
        lowered(m=m, n=m, diagonal=m, kept=k, rows=2) for m, k in ((300, 6), (10**6, 9))
    )
    assert small.steps[0].spec == large.steps[0].spec


def test_rows_fill_whole_waves():
    """131 blocks of 768 rows, twice, are one wave of two blocks on each of 132 multiprocessors."""
    first = lowered(m=100_000, n=100_000).steps[0]
    assert "constexpr int ROWS = 3;" in first.spec.source and first.grid == (262, 1)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([3, 64]), st.integers(1, 64),
    st.integers(1, 100), st.integers(1, 200),
)  # fmt: skip
def test_lists_fit_the_workspace_and_cover_n(m, n, k, kept, batch, processors):
    found = lowered(m=m, n=n, k=k, kept=kept, batch=batch, processors=processors)
    first, *rest = found.steps
    per_split = struct.unpack("<5q4i", first.fixed[-56:])[4]
    splits = -(-n // per_split)
    row_blocks = struct.unpack("<4i", first.fixed[-16:])[1]
    assert first.grid[0] == row_blocks * splits and (splits - 1) * per_split < n
    lists = splits if k == 3 else 2 * splits
    if lists == 1:
        assert not rest and found.workspace == 0
        return
    (merge,) = rest
    entries = lists * batch * m * kept
    assert struct.unpack("<q2i", merge.fixed) == (batch * m, lists, kept)
    (_, values), (_, places) = merge.pointers[:2]
    assert values == 0 and places % 8 == 0 and places >= entries * 4
    assert found.workspace == places + entries * 8
    assert merge.grid[0] * 256 >= entries
    assert first.pointers[3:] == ((WORKSPACE, values), (WORKSPACE, places))
    assert lists == 1 or entries <= max(lowering.reduce.WORKSPACE_VALUES, 2 * batch * m * kept)


def test_one_list_is_the_result():
    found = lowered(m=100_000, n=200)
    assert only(found).pointers[3:] == (("out", 0), ("indices", 0)) and found.workspace == 0


def test_the_merge_reads_its_parameter_block():
    text = (sources.root() / "pairwise/topk/merge.cuh").read_text()
    body = re.sub(r"//.*", "", re.search(r"struct Parameters \{(.*?)\n\};", text, re.S)[1])
    fields = []
    for line in body.split(";"):
        if line.strip():
            kind, names = re.fullmatch(r"\s*((?:const )?\w+\*?)\s+(.*)", line.strip()).groups()
            base = ctypes.c_uint64 if "*" in kind else KINDS[kind]
            fields += [(name.strip(), base) for name in names.split(",")]
    names = [name for name, _ in fields]
    assert names == ["values", "places", "out", "indices", "rows", "lists", "k"]
    kind = type("Parameters", (ctypes.Structure,), {"_fields_": fields})
    merge = lowered(k=64).steps[1]
    assert ctypes.sizeof(kind) == 8 * len(merge.pointers) + len(merge.fixed)


def test_waiting_and_shares_are_those_of_the_source():
    assert f"WAITING = {lowering.WAITING};" in sources.read("pairwise/topk/lists.cuh")
    assert "SHARES = THREADS / TILE;" in sources.read("pairwise/reduce/tiles.cuh")
    assert lowering.THREADS // lowering.BIG_TILE == lowering.SHARES


# What NVRTC makes of it.

COMPILED = {
    "ten": (SQUARES, {}),
    "one of one feature": (SQUARES, {"k": 1, "kept": 1}),
    "most of 16 features": (SQUARES, {"k": 16, "kept": 128}),
    "largest": (kl.gaussian(), {"k": 16, "largest": True, "regularized": True, "epsilon": True}),
    "half": (kl.laplace_l2(), {"dtype": "float16", "kept": 33}),
    "pq": (kl.laplace_pq(), {"root": True}),
    "tile": (SQUARES, {"k": 64}),
    "tile of long sums": (kl.l1_distance(), {"k": 200, "regularized": True, "largest": True}),
    "tile of long lists": (SQUARES, {"k": 33, "kept": 64, "dtype": "bfloat16"}),
}
# Bytes, none of them in a loop over points: what lists know waits in local memory for a sum.
TILE_SPILL = 128


@pytest.mark.parametrize("name", slow_but(("ten", "tile"), COMPILED))
def test_the_kernels_compile_within_their_bounds(name):
    descriptor, changes = COMPILED[name]
    found = lowered(descriptor, **changes)
    for step in found.steps:
        entry = compile_spec(step.spec, HERE)
        assert entry.kernel == step.spec.entry and entry.cubin[:4] == b"\x7fELF"
        assert int(entry.meta["registers"]) <= lowering.REGISTERS
        tile = "tile" in stem(step.spec)
        assert int(entry.meta["spill_bytes"]) <= (TILE_SPILL if tile else 0)
        assert int(entry.meta["shared_bytes"]) <= targets.SHARED_BYTES[HERE]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("k", [3, 64])
def test_other_architectures_compile_it(arch, k):
    for step in lowered(arch=arch, k=k).steps:
        assert compile_spec(step.spec, arch).cubin[:4] == b"\x7fELF"

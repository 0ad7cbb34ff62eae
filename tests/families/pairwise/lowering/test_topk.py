"""Lowering of the k smallest or largest of each row: code, grids, parameters and workspace, and
what NVRTC makes of it."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.kernels import split_reduce as products
from kernlib.families.pairwise.kernels import topk as lowering
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering.problem import Call, Layout, scalar_count
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.jit import sources, targets
from kernlib.lowering import division, kernel
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import WORKSPACE
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

SQUARES = kl.squared_distance()
HERE = "sm_90a"


def problem(k=3, kept=10, m=5000, n=7000, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    fields = {"a": Layout(m * k, k, 1), "b": Layout(n * k, k, 1), "v": Layout(0, 0, 0)}
    fields |= {"columns": kept, "out_columns": kept}
    return Problem("topk", m, n, k, batch, **(fields | changes))


def lowered(
    descriptor=SQUARES,
    largest=False,
    arch=HERE,
    processors=132,
    precision=None,
    rows=None,
    **changes,
):
    strides = (0,) * scalar_count(descriptor)
    call = Call(descriptor, problem(largest=largest, **changes), strides, precision)
    gpu, knobs = Gpu(arch, processors), {} if rows is None else {"rows": rows}
    return kernel.choose(lowering.KERNELS, call, gpu).kernel.launch(descriptor, call, gpu, knobs)


def takes(descriptor=SQUARES, arch=HERE, precision=None, **changes):
    call = Call(descriptor, problem(**changes), (), precision)
    return any(kind.takes(call, arch) for kind in lowering.KERNELS)


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
    assert takes(**changes) == taken


def test_tiles_take_any_number_of_features_without_products():
    assert takes(kl.l1_distance(), k=2000)
    assert takes(kl.squared_distance(direct=True), k=2000)


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_gpu_has_room_for_the_lists_of_few_features(arch):
    for kept in range(1, lowering.MOST_ENTRIES + 1):
        assert takes(arch=arch, k=16, kept=kept)
        step = lowered(k=16, kept=kept, arch=arch).steps[0]
        static = step.spec.threads * 64 + 16
        shared = step.spec.shared_bytes + static
        assert targets.resident_blocks(arch, step.spec.threads, 128, shared) >= 1


def test_sizes_do_not_reach_the_source():
    small, large = (
        lowered(m=m, n=m, diagonal=m, kept=k, rows=2) for m, k in ((300, 6), (10**6, 9))
    )
    assert small.steps[0].spec == large.steps[0].spec


def test_few_long_splits_in_whole_waves():
    """391 blocks of 256 rows are three on each of 132 multiprocessors."""
    assert only(lowered(m=100_000, n=100_000)).grid == (391, 1)
    first = lowered(m=100_000, n=100_000, rows=3).steps[0]
    assert "constexpr int ROWS = 3;" in first.spec.source and first.grid == (262, 1)


@settings(max_examples=100)
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
    assert lists == 1 or entries <= max(division.WORKSPACE_BYTES // 4, 2 * batch * m * kept)


def test_one_list_is_the_result():
    found = lowered(m=100_000, n=200)
    assert only(found).pointers[3:] == (("out", 0), ("indices", 0)) and found.workspace == 0


def test_the_lists_of_a_row_are_those_of_the_source():
    assert "part.split * 4 + threadIdx.x % 4" in sources.read("pairwise/split/reduce_rows.cuh")
    assert products.LISTS == 4
    assert "SHARES = THREADS / TILE;" in sources.read("pairwise/reduce/tiles.cuh")
    assert lowering.THREADS // lowering.BIG_TILE == lowering.SHARES


# Products of tensor cores.


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"kept": 16}, True),
        ({"kept": 17}, False),
        ({"k": 16}, False),
        ({"k": 784}, True),
        ({"m": 300, "n": 300}, False),
        ({"precision": None}, False),
        ({"arch": "sm_80"}, False),
        ({"descriptor": kl.l1_distance()}, False),
    ],
    ids=str,
)
def test_large_products_go_to_tensor_cores(changes, taken):
    fields = {"k": 64, "m": 30_000, "n": 30_000, "precision": "fp32"} | changes
    found = [stem(step.spec) for step in lowered(**fields).steps]
    assert ("pairwise_split_reduce" in found) == taken
    if fields["k"] == 784:
        assert takes(**fields) and not takes(**fields | {"precision": None})


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("kept", [1, 10, 11, 16])
def test_products_have_a_stage_to_fill_while_one_is_read(kept, precision):
    """A ring of one would wait for itself."""
    for k in (17, 64, 65, 128, 129, 200, 256):
        fields = {"k": k, "m": 30_000, "n": 30_000, "precision": precision, "kept": kept}
        sources = [s.spec.source for s in lowered(**fields).steps]
        (main,) = [text for text in sources if "split/reduce.cuh" in text]
        assert int(main.split(" STAGES = ")[1].split(";")[0]) >= 2, k


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [64, 100])
def test_products_and_what_waits_behind_them_fill_the_same_lists(k, batch):
    found = lowered(m=20_000, n=50_000, k=k, batch=batch, precision="fp32")
    *_, main, behind, merge = found.steps
    assert [stem(step.spec) for step in (main, merge)] == [
        "pairwise_split_reduce", "pairwise_topk_merge"
    ]  # fmt: skip
    assert stem(behind.spec).startswith("pairwise_topk_tile") and f"GATED = {pack.DOUBTFUL};" in (
        behind.spec.source
    )
    assert "constexpr int PLACES = 4;" in behind.spec.source
    memory = merge.pointers[:2]
    assert main.pointers[-2:] == memory and behind.pointers[-2:] == memory
    per_split = struct.unpack("<5q4i", behind.fixed[-56:])[4]
    splits = -(-50_000 // per_split)
    rows, lists, kept = struct.unpack("<q2i", merge.fixed)
    assert (rows, lists, kept) == (batch * 20_000, 4 * splits, 10)
    entries = rows * lists * kept
    assert memory[1][1] - memory[0][1] >= 4 * entries
    assert found.workspace == memory[1][1] + 8 * entries
    packed = max(at for _, at in main.pointers[:5])
    assert packed < memory[0][1] and all(at % 8 == 0 for _, at in memory)


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
    "products": (SQUARES, {"k": 64, "m": 30_000, "n": 30_000, "precision": "fp32"}),
    "long products": (
        kl.gaussian(),
        {"k": 200, "m": 30_000, "n": 30_000, "precision": "fp32", "largest": True, "kept": 16},
    ),
    "tile of long lists": (SQUARES, {"k": 33, "kept": 64, "dtype": "bfloat16"}),
}
# Bytes, none of them in a loop over points: what lists know waits in local memory for a sum.
TILE_SPILL = 128
# Those of products that are promoted, around what puts a list in order.
PRODUCT_SPILL = 512


@pytest.mark.parametrize("name", slow_but(("ten", "tile"), COMPILED))
def test_the_kernels_compile_within_their_bounds(name):
    descriptor, changes = COMPILED[name]
    for step in lowered(descriptor, **changes).steps:
        made = compiled(step.spec, HERE)
        assert made.entry.kernel == step.spec.entry
        kind = stem(step.spec)
        most = PRODUCT_SPILL if kind == "pairwise_split_reduce" and changes["k"] > 64 else 0
        most = TILE_SPILL if "tile" in kind else most
        assert made.spilled <= most
        threads = step.spec.threads
        assert targets.resident_blocks(HERE, threads, made.registers, made.shared) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("k", [3, 64])
def test_other_architectures_compile_it(arch, k):
    for step in lowered(arch=arch, k=k).steps:
        assert compiled(step.spec, arch).entry.cubin[:4] == b"\x7fELF"

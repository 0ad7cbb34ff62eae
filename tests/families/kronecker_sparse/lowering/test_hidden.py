"""The first product of a chain with each l of the second factor by itself: which chains, the parts
of one launch, and what its text computes on the host."""

import pytest
import torch

from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.kernels.chain import hidden
from kernlib.families.kronecker_sparse.kernels.chain.fused_chain import ChainScope
from kernlib.families.kronecker_sparse.kernels.chain.hidden import Hidden
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave
from kernlib.families.kronecker_sparse.lowering.problem import Layout
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from tests.families.kronecker_sparse.lowering.cases import (
    ARCH,
    PROCESSORS,
    factor,
    launch_all,
    parameters,
    relative_error,
    text_of,
    weight_gradient,
)
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator, kernels_of

ACCURACY = {"float16": 6e-4, "bfloat16": 4e-3}
UP = ((6, 64, 64, 1), (1, 768, 192, 2))
CHAINS = {
    "ViT-S/16, 384 to 384": ((2, 48, 192, 1), (1, 192, 48, 2)),
    "ViT-S/16, 384 to 1536": UP,
    "ViT-S/16, 1536 to 384": ((6, 64, 256, 1), (1, 128, 128, 3)),
    "ViT-B/16, 768 to 768": ((2, 96, 384, 1), (1, 384, 96, 2)),
    "d = 4": ((4, 32, 24, 1), (1, 136, 32, 4)),
    "d = 5": ((2, 80, 72, 1), (1, 40, 32, 5)),
    "d = 6": ((4, 96, 64, 1), (1, 40, 64, 6)),
    "d = 7": ((2, 56, 64, 1), (1, 40, 16, 7)),
    "d = 8": ((4, 32, 24, 1), (1, 136, 16, 8)),
    "two k of an l in a block": ((8, 8, 24, 1), (1, 40, 16, 4)),
    "one k of an l in a block": ((64, 8, 24, 1), (1, 40, 64, 8)),
    "blocks of 128 features": ((6, 128, 72, 1), (1, 104, 256, 3)),
    "an odd number of columns": ((4, 32, 24, 1), (1, 135, 16, 8)),
    "more features between than a chain's kernel holds": ((12, 64, 64, 1), (1, 1536, 384, 2)),
    "64 blocks": ((64, 64, 64, 1), (1, 64, 1024, 4)),
    "groups": ((16, 64, 24, 1), (2, 40, 64, 8)),
}


def problem_of(chain, rows=25088, dtype="float16", **changes):
    return factor(*chain[0], rows=rows, dtype=dtype, **changes)


def layout_of(second, rows, dtype="float16"):
    return deinterleave.layout(weight_gradient(*second, batch=rows, dtype=dtype))


def step_of(chain, rows=25088, multiprocessors=PROCESSORS, dtype="float16"):
    layout = layout_of(chain[1], rows, dtype)
    return Hidden().step(
        problem_of(chain, rows, dtype), chain[1], layout, Gpu(ARCH, multiprocessors)
    )


def specs_of(chain, dtypes, arch=ARCH):
    return Hidden().specs((), ChainScope(chain, tuple(dtypes), arch), arch)


# Which chains.


@pytest.mark.few(len(CHAINS))
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_networks_are_for_this_kernel(name):
    chain = CHAINS[name]
    for dtype in ACCURACY:
        variant = Hidden().variant_of(problem_of(chain, dtype=dtype), chain[1], ARCH)
        assert variant == hidden.variant_of(dtype, *chain) and variant is not None
        assert specs_of(chain, [dtype]) == [Hidden().spec((), variant, ARCH)]
        assert step_of(chain, dtype=dtype).spec == Hidden().spec((), variant, ARCH)
    assert len(specs_of(chain, ["float16", "bfloat16", "float32"])) == 2
    assert specs_of(chain, ACCURACY, "sm_80") == []


REFUSED = {
    "float32": {"dtype": "float32"},
    "an older GPU": {"arch": "sm_80"},
    "a newer GPU": {"arch": "sm_100a"},
    "a first factor with d = 2": {"chain": ((3, 64, 64, 2), (1, 768, 192, 2))},
    "a first factor with d = 2, each l by itself": {
        "chain": ((3, 64, 64, 2), (1, 768, 192, 2)),
        "left": Layout(128, 64, 384, 1),
        "right": Layout(2 * 64 * 64, 64 * 64, 64, 1),
    },
    "a second factor with d = 1": {"chain": ((4, 32, 24, 1), (2, 136, 64, 1))},
    "d = 9": {"chain": ((4, 72, 24, 1), (1, 136, 32, 9))},
    "d = 16": {"chain": ((16, 64, 64, 1), (1, 256, 64, 16))},
    "blocks that the second factor cuts": {"chain": ((3, 64, 64, 1), (2, 96, 48, 2))},
    "rows of 120 bytes": {"chain": ((6, 64, 60, 1), (1, 768, 192, 2))},
    "steps along k that end in one": {"chain": ((5, 8, 64, 1), (1, 64, 20, 2))},
    "blocks of 144 features": {"chain": ((2, 144, 64, 1), (1, 64, 144, 2))},
    "nine blocks of which none have lines of 64": {"chain": ((9, 112, 64, 1), (1, 64, 144, 7))},
    "x whose features lie apart": {"left": Layout(128, 1, 768, 2)},
    "x that begins in a chunk": {"left": Layout(64, 1, 384, 1, 8)},
    "rows of x that do": {"left": Layout(64, 1, 388, 1)},
    "a weight that is turned": {"right": Layout(4096, 1, 1, 64)},
    "a weight that begins in a chunk": {"right": Layout(4096, 1, 64, 1, 8)},
}


def takes(chain=UP, arch=ARCH, **changes):
    return Hidden().variant_of(problem_of(chain, **changes), chain[1], arch)


@pytest.mark.few(len(REFUSED))
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not(name):
    assert takes() is not None and takes(**REFUSED[name]) is None


# The launch.


@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
@pytest.mark.parametrize("rows", [1, 128, 25089])
@pytest.mark.few(len(CHAINS))
@pytest.mark.parametrize("name", CHAINS)
def test_units_cover_h_once(name, rows, multiprocessors):
    chain = CHAINS[name]
    first, second = chain
    step = step_of(chain, rows, multiprocessors)
    text, p = text_of(step.spec.source), parameters(step)
    assert step.grid == (min(multiprocessors, p.units), 1) and not step.overlaps
    assert (p.depth, p.row_tiles) == (first[2], -(-rows // text["TILE_ROWS"]))
    assert p.span * second[3] == p.blocks * first[1]
    assert p.shares * p.span == second[2]
    assert p.span <= text["H_CHUNKS"] * text["ROW"] < p.span + text["ROW"]
    assert p.shares == 1 or p.span % text["ROW"] == 0
    units = [text.run(text.body("Unit(const Parameters& p"), p=p, index=i) for i in range(p.units)]
    places = [(unit.row // text["TILE_ROWS"], unit.group) for unit in units]
    groups = second[0] * p.shares
    assert sorted(places) == [(row, g) for row in range(p.row_tiles) for g in range(groups)]
    assert groups * p.blocks == first[0]  # each block is of one unit of its rows
    for group in range(groups):
        line, k = group // p.shares, group % p.shares * p.span
        assert group * p.blocks * first[1] == (line * second[2] + k) * second[3]


@pytest.mark.few(len(CHAINS))
@pytest.mark.parametrize("name", CHAINS)
def test_h_and_stages_fit_the_shared_memory(name):
    chain = CHAINS[name]
    variant = hidden.variant_of("float16", *chain)
    spec = Hidden().spec((), variant, ARCH)
    text = text_of(spec.source)
    assert hidden.shared_memory(variant) == (text["STAGES"], spec.shared_bytes)
    assert spec.shared_bytes == 1024 + text["H_BYTES"] + text["STAGES"] * text["STAGE_BYTES"]
    assert spec.shared_bytes + 8 * 2 * text["STAGES"] <= targets.SHARED_BYTES[ARCH]
    assert text["STAGES"] >= 2 and text["H_BYTES"] % 1024 == text["STAGE_BYTES"] % 1024 == 0
    assert spec.threads == text["THREADS"] == 384
    assert (text["TILE_ROWS"], text["ROW"]) == (hidden.ROWS, hidden.ROW)


@pytest.mark.parametrize("name", CHAINS)
def test_tensor_maps_are_the_operands(name):
    first, second = CHAINS[name]
    step = step_of(CHAINS[name], 1001)
    assert step.pointers == (("x", 0), ("weight1", 0), ("h", 0))
    x, weight, h = step.maps
    features, (a, _, depth, d) = first[0] * first[1], second
    assert features == a * depth * d
    assert h.sizes == (depth, d, 1001, a) and h.box == (64, 1, 64, 1)
    assert h.strides == (2 * depth, 2 * features, 2 * depth * d if a > 1 else 16)
    assert sorted(n for n in x.sizes if n > 1) == sorted((first[2], first[0], 1001))
    assert weight.sizes[0] == first[2]
    assert weight.sizes[1] * weight.sizes[2] * weight.sizes[3] == features
    for each in step.maps:
        assert (each.dtype, each.swizzle) == ("float16", 128)
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in each.strides)


def test_what_reads_h_may_begin_before_all_of_it_is_written():
    text = text_of(step_of(UP).spec.source)
    assert "launch_dependents();" in text.body("kronecker_sparse_hidden(")


def test_h_of_a_unit_is_written_when_that_of_the_one_before_has_been_copied():
    text = text_of(step_of(UP).spec.source).body(" consume(")
    waits, product, copies = map(text.index, ("wait_for_reads<0>", "first_product(", "store_h("))
    assert waits < text.index("synchronize_pair") < product < copies
    assert product < text.index("fence_shared_writes") < copies < text.index("wait_for_stores")


# What NVRTC makes of it.


def check_compiled(name, dtype="float16"):
    kernel = compiled(Hidden().spec((), hidden.variant_of(dtype, *CHAINS[name]), ARCH), ARCH)
    assert kernel.registers == 168  # at launch: what the producer hands on must be there
    assert not kernel.serialized and kernel.spilled <= 64, kernel.log


def test_a_kernel_keeps_its_sums_in_registers():
    check_compiled("ViT-S/16, 384 to 1536")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("name", CHAINS)
def test_every_kernel_keeps_its_sums_in_registers(name, dtype):
    check_compiled(name, dtype)


# What it computes, by its text on the host.

SMALL = {
    "shares of two blocks": ((6, 64, 64, 1), (1, 40, 192, 2)),
    "two l, of 24": ((2, 48, 72, 1), (1, 200, 48, 2)),
    "two groups": ((4, 16, 24, 1), (2, 24, 16, 2)),
    "three l, stages of several chunks": ((6, 64, 256, 1), (1, 72, 128, 3)),
    "blocks of 128 features": ((6, 128, 72, 1), (1, 104, 256, 3)),
    "four l": CHAINS["two k of an l in a block"],
    "five l": ((4, 40, 24, 1), (1, 24, 32, 5)),
    "six l": CHAINS["d = 6"],
    "seven l": CHAINS["d = 7"],
    "eight l, groups of several shares": CHAINS["groups"],
    "eight l, one k of a block": CHAINS["one k of an l in a block"],
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


@pytest.mark.emulated
@pytest.mark.few(4)
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
@pytest.mark.parametrize("rows", [1, 67, 300])
@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("name", SMALL)
def test_h_is_the_product_with_each_l_by_itself(emulator, name, dtype, rows, multiprocessors, gap):
    first, second = SMALL[name]
    kind, features = getattr(torch, dtype), first[0] * first[2]
    problem = problem_of(SMALL[name], rows, dtype)
    problem = problem._replace(left=problem.left._replace(line=features + gap))
    torch.manual_seed(rows)
    x = torch.full((rows, features + gap), torch.nan, dtype=kind)
    x[:, :features] = torch.randn(rows, features)
    weight = (torch.randn(first) / first[2] ** 0.5).to(kind)
    a, _, depth, d = second
    h = torch.full((rows * a * d * depth + 64,), torch.nan, dtype=kind)
    layout, gpu = layout_of(second, rows, dtype), Gpu(ARCH, multiprocessors)
    step = Hidden().step(problem, second, layout, gpu)
    launch_all(emulator, Lowered((step,)), {"x": x, "weight1": weight, "h": h})
    exact = x[:, :features].double() @ reference.dense(first, weight.double()).T
    exact = exact.view(rows, a, depth, d).transpose(2, 3)
    result, behind = h.tensor_split((exact.numel(),))
    assert relative_error(result.view(exact.shape), exact) <= ACCURACY[dtype]
    assert behind.isnan().all()

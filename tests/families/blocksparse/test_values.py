"""Block-sparse products on CPU tensors: their values against the formula in float64."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import kernlib as kl
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dsd
from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.cases import (
    GATES,
    LAYOUTS,
    MODES,
    TURNS,
    assert_near,
    blocks,
    formula,
    layout_of,
    matrix,
    memories,
    operands,
    places,
    randn,
    run,
    shapes,
)

MODE = pytest.mark.parametrize("mode", MODES)
TURN = pytest.mark.parametrize("turned", TURNS, ids=str)
DTYPE = pytest.mark.parametrize("dtype", GATES, ids=str)
SPARSE = {"dsd": 0, "dds": 1}  # which operand


def test_the_formula_is_the_index_formula():
    layout = Layout([[0, 1], [1, 0]], (16, 32))
    values, b = randn(2, 16, 32), randn(64, 3)
    found = formula("dsd", layout, values, b)
    for i, n in itertools.product((0, 5, 16, 31), range(3)):
        r, c = (0, 1) if i < 16 else (1, 0)
        terms = [values[r, i % 16, k] * b[32 * c + k, n] for k in range(32)]
        assert math.isclose(found[i, n], sum(terms), rel_tol=1e-12, abs_tol=1e-12)
    assert torch.equal(blocks(layout, matrix(layout, values)), values)


@DTYPE
@MODE
@TURN
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_product_is_its_formula(name, turned, mode, dtype, seed):
    layout = layout_of(name)
    a, b = operands(mode, layout, turned, dtype=dtype)
    found = run(mode, layout, a, b, turned)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, formula(mode, layout, a, b, turned))
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1])
    assert torch.equal(found, kl.run_kernel(made, layout, a, b))


@DTYPE
@pytest.mark.parametrize("block", [16, 32, 64, 128, (16, 128), (128, 16), (32, 64)], ids=str)
@MODE
def test_every_size_of_a_block(block, mode, dtype, seed):
    layout = Layout([[0, 1, 0], [1, 1, 0]], block, 4)
    for turned in TURNS[::3]:
        a, b = operands(mode, layout, turned, size=3, dtype=dtype)
        assert_near(run(mode, layout, a, b, turned), formula(mode, layout, a, b, turned))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 7, 16, 31, 32, 48, 80, 96, 129])
@pytest.mark.parametrize("name", ["wide", "heads", "none", "none of 2"])
@MODE
def test_any_size_of_the_other_dimension(mode, name, size, dtype, seed):
    layout = layout_of(name)
    for turned in TURNS:
        a, b = operands(mode, layout, turned, size=size, dtype=dtype)
        assert_near(run(mode, layout, a, b, turned), formula(mode, layout, a, b, turned))


# Which blocks are stored.


@MODE
def test_a_layout_whose_contents_change(mode, seed):
    layout = Layout([[1, 0, 1], [0, 0, 1]], 16)
    a, b = operands(mode, layout)
    for mask in ([[0, 1, 1], [1, 0, 0]], [[0, 0, 0], [0, 1, 0]], [[0, 0, 0]] * 2):
        layout.update_(torch.tensor(mask))
        assert_near(run(mode, layout, a, b), formula(mode, layout, a, b))
        assert_near(run(mode, layout, a, b), formula(mode, Layout(mask, 16, 3), a, b))


# Batches, heads and memory.

LEADS = [(), (1,), (3,), (2, 1), (2, 3), (1, 1, 3)]
PAIRS = [*itertools.product(LEADS, LEADS), ((0,), ()), ((), (0,)), ((2, 0), (1, 1))]


@MODE
@pytest.mark.parametrize("name", ["wide", "heads", "none"])
@pytest.mark.parametrize("heads", [None, 1])
def test_batches_broadcast_in_every_combination(heads, name, mode, seed):
    """Dense matrices that are one for all heads too."""
    layout = layout_of(name)
    for leads, turned in itertools.product(PAIRS, TURNS[::3]):
        a, b = operands(mode, layout, turned, size=2, leads=leads, heads=heads)
        found = run(mode, layout, a, b, turned)
        assert_near(found, formula(mode, layout, a, b, turned))
        ends = 3 if mode == "sdd" or layout.heads is not None else 2
        assert found.shape[:-ends] == torch.broadcast_shapes(*leads)


@MODE
@pytest.mark.parametrize("name", ["wide", "heads"])
def test_any_strides(name, mode, seed):
    layout = layout_of(name)
    for turned, leads in itertools.product(TURNS, [((), ()), ((2, 1), (3,))]):
        a, b = operands(mode, layout, turned, leads=leads)
        wanted = formula(mode, layout, a, b, turned)
        for (what, left), (_, right) in zip(memories(a), reversed([*memories(b)]), strict=True):
            assert torch.equal(left, a), what
            assert_near(run(mode, layout, left, right, turned), wanted)
        negated = torch._neg_view(-a), torch._neg_view(-b)
        assert_near(run(mode, layout, *negated, turned), wanted)
        expanded = a[..., :1].expand(a.shape), b[..., :1, :].expand(b.shape)
        assert_near(run(mode, layout, *expanded, turned), formula(mode, layout, *expanded, turned))


@MODE
@pytest.mark.parametrize("leads", [((), ()), ((2,), ()), ((2, 1), (3,))], ids=str)
@pytest.mark.parametrize("name", ["wide", "heads", "none", "none of 2"])
def test_out_is_written_in_place_whatever_its_strides(name, leads, mode, seed):
    layout = layout_of(name)
    for turned in TURNS:
        a, b = operands(mode, layout, turned, leads=leads)
        wanted = run(mode, layout, a, b, turned)
        for _, out in memories(torch.full_like(wanted, math.nan)):
            version = out._version
            assert run(mode, layout, a, b, turned, out=out) is out
            assert torch.equal(out, wanted) and (out._version > version or not out.numel())


@MODE
def test_what_lies_around_out_is_left_alone(mode, seed):
    layout = layout_of("wide")
    a, b = operands(mode, layout)
    wanted = run(mode, layout, a, b)
    around = torch.full([n + 4 for n in wanted.shape], 7.0, dtype=wanted.dtype)
    inside = around[tuple(slice(2, -2) for _ in wanted.shape)]
    assert torch.equal(run(mode, layout, a, b, out=inside), wanted)
    inside.fill_(7.0)
    assert (around == 7.0).all()


# What is not read.


@MODE
@TURN
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e300], ids=str)
@pytest.mark.parametrize("name", ["wide", "tall", "none of 2", "heads"])
def test_what_lies_in_unused_slots_reaches_no_result(name, junk, turned, mode, seed):
    layout = layout_of(name)
    a, b = operands(mode, layout, turned, leads=((2,), (2,)))
    wanted = formula(mode, layout, a, b, turned)
    used = len(places(layout))
    if mode != "sdd":
        (a, b)[SPARSE[mode]][:, used:] = junk
    for dense in (False, True):  # one that holds infinities goes by blocks
        if dense and mode != "sdd" and used:
            other = (b, a)[SPARSE[mode]]
            other[(..., 0, 0)] = math.inf
            found = run(mode, layout, a, b, turned)
            assert found.isfinite().float().mean() > 0.2
        else:
            out = torch.full_like(wanted, math.nan)
            assert_near(run(mode, layout, a, b, turned, out=out), wanted)
            if mode == "sdd":
                assert not out[:, used:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@TURN
@pytest.mark.parametrize("mode", ["dsd", "dds"])
def test_what_no_stored_block_meets_reaches_no_result(mode, turned, dtype, value, seed):
    """Columns of blocks of S without any, and for the others: lines of the result that no stored
    block takes there."""
    layout = Layout([[1, 0, 0], [0, 0, 0], [0, 0, 1]], 16, 3)
    a, b = operands(mode, layout, turned, dtype=dtype, leads=((2,), ()))
    dense = (b, a)[SPARSE[mode]]
    axis = -2 if mode == "dsd" else -1
    axis = -3 - axis if turned[1 - SPARSE[mode]] else axis
    wanted = formula(mode, layout, a, b, turned)
    dense.narrow(axis, 16, 16).fill_(value)  # which nothing meets
    assert_near(run(mode, layout, a, b, turned), wanted)
    dense.narrow(axis, 32, 16).fill_(value)  # which the last line of blocks meets
    found = run(mode, layout, a, b, turned)
    ends = -2 if mode == "dsd" else -1
    assert_near(found.narrow(ends, 0, 32), wanted.narrow(ends, 0, 32))
    assert not found.narrow(ends, 32, 16).isfinite().any()


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_stored_value_that_is_not_a_number_stays_in_its_line(value, seed):
    layout = layout_of("plain")
    values, b = operands("dsd", layout)
    wanted = dsd(values, b, layout)
    values[0, 3, 5] = value  # of the first row of blocks
    found = dsd(values, b, layout)
    assert not found[3].isfinite().any()
    kept = [n for n in range(32) if n != 3]
    assert torch.equal(found[kept], wanted[kept])


def test_infinities_are_torchs(seed):
    layout = layout_of("all")
    values, b = operands("dsd", layout)
    b[3, 0], b[4, 1], b[4, 2], b[5, 2] = math.inf, math.nan, -math.inf, math.inf
    found, wanted = dsd(values, b, layout), layout.to_dense(values) @ b
    torch.testing.assert_close(found, wanted, equal_nan=True)


# Precision and epilogues.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@MODE
def test_half_types_are_rounded_once(mode, dtype, seed):
    """A sum of 192 products, and a bias: rounded in between each would add half a unit of the last
    place, 5e-4 and 4e-3."""
    gate = {torch.float16: 3e-4, torch.bfloat16: 2.4e-3}[dtype]
    layout = Layout([[1] * 6] * 6, 32) if mode != "sdd" else layout_of("all")
    a, b = operands(mode, layout, size=192, dtype=dtype)
    wanted = formula(mode, layout, a, b)
    assert_near(run(mode, layout, a, b), wanted, gate)
    if mode != "sdd":
        axis = -2 if mode == "dsd" else -1
        bias = randn(wanted.shape[axis], dtype=dtype)
        found = run(mode, layout, a, b, epilogue=(kl.Bias(), kl.Relu()), bias=bias)
        added = wanted + (bias.double()[:, None] if mode == "dsd" else bias.double())
        assert_near(found, added.relu(), gate)


def test_sums_of_half_types_may_exceed_them(seed):
    layout = Layout([[1] * 4], 16)
    values = torch.full((4, 16, 16), 200.0, dtype=torch.float16)
    b = torch.full((64, 2), 200.0, dtype=torch.float16)
    b[32:] = -200.0
    assert (dsd(values, b, layout) == 0).all()


EPILOGUES = {
    "bias": (kl.Bias(), kl.Gelu()),
    "numbers": (kl.Scale(), kl.Custom("v * gain + shift", ("gain", "shift"))),
    "sum": (kl.Add(), kl.Relu()),
    "gate": (kl.Scale(), kl.Gate()),
    "all": (kl.Scale(), kl.Bias(), kl.Add(), kl.Custom("tanh(v)")),
}


def finished(epilogue, v, axis, values):
    """The epilogue in float64."""
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in values.items()}
    if "scale" in wide:
        v = v * wide["scale"]
    if "bias" in wide:
        v = v + (wide["bias"][:, None] if axis == -2 else wide["bias"])
    if "y" in wide:
        v = v + wide["beta"] * wide["y"]
    if "gate" in wide:
        v = v * F.silu(wide["gate"])
    if "gain" in wide:
        v = v * wide["gain"] + wide["shift"]
    last = epilogue[-1]
    return {kl.Gelu: F.gelu, kl.Relu: F.relu}.get(
        type(last), torch.tanh if "tanh" in str(last) else lambda v: v
    )(v)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", ["wide", "heads", "none of 2"])
@MODE
@TURN
def test_an_epilogue_finishes_each_value(turned, mode, name, epilogue, seed):
    """Of lines without blocks too; slots that hold none are 0 all the same."""
    layout, epilogue = layout_of(name), EPILOGUES[epilogue]
    if mode == "sdd":
        epilogue = tuple(part for part in epilogue if not part.vectors)
    a, b = operands(mode, layout, turned, leads=((2,), ()))
    y = formula(mode, layout, a, b, turned)
    axis = -2 if mode == "dsd" else -1
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1], epilogue=epilogue)
    for give in (float, lambda v: torch.tensor(v, dtype=torch.float64)):
        values = {n: give(0.75) for n in made.parameters}
        values |= {n: randn(y.shape[axis]) for n in made.vectors}
        values |= {n: randn(*y.shape[1:]) for n in made.summands}
        wanted = finished(epilogue, y, axis, values)
        if mode == "sdd":
            wanted[:, len(places(layout)) :] = 0
        assert_near(kl.run_kernel(made, layout, a, b, **values), wanted, 1e-12)
        assert_near(run(mode, layout, a, b, turned, epilogue=epilogue, **values), wanted, 1e-12)


def test_out_may_be_the_summand(seed):
    layout = layout_of("wide")
    for mode in MODES:
        a, b = operands(mode, layout)
        y = randn(*run(mode, layout, a, b).shape)
        wanted = run(mode, layout, a, b, epilogue=kl.Add(), y=y.clone(), beta=2.0)
        assert run(mode, layout, a, b, epilogue=kl.Add(), y=y, beta=2.0, out=y) is y
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("beta", [0.0, torch.tensor(0.0)], ids=str)
def test_a_beta_of_0_reads_no_summand(beta, seed):
    layout = layout_of("wide")
    for mode in MODES:
        a, b = operands(mode, layout)
        wanted = run(mode, layout, a, b)
        y = torch.full_like(wanted, math.nan)
        assert_near(run(mode, layout, a, b, epilogue=kl.Add(), y=y, beta=beta), wanted)


def test_a_meta_tensor_gives_a_shape():
    for mode, name in itertools.product(MODES, ("wide", "heads", "none")):
        layout = layout_of(name)
        there = layout.to("meta")
        ends = shapes(mode, layout)
        found = run(mode, there, *(torch.empty(2, *end, device="meta") for end in ends))
        wanted = run(mode, layout, *(torch.ones(2, *end) for end in ends))
        assert found.is_meta and found.shape == wanted.shape

"""What holds of all block-sparse products, whatever layouts and sizes."""

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.cases import (
    MODES,
    blocks,
    formula,
    matrix,
    operands,
    places,
    randn,
    run,
)

count = st.integers(0, 4)
sizes = st.sampled_from([16, 16, 32])
modes = st.sampled_from(MODES)
flags = st.tuples(st.booleans(), st.booleans())
width = st.integers(0, 9)
leads = st.sampled_from([((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((1,), (2,))])
seeds = st.integers(0, 10**6)
check = partial(settings, max_examples=25)


@st.composite
def layouts(draw) -> Layout:
    heads = draw(st.sampled_from([(), (), (1,), (2,)]))
    grid = draw(count), draw(count)
    torch.manual_seed(draw(seeds))
    density = draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]))
    mask = torch.rand(*heads, *grid) < density
    return Layout(mask, (draw(sizes), draw(sizes)), int(mask.sum()) + draw(st.integers(0, 2)))


def close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def randn_like(t: torch.Tensor) -> torch.Tensor:
    return randn(*t.shape)


@check()
@given(layouts(), modes, flags, width, leads, seeds)
def test_a_product_is_that_of_dense_matrices(layout, mode, turned, size, leads, seed):
    torch.manual_seed(seed)
    a, b = operands(mode, layout, turned, size, leads)
    close(run(mode, layout, a, b, turned), formula(mode, layout, a, b, turned))


@check()
@given(layouts(), flags, width, seeds)
def test_the_transposed_layout_holds_the_transposed_matrix(layout, turned, size, seed):
    torch.manual_seed(seed)
    values, b = operands("dsd", layout, turned, size)
    other = layout.transpose()
    moved = values.index_select(0, layout.col_order).mT
    of_s, of_b = turned
    found = dsd(moved, b, other, transpose_a=not of_s, transpose_b=of_b)
    close(found, dsd(values, b, layout, transpose_a=of_s, transpose_b=of_b))
    x, y = operands("sdd", layout, turned, size)
    whole = sdd(x, y, layout, transpose_a=of_s, transpose_b=of_b)
    back = sdd(y, x, other, transpose_a=not of_b, transpose_b=not of_s)
    close(whole.index_select(0, layout.col_order).mT, back)


@check()
@given(layouts(), seeds)
def test_the_identity_gives_the_matrix_back(layout, seed):
    torch.manual_seed(seed)
    values = randn(layout.capacity, *layout.block)
    rows, cols = (torch.eye(n, dtype=torch.float64) for n in layout.shape)
    if layout.heads is not None:
        rows, cols = rows[None], cols[None]  # one for all heads
    dense = matrix(layout, values)
    assert torch.equal(dsd(values, cols, layout), dense)
    assert torch.equal(dds(rows, values, layout), dense)
    assert torch.equal(sdd(dense, cols, layout), blocks(layout, dense))
    values[len(places(layout)) :] = 0
    assert torch.equal(sdd(rows, dense, layout), values)


@check()
@given(layouts(), width, seeds)
def test_more_slots_than_blocks_change_nothing(layout, size, seed):
    torch.manual_seed(seed)
    wider = Layout(layout.mask(), layout.block, layout.capacity + 3)
    junk = torch.full((3, *layout.block), float("nan"), dtype=torch.float64)
    for mode in MODES:
        a, b = operands(mode, layout, size=size)
        more = torch.cat((a, junk)) if mode == "dsd" else a
        wide = more, torch.cat((b, junk)) if mode == "dds" else b
        found, wanted = run(mode, wider, *wide), run(mode, layout, a, b)
        if mode == "sdd":
            assert torch.equal(found, torch.cat((wanted, torch.zeros_like(junk))))
        else:  # by another of torch's products, perhaps
            torch.testing.assert_close(found, wanted)


@check()
@given(layouts(), modes, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), seeds)
def test_a_dense_operand_of_integers_is_exact(layout, mode, dtype, seed):
    torch.manual_seed(seed)
    a, b = (t.round().clamp(-3, 3).to(dtype) for t in operands(mode, layout, size=7))
    assert torch.equal(run(mode, layout, a, b).double(), formula(mode, layout, a, b).to(dtype))


@check(max_examples=15)
@given(layouts(), modes, flags, leads, seeds)
def test_gradients_are_those_of_dense_matrices(layout, mode, turned, leads, seed):
    torch.manual_seed(seed)
    tensors = operands(mode, layout, turned, 3, leads, grad=True)
    found, wanted = run(mode, layout, *tensors, turned), formula(mode, layout, *tensors, turned)
    if 0 in layout.grid:
        assert not found.any()
        return
    wanted = wanted + 0 * sum(t.sum() for t in tensors)
    grad = randn_like(found)
    ours, theirs = (torch.autograd.grad(y, tensors, grad) for y in (found, wanted))
    close(ours, theirs)


@check(max_examples=15)
@given(layouts(), modes, seeds)
def test_an_epilogue_is_applied_behind_the_sum(layout, mode, seed):
    torch.manual_seed(seed)
    a, b = operands(mode, layout, size=3)
    found = run(mode, layout, a, b, epilogue=kl.Custom("v * v + 1"))
    wanted = run(mode, layout, a, b).square() + 1
    if mode == "sdd":
        wanted[len(places(layout)) :] = 0
    close(found, wanted)

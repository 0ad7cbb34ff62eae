"""Products on a CPU, of stored blocks alone: one of each line at a time, or all and then summed."""

import pytest
import torch

from kernlib.families.blocksparse import cpu
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout

BLOCKS = (7, 9)  # of a matrix
SIZES = ((16, 16), (16, 32))


def problem(part, block, columns, heads=None, dtype=torch.float64):
    size = BLOCKS if heads is None else (heads, *BLOCKS)
    mask = torch.rand(size) < part
    layout = Layout(mask, block)
    values = torch.randn(layout.capacity, *block, dtype=dtype)
    lead = () if heads is None else (heads,)
    matrix = layout.to_dense(values)
    x = torch.randn(*lead, BLOCKS[1] * block[1], columns, dtype=dtype)
    return layout, values, matrix, x


@pytest.mark.parametrize("part", (0.0, 0.1, 0.24, 0.4, 0.9))
@pytest.mark.parametrize("columns", (0, 1, 16, 17, 300))
@pytest.mark.parametrize("block", SIZES, ids=str)
@pytest.mark.parametrize("heads", (None, 2))
def test_values(part, columns, block, heads, seed):
    layout, values, matrix, x = problem(part, block, columns, heads)
    torch.testing.assert_close(dsd(values, x, layout), matrix @ x)
    left = torch.randn(*matrix.shape[:-2], columns, BLOCKS[0] * block[0], dtype=torch.float64)
    torch.testing.assert_close(dds(left, values, layout), left @ matrix)


@pytest.mark.parametrize("turned", (False, True))
def test_gradients_of_both_operands(turned, seed):
    layout, values, _, _ = problem(0.15, (16, 16), 3)
    x = torch.randn(BLOCKS[0 if turned else 1] * 16, 3, dtype=torch.float64)
    values = values[: layout.capacity].requires_grad_()
    x.requires_grad_()

    def product(values, x):
        return dsd(values, x, layout, transpose_a=turned)

    def dense(values, x):
        matrix = layout.to_dense(values)
        return (matrix.mT if turned else matrix) @ x

    weights = torch.randn_like(dense(values, x))
    made, wanted = (
        torch.autograd.grad((f(values, x) ** 2 * weights).sum(), (values, x), create_graph=True)
        for f in (product, dense)
    )
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)
    twice, wanted = (torch.autograd.grad(g[1].square().sum(), values)[0] for g in (made, wanted))
    torch.testing.assert_close(twice, wanted)


def lengths(longest, width, block=16):
    """A layout whose lines of blocks store from none to ``longest``, and values with NaN in the
    slots that hold no block."""
    mask = torch.arange(width) < torch.tensor([[3], [0], [longest], [1], [0]])
    layout = Layout(mask, block, capacity=int(mask.sum()) + 2)
    values = torch.randn(layout.capacity, block, block, dtype=torch.float64)
    matrix = layout.to_dense(values)
    values[-2:] = torch.nan
    return layout, values, matrix


@pytest.mark.parametrize("columns", (1, 5, 16, 40))
@pytest.mark.parametrize("turned", (False, True))
def test_lines_of_different_lengths_and_slots_without_a_block(columns, turned, seed):
    layout, values, matrix = lengths(8, 9)
    matrix = matrix.mT if turned else matrix
    x = torch.randn(matrix.shape[1], columns, dtype=torch.float64)
    torch.testing.assert_close(dsd(values, x, layout, transpose_a=turned), matrix @ x)
    x = torch.randn(columns, matrix.shape[0], dtype=torch.float64)
    torch.testing.assert_close(dds(x, values, layout, transpose_b=turned), x @ matrix)


@pytest.mark.parametrize("columns", (1, 16, 40))
def test_infinities_reach_the_lines_that_meet_them_alone(columns, seed):
    layout, values, matrix = lengths(4, 6)
    x = torch.randn(matrix.shape[1], columns, dtype=torch.float64)
    wanted = matrix @ x
    wanted[2 * 16 : 3 * 16] = torch.nan
    x[3 * 16] = torch.inf  # which the third line alone meets
    found = dsd(values, x, layout)
    assert not found[2 * 16 : 3 * 16].isfinite().any()
    found[2 * 16 : 3 * 16] = torch.nan
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("columns", (1, 40))
def test_products_follow_what_is_written_to_a_layout(columns, seed):
    mask = torch.rand(BLOCKS) < 0.3
    layout = Layout(mask, 16)
    values = torch.randn(layout.capacity, 16, 16, dtype=torch.float64)
    x = torch.randn(BLOCKS[1] * 16, columns, dtype=torch.float64)
    for shift in range(3):
        layout.update_(mask.roll(shift, 0))
        torch.testing.assert_close(dsd(values, x, layout), layout.to_dense(values) @ x)
    other = Layout.from_layout(layout.text, layout.tensors)  # of the same contents
    torch.testing.assert_close(dsd(values, x, other), dsd(values, x, layout), rtol=0, atol=0)


def test_layouts_of_inference_mode_are_looked_at_each_time(seed):
    mask = torch.rand(BLOCKS) < 0.3
    layout = Layout(mask, 16)
    with torch.inference_mode():
        layout = Layout.from_layout(layout.text, tuple(t.clone() for t in layout.tensors))
        values = torch.randn(layout.capacity, 16, 16, dtype=torch.float64)
        x = torch.randn(BLOCKS[1] * 16, 7, dtype=torch.float64)
        first = dsd(values, x, layout)
        torch.testing.assert_close(first, layout.to_dense(values) @ x)
        for t, written in zip(layout.tensors, Layout(mask.roll(1, 1), 16).tensors, strict=True):
            t.copy_(written)
        torch.testing.assert_close(dsd(values, x, layout), layout.to_dense(values) @ x)


@pytest.mark.parametrize("columns", (4, 40))
@pytest.mark.parametrize("part", (0.3, 0.9))
@pytest.mark.parametrize("heads", (None, 2))
def test_dimensions_in_front(columns, part, heads, seed):
    layout, _, _, _ = problem(part, (16, 16), columns, heads)
    lead = () if heads is None else (heads,)
    values = torch.randn(3, 1, layout.capacity, 16, 16, dtype=torch.float64)
    for own in (values, values[0, 0]):
        matrix = layout.to_dense(own)
        x = torch.randn(2, *lead, BLOCKS[1] * 16, columns, dtype=torch.float64)
        torch.testing.assert_close(dsd(own, x, layout), matrix @ x)
        x = torch.randn(2, *lead, columns, BLOCKS[0] * 16, dtype=torch.float64)
        torch.testing.assert_close(dds(x, own, layout), x @ matrix)


@pytest.mark.parametrize("depth", (0, 1, 5, 40))
@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("heads", (None, 2))
@pytest.mark.parametrize("part", (0.0, 0.3, 0.9))
def test_sampled_products(depth, turned, heads, part, seed):
    size = BLOCKS if heads is None else (heads, *BLOCKS)
    layout = Layout(torch.rand(size) < part, (16, 32), capacity=2 * 7 * 9)
    lead = (3,) if heads is None else (3, heads)
    left = torch.randn(*lead, BLOCKS[0] * 16, depth, dtype=torch.float64)
    right = torch.randn(*lead, depth, BLOCKS[1] * 32, dtype=torch.float64)
    given = right.mT.contiguous() if turned else right
    wanted = layout.to_blocks(left @ right)
    torch.testing.assert_close(sdd(left, given, layout, transpose_b=turned), wanted)
    for a, b, y in zip(left, given, wanted, strict=True):
        torch.testing.assert_close(sdd(a, b, layout, transpose_b=turned), y)


def test_sampled_products_of_more_than_is_brought_together_at_once(seed, monkeypatch):
    monkeypatch.setattr(cpu, "AT_ONCE", 5 * (16 + 32) * 20 - 1)
    layout = Layout(torch.rand(BLOCKS) < 0.5, (16, 32))
    left = torch.randn(BLOCKS[0] * 16, 20, dtype=torch.float64)
    right = torch.randn(20, BLOCKS[1] * 32, dtype=torch.float64)
    torch.testing.assert_close(sdd(left, right, layout), layout.to_blocks(left @ right))


@pytest.mark.parametrize("sampled", (False, True))
def test_a_backward_pass_under_autocast_is_as_precise(sampled, seed):
    layout = Layout(torch.rand(BLOCKS) < 0.5, 16)
    values = torch.randn(layout.capacity, 16, 16, requires_grad=True)
    x = torch.randn(4, BLOCKS[0] * 16, requires_grad=True)
    other = torch.randn(4, BLOCKS[1] * 16, requires_grad=True)
    y = sdd(x, other, layout, transpose_a=True) if sampled else dds(x, values, layout)
    given, weights = (x, other if sampled else values), torch.randn_like(y)
    wanted = torch.autograd.grad(y, given, weights, retain_graph=True)
    with torch.autocast("cpu"):
        found = torch.autograd.grad(y, given, weights)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("columns", (4, 40))
def test_gradients_are_those_of_the_contents_of_the_call(columns, seed):
    mask = torch.rand(BLOCKS) < 0.3
    layout = Layout(mask, 16)
    values = torch.randn(layout.capacity, 16, 16, dtype=torch.float64, requires_grad=True)
    x = torch.randn(BLOCKS[1] * 16, columns, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad((layout.to_dense(values) @ x).square().sum(), (values, x))
    y = dsd(values, x, layout)
    layout.update_(mask.roll(1, 0))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (values, x)), wanted)

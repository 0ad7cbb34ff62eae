"""Products on a CPU of layouts that store few blocks, which are multiplied one by one."""

import pytest
import torch

from kernlib.families.blocksparse.functions import dds, dsd
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


@pytest.mark.parametrize("columns", (1, 200))
def test_the_same_bits_each_time(columns, seed):
    layout, values, _, x = problem(0.2, (16, 16), columns, dtype=torch.float32)
    first = dsd(values, x, layout)
    assert all(torch.equal(dsd(values, x, layout), first) for _ in range(3))

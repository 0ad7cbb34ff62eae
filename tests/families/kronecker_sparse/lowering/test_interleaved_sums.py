"""What the kernels of gradients of weights with 2 to 8 l compute, by their text on the host."""

import pytest
import torch

from kernlib.families.kronecker_sparse.kernels.gradient import interleaved_gradient as gradient
from kernlib.families.kronecker_sparse.kernels.gradient.interleaved_gradient import (
    InterleavedGradient,
)
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave
from kernlib.families.kronecker_sparse.kernels.steps.deinterleave import Deinterleave
from kernlib.families.kronecker_sparse.lowering.problem import OutLayout
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from tests.families.kronecker_sparse.lowering.cases import (
    ARCH,
    launch_all,
    parameters,
    relative_error,
    weight_gradient,
)
from tests.support.emulation.emulator import Emulator, kernels_of

ACCURACY = {"float16": 6e-4, "bfloat16": 4e-3}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


def rows_of(batch, features, dtype, gap=0, first=0):
    """Random rows from a number of a tensor on; before, between and behind them are NaN."""
    line = features + gap
    memory = torch.full((first + batch * line + 8,), torch.nan, dtype=getattr(torch, dtype))
    rows = memory[first : first + batch * line].view(batch, line)[:, :features]
    return rows.copy_(torch.randn(batch, features))


def result_of(problem, apart):
    """A result's memory, of NaN, its layout in it and the tensor: rows and blocks lie side by side
    or ``apart``."""
    a, b, c, d = problem.blocks, problem.rows, problem.columns, problem.lanes
    row = c * d + 3 * apart
    block = b * row + 5 * apart
    memory = torch.full((a * block + 16,), torch.nan, dtype=getattr(torch, problem.dtype))
    return memory, OutLayout(block, 1, row, d), memory.as_strided((a, b, c, d), (block, row, d, 1))


def sums_of(left, right, problem):
    """In float64."""
    a, d, n = problem.blocks, problem.lanes, problem.depth
    left = left.double().reshape(n, a, problem.rows, d)
    right = right.double().reshape(n, a, problem.columns, d)
    return torch.einsum("najl,nakl->ajkl", left, right)


# Two by d: one tile and several, one block and several, either operand with more features, one
# fragment at a time and two.
SMALL = {
    2: [(1, 40, 136, 2), (1, 200, 200, 2)],
    3: [(2, 40, 24, 3), (1, 136, 37, 3)],
    4: [(1, 136, 88, 4), (3, 24, 40, 4)],
    5: [(1, 48, 7, 5), (1, 24, 40, 5)],
    6: [(2, 12, 36, 6), (1, 48, 20, 6)],
    7: [(2, 64, 64, 7), (1, 48, 48, 7)],
    8: [(1, 33, 56, 8), (1, 64, 8, 8)],
}


@pytest.mark.emulated
@pytest.mark.few(len(SMALL))
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
@pytest.mark.parametrize("batch", [1025, 1091])
@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("lanes", SMALL)
def test_sums_are_those_of_the_operands(
    emulator, lanes, index, dtype, batch, multiprocessors, apart
):
    a, b, c, d = SMALL[lanes][index]
    problem = weight_gradient(a, b, c, d, batch, dtype=dtype)
    torch.manual_seed(batch)
    # What is read as it lies needs aligned rows, the other operand does not.
    gaps = {"gap": 8 * apart}, {"gap": 3 * apart, "first": int(apart)}
    gaps = gaps if b >= c else gaps[::-1]
    left, right = (
        rows_of(batch, a * n * d, dtype, **gap) for n, gap in zip((b, c), gaps, strict=True)
    )
    memory, out, result = result_of(problem, apart)
    sides = (
        side._replace(depth=rows.stride(0), alignment=rows.data_ptr() % 16)
        for side, rows in ((problem.left, left), (problem.right, right))
    )
    problem = problem._replace(out=out, **dict(zip(("left", "right"), sides, strict=True)))
    (choice,), gpu = InterleavedGradient().choices(problem, ARCH), Gpu(ARCH, multiprocessors)
    call = InterleavedGradient().launch((), problem, gpu, choice)
    assert parameters(call.steps[0]).vectors == (not apart and min(b, c) % 8 == 0)
    launch_all(emulator, call, {"left": left, "right": right, "out": memory})
    assert relative_error(result, sums_of(left, right, problem)) <= ACCURACY[dtype]
    assert memory.isfinite().sum() == result.numel()


BIASED = {
    "two tiles of rows": (1, 136, 40, 2),
    "lines of 35": (1, 136, 35, 3),
    "two tiles of columns": (1, 200, 200, 2),
    "blocks": (3, 40, 20, 3),
    "three tiles of columns": (1, 264, 260, 3),
}


@pytest.mark.emulated
@pytest.mark.few(2)
@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
@pytest.mark.parametrize("batch", [1025, 1091])
@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("name", BIASED)
def test_the_left_operand_is_summed_too(emulator, name, dtype, batch, multiprocessors):
    a, b, c, d = BIASED[name]
    problem = weight_gradient(a, b, c, d, batch, dtype=dtype)
    torch.manual_seed(batch)
    left, right = (rows_of(batch, a * n * d, dtype) for n in (b, c))
    line = deinterleave.layout(problem).lane
    h = torch.zeros(batch, a, d, line, dtype=left.dtype)
    h[..., :c] = right.view(batch, a, c, d).transpose(2, 3)
    memory, _, result = result_of(problem, False)
    bias = torch.full((a * b * d + 8,), torch.nan, dtype=left.dtype)
    call = InterleavedGradient().sums(problem, Gpu(ARCH, multiprocessors), True)
    launch_all(emulator, call, {"left": left, "h": h, "out": memory, "bias": bias})
    assert relative_error(result, sums_of(left, right, problem)) <= ACCURACY[dtype]
    assert relative_error(bias[: a * b * d], left.double().sum(0)) <= ACCURACY[dtype]
    assert memory.isfinite().sum() == result.numel() and bias[a * b * d :].isnan().all()


@pytest.mark.emulated
@pytest.mark.few(3)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("columns", [1, 8, 24, 37])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("lanes", gradient.LANES)
def test_each_l_of_an_operand_lies_by_itself(emulator, lanes, dtype, blocks, columns, apart):
    batch = 53
    x = rows_of(batch, blocks * columns * lanes, dtype, 3 * apart, int(apart))
    problem = weight_gradient(blocks, 32, columns, lanes, batch, dtype=dtype)
    layout = problem.right._replace(depth=x.stride(0), alignment=x.data_ptr() % 16)
    problem = problem._replace(right=layout)
    step = Deinterleave().step(problem, "right")
    assert parameters(step).vectors == (columns % 8 == 0 and not apart)
    call = Lowered((step,), deinterleave.size(problem))
    lines = launch_all(emulator, call, {"right": x}).view(x.dtype)
    lines = lines.view(batch, blocks, lanes, deinterleave.layout(problem).lane)
    assert torch.equal(lines[..., :columns], x.view(batch, blocks, columns, lanes).transpose(2, 3))
    assert (lines[..., columns:] == 0).all()

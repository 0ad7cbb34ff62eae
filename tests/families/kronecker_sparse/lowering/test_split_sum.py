"""Sums of the parts that other kernels leave: how many threads share them, where the sums of a
bias lie among them, and what the text computes on the host."""

import pytest
import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.kernels.steps import split_k_sum
from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum
from kernlib.families.kronecker_sparse.lowering.problem import OutLayout
from kernlib.lowering.steps import Lowered
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    DTYPES,
    launch_all,
    parameters,
    text_of,
    weight_gradient,
)
from tests.support.emulation.emulator import Emulator, kernels_of

GROUPS = [  # splits, threads that share those of a run
    (1, 1), (7, 1), (8, 2), (15, 2), (16, 4), (31, 4), (32, 8), (33, 8), (2000, 8),
]  # fmt: skip


def step_of(problem, count, bias=False):
    partial, one = split_k_sum.layout(problem, bias)
    return SplitKSum().step(problem, partial, one, count, bias)


@pytest.mark.few(len(GROUPS))
@pytest.mark.parametrize(("count", "groups"), GROUPS)
def test_threads_share_the_splits_where_each_has_several(count, groups):
    for problem in (weight_gradient(2, 96, 45, 3), weight_gradient(1, 1, 1, 1)):
        for bias in (False, True):
            step = step_of(problem, count, bias)
            read, text = parameters(step), text_of(step.spec.source)
            assert (read.splits, read.groups) == (count, groups)
            across = text["THREADS"] // read.groups
            assert (step.grid[0] - 1) * across < read.total <= step.grid[0] * across
            assert step.grid[1] == 1 and step.spec.threads == text["THREADS"]


@pytest.mark.parametrize("columns", [1, 4, 45, 48])
def test_a_bias_has_a_run_behind_each_row(columns):
    problem = weight_gradient(2, 96, columns, 3)
    pitch = -(-columns // 4) * 4
    for bias, line in ((False, pitch), (True, pitch + 4)):
        partial, one = split_k_sum.layout(problem, bias)
        assert partial[:4] == (3 * 96 * line, 96 * line, line, 1) and one == 2 * partial.block
        read = parameters(step_of(problem, 9, bias))
        assert (read.runs, read.total, read.split_stride) == (line // 4, one // 4, one)
        assert (read.lanes, read.rows, read.columns) == (3, 96, columns)


def test_a_bias_is_a_result_of_a_kernel_for_it():
    problem = weight_gradient(2, 96, 45, 3)
    alone, both = (step_of(problem, 9, bias) for bias in (False, True))
    assert alone.pointers == (("workspace", 0), ("out", 0))
    assert both.pointers == (*alone.pointers, ("bias", 0))
    assert parameters(both).bias == ADDRESSES["bias"]
    assert len({alone.spec, both.spec}) == len({alone.spec.entry, both.spec.entry}) == 2
    assert {alone.spec, both.spec} == {
        SplitKSum().spec((), SplitKSum.Variant("float16", has)) for has in (False, True)
    }


def test_more_results_than_a_launch_counts_are_refused():
    with pytest.raises(UnsupportedError, match=r"more than the sum of splits holds .*slices"):
        step_of(weight_gradient(1, 2**17, 2**17), 2)


def in_order(parts, groups):
    """Sums in float32 of the first axis, each group's by itself, and of the groups."""
    sums = []
    for group in range(groups):
        total = torch.zeros_like(parts[0])
        for part in parts[group::groups]:
            total = total + part
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


@pytest.mark.emulated
@pytest.mark.few(4)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pattern", [(1, 7, 9, 2), (2, 33, 6, 3), (3, 40, 16, 1), (1, 1, 1, 8)])
@pytest.mark.parametrize("count", [1, 9, 18, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_are_added_up_in_one_order(emulator, dtype, count, pattern, bias, turned):
    a, b, c, d = pattern
    sizes, line = (a, b, c, d), -(-c // 4) * 4
    problem = weight_gradient(*pattern, dtype=dtype)
    torch.manual_seed(count)
    parts = torch.randn(count, a, d, b, line + 4 * bias)
    parts[..., c:line] = torch.nan  # padding
    kind = getattr(torch, dtype)
    out = torch.full((a * b * c * d + 16,), torch.nan, dtype=kind)
    strides = (b * c * d, 1, d, b * d) if turned else (b * c * d, 1, c * d, d)
    problem = problem._replace(out=OutLayout(*strides))
    result = out.as_strided(sizes, (strides[0], *strides[2:], 1))
    sums = torch.full((a * b * d + 8,), torch.nan, dtype=kind)
    step = step_of(problem, count, bias).placed({"workspace": ("parts", 0)})
    launch_all(emulator, Lowered((step,)), {"parts": parts, "out": out, "bias": sums})
    exact = in_order(parts, parameters(step.placed({"parts": ("workspace", 0)})).groups)
    assert torch.equal(result, exact[..., :c].permute(0, 2, 3, 1).to(kind))
    assert out.isfinite().sum() == result.numel()
    if bias:
        x = exact[..., line:].double().sum(-1).permute(0, 2, 1).flatten()
        error = (sums[: a * b * d].double() - x).norm() / x.norm()
        assert error <= {"float16": 6e-4, "bfloat16": 4e-3, "float32": 1e-6}[dtype]
    assert sums.isfinite().sum() == a * b * d * bias

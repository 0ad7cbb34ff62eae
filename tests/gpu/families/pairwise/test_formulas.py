"""Formulas on a GPU: values and gradients beside float64 of the same numbers on a CPU."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.families.pairwise.formula_cases import (
    FORMULAS,
    drawn,
    formula,
    placed,
    reductions,
)

# The reductions whose gradients are compared: each has kernels of its own.
DERIVED = {"row+col": ("matmul", "vector", "sum", "logsumexp", "min", "softmax", "matrix")}
SIZES = {"few": (261, 403, 3), "wide": (65, 130, 70), "long": (3, 2001, 5), "one": (129, 1, 20)}
# Of values, and of gradients; half types round results.
BOUNDS = {
    torch.float32: (3e-6, 2e-5),
    torch.float64: (1e-13, 1e-11),
    torch.bfloat16: (6e-3, 3e-2),
    torch.float16: (2e-3, 6e-3),
}


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.detach().cpu().double(), y.detach()
    finite = y.isfinite()
    assert torch.equal(x.isfinite(), finite)
    return float((x - y)[finite].norm() / y[finite].norm().clamp_min(1e-30))


def compare(name: str, size: tuple, dtype: torch.dtype, columns: int, batch=0, pairs=None):
    """Errors of the reductions, and of their gradients."""
    values = drawn(name, *size, dtype, batch)
    v = torch.randn(*[batch] * bool(batch), size[1], columns).to(dtype)
    on_gpu, exact = placed(values, "cuda"), placed(values, "cpu", wide=True)
    sides = [(on_gpu, v.cuda().requires_grad_()), (exact, v.double().requires_grad_())]
    first, second = (
        reductions(formula(name), side, v, pairs and pairs.to(v.device)) for side, v in sides
    )
    leaves = [[*(t for t in s.values() if t.requires_grad), v] for s, v in sides]
    for key, result in first.items():
        expected, bound = second[key], BOUNDS[dtype]
        assert error(result, expected) < bound[0], key
        if not result.requires_grad or key not in DERIVED.get(name, ("matmul", "logsumexp")):
            continue
        weight = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
        finite = expected.isfinite()
        losses = [
            (result * weight.cuda()).double()[finite.cuda()].sum(),
            (expected * weight.double())[finite].sum(),
        ]
        grads, exacts = (
            torch.autograd.grad(loss, side, allow_unused=True, retain_graph=True)
            for loss, side in zip(losses, leaves, strict=True)
        )
        for x, y in zip(grads, exacts, strict=True):
            if y is not None and y.norm() > 1e-6:
                assert error(x, y) < bound[1], (key, error(x, y))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.few(12)
def test_values_and_gradients(name, size, dtype):
    if size == "one" and dtype in (torch.float16, torch.bfloat16):
        pytest.skip("gradients of one value are as good as its rounding")
    compare(name, SIZES[size], dtype, columns=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 17, 70])
def test_columns_of_v(columns, dtype):
    for name in ("row+col", "two sums"):
        compare(name, (130, 257, 6), dtype, columns)


def test_batches_broadcast():
    for name in ("row+col", "matrix", "scales"):
        compare(name, (33, 65, 7), torch.float32, columns=2, batch=3)


@pytest.mark.parametrize("k", [3, 70])
def test_ragged_batches_and_blocks(k):
    rows, cols = [0, 40, 40, 41, 200], [0, 7, 130, 130, 400]
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1]]).bool()
    for pairs in (kl.Pairs.from_splits(rows, cols), kl.Pairs.from_blocks(mask, rows, cols)):
        for name in ("row+col", "whole"):
            compare(name, (200, 400, k), torch.float32, columns=3, pairs=pairs)


def test_nearest_counts_and_neighbors():
    values = placed(drawn("row+col", 300, 500, 3, torch.float64), "cuda")
    matrix = kl.run_kernel(formula("row+col"), **values).detach()
    rows, cols = torch.arange(300).cuda() // 100, torch.arange(500).cuda() // 170
    for pairs in (None, kl.Pairs.from_batch(rows, cols)):
        inside = torch.ones_like(matrix, dtype=torch.bool)
        if pairs is not None:
            inside = rows[:, None] == cols
        masked = torch.where(inside, matrix, torch.inf)
        options = {"pairs": pairs, **values}
        entries, places = kl.kernel_topk(formula("row+col"), k=5, **options)
        # Not to the bit: blocks of rows have a kernel of their own.
        torch.testing.assert_close(entries, masked.topk(5, largest=False).values)
        torch.testing.assert_close(matrix.gather(1, places), entries)
        counts = kl.kernel_count(formula("row+col"), threshold=0.3, **options)
        assert torch.equal(counts, (masked <= 0.3).sum(1))
        splits, columns, _ = kl.kernel_neighbors(formula("row+col"), threshold=0.3, **options)
        assert torch.equal(splits.diff(), counts)
        assert torch.equal(columns, (masked <= 0.3).nonzero()[:, 1])


def test_bits_repeat():
    values = placed(drawn("two sums", 70, 20011, 5, torch.float32), "cuda")
    v = torch.randn(20011, 3, device="cuda")
    first, second = (reductions(formula("two sums"), values, v) for _ in range(2))
    for key, result in first.items():
        assert torch.equal(result, second[key]), key


def test_no_points():
    of = formula("row+col")
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 7, 0)):
        values = placed(drawn("row+col", m, n, k, torch.float32), "cuda")
        v = torch.randn(n, 2, device="cuda")
        assert kl.kernel_matmul(of, v=v, **values).shape == (m, 2)
        sums, logs = kl.kernel_sum(of, **values), kl.kernel_logsumexp(of, **values)
        assert sums.shape == logs.shape == (m,) and kl.run_kernel(of, **values).shape == (m, n)
        if n == 0:
            assert not sums.any() and (logs == -torch.inf).all()


def test_descriptors_combined():
    x, y = torch.randn(200, 9, device="cuda"), torch.randn(300, 9, device="cuda")
    v = torch.randn(300, 2, device="cuda")
    kernel = kl.gaussian(features=range(4)) * kl.matern52(features=range(4, 9)) + 0.25
    result = kl.kernel_matmul(kernel, x, y, v, bandwidth_1=2.0, bandwidth_2=3.0)
    parts = [
        kl.run_kernel(k, x[:, at].double(), y[:, at].double(), bandwidth=h)
        for k, at, h in ((kl.gaussian(), slice(4), 2.0), (kl.matern52(), slice(4, 9), 3.0))
    ]
    assert error(result, ((parts[0] * parts[1] + 0.25) @ v.double()).cpu()) < 1e-6


def test_compiled():
    values = placed(drawn("row+col", 100, 200, 3, torch.float32), "cuda")
    v = torch.randn(200, 2, device="cuda")
    of = formula("row+col")

    def loss(values, v):
        return kl.kernel_matmul(of, v=v, **values).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    plain, fast = (
        torch.autograd.grad(f(values, v), [values["x"], values["s"]]) for f in (loss, compiled)
    )
    for x, y in zip(fast, plain, strict=True):
        assert error(x, y.cpu().double()) < 1e-5

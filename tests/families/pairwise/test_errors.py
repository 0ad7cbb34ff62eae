"""Arguments of pairwise calls that do not fit each other, and memory that is shared: what is wrong
with one alone, ``tests/contract`` has."""

from fractions import Fraction

import pytest
import torch

import kernlib as kl

M, N, K, L = 5, 7, 9, 3


def rows(*shape, **options):
    return torch.ones(shape, **options)


A, B = rows(M, K), rows(N, K)
BATCH_A, BATCH_B = rows(L, M, K), rows(L, N, K)
L1, LAPLACE, NORM = kl.l1_distance(), kl.laplace_l1(), kl.p_distance()
BOTH = kl.Pairwise(inner=kl.Power(), outer=kl.Power())
PQ = kl.laplace_pq()
SYMMETRIC = kl.laplace_l1(symmetric=True)


def call(descriptor, *tensors, **arguments):
    return lambda: kl.run_kernel(descriptor, *tensors, **arguments)


def meta(*shape):
    return torch.empty(shape, device="meta")


VALUE_ERRORS = {
    "b too many": (call(SYMMETRIC, A, A, bandwidth=1.0), "leave b out"),
    "two batches": (call(L1, BATCH_A, rows(2, N, K)), "batches .*a: 3, b: 2"),
    "batch 0 and 3": (call(L1, BATCH_A, rows(0, N, K)), "batches .*a: 3, b: 0"),
    "batch of p": (call(NORM, BATCH_A, BATCH_B, p=rows(2)), "batches .*a: 3, .*p: 2"),
    "batch of bandwidth": (
        call(LAPLACE, BATCH_A, B, bandwidth=rows(4)),
        "batches .*a: 3, bandwidth: 4",
    ),
    "out for two": (call(L1, BATCH_A, BATCH_B, out=rows(2, M, N)), "batches .*out: 2"),
    "out 2-D": (call(L1, BATCH_A, B, out=rows(M, N)), r"out must be 3-D .*batch of 3.*\(5, 7\)"),
    "out 2-D by p": (call(NORM, A, B, p=rows(L), out=rows(M, N)), "out must be 3-D .*3"),
    "two missing": (call(PQ, A, B, p=1.0), "needs bandwidth, q"),
    "outer_p missing": (call(BOTH, A, B, inner_p=2.0), "needs outer_p"),
    "inner_p missing": (call(BOTH, A, B, outer_p=2.0), r"needs p \(or inner_p\): run_kernel"),
    "p and inner_p": (call(BOTH, A, B, p=2.0, inner_p=2.0), "either p or them"),
    "p and outer_p": (call(BOTH, A, B, p=2.0, outer_p=2.0), "either p or them"),
    "p without Power": (call(L1, A, B, p=2.0), r"p needs inner=Power\(\)"),
    "inner_p without Power": (call(L1, A, B, inner_p=2.0), r"inner_p needs inner=Power\(\)"),
    "outer_p without Power": (call(NORM, A, B, inner_p=2.0, outer_p=2.0), "outer_p needs outer"),
    "epsilon alone": (call(L1, A, B, epsilon=0.1), "epsilon needs an epilogue"),
    "regularization alone": (call(L1, A, B, regularization=0.1), "regularization needs an epi"),
    "q 0": (call(PQ, A, B, p=1.0, bandwidth=1.0, q=0), "q must be greater than 0, got 0"),
    "alpha -1": (
        call(kl.rational_quadratic(), A, B, bandwidth=1.0, alpha=Fraction(-1, 2)),
        "alpha must be greater than 0, got -0.5",
    ),
    "inner_p -1": (call(NORM, A, B, inner_p=-1), "inner_p must be 0 or greater .*got -1"),
    "outer_p nan": (call(BOTH, A, B, inner_p=1.0, outer_p=float("nan")), "outer_p .*nan"),
    "scale nan": (
        call(kl.l1_distance(epilogue=kl.Scale()), A, B, scale=float("nan")),
        "scale .*nan",
    ),
    "accumulate into nothing": (call(L1, A, B, accumulate=True), "accumulate=True .*no out"),
    "offsets of symmetric": (
        call(SYMMETRIC, A, bandwidth=1.0, row_offset=1),
        "row_offset == col_offset, got 1 and 0",
    ),
    "out expanded": (
        call(L1, A, B, out=rows(1, N).expand(M, N)),
        r"out overlaps itself.*\(5, 7\).*\(0, 1\)",
    ),
    "out batch expanded": (
        call(L1, BATCH_A, B, out=rows(1, M, N).expand(L, M, N)),
        "out overlaps itself",
    ),
    "out windows": (
        call(L1, A, B, out=rows(M + N).as_strided((M, N), (1, 1))),
        r"out overlaps itself.*\(1, 1\)",
    ),
    "cdist batches": (lambda: kl.cdist(BATCH_A, rows(2, N, K)), r"broadcast: \(3,\), \(2,\)"),
    "cdist sums of inf": (lambda: kl.cdist(A, B, float("inf"), root=False), "p=inf"),
    "cdist batch of p": (lambda: kl.cdist(BATCH_A, B, rows(2)), "batches .*p: 2"),
    "cdist batches by p": (
        lambda: kl.cdist(rows(1, 1, M, K), B, rows(2)),
        "p of .*one batch",
    ),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_what_does_not_fit_is_a_value_error(case):
    run, message = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        run()


def test_a_device_without_kernels_is_named():
    class Elsewhere(torch.Tensor):
        device = property(lambda self: torch.device("xpu"))

    a, b = (rows(count, K).as_subclass(Elsewhere) for count in (M, N))
    with pytest.raises(kl.UnsupportedError, match="a is on xpu"):
        kl.run_kernel(L1, a, b)


MEMORY = {
    "a itself": lambda x: (x[:M, :K], rows(N, K), x[:M, :N], "a"),
    "b itself": lambda x: (rows(M, K), x[:N, :K], x[:M, :N], "b"),
    "b's last element": lambda x: (rows(M, K), x[3 : 3 + N, :K], x[9 : 9 + M, 8 : 8 + N], "b"),
    "a turned": lambda x: (x[:M, :K], rows(N, K), x[:N, :M].T, "a"),
    "half and float": lambda x: (
        x.view(torch.float16)[:M, :K],
        rows(N, K).half(),
        x[:M, :N],
        "a",
    ),
}


@pytest.mark.parametrize("case", MEMORY)
def test_out_must_not_share_memory_with_an_input(case):
    a, b, out, name = MEMORY[case](rows(20, 20))
    with pytest.raises(ValueError, match=f"out shares memory with {name};"):
        kl.run_kernel(L1, a, b, out=out)


APART = {
    "columns": lambda x: (x[:M, :K], x[:N, :K], x[:M, K : K + N]),
    "rows": lambda x: (x[:M, :K], x[M : M + N, :K], x[M + N : 2 * M + N, :N]),
    "every other": lambda x: (x[:M, ::2][:, :K], x[:N, ::2][:, :K], x[:M, 1::2][:, :N]),
}


@pytest.mark.parametrize("case", APART)
def test_parts_of_one_tensor_that_share_nothing_are_fine(case):
    a, b, out = APART[case](torch.rand(20, 20))
    expected = kl.run_kernel(L1, a.clone(), b.clone())
    assert torch.equal(kl.run_kernel(L1, a, b, out=out), expected)


@pytest.mark.parametrize("name", ["bandwidth", "out", "b"])
def test_a_refused_call_writes_nothing(name):
    out = torch.full((M, N), 7.0)
    given = {"bandwidth": 1.0, "out": out, "b": B}
    given[name] = {"bandwidth": -1.0, "out": out.T, "b": B[:, :2]}[name]
    b = given.pop("b")
    with pytest.raises(ValueError):
        kl.run_kernel(LAPLACE, A, b, **given)
    assert torch.equal(out, torch.full((M, N), 7.0))

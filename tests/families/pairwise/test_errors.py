"""Every bad call of the pairwise op says which argument is wrong, and what was given."""

from fractions import Fraction

import numpy as np
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


def sparse(x):
    return torch.sparse_coo_tensor([[0], [1]], [1.0], x.shape, check_invariants=True)


def call(descriptor, *tensors, **arguments):
    return lambda: kl.run_kernel(descriptor, *tensors, **arguments)


def meta(*shape):
    return torch.empty(shape, device="meta")


TYPE_ERRORS = {
    "accumulate 1": (call(L1, A, B, accumulate=1), "accumulate must be a bool, got 1"),
    "accumulate list": (call(L1, A, B, accumulate=[1]), r"accumulate must be a bool, got \[1\]"),
    "a list": (call(L1, [[1.0]], B), "a must be a tensor, got list"),
    "a array": (call(L1, np.ones((M, K)), B), "a must be a tensor, got ndarray"),
    "a None": (call(L1, None, B), "a must be a tensor, got None; the call is run_kernel"),
    "b str": (call(L1, A, "b"), "b must be a tensor, got str"),
    "out list": (call(L1, A, B, out=[]), "out must be a tensor, got list"),
    "a int": (call(L1, A.int(), B.int()), "a must be one of float32, .*torch.int32"),
    "a bool": (call(L1, A.bool(), B.bool()), "a must be one of float32, .*torch.bool"),
    "a complex": (call(L1, A + 0j, B + 0j), "a must be one of float32, .*torch.complex64"),
    "b int": (call(L1, A, B.int()), "b must be one of float32, .*torch.int32"),
    "two dtypes": (call(L1, A, B.double()), "a and b .*one dtype, .*float32 and .*float64"),
    "a sparse": (call(L1, sparse(A), B), "a must be a dense tensor, .*sparse_coo"),
    "b sparse": (call(L1, A, sparse(B)), "b must be a dense tensor, .*sparse_coo"),
    "out sparse": (call(L1, A, B, out=sparse(rows(M, N))), "out .*dense .*sparse_coo"),
    "out float64": (call(L1, A, B, out=rows(M, N).double()), "out must be .*float32.*float64"),
    "out half": (call(L1, A, B, out=rows(M, N).half()), "out must be .*float32.*float16"),
    "out of half": (
        call(L1, A.half(), B.half(), out=rows(M, N).bfloat16()),
        "out must be torch.float16 or torch.float32 .*bfloat16",
    ),
    "bandwidth bool": (call(LAPLACE, A, B, bandwidth=True), "bandwidth .*got True"),
    "bandwidth np.bool": (call(LAPLACE, A, B, bandwidth=np.bool_(True)), "bandwidth .*True"),
    "bandwidth str": (call(LAPLACE, A, B, bandwidth="2"), "bandwidth .*got '2'"),
    "bandwidth complex": (call(LAPLACE, A, B, bandwidth=2j), "bandwidth .*got 2j"),
    "bandwidth None": (call(LAPLACE, A, B, bandwidth=None), "bandwidth .*got None"),
    "bandwidth list": (call(LAPLACE, A, B, bandwidth=[2.0]), r"bandwidth .*got \[2.0\]"),
    "bandwidth bool tensor": (
        call(LAPLACE, A, B, bandwidth=torch.tensor(True)),
        "bandwidth must be real, .*torch.bool",
    ),
    "bandwidth complex tensor": (
        call(LAPLACE, A, B, bandwidth=torch.tensor(2j)),
        "bandwidth must be real, .*complex64",
    ),
    "p str": (call(NORM, A, B, p="2"), "p must be .*got '2'"),
    "p bool": (call(NORM, A, B, p=True), "p must be .*got True"),
    "p list": (call(NORM, A, B, p=[2]), r"p must be .*got \[2\]"),
    "p complex": (call(NORM, A, B, p=2 + 0j), "p must be .*2"),
    "unknown argument": (call(LAPLACE, A, B, bandwith=2.0), "bandwith .*takes bandwidth"),
    "row_offset float": (call(LAPLACE, A, B, bandwidth=1.0, row_offset=1.5), "row_offset .*1.5"),
    "col_offset None": (call(LAPLACE, A, B, bandwidth=1.0, col_offset=None), "col_offset .*None"),
    "row_offset list": (call(LAPLACE, A, B, bandwidth=1.0, row_offset=[1]), r"row_offset .*\[1\]"),
    "no descriptor": (call("laplace", A, B), "descriptor must be .*'laplace'"),
    "class as descriptor": (call(kl.Pairwise, A, B), "descriptor must be"),
    "cdist x1": (lambda: kl.cdist([1.0], B), "x1 must be a tensor, got list"),
    "cdist x2": (lambda: kl.cdist(A, "x2"), "x2 must be a tensor, got str"),
    "cdist x2 None": (lambda: kl.cdist(A, None), "x2 must be a tensor, got NoneType"),
    "cdist out": (lambda: kl.cdist(A, B, out=3), "out must be a tensor, got int"),
    "cdist p": (lambda: kl.cdist(A, B, "2"), "p must be .*got '2'"),
}

VALUE_ERRORS = {
    "a 1-D": (call(L1, rows(K), B), r"a must be .*got shape \(9,\)"),
    "a 4-D": (call(L1, rows(1, 1, M, K), B), r"a must be .*got shape \(1, 1, 5, 9\)"),
    "b 0-D": (call(L1, A, rows()), r"b must be .*got shape \(\)"),
    "features": (call(L1, A, rows(N, K + 1)), r"features, got \(5, 9\) and \(7, 10\)"),
    "b missing": (call(L1, A), "b is missing"),
    "b too many": (call(SYMMETRIC, A, A, bandwidth=1.0), "leave b out"),
    "devices": (call(L1, A, meta(N, K)), "a and b .*cpu and meta"),
    "devices turned": (call(L1, meta(M, K), B), "a and b .*meta and cpu"),
    "out's device": (call(L1, A, B, out=meta(M, N)), "out .*device cpu, got meta"),
    "bandwidth's device": (call(LAPLACE, A, B, bandwidth=meta()), "bandwidth is on meta, .*cpu"),
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
    "out turned": (call(L1, A, B, out=rows(N, M)), r"out must have .*\(5, 7\), got \(7, 5\)"),
    "out 1-D": (call(L1, A, B, out=rows(M * N)), r"out must have .*got \(35,\)"),
    "out 4-D": (call(L1, A, B, out=rows(1, 1, M, N)), r"out must have .*got \(1, 1, 5, 7\)"),
    "bandwidth 2-D": (call(LAPLACE, A, B, bandwidth=rows(1, 1)), r"bandwidth .*\(1, 1\)"),
    "bandwidth missing": (call(LAPLACE, A, B), "needs bandwidth"),
    "two missing": (call(PQ, A, B, p=1.0), "needs bandwidth, q"),
    "p missing": (call(NORM, A, B), r"needs p \(or inner_p\): run_kernel"),
    "outer_p missing": (call(BOTH, A, B, inner_p=2.0), "needs outer_p"),
    "inner_p missing": (call(BOTH, A, B, outer_p=2.0), r"needs p \(or inner_p\): run_kernel"),
    "p and inner_p": (call(BOTH, A, B, p=2.0, inner_p=2.0), "either p or them"),
    "p and outer_p": (call(BOTH, A, B, p=2.0, outer_p=2.0), "either p or them"),
    "p without Power": (call(L1, A, B, p=2.0), r"p needs inner=Power\(\)"),
    "inner_p without Power": (call(L1, A, B, inner_p=2.0), r"inner_p needs inner=Power\(\)"),
    "outer_p without Power": (call(NORM, A, B, inner_p=2.0, outer_p=2.0), "outer_p needs outer"),
    "epsilon alone": (call(L1, A, B, epsilon=0.1), "epsilon needs an epilogue"),
    "regularization alone": (call(L1, A, B, regularization=0.1), "regularization needs an epi"),
    "bandwidth 0": (call(LAPLACE, A, B, bandwidth=0), "bandwidth must be greater than 0, got 0"),
    "bandwidth -1": (call(LAPLACE, A, B, bandwidth=-1.5), "bandwidth .*got -1.5"),
    "bandwidth nan": (call(LAPLACE, A, B, bandwidth=float("nan")), "bandwidth .*got nan"),
    "q 0": (call(PQ, A, B, p=1.0, bandwidth=1.0, q=0), "q must be greater than 0, got 0"),
    "alpha -1": (
        call(kl.rational_quadratic(), A, B, bandwidth=1.0, alpha=Fraction(-1, 2)),
        "alpha must be greater than 0, got -0.5",
    ),
    "p -1": (call(NORM, A, B, p=-1), "p must be 0 or greater .*got -1"),
    "p nan": (call(NORM, A, B, p=float("nan")), "p must be 0 or greater .*got nan"),
    "p np -1": (call(NORM, A, B, p=np.float32(-1)), "p must be 0 or greater .*got -1"),
    "p beyond floats": (call(NORM, A, B, p=10**400), "p must fit a float64"),
    "p tensor -1": (call(NORM, A, B, p=torch.tensor([-1.0])), "p must be 0 or greater .*got -1"),
    "inner_p -1": (call(NORM, A, B, inner_p=-1), "inner_p must be 0 or greater .*got -1"),
    "outer_p nan": (call(BOTH, A, B, inner_p=1.0, outer_p=float("nan")), "outer_p .*nan"),
    "epsilon -1": (call(LAPLACE, A, B, bandwidth=1.0, epsilon=-1), "epsilon .*got -1"),
    "epsilon nan": (call(LAPLACE, A, B, bandwidth=1.0, epsilon=float("nan")), "epsilon .*nan"),
    "regularization nan": (
        call(LAPLACE, A, B, bandwidth=1.0, regularization=float("nan")),
        "regularization .*nan",
    ),
    "scale nan": (
        call(kl.l1_distance(epilogue=kl.Scale()), A, B, scale=float("nan")),
        "scale .*nan",
    ),
    "accumulate into nothing": (call(L1, A, B, accumulate=True), "accumulate=True .*no out"),
    "offsets of symmetric": (
        call(SYMMETRIC, A, bandwidth=1.0, row_offset=1),
        "row_offset == col_offset, got 1 and 0",
    ),
    "offset of many digits": (call(LAPLACE, A, B, bandwidth=1.0, row_offset=2**70), "row_offset"),
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
    "compute_mode": (lambda: kl.cdist(A, B, compute_mode="fast"), "compute_mode .*'fast'"),
    "cdist 1-D": (lambda: kl.cdist(A, rows(K)), r"x2 .*2 dimensions, got shape \(9,\)"),
    "cdist columns": (lambda: kl.cdist(A, rows(N, 2)), r"columns, got \(5, 9\) and \(7, 2\)"),
    "cdist batches": (lambda: kl.cdist(BATCH_A, rows(2, N, K)), r"broadcast: \(3,\), \(2,\)"),
    "cdist out": (lambda: kl.cdist(A, B, out=rows(N, M)), r"out .*\(5, 7\), got \(7, 5\)"),
    "cdist sums of inf": (lambda: kl.cdist(A, B, float("inf"), root=False), "p=inf"),
    "cdist p": (lambda: kl.cdist(A, B, -2), "p must be 0 or greater .*got -2"),
    "cdist batch of p": (lambda: kl.cdist(BATCH_A, B, rows(2)), "batches .*p: 2"),
    "cdist batches by p": (
        lambda: kl.cdist(rows(1, 1, M, K), B, rows(2)),
        "p of .*one batch",
    ),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_what_is_of_the_wrong_kind_is_a_type_error(case):
    run, message = TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=message):
        run()


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
def test_w14_out_must_not_share_memory_with_an_input(case):
    a, b, out, name = MEMORY[case](rows(20, 20))
    with pytest.raises(ValueError, match=f"out shares memory with {name};"):
        kl.run_kernel(L1, a, b, out=out)


APART = {
    "columns": lambda x: (x[:M, :K], x[:N, :K], x[:M, K : K + N]),
    "rows": lambda x: (x[:M, :K], x[M : M + N, :K], x[M + N : 2 * M + N, :N]),
    "every other": lambda x: (x[:M, ::2][:, :K], x[:N, ::2][:, :K], x[:M, 1::2][:, :N]),
}


@pytest.mark.parametrize("case", APART)
def test_w14_parts_of_one_tensor_that_share_nothing_are_fine(case):
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


def test_prepare_refuses_what_run_kernel_refuses():
    with pytest.raises(ValueError, match="needs bandwidth"):
        kl.prepare(LAPLACE, A, B)
    with pytest.raises(TypeError, match="a must be a tensor"):
        kl.prepare(LAPLACE, [1.0], B, bandwidth=1.0)

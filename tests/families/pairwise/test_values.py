"""The pairwise op on CPU tensors, against plain float64 expressions written here."""

import itertools
import math

import numpy as np
import pytest
import torch

import kernlib as kl
from tests.families.pairwise.cases import points

M, N, K, L = 5, 7, 9, 3
INNER = (kl.Identity(), kl.Abs(), kl.Square(), kl.Sqrt(), kl.Power())
OUTER = (kl.Identity(), kl.Abs(), kl.Square(), kl.Sqrt(), kl.Power())
KERNELS = (None, kl.Laplace(), kl.Gaussian())
INNER_P, OUTER_P, BANDWIDTH = 1.3, 0.7, 40.0
STAGES = {
    kl.Identity: lambda v, p: v,
    kl.Abs: lambda v, p: v.abs(),
    kl.Square: lambda v, p: v * v,
    kl.Sqrt: lambda v, p: v.sqrt(),
}


def oracle(op, inner, outer, kernel, a, b, inner_p=INNER_P, outer_p=OUTER_P, bandwidth=BANDWIDTH):
    a, b = a.double().unsqueeze(-2), b.double().unsqueeze(-3)
    v = b - a if op == "difference" else b * a
    s = (v.abs() ** inner_p if inner == kl.Power() else STAGES[type(inner)](v, None)).sum(-1)
    s = s**outer_p if outer == kl.Power() else STAGES[type(outer)](s, None)
    if kernel == kl.Laplace():
        return torch.exp(-s / bandwidth)
    return s if kernel is None else torch.exp(-s / (2 * bandwidth**2))


def arguments(inner, outer, kernel):
    given = {"inner_p": INNER_P} if inner == kl.Power() else {}
    given |= {"outer_p": OUTER_P} if outer == kl.Power() else {}
    return given | ({"bandwidth": BANDWIDTH} if kernel else {})


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("outer", OUTER, ids=str)
@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("op", ["difference", "dot"])
@pytest.mark.parametrize("sign", ["any", "positive"])
def test_every_combination_of_the_predecessor(op, inner, outer, kernel, sign):
    a, b = points(M, K), points(N, K, seed=1)
    if sign == "positive":  # so that the square roots have values
        a, b = a.abs(), b.abs() + (4 if op == "difference" else 0)
    descriptor = kl.Pairwise(op, inner, outer, kernel)
    found = kl.run_kernel(descriptor, a, b, **arguments(inner, outer, kernel))
    expected = oracle(op, inner, outer, kernel, a, b)
    assert (found.shape, found.dtype) == ((M, N), torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)
    if sign == "positive":
        assert not found.isnan().any()


VALUES = [0.8, 1.6, 2.4]
TENSORS = {
    "contiguous": lambda dtype: torch.tensor(VALUES, dtype=dtype),
    "strided": lambda dtype: torch.tensor([[x, -9.0] for x in VALUES], dtype=dtype)[:, 0],
    "offset": lambda dtype: torch.tensor([-9.0, *VALUES], dtype=dtype)[1:],
}
SCALARS = {
    "int": lambda: 2,
    "float": lambda: 2.0,
    "np.float32": lambda: np.float32(2),
    "np.int64": lambda: np.int64(2),
    "0-d": lambda: torch.tensor(2.0),
    "0-d int": lambda: torch.tensor(2),
    "(1,)": lambda: torch.tensor([2.0]),
    "(L,) expanded": lambda: torch.tensor(2.0).expand(L),
    "(1,) to (L,)": lambda: torch.tensor([2.0]).expand(L),
}
NAMES = ["p", "bandwidth", "q", "regularization", "epsilon"]
BASE = {"p": 1.2, "bandwidth": 5.0, "q": 0.9, "regularization": 0.25, "epsilon": 0.1}


def batched(**changes):
    return kl.run_kernel(kl.laplace_pq(), points(L, M, K), points(L, N, K), **(BASE | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", TENSORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_hyperparameters_equals_a_loop(name, layout, dtype):
    found = batched(**{name: TENSORS[layout](dtype)})
    for l, value in enumerate(VALUES):
        assert torch.allclose(found[l], batched(**{name: value})[l], rtol=1e-6), (name, l)
    assert not torch.allclose(found[0], batched(**{name: VALUES[1]})[0]) or name == "epsilon"


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_number_equals_a_float(name, kind):
    assert torch.equal(batched(**{name: SCALARS[kind]()}), batched(**{name: 2.0}))


@pytest.mark.parametrize("shapes", list(itertools.product([(), (1,), (L,)], repeat=2)))
def test_inputs_of_batch_one_broadcast(shapes):
    a, b = points(*shapes[0], M, K), points(*shapes[1], N, K)
    found = kl.run_kernel(kl.l1_distance(), a, b)
    assert found.shape == ((M, N) if shapes == ((), ()) else (L if (L,) in shapes else 1, M, N))
    torch.testing.assert_close(found, (b.unsqueeze(-3) - a.unsqueeze(-2)).abs().sum(-1))
    expanded = a.expand(L, M, K), b.expand(L, N, K)
    for l, entry in enumerate(kl.run_kernel(kl.l1_distance(), *expanded)):
        single = found if found.dim() == 2 else found[min(l, len(found) - 1)]
        assert torch.equal(entry, single)


def test_epsilon_is_for_magnitudes():
    a, b = torch.tensor([[1.0]]), torch.tensor([[-2.0], [-0.05], [0.05], [2.0], [math.nan]])
    descriptor = kl.dot_product(epilogue=kl.Laplace())
    found = kl.run_kernel(descriptor, a, b, bandwidth=1.0, epsilon=0.1)
    expected = torch.tensor([[2.0, 0.0, 0.0, -2.0, math.nan]]).exp()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (3, 0), (0, 4), (2, 5), (100, 0), (-2, 1)])
def test_a_block_finds_the_diagonal_of_the_whole(row, col, column_major):
    x = points(12, K)
    whole = kl.run_kernel(kl.laplace_l1(), x, x, bandwidth=4.0, regularization=0.5)
    rows, columns = x[max(row, 0) :][:5], x[max(col, 0) :][:6]
    out = torch.empty(len(columns), len(rows)).T if column_major else None
    found = kl.run_kernel(
        kl.laplace_l1(), rows, columns, out=out, bandwidth=4.0, regularization=0.5,
        row_offset=row, col_offset=col,
    )  # fmt: skip
    if row >= 0 and row < 12:
        assert torch.equal(found, whole[row : row + 5, col : col + 6])
    else:
        plain = kl.run_kernel(kl.laplace_l1(), rows, columns, bandwidth=4.0)
        m, n = (torch.arange(x) for x in found.shape)
        marked = m[:, None] + row == n[None] + col
        torch.testing.assert_close(found, plain + 0.5 * marked)


LAYOUTS = {
    "row": lambda x: x.clone(),
    "column": lambda x: x.mT.contiguous().mT,
    "padded": lambda x: torch.cat([x, x, x], -1)[..., : x.shape[-1]],
    "padded column": lambda x: torch.cat([x, x], -2).mT.contiguous().mT[..., : x.shape[-2], :],
    "offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "strided": lambda x: x.repeat_interleave(2, -1).repeat_interleave(3, -2)[..., ::3, ::2],
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("layout_b", LAYOUTS)
def test_every_layout_of_the_inputs_gives_the_contiguous_result(layout_a, layout_b):
    a, b = points(L, M, K), points(L, N, K)
    expected = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=5.0)
    found = kl.run_kernel(
        kl.laplace_l1(), LAYOUTS[layout_a](a), LAYOUTS[layout_b](b), bandwidth=5.0
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_any_layout_is_written_in_place_and_nowhere_else(layout, accumulate):
    a, b = points(L, M, K), points(L, N, K)
    out = LAYOUTS[layout](torch.full((L, M, N), 2.0))
    memory = out._base if out._base is not None else out
    before = memory.clone()
    found = kl.run_kernel(kl.l1_distance(), a, b, out=out, accumulate=accumulate)
    assert found is out
    expected = kl.run_kernel(kl.l1_distance(), a, b) + (2.0 if accumulate else 0.0)
    torch.testing.assert_close(out, expected)
    out.copy_(torch.full((L, M, N), 2.0))
    assert torch.equal(memory, before)


def test_points_expanded_along_every_dimension():
    a, b = torch.tensor([[[0.5]]]).expand(L, M, K), points(1, 1, K).expand(L, N, K)
    expected = kl.cdist(a.contiguous(), b.contiguous(), 1.0)
    assert torch.equal(kl.cdist(a, b, 1.0), expected)


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.3, 2, math.inf])
def test_no_features_is_a_sum_of_nothing(p):
    assert torch.equal(kl.cdist(torch.ones(M, 0), torch.ones(N, 0), p), torch.zeros(M, N))


def test_empties_are_defined():
    found = kl.run_kernel(
        kl.laplace_l1(), torch.ones(M, 0), torch.ones(N, 0), bandwidth=2.0, regularization=0.5
    )
    assert torch.equal(found, 1 + 0.5 * torch.eye(M, N))
    for m, n, batch in [(0, N, L), (M, 0, L), (0, 0, L), (M, N, 0)]:
        found = kl.run_kernel(
            kl.laplace_l1(), torch.ones(batch, m, K), torch.ones(batch, n, K), bandwidth=2.0
        )
        assert found.shape == (batch, m, n)
    assert kl.run_kernel(kl.l1_distance(), torch.ones(0, K), torch.ones(N, K)).shape == (0, N)
    assert kl.run_kernel(kl.power_sum(), points(M, K), points(N, K), p=torch.ones(0)).shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_half_types_are_computed_in_float32(dtype, out_dtype):
    a, b = points(M, 300, dtype=dtype), points(N, 300, dtype=dtype)
    exact = (b.double()[None] - a.double()[:, None]).abs().sum(-1)
    out = None if out_dtype is None else torch.empty(M, N, dtype=out_dtype)
    found = kl.run_kernel(kl.l1_distance(), a, b, out=out)
    assert found.dtype == (out_dtype or dtype)
    wanted = exact.to(found.dtype)
    torch.testing.assert_close(
        found, wanted, rtol=1e-5 if out_dtype else None, atol=None if not out_dtype else 0
    )


def test_half_sums_are_accumulated_before_they_are_rounded():
    a, b = (
        torch.full((1, 1), 1.0, dtype=torch.float16),
        torch.full((1, 1), 0.0, dtype=torch.float16),
    )
    out = torch.full((1, 1), 2048.0, dtype=torch.float16)
    kl.run_kernel(kl.l1_distance(), a, b, out=out, accumulate=True)
    assert out.item() == 2048  # 2049 rounds to even
    kl.run_kernel(kl.l1_distance(), 3 * a, b, out=out, accumulate=True)
    assert out.item() == 2052  # 2051 rounds up; 2048 + 3 in half types would too, 2049 + 3 not


SYMMETRIC = [
    (kl.l1_distance, {}),
    (kl.gaussian, {"bandwidth": 3.0, "regularization": 0.1}),
    (kl.dot_product, {}),
    (kl.laplace_pq, {"p": 1.3, "q": 0.8, "bandwidth": 2.0}),
]


@pytest.mark.parametrize(("build", "given"), SYMMETRIC)
def test_symmetric_is_the_full_matrix_of_one_input(build, given):
    a = points(L, M, K)
    found = kl.run_kernel(build(symmetric=True), a, **given)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found, kl.run_kernel(build(), a, a, **given))


def test_a_nan_in_the_inputs_is_never_lost():
    a, b = points(M, K), points(N, K)
    a[1, K - 1], b[2, 0] = math.nan, math.nan
    lost = torch.zeros(M, N, dtype=torch.bool)
    lost[1], lost[:, 2] = True, True
    for p in (0.5, 1, 1.3, 2, 3, math.inf):
        assert torch.equal(kl.cdist(a, b, p).isnan(), lost), p


def test_a_negated_view_is_read_with_its_sign():
    a = torch.view_as_complex(points(M, K, 2)).conj().imag
    assert a.is_neg()
    assert torch.equal(kl.cdist(a, points(N, K), 1.0), kl.cdist(a.clone(), points(N, K), 1.0))


def test_custom_epilogues_take_their_parameters_by_name():
    epilogue = (kl.Scale("gain"), kl.Custom("tanh(v) + shift", ("shift",)))
    a, b = points(M, K), points(N, K)
    found = kl.run_kernel(kl.l1_distance(epilogue=epilogue), a, b, shift=0.5, gain=0.1)
    torch.testing.assert_close(found, torch.tanh(0.1 * kl.cdist(a, b, 1.0)) + 0.5)


@pytest.mark.parametrize("rows", [1, 600, 1000])
def test_more_points_than_one_block_of_the_reference_holds(rows):
    a, b = points(rows, 3), points(2100, 3)
    torch.testing.assert_close(kl.cdist(a, b, 1.0), torch.cdist(a, b, 1.0))


def test_a_default_device_of_torch_changes_nothing():
    x, y = torch.randn(5, 3), torch.randn(4, 3)
    symmetric = kl.gaussian(symmetric=True)
    wanted = kl.cdist(x, y), kl.run_kernel(symmetric, x, bandwidth=2.0)
    with torch.device("meta"):
        found = kl.cdist(x, y), kl.run_kernel(symmetric, x, bandwidth=2.0)
    assert all(map(torch.equal, found, wanted))

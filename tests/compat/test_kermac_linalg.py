"""kermac's solvers: rows as right-hand sides, on CPU tensors against torch.linalg in float64."""

import pytest
import torch

from kernlib.compat import kermac
from kernlib.compat.kermac import FillMode

N, C, L = 6, 3, 4


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def positive(*batch):
    a = draw(*batch, N, N)
    return a @ a.mT + N * torch.eye(N, dtype=a.dtype)


def laid(t, layout):
    """The same values, row- or column-major, packed or padded."""
    if "column" in layout:
        return laid(t.mT, layout.replace("column", "row")).mT
    if "padded" not in layout:
        return t.clone(memory_format=torch.contiguous_format)
    big = torch.full((*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3), 7.0, dtype=t.dtype)
    big[..., : t.shape[-2], : t.shape[-1]] = t
    return big[..., : t.shape[-2], : t.shape[-1]]


LAYOUTS = ("row", "column", "row padded", "column padded")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (L,)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_cholesky_solves_for_rows(layout, batch, overwrite):
    a, b = positive(*batch), draw(*batch, C, N, seed=1)
    expected = torch.linalg.solve(a, b.mT).mT
    given, rows = laid(a, layout), laid(b, layout)
    x, factored, solved = kermac.solve_cholesky(
        given, rows, overwrite_a=overwrite, overwrite_b=overwrite
    )
    assert x.shape == b.shape
    torch.testing.assert_close(x, expected)
    for info in (factored, solved):
        assert info.shape == (*(batch or (1,)),) and info.dtype == torch.int32 and not info.any()
    if overwrite:
        torch.testing.assert_close(rows, expected)
    else:
        assert torch.equal(given, a) and torch.equal(rows, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fill_mode", FillMode)
def test_the_other_triangle_is_not_read(layout, fill_mode):
    a, b = positive(), draw(C, N, seed=1)
    upper = fill_mode is FillMode.UPPER
    other = torch.full_like(a, 100.0)
    given = laid(a.triu() + other.tril(-1) if upper else a.tril() + other.triu(1), layout)
    x = kermac.solve_cholesky(given, b, fill_mode)[0]
    torch.testing.assert_close(x, torch.linalg.solve(a, b.mT).mT)
    w, vectors, _ = kermac.eigh(given, fill_mode)
    torch.testing.assert_close(vectors @ w.diag() @ vectors.mT, a)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (L,)])
def test_lu_solves_one_system_in_every_layout(layout, batch):
    a, b = draw(*batch, N, N), draw(*batch, C, N, seed=1)
    x, factored, solved = kermac.solve_lu(laid(a, layout), laid(b, layout))
    torch.testing.assert_close(x @ a, b)
    assert factored.shape == solved.shape == (*(batch or (1,)),)


@pytest.mark.parametrize("solve", [kermac.solve_cholesky, kermac.solve_lu])
def test_batches_broadcast(solve):
    a, b = positive(L), draw(C, N, seed=1)
    assert solve(a, b)[0].shape == (L, C, N)
    torch.testing.assert_close(solve(a, b)[0] @ a, b.expand(L, -1, -1))
    assert solve(a[0], b.expand(L, -1, -1))[0].shape == (L, C, N)
    square = positive(N)  # a batch as long as the matrices: rows are no vectors
    torch.testing.assert_close(solve(square, draw(N, N))[0] @ square, draw(N, N).expand(N, -1, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eigenvectors_are_columns_in_every_layout(layout):
    a = positive(L)
    w, vectors, info = kermac.eigh(laid(a, layout))
    assert w.shape == (L, N) and vectors.shape == (L, N, N) and info.shape == (L,)
    torch.testing.assert_close(w, torch.linalg.eigvalsh(a))
    torch.testing.assert_close(a @ vectors, vectors * w[:, None])
    w, vectors, info = kermac.eigh(laid(a[0], layout))
    assert w.shape == (N,) and vectors.shape == (N, N) and info.shape == (1,)
    torch.testing.assert_close(a[0] @ vectors, vectors * w)


def test_failures_are_in_the_infos_or_raised():
    a = positive(L)
    a[1] = -a[1]
    b = draw(L, C, N, seed=1)
    _, info, _ = kermac.solve_cholesky(a, b)
    assert (info != 0).tolist() == [False, True, False, False]
    for error in (torch.linalg.LinAlgError, ValueError):  # the second is kermac's
        with pytest.raises(error, match="batch entry 1"):
            kermac.solve_cholesky(a, b, check_errors=True)
        with pytest.raises(error, match="batch entry 2"):
            kermac.eigh(torch.where(torch.arange(L)[:, None, None] == 2, torch.nan, a),
                        check_errors=True)  # fmt: skip
    a[2] = 0
    assert kermac.solve_lu(a, b)[1].bool().tolist() == [False, False, True, False]


def test_what_is_refused():
    a, b = positive(), draw(C, N)
    with pytest.raises(TypeError, match="fill_mode must be a FillMode, got 'L'"):
        kermac.solve_cholesky(a, b, "L")
    with pytest.raises(ValueError, match="b must have 2 or 3 dimensions"):
        kermac.solve_lu(a, b[0])
    with pytest.raises(ValueError, match="a must have 2 or 3 dimensions"):
        kermac.eigh(a[None, None])
    with pytest.raises(TypeError, match="a must be a tensor"):
        kermac.solve_lu([1.0], b)
    with pytest.raises(ValueError, match=r"overwrite_a|overlap"):
        kermac.solve_cholesky(a.expand(L, N, N), b.expand(L, C, N), overwrite_a=True)

"""Direct solvers and eigh: values in every layout, in place, infos, and what is refused."""

import importlib.util
import threading
import time
from functools import partial

import pytest
import torch

from kernlib import linalg
from kernlib.linalg import cusolver, dense, layouts, native
from tests.linalg import hostile
from tests.linalg.cases import (
    LAYOUTS,
    check_eigh,
    check_solution,
    laid_out,
    one_triangle,
    positive,
)

DTYPES = (torch.float32, torch.float64)
SHAPES = (((), 1, 1), ((), 7, 3), ((3,), 7, 1), ((100,), 7, 2), ((2, 3), 5, 4), ((), 65, 9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", ["lu", "lower", "upper"])
def test_solutions_in_every_layout(dtype, layout, overwrite, way, seed):
    for batch, n, columns in SHAPES:
        values, b = positive(*batch, n, n, dtype=dtype), torch.randn(*batch, n, columns).to(dtype)
        options = {"overwrite_a": overwrite, "overwrite_b": overwrite}
        if way == "lu":
            values = torch.randn(*batch, n, n).to(dtype) + 2 * torch.eye(n, dtype=dtype)
            solve, read = linalg.solve_lu, values
        else:
            options["upper"] = way == "upper"
            solve, read = linalg.solve_cholesky, one_triangle(values, options["upper"])
        a, right = laid_out(read, layout), laid_out(b, LAYOUTS[seed % 5])
        kept = a.clone(), right.clone()
        x, info, solved = solve(a, right, **options)
        check_solution(values, x, b)
        assert info.dtype == solved.dtype == torch.int32
        assert info.shape == solved.shape == batch and not info.any() and not solved.any()
        _check_memory(a, right, x, kept, overwrite)
        if overwrite and way != "lu":
            half = a.triu().mT if way == "upper" else a.tril()
            assert torch.allclose(half @ half.mT, values, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_eigh(dtype, layout, overwrite, upper, seed):
    for batch, n, _ in SHAPES:
        values = positive(*batch, n, n, dtype=dtype)
        a = laid_out(one_triangle(values, upper), layout)
        kept = a.clone()
        w, v, info = linalg.eigh(a, upper=upper, overwrite_a=overwrite)
        check_eigh(values, w, v)
        assert v.shape == a.shape and w.shape == a.shape[:-1]
        assert info.shape == batch and info.dtype == torch.int32 and not info.any()
        if overwrite:
            assert v.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        else:
            assert torch.equal(a.nan_to_num(7), kept.nan_to_num(7))


def test_padding_is_left_alone(seed):
    values = positive(3, 6, 6, dtype=torch.float32)
    memory = torch.full((3, 9, 11), torch.nan)
    a = memory[:, :6, :6].copy_(values)
    linalg.solve_cholesky(a, torch.randn(3, 6, 2), overwrite_a=True)
    a.fill_(0)
    assert memory.isnan().sum() == 3 * (9 * 11 - 36)


@pytest.mark.parametrize(
    ("of_a", "of_b"), [((), (4,)), ((4,), ()), ((1,), (5,)), ((2, 1), (1, 3)), ((2, 3), (3,))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_broadcast(of_a, of_b, layout, seed):
    n, batch = 6, torch.broadcast_shapes(of_a, of_b)
    general = torch.randn(*of_a, n, n) + 2 * torch.eye(n)
    spd, b = positive(*of_a, n, n, dtype=torch.float32), torch.randn(*of_b, n, 2)
    for solve, values in ((linalg.solve_lu, general), (linalg.solve_cholesky, spd)):
        x, info, solved = solve(laid_out(values, layout), laid_out(b, layout))
        assert x.shape == (*batch, n, 2) and info.shape == solved.shape == batch
        check_solution(values.expand(*batch, n, n), x, b.expand(*batch, n, 2))


def test_one_matrix_for_many_in_place(seed):
    a = torch.randn(6, 6) + 2 * torch.eye(6)
    for layout in LAYOUTS:
        b = torch.randn(4, 6, 2)
        memory = laid_out(b, layout)
        x = linalg.solve_lu(a, memory, overwrite_b=True)[0]
        assert torch.equal(x, memory)
        check_solution(a.expand(4, 6, 6), x, b)


def test_an_expanded_batch_may_be_read():
    a = positive(5, 5, dtype=torch.float64).expand(3, 5, 5)
    b = torch.randn(5, 2, dtype=torch.float64).expand(3, 5, 2)
    check_solution(a, linalg.solve_cholesky(a, b)[0], b)


def test_vectors_as_torch_has_them(seed):
    wide = partial(torch.randn, dtype=torch.float64)  # for systems that are all but singular
    for a_shape, b_shape in (((5, 5), (5,)), ((3, 5, 5), (3, 5)), ((3, 5, 5), (5,))):
        a, b = wide(*a_shape) + 2 * torch.eye(5), wide(*b_shape)
        wanted = torch.linalg.solve(a, b.expand(a_shape[:-1]))
        assert torch.allclose(linalg.solve_lu(a, b)[0], wanted, atol=1e-4)
    a, b = wide(5, 5, 5) + 2 * torch.eye(5), wide(5, 5)
    assert torch.allclose(linalg.solve_lu(a, b)[0], torch.linalg.solve(a, b), atol=1e-4)
    x, *_ = linalg.solve_lu(a, b, overwrite_b=True)
    assert x.data_ptr() == b.data_ptr() and x.shape == b.shape


@pytest.mark.parametrize("n", [5, 200])
def test_eigh_of_nan_is_an_info(n):
    a = positive(2, n, n, dtype=torch.float32)
    a[1, 0, 0] = torch.nan
    w, v, info = linalg.eigh(a)
    assert info[0] == 0 and info[1] > 0
    assert w[1].isnan().all() and v[1].isnan().all()
    check_eigh(a[0], w[0], v[0])


class AsCuSolver:
    """Steps that read NaN as 0 by LU, and as a positive pivot otherwise, without an info."""

    lu_solve, cholesky_solve = staticmethod(native.lu_solve), staticmethod(native.cholesky_solve)

    @staticmethod
    def lu(a):
        return native.lu(a.nan_to_num_())

    @staticmethod
    def cholesky(a, upper):
        info = native.cholesky(a, upper)
        reached = torch.arange(a.shape[-1]) >= info[:, None] - 1
        a.diagonal(dim1=-2, dim2=-1).masked_fill_(reached & (info > 0)[:, None], torch.nan)
        return info.zero_()


@pytest.mark.few(100)
@pytest.mark.parametrize("steps", [native, AsCuSolver])
@pytest.mark.parametrize(("n", "batch"), [(1, ()), (8, ()), (200, ()), (1, (3,)), (8, (3,))])
def test_nan_in_a_matrix_is_an_info_and_nan(n, batch, steps, monkeypatch):
    monkeypatch.setattr(dense, "steps_for", lambda *_: steps)
    monkeypatch.setattr(dense, "lu_steps_for", lambda *_: steps)
    hostile.check_nan(n, batch, torch.float64, "cpu")


@pytest.mark.few(100)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_torch_may_round_to_tf32_it_is_given_in_float64(batch, overwrite, monkeypatch, seed):
    """Without cuSOLVER: on GPUs torch's factors by LU and its solutions follow the setting."""
    monkeypatch.setattr(native, "rounds", lambda t: t.dtype is torch.float32)
    for name in ("solve_triangular", "lu_factor_ex", "lu_solve"):
        monkeypatch.setattr(torch.linalg, name, rounded(getattr(torch.linalg, name)))
    a, b = torch.randn(*batch, 40, 40), torch.randn(*batch, 40, 3)
    spd = positive(*batch, 40, 40, dtype=torch.float32)
    both = {"overwrite_a": overwrite, "overwrite_b": overwrite}
    check_solution(a, linalg.solve_lu(a.clone(), b.clone(), **both)[0], b)
    check_solution(a, linalg.solve_lu(a.mT.clone().mT, b.clone(), **both)[0], b)
    for upper in (False, True):
        x = linalg.solve_cholesky(one_triangle(spd, upper), b.clone(), upper=upper, **both)[0]
        check_solution(spd, x, b)


def rounded(function):
    """With the first operand, if it is float32, without the last 13 bits, as TF32 has it."""

    def call(first, *rest, **options):
        if first.dtype is torch.float32:
            first.copy_((first.view(torch.int32) & -(1 << 13)).view(torch.float32))
        return function(first, *rest, **options)

    return call


def test_errors_on_request():
    a, b = torch.eye(4).repeat(3, 1, 1), torch.ones(3, 4, 1)
    a[1, 2, 2] = 0
    for solve in (linalg.solve_lu, linalg.solve_cholesky):
        with pytest.raises(torch.linalg.LinAlgError, match=r"batch entry 1: a is .* 3 is"):
            solve(a, b, check_errors=True)
        with pytest.raises(torch.linalg.LinAlgError, match=r"^solve_\w+: a is"):
            solve(a[1], b[1], check_errors=True)
        solve(a[::2], b[::2], check_errors=True)
    a[0, 0, 0] = torch.nan
    with pytest.raises(torch.linalg.LinAlgError, match=r"eigh: batch entry 0: .*converge"):
        linalg.eigh(a, check_errors=True)


def test_empty():
    for solve in (linalg.solve_lu, linalg.solve_cholesky):
        for a, b in (((0, 0), (0, 3)), ((0, 5, 5), (0, 5, 2)), ((2, 0, 0), (2, 0, 1))):
            x, info, solved = solve(torch.ones(a), torch.ones(b), check_errors=True)
            assert x.shape == b and info.shape == solved.shape == a[:-2]
        assert solve(torch.eye(3), torch.ones(3, 0))[0].shape == (3, 0)
    w, v, info = linalg.eigh(torch.ones(2, 0, 0))
    assert w.shape == (2, 0) and v.shape == (2, 0, 0) and info.tolist() == [0, 0]


def test_what_is_refused():
    a, b = torch.eye(4), torch.ones(4, 2)
    for solve in (linalg.solve_lu, linalg.solve_cholesky):
        with pytest.raises(TypeError, match=r"b must be torch.float32"):
            solve(a, b.double())
        with pytest.raises(ValueError, match="a must be square"):
            solve(a[:3], b)
        with pytest.raises(ValueError, match="b must be"):
            solve(a, b[:3])
        with pytest.raises(ValueError, match="do not broadcast"):
            solve(a.expand(2, 4, 4), b.expand(3, 4, 2))
        with pytest.raises(ValueError, match="a overlaps itself"):
            solve(a.expand(2, 4, 4), b, overwrite_a=True)
        with pytest.raises(ValueError, match="b overlaps itself"):
            solve(a, b.expand(2, 4, 2), overwrite_b=True)
        with pytest.raises(ValueError, match="overwrite_b needs b of the batch"):
            solve(a.repeat(3, 1, 1), b, overwrite_b=True)
        with pytest.raises(ValueError, match="b shares memory with a"):
            solve(a, a[:, :2], overwrite_b=True)
        with pytest.raises(RuntimeError, match="b requires a gradient"):
            solve(a, b.clone().requires_grad_())
    with pytest.raises(ValueError, match="a must be square"):
        linalg.eigh(torch.ones(3))
    with pytest.raises(ValueError, match="a overlaps itself"):
        linalg.eigh(a.expand(2, 4, 4), overwrite_a=True)


def test_matrices_side_by_side_do_not_share_memory():
    memory = torch.randn(4, 10)
    a = memory[:, :4].copy_(positive(4, 4, dtype=torch.float32))
    b = memory[:, 4:].clone()
    x = linalg.solve_cholesky(a, memory[:, 4:], overwrite_b=True)[0]
    check_solution(a, x, b)


def test_a_gradient_is_no_matter_where_none_is_recorded():
    a = torch.eye(3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(linalg.solve_lu(a, torch.ones(3))[0], torch.ones(3))


def test_versions_count_what_is_overwritten():
    a, b = torch.eye(3), torch.ones(3)
    before = a._version, b._version
    linalg.solve_lu(a, b, overwrite_a=True, overwrite_b=True)
    assert a._version > before[0] and b._version > before[1]


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr(cusolver, "import_error", lambda: ImportError("no module nvmath"))
    assert dense.steps_for(torch.eye(3)[None].mT, True) is native
    said = r"eigh .*\[linalg\]. in the checkout"
    with pytest.raises(linalg.MissingExtraError, match=said) as caught:
        cusolver.require("eigh here")
    assert isinstance(caught.value, ImportError)


def test_addresses_of_a_batch():
    batch = torch.zeros(4, 3, 5)[::2, :, :2]
    step = batch.stride(0) * 4
    wanted = [batch.data_ptr(), batch.data_ptr() + step]
    assert cusolver.entry_addresses(batch) == wanted == cusolver.address_array(batch).tolist()
    one = torch.zeros(1, 3, 3).expand(2, 3, 3)
    assert cusolver.address_array(one).tolist() == [one.data_ptr()] * 2


def test_leading_dimensions():
    padded = torch.zeros(5, 8)[:3, :6].mT
    assert layouts.is_column_major(padded) and layouts.leading_dimension(padded) == 8
    assert not layouts.is_column_major(padded.mT)
    assert layouts.leading_dimension(torch.zeros(4, 1)) == 4
    assert not layouts.is_column_major(torch.zeros(2, 6).as_strided((3, 3), (1, 2)))


def test_torch_loads_its_part_for_gpus_once(monkeypatch):
    found = importlib.util.find_spec("kernlib.linalg.native")
    fresh = importlib.util.module_from_spec(found)
    found.loader.exec_module(fresh)
    made, gpu = [], torch.device("cuda")
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: None)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: made.append(time.sleep(0.01)))
    fresh.load(torch.device("cpu"))
    assert not made
    threads = [threading.Thread(target=fresh.load, args=(gpu,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def _check_memory(a, b, x, kept, overwrite: bool) -> None:
    if overwrite:
        assert x.data_ptr() == b.data_ptr() and torch.equal(x, b)
    else:
        assert torch.equal(a.nan_to_num(7), kept[0].nan_to_num(7)) and torch.equal(b, kept[1])


# Batches that libraries of CUDA do not take whole.


@pytest.fixture
def parts(monkeypatch):
    """The numbers of matrices in each part of a batch, which has at most three."""
    monkeypatch.setattr(layouts, "MOST", 3)
    monkeypatch.setattr(layouts, "is_limited", lambda t: True)
    counts = []

    def cholesky(a, upper, whole=native.cholesky):
        counts.append(a.shape[0])
        return whole(a, upper)

    monkeypatch.setattr(native, "cholesky", cholesky)
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_large_batches_are_solved_in_parts(parts, layout, overwrite):
    values, b = positive(2, 4, 5, 5, dtype=torch.float64), torch.randn(2, 4, 5, 3).double()
    values[1, 2, :, 0] = values[1, 2, 0] = 0  # singular, and positive no more
    good = torch.ones(2, 4, dtype=torch.bool)
    good[1, 2] = False
    options = {"overwrite_a": overwrite, "overwrite_b": overwrite}
    for solve in (linalg.solve_cholesky, linalg.solve_lu):
        a, right = laid_out(values, layout), laid_out(b, layout)
        x, info, _ = solve(a, right, **options)
        check_solution(values[good], x[good], b[good])
        assert torch.equal(info == 0, good) and x[1, 2].isnan().all()
        assert (x.data_ptr() == right.data_ptr()) is overwrite
        assert overwrite or (torch.equal(a, values) and torch.equal(right, b))
    a = laid_out(values, layout)
    w, v, info = linalg.eigh(a, overwrite_a=overwrite)
    check_eigh(values, w, v)
    assert info.shape == (2, 4) and not info.any()
    assert parts == [3, 3, 2]


def test_large_batches_of_factors_are_solved_in_parts(parts):
    factors = [positive(2, 4, n, n, dtype=torch.float64).requires_grad_() for n in (3, 2)]
    b = torch.randn(2, 4, 6, 2, dtype=torch.float64)
    flat = zip(*(factor.flatten(0, 1) for factor in factors), strict=True)
    whole = torch.stack([torch.kron(*pair) for pair in flat]).view(2, 4, 6, 6)
    for cholesky in (False, True):
        assert torch.allclose(linalg.kron_solve(factors, b, cholesky=cholesky), whole.inverse() @ b)
    roots = linalg.kron_cholesky(factors)
    for factor, root, inverse in zip(factors, roots, linalg.kron_inverse(factors), strict=True):
        assert torch.allclose(root @ root.mT, factor) and torch.allclose(inverse, factor.inverse())
    pair = linalg.kron_logdet(factors), whole.logdet()
    assert torch.allclose(*pair)
    assert torch.allclose(*(torch.autograd.grad(t.sum(), factors[0])[0] for t in pair))

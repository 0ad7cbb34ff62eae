"""The solvers on a GPU: both routes, every layout, infos, no host synchronisation, in place."""

import threading

import pytest
import torch

import kernlib as kl
from kernlib import linalg
from kernlib.linalg import cusolver, dense, native
from tests.gpu.watched import nothing_waits, peak
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
SHAPES = (((), 1, 1), ((), 300, 3), ((100,), 7, 2), ((3,), 130, 1), ((2,), 600, 5))


@pytest.fixture(params=["native", "cusolver"])
def route(request, monkeypatch):
    """Each of the two ways, whichever a call would take."""
    if request.param == "cusolver":
        pytest.importorskip("nvmath.bindings.cusolverDn", exc_type=ImportError)
    module = {"native": native, "cusolver": cusolver}[request.param]
    monkeypatch.setattr(dense, "steps_for", lambda *_: module)
    monkeypatch.setattr(dense, "lu_steps_for", lambda *_: module)
    monkeypatch.setattr(dense, "eigh_steps_for", lambda matrix: module)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_values_in_every_layout(route, dtype, layout, overwrite, device, seed):
    for batch, n, columns in SHAPES:
        upper = bool((seed + n) % 2)
        spd = positive(*batch, n, n, dtype=dtype, device=device)
        general = torch.randn(*batch, n, n, dtype=dtype, device=device)
        b = torch.randn(*batch, n, columns, dtype=dtype, device=device)
        both = {"overwrite_a": overwrite, "overwrite_b": overwrite}
        right = laid_out(b, layout)
        a = laid_out(one_triangle(spd, upper), layout)
        x, info, _ = linalg.solve_cholesky(a, right, upper=upper, **both)
        check_solution(spd, x, b)
        assert info.shape == batch and not info.any()
        right = laid_out(b, layout)
        x, info, _ = linalg.solve_lu(laid_out(general, layout), right, **both)
        check_solution(general, x, b)
        assert torch.equal(x, right) or not overwrite
        a = laid_out(one_triangle(spd, upper), layout)
        w, v, info = linalg.eigh(a, upper=upper, overwrite_a=overwrite)
        check_eigh(spd, w, v, rough=route == "native")
        assert not info.any()


@pytest.mark.parametrize("n", [6, 520])
def test_batches_broadcast(route, n, device, seed):
    for of_a, of_b in (((), (4,)), ((3,), ()), ((2, 1), (1, 3))):
        batch = torch.broadcast_shapes(of_a, of_b)
        a = torch.randn(*of_a, n, n, device=device)
        spd = positive(*of_a, n, n, dtype=torch.float32, device=device)
        b = torch.randn(*of_b, n, 2, device=device)
        for solve, values in ((linalg.solve_lu, a), (linalg.solve_cholesky, spd)):
            check_solution(values.expand(*batch, n, n), solve(values, b)[0], b.expand(*batch, n, 2))


@pytest.mark.parametrize("n", [5, 600])
def test_failures_are_infos_and_nan(route, n, device, seed):
    a = positive(3, n, n, dtype=torch.float32, device=device)
    b = torch.randn(3, n, 2, device=device)
    a[1] *= -1
    x, info, _ = linalg.solve_cholesky(a, b)
    assert info.tolist() == [0, 1, 0] and x[1].isnan().all() and x[::2].isfinite().all()
    singular = torch.randn(3, n, n, device=device)
    singular[2] = 0
    x, info, _ = linalg.solve_lu(singular, b)
    assert info[2] > 0 and not info[:2].any() and x[2].isnan().all() and x[:2].isfinite().all()
    with pytest.raises(torch.linalg.LinAlgError, match="batch entry 2"):
        linalg.solve_lu(singular, b, check_errors=True)


@pytest.mark.few(100)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("n", [1, 5, 33, 130, 512, 600])
def test_nan_in_a_matrix_is_an_info_and_nan(route, n, batch, dtype, device):
    hostile.check_nan(n, batch, dtype, device)


@pytest.mark.few(100)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("n", [5, 33, 130, 600])
def test_nan_in_a_factor_is_nan_and_an_error(n, batch, device, seed):
    b = torch.randn(n, device=device)
    of_lu = [
        lambda f, **options: linalg.kron_solve(f, b, **options),
        lambda f, **options: linalg.kron_inverse(f, **options)[0],
        linalg.kron_logdet,
    ]
    others = [
        lambda f, **options: linalg.kron_solve(f, b, cholesky=True, **options),
        lambda f, **options: linalg.kron_solve(f, b, noise=0.5, **options),
        lambda f, **options: linalg.kron_cholesky(f, **options)[0],
        lambda f, **options: linalg.kron_logdet(f, noise=0.5, **options),
    ]
    for row, column in ((0, 0), (n - 1, n - 1), (n // 2, n // 3), (0, n - 1)):
        factor = positive(*batch, n, n, dtype=torch.float32, device=device)
        (factor[1] if batch else factor)[row, column] = torch.nan
        wanted = [False, True, False] if batch else [True]
        for call in of_lu + others * (row >= column):
            found = call([factor]).reshape(len(wanted), -1)
            assert found.isnan().any(-1).tolist() == wanted
            with pytest.raises(torch.linalg.LinAlgError, match=r"factors\[0\]: "):
                call([factor], check_errors=True)


@pytest.mark.parametrize(("batch", "n"), [((), 64), ((20,), 7), ((2,), 600), ((), 1000)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_synchronises(batch, n, layout, device):
    pytest.importorskip("nvmath.bindings.cusolverDn", exc_type=ImportError)
    spd = positive(*batch, n, n, dtype=torch.float32, device=device)
    b = torch.randn(*batch, n, 3, device=device)

    def calls():
        for overwrite in (False, True):
            both = {"overwrite_a": overwrite, "overwrite_b": overwrite}
            linalg.solve_cholesky(laid_out(spd, layout), laid_out(b, layout), **both)
            linalg.solve_lu(laid_out(spd, layout), laid_out(b, layout), **both)
            linalg.eigh(laid_out(spd, layout), overwrite_a=overwrite)

    calls()  # handles are made by the first
    with nothing_waits():
        calls()


@pytest.mark.parametrize(("batch", "n"), [((), 64), ((), 300), ((50,), 7), ((32,), 128)])
def test_the_host_goes_on_while_the_device_is_busy(batch, n, device):
    """Waits inside of a library, which torch's debug mode does not see."""
    pytest.importorskip("nvmath.bindings.cusolverDn", exc_type=ImportError)
    spd = positive(*batch, n, n, dtype=torch.float32, device=device)
    b = torch.randn(*batch, n, 3, device=device)
    calls = {
        "cholesky": lambda: linalg.solve_cholesky(spd, b),
        "lu": lambda: linalg.solve_lu(spd, b),
        "eigh": lambda: linalg.eigh(spd),
    }
    for call in calls.values():
        call()  # handles are made by the first
    for name, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # half a second
        call()
        assert not torch.cuda.current_stream().query(), name
        torch.cuda.synchronize()


def test_a_padded_matrix_is_factored_where_it_lies(device):
    pytest.importorskip("nvmath.bindings.cusolverDn", exc_type=ImportError)
    n = 4000
    a = torch.zeros(n, n + 64, device=device)[:, :n]
    a.diagonal().fill_(2.0)
    b = torch.randn(3, n, device=device).mT
    linalg.solve_cholesky(a[:64, :64], b[:64].clone(), overwrite_a=True)
    _, most = peak(lambda: linalg.solve_cholesky(a, b, overwrite_a=True, overwrite_b=True))
    assert most < n * n  # a quarter of the matrix


@pytest.fixture
def tf32_permitted():
    """Not by monkeypatch, which deletes what torch.backends has no attribute of its own for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("extra", ["there", "missing"])
def test_tf32_stays_out_of_it(extra, device, seed, tf32_permitted, monkeypatch):
    if extra == "there":
        pytest.importorskip("nvmath.bindings.cusolverDn", exc_type=ImportError)
    else:
        monkeypatch.setattr(cusolver, "import_error", ImportError)
    for batch in ((), (20,)):
        for n in (200, 600):
            a = torch.randn(*batch, n, n, device=device)
            spd = positive(*batch, n, n, dtype=torch.float64).to(device, torch.float32)
            b = torch.randn(*batch, n, 50, device=device)
            check_solution(a, linalg.solve_lu(a, b)[0], b)
            for upper in (False, True):
                x = linalg.solve_cholesky(one_triangle(spd, upper), b, upper=upper)[0]
                check_solution(spd, x, b)


@pytest.mark.few(100)
@pytest.mark.parametrize("n", [33, 200, 512])
def test_tf32_stays_out_of_factors_and_gradients(n, device, seed, tf32_permitted):
    factor, b = positive(n, n, dtype=torch.float64), torch.randn(n, n, dtype=torch.float64)
    for call in (
        lambda f, b: linalg.kron_solve([f], b),
        lambda f, b: linalg.kron_solve([f], b, cholesky=True),
        lambda f, b: linalg.kron_solve([f], b, noise=0.5),
        lambda f, b: linalg.kron_inverse([f])[0],
        lambda f, b: linalg.kron_cholesky([f])[0],
        lambda f, b: linalg.kron_logdet([f]),
        lambda f, b: linalg.kron_logdet([f], noise=0.5),
    ):
        pairs, along = [], None
        for kind, where in ((torch.float32, device), (torch.float64, "cpu")):
            leaf = factor.to(where, kind).requires_grad_()
            result = call(leaf, b.to(where, kind))
            along = torch.randn(result.shape) if along is None else along
            (slope,) = torch.autograd.grad(result, leaf, along.to(result))
            pairs.append((result.detach().cpu().double(), slope.cpu().double()))
        for ours, wanted in zip(*pairs, strict=True):
            assert (ours - wanted).norm() <= 1e-5 * wanted.norm()


def test_threads_on_streams_of_their_own(route, device):
    failed = []

    def work(seed):
        generator = torch.Generator(device).manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                m = torch.randn(64, 64, device=device, generator=generator)
                a = m @ m.mT / 64 + torch.eye(64, device=device)
                try:
                    check_eigh(a, *linalg.eigh(a)[:2], rough=route == "native")
                    check_solution(a, linalg.solve_lu(a, m)[0], m)
                except Exception as error:
                    failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_conjugate_gradient_waits_in_its_checks_alone(device):
    b = torch.randn(1000, 4, device=device)
    waits = []

    def matmul(v):
        waits.append(torch.cuda.get_sync_debug_mode())
        return 2 * v

    linalg.conjugate_gradient(matmul, b, max_iter=3)
    with nothing_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        linalg.conjugate_gradient(matmul, b, max_iter=30, check_every=10)
    assert waits[-10:] == [2] * 10  # ten products before the first check


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_beyond_a_grid_of_blocks(route, dtype, device):
    """Of 70,000 matrices, more than 65,535."""
    values = positive(70_000, 3, 3, dtype=dtype, device=device)
    b = torch.randn(70_000, 3, 2, dtype=dtype, device=device)
    for solve in (linalg.solve_cholesky, linalg.solve_lu):
        x, info, _ = solve(values, b)
        check_solution(values, x, b)
        assert info.shape == (70_000,) and not info.any()
    w, v, info = linalg.eigh(values)
    check_eigh(values, w, v, rough=route == "native")
    assert not info.any()


def test_batches_of_factors_beyond_a_grid_of_blocks(device):
    factors = [positive(70_000, n, n, dtype=torch.float64, device=device) for n in (3, 2)]
    b = torch.randn(70_000, 6, 1, dtype=torch.float64, device=device)
    for cholesky in (False, True):
        x = linalg.kron_solve(factors, b, cholesky=cholesky)
        assert torch.allclose(kl.kron_matmul(x, factors, side="left"), b)
    for factor, root in zip(factors, linalg.kron_cholesky(factors), strict=True):
        assert torch.allclose(root @ root.mT, factor)
    for factor, inverse in zip(factors, linalg.kron_inverse(factors), strict=True):
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=device)
        assert torch.allclose(factor @ inverse, eye.expand_as(factor))
    assert linalg.kron_logdet(factors).shape == (70_000,)

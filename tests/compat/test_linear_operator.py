"""linear_operator's Kronecker products by kernlib's, beside its own on CPU tensors."""

import contextlib
import importlib
import importlib.util
import subprocess
import sys
import threading
from functools import reduce
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from kernlib.compat import linear_operator as compat

DOUBLE = torch.float64
SHAPES = {
    "odd": ((3, 3), (5, 5), (7, 7)),
    "one": ((6, 6),),
    "one, rectangular": ((4, 7),),
    "rectangular": ((3, 5), (4, 2), (1, 3)),
    "ones": ((1, 1), (1, 1)),
    "ten": ((2, 2),) * 10,
    "large": ((31, 29), (33, 37)),
}
# Of the operator, of its factors, and of the right-hand side.
BATCHES = {
    "none": ((), (), ()),
    "of the factors": ((2,), (2,), ()),
    "of the other": ((), (), (3, 2)),
    "of both": ((3, 1), (2,), (2,)),
    "of ones": ((1,), (1,), (4, 2)),
    "that broadcasts": ((2, 1), (2, 1), (1, 3)),
}
TOLERANCES = {DOUBLE: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture
def ops():
    """linear_operator's classes."""
    return pytest.importorskip("linear_operator.operators")


@pytest.fixture
def home(monkeypatch):
    """The module whose functions are replaced. Where linear_operator is not installed, another one
    with two such functions, which say all that turning on and off needs."""
    name = "linear_operator.operators.kronecker_product_linear_operator"
    if importlib.util.find_spec("linear_operator") is None:
        parents = ("linear_operator", "linear_operator.operators")
        for each in (*parents, name):
            monkeypatch.setitem(sys.modules, each, ModuleType(each))
        sys.modules[parents[1]].DenseLinearOperator = type("DenseLinearOperator", (), {})
        for function in ("_matmul", "_t_matmul"):
            setattr(sys.modules[name], function, lambda linear_ops, kp_shape, rhs: None)
    return importlib.import_module(name)


def functions(home):
    return home._matmul, home._t_matmul


def dense(*shape, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype)


def made(ops, shapes, batches=((), ()), dtype=DOUBLE):
    """Factors, every other of the second batch, and their operator."""
    factors = [dense(*batches[i % 2], *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    return factors, ops.KroneckerProductLinearOperator(*factors)


def both(call):
    """What a call gives with kernlib, which answers all of it, and with linear_operator alone."""
    alone = call()
    with compat.enabled():
        found = call()
        status = compat.status()
    assert status.enabled and status.answered and not status.fell_back, status
    return found, alone


def left_alone(call, reason):
    """A call that linear_operator computes, bit by bit as without kernlib, for this reason."""
    alone = call()
    with compat.enabled():
        found = call()
        status = compat.status()
    assert not status.answered and reason in status.reasons, status
    assert torch.equal(found, alone)


def assert_same(found, alone, tolerance=1e-13):
    assert (found.shape, found.dtype) == (alone.shape, alone.dtype)
    scale = float(alone.double().norm()) or 1.0
    assert float((found.double() - alone.double()).norm()) <= tolerance * scale


# Values.


@pytest.mark.parametrize("turned", (False, True), ids=("", "transposed"))
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_products(ops, shapes, turned, seed):
    factors, op = made(ops, shapes)
    matrix = reduce(torch.kron, factors)
    matrix, op = (matrix.mT, op.mT) if turned else (matrix, op)
    for columns in ((), (1,), (5,)):
        rhs = dense(matrix.shape[1], *columns)
        found, alone = both(lambda rhs=rhs: op @ rhs)
        assert_same(found, alone)
        assert_same(found, matrix @ rhs)


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shapes", (((3, 3), (5, 5)), ((3, 5), (4, 2), (1, 3))))
def test_batches(ops, shapes, batches, seed):
    """By the operator, and by both functions, of which autograd alone calls the second."""
    *own, others = batches
    _, op = made(ops, shapes, own)
    rows, columns = op.shape[-2:]
    for call, size in ((op._matmul, columns), (op._t_matmul, rows), (op.matmul, columns)):
        rhs = dense(*others, size, 3)
        assert_same(*both(lambda call=call, rhs=rhs: call(rhs)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_dtypes(ops, dtype, seed):
    factors, op = made(ops, ((5, 5), (7, 3), (3, 3)), dtype=dtype)
    rhs = dense(45, 4, dtype=dtype)
    found, alone = both(lambda: op @ rhs)
    exact = reduce(torch.kron, [f.double() for f in factors]) @ rhs.double()
    assert found.dtype == alone.dtype == dtype
    assert_same(found.double(), exact, TOLERANCES[dtype])


def test_autocast_casts_as_it_does_for_linear_operator(ops, seed):
    for dtype in (torch.float32, DOUBLE):
        _, op = made(ops, ((5, 5), (7, 3)), dtype=dtype)
        rhs = dense(15, 4, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found, alone = both(lambda op=op, rhs=rhs: op @ rhs)
        assert_same(found, alone, 4e-2)


def test_any_strides(ops, seed):
    wide, rhs = dense(6, 10, 10), dense(4, 50).mT[::2]
    op = ops.KroneckerProductLinearOperator(wide[0, ::2, 1::2], wide[1, :5, :5].mT)
    assert_same(*both(lambda: op @ rhs))
    assert_same(*both(lambda: op.mT @ rhs[:, :1].expand(3, 25, 4)))


# Gradients.


@pytest.mark.parametrize("shapes", (((3, 3), (2, 2)), ((3, 2), (1, 3))), ids=str)
@pytest.mark.parametrize("batches", (BATCHES["none"], BATCHES["of both"]), ids=("", "batches"))
def test_gradients(ops, shapes, batches, seed):
    *own, others = batches
    factors, op = made(ops, shapes, own)
    leaves = [t.requires_grad_() for t in (*factors, dense(*others, op.shape[-1], 2))]

    def call(*leaves):
        return ops.KroneckerProductLinearOperator(*leaves[:-1]) @ leaves[-1]

    weights = torch.randn_like(call(*leaves))

    def gradients():
        return torch.cat([g.flatten() for g in torch.autograd.grad(call(*leaves), leaves, weights)])

    assert_same(*both(gradients))
    with compat.enabled():
        assert gradcheck(call, leaves, fast_mode=True)


def test_double_backward(ops, seed):
    """The functions are differentiable twice; the operators' products are by what is multiplied,
    and by what their first gradients come from."""
    leaves = [dense(*shape).requires_grad_() for shape in ((3, 2), (2, 3), (6, 2))]
    for name in ("_matmul", "_t_matmul"):

        def call(*leaves, name=name):
            op = ops.KroneckerProductLinearOperator(*leaves[:-1])
            return getattr(op, name)(leaves[-1])

        with compat.enabled():
            assert gradgradcheck(call, leaves, fast_mode=True)

    def second():
        y = ops.KroneckerProductLinearOperator(*leaves[:-1]) @ leaves[-1]
        first = torch.autograd.grad(y.square().sum(), leaves[-1], create_graph=True)[0]
        found = torch.autograd.grad(first.square().sum(), leaves)
        return torch.cat([g.flatten() for g in found])

    assert_same(*both(second))


@pytest.mark.slow
def test_transforms(ops, seed):
    factors, op = made(ops, ((3, 2), (2, 3)))
    rhs = dense(4, 6, 2)

    def by_factor(first):
        return ops.KroneckerProductLinearOperator(first, factors[1])._matmul(rhs[0])

    calls = (
        lambda: torch.vmap(op._matmul)(rhs),
        lambda: torch.func.jvp(op._t_matmul, (rhs[0],), (rhs[1],))[1],
        lambda: torch.func.hessian(lambda a: by_factor(a).square().sum())(factors[0]),
    )
    for call in calls:
        assert_same(*both(call))


# What linear_operator computes.


COLUMN = torch.tensor([3.0, 1.0, 0.5], dtype=DOUBLE)
STRUCTURED = {
    "a derived class": lambda ops: type("Own", (ops.DenseLinearOperator,), {})(dense(3, 3)),
    "diagonal": lambda ops: ops.DiagLinearOperator(COLUMN),
    "identity": lambda ops: ops.IdentityLinearOperator(3, dtype=DOUBLE),
    "root": lambda ops: ops.RootLinearOperator(dense(3, 2)),
    "sum": lambda ops: ops.DiagLinearOperator(COLUMN) + ops.RootLinearOperator(dense(3, 2)),
    "Toeplitz": lambda ops: ops.ToeplitzLinearOperator(COLUMN),
    "triangular": lambda ops: ops.TriangularLinearOperator(torch.tril(dense(3, 3))),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_factors_are_left_alone(ops, kind, seed):
    factor, rhs = STRUCTURED[kind](ops), dense(12, 3)
    reason = f"a factor is a {type(factor).__name__}"
    for factors in ((factor, dense(4, 4)), (dense(4, 4), factor)):
        op = ops.KroneckerProductLinearOperator(*factors)
        left_alone(lambda op=op: op @ rhs, reason)
        left_alone(lambda op=op: op._t_matmul(rhs), reason)


def test_other_tensors_are_left_alone(ops, seed):
    factors = [torch.randint(-4, 5, (3, 2)), torch.randint(-4, 5, (2, 3))]
    rhs = torch.randint(-4, 5, (6, 2))
    for dtype in (torch.int64, torch.complex64):
        op = ops.KroneckerProductLinearOperator(*[f.to(dtype) for f in factors])
        left_alone(lambda op=op, dtype=dtype: op._matmul(rhs.to(dtype)), f"the dtype is {dtype}")
    first, second = (f.double() for f in factors)
    op = ops.KroneckerProductLinearOperator(first.to_sparse(), second)
    left_alone(lambda: op._matmul(rhs.double()), "a tensor is not dense")
    meta = ops.KroneckerProductLinearOperator(first.to("meta"), second.to("meta"))
    with compat.enabled():
        assert meta._matmul(rhs.double().to("meta")).shape == (6, 2)
        assert compat.status().reasons == {"the device is meta": 1}


def test_what_it_refuses_it_still_refuses(ops, home, seed):
    _, op = made(ops, ((3, 2), (2, 3)), ((2,), (2,)))
    for reason, rhs in (
        ("dtypes or devices differ", dense(6, 2).float()),
        ("the right-hand side does not fit", dense(5, 2)),
        ("the right-hand side does not fit", dense(3, 6, 2)),
        ("a tensor is empty", dense(6, 0)),
    ):
        with pytest.raises(RuntimeError) as alone:
            op._matmul(rhs)
        with compat.enabled(), pytest.raises(RuntimeError) as found:
            op._matmul(rhs)
        assert str(found.value) == str(alone.value) and reason in compat.status().reasons
    # Called by the names themselves, with a shape that is not the factors'.
    small = [ops.DenseLinearOperator(dense(2, 2)), ops.DenseLinearOperator(dense(3, 3))]
    rhs, shape = dense(6, 2), torch.Size((5, 6, 6))
    left_alone(
        lambda: home._matmul(small, shape, rhs), "the factors are not of the operator's shape"
    )


# Turned on and off.


def test_it_is_on_until_it_is_off(home):
    own = functions(home)
    assert not compat.status().enabled
    compat.disable()
    compat.enable()
    try:
        placed = functions(home)
        assert compat.status() == (True, 0, 0, {}) and not set(placed) & set(own)
        compat.enable()
        with compat.enabled():
            assert functions(home) == placed
        assert functions(home) == placed
    finally:
        compat.disable()
    compat.disable()
    assert functions(home) == own and not compat.status().enabled


def test_blocks_may_be_nested_and_fail(home):
    own = functions(home)
    with contextlib.suppress(KeyError), compat.enabled():
        placed = functions(home)
        with compat.enabled():
            compat.enable()
        assert functions(home) == placed != own
        compat.disable()
        assert functions(home) == placed, "the block is open"
        raise KeyError
    assert functions(home) == own

    @compat.enabled()
    def inside():
        return functions(home)

    assert inside() != own and functions(home) == own


def test_counts_stay_readable_and_begin_anew(ops, seed):
    _, op = made(ops, ((3, 3), (2, 2)))
    with compat.enabled():
        op @ dense(6, 2)
        op._matmul(dense(6, 2))
    assert compat.status() == (False, 2, 0, {})
    op @ dense(6, 2)
    assert compat.status().answered == 2
    with compat.enabled():
        assert compat.status() == (True, 0, 0, {})


def test_threads(ops, home, seed):
    """Blocks of several threads overlap, and no call is lost or counted twice."""
    own = functions(home)
    factors, op = made(ops, ((3, 3), (2, 2)))
    rhs, wrong, barrier = dense(6, 2), [], threading.Barrier(4)
    exact = torch.kron(*factors) @ rhs

    def work():
        barrier.wait()
        for _ in range(25):
            with compat.enabled():
                if not torch.allclose(op._matmul(rhs), exact) or functions(home) == own:
                    wrong.append(True)

    with compat.enabled():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert compat.status() == (True, 100, 0, {}) and not wrong
    assert functions(home) == own


def test_a_patch_of_another_is_kept(ops, home, seed, monkeypatch):
    """Put in between, it stays when ours goes, and around it ours can be put again."""
    _, op = made(ops, ((3, 3), (2, 2)))
    rhs, seen = dense(6, 2), []
    alone = op @ rhs
    with compat.enabled():
        inner = home._matmul

        def patched(*arguments):
            seen.append(arguments)
            return inner(*arguments)

        monkeypatch.setattr(home, "_matmul", patched)
        assert_same(op @ rhs, alone)
        assert compat.status().answered == len(seen) == 1
    assert home._matmul is patched
    assert torch.equal(op @ rhs, alone) and len(seen) == 2 and compat.status().answered == 1
    with compat.enabled():
        assert_same(op @ rhs, alone)
        assert compat.status().answered == 1 and len(seen) == 2
    assert home._matmul is patched


@pytest.mark.slow
def test_importing_it_does_not_import_linear_operator():
    code = "import sys, kernlib.compat.linear_operator as c\n"
    code += "assert 'linear_operator' not in sys.modules\nassert c.status() == (False, 0, 0, {})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_without_linear_operator_it_says_what_to_install(monkeypatch):
    name = "linear_operator.operators.kronecker_product_linear_operator"
    for missing in [each for each in sys.modules if each.split(".")[0] == "linear_operator"]:
        monkeypatch.delitem(sys.modules, missing)
    monkeypatch.setitem(sys.modules, "linear_operator", None)
    for call in (compat.enable, compat.enabled().__enter__):
        with pytest.raises(ImportError, match="pip install linear_operator"):
            call()
    other = SimpleNamespace(_matmul=lambda rhs: rhs, _t_matmul=None)  # of no version that is known
    monkeypatch.setitem(sys.modules, name, other)
    with pytest.raises(ImportError, match=r"no _matmul\(linear_ops, kp_shape, rhs\)"):
        compat.enable()
    assert not compat.status().enabled

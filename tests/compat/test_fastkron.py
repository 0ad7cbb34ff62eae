"""FastKron's functions under their names: what they add to ``kernlib.kron_matmul``, of whose tests
is the rest."""

from __future__ import annotations

import inspect
from functools import reduce

import pytest
import torch
from torch.autograd import gradcheck

import kernlib as kl
from kernlib.compat.fastkron import fastkronnumpy, fastkrontorch
from kernlib.compat.fastkron.fastkrontorch import KMM, MKM, gekmm, gemkm
from tests.compat.fastkron_cases import (
    BATCHES,
    ROWS,
    call,
    close,
    each_side,
    factors,
    operand,
    random,
    wanted,
)


def test_names_and_order_of_arguments():
    for module, kinds in ((fastkrontorch, ["precision", "out"]), (fastkronnumpy, ["out"])):
        scales = ["alpha", "beta", "y", *kinds]
        assert list(inspect.signature(module.gemkm).parameters) == ["x", "fs", *scales]
        assert list(inspect.signature(module.gekmm).parameters) == ["fs", "x", *scales]
        defaults = inspect.signature(module.gemkm).parameters
        assert [defaults[name].default for name in ("alpha", "beta", "y")] == [1.0, 0.0, None]
    for kind in (MKM, KMM):
        assert list(inspect.signature(kind.apply).parameters) == ["x", "fs"]


def test_both_faces_are_found_in_the_package():
    import kernlib.compat.fastkron as package

    assert package.fastkrontorch is fastkrontorch and package.fastkronnumpy is fastkronnumpy
    assert dir(package) == sorted(package.__all__) == ["fastkronnumpy", "fastkrontorch"]
    with pytest.raises(AttributeError, match="fastkronjax"):
        _ = package.fastkronjax


@each_side
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_values_with_batches_that_broadcast(side, batches):
    x, fs = operand(side, batch=batches[0]), factors(side, batch=batches[1])
    y = random(*wanted(side, x, fs).shape[-2:])
    close(call(side, x, fs), wanted(side, x, fs))
    close(call(side, x, fs, 3.0, 1.5, y), wanted(side, x, fs, 3.0, 1.5, y))


@each_side
def test_each_factor_broadcasts_on_its_own(side):
    a, b, c = factors(side)
    fs = [a.expand(2, 1, *a.shape), b, c.expand(3, *c.shape) * random(3, 1, 1)]
    x = operand(side, batch=(4, 1, 1))
    close(call(side, x, fs), wanted(side, x, fs))
    assert call(side, x, fs).shape[:-2] == (4, 2, 3)


WRONG = {
    "x list": (lambda x, f: ([1.0], f), TypeError, "x must be a tensor, got list"),
    "x none": (lambda x, f: (None, f), TypeError, "x must be a tensor"),
    "x shape": (lambda x, f: (x[1:, 1:], f), ValueError, r"x must have shape .*30.*got \(29, 29\)"),
    "x scalar": (lambda x, f: (x[0, 0], f), ValueError, r"x must have shape .* got \(\)"),
    "fs tensor": (lambda x, f: (x, f[0]), TypeError, "fs must be a list or tuple .*got Tensor"),
    "fs none": (lambda x, f: (x, None), TypeError, "fs must be a list or tuple"),
    "f list": (lambda x, f: (x, [f[0], [1.0]]), TypeError, r"fs\[1\] must be a tensor, got list"),
    "f coo": (lambda x, f: (x, [f[0].to_sparse()]), TypeError, r"fs\[0\] must be a dense"),
    "f scalar": (lambda x, f: (x, [*f, f[0][0, 0]]), ValueError, r"fs\[3\] must be a matrix"),
    "f empty": (lambda x, f: (x, [f[0][:0], *f]), ValueError, r"fs\[0\] must .*sizes above 0"),
    "f dtype": (lambda x, f: (x, [f[0].float()]), ValueError, r"fs\[0\] must be torch.float64"),
    "f device": (lambda x, f: (x, [f[0].to("meta"), *f[1:]]), ValueError, r"fs\[0\] .*got meta"),
    "batches": (
        lambda x, f: (x.expand(2, 30, 30), [f[0].expand(3, *f[0].shape), *f[1:]]),
        ValueError,
        r"front of the last two must broadcast, got \(2,\) of x and \[\(3,\)",
    ),
}  # fmt: skip


@each_side
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_an_exception_that_names_it(side, case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call(side, *make(random(30, 30), factors(side)))


@each_side
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradients_of_everything(side, batch):
    x = operand(side, 6, 2, requires_grad=True)
    fs = factors(side, (3, 2), (1, 2), batch, requires_grad=True)
    y = random(1, 1, requires_grad=True)
    scales = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (3.0, 0.5)]
    assert gradcheck(lambda x, y, *fs: call(side, x, fs, 3.0, 0.5, y), (x, y, *fs))
    assert gradcheck(lambda a, b: call(side, x.detach(), fs[:], a, b, y), tuple(scales))


@each_side
def test_y_broadcasts_in_every_dimension(side):
    x, fs = operand(side, batch=(3,)), factors(side)
    shape = wanted(side, x, fs).shape
    for own in [(1, shape[-1]), (shape[-2], 1), (shape[-1],), (1,), (), (3, 1, 1), (1, *shape[1:])]:
        y = random(*own)
        assert torch.equal(
            call(side, x, fs, 3.0, 0.5, y), call(side, x, fs, 3.0, 0.5, y.expand(shape))
        )
    with pytest.raises(ValueError, match=r"y must broadcast to \(3, .*got shape \(2, 3"):
        call(side, x, fs, 1.0, 1.0, random(2, *shape))
    with pytest.raises(ValueError, match="y must broadcast"):
        call(side, x, fs, 1.0, 1.0, random(shape[-1] + 1))


@each_side
@pytest.mark.parametrize("turned", [False, True])
def test_autograd_functions_by_their_names(side, turned):
    x = operand(side, 6, 3, (1,))
    fs = factors(side, (3, 2), (2, 3), (2,))
    x, *fs = ((t.mT.contiguous().mT if turned else t).detach().requires_grad_() for t in (x, *fs))
    apply = MKM.apply if side == "mkm" else KMM.apply
    assert torch.equal(apply(x, *fs), call(side, x, fs))
    assert gradcheck(apply, (x, *fs), eps=1e-5, atol=1e-4)


@each_side
def test_no_factors_are_refused(side):
    for none in ([], ()):
        with pytest.raises(ValueError, match="fs must hold at least one factor, got none"):
            call(side, operand(side), none)


@each_side
def test_factors_of_one_dimension(side):
    """A column of gemkm, a row of gekmm; alone they are a vector, and the result lacks it."""
    vectors = [random(3, seed=1), random(5, seed=2), random(2, seed=3)]
    dense = reduce(torch.kron, vectors)
    x = operand(side)
    rows = x if side == "mkm" else x.mT
    close(call(side, x, vectors), rows @ dense)
    batch = x.expand(2, *x.shape)
    close(call(side, batch, vectors), (rows @ dense).expand(2, ROWS))
    one = rows[0]
    assert call(side, one, vectors).shape == ()
    close(call(side, one, vectors), one @ dense)
    mixed = factors(side)
    mixed[1] = mixed[1].flatten()  # of Q = 1
    assert torch.equal(call(side, x, mixed), call(side, x, factors(side)))


@each_side
def test_y_and_out_of_vectors_lack_the_dimension_too(side):
    vectors = [random(3, seed=1), random(5, seed=2), random(2, seed=3)]
    x = operand(side, batch=(2,))
    plain = call(side, x, vectors)
    for own in [(2, ROWS), (ROWS,), (2, 1), ()]:
        y = random(*own)
        close(call(side, x, vectors, 2.0, 0.5, y), 2 * plain + 0.5 * y)
    out = torch.empty(2, ROWS, dtype=torch.float64)
    assert call(side, x, vectors, out=out) is out and torch.equal(out, plain)
    with pytest.raises(ValueError, match=r"y must broadcast to \(2, 7\), got shape \(2, 7, 1\)"):
        call(side, x, vectors, 1.0, 1.0, random(2, ROWS, 1))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 7\)"):
        call(side, x, vectors, out=torch.empty(2, ROWS, 1, dtype=torch.float64))


@each_side
@pytest.mark.parametrize("count", [64, 65, 130])
def test_many_factors(side, count):
    sizes = [(2, 3) if place in (0, 40, count - 1) else (1, 1) for place in range(count)]
    fs = [random(*(s if side == "mkm" else s[::-1]), seed=i) for i, s in enumerate(sizes)]
    fs = [f / f.norm() for f in fs]
    x = operand(side, 8)
    close(call(side, x, fs), wanted(side, x, fs))


@each_side
def test_sizes_beyond_32_bits(side):
    """Of tensors without memory."""
    x = torch.empty((2**17, 2**16) if side == "mkm" else (2**16, 2**17), device="meta")
    fs = [torch.empty(16, 16, device="meta") for _ in range(4)]
    assert call(side, x, fs).shape == x.shape and x.numel() > 2**32


@each_side
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool], ids=str)
def test_other_dtypes_are_refused(side, dtype):
    x, fs = operand(side).to(dtype), [f.to(dtype) for f in factors(side)]
    with pytest.raises(TypeError, match=f"x must be one of float16, .*got {dtype}"):
        call(side, x, fs)
    with pytest.raises(ValueError, match=r"y must be torch.float64"):
        call(side, operand(side), factors(side), 1.0, 1.0, torch.ones(()).to(dtype))


@each_side
def test_dimensions_of_size_1_stay(side):
    fs = factors(side, (3, 2), (1, 1))
    assert call(side, random(6), fs).shape == (1,)
    assert call(side, operand(side, 6, 1), fs).shape == (1, 1)
    assert call(side, operand(side, 6, 1, (1, 1)), fs).shape == (1, 1, 1, 1)
    batched = factors(side, (3, 2), (1, 1), (1,))
    assert call(side, random(6), batched).shape == (1, 1)
    assert call(side, random(6), factors(side, (3, 2), (2, 2), (1,))).shape == (1, 4)


@each_side
def test_beta_needs_y_and_without_it_y_is_not_read(side):
    x, fs = operand(side), factors(side)
    with pytest.raises(ValueError, match=r"beta says .* no y is given"):
        call(side, x, fs, 1.0, 0.5)
    y = torch.full(wanted(side, x, fs).shape, float("nan"), dtype=torch.float64)
    close(call(side, x, fs, 2.0, 0.0, y), wanted(side, x, fs, 2.0))


def test_the_functions_are_those_of_kron_matmul():
    x, fs = operand("mkm"), factors("mkm")
    assert torch.equal(gemkm(x, fs), kl.kron_matmul(x, fs))
    turned = [f.mT for f in fs]
    assert torch.equal(gekmm(turned, x.mT), kl.kron_matmul(x.mT, turned, side="left"))

"""FastKron's functions under their names. Rows are those of FastKron's limits, of which 10, 14, 16,
17 and 18 are about GPUs, tuning and wheels."""

from __future__ import annotations

import inspect
from functools import reduce

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

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

# Names, and what is right in FastKron.


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


@each_side
@pytest.mark.parametrize("turned", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_operands_may_be_transposed_views(side, turned):
    fs = [f.mT.contiguous().mT if i in turned else f for i, f in enumerate(factors(side))]
    x = operand(side).mT.contiguous().mT
    close(call(side, x, fs), wanted(side, x, fs))


@each_side
def test_integers_are_exact(side):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 5, operand(side, 6**4).shape, generator=generator).float()
    fs = [torch.randint(0, 5, (6, 6), generator=generator).float() for _ in range(4)]
    torch.testing.assert_close(call(side, x, fs).double(), wanted(side, x, fs), rtol=1e-5, atol=0.0)


@each_side
def test_tuples_and_parameters_are_taken(side):
    x, fs = operand(side), factors(side)
    held = tuple(torch.nn.Parameter(f) for f in fs)
    close(call(side, x, held).detach(), call(side, x, fs))


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


# What is wrong or limited in FastKron, by its row.


@each_side
def test_row_1_alpha_beta_and_y_count_with_a_gradient_to_record(side):
    x, fs = operand(side), factors(side)
    y = random(*wanted(side, x, fs).shape)
    plain = call(side, x, fs, 3.0, 0.5, y)
    close(plain, wanted(side, x, fs, 3.0, 0.5, y))
    for place in range(5):
        given = [t.clone().requires_grad_(i == place) for i, t in enumerate((x, y, *fs))]
        found = call(side, given[0], given[2:], 3.0, 0.5, given[1])
        assert found.requires_grad
        close(found.detach(), plain)


@each_side
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_row_1_gradients_of_everything(side, batch):
    x = operand(side, 6, 2, requires_grad=True)
    fs = factors(side, (3, 2), (1, 2), batch, requires_grad=True)
    y = random(1, 1, requires_grad=True)
    scales = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (3.0, 0.5)]
    assert gradcheck(lambda x, y, *fs: call(side, x, fs, 3.0, 0.5, y), (x, y, *fs))
    assert gradcheck(lambda a, b: call(side, x.detach(), fs[:], a, b, y), tuple(scales))


@each_side
def test_row_2_y_broadcasts_in_every_dimension(side):
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
def test_row_2_nothing_is_read_beside_y(side):
    """Guard bands of NaN in front of y and behind it."""
    x, fs = operand(side), factors(side)
    shape = wanted(side, x, fs).shape
    band = torch.full((3, shape[-1]), float("nan"), dtype=torch.float64)
    band[1] = random(shape[-1])
    assert call(side, x, fs, 1.0, 1.0, band[1:2]).isfinite().all()
    assert call(side, x, fs, 1.0, 1.0, band[1]).isfinite().all()


@each_side
def test_row_3_y_of_any_strides(side):
    x, fs = operand(side), factors(side)
    shape = wanted(side, x, fs).shape
    whole = random(*shape)
    strided = random(shape[0], 3 * shape[1])[:, ::3]
    turned = whole.mT.contiguous().mT
    apart = random(2 * shape[0], shape[1])[1::2]
    for y in (strided, turned, apart, whole[:1].expand(shape), whole[:, :1].expand(shape)):
        close(call(side, x, fs, 2.0, 0.5, y), wanted(side, x, fs, 2.0, 0.5, y))
        assert torch.equal(
            call(side, x, fs, 2.0, 0.5, y), call(side, x, fs, 2.0, 0.5, y.contiguous())
        )


VIEWS = {
    "apart": lambda base: base[:, ::2],
    "inside": lambda base: base[1:8, 30:60],
    "turned": lambda base: base[:30, :8].mT,
}


@each_side
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_row_4_gradients_of_strided_operands(side, view, leaf):
    """Of a leaf that is strided itself, and of a view of a leaf."""
    fs = factors(side)
    base = random(60, 60).requires_grad_(not leaf)
    x = VIEWS[view](base)
    x = x if side == "mkm" else x.mT
    x = x.detach().requires_grad_() if leaf else x
    plain = x.detach().contiguous().requires_grad_()
    for each in (x, plain):
        call(side, each, fs).square().sum().backward()
    if leaf:
        found = x.grad
    else:
        found = VIEWS[view](base.grad) if side == "mkm" else VIEWS[view](base.grad).mT
    torch.testing.assert_close(found, plain.grad)


@each_side
def test_row_5_gradients_of_gradients(side):
    x = operand(side, 6, 2, requires_grad=True)
    fs = factors(side, (3, 2), (1, 2), requires_grad=True)
    y = random(1, 1, requires_grad=True)
    assert gradgradcheck(lambda x, y, *fs: call(side, x, fs, 3.0, 0.5, y), (x, y, *fs))
    assert gradgradcheck(MKM.apply if side == "mkm" else KMM.apply, (x, *fs))


@each_side
@pytest.mark.parametrize("turned", [False, True])
def test_row_5_autograd_functions_by_their_names(side, turned):
    x = operand(side, 6, 3, (1,))
    fs = factors(side, (3, 2), (2, 3), (2,))
    x, *fs = ((t.mT.contiguous().mT if turned else t).detach().requires_grad_() for t in (x, *fs))
    apply = MKM.apply if side == "mkm" else KMM.apply
    assert torch.equal(apply(x, *fs), call(side, x, fs))
    assert gradcheck(apply, (x, *fs), eps=1e-5, atol=1e-4)


@each_side
def test_row_6_a_device_without_kernels_is_an_exception_or_torch(side):
    """On meta there is a shape, and never garbage; where tensors are apart there is an error."""
    x, fs = operand(side), factors(side)
    shape = call(side, x, fs).shape
    assert call(side, x.to("meta"), [f.to("meta") for f in fs]).shape == shape
    with pytest.raises(ValueError, match=r"fs\[0\] must be on meta as x is, got cpu"):
        call(side, x.to("meta"), fs)


@each_side
def test_row_7_no_factors_are_refused(side):
    for none in ([], ()):
        with pytest.raises(ValueError, match="fs must hold at least one factor, got none"):
            call(side, operand(side), none)


@each_side
def test_row_7_factors_of_one_dimension(side):
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
def test_row_7_y_and_out_of_vectors_lack_the_dimension_too(side):
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
def test_row_8_no_rows(side):
    fs = factors(side)
    for batch in ((), (3,)):
        x = operand(side, rows=0, batch=batch, requires_grad=True)
        found = call(side, x, fs)
        assert found.shape == (*batch, *((0, 12) if side == "mkm" else (12, 0)))
        found.sum().backward()
        assert x.grad.shape == x.shape
    assert call(side, operand(side, batch=(0,)), fs).shape[0] == 0


@each_side
@pytest.mark.parametrize("count", [64, 65, 130])
def test_row_9_many_factors(side, count):
    sizes = [(2, 3) if place in (0, 40, count - 1) else (1, 1) for place in range(count)]
    fs = [random(*(s if side == "mkm" else s[::-1]), seed=i) for i, s in enumerate(sizes)]
    fs = [f / f.norm() for f in fs]
    x = operand(side, 8)
    close(call(side, x, fs), wanted(side, x, fs))


@each_side
def test_row_9_sizes_beyond_32_bits(side):
    """Of tensors without memory."""
    x = torch.empty((2**17, 2**16) if side == "mkm" else (2**16, 2**17), device="meta")
    fs = [torch.empty(16, 16, device="meta") for _ in range(4)]
    assert call(side, x, fs).shape == x.shape and x.numel() > 2**32


@each_side
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_11_half_types_are_summed_in_float32(side, dtype):
    x = operand(side, 32**2, dtype=dtype)
    fs = factors(side, (32, 32), (32, 16), dtype=dtype)
    y = random(1, dtype=dtype)
    found = call(side, x, fs, 0.25, 0.5, y)
    assert found.dtype == dtype
    expected = wanted(side, x, fs, 0.25, 0.5, y)
    close(found, expected, 1e-3 if dtype == torch.float16 else 8e-3)
    wide = call(side, x.float(), [f.float() for f in fs], 0.25, 0.5, y.float())
    assert torch.equal(found, wide.to(dtype))  # rounded once


@each_side
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool], ids=str)
def test_row_11_other_dtypes_are_refused(side, dtype):
    x, fs = operand(side).to(dtype), [f.to(dtype) for f in factors(side)]
    with pytest.raises(TypeError, match=f"x must be one of float16, .*got {dtype}"):
        call(side, x, fs)
    with pytest.raises(ValueError, match=r"y must be torch.float64"):
        call(side, operand(side), factors(side), 1.0, 1.0, torch.ones(()).to(dtype))


class Alive(TorchFunctionMode):
    """The most bytes that results of torch's functions held at one time."""

    def __init__(self):
        super().__init__()
        self.found, self.most = {}, 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self.found[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.found = {at: held for at, held in self.found.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.found.values()))
        return result


@each_side
def test_row_12_without_gradients_no_intermediate_is_kept(side):
    """Seven factors of which no two merge: a few results are held at a time, not one a factor, and
    none is saved."""
    x = operand(side, 5**7, 2, requires_grad=True)
    fs = factors(side, (5,) * 7, (5,) * 7, requires_grad=True)
    saved = {False: [], True: []}
    for recorded, found in saved.items():
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, found=found: found.append(t.nbytes) or t, lambda t: t
        )
        with torch.set_grad_enabled(recorded), Alive() as alive, hooks:
            assert call(side, x, fs).requires_grad is recorded
        assert alive.most < 4.5 * x.nbytes
    assert not saved[False] and sum(saved[True]) > 7 * x.nbytes


@each_side
def test_row_13_dimensions_of_size_1_stay(side):
    fs = factors(side, (3, 2), (1, 1))
    assert call(side, random(6), fs).shape == (1,)
    assert call(side, operand(side, 6, 1), fs).shape == (1, 1)
    assert call(side, operand(side, 6, 1, (1, 1)), fs).shape == (1, 1, 1, 1)
    batched = factors(side, (3, 2), (1, 1), (1,))
    assert call(side, random(6), batched).shape == (1, 1)
    assert call(side, random(6), factors(side, (3, 2), (2, 2), (1,))).shape == (1, 4)


@each_side
def test_row_13_vectors(side):
    x, fs = random(30, seed=4), factors(side)
    close(call(side, x, fs), wanted(side, x, fs))
    y = random(12)
    close(call(side, x, fs, 2.0, 0.5, y), wanted(side, x, fs, 2.0, 0.5, y))


@each_side
def test_row_15_vmap_is_the_batched_result(side):
    x, fs = operand(side, batch=(4,)), factors(side)
    y = random(*wanted(side, x, fs).shape)
    found = torch.vmap(lambda x, y: call(side, x, fs, 2.0, 0.5, y))(x, y)
    torch.testing.assert_close(found, call(side, x, fs, 2.0, 0.5, y))
    many = factors(side, batch=(4,))
    found = torch.vmap(lambda x, *fs: call(side, x, fs))(x, *many)
    torch.testing.assert_close(found, call(side, x, many))


@each_side
def test_row_15_out(side):
    x, fs = operand(side), factors(side)
    y = random(*wanted(side, x, fs).shape)
    expected = call(side, x, fs, 2.0, 0.5, y)
    for out in (torch.empty_like(y), torch.empty_like(y.mT.contiguous()).mT, y.clone()):
        assert call(side, x, fs, 2.0, 0.5, y, out=out) is out and torch.equal(out, expected)
    assert call(side, x, fs, 2.0, 0.5, y, out=y) is y and torch.equal(y, expected)
    with pytest.raises(RuntimeError, match="out"):
        call(side, x.requires_grad_(), fs, out=torch.empty_like(y))
    with pytest.raises(ValueError, match="out must have shape"):
        call(side, x.detach(), fs, out=torch.empty(3, dtype=torch.float64))


@pytest.mark.slow
@each_side
def test_row_15_torch_compile_without_a_break(side):
    x, fs = operand(side), factors(side)
    y = random(*wanted(side, x, fs).shape)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(side, x, fs, 2.0, 0.5, y), wanted(side, x, fs, 2.0, 0.5, y))
    grad = [t.clone().requires_grad_() for t in (x, *fs)]
    compiled(side, grad[0], grad[1:]).sum().backward()
    plain = [t.clone().requires_grad_() for t in (x, *fs)]
    wanted(side, plain[0], plain[1:]).sum().backward()
    for one, other in zip(grad, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@each_side
def test_beta_needs_y_and_without_it_y_is_not_read(side):
    x, fs = operand(side), factors(side)
    with pytest.raises(ValueError, match=r"beta says .* no y is given"):
        call(side, x, fs, 1.0, 0.5)
    y = torch.full(wanted(side, x, fs).shape, float("nan"), dtype=torch.float64)
    close(call(side, x, fs, 2.0, 0.0, y), wanted(side, x, fs, 2.0))


@each_side
def test_autocast_casts_as_it_does_for_a_product(side):
    x, fs = operand(side).float(), [f.double() for f in factors(side)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(side, x, [f.float() for f in fs]).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"fs\[0\] must be torch.float32 as x is"):
        call(side, x, fs)


def test_the_functions_are_those_of_kron_matmul():
    x, fs = operand("mkm"), factors("mkm")
    assert torch.equal(gemkm(x, fs), kl.kron_matmul(x, fs))
    turned = [f.mT for f in fs]
    assert torch.equal(gekmm(turned, x.mT), kl.kron_matmul(x.mT, turned, side="left"))

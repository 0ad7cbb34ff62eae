"""Products on a GPU that torch computes, as rules have it: with GPUs that exist only by name."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead, events
from kernlib.families.kronecker_product import operation, plans
from kernlib.families.kronecker_product.lowering import by_torch, choose
from kernlib.families.kronecker_product.operation import PRODUCT
from kernlib.jit import tuning
from kernlib.runtime import ahead as runtime_ahead
from kernlib.runtime import products
from tests.families.kronecker_product.cases import assert_near, by_modes, product
from tests.families.kronecker_product.emulated import kinds, operands
from tests.support import fakes
from tests.support.emulation.gpus import gpu, host

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES, ROWS = ((104, 59), (64, 37)), 4
ONE = ((130, 120),)  # by torch with some passes behind it
every_dtype = pytest.mark.parametrize("dtype", [F32, F64])


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    torch.set_float32_matmul_precision("highest")
    for module in (runtime_ahead, operation):
        monkeypatch.setattr(module, "torch", fakes.Torch())
    monkeypatch.setattr(fakes.OnGpu, "to", _on_its_gpu)
    yield
    torch.set_float32_matmul_precision("highest")


def _on_its_gpu(t: torch.Tensor, device, dtype=None) -> torch.Tensor:
    return gpu(host(t).to(dtype or t.dtype))


def given(shapes=SHAPES, rows=ROWS, dtype=F32, batch=(), **options):
    """A descriptor, and the operands on a GPU."""
    x, *factors = operands(shapes, rows, "right", dtype)
    x = torch.randn(*batch, *x.shape).to(dtype) if batch else x
    return kl.KroneckerProduct(shapes, **options), [*map(gpu, (x, *factors))]


def check(found, tensors, dtype, wanted=None) -> None:
    x, *factors = map(host, tensors)
    wanted = product(x, factors) if wanted is None else wanted
    found = host(found)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, wanted)


@every_dtype
def test_values_without_a_kernel(dtype, gpus, seed):
    descriptor, tensors = given(dtype=dtype)
    for _ in range(2):
        check(kl.run_kernel(descriptor, *tensors), tensors, dtype)
    check(kl.kron_matmul(tensors[0], tensors[1:]), tensors, dtype)
    assert not gpus.loads and not gpus.launches


def test_batches_vectors_and_transposes(gpus, seed):
    descriptor, tensors = given(batch=(2, 3))
    check(kl.run_kernel(descriptor, *tensors), tensors, F32)
    descriptor, (x, *factors) = given()
    check(kl.run_kernel(descriptor, x[0], *factors)[None], (x[:1], *factors), F32)
    turned = descriptor.replace(transposed=(True, False))
    given_turned = x, gpu(host(factors[0]).mT.contiguous()), factors[1]
    check(kl.run_kernel(turned, *given_turned), (x, *factors), F32)
    wide = gpu(torch.zeros(ROWS, 2 * x.shape[1])[:, ::2].copy_(host(x)))
    check(kl.run_kernel(descriptor, wide, *factors), (x, *factors), F32)
    ones = [factors[0][None], factors[1].expand(2, 1, 64, 37)]  # batches of one matrix
    wanted = product(host(x), [*map(host, factors)]).expand(2, 1, -1, -1)
    check(kl.run_kernel(descriptor, x, *ones), (x, *factors), F32, wanted)
    assert not gpus.loads


def test_out_is_written_whatever_its_strides(gpus, seed):
    descriptor, tensors = given()
    wanted = product(*[host(tensors[0]), [*map(host, tensors[1:])]])
    for out in (torch.empty(wanted.shape), torch.empty(wanted.shape[::-1]).mT):
        version = out._version
        there = gpu(out)
        for _ in range(2):
            assert kl.run_kernel(descriptor, *tensors, out=there) is there
        assert out._version > version
        check(out.contiguous(), tensors, F32)
    with pytest.raises(ValueError, match="out shares memory with x"):
        x = tensors[0]
        kl.run_kernel(descriptor, *tensors, out=gpu(host(x).view(-1)[: wanted.numel()].view(4, -1)))
    assert not gpus.loads


def test_an_operand_too_many_does_not_pass_for_out(gpus, seed):
    descriptor, tensors = given()
    out = gpu(torch.zeros(ROWS, descriptor.out_features))
    kl.run_kernel(descriptor, *tensors, out=out)
    with pytest.raises(TypeError, match="takes x and 2 factors in their order, got 3"):
        kl.run_kernel(descriptor, *tensors, out)


def test_epilogues_follow(gpus, seed):
    epilogue = (kl.Scale("gain"), kl.Bias(), kl.Relu())
    descriptor, tensors = given(ONE, 3, F64, epilogue=epilogue)
    bias, gain = torch.randn(120).double(), torch.tensor(1.5).double()
    v = product(host(tensors[0]), [host(tensors[1])])
    for scale in (1.5, gpu(gain)):
        found = kl.run_kernel(descriptor, *tensors, bias=gpu(bias), gain=scale)
        check(found, tensors, F64, (1.5 * v + bias).relu())
    assert not gpus.loads


def test_a_summand_may_be_out_and_is_not_read_where_beta_is_0(gpus, monkeypatch, seed):
    """Of a kernel that takes any time."""
    monkeypatch.setattr("kernlib.families.kronecker_product.lowering.by_torch.GAIN", 0.0)
    x, *factors = given(ONE, 3, F64)[1]
    v = product(host(x), [*map(host, factors)])
    y = torch.randn(v.shape).double()
    wanted = 3 * v - y / 2
    for other in (y, y.mT.contiguous().mT):
        found = kl.kron_matmul(x, factors, alpha=3.0, beta=-0.5, y=gpu(other))
        check(found, (x, *factors), F64, wanted)
    row = kl.kron_matmul(x, factors, beta=2.0, y=gpu(y[0]))
    check(row, (x, *factors), F64, v + 2 * y[0])
    whole = gpu(y.clone())
    assert kl.kron_matmul(x, factors, alpha=3.0, beta=-0.5, y=whole, out=whole) is whole
    check(whole, (x, *factors), F64, wanted)
    nothing = gpu(torch.full_like(y, torch.nan))
    check(kl.kron_matmul(x, factors, alpha=3.0, y=nothing), (x, *factors), F64, 3 * v)
    zero = gpu(torch.zeros((), dtype=F64))
    check(kl.kron_matmul(x, factors, beta=zero, y=nothing), (x, *factors), F64, v)
    assert not gpus.loads


@pytest.mark.emulated
@pytest.mark.parametrize("precision", [None, "fp32"])
def test_float32_is_never_in_tf32_without_leave(precision, gpus, seed):
    """A plan by torch is for where torch's setting is "highest"; else kernels compute."""
    descriptor, tensors = given(ONE, 3, precision=precision)
    check(kl.run_kernel(descriptor, *tensors), tensors, F32)
    assert not gpus.launches
    for _ in range(2):
        torch.set_float32_matmul_precision("high")
        gate = 2e-3 if precision is None else 1e-6
        found, (x, factor) = host(kl.run_kernel(descriptor, *tensors)), map(host, tensors)
        wanted = product(x, [factor])
        assert kinds(gpus) == ["modes"]
        assert (found.double() - wanted).norm() <= gate * wanted.norm()
        torch.set_float32_matmul_precision("highest")
        gpus.specs.clear()
        check(kl.run_kernel(descriptor, *tensors), tensors, F32)
        assert not gpus.specs


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_types_are_kernels(dtype, gpus, seed):
    """What is between two factors may be more than float16 holds, and bfloat16 is rounded there."""
    descriptor, tensors = given(ONE, 3, dtype)
    kl.run_kernel(descriptor, *tensors)
    assert kinds(gpus) == ["modes"]


def test_autocast_does_not_round_the_products(gpus, seed):
    descriptor, tensors = given(dtype=F64)
    with torch.autocast("cpu", BF16):
        check(kl.run_kernel(descriptor, *tensors), tensors, F64)


def test_it_is_said_that_torch_computes(gpus, seed, capsys):
    descriptor, tensors = given()
    found = []
    stop = events.subscribe(found.append)
    try:
        for _ in range(2):
            kl.run_kernel(descriptor, *tensors)
    finally:
        stop()
    said = "kronecker_product on cuda:0: no kernel, computed by torch"
    assert [(event.name, event.description) for event in found] == [("torch", said)] * 2
    kl.kron_matmul(tensors[0], tensors[1:], debug=True)
    assert said in capsys.readouterr().err


def test_prepare_has_nothing_to_load(gpus, monkeypatch, seed):
    descriptor, tensors = given()
    assert not ahead.prepared(descriptor, *tensors)
    out = gpu(torch.full((ROWS, descriptor.out_features), 7.0))
    for rest in ({}, {"out": out}):
        kl.prepare(descriptor, *tensors, **rest)
        assert ahead.prepared(descriptor, *tensors, **rest)
        assert not ahead.specs(descriptor, "sm_90a", tuple(tensors), rest, 0)
    assert (host(out) == 7).all() and not gpus.loads
    for count in (131, 133):  # other GPUs have kernels
        assert choose.lower((), _problem(descriptor, tensors), "sm_90a", count).steps
    assert ahead.specs(descriptor, "sm_90a", tuple(tensors), {})  # those of fewer multiprocessors


def _problem(descriptor, tensors):
    call = PRODUCT.check(descriptor, tuple(tensors), None, {})
    return plans.problem_of(call, descriptor, tuple(tensors), None, {})[0]


def test_a_gradient_by_x_may_be_torchs(gpus, seed):
    descriptor, tensors = given(ONE, 3, F64)
    x, factor = tensors[0].requires_grad_(), tensors[1]
    kl.prepare(descriptor, x, factor)
    assert not gpus.loads
    y = kl.run_kernel(descriptor, x, factor)
    y.register_hook(gpu)  # torch makes plain tensors of what it computes of a subclass
    grad = torch.randn(y.shape).double()
    (found,) = torch.autograd.grad(y, x, grad)
    wanted = grad @ host(factor).mT
    assert (host(found) - wanted).norm() <= 1e-13 * wanted.norm() and not gpus.loads


def test_a_tensor_that_is_two_factors_counts_once_as_each(gpus, monkeypatch, seed):
    """Also where its gradient is recorded. Plain CPU tensors are taken for those of a GPU, so that
    autograd hands on what it has."""
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)
    x, factor, _ = (t.requires_grad_() for t in operands(((104, 59),) * 2, ROWS, "right", F32))
    y = kl.kron_matmul(x, (factor, factor))
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, factor), grad, create_graph=True)
    assert not gpus.loads and type(y.grad_fn).__name__ == "_ProductBackward"
    wanted = torch.autograd.grad(by_modes(x, (factor, factor)), (x, factor), grad.double())
    for one, other in zip(found, wanted, strict=True):
        assert_near(one.detach(), other, 4e-6)


def test_a_recorded_result_may_be_written_in_place(gpus, seed):
    """Which autograd forbids of views that are made inside a function of its own."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            made = [by_torch.Product(0, 2, (5, 3), 1, False)]
            descriptor = kl.KroneckerProduct(((5, 3),))
            return plans.by_products(made, (2, 3), descriptor, (x, factor), {})

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    x = torch.randn(2, 5, requires_grad=True)
    assert Recorded.apply(x, torch.randn(5, 3)).mul_(2).requires_grad


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_tuned_kernel_goes_first(gpus, monkeypatch, seed):
    monkeypatch.setattr(tuning, "choice", lambda *_: {"kind": "modes"})
    descriptor, tensors = given(ONE, 3)
    check(kl.run_kernel(descriptor, *tensors), tensors, F32)
    assert kinds(gpus) == ["modes"]


def test_no_rows_and_no_launches(gpus, seed):
    descriptor, tensors = given(rows=0)
    assert kl.run_kernel(descriptor, *tensors).shape == (0, 59 * 37)
    assert not gpus.loads and not gpus.launches


@pytest.mark.emulated
def test_factors_of_a_batch_are_kernels(gpus, seed):
    x, factor = operands(ONE, 3, "right", F32, (2,))
    descriptor = kl.KroneckerProduct(ONE)
    found = kl.run_kernel(descriptor, gpu(x), gpu(factor))
    assert kinds(gpus) == ["modes"]
    check(found, (gpu(x), gpu(factor)), F32, x.double() @ factor.double())


@pytest.mark.parametrize("shapes", [((5, 7), (3, 4)), ((94, 118), (2, 5)), ((5, 40), (6, 2))])
def test_a_contiguous_out_is_where_torch_writes(shapes, gpus, monkeypatch, seed):
    """By its last product, be it single, batched or turned."""
    monkeypatch.setattr(by_torch, "GAIN", 0.0)
    descriptor, tensors = given(shapes, 3, F64)
    wanted = host(kl.run_kernel(descriptor, *tensors))
    for out in (torch.empty(wanted.shape).double(), torch.empty(wanted.shape[::-1]).double().mT):
        there = gpu(out)
        assert kl.run_kernel(descriptor, *tensors, out=there) is there
        assert torch.equal(out, wanted)
    assert not gpus.loads


@every_dtype
@pytest.mark.parametrize("turned", [False, True])
def test_small_neighbours_are_multiplied_out_first(turned, dtype, gpus, monkeypatch, seed):
    """Those that are given transposed, views and batches of one matrix among them, anew in each
    call."""
    monkeypatch.setattr(by_torch, "GAIN", 0.0)
    shapes = ((13, 2), (2, 22), (97, 3))
    x, *factors = operands(shapes, 30, "right", dtype)
    wanted = product(x, factors)
    descriptor = kl.KroneckerProduct(shapes, transposed=(turned, False, turned))
    kept = [gpu(f.mT.contiguous() if turned and f is not factors[1] else f) for f in factors]
    batched = kept[1].expand(1, 1, *kept[1].shape)
    out = gpu(torch.empty_like(wanted, dtype=dtype))
    for second in (kept[1], batched):
        found = kl.run_kernel(descriptor, gpu(x), kept[0], second, kept[2])
        check(found.reshape(wanted.shape), (x, *factors), dtype, wanted)
    assert kl.run_kernel(descriptor, gpu(x), *kept, out=out) is out
    check(out, (x, *factors), dtype, wanted)
    host(kept[0]).mul_(2)
    check(kl.run_kernel(descriptor, gpu(x), *kept), (x, *factors), dtype, 2 * wanted)
    problem = _problem(descriptor, (gpu(x), *kept))
    assert [each.parts for each in by_torch.fastest(problem, 0)] == [1, 2]
    assert not gpus.loads


@pytest.mark.emulated
def test_one_launch_and_several_give_the_same_bits(gpus, monkeypatch, seed):
    """So that it may depend on the rows which of both is faster."""
    descriptor, tensors = given(((6, 15), (17, 62), (58, 20)), 2, F64)
    found = []
    for kind in ("modes", "slabs"):
        monkeypatch.setattr(tuning, "choice", lambda *_, kind=kind: {"kind": kind})
        fakes.forget()
        gpus.specs.clear()
        found.append(host(kl.run_kernel(descriptor, *tensors)))
        assert kind in kinds(gpus)
    assert torch.equal(*found)
    check(found[0], tensors, F64)

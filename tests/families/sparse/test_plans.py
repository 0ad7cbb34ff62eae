"""Plans of products with compressed matrices, on GPUs that exist only by name and whose kernels
compute on the host what a problem says."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.errors import CaptureError
from kernlib.families.sparse import operation, operators, plans
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.operation import calls
from kernlib.runtime import expressions, products
from kernlib.sparse import SparseMatrix, matmul
from tests.families.sparse import fake_kernels
from tests.families.sparse.cases import BIASED, EPILOGUES, made, values_of
from tests.support import fakes
from tests.support.fakes import OnGpu, OnSecondGpu
from tests.support.fakes import on_gpu as zeros_on_gpu

PLAIN = SparseMatmul()
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield fake_kernels.install(monkeypatch)
    fakes.forget()


def gpu(*shape, dtype=torch.float16, kind=OnGpu):
    made = torch.randint(-8, 9, shape).double() / 4
    return made.to(dtype).as_subclass(kind)


def host(t):
    return t.as_subclass(torch.Tensor) if isinstance(t, torch.Tensor) else t


def matrix(gpus, rows=9, cols=40, format="bitmap", dtype=torch.float16, kind=OnGpu):
    dense, w = made(rows, cols, format, dtype=dtype)
    return dense, fake_kernels.on_gpu(w, gpus, dense, kind)


def expected(descriptor, dense, x, values):
    y = host(x).double() @ dense.double().t()
    plain = {name: host(value) for name, value in values.items()}
    plain = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}
    return expressions.apply(descriptor.epilogue, y, plain).to(x.dtype)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("format", ["bitmap", "dense"])
@pytest.mark.parametrize("columns", [1, 2, 16, 17])
def test_a_call_is_its_problem(columns, format, dtype, epilogue, gpus, seed):
    descriptor = SparseMatmul(EPILOGUES[epilogue])
    dense, w = matrix(gpus, format=format, dtype=dtype)
    x, values = gpu(columns, 40, dtype=dtype), values_of(descriptor, 9, dtype)
    values = {k: v.as_subclass(OnGpu) if hasattr(v, "shape") else v for k, v in values.items()}
    found = kl.run_kernel(descriptor, w, x, **values)
    tolerance = 2 * TOLERANCE[dtype]
    wanted = expected(descriptor, dense, x, values)
    torch.testing.assert_close(host(found), wanted, rtol=tolerance, atol=tolerance)
    by_kernels = format == "bitmap" and columns <= 16 and dtype != torch.float32
    assert len(gpus.launches) == 2 * by_kernels and found.dtype == dtype
    assert gpus.lowering.laid_out == (format == "bitmap" and not by_kernels)


def spread(x):
    """The same values in other memory."""
    yield "itself", x
    yield "turned", x.mT.contiguous().mT
    wide = torch.full([n + 3 for n in x.shape], torch.inf, dtype=x.dtype).as_subclass(OnGpu)
    yield "part", wide[tuple(slice(1, n + 1) for n in x.shape)].copy_(x)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].as_subclass(OnGpu)
    yield "unaligned", odd.view(x.shape).copy_(x)
    double = torch.zeros([2 * n for n in x.shape], dtype=x.dtype).as_subclass(OnGpu)
    yield "every other", double[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


@pytest.mark.parametrize("cols", [40, 37])
@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0), (4, 5)])
def test_strides_and_leading_dimensions_are_those_of_the_tensor(leading, cols, gpus, seed):
    dense, w = matrix(gpus, cols=cols)
    x, bias = gpu(*leading, cols), gpu(9)
    wanted = expected(BIASED, dense, x, {"bias": bias})
    for name, other in spread(x) if x.dim() > 1 else [("itself", x)]:
        found = matmul(w, other, bias)
        assert found.is_contiguous()
        torch.testing.assert_close(host(found), wanted, rtol=2e-3, atol=2e-3, msg=name)


def test_an_x_is_read_where_it_is_if_kernels_can(gpus, seed):
    _, w = matrix(gpus)
    x = gpu(6, 40)
    wide = gpu(6, 64)
    for given, copied in (
        (x, False), (x[0], False), (x.view(2, 3, 40), False), (wide[:, 8:48], False),
        (x[:1].expand(6, 40), False), (wide[:, 1:41], True), (gpu(6, 44)[:, :40], True),
        (x.mT.contiguous().mT, True), (gpu(4, 3, 40)[:, :2], True),
    ):  # fmt: skip
        matmul(w, given)
        problem = gpus.lowering.problems[-1]
        assert problem.x_padded == copied, given.stride()
        assert problem.columns == given.numel() // 40


OUTS = {
    "itself": lambda out: out,
    "turned": lambda out: out.mT.contiguous().mT,
    "part": lambda out: zeros_on_gpu(2, 5, 13, dtype=out.dtype)[:, 1:4, 2:11],
    "every other": lambda out: zeros_on_gpu(2, 3, 18, dtype=out.dtype)[..., ::2],
    "backwards": lambda out: zeros_on_gpu(9, 3, 2, dtype=out.dtype).permute(2, 1, 0),
}


@pytest.mark.parametrize("format", ["bitmap", "dense"])
@pytest.mark.parametrize("case", OUTS)
def test_results_are_written_where_they_are_wanted(case, format, gpus, seed):
    dense, w = matrix(gpus, format=format)
    x, bias = gpu(2, 3, 40), gpu(9)
    out = OUTS[case](zeros_on_gpu(2, 3, 9, dtype=torch.float16))
    version = out._version
    assert matmul(w, x, bias, out=out) is out and out._version > version
    wanted = expected(BIASED, dense, x, {"bias": bias})
    torch.testing.assert_close(host(out), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("format", ["bitmap", "dense"])
def test_out_shares_no_memory(format, gpus, seed):
    _, w = matrix(gpus, 40, 40, format)
    x, bias = gpu(3, 40), gpu(40)
    for _ in range(2):  # without a plan and with one
        for out, name in ((x, "x"), (bias.expand(1, 40), "bias")):
            given = x if out is x else x[:1]
            with pytest.raises(ValueError, match=f"out shares memory with {name}"):
                matmul(w, given, bias, out=out)
        inside = w.operands[0].view(torch.float16).view(-1)[:120].view(3, 40)
        with pytest.raises(ValueError, match=r"out shares memory with w\.tensors"):
            matmul(w, x, bias, out=inside)
        matmul(w, x, bias, out=zeros_on_gpu(3, 40, dtype=torch.float16))
        matmul(w, x[:1], bias, out=zeros_on_gpu(1, 40, dtype=torch.float16))


@pytest.mark.parametrize("format", ["bitmap", "dense"])
def test_out_shares_no_memory_with_what_is_copied_first(format, gpus, seed):
    _, w = matrix(gpus, 40, 40, format)
    scaled = SparseMatmul((kl.Bias(), kl.Scale()))
    x, memory = gpu(3, 40), gpu(3, 80)
    out = memory.view(6, 40)[:3]
    for _ in range(2):
        for values, name in (
            ({"bias": memory.flatten()[:80:2], "scale": 2.0}, "bias"),
            ({"bias": gpu(40), "scale": memory[0, 0]}, "scale"),
        ):
            with pytest.raises(ValueError, match=f"out shares memory with {name};"):
                kl.run_kernel(scaled, w, x, out=out, **values)
            apart = zeros_on_gpu(3, 40, dtype=torch.float16)
            kl.run_kernel(scaled, w, x, out=apart, **values)


# Plans.


def test_a_call_like_another_finds_its_plan(gpus, seed):
    dense, w = matrix(gpus)
    x, bias = gpu(3, 40), gpu(9)
    matmul(w, x, bias)
    plan = calls.find(BIASED, (w, x), None, {"bias": bias})
    assert plan is not None
    made = len(gpus.lowering.problems)
    for _ in range(3):
        matmul(w, gpu(3, 40), gpu(9))
    assert len(gpus.lowering.problems) == made and len(gpus.loads) == 2
    other = fake_kernels.on_gpu(SparseMatrix.from_layout(w.layout, w.operands), gpus, dense * 2)
    found = matmul(other, x, bias)  # of one layout: the same plan, another matrix
    assert calls.find(BIASED, (other, x), None, {"bias": bias}) is plan
    assert len(gpus.lowering.problems) == made
    wanted = expected(BIASED, dense * 2, x, {"bias": bias})
    torch.testing.assert_close(host(found), wanted, rtol=2e-3, atol=2e-3)
    for change in (lambda: matmul(w, x), lambda: matmul(w, x[:2], bias), lambda: matmul(w, x[0])):
        before = len(gpus.lowering.problems)
        change(), change()
        assert len(gpus.lowering.problems) == before + 1


def test_scalars_are_not_part_of_a_plan(gpus, seed):
    dense, w = matrix(gpus)
    x, scaled = gpu(3, 40), SparseMatmul(kl.Scale())
    for scale in (2.0, 3.0):
        there = torch.tensor(float(scale)).as_subclass(OnGpu)
        found = kl.run_kernel(scaled, w, x, scale=there)
        torch.testing.assert_close(
            host(found), expected(scaled, dense, x, {"scale": scale}), rtol=2e-3, atol=2e-3
        )
    for scale in (2.0, 3):
        kl.run_kernel(scaled, w, x, scale=scale)
    assert len(gpus.lowering.problems) == 2  # a plan for tensors, one for numbers
    with pytest.raises(ValueError, match="scale must be a number, got nan"):
        kl.run_kernel(scaled, w, x, scale=float("nan"))


def test_the_device_of_the_tensors_is_made_current(gpus, seed):
    _, w = matrix(gpus, kind=OnSecondGpu)
    for columns in (3, 20):
        x = gpu(columns, 40, kind=OnSecondGpu)
        matmul(w, x, out=torch.zeros(columns, 9).half().as_subclass(OnSecondGpu))
        assert gpus.entered == [0]
    assert {each.device for each in gpus.launches} == {1}
    with pytest.raises(ValueError, match="x and w must be on one device, got cuda:0 and cuda:1"):
        matmul(w, gpu(3, 40))


def test_nothing_is_loaded_inside_a_capture(gpus, seed):
    _, w = matrix(gpus)
    x, bias = gpu(3, 40), gpu(9)
    gpus.capturing = True
    with pytest.raises(CaptureError, match=r"kernlib\.prepare"):
        matmul(w, x, bias)
    gpus.capturing = False
    assert not ahead.prepared(BIASED, w, x, bias=bias)
    kl.prepare(BIASED, w, x, bias=bias)
    assert ahead.prepared(BIASED, w, x, bias=bias) and not gpus.launches
    gpus.capturing = True
    with pytest.raises(AssertionError):  # the launch itself, which the fakes refuse to capture
        matmul(w, x, bias)


def test_prepare_loads_what_lays_a_matrix_out(gpus, seed):
    _, w = matrix(gpus)
    gpus.capturing = True
    with pytest.raises(CaptureError, match=r"decode .* is not loaded"):
        kl.prepare(PLAIN, w, gpu(40, 40))
    gpus.capturing = False
    kl.prepare(PLAIN, w, gpu(40, 40))
    assert gpus.lowering.laid_out == 1 and not gpus.launches
    assert ["decode" in each.what for each in gpus.loads] == [True]
    assert ahead.prepared(PLAIN, w, gpu(40, 40))


def test_what_tuning_times(gpus, seed):
    _, w = matrix(gpus)
    x = gpu(3, 40)
    found = ahead.candidates(PLAIN, w, x)
    (candidate,) = found.kernels
    candidate.ready()()
    assert found.device == 0 and len(gpus.launches) == 4
    assert ahead.candidates(PLAIN, w, gpu(40, 40)).kernels == []


def test_devices_too_old_are_refused(gpus, seed):
    class OnOldGpu(OnGpu):
        index = 2

    _, w = matrix(gpus, kind=OnOldGpu)
    with pytest.raises(kl.UnsupportedError, match="GPU 2"):
        matmul(w, gpu(3, 40, kind=OnOldGpu))


def test_empty_products_launch_nothing(gpus, seed):
    for rows, cols, columns in ((9, 40, 0), (0, 40, 3), (9, 0, 3)):
        dense, w = matrix(gpus, rows, cols)
        x, bias = gpu(columns, cols), gpu(rows)
        found = matmul(w, x, bias, kl.Relu())
        wanted = expected(SparseMatmul((kl.Bias(), kl.Relu())), dense, x, {"bias": bias})
        assert torch.equal(host(found), wanted) and not gpus.launches
        assert gpus.lowering.laid_out == 0


def test_lazy_operands_are_made_real(gpus, seed):
    dense, w = matrix(gpus)
    x = torch.randn(3, 40).half()
    zero = torch._efficientzerotensor((3, 40), dtype=torch.float16)
    for given in (torch._neg_view(x), zero):
        found = matmul(w, given.as_subclass(OnGpu))
        wanted = expected(PLAIN, dense, given.clone(), {})
        torch.testing.assert_close(host(found), wanted, rtol=2e-3, atol=2e-3)


# Gradients. Of a subclass autograd sees nothing special.


@pytest.mark.parametrize("columns", [3, 40])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gradients_go_by_the_transpose_of_few_vectors(epilogue, columns, gpus, seed, monkeypatch):
    descriptor = SparseMatmul(EPILOGUES[epilogue])
    dense, w = matrix(gpus)
    _, turned = matrix(gpus, 40, 9)
    gpus.lowering.matrices[turned.operands[0].data_ptr()] = dense.t()
    made = []

    def transpose(self):
        made.append(self)
        return turned

    monkeypatch.setattr(SparseMatrix, "transpose", transpose)
    monkeypatch.setattr(SparseMatrix, "known_transpose", lambda self: turned if made else None)
    x, values = gpu(columns, 40).requires_grad_(), values_of(descriptor, 9, torch.float16)
    values = {
        k: v.as_subclass(OnGpu).requires_grad_() if hasattr(v, "shape") else v
        for k, v in values.items()
    }
    tensors = [x, *(v for v in values.values() if hasattr(v, "shape"))]
    grad = torch.randn(columns, 9).half()
    for _ in range(2):  # without a plan of the product, and with one
        y = kl.run_kernel(descriptor, w, x, **values)
        found = torch.autograd.grad(y, tensors, grad.as_subclass(OnGpu))
        wide = [host(t).detach().double().requires_grad_() for t in tensors]
        named = dict(zip([k for k, v in values.items() if hasattr(v, "shape")], wide[1:],
                         strict=True))  # fmt: skip
        z = expressions.apply(descriptor.epilogue, wide[0] @ dense.double().t(), values | named)
        wanted = torch.autograd.grad(z, wide, grad.double())
        for ours, theirs in zip(found, wanted, strict=True):
            error = (host(ours).double() - theirs).norm() / theirs.norm()
            assert error < 5e-3
    if epilogue in ("none", "bias"):  # behind others the fakes' gradient is one of the host
        assert bool(made) == (columns == 3)


def test_a_gradient_inside_a_capture_makes_no_transpose(gpus, seed):
    _, w = matrix(gpus)
    grad = gpu(3, 9)
    gpus.capturing = True
    assert operation.transpose_for(w, grad) is None


def test_vmap_goes_by_the_operator(gpus, seed, monkeypatch):
    """As one call of all vectors."""
    seen = []
    monkeypatch.setattr(operators, "called", lambda *a: seen.append(a) or a[2].sum(-1))
    _, w = matrix(gpus)
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(operation, "check_x", lambda shape, *_: (2, shape[0]))
    torch.vmap(lambda x: matmul(w, x))(torch.randn(3, 2, 40).half())
    assert len(seen) == 1


@pytest.mark.parametrize("leading", [(), (1,), (3,), (20,), (2, 12)])
def test_results_of_cublas_are_no_views(leading, seed):
    """One that is made while a product is recorded could not be written in place."""
    dense, x, bias = torch.randn(9, 40), torch.randn(*leading, 40), torch.randn(9)
    with torch.no_grad():
        for descriptor, values in ((PLAIN, {}), (BIASED, {"bias": bias})):
            found = plans.by_dense(descriptor, dense, x, values)
            wanted = torch.nn.functional.linear(x, dense, values.get("bias"))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            assert not found._is_view()

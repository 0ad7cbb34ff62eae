"""Products with compressed matrices on CPU tensors, where torch computes them."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.descriptors.text import from_text, to_text
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.runtime import expressions
from kernlib.sparse import compress, matmul
from tests.families.sparse.cases import (
    BIASED,
    DTYPES,
    EPILOGUES,
    FORMATS,
    made,
    random,
    values_of,
)

# Of a whole result, relative: half a unit in the last place, since the results here are few.
TOLERANCE = {"fp16": 4.9e-4, "bf16": 3.9e-3, "fp32": 1e-6}
PLAIN = SparseMatmul()
every_format = pytest.mark.parametrize("format", FORMATS)


def relative_error(found, wanted) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def exact(dense, x, epilogue=(), values=None):
    y = x.double() @ dense.double().t()
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in (values or {}).items()}
    return expressions.apply(epilogue, y, wide)


# The descriptor.


def test_a_descriptor_is_a_value():
    one = SparseMatmul((kl.Bias(), kl.Gelu()))
    two = SparseMatmul([kl.Bias(), kl.Gelu()])
    assert one == two and hash(one) == hash(two) and one.canonical() == two.canonical()
    assert one != PLAIN and PLAIN.parameters == () and SparseMatmul(kl.Bias()) == BIASED
    assert one.parameters == one.vectors == ("bias",) and one.family == "sparse"
    assert SparseMatmul(kl.Laplace()).positive == {"bandwidth"}
    assert one.describe() == f"SparseMatmul({kl.Bias()}, {kl.Gelu()})"
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), from_text(to_text(one))):
        assert again == one
    assert one.replace(epilogue=()) == PLAIN
    with pytest.raises(TypeError, match="epilogue must be made of"):
        SparseMatmul("gelu")
    with pytest.raises(ValueError, match="share the parameter"):
        SparseMatmul((kl.Bias(), kl.Bias()))


# Values.


@every_format
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("numbers", DTYPES)
def test_values_are_those_of_the_dense_product(numbers, epilogue, format, seed):
    dtype = DTYPES[numbers]
    descriptor = SparseMatmul(EPILOGUES[epilogue])
    for rows, cols, columns, density in [(37, 300, 1, 0.5), (16, 256, 8, 0.1), (5, 7, 33, 0.9)]:
        dense, w = made(rows, cols, format, density=density, dtype=dtype)
        x = torch.randn(columns, cols).to(dtype)
        values = values_of(descriptor, rows, dtype)
        y = kl.run_kernel(descriptor, w, x, **values)
        wanted = exact(dense, x, descriptor.epilogue, values)
        assert y.dtype == dtype and y.is_contiguous()
        assert relative_error(y, wanted) <= TOLERANCE[numbers]


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 3, 1), (0,), (2, 0, 3)])
def test_leading_dimensions(leading, seed):
    dense, w = made(9, 40)
    x, bias = torch.randn(*leading, 40), torch.randn(9)
    y = matmul(w, x, bias)
    assert y.shape == (*leading, 9)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, dense, bias))


def test_matmul_is_run_kernel(seed):
    dense, w = made(9, 40)
    x, bias = torch.randn(3, 40), torch.randn(9)
    linear = torch.nn.functional.linear
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    torch.testing.assert_close(matmul(w, x), linear(x, dense))
    torch.testing.assert_close(matmul(w, x, epilogue=kl.Gelu()), gelu(linear(x, dense)))
    found = matmul(w, x, bias, (kl.Silu(), kl.Scale()), scale=2.0)
    torch.testing.assert_close(found, 2 * silu(linear(x, dense, bias)))
    assert torch.equal(found, matmul(w, x, bias, [kl.Silu(), kl.Scale()], scale=torch.tensor(2.0)))
    out = torch.empty(3, 9)
    assert matmul(w, x, bias, out=out) is out and torch.equal(out, matmul(w, x, bias))


def test_operands_of_any_strides(seed):
    _, w = made(9, 40)
    x = torch.randn(6, 40)
    wanted = matmul(w, x)
    for other in (x.t().contiguous().t(), torch.stack((x, x), -1)[..., 0], x.repeat(1, 2)[:, 40:]):
        torch.testing.assert_close(matmul(w, other), wanted)
    row = x[:1].expand(4, 40)
    torch.testing.assert_close(matmul(w, row), wanted[:1].expand(4, 9))
    negated = torch.complex(x, -x).conj().imag
    torch.testing.assert_close(matmul(w, negated), wanted)
    torch.testing.assert_close(matmul(w, torch._efficientzerotensor((3, 40))), torch.zeros(3, 9))


# What is wrong.


def wrong_calls():
    """Beside those of ``library_cases``."""
    _, w = made(9, 40)
    x, bias = torch.randn(3, 40), torch.randn(9)
    other = torch.device("meta")
    run = kl.run_kernel
    return {
        "sparse x": (lambda: run(PLAIN, w, x.to_sparse()), TypeError, "x must be a dense tensor"),
        "float64": (lambda: run(PLAIN, w, x.double()), TypeError, "x must be one of float32"),
        "int": (lambda: run(PLAIN, w, x.int()), TypeError, "x must be one of"),
        "device": (lambda: run(PLAIN, w, x.to(other)), ValueError, "one device, got meta and cpu"),
        "no dimension": (lambda: run(PLAIN, w, torch.ones(())), ValueError, r"shape \(\)"),
        "transposed": (lambda: run(PLAIN, w, torch.ones(40, 3)), ValueError, r"shape \(40, 3\)"),
        "bias 2-D": (lambda: run(BIASED, w, x, bias=bias[None]), ValueError, "bias must have sha"),
        "a number": (lambda: run(BIASED, w, x, bias=1.0), TypeError, "bias must be a dense tensor"),
        "bias' dtype": (lambda: run(BIASED, w, x, bias=bias.half()), TypeError, "x and bias must"),
        "bias' device": (
            lambda: run(BIASED, w, x, bias=bias.to(other)), ValueError, "x and bias must be on one",
        ),
        "out's device": (
            lambda: run(PLAIN, w, x, out=torch.ones(3, 9, device=other)), ValueError, "on the dev",
        ),
        "out overlaps": (
            lambda: run(PLAIN, w, x, out=torch.ones(1, 9).expand(3, 9)), ValueError, "overlaps its",
        ),
        "positive": (
            lambda: run(SparseMatmul(kl.Laplace()), w, x, bandwidth=-1), ValueError, "greater than",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", wrong_calls())
def test_what_is_wrong_is_said(case):
    call, kind, message = wrong_calls()[case]
    with pytest.raises(kind, match=message):
        call()


def test_out_shares_no_memory(seed):
    _, w = made(40, 40, "dense")
    x = torch.randn(3, 40)
    with pytest.raises(ValueError, match="out shares memory with x"):
        matmul(w, x, out=x)
    with pytest.raises(ValueError, match=r"out shares memory with w\.tensors\['values'\]"):
        matmul(w, x, out=w.tensors["values"][:3])
    bias = torch.randn(40)
    with pytest.raises(ValueError, match="out shares memory with bias"):
        matmul(w, x[:1], bias, out=bias[None])


# Autocast.


def test_autocast_casts_to_the_matrix(seed):
    for dtype in DTYPES.values():
        _, w = made(9, 40, dtype=dtype)
        x, bias = torch.randn(3, 40), torch.randn(9)
        wanted = matmul(w, x.to(dtype), bias.to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(matmul(w, x, bias), wanted)
            assert torch.equal(matmul(w, x.half(), bias.bfloat16()).float(), matmul(
                w, x.half().to(dtype), bias.bfloat16().to(dtype)).float())  # fmt: skip
            with pytest.raises(TypeError, match="x must be one of"):
                matmul(w, x.double())


# Gradients.


@every_format
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gradients_are_those_of_the_dense_product(epilogue, format, seed):
    descriptor = SparseMatmul(EPILOGUES[epilogue])
    dense, w = made(9, 40, format)
    for shape in ((40,), (3, 40), (2, 2, 40), (0, 40)):
        x = torch.randn(shape, requires_grad=True)
        values = values_of(descriptor, 9)
        tensors = [x, *(v.requires_grad_() for v in values.values() if hasattr(v, "shape"))]

        def results(y, tensors=tensors):
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            twice = torch.autograd.grad(sum(t.square().sum() for t in first), tensors)
            return y, *first, *twice

        y = torch.nn.functional.linear(x, dense)
        wanted = results(expressions.apply(descriptor.epilogue, y, values))
        found = results(kl.run_kernel(descriptor, w, x, **values))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_transforms_of_torch_func(seed):
    dense, w = made(9, 40)
    x, bias = torch.randn(5, 40), torch.randn(9)

    def theirs(x, bias):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, dense, bias))

    def ours(x, bias):
        return matmul(w, x, bias, kl.Gelu())

    func = torch.func
    for transform, tensors in (
        (lambda f: func.vmap(f, (0, None)), (x, bias)),
        (lambda f: func.vmap(f, (1, None)), (x.t().contiguous(), bias)),
        (lambda f: func.vmap(f), (x, torch.randn(5, 9))),
        (lambda f: func.grad(lambda *a: f(*a).square().sum(), (0, 1)), (x, bias)),
        (lambda f: func.vmap(func.grad(lambda *a: f(*a).sum()), (0, None)), (x, bias)),
        (lambda f: func.jacrev(f), (x[0], bias)),
        (lambda f: func.jacfwd(f), (x[0], bias)),
        (lambda f: func.hessian(lambda *a: f(*a).square().sum()), (x[0], bias)),
        (lambda f: lambda *a: func.jvp(f, a, a), (x, bias)),
    ):
        found, wanted = transform(ours)(*tensors), transform(theirs)(*tensors)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_batched_gradients(seed):
    dense, w = made(9, 40)
    x = torch.randn(3, 40, requires_grad=True)
    grads = torch.randn(4, 3, 9)
    (found,) = torch.autograd.grad(matmul(w, x), x, grads, is_grads_batched=True)
    torch.testing.assert_close(found, grads @ dense)


# Unusual values and sizes.


@every_format
def test_values_that_are_not_finite(format, seed):
    """The CPU's product is that of the dense matrix, and other vectors keep their bits."""
    dense, w = made(20, 300, format, dtype=torch.float16)
    for value in (math.inf, -math.inf, math.nan):
        x = torch.randn(3, 300).half()
        clean = matmul(w, x)
        x[1, 7] = value
        found = matmul(w, x)
        wanted = torch.nn.functional.linear(x.float(), dense.float()).half()
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert torch.equal(found[::2], clean[::2])
        assert not found[1].isfinite().any()  # zeros are multiplied too on a CPU


@every_format
def test_empty_full_and_narrow_matrices(format, seed):
    for rows, cols in [(1, 1), (1, 40), (40, 1), (0, 7), (7, 0), (0, 0), (33, 257)]:
        for density in (0, 0.5, 1):
            dense, w = made(rows, cols, format, density=density, dtype=torch.float16)
            x, bias = torch.randn(3, cols).half(), torch.randn(rows).half()
            y = matmul(w, x, bias)
            wanted = torch.nn.functional.linear(x.double(), dense.double(), bias.double())
            torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)
    dense = random(40, 64, dtype=torch.float16)
    dense[::3] = 0
    w = compress(dense, format)
    assert not matmul(w, torch.randn(64).half())[::3].any()


def test_an_import_loads_no_torch():
    code = """
import sys
before = set(sys.modules)  # wheels of CUDA 12 leave cuda there
import kernlib, kernlib.sparse
assert not {"torch", "cuda", "lmdb"} & set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Before a call.


def test_a_cpu_call_needs_no_preparation(seed):
    _, w = made(9, 40)
    x, bias = torch.randn(3, 40), torch.randn(9)
    kl.prepare(BIASED, w, x, bias=bias)
    assert ahead.prepared(BIASED, w, x, bias=bias)
    with pytest.raises(TypeError, match="takes w and x, got 1 operands"):
        kl.prepare(BIASED, w, bias=bias)
    with pytest.raises(ValueError, match="needs bias"):
        kl.prepare(BIASED, w, x)
    with pytest.raises(kl.UnsupportedError, match="timed on the GPU"):
        kl.tune(BIASED, w, x, bias=bias)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "dense"])
def test_kernels_are_named_for_a_gpu_that_is_not_here(format, seed):
    _, w = made(64, 512, format, density=0.2, dtype=torch.float16)
    for columns in (1, 8, 16):
        x = torch.empty(columns, 512, dtype=torch.float16, device="meta")
        bias = torch.empty(64, dtype=torch.float16, device="meta")
        given = (w.to("meta"), x), {"bias": bias}
        found = ahead.specs(BIASED, "sm_90a", *given)
        known = ahead.variants(BIASED, "sm_90a", (torch.float16,))
        assert found and set(found) <= set(known)
    many = torch.empty(1999, 512, dtype=torch.float16, device="meta")
    (layer,) = ahead.specs(BIASED, "sm_90a", (w.to("meta"), many), {"bias": bias})
    assert layer.entry.startswith("kernlib_sparse_") and layer not in known  # lays w out for cuBLAS


def test_kernels_of_panels_are_compiled_ahead_for_a_matrix(seed):
    w = compress(random(64, 1200, dtype=torch.float16), "u4", columns=4)
    given = w, torch.randn(4, 1200).half()
    entries = kl.compile(SparseMatmul(), archs=("sm_90a",), specs=given)
    product, total = (entry.kernel for entry in entries)
    assert product.startswith("kernlib_sparse_slices_u4_float16_")
    assert total.startswith("kernlib_sparse_slices_reduce_float16")


def test_kernels_are_compiled_ahead_for_a_matrix(seed):
    w, x = compress(random(64, 80, dtype=torch.float16), "u4"), torch.randn(80).half()
    for given in ((w, x), (w.to("meta"), x.to("meta"))):
        entries = kl.compile(SparseMatmul(), archs=("sm_90a",), specs=given)
        (product,) = (entry.kernel for entry in entries)
        assert product.startswith("kernlib_sparse_parts_u4_float16_")
    with pytest.raises(kl.UnsupportedError, match=r"kernlib\.compile"):
        kl.prepare(SparseMatmul(), w.to("meta"), x.to("meta"))

"""kermac's names, on CPU tensors against plain float64: its semantics where they were right, and
what takes their place where they were not."""

import importlib
import inspect
import itertools
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.compat import kermac
from kernlib.compat.kermac import Inner, Kernel, KernelDescriptor, Op, Outer
from kernlib.runtime import devices

M, N, K, L, O = 6, 7, 5, 3, 2
INF, NAN = math.inf, math.nan
ALL = list(itertools.product(Op, Inner, Outer, Kernel))
INNER_P, OUTER_P, BANDWIDTH = 1.3, 0.7, 40.0
VALUE = {
    "NOOP": lambda v, p: v,
    "ABS": lambda v, p: v.abs(),
    "SQUARE": lambda v, p: v * v,
    "SQRT": lambda v, p: v.sqrt(),
}


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


A, B = draw(M, K), draw(N, K, seed=1)


def differences(a, b):
    return (b.double().unsqueeze(-3) - a.double().unsqueeze(-2)).abs()


def oracle(op, inner, outer, kernel, a, b, epsilon=1e-5):
    a, b = a.double().unsqueeze(-2), b.double().unsqueeze(-3)
    v = b - a if op is Op.DIFF else b * a
    s = v.abs() ** INNER_P if inner is Inner.POW else VALUE[inner.name](v, None)
    s = s.sum(-1)
    s = s**OUTER_P if outer is Outer.POW else VALUE[outer.name](s, None)
    if kernel is Kernel.NONE:
        return s
    s = torch.where(s.abs() < epsilon, 0.0, s)
    return torch.exp(-s / (BANDWIDTH if kernel is Kernel.LAPLACE else 2 * BANDWIDTH**2))


def arguments(inner, outer, kernel):
    given = {"inner_p": INNER_P} if inner is Inner.POW else {}
    given |= {"outer_p": OUTER_P} if outer is Outer.POW else {}
    return given | ({"bandwidth": BANDWIDTH} if kernel is not Kernel.NONE else {})


@pytest.mark.parametrize(("op", "inner", "outer", "kernel"), ALL, ids=lambda x: x.name)
def test_every_combination(op, inner, outer, kernel):
    a, b = A.abs(), B.abs() + (4 if op is Op.DIFF else 0)  # so that square roots have values
    made = KernelDescriptor(op, inner, outer, kernel)
    found = kermac.run_kernel(made, a, b, **arguments(inner, outer, kernel))
    assert found.shape == (1, M, N) and found.dtype == torch.float32
    expected = oracle(op, inner, outer, kernel, a, b)
    torch.testing.assert_close(found[0].double(), expected, rtol=2e-5, atol=2e-5)


NAMED = {
    "l1_norm": lambda a, b: differences(a, b).sum(-1),
    "l2_norm": lambda a, b: differences(a, b).square().sum(-1).sqrt(),
    "p_norm": lambda a, b: (differences(a, b) ** 1.7).sum(-1) ** (1 / 1.7),
    "laplace_l1": lambda a, b: torch.exp(-differences(a, b).sum(-1) / 3),
    "laplace_l2": lambda a, b: torch.exp(-differences(a, b).square().sum(-1).sqrt() / 3),
    "mma": lambda a, b: a.double() @ b.double().mT,
}


@pytest.mark.parametrize("name", NAMED)
def test_the_named_descriptors(name):
    given = {"p": 1.7} if name == "p_norm" else {}
    given |= {"bandwidth": 3} if name.startswith("laplace") else {}
    found = kermac.run_kernel(getattr(kermac, name), A, B, **given)
    torch.testing.assert_close(found[0].double(), NAMED[name](A, B), rtol=1e-5, atol=1e-5)


def test_the_signatures_are_kermacs():
    expected = {
        kermac.run_kernel: "kernel_descriptor a b out p inner_p outer_p bandwidth epsilon "
        "regularization regularization_offset_x regularization_offset_y try_to_align debug",
        kermac.cdist: "a b out p skip_epilogue try_to_align debug",
        kermac.cdist_grad: "a b c d out p eps debug",
        kermac.cdist_expadd: "a b out p lengthscale scale try_to_align debug",
        kermac.cdist_grad_expadd: "a b c d out p q c0 lengthscale scale eps s_km "
        "try_to_align debug",
        kermac.solve_cholesky: "a b fill_mode overwrite_a overwrite_b check_errors debug",
        kermac.solve_lu: "a b overwrite_a overwrite_b check_errors debug",
        kermac.eigh: "a fill_mode overwrite_a check_errors",
        kermac.pre_compile_descriptors: "device descriptors try_to_align debug",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split()
    assert all(hasattr(kermac, name) for name in kermac.__all__)


# Ranks, outputs, layouts.


def test_an_allocated_result_has_a_batch():
    assert kermac.cdist(A, B).shape == (1, M, N)
    assert kermac.cdist(A[None], B).shape == (1, M, N)
    assert kermac.cdist(A.expand(L, -1, -1), B).shape == (L, M, N)
    assert kermac.cdist_expadd(A, B, scale=-1.0).shape == (1, M, N)


@pytest.mark.parametrize("shape", [(M, N), (1, M, N)])
def test_a_given_out_keeps_its_rank(shape):
    out = torch.full(shape, NAN)
    assert kermac.cdist(A, B, out) is out
    torch.testing.assert_close(out.view(M, N), torch.cdist(A, B))
    assert kermac.run_kernel(kermac.mma, A, B, out=out) is out
    torch.testing.assert_close(out.view(M, N), A @ B.mT)


@pytest.mark.parametrize("number", range(8))
def test_the_diagonal_is_where_the_offsets_say_in_every_layout(number):
    def laid(t, column_major):
        return t.mT.contiguous().mT if column_major else t

    a, b = laid(A, number & 1), laid(B, number & 2)
    out = laid(torch.full((M, N), NAN), number & 4)
    options = {"bandwidth": 3.0, "epsilon": 0.0}
    plain = kermac.run_kernel(kermac.laplace_l1, a, b, **options)[0]
    kermac.run_kernel(
        kermac.laplace_l1, a, b, out, regularization=0.5, regularization_offset_x=2, **options
    )
    rows, columns = torch.arange(M)[:, None], torch.arange(N)
    torch.testing.assert_close(out - plain, 0.5 * (rows == columns + 2).float())
    kermac.run_kernel(
        kermac.laplace_l1, a, b, out, regularization=0.5, regularization_offset_y=2, **options
    )
    torch.testing.assert_close(out - plain, 0.5 * (rows + 2 == columns).float())


# Descriptors.


def test_descriptors_stay_as_they_are():
    before = kermac.cdist(A, B, p=2.0)
    squares = kermac.cdist(A, B, p=2.0, skip_epilogue=True)
    torch.testing.assert_close(squares, before**2)
    assert torch.equal(kermac.cdist(A, B, p=2.0), before)
    with pytest.raises(AttributeError):
        kermac.l2_norm.outer = Outer.NOOP
    with pytest.raises(AttributeError):
        kermac.l2_norm.surprise = 1


def test_descriptors_are_values():
    made = KernelDescriptor(Op.DIFF, Inner.ABS, Outer.NOOP, Kernel.LAPLACE)
    assert made == kermac.laplace_l1 and hash(made) == hash(kermac.laplace_l1)
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.pairwise == kl.laplace_l1()
    assert len({KernelDescriptor(*each) for each in ALL}) == 150
    with pytest.raises(TypeError, match="inner_power must be of PowerType, got <KernelType"):
        KernelDescriptor(Op.DIFF, Kernel.NONE)


def test_every_name_of_kermac_is_there():
    by_name = KernelDescriptor(
        inner_operator=kermac.InnerOperator.DIFF,
        inner_power=kermac.PowerType.SQUARE,
        outer_power=kermac.PowerType.SQRT,
        kernel_type=kermac.KernelType.LAPLACE,
    )
    assert by_name == kermac.kernel_descriptor_laplace_l2 == kermac.laplace_l2
    for name in ("l1_norm", "l2_norm", "p_norm", "laplace_l1", "laplace_l2", "mma"):
        assert getattr(kermac, f"kernel_descriptor_{name}") is getattr(kermac, name)
    enums = {
        kermac.InnerOperator: "DIFF DOT",
        kermac.PowerType: "NOOP ABS SQUARE SQRT POW",
        kermac.KernelType: "NONE LAPLACE GAUSSIAN",
        kermac.Symmetry: "NonSymmetric Symmetric",
        kermac.FillMode: "UPPER LOWER",
        kermac.Majorness: "COL_MAJOR ROW_MAJOR",
        kermac.Alignment: "ALIGN_1 ALIGN_4",
    }
    for enum, names in enums.items():
        assert [each.name for each in enum] == names.split()
    solvers = importlib.import_module("kernlib.compat.kermac.linalg")
    for name in ("solve_cholesky", "solve_lu", "eigh"):
        assert getattr(solvers, name) is getattr(kermac, name) is getattr(kermac.linalg, name)


@pytest.mark.few(0)
def test_the_module_is_an_attribute_of_its_package():
    code = "import kernlib; kernlib.compat.kermac.cdist"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        kl.compat.other  # noqa: B018


# cdist.


@pytest.mark.parametrize("p", [0.5, 1, 1.0, 1.3, 2, np.float32(2.0), 3])
@pytest.mark.parametrize("skip_epilogue", [False, True])
def test_distances_and_power_sums(p, skip_epilogue):
    found = kermac.cdist(A, B, p=p, skip_epilogue=skip_epilogue)
    sums = (differences(A, B) ** float(p)).sum(-1)
    expected = sums if skip_epilogue else sums ** (1 / float(p))
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_limits_of_p():
    a, b = A.round(), B.round()
    torch.testing.assert_close(kermac.cdist(a, b, p=INF)[0], torch.cdist(a, b, p=INF))
    torch.testing.assert_close(kermac.cdist(a, b, p=0)[0], torch.cdist(a, b, p=0.0))
    with pytest.raises(ValueError, match="skip_epilogue asks for power sums"):
        kermac.cdist(a, b, p=INF, skip_epilogue=True)
    for p in (-1.0, NAN):
        with pytest.raises(ValueError, match="p must be 0 or greater"):
            kermac.cdist(a, b, p=p)


# Hyperparameters.

BATCHED = {
    "zero dimensions": torch.tensor(1.7),
    "one": torch.tensor([1.7]),
    "each": torch.tensor([0.6, 1.7, 2.5]),
    "expanded": torch.tensor([1.7]).expand(L),
    "strided": torch.tensor([0.6, 9.0, 1.7, 9.0, 2.5])[::2],
}


@pytest.mark.parametrize("name", BATCHED)
def test_tensors_of_exponents_and_bandwidths_are_a_loop_over_numbers(name):
    p, a = BATCHED[name], draw(L, M, K)
    made = KernelDescriptor(Op.DIFF, Inner.POW, Outer.POW, Kernel.LAPLACE)
    found = kermac.run_kernel(made, a, B, p=p, bandwidth=p + 1)
    for l, value in enumerate(p.expand(L).tolist()):
        one = kermac.run_kernel(made, a[l], B, p=value, bandwidth=value + 1)
        torch.testing.assert_close(found[l], one[0])


@pytest.mark.filterwarnings("error")
def test_as_many_values_as_features_are_a_batch():
    values = torch.linspace(1.0, 2.0, K)
    made = KernelDescriptor(Op.DIFF, Inner.ABS, Outer.NOOP, Kernel.LAPLACE)
    assert kermac.run_kernel(made, A, B, bandwidth=values).shape == (K, M, N)
    assert kermac.cdist(A, B, p=values).shape == (K, M, N)


def test_an_epsilon_is_as_large_as_kermacs_and_can_be_left_out():
    assert inspect.signature(kermac.run_kernel).parameters["epsilon"].default is None
    tiny, near = A * 1e-7, B * 1e-7
    options = {"bandwidth": 1e-6}
    assert torch.equal(kermac.run_kernel(kermac.laplace_l1, tiny, near, **options),
                       torch.ones(1, M, N))  # fmt: skip
    found = kermac.run_kernel(kermac.laplace_l1, tiny, near, epsilon=0.0, **options)[0]
    expected = torch.exp(-differences(tiny, near).sum(-1) / 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    dot = KernelDescriptor(Op.DOT, Inner.NOOP, Outer.NOOP, Kernel.LAPLACE)
    found = kermac.run_kernel(dot, -A.abs(), B.abs(), bandwidth=3.0)[0]
    torch.testing.assert_close(found, torch.exp(A.abs() @ B.abs().mT / 3))


POWERS = KernelDescriptor(Op.DIFF, Inner.POW, Outer.POW, Kernel.NONE)


def test_an_out_that_does_not_fit():
    with pytest.raises(ValueError, match="out must be 3-D for a batch"):
        kermac.cdist(draw(L, M, K), B, torch.empty(M, N))
    square = draw(K, K)
    with pytest.raises(ValueError, match="out shares memory with a"):
        kermac.cdist(square, B[:K], square)
    with pytest.raises(ValueError, match="out overlaps itself"):
        kermac.cdist(A, B, torch.empty(1, N).expand(M, N))


# Gradients.


def pairs(*batch, dtype=torch.float64):
    """a (K, M), b (N, K), c (O, K), d (N, M)."""
    shapes = ((K, M), (N, K), (O, K), (N, M))
    return [draw(*batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def gradient(a, b, c, d, p):
    v = d.double().unsqueeze(-2) - b.double().unsqueeze(-1)  # (N, K, M)
    slope = torch.where(v == 0, 0.0, v.sign() * v.abs() ** (p - 1))
    return torch.einsum("...ok,...km,...nkm->...onm", c.double(), a.double(), slope)


@pytest.mark.parametrize("p", [0.8, 1, 1.2, 2.0, 3])
@pytest.mark.parametrize("batch", [(), (L,)])
def test_the_gradient_of_distances(p, batch):
    tensors = pairs(*batch)
    found = kermac.cdist_grad(*tensors, p=p)
    assert found.shape == (*(batch or (1,)), O, N, M)
    torch.testing.assert_close(found, gradient(*tensors, p).view_as(found))
    out = torch.full((O, N, M), NAN, dtype=torch.float64)
    assert batch or kermac.cdist_grad(*tensors, out=out, p=p) is out
    assert batch or torch.equal(out, found[0])


# The expadd family: xRFM's own tests have these sizes and tolerances.


@pytest.mark.parametrize("k", [7, 12, 29])
@pytest.mark.parametrize("p", [0.8, 1.2])
def test_powers_of_sums_and_their_gradient(k, p):
    x, z = draw(11, k), draw(13, k, seed=1)
    c0, q, scale = 0.3, 2.0, -(1.5**-p)
    s = kermac.cdist_expadd(z, x, p=p, scale=scale)
    v = differences(z, x)
    torch.testing.assert_close(s[0].double(), torch.exp(scale * v**p).sum(-1), atol=1e-4, rtol=1e-4)
    a, c = torch.ones(13, 11), draw(2, 13, seed=2)
    values = {"p": p, "q": q, "c0": c0, "scale": scale}
    d = x.double().requires_grad_()
    kernel = (c0 + torch.exp(scale * (d - z.double()[:, None]).abs() ** p).sum(-1)) ** q  # (13, 11)
    expected = torch.stack(
        [torch.autograd.grad((one.double() @ kernel).sum(), d, retain_graph=True)[0].mT
         for one in c]
    )  # fmt: skip
    for more in ({}, {"s_km": s}, {"s_km": s[0], "eps": 1e-10}):
        found = kermac.cdist_grad_expadd(a, z.mT, c, x.mT, **values, **more)
        assert found.shape == (1, 2, k, 11)
        torch.testing.assert_close(found[0].double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("length", [2.0, torch.tensor(2.0), torch.tensor([2.0, 3.0])])
def test_a_lengthscale_has_kermacs_sign(length):
    found = kermac.cdist_expadd(A, B, p=1.3, lengthscale=length)
    for l, one in enumerate(torch.as_tensor(length).reshape(-1).tolist()):
        expected = torch.exp(differences(A, B) ** 1.3 / one**1.3).sum(-1)
        torch.testing.assert_close(found[l].double(), expected, rtol=1e-5, atol=1e-5)
    given = kermac.cdist_expadd(A, B, p=1.3, lengthscale=length, scale=-0.5)
    assert torch.equal(given, kermac.cdist_expadd(A, B, p=1.3, scale=-0.5))
    with pytest.raises(ValueError, match="give scale or lengthscale, got neither"):
        kermac.cdist_expadd(A, B)


# Helpers.


def test_a_timer_on_a_machine_without_a_gpu_takes_the_clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timer = kermac.CudaTimer()
    with pytest.raises(RuntimeError, match="was not started"):
        timer.stop()
    timer.start()
    assert timer.stop() >= 0
    with kermac.CudaTimer() as timer:
        sum(range(1000))
    assert timer.elapsed > 0


def test_how_a_tensor_lies_in_memory():
    buffer = torch.empty(3, 8, 12)
    found = kermac.tensor_stats(buffer)
    assert found.shape == (3, 8, 12) and found.majorness is kermac.Majorness.ROW_MAJOR
    assert found.alignment is kermac.Alignment.ALIGN_4
    assert (found.num_batches, found.batch_stride, found.leading_dimension_stride) == (3, 96, 12)
    turned = kermac.tensor_stats(buffer[1].mT)
    assert turned.shape == (1, 12, 8) and turned.majorness is kermac.Majorness.COL_MAJOR
    assert turned.batch_stride == 0 and turned.leading_dimension_stride == 12
    for odd in (buffer[:, :, 1:], torch.empty(3, 8, 11), torch.empty(290).as_strided((2, 8, 12),
                (97, 12, 1))):  # fmt: skip  # the last by its batch stride
        assert kermac.tensor_stats(odd).alignment is kermac.Alignment.ALIGN_1
    with pytest.raises(ValueError, match="must be row- or column-major, got shape"):
        kermac.tensor_stats(buffer[:, ::2, ::2])
    with pytest.raises(ValueError, match="2 or 3 dimensions, got shape"):
        kermac.tensor_stats(buffer[0, 0])
    for wrong in ([1.0], buffer.double()):
        with pytest.raises(TypeError, match="tensor must be a float32 tensor"):
            kermac.tensor_stats(wrong)


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_division_rounded_up(a, b, expected):
    assert kermac.ceil_div(a, b) == expected


def test_descriptors_compiled_ahead_are_what_calls_of_every_layout_use(monkeypatch):
    jobs = []
    monkeypatch.setattr(devices, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(ahead, "build_all", lambda wanted, *_: jobs.extend(wanted))
    kermac.pre_compile_descriptors("cuda:0", [kermac.l1_norm, POWERS])
    sources = {spec.source for spec, arch in jobs if arch == "sm_90a"}
    for inner in ("Abs", "Power"):
        mine = [text for text in sources if f"using Inner = {inner};" in text]
        found = {tuple(part in text for part in ("TILE = 128", "LONG_K = true")) for text in mine}
        assert len(found) == 4
        for side, access in itertools.product("AB", ("features", "points", "strided")):
            assert any(f"ACCESS_{side} = Access::{access};" in text for text in mine)
    jobs.clear()
    kermac.pre_compile_descriptors(0, kermac.l1_norm)
    assert {spec.source for spec, _ in jobs} < sources
    with pytest.raises(kl.UnsupportedError, match="compiled for a GPU"):
        kermac.pre_compile_descriptors("cpu", kermac.l1_norm)
    with pytest.raises(TypeError, match="KernelDescriptors, got"):
        kermac.pre_compile_descriptors(0, [kl.l1_distance()])

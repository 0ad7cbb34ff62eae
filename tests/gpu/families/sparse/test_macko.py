"""Matrices in MACKO's format on the GPU: the codec against the CPU's, products against float64."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.compat import macko as compat
from kernlib.families.sparse.formats import macko as codec
from kernlib.families.sparse.kernels.macko import macko as kernels
from kernlib.families.sparse.kernels.macko.macko import Macko
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.lowering.kernel import Gpu
from kernlib.runtime import devices
from kernlib.runtime.sequence import Steps
from tests.families.sparse.formats import macko_cases as cases

SHAPES = (  # and densities
    ((1, 1), 1.0), ((33, 40), 0.5), ((1000, 333), 0.1), ((257, 5000), 0.3), ((3, 9001), 0.02),
    ((700, 4096), 1.0), ((100, 64), 0.0), ((5000, 100), 0.01), ((132, 11008), 0.2),
)  # fmt: skip
VECTORS = (1, 2, 7, 8, 16)
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 2e-6}
POISON = 777.0


def problem(shape, columns, dtype, facts, strides=None) -> Problem:
    name = str(dtype).removeprefix("torch.")
    padded = -(-shape[1] // 8) * 8
    sizes = *shape, columns, name, padded, True, strides or (shape[0], 1)
    return Problem(*sizes, facts_of(facts), "macko")


def lowered(given: Problem, ranges: bool | None, epilogue=()):
    """As the rule has it, or (``ranges``) with CTAs that divide entries, or rows."""
    arch, count = devices.arch_of(0), devices.model(0).multiprocessors
    if ranges is None:
        return choose.lower(epilogue, given, arch, count)
    variant = kernels.variant_of(given, arch, ranges)
    return Macko().launches(epilogue, given, Gpu(arch, count), variant)


@pytest.fixture(scope="module", autouse=True)
def built():
    arch, found = devices.arch_of(0), []
    for dtype in cases.DTYPES:
        found += choose.codec_specs("macko", (str(dtype).removeprefix("torch."),))
        for (shape, _), columns, ranges in (
            (s, n, r) for s in SHAPES for n in VECTORS for r in (False, True)
        ):
            facts = {"entries": 8, "longest": 1, "busiest": 1}
            steps = lowered(problem(shape, columns, dtype, facts), ranges).steps
            found += [step.spec for step in steps]
    ahead.build_all([(spec, arch) for spec in dict.fromkeys(found)], None, False)


def padded(x: torch.Tensor) -> torch.Tensor:
    """Vectors (N, C) in rows of whole 16 bytes that end in NaNs."""
    whole = torch.full((x.shape[0], -(-x.shape[1] // 8) * 8), float("nan"), dtype=x.dtype)
    whole = whole.to(x.device)
    whole[:, : x.shape[1]] = x
    return whole


def product(tensors, facts, shape, x, ranges=None, out=None, epilogue=(), more=(), numbers=None):
    """``x W^T`` by the kernels, twice, of the same bits."""
    if out is None:
        out = torch.full((x.shape[0], shape[0]), POISON, dtype=x.dtype, device=x.device)
    given = problem(shape, x.shape[0], x.dtype, facts, out.stride())
    names = (*codec.TENSORS, "x", "out", *(f"vector{i}" for i in range(len(more))))
    plan = Steps(lowered(given, ranges, epilogue), names, x.device)
    rows = padded(x)
    operands = (*(tensors[name] for name in codec.TENSORS), rows, out, *more)
    found = []
    for _ in range(2):
        out.fill_(POISON)
        plan.launch([t.data_ptr() for t in operands], numbers)
        found.append(out.clone())
    assert cases.same_bits(*found)
    return out


def check(dense, x, found, wanted=None) -> None:
    if wanted is None:
        wanted = x.double() @ dense.double().mT
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    case = f"{tuple(dense.shape)} {dense.dtype} {x.shape[0]} vectors"
    assert error <= TOLERANCE[dense.dtype], f"{case}: error {error:.1e}"


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_codec_agrees_with_the_cpu(dtype, seed, monkeypatch):
    for wide in (False, True):
        monkeypatch.setattr(codec, "WIDE_FROM", 8 if wide else 2**31)
        for shape, density in (*SHAPES, ((0, 8), 0.0), ((8, 0), 0.0)):
            dense = cases.peculiar(*shape, density, dtype)
            wanted, facts = codec.encode(dense)
            on_gpu = dense.cuda()
            for view in (
                on_gpu,
                on_gpu.mT.contiguous().mT,
                torch.cat((on_gpu, on_gpu), 1)[:, : shape[1]],
            ):
                tensors, found = codec.encode(view)
                assert found == facts
                assert cases.same_bits(tensors["values"].cpu(), wanted["values"])
                assert torch.equal(tensors["deltas"].cpu(), wanted["deltas"])
                assert torch.equal(tensors["row_ptr"].cpu(), wanted["row_ptr"])
            codec.check(tensors, facts, shape, dtype)
            assert codec.nbytes(on_gpu) == codec.nbytes(dense)
            back = codec.decode(tensors, facts, shape, dtype)
            assert cases.same_bits(back.cpu(), codec.decode(wanted, facts, shape, dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ranges", (False, True))
def test_products(ranges, dtype, seed):
    for shape, density in SHAPES:
        dense = cases.random(*shape, density, dtype, "cuda")
        tensors, facts = codec.encode(dense)
        for columns in VECTORS:
            x = torch.randn(columns, shape[1], device="cuda").to(dtype)
            check(dense, x, product(tensors, facts, shape, x, ranges))


def test_more_than_2_to_31_entries_by_their_row_ptr(seed, monkeypatch):
    monkeypatch.setattr(codec, "WIDE_FROM", 8)
    monkeypatch.setattr(kernels, "WIDE_FROM", 8)
    dense = cases.random(200, 3000, 0.2, device="cuda")
    tensors, facts = codec.encode(dense)
    assert tensors["row_ptr"].dtype == torch.int64
    for ranges in (False, True):
        x = torch.randn(2, 3000, device="cuda").half()
        check(dense, x, product(tensors, facts, (200, 3000), x, ranges))


def test_x_beyond_shared_memory(seed):
    dense = cases.random(40, 130_000, 0.05, device="cuda")
    tensors, facts = codec.encode(dense)
    x = torch.randn(2, 130_000, device="cuda").half()
    check(dense, x, product(tensors, facts, (40, 130_000), x))


def test_skewed_rows(seed):
    dense = torch.zeros(70_000, 20_000, dtype=torch.float16, device="cuda")
    dense[17_000] = torch.randn(20_000, device="cuda").half()
    dense[69_999, 19_999] = 2.0
    tensors, facts = codec.encode(dense)
    x = torch.randn(1, 20_000, device="cuda").half()
    wanted = torch.zeros(1, 70_000, dtype=torch.float64, device="cuda")
    for row in (17_000, 69_999):
        wanted[0, row] = dense[row].double() @ x[0].double()
    for ranges in (None, False, True):
        found = product(tensors, facts, (70_000, 20_000), x, ranges)
        check(dense, x, found, wanted)


def test_pads_and_absent_columns_add_nothing_where_x_is_infinite(seed):
    dense = cases.random(50, 3000, 0.02, device="cuda")
    dense[:, 1::2] = 0
    tensors, facts = codec.encode(dense)
    assert facts["nnz"] < facts["entries"] / 2  # most are pads
    finite = torch.randn(3, 3000, device="cuda").half()
    finite[:, 1::2] = 0
    for bad in (float("inf"), float("nan")):
        x = finite.clone()
        x[:, 1::2] = bad
        for ranges in (False, True):
            check(dense, finite, product(tensors, facts, (50, 3000), x, ranges))
    dense[7, 0] = float("inf")
    tensors, facts = codec.encode(dense)
    for ranges in (False, True):
        found = product(tensors, facts, (50, 3000), finite, ranges)
        assert found[:, 7].isinf().all() and found[:, :7].isfinite().all()
        assert found[:, 8:].isfinite().all()


def test_epilogues_and_strides(seed):
    dense = cases.random(300, 1000, 0.2, device="cuda")
    tensors, facts = codec.encode(dense)
    x, bias = torch.randn(3, 1000, device="cuda").half(), torch.randn(300, device="cuda").half()
    plain = x.double() @ dense.double().mT + bias.double()
    for ranges in (False, True):
        for out in (
            torch.empty(3, 300, device="cuda", dtype=torch.float16),
            torch.empty(300, 3, device="cuda", dtype=torch.float16).mT,
            torch.empty(6, 900, device="cuda", dtype=torch.float16)[::2, ::3],
        ):
            epilogue = (kl.Bias(), kl.Relu())
            more = {"epilogue": epilogue, "more": (bias,)}
            found = product(tensors, facts, (300, 1000), x, ranges, out, **more)
            check(dense, x, found, plain.relu())


def test_compat(seed):
    for name, (dense, wanted) in cases.golden().items():
        values, deltas, row_ptr, *shape = compressed = compat.compress(dense.cuda())
        found = values.view(torch.int16).tolist(), deltas.tolist(), row_ptr.tolist()
        assert found == wanted and shape == list(dense.shape), name
        x = torch.randn(shape[1], device="cuda").half()
        y = compat.multiply(compressed, x)
        on_cpu = compat.multiply(compat.move_to_device(compressed, "cpu"), x.cpu())
        assert torch.allclose(y.cpu(), on_cpu, equal_nan=True)
    for density in (1, 0.5, 0.1, 0.01, 0.001, 0):
        dense = cases.random(4096, 8192, density, device="cuda") / 64
        compressed = compat.compress(dense)
        assert torch.equal(compat.decompress(compressed), dense)
        x = torch.randn(8192, device="cuda").half()
        y = compat.multiply(compressed, x)
        assert torch.allclose(y, dense @ x, rtol=1e-3, atol=1e-3)
        assert torch.equal(compat.multiply(compressed, x.repeat_interleave(3)[::3]), y)
        assert torch.equal(compat.multiply(compressed, torch.cat((x[:1], x))[1:]), y)
    torch.library.opcheck(torch.ops.macko_spmv.multiply.default, (*compressed, x))
    compiled = torch.compile(lambda v: compat.multiply(compressed, v) * 2, fullgraph=True)
    assert torch.equal(compiled(x), compat.multiply(compressed, x) * 2)

"""The formats u8, u4 and u2 on a GPU: codec equal to the CPU's, products against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.sparse.formats import slices
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.runtime import devices
from kernlib.runtime.sequence import Steps

# Relative Frobenius errors, of results rounded once; of a few results, the unit of rounding.
TOLERANCE = {torch.float16: 2.5e-4, torch.bfloat16: 2e-3, torch.float32: 1e-6}
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 1e-6}
# Odd sizes, one row, one column, panels that end within, more columns than a block's x holds.
SHAPES = ((1, 1), (1, 700), (700, 1), (37, 513), (131, 2050), (515, 30_001), (2049, 1031))
all_formats = pytest.mark.parametrize("form", slices.FORMATS.values(), ids=slices.FORMATS)
all_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def matrix(rows, cols, density, dtype=torch.float16):
    values = torch.randn(rows, cols, device="cuda").to(dtype)
    kept = torch.rand(rows, cols, device="cuda") < density
    return torch.where(kept, values, torch.zeros((), dtype=dtype, device="cuda"))


def vectors(columns, cols, dtype):
    """x whose rows begin at whole 16 bytes, with NaN behind them."""
    pitch = -(-cols // 8) * 8 + 8
    whole = torch.full((columns, pitch), math.nan, dtype=dtype, device="cuda")
    whole[:, :cols] = torch.randn(columns, cols, device="cuda").to(dtype)
    return whole[:, :cols]


def product(form, encoded, shape, x, epilogue=(), vector=(), numbers=None, out=None):
    """The product by this format's kernels."""
    tensors, facts = encoded
    if out is None:
        out = torch.full((x.shape[0], shape[0]), math.nan, dtype=x.dtype, device=x.device)
    dtype, strides = str(x.dtype).removeprefix("torch."), (out.stride(0), out.stride(1))
    sizes = (*shape, x.shape[0], dtype, x.stride(0), True, strides)
    problem, device = Problem(*sizes, facts_of(facts), form.FORMAT), x.device.index
    arch = devices.arch_of(device)
    assert choose.takes(problem, arch)
    lowered = choose.lower(epilogue, problem, arch, devices.model(device).multiprocessors)
    given = {**tensors, "x": x, "out": out}
    given.update({f"vector{index}": each for index, each in enumerate(vector)})
    steps = Steps(lowered, tuple(given), x.device)
    steps.launch([each.data_ptr() for each in given.values()], numbers)
    return out


def check(dense, x, found):
    wanted = x.double() @ dense.double().T
    usual = (x.double().square() @ dense.double().square().T).sqrt()  # if terms do not cancel
    scale = torch.maximum(wanted.norm(), usual.norm()).clamp_min(1e-30)
    error = (found.double() - wanted).norm() / scale
    many = torch.count_nonzero(wanted) >= 1000
    bound = (TOLERANCE if many else ROUNDING)[dense.dtype]
    assert error <= bound, f"{tuple(dense.shape)} of {x.shape[0]}: {error:.2e} > {bound:.1e}"


@all_formats
@all_dtypes
@pytest.mark.parametrize("density", (0.0, 0.003, 0.1, 1.0))
def test_the_codec_is_the_cpu_s(form, dtype, density, seed):
    for rows, cols in SHAPES[:6]:
        dense = matrix(rows, cols, density, dtype)
        dense[rows // 2, cols // 2] = math.nan
        dense[0, 0] = -0.0  # no entry
        for given in (dense, dense.t().contiguous().t()):
            ours, facts = form.encode(given)
            theirs, known = form.encode(dense.cpu())
            assert facts == known
            form.check(ours, facts, (rows, cols), dtype)
            assert all(torch.equal(ours[name].cpu(), theirs[name]) for name in form.TENSORS)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        # Nor are other -0.0: one in 8e7 numbers drawn is rounded to it in float16.
        dense[dense == 0] = 0.0
        found = form.decode(ours, facts, (rows, cols), dtype)
        assert torch.equal(found.view(bits), dense.view(bits))
        assert form.nbytes(dense) == sum(t.numel() * t.element_size() for t in ours.values())


@all_formats
@all_dtypes
@pytest.mark.parametrize("columns", (1, 2, 3, 7, 8, 16))
def test_values(form, dtype, columns, seed):
    for rows, cols in SHAPES:
        dense = matrix(rows, cols, 0.1, dtype)
        x = vectors(columns, cols, dtype)
        check(dense, x, product(form, form.encode(dense), (rows, cols), x))


@all_formats
def test_widths_of_panels_and_skewed_rows(form, seed):
    dense = matrix(300, 9000, 0.05)
    dense[7], dense[100:200] = 0.5, 0.0
    dense[::50] = matrix(6, 9000, 0.6)
    for width in (16, 512, 1024, 1792, 2048):
        for columns in (1, 3, 8):
            x = vectors(columns, 9000, torch.float16)
            found = product(form, form.encode(dense, Tiling(width)), dense.shape, x)
            check(dense, x, found)
            assert (found[:, 101:149] == 0).all()


@all_formats
@all_dtypes
def test_rows_cut_into_parts(form, dtype, seed):
    """Of any number of parts: rows of few and of many codes, and steps that pass over parts."""
    for (rows, cols), density in (((300, 4000), 0.1), ((70, 901), 0.003), ((33, 17), 1.0)):
        dense = matrix(rows, cols, density, dtype)
        dense[7], dense[20:30] = 0.5, 0.0
        dense[8, : cols // 2], dense[9, cols // 2 :] = 0.0, 0.0
        for parts in (2, 3, 5, 8, 21, 32):
            tiling = Tiling(-(-cols // 16) * 16, parts)
            encoded = form.encode(dense, tiling)
            theirs = form.encode(dense.cpu(), tiling)[0]
            assert all(torch.equal(encoded[0][n].cpu(), theirs[n]) for n in form.TENSORS)
            assert torch.equal(form.decode(*encoded, dense.shape, dtype), dense)
            for columns in (1, 2, 4, 11):
                x = vectors(columns, cols, dtype)
                out = product(form, encoded, dense.shape, x)
                check(dense, x, out)
                assert (out[:, 20:30] == 0).all()
                assert torch.equal(out, product(form, encoded, dense.shape, x))


@all_formats
def test_more_slices_than_blocks_at_a_time(form, seed):
    dense = matrix(40_003, 520, 0.2)
    for parts in (2, 32):
        encoded = form.encode(dense, Tiling(528, parts))
        for columns in (1, 8):
            x = vectors(columns, 520, torch.float16)
            check(dense, x, product(form, encoded, dense.shape, x))


@all_formats
def test_more_rows_than_two_bytes_count(form, seed):
    dense = matrix(70_001, 300, 0.05)
    x = vectors(2, 300, torch.float16)
    check(dense, x, product(form, form.encode(dense), dense.shape, x))


@all_formats
def test_what_is_not_stored_meets_no_infinity(form, seed):
    dense = torch.zeros(40, 3000, dtype=torch.float16, device="cuda")
    dense[3, 2999], dense[4, 10], dense[5, 800] = 2.0, 1.0, -0.0
    for columns in (1, 8):
        x = vectors(columns, 3000, torch.float16)
        x[:] = math.inf
        x[:, 10], x[:, 255], x[:, 2999] = 3.0, math.nan, 0.5
        found = product(form, form.encode(dense), dense.shape, x)
        assert (found[:, 3] == 1.0).all() and (found[:, 4] == 3.0).all()
        assert found.count_nonzero() == 2 * columns


@all_formats
@all_dtypes
def test_epilogues_and_strides_of_out(form, dtype, seed):
    dense, columns = matrix(333, 2000, 0.1, dtype), 5
    x, bias = vectors(columns, 2000, dtype), torch.randn(333, device="cuda").to(dtype)
    whole = torch.full((333, 2 * columns), math.nan, dtype=dtype, device="cuda")
    out = whole.t()[::2]
    epilogue = (kl.Bias(), kl.Scale(), kl.Relu())
    product(form, form.encode(dense), dense.shape, x, epilogue, (bias,), [0.5, 0], out)
    wanted = ((x.double() @ dense.double().T + bias.double()) * 0.5).relu()
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error <= TOLERANCE[dtype]
    assert whole[:, 1::2].isnan().all()


@all_formats
def test_repeated_calls_in_a_graph_overlap_safely(form, seed):
    dense, columns = matrix(1000, 4000, 0.1), 1
    encoded, x = form.encode(dense), vectors(columns, 4000, torch.float16)
    outs = [torch.zeros(1, 1000, dtype=torch.float16, device="cuda") for _ in range(6)]
    wanted = product(form, encoded, dense.shape, x).clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for out in outs:
            product(form, encoded, dense.shape, x, out=out)
    x.mul_(2)
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(out, 2 * wanted) for out in outs)

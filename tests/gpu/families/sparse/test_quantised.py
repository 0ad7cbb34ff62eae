"""Bitmap matrices with values in fewer bits on the GPU: the bytes of the CPU's encoder, matrices
back as on a CPU, and products of every kernel near those of the numbers that codes stand for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernlib as kl
from kernlib import sparse
from kernlib.families.sparse.kernels.bitmap import bitmap
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.families.sparse.matrix import rounded
from kernlib.jit import service
from kernlib.runtime import devices
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import random, same_bits

HALF = (torch.float16, torch.bfloat16)
SHAPES = [(1, 1), (16, 256), (37, 513), (100, 8), (33, 2100), (130, 9000)]
VECTORS = (1, 2, 7, 8, 9, 16, 17)
every_format = pytest.mark.parametrize("name", QUANTISED)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels without an epilogue, compiled side by side."""
    arch = devices.arch_of(torch.cuda.current_device())
    specs, dtypes = [], ("float16", "bfloat16", "float32")
    for name in QUANTISED:
        specs += choose.codec_specs(name, dtypes)
        specs += choose.variants(name, (), ("float16", "bfloat16"), arch)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: service.build(spec, arch), dict.fromkeys(specs)))


def check(w, x):
    """A product against the numbers that codes and scales stand for, in float64: half a unit in the
    last place of the result, and what float32 loses of the sums."""
    found = sparse.matmul(w, x).double()
    exact = rounded(w, torch.float32).to_dense().double()
    if len(x) > 16:  # by cuBLAS, of rounded values
        exact = w.to_dense().double()
    wanted, size = x.double() @ exact.mT, x.double().abs() @ exact.abs().mT
    loss = 1e-5 if len(x) <= 16 else 1e-3  # cuBLAS may round sums in between
    bound = 0.51 * torch.finfo(x.dtype).eps * wanted.abs() + loss * size
    wrong = (found - wanted).abs() > bound + torch.finfo(x.dtype).tiny
    assert not wrong.any(), (w, len(x), (found - wanted).abs().max(), wanted.abs().max())


@every_format
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
def test_matrices_are_those_of_a_cpu(name, dtype, seed):
    for shape in (*SHAPES, (0, 5), (5, 0)):
        for density in (0.02, 0.5, 1.0):
            dense = random(*shape, density, dtype)
            given, wanted = compress(dense.cuda(), name), compress(dense, name)
            assert given.layout == wanted.layout and given.nnz == wanted.nnz
            for part in wanted.tensors:
                assert torch.equal(given.tensors[part].cpu(), wanted.tensors[part])
            assert same_bits(given.to_dense().cpu(), wanted.to_dense())
            SparseMatrix.from_state(*given.state())


@every_format
@every_half
def test_products_meet_the_bar(name, dtype, seed):
    for shape in SHAPES:
        for density in (0.02, 0.5, 1.0):
            w = compress(random(*shape, density, dtype).cuda(), name)
            for vectors in VECTORS:
                check(w, torch.randn(vectors, shape[1], device="cuda").to(dtype))


@every_format
@every_half
@pytest.mark.parametrize("warps", bitmap.WARPS_OF_CODES)
def test_every_number_of_warps(name, dtype, warps, monkeypatch, seed):
    monkeypatch.setattr(bitmap, "WARPS_OF_CODES", (warps,))
    w = compress(random(70 + warps, 8200, 0.5, dtype).cuda(), name)  # a shape without a plan
    for vectors in (1, 8, 16) if warps <= 16 else (1, 8):
        check(w, torch.randn(vectors, 8200, device="cuda").to(dtype))


@every_format
@every_half
def test_vectors_of_many_magnitudes(name, dtype, seed):
    """Which integer kernels turn into digits: of float16 all of it, of bfloat16 46 bits below the
    largest magnitude of 256 columns."""
    w = compress(random(48, 1024, 0.5, dtype).cuda(), name)
    x = torch.randn(1, 1024, device="cuda")
    for span in (10, 30):
        powers = torch.randint(-span, 1, x.shape, device="cuda")
        check(w, (x * 2.0**powers).to(dtype))
    for size in (6e-8, 1e-5, 1e2) if dtype == torch.float16 else (1e-30, 1e-5, 1e20):
        check(w, (x.clamp(-3, 3) * size).to(dtype))
    check(w, torch.zeros_like(x).to(dtype))


@every_format
@every_half
def test_what_is_not_finite_shows(name, dtype, seed):
    w = compress(random(40, 600, 0.5, dtype).cuda(), name)
    for value in (float("nan"), float("inf")):
        x = torch.randn(3, 600, device="cuda").to(dtype)
        x[1, 300] = value
        found = sparse.matmul(w, x)
        assert found[::2].isfinite().all() and not found[1].isfinite().any()
        assert not sparse.matmul(w, x[1]).isfinite().any()


@every_format
def test_epilogues_strides_and_frozen_matrices(name, seed):
    w = compress(random(300, 2049, 0.4, torch.float16).cuda(), name)
    bias, wide = torch.randn(300, device="cuda").half(), torch.randn(5, 4100, device="cuda").half()
    for x in (wide[:, 3:2052], wide[:1, 2:2051], wide[0, ::2][:2049]):
        plain = sparse.matmul(w, x.contiguous()).float()
        found = sparse.matmul(w, x, bias, epilogue=kl.Relu())
        torch.testing.assert_close(found.float(), (plain + bias).relu(), rtol=2e-3, atol=2e-2)
        w.freeze()
        assert same_bits(sparse.matmul(w, x), sparse.matmul(w, x.contiguous()))
        w.thaw()


@every_format
def test_graphs_replay_the_same_bits(name, seed):
    w = compress(random(513, 3000, 0.5, torch.float16).cuda(), name)
    x = torch.randn(3000, device="cuda").half()
    wanted = sparse.matmul(w, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse.matmul(w, x)
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert same_bits(found, wanted)

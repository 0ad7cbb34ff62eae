"""Bitmap matrices times 9 to 1024 vectors: accuracy in every tile, edges, strides of results, what
lies behind x, equal bits in equal calls."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib import sparse
from kernlib.families.sparse.kernels.bitmap import many as kernels
from kernlib.families.sparse.lowering import choose
from kernlib.runtime import devices

BOUNDS = {torch.float16: 4e-4, torch.bfloat16: 3e-3}
every_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def hopper():
    device = torch.cuda.current_device()
    arch = devices.arch_of(device)
    if arch not in kernels.ARCHS:
        pytest.skip(f"the kernel of many vectors is for {kernels.ARCHS}")
    epilogue = (kl.Bias(), kl.Gelu())
    halves = ("float16", "bfloat16")
    devices.build(
        [s for e in ((), epilogue) for s in choose.variants("bitmap", e, halves, arch)], device
    )


def matrix(rows, cols, density, dtype):
    dense = torch.randn(rows, cols, device="cuda").to(dtype)
    return dense.masked_fill_(torch.rand(rows, cols, device="cuda") >= density, 0)


def vectors(columns, cols, dtype):
    """With NaN behind each."""
    whole = torch.full((columns, -(-cols // 8) * 8 + 8), torch.nan, device="cuda", dtype=dtype)
    whole[:, :cols] = torch.randn(columns, cols, device="cuda")
    return whole[:, :cols]


def check(y, x, dense, dtype, bias=None):
    exact = x.double() @ dense.double().T
    if bias is not None:
        exact = torch.nn.functional.gelu(exact + bias.double())
    assert (y.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()


@every_dtype
@pytest.mark.parametrize("density", (0.05, 0.5, 0.97))
def test_odd_sizes(dtype, density, seed):
    """Every tile, whole ones and those that are cut, and edges of all three sizes."""
    for rows, cols, columns in (
        (1, 1, 9), (17, 300, 16), (255, 257, 33), (1000, 1031, 64), (2050, 4100, 65),
        (5000, 72, 130), (130, 9000, 257), (8500, 520, 40), (4096, 2048, 512), (70, 256, 1024),
    ):  # fmt: skip
        dense = matrix(rows, cols, density, dtype)
        w, x = sparse.compress(dense, "bitmap"), vectors(columns, cols, dtype)
        out = torch.full((columns, rows), torch.nan, device="cuda", dtype=dtype)
        assert sparse.matmul(w, x, out=out) is out
        check(out, x, dense, dtype)
        assert torch.equal(sparse.matmul(w, x.contiguous()), out)


@every_dtype
def test_epilogues_and_strides_of_the_result(dtype, seed):
    for rows, cols, columns in ((600, 520, 20), (8500, 2048, 64), (300, 4096, 300)):
        dense = matrix(rows, cols, 0.4, dtype)
        w, x = sparse.compress(dense, "bitmap").freeze(), vectors(columns, cols, dtype)
        bias = torch.randn(rows, device="cuda", dtype=dtype)
        wide = torch.full((columns, rows + 9), torch.nan, device="cuda", dtype=dtype)
        turned = torch.full((rows, columns), torch.nan, device="cuda", dtype=dtype)
        for out in (wide[:, 1 : rows + 1], turned.T, None):
            y = sparse.matmul(w, x, bias=bias, epilogue=(kl.Gelu(),), out=out)
            check(y, x, dense, dtype, bias)
        assert wide[:, 0].isnan().all() and wide[:, rows + 1 :].isnan().all()


def test_inputs_of_any_strides_and_dimensions(seed):
    dense = matrix(300, 1000, 0.5, torch.float16)
    w = sparse.compress(dense, "bitmap")
    x = torch.randn(3, 7, 1000, device="cuda", dtype=torch.float16)
    y = sparse.matmul(w, x)
    check(y, x, dense, torch.float16)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(sparse.matmul(w, turned), y)
    assert torch.equal(sparse.matmul(w, x.flip(-1).flip(-1)), y)


def test_graphs_and_streams(seed):
    """The packed vectors and sums of two streams are apart, and a replay packs anew."""
    dense = matrix(4096, 4096, 0.5, torch.float16)
    w = sparse.compress(dense, "bitmap")
    x = torch.randn(2, 64, 4096, device="cuda", dtype=torch.float16)
    expected = [sparse.matmul(w, one) for one in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, one, some in zip(streams, x, results, strict=True):
            with torch.cuda.stream(stream):
                some.append(sparse.matmul(w, one))
    torch.cuda.synchronize()
    for some, one in zip(results, expected, strict=True):
        assert all(torch.equal(y, one) for y in some)
    held, graph = x[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse.matmul(w, held)
    for one, result in zip(x, expected, strict=True):
        held.copy_(one)
        graph.replay()
        assert torch.equal(y, result)

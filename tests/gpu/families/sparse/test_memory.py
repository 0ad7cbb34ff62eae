"""Memory of products with many vectors: a matrix that is laid out densely for a call is counted by
torch, given back when the call returns, used again by the next layer, and never shared by streams
or graphs."""

from __future__ import annotations

import pytest
import torch

from kernlib import sparse

ROWS, COLS, COLUMNS = 4096, 2048, 1500  # more vectors than any format's own kernel takes
DENSE_BYTES = 2 * ROWS * COLS
SLACK = 8 << 20  # of the result's size and of what cuBLAS holds


def matrices(count, format):
    made = []
    for _ in range(count):
        dense = torch.randn(ROWS, COLS, device="cuda", dtype=torch.float16)
        dense.masked_fill_(torch.rand(ROWS, COLS, device="cuda") < 0.5, 0)
        made.append(sparse.compress(dense, format))
    return made


def vectors():
    return torch.randn(COLUMNS, COLS, device="cuda", dtype=torch.float16)


@pytest.mark.parametrize("format", ("bitmap", "u2"))
def test_layers_use_the_same_memory_and_give_it_back(format, seed):
    layers, x = matrices(3, format), vectors()
    for w in layers:  # whatever is loaded or kept by the first call
        sparse.matmul(w, x)
    torch.cuda.synchronize()
    out = torch.empty(COLUMNS, ROWS, device="cuda", dtype=torch.float16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for w in layers:
        sparse.matmul(w, x, out=out)
    assert torch.cuda.max_memory_allocated() - before <= DENSE_BYTES + SLACK
    assert torch.cuda.memory_allocated() == before


def test_packed_vectors_and_sums_are_given_back(seed):
    """Of the kernel that takes 9 to 1024 vectors."""
    (w,), x = matrices(1, "bitmap"), vectors()[:64].contiguous()
    out = sparse.matmul(w, x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sparse.matmul(w, x, out=out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < DENSE_BYTES + SLACK


@pytest.mark.parametrize("columns", (64, COLUMNS))
@pytest.mark.parametrize("format", ("bitmap", "u2"))
def test_two_streams_and_a_graph_share_no_memory(format, columns, seed):
    """Each has a matrix of its own, laid out or packed at the same time as the other's."""
    layers, x = matrices(2, format), vectors()[:columns].contiguous()
    expected = [x.double() @ w.to_dense().double().T for w in layers]

    def is_right(y, exact):
        return ((y.double() - exact).norm() / exact.norm()).item() < 1e-3

    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(8):
        for stream, w, some in zip(streams, layers, results, strict=True):
            with torch.cuda.stream(stream):
                some.append(sparse.matmul(w, x))
    torch.cuda.synchronize()
    for some, exact in zip(results, expected, strict=True):
        assert all(is_right(y, exact) for y in some)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse.matmul(layers[0], x)
    torch.cuda.synchronize()
    for _ in range(4):  # beside the replay
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            other = sparse.matmul(layers[1], x)
    torch.cuda.synchronize()
    assert is_right(captured, expected[0]) and is_right(other, expected[1])

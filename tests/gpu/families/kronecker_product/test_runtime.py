"""Streams, graphs, devices: what surrounds the kernels."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.families.kronecker_product.cases import F32, check, exact, operands, product
from tests.gpu.watched import capture, nothing_waits, peak

# In one launch, in two that share a workspace, and by torch where that was measured to be faster.
SHAPES = {
    "one launch": ((8, 8), (5, 7)),
    "two": ((16, 16),) * 4,
    "torch": ((47, 99), (14, 88), (24, 27)),
}
every_call = pytest.mark.parametrize("case", SHAPES)


@every_call
def test_a_prepared_call_is_captured_and_replayed(case, seed):
    shapes = SHAPES[case]
    descriptor = product(shapes)
    x, *factors = operands(shapes, 50, "right", F32)
    kl.prepare(descriptor, x, *factors)
    with capture() as graph:
        found = kl.run_kernel(descriptor, x, *factors)
    for _ in range(3):
        x.normal_()
        factors[0].normal_()
        graph.replay()
        check(found, exact(x, factors, "right"), 1e-6)


def test_a_capture_compiles_nothing(seed):
    shapes = ((3, 11), (2, 9), (2, 2))
    x, *factors = operands(shapes, 5, "right", F32)
    with pytest.raises(kl.CaptureError, match="prepare"), capture():
        kl.kron_matmul(x, factors)


@every_call
def test_side_streams(case, seed):
    shapes = SHAPES[case]
    x, *factors = operands(shapes, 50, "right", F32)
    wanted = kl.kron_matmul(x, factors)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for index in range(16):
        with torch.cuda.stream(streams[index % 4]):
            found.append(kl.kron_matmul(x, factors))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


@every_call
def test_nobody_waits_for_the_device(case, seed):
    shapes = SHAPES[case]
    x, *factors = operands(shapes, 50, "right", F32)
    kl.kron_matmul(x, factors)
    with nothing_waits():
        kl.kron_matmul(x, factors)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_another_device(case, seed):
    shapes = SHAPES[case]
    tensors = [t.to("cuda:1") for t in operands(shapes, 50, "right", F32)]
    found = kl.kron_matmul(tensors[0], tensors[1:])
    assert found.device == tensors[0].device and torch.cuda.current_device() == 0
    check(found, exact(tensors[0], tensors[1:], "right"), 1e-6)


@pytest.mark.parametrize("numbers", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 64), (32, 32, 32), (24, 24, 24)], ids=str)
def test_peak_memory_is_the_result(sizes, numbers, seed):
    x, *factors = operands([(size, size) for size in sizes], 1000, "right", numbers)
    kl.kron_matmul(x, factors)
    found, most = peak(lambda: kl.kron_matmul(x, factors))
    assert most <= found.numel() * found.element_size() + (1 << 20)


def test_the_same_bits_each_time(seed):
    for shapes in SHAPES.values():
        x, *factors = operands(shapes, 500, "right", F32)
        first = kl.kron_matmul(x, factors)
        assert all(torch.equal(first, kl.kron_matmul(x, factors)) for _ in range(5))


def test_compiled_calls(seed):
    x, *factors = operands(((8, 8), (5, 7)), 30, "right", F32)
    compiled = torch.compile(lambda x, *f: kl.kron_matmul(x, f, alpha=2.0) + 1, fullgraph=True)
    check(compiled(x, *factors), 2 * exact(x, factors, "right") + 1, 1e-6)

"""Matrices that are written: by whoever torch does not count, between a product and its gradient,
against a promise; and tensors in the place of a matrix's own."""

from __future__ import annotations

import struct

import pytest
import torch
from torch.func import functional_call

import kernlib as kl
from kernlib.jit.spec import KernelSpec
from kernlib.nn import SparseLinear
from kernlib.runtime import devices
from kernlib.runtime.plan import Plan
from kernlib.sparse import compress, matmul
from tests.families.sparse.cases import FORMATS, random
from tests.gpu.watched import capture

DEVICE = "cuda"
DENSITY = {"bitmap": 0.5, "u8": 0.08, "u4": 0.3, "u2": 0.6, "macko": 0.2, "dense": 1.0}
TURNS = 20
every_format = pytest.mark.parametrize("format", FORMATS)

# A writer that lets the launch behind it begin at once, and writes 50 us later.
LATE = """#include "common/types.cuh"
#include "common/hopper.cuh"

struct Parameters {
    unsigned char* to;
    const unsigned char* from;
    long long bytes;
};

extern "C" __global__ void late_write(const __grid_constant__ Parameters p) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
    for (long long start = clock64(); clock64() - start < 100000;) {}
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < p.bytes; i += gridDim.x * 256)
        p.to[i] = p.from[i];
}
"""


@pytest.fixture
def both(request, seed):
    """A matrix, what two others of the same places hold, x, and the products with those."""
    format = request.node.callspec.params["format"]
    dense = random(2048, 4096, DENSITY[format], torch.float16, DEVICE)
    others, x = [compress(dense, format), compress(2 * dense, format)], torch.randn(4096).half()
    w, x = compress(dense, format), x.to(DEVICE)
    wanted = [matmul(other, x).clone() for other in others]
    assert not torch.equal(*wanted)
    return w, others, x, wanted


def late_writer(to: torch.Tensor):
    """What writes a tensor late by the values of another, on the current stream."""
    device = to.get_device()
    spec = KernelSpec("sparse", LATE, "late_write", 256, description="late write")
    size = to.numel() * to.element_size()
    plan = Plan(devices.load(spec, device), device, (16, 1), 2, "", struct.pack("<q", size))
    return lambda given: plan.launch((to.data_ptr(), given.data_ptr()))


def by_data(to):
    return lambda given: torch.add(given, 0, out=to.data)


def by_dlpack(to):
    view = torch.from_dlpack(to)
    return lambda given: torch.add(given, 0, out=view)


def by_storage(to):
    view = torch.empty(0, dtype=to.dtype, device=DEVICE)
    view.set_(to.untyped_storage(), to.storage_offset(), to.shape, to.stride())
    return lambda given: torch.add(given, 0, out=view)


def by_replay(to):
    """The capture counts as a write, the replays do not."""
    source, graph = torch.empty_like(to), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(source, 0, out=to)

    def write(given):
        source.copy_(given)
        graph.replay()

    return write


WRITERS = {
    "late": late_writer,
    "data": by_data,
    "dlpack": by_dlpack,
    "storage": by_storage,
    "replay": by_replay,
}


@every_format
@pytest.mark.parametrize("writer", WRITERS)
def test_who_is_not_counted_is_waited_for(writer, format, both):
    w, others, x, wanted = both
    writes = [WRITERS[writer](to) for to in w.operands]
    versions = [to._version for to in w.operands]
    found = []
    for turn in range(TURNS):
        for write, given in zip(writes, others[turn % 2].operands, strict=True):
            write(given)
        found.append(matmul(w, x))
    torch.cuda.synchronize()
    assert [to._version for to in w.operands] == versions
    assert all(torch.equal(y, wanted[turn % 2]) for turn, y in enumerate(found))


@every_format
def test_a_late_writer_in_one_graph(format, both):
    w, others, x, wanted = both
    writes = [late_writer(to) for to in w.operands]
    graph, found = torch.cuda.CUDAGraph(), []
    matmul(w, x)
    with torch.cuda.graph(graph):
        for turn in range(TURNS):
            for write, given in zip(writes, others[turn % 2].operands, strict=True):
                write(given)
            found.append(matmul(w, x))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, wanted[turn % 2]) for turn, y in enumerate(found))


# The promise.


@every_format
def test_a_frozen_matrix(format, both):
    w, others, x, wanted = both
    for turn in range(4):
        assert w.freeze() is w and w.frozen
        plain = [matmul(w, x) for _ in range(TURNS)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            captured = [matmul(w, x) for _ in range(TURNS)]
        graph.replay()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            plain += [matmul(w, x) for _ in range(TURNS)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, wanted[turn % 2]) for y in (*plain, *captured))
        w.thaw()
        for to, given in zip(w.operands, others[1 - turn % 2].operands, strict=True):
            to.copy_(given)
        assert torch.equal(matmul(w, x), wanted[1 - turn % 2])


@every_format
def test_a_frozen_matrix_that_is_written(format, both):
    w, others, x, _ = both
    matmul(w.freeze(), x)
    w.operands[0].copy_(others[1].operands[0])
    for given in (x, x.repeat(20, 1), x.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match="written or moved after freeze"):
            matmul(w, given)
    matmul(w.thaw(), x)


def test_freezing_is_no_part_of_a_capture(seed):
    w = compress(random(64, 64, 0.5, torch.float16, DEVICE), "bitmap")
    with capture() as graph:
        y = torch.zeros(1, device=DEVICE)
        with pytest.raises(kl.CaptureError, match="before the capture"):
            w.freeze()
    graph.replay()
    assert not y.any() and not w.frozen


# Gradients of matrices that are written.


@every_format
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_gradients_are_those_of_what_is_there(columns, format, seed):
    dense = random(500, 1000, DENSITY[format], torch.float32, DEVICE)
    w = compress(dense, format)
    x = torch.randn(columns, 1000, device=DEVICE, requires_grad=True)
    grad = torch.randn(columns, 500, device=DEVICE)
    for times in (1, 2, 4):
        (found,) = torch.autograd.grad(matmul(w, x), x, grad)
        wanted = times * (grad.double() @ dense.double())
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
        assert w.nnz == int(torch.count_nonzero(dense))
        y = matmul(w, x)
        for to, given in zip(w.operands, compress(2 * times * dense, format).operands, strict=True):
            to.copy_(given)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: w\.tensors"):
            y.backward(grad)


@every_format
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_a_recorded_result_can_be_written_in_place(columns, format, seed):
    w = compress(random(500, 1000, DENSITY[format], torch.float16, DEVICE), format)
    x = torch.randn(columns, 1000, device=DEVICE).half().requires_grad_()
    bias = torch.randn(500, device=DEVICE).half().requires_grad_()
    for given in (x, x[0]):
        y = matmul(w, given, bias)
        wanted = y.detach() + 1
        y += 1
        assert torch.equal(y, wanted)
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert found.any()
        z = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]
        z += 1


@every_format
def test_gradients_of_two_streams_share_a_transpose(format, seed):
    dense = random(8192, 8192, DENSITY[format], torch.float16, DEVICE)
    grad = torch.randn(1, 8192, device=DEVICE).half()
    wanted = grad.double() @ dense.double()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(4):
        w = compress(dense, format)
        x = torch.randn(1, 8192, device=DEVICE).half().requires_grad_()
        torch.cuda.synchronize()
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += torch.autograd.grad(matmul(w, x), x, grad)
        torch.cuda.synchronize()
        assert all(float((each - wanted).norm() / wanted.norm()) < 2e-3 for each in found)


# Other tensors.


def layers(format, dtype=torch.float16):
    """Two layers of one shape, the chunks of the second larger, and x."""
    dense = [random(500, 1000, density, dtype, DEVICE) for density in (0.1, 0.9)]
    made = [SparseLinear.from_matrix(compress(d, format)) for d in dense]
    return dense, made, torch.randn(4, 1000, device=DEVICE).to(dtype)


def buffers(layer):
    """The tensors of a layer's matrix, by their names in the layer."""
    return {f"weight_{n}": t.clone() for n, t in layer.matrix.tensors.items()}


def near(found, dense, x):
    wanted = x.double() @ dense.double().t()
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-3


@every_format
def test_the_buffers_of_another_matrix(format, seed):
    dense, (first, second), x = layers(format)
    with torch.no_grad():
        for given in (x, x[0], x.repeat(10, 1)):
            near(functional_call(first, buffers(second), (given,)), dense[1], given)
            near(functional_call(second, buffers(first), (given,)), dense[0], given)
            near(first(given), dense[0], given)
    other = buffers(second)
    functional_call(first, other, (x,))
    with capture() as graph, torch.no_grad():
        y = functional_call(first, other, (x,))
    graph.replay()
    near(y, dense[1], x)


def shifted(t: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy that begins so many elements into its memory."""
    flat = torch.zeros(t.numel() + shift, dtype=t.dtype, device=DEVICE)
    return flat[shift:].view(t.shape).copy_(t)


@every_format
def test_views_of_a_flat_buffer(format, seed):
    dense, (first, second), x = layers(format)
    for shift in (1, 2, 4, 8):
        given = {name: shifted(t, shift) for name, t in buffers(second).items()}
        with torch.no_grad():
            near(functional_call(first, given, (x,)), dense[1], x)


def test_offsets_that_lead_astray_never_reach_a_kernel(seed):
    _, (first, second), x = layers("bitmap")
    wrong = buffers(second)
    wrong["weight_offsets"] = wrong["weight_offsets"].clone()
    wrong["weight_offsets"][7] = 2**30
    with pytest.raises(ValueError, match="no matrix of kind 'bitmap 500x1000 float16'"):
        functional_call(first, wrong, (x,))
    torch.cuda.synchronize()


@pytest.mark.parametrize("format", ["bitmap", "u4"])
def test_a_compiled_layer_of_other_tensors(format, seed):
    torch._dynamo.reset()
    dense, (first, second), x = layers(format)
    call = torch.compile(lambda given, x: functional_call(first, given, (x,)))
    with torch.no_grad():
        for _ in range(3):
            near(call(buffers(second), x), dense[1], x)
            near(call(buffers(first), x), dense[0], x)
    torch._dynamo.reset()


@pytest.mark.parametrize("format", ["bitmap", "u4"])
def test_a_compiled_gradient_follows_writes(format, seed):
    torch._dynamo.reset()
    dense = random(500, 1000, DENSITY[format], torch.float32, DEVICE)
    w = compress(dense, format)
    w.transpose()
    call = torch.compile(lambda x: matmul(w, x), fullgraph=True)
    x = torch.randn(4, 1000, device=DEVICE, requires_grad=True)
    for times in (1, 2, 4):
        (found,) = torch.autograd.grad(call(x).sum(), x)
        wanted = times * dense.double().sum(0).expand(4, 1000)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
        for to, given in zip(w.operands, compress(2 * times * dense, format).operands, strict=True):
            to.copy_(given)
    torch._dynamo.reset()


def test_moved_tensors_in_memory_of_their_own(seed):
    dense = random(500, 1000, 0.5, torch.float16, DEVICE)
    w, x = compress(dense, "bitmap"), torch.randn(4, 1000, device=DEVICE).half()
    near(matmul(w, x), dense, x)
    data = w.operands[0]
    data.data = shifted(data, 1)
    for call in (lambda: matmul(w, x), w.to_dense):
        with pytest.raises(ValueError, match=r"w\.tensors\['data'\]\.data = .*clone"):
            call()
    data.data = data.clone()
    near(matmul(w, x), dense, x)
    assert torch.equal(w.to_dense(), dense)

"""Where Kronecker-sparse calls write, on GPUs that exist only by name: any strides, and no memory
of an argument."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import reference
from tests.families.kronecker_sparse import fake_kernels
from tests.families.kronecker_sparse.fake_kernels import gpu, host
from tests.support import fakes
from tests.support.fakes import on_gpu

PATTERN = (2, 3, 5, 4)
A, B, C, D = PATTERN


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield fake_kernels.install(monkeypatch)
    fakes.forget()


def expected(descriptor, x, weight, parameters):
    plain = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
    return reference.kronecker_sparse(descriptor, host(x), host(weight), plain)


def inner(sizes):
    return tuple(slice(1, n + 1) for n in sizes)


OUTS = {
    "itself": lambda out: out,
    "turned": lambda out: out.mT.contiguous().mT,
    "part": lambda out: on_gpu(*(n + 2 for n in out.shape))[inner(out.shape)],
    "backwards": lambda out: on_gpu(*reversed(out.shape)).permute(*reversed(range(out.dim()))),
}


@pytest.mark.parametrize("batch", [(6,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("batch_last", [False, True])
def test_out_is_written_in_place_whatever_its_strides(batch_last, layout, batch):
    descriptor = kl.KroneckerSparse(*PATTERN, batch_last=batch_last, epilogue=kl.Relu())
    sizes = [(n, *batch) if batch_last else (*batch, n) for n in (A * C * D, A * B * D)]
    x, weight, out = gpu(*sizes[0]), gpu(*PATTERN), OUTS[layout](on_gpu(*sizes[1]))
    version = out._version
    found = kl.run_kernel(descriptor, x, weight, out=out)
    assert found is out and (out._version > version or not out.numel())
    torch.testing.assert_close(host(out), expected(descriptor, x, weight, {}))


def test_out_must_not_share_memory_with_an_operand():
    descriptor = kl.KroneckerSparse(2, 3, 3, 2, epilogue=kl.Bias())
    memory = gpu(9, 24)
    x, weight, bias = memory[:4, :12], gpu(2, 3, 3, 2), gpu(12)
    for _ in range(2):
        for out, name in (
            (memory[2:6, :12], "x"),
            (weight.view(3, 12)[:3], "weight"),
            (bias.view(1, 12), "bias"),
        ):
            rows = out.shape[0]
            with pytest.raises(ValueError, match=f"out shares memory with {name};"):
                kl.run_kernel(descriptor, x[:rows], weight, bias=bias, out=out)
        apart = memory[:4, 12:]
        found = kl.run_kernel(descriptor, x, weight, bias=bias, out=apart)
        wanted = expected(descriptor, x, weight, {"bias": bias})
        torch.testing.assert_close(host(found), wanted)


def test_out_must_not_share_memory_with_a_scalar_that_a_kernel_reads():
    epilogue = (kl.Bias(), kl.Scale(), kl.Scale("gain"))
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=epilogue)
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D)
    memory = gpu(6, 2 * A * B * D)
    out = memory[:, : A * B * D]
    for _ in range(2):
        for place, name in (((0, 0), "scale"), ((5, A * B * D - 1), "gain")):
            given = {"bias": bias, "scale": 2.0, "gain": 3.0, name: memory[place]}
            before = host(memory).clone()
            with pytest.raises(ValueError, match=f"out shares memory with {name};"):
                kl.run_kernel(descriptor, x, weight, out=out, **given)
            assert torch.equal(host(memory), before)
        given = {"gain": memory[3, -1], "scale": 2.0, "bias": bias}  # in the gaps of out
        wanted = expected(descriptor, x, weight, given)
        found = kl.run_kernel(descriptor, x, weight, out=out, **given)
        torch.testing.assert_close(host(found), wanted)


COPIED = {  # what a kernel reads a copy of, taken from memory (12, 12)
    "x": lambda memory: memory.view(3, 4, 12)[:, :2],  # whose batch is not one of strides
    "bias": lambda memory: memory.flatten()[:24:2],
    "scale": lambda memory: memory.view(torch.float64)[0, 0],
}


@pytest.mark.parametrize("name", COPIED)
def test_out_must_not_share_memory_with_what_is_copied_first(name):
    descriptor = kl.KroneckerSparse(2, 3, 3, 2, epilogue=(kl.Bias(), kl.Scale()))
    memory, weight = gpu(12, 12), gpu(2, 3, 3, 2)
    given = {"x": gpu(3, 2, 12), "bias": gpu(12), "scale": 2.0, name: COPIED[name](memory)}
    out, before = memory[:6].view(3, 2, 12), host(memory).clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            kl.run_kernel(descriptor, given["x"], weight, out=out, **without_x(given))
        assert torch.equal(host(memory), before)
        apart = gpu(3, 2, 12)
        kl.run_kernel(descriptor, given["x"], weight, out=apart, **without_x(given))


def without_x(given):
    return {name: value for name, value in given.items() if name != "x"}

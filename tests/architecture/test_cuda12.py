"""The calls that a GPU computes with kernels of CUDA 12, `tests/gpu/cuda12.py`: here on the CPU."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.jit import toolchain
from tests.gpu import cuda12

CALLS = cuda12.calls()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_kernels_and_a_result(name, seed):
    descriptor, shapes, arguments, dtype = CALLS[name]
    operands, given = cuda12.tensors(shapes, arguments, dtype, "meta")
    if dtype != "float64" or descriptor.family == "pairwise":
        assert ahead.specs(descriptor, cuda12.ARCH, operands, given)
    operands, given = cuda12.tensors(shapes, arguments, dtype, "cpu")
    found = kl.run_kernel(descriptor, *operands, **given)
    exact = {k: v.double() if torch.is_tensor(v) else v for k, v in given.items()}
    expected = kl.run_kernel(descriptor, *(x.double() for x in operands), **exact)
    assert (found - expected).norm() <= cuda12.TOLERANCE[dtype] * expected.norm()


def test_another_major_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "cuda_major", lambda: "13")
    with pytest.raises(RuntimeError, match=r"is not of CUDA 12: kernlib\[cu12\]"):
        cuda12.compile_all(tmp_path)

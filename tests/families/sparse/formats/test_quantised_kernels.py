"""The kernels of bitmap matrices with values in fewer bits, run on the host by their text: those
that pack and lay out, and the products of GPUs without a copy engine."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from kernlib.families.sparse.formats import quantised, quantised_gpu
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.families.sparse.matrix import rounded
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.sparse import compress
from tests.families.sparse.cases import random
from tests.support import fakes
from tests.support.emulation import gpus
from tests.support.emulation.emulator import Emulator, kernels_of

pytestmark = pytest.mark.emulated

HALF = (torch.float16, torch.bfloat16)
GUARD = 64  # elements before and behind a result, which nothing may write
every_format = pytest.mark.parametrize("name", quantised.FORMATS)


@pytest.fixture
def on_host(tmp_path_factory, monkeypatch):
    """GPUs whose kernels the host runs."""
    fakes.forget()
    yield gpus.install(monkeypatch, kernels_of(tmp_path_factory), quantised_gpu)
    fakes.forget()


@every_format
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("case", [(1, 1, 0.5), (37, 513, 0.5), (16, 256, 1.0), (50, 300, 0.02)])
def test_matrices_are_packed_and_laid_out_as_on_a_cpu(on_host, name, dtype, case, seed):
    rows, cols, density = case
    form, dense = quantised.FORMATS[name], random(rows, cols, density, dtype)
    tensors, facts = form.encode(dense)
    data = torch.full_like(tensors["data"], 0xA5)
    offsets = gpus.gpu(tensors["offsets"])
    quantised_gpu.fill(gpus.gpu(dense), offsets, gpus.gpu(data), form.code)
    assert torch.equal(data, tensors["data"])
    page = torch.full((2 * GUARD + rows * cols,), 7, dtype=dtype)
    out = page[GUARD : GUARD + rows * cols].view(rows, cols)
    quantised_gpu.write(gpus.gpu(data), offsets, gpus.gpu(out), form.code)
    assert torch.equal(out, form.decode(tensors, facts, (rows, cols), dtype))
    assert bool((page[:GUARD] == 7).all()) and bool((page[-GUARD:] == 7).all())


@pytest.fixture
def multiply(tmp_path_factory):
    """Products by the kernels of an arch, on some multiprocessors."""
    emulator = Emulator(kernels_of(tmp_path_factory))

    def multiplied(w, x, multiprocessors):
        cols, (rows, count) = w.shape[1], (w.shape[0], len(x))
        stride = -(-cols // 8) * 8
        padded = torch.full((count, stride), torch.nan, dtype=x.dtype)
        padded[:, :cols] = x
        out = torch.full((count + 2, rows), 7, dtype=x.dtype)
        problem = Problem(
            rows, cols, count, KERNEL_TYPES[x.dtype], stride, False, (rows, 1), facts_of(w.facts),
            w.format,
        )  # fmt: skip
        lowered = choose.lower((), problem, "sm_80", multiprocessors)
        places = {
            **w.tensors,
            "x": padded,
            "out": out[1:-1],
            "workspace": torch.full((lowered.workspace // 4,), torch.nan),
        }
        step = lowered.steps[0]
        addresses = [places[name].data_ptr() + at for name, at in step.pointers]
        block = struct.pack(f"<{len(addresses)}Q", *addresses) + step.fixed
        memory = ctypes.create_string_buffer(block, len(block))
        emulator.launch(step.spec, step.grid, ctypes.addressof(memory))
        if len(lowered.steps) == 2:  # sum.cuh adds up the sums of ranges
            out[1:-1] = places["workspace"].view(-1, count, rows).sum(0)
        assert bool((out[0] == 7).all()) and bool((out[-1] == 7).all())
        return out[1:-1]

    return multiplied


CASES = {
    "an entry": (1, 1, 1.0, 1, 4),
    "a chunk": (16, 256, 0.5, 1, 4),
    "whole chunks, full": (32, 512, 1.0, 1, 3),
    "edges": (37, 519, 0.5, 1, 2),
    "nothing in most rows": (40, 1300, 0.002, 2, 4),
    "several ranges": (50, 5000, 0.4, 1, 3),
    "seven vectors": (21, 700, 0.6, 7, 2),
    "eight vectors": (37, 519, 0.5, 8, 4),
    "sixteen vectors": (33, 4400, 0.3, 16, 3),
}


@every_format
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_codes_and_scales(multiply, name, dtype, case, seed):
    rows, cols, density, count, multiprocessors = CASES[case]
    w = compress(random(rows, cols, density, dtype), name)
    x = torch.randn(count, cols).to(dtype)
    exact = rounded(w, torch.float32).to_dense().double()
    y = multiply(w, x, multiprocessors).double()
    wanted = x.double() @ exact.t()
    bound = torch.finfo(dtype).eps * wanted.abs() + 1e-6 * (x.double().abs() @ exact.abs().t())
    assert bool(((y - wanted).abs() <= bound + 1e-7).all())

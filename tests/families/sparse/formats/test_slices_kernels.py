"""The kernels that write and lay out matrices in the formats u8, u4 and u2, run on the host by
their text."""

import pytest
import torch

from kernlib.families.sparse.formats import slices, slices_cpu, slices_gpu
from kernlib.families.sparse.formats.tiling import Tiling
from tests.families.sparse.cases import random, same_bits
from tests.support import fakes
from tests.support.emulation import gpus
from tests.support.emulation.emulator import kernels_of

pytestmark = pytest.mark.emulated

SHAPES = {
    "a row": (1, 70, 0.5),
    "few columns": (70, 3, 0.5),
    "no whole lines": (33, 417, 0.5),
    "whole lines": (64, 512, 0.4),
    "long steps": (40, 1300, 0.004),
    "nothing in most rows": (70, 600, 0.0005),
    "nearly dense": (35, 290, 0.97),
}
GUARD = 64  # elements before and behind the matrix, which nothing may write


@pytest.fixture
def on_host(tmp_path_factory, monkeypatch):
    """GPUs whose kernels the host runs."""
    fakes.forget()
    yield gpus.install(monkeypatch, kernels_of(tmp_path_factory), slices_gpu)
    fakes.forget()


@pytest.fixture
def decode(on_host):
    """``SlicesFormat.decode`` of tensors on the host, into memory that is full of ones."""
    pages = []

    def decoded(form, tensors, facts, shape, dtype):
        page = torch.full((2 * GUARD + shape[0] * shape[1],), 1, dtype=dtype)
        pages.append(page)
        dense = page[GUARD : page.numel() - GUARD].view(shape)
        tensors = {name: gpus.gpu(t) for name, t in tensors.items()}
        slices_gpu.read(form.code, tensors, Tiling.of(facts), gpus.gpu(dense))
        return dense

    yield decoded
    for page in pages:
        assert bool((page[:GUARD] == 1).all()) and bool((page[-GUARD:] == 1).all())


def tilings(cols):
    """Panels, and rows cut into parts."""
    wide = -(-cols // 16) * 16
    narrow = [Tiling(width) for width in (16, 144) if width < wide]
    return [*narrow, Tiling(wide), *(Tiling(wide, parts) for parts in (2, 3, 8))]


def with_wide_rows(tensors):
    """The same with rows of 32 bits, as matrices of more than 65535 rows have them."""
    rows = tensors["rows"]
    numbers = slices_cpu.numbers(rows), slices_cpu.starts(rows).flatten(-2)
    return {**tensors, "rows": torch.cat(numbers, -1).to(torch.int32)}


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("code", slices.FORMATS)
def test_a_matrix_comes_back(decode, code, name, dtype, seed):
    form, (rows, cols, density) = slices.FORMATS[code], SHAPES[name]
    dense = random(rows, cols, density, dtype)
    for tiling in tilings(cols):
        tensors, facts = form.encode(dense, tiling)
        assert same_bits(decode(form, tensors, facts, dense.shape, dtype), dense), tiling
        wide = with_wide_rows(tensors)
        assert same_bits(decode(form, wide, facts, dense.shape, dtype), dense), tiling


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("code", slices.FORMATS)
def test_codes_are_those_of_a_cpu(on_host, code, name, dtype, seed):
    form, (rows, cols, density) = slices.FORMATS[code], SHAPES[name]
    dense = random(rows, cols, density, dtype).mT.contiguous().mT
    for tiling in tilings(cols):
        expected, _ = form.encode(dense, tiling)
        lengths = slices_gpu.count(form.code, gpus.gpu(dense), tiling.width)
        starts, held = slices.arrange(gpus.host(lengths), form.code.unit, tiling.parts)
        tensors = {
            "data": torch.zeros_like(expected["data"]),
            "offsets": starts.to(torch.int32),
            "rows": held,
        }
        if tensors["data"].numel():
            data, offsets, rows_of = (gpus.gpu(t) for t in tensors.values())
            slices_gpu.write(form.code, gpus.gpu(dense), tiling, offsets, rows_of, data)
        assert all(torch.equal(t, expected[name]) for name, t in tensors.items()), tiling


@pytest.mark.parametrize("code", slices.FORMATS)
def test_nothing_leads_out_of_the_matrix(decode, code, seed):
    """Bytes that no encoder writes: steps, rows and offsets at random."""
    form, shape = slices.FORMATS[code], (37, 210)
    dense = random(*shape, 0.5, torch.float16)
    for tiling in tilings(shape[1]):
        tensors, facts = form.encode(dense, tiling)
        tensors["data"].random_(256)
        decode(form, tensors, facts, shape, dense.dtype)
        wide = with_wide_rows(tensors)
        wide["rows"][..., slices.LANES :].random_(-2 * shape[1], 2 * shape[1])  # starts of parts
        decode(form, wide, facts, shape, dense.dtype)
        wide["rows"].random_(-(2**31), 2**31)
        decode(form, wide, facts, shape, dense.dtype)
        tensors["rows"].random_(256)
        tensors["offsets"].random_(-(2**31), 2**31)
        decode(form, tensors, facts, shape, dense.dtype)

"""Scaled products before anybody calls them, on GPUs that exist by name alone."""

import pytest
import torch

from kernlib import ahead
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels.scaled import Scaled
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.run import run_kernel
from kernlib.runtime import devices, driver
from tests.families.blocksparse.scaled.cases import layout, operands
from tests.support import fakes
from tests.support.fakes import OnGpu, Torch

LAYER = BlockSparseScaledMatmul("dds", transpose_b=True)
VALUES = BlockSparseScaledMatmul("dsd", out_dtype="float16")
FLAGS = {LAYER: ("dds", (False, True)), VALUES: ("dsd", (False, False))}


@pytest.fixture
def gpus(monkeypatch):
    fakes.forget()
    monkeypatch.setattr(devices, "raw_empty", None)
    monkeypatch.setattr(devices, "torch", Torch())
    monkeypatch.setattr(driver, "encode_tiled", lambda: lambda *map_and_address: 0)
    yield fakes.install(monkeypatch)
    fakes.forget()


def given(descriptor=LAYER, heads: int = 0, batches=((), ()), size=8, block=128) -> list:
    mask = torch.ones(2, 3) if not heads else torch.ones(heads, 2, 3)
    made = layout(mask, block)
    on_gpu = Layout.from_layout(made.text, tuple(t.as_subclass(OnGpu) for t in made.tensors))
    tensors = operands(made, *FLAGS[descriptor], batches, size)
    return [on_gpu, *(t.as_subclass(OnGpu) for t in tensors)]


@pytest.mark.parametrize("descriptor", FLAGS, ids=lambda made: made.mode)
def test_a_prepared_call_is_nothing_but_its_launch(descriptor, gpus):
    tensors = given(descriptor)
    assert not ahead.prepared(descriptor, *tensors)
    ahead.prepare(descriptor, *tensors)
    assert ahead.prepared(descriptor, *tensors) and len(gpus.loads) == 1
    run_kernel(descriptor, *tensors)
    assert len(gpus.loads) == len(gpus.launches) == 1
    assert gpus.loads[0].what.startswith("blocksparse scaled ")


@pytest.mark.few(0)
def test_specs_are_among_the_variants(gpus):
    known = ahead.variants(LAYER, "sm_90a", ())
    for size in (1, 72, 1000, 60000):
        for heads, batches in ((0, ((), ())), (2, ((3,), ())), (0, ((2,), (2,)))):
            tensors = given(LAYER, heads, batches, size)
            found = ahead.specs(LAYER, "sm_90a", tuple(tensors), {})
            assert found and set(found) <= set(known)
    for arch in ("sm_80", "sm_100"):
        assert ahead.specs(LAYER, arch, tuple(tensors), {}) == []
        assert ahead.variants(LAYER, arch, ()) == []


def test_only_sums_along_rows_of_blocks_of_128_have_a_kernel(gpus):
    assert ahead.specs(LAYER, "sm_90a", tuple(given(block=64)), {}) == []
    other = BlockSparseScaledMatmul("dds")
    made = layout(torch.ones(2, 3), 128)
    tensors = made, *operands(made, "dds", (False, False))
    assert ahead.specs(other, "sm_90a", tensors, {}) == ahead.variants(other, "sm_90a", ()) == []


def test_tiles_are_as_wide_as_the_columns(gpus):
    """Two widths; a result that the copy engine cannot write is torch's."""
    words = []
    for size in (8, 60000):
        (*_, main) = ahead.specs(LAYER, "sm_90a", tuple(given(size=size)), {})
        words.append(main.description)
    assert "128x128" in words[0] and "128x256" in words[1]
    many, few = (Scaled().choices(_problem(columns), "sm_90a") for columns in (60000, 8))
    assert {"columns": 256} in many != few
    assert ahead.specs(VALUES, "sm_90a", tuple(given(VALUES, size=9)), {}) == []


def _problem(columns: int):
    from kernlib.families.blocksparse.scaled.operation import PRODUCT, problem_of

    tensors = tuple(given(size=columns))
    call = PRODUCT.check(LAYER, tensors, None, {})
    return problem_of(call, LAYER, tensors, None)[0]


def test_what_torch_computes_is_ready():
    made = layout(torch.ones(2, 3), 128)
    tensors = operands(made, "dds", (False, True))
    ahead.prepare(LAYER, made, *tensors)
    assert ahead.prepared(LAYER, made, *tensors)
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
        ahead.prepare(LAYER, made.to("meta"), *(t.to("meta") for t in tensors))
    with pytest.raises(UnsupportedError, match="kernels are timed on the GPU"):
        ahead.candidates(LAYER, made, *tensors)


def test_candidates(gpus):
    found = ahead.candidates(LAYER, *given())
    assert [each.choice for each in found.kernels] == [{"kind": "blocksparse_scaled"}]
    assert ahead.candidates(LAYER, *given(block=64)).kernels == []
    *operands, scale = given()
    with pytest.raises(UnsupportedError, match="no kernels to time: call under"):
        ahead.candidates(LAYER, *operands, scale.clone().requires_grad_())

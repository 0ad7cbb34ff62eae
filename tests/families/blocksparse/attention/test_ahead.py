"""Block-sparse attention before anybody calls it, on GPUs that exist by name alone."""

import pytest
import torch

from kernlib import ahead
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.run import run_kernel
from tests.families.blocksparse.attention.cases import F16, F32, F64, Shape
from tests.families.blocksparse.attention.on_host import on_gpu, operands

SHAPE = Shape()
PLAIN = BlockSparseAttention()
BIASED = BlockSparseAttention(score="v + bias", captured={"bias": ("row", "col")}, causal=True)


def test_a_prepared_call_is_nothing_but_its_launch(kernels, gpus):
    made, tensors = operands(SHAPE)
    assert not ahead.prepared(PLAIN, made, *tensors)
    ahead.prepare(PLAIN, made, *tensors, scale=2.0)
    assert ahead.prepared(PLAIN, made, *tensors, scale=3.0)
    assert not gpus.launches
    loads = len(gpus.loads)
    run_kernel(PLAIN, made, *tensors, scale=1.0)
    assert len(gpus.loads) == loads and len(gpus.launches) == 1


def test_kernels_of_gradients_are_prepared(kernels, gpus):
    made, tensors = operands(SHAPE, grad=True)
    ahead.prepare(PLAIN, made, *tensors)
    assert any("gradient" in load.what for load in gpus.loads)
    assert not ahead.prepared(PLAIN, made, *tensors)
    needs = [problem.needs for problem in kernels.problems if hasattr(problem, "needs")]
    assert needs and {*needs} == {(True, True, True)}


def test_what_torch_computes_is_ready():
    made, tensors = SHAPE.layout(), SHAPE.tensors()
    ahead.prepare(PLAIN, made, *tensors)
    assert ahead.prepared(PLAIN, made, *tensors)
    meta = [t.to("meta") for t in tensors]
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
        ahead.prepare(PLAIN, made.to("meta"), *meta)
    with pytest.raises(UnsupportedError, match="kernels are timed on the GPU"):
        ahead.candidates(PLAIN, made, *tensors)


def test_specs(kernels, gpus):
    made, tensors = SHAPE.layout().to("meta"), [t.to("meta") for t in SHAPE.tensors(F16)]
    bias = torch.zeros(50, 70, device="meta")
    assert ahead.specs(PLAIN, "sm_90a", (made, *tensors), {}, 0)
    recorded = [t.requires_grad_() for t in tensors]
    found = ahead.specs(BIASED, "sm_90a", (made, *recorded), {"bias": bias.requires_grad_()}, 0)
    assert len(found) == 3  # of a gradient that lies as the result does, and as sum() makes it
    (collected,) = kernels.problems[-1].collected
    assert (collected.index, collected.axes) == (0, "pair")
    wide = [t.to(F32) for t in tensors]
    assert ahead.specs(PLAIN, "sm_90a", (made, *wide), {}) == []
    with pytest.raises(TypeError, match=r"^gain is no argument of BlockSparseAttention\(\)"):
        ahead.specs(PLAIN, "sm_90a", (made, *tensors), {"gain": bias})


def test_variants(kernels):
    assert len(ahead.variants(PLAIN, "sm_90a", (F16, F32, F64))) == 1
    # Of 5 dtypes, as a condition is no summand, columns side by side or not, with slopes or not.
    assert len(ahead.variants(BIASED, "sm_90a", (F16, torch.bfloat16))) == 2 * 5 * 2 * 2
    with pytest.raises(KeyError):
        ahead.variants(PLAIN, "sm_90a", (torch.int32,))


def test_specs_are_among_the_variants():
    """Of kernels that there are, for widths that are compiled for nobody in particular."""
    shape = Shape(1, 2, 2, 128, 128, 64, 64, (64, 64))
    made, tensors = shape.layout().to("meta"), [t.to("meta") for t in shape.tensors(F16, True)]
    bias = {"bias": torch.zeros(128, 128, device="meta", dtype=F16)}
    found = ahead.specs(BIASED, "sm_90a", (made, *tensors), bias)
    assert len(found) > 1
    assert {*found} <= {*ahead.variants(BIASED, "sm_90a", (F16,))}


def test_there_is_one_candidate(kernels, gpus):
    made, tensors = operands(SHAPE)
    found = ahead.candidates(PLAIN, made, *tensors)
    (only,) = found.kernels
    only.ready()()
    assert found.device == 0 and len(gpus.launches) == 2
    empty = [on_gpu(t[:0]) for t in tensors]
    assert ahead.candidates(PLAIN, made, *empty).kernels == []

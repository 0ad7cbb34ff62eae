"""Block-sparse softmax before anybody calls it, on GPUs that exist by name alone."""

import pytest
import torch

from kernlib import ahead
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.run import run_kernel
from kernlib.runtime import devices
from tests.families.blocksparse.softmax.cases import layout, values
from tests.support import fakes
from tests.support.fakes import OnGpu, Torch

PLAIN = BlockSparseSoftmax()
MASKED = BlockSparseSoftmax(causal=True, key_padding_mask="mul", attn_mask="add")


@pytest.fixture
def gpus(monkeypatch):
    fakes.forget()
    monkeypatch.setattr(devices, "raw_empty", None)
    monkeypatch.setattr(devices, "torch", Torch())
    yield fakes.install(monkeypatch)
    fakes.forget()


def on_gpu(made: Layout) -> Layout:
    return Layout.from_layout(made.text, tuple(t.as_subclass(OnGpu) for t in made.tensors))


def given(dtype=torch.float16):
    made = layout(torch.ones(2, 3), 16)
    return on_gpu(made), values(made, 2, dtype=dtype).as_subclass(OnGpu)


def test_a_prepared_call_is_nothing_but_its_launch(gpus):
    made, x = given()
    assert not ahead.prepared(PLAIN, made, x, scale=2.0)
    ahead.prepare(PLAIN, made, x, scale=2.0)
    assert ahead.prepared(PLAIN, made, x, scale=3.0) and len(gpus.loads) == 1
    run_kernel(PLAIN, made, x, scale=1.0)
    assert len(gpus.loads) == len(gpus.launches) == 1


def test_a_trial_writes_where_its_plan_would(gpus, monkeypatch):
    """An output as far apart in memory as the caller's."""
    made, x = given()
    wide = torch.zeros(4, *x.shape[1:], dtype=x.dtype).as_subclass(OnGpu)
    out, layouts, new = wide[::2], [], OnGpu.new_empty_strided
    noted = lambda t, *layout: (layouts.append(layout), new(t, *layout))[1]  # noqa: E731
    monkeypatch.setattr(OnGpu, "new_empty_strided", noted)
    (candidate,) = ahead.candidates(PLAIN, made, x, out=out).kernels
    candidate.ready()()
    assert layouts == [(out.shape, out.stride())] and len(gpus.launches) == 2


def test_kernels_of_gradients_are_prepared(gpus):
    made, x = given()
    ahead.prepare(PLAIN, made, x.requires_grad_())
    kinds = [loaded.what.split("float16")[0] for loaded in gpus.loads]
    # One of sum() is laid out as the result is.
    assert kinds == ["blocksparse softmax ", "blocksparse softmax gradient "]
    assert not ahead.prepared(PLAIN, made, x)


def test_what_torch_computes_is_ready():
    made = layout(torch.ones(2, 3), 16)
    ahead.prepare(PLAIN, made, values(made))
    assert ahead.prepared(PLAIN, made, values(made))
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
        ahead.prepare(PLAIN, made.to("meta"), values(made).to("meta"))
    with pytest.raises(UnsupportedError, match="kernels are timed on the GPU"):
        ahead.candidates(PLAIN, made, values(made))


def test_specs_are_among_the_variants(gpus):
    made, x = given()
    mask = torch.ones(made.shape, dtype=torch.bool).as_subclass(OnGpu)
    key = torch.ones(made.shape[1], dtype=torch.float16).as_subclass(OnGpu)
    rest = {"key_padding_mask": key, "attn_mask": mask}
    found = ahead.specs(MASKED, "sm_90a", (made, x.requires_grad_()), rest)
    assert len(found) == 2
    assert {*found} <= {*ahead.variants(MASKED, "sm_90a", (torch.float16, torch.float64))}
    assert ahead.specs(PLAIN, "sm_90a", (made, x.double()), {}) == []
    with pytest.raises(KeyError):
        ahead.variants(PLAIN, "sm_90a", (torch.int32,))
    with pytest.raises(TypeError, match=r"^bias is no argument of BlockSparseSoftmax\(\)"):
        ahead.specs(PLAIN, "sm_90a", (made, x), {"bias": key})


def test_there_is_one_candidate(gpus):
    made, x = given()
    found = ahead.candidates(PLAIN, made, x)
    (only,) = found.kernels
    only.ready()()
    assert found.device == 0 and len(gpus.launches) == 2
    assert only.spec in ahead.variants(PLAIN, "sm_90a", (torch.float16,))
    assert ahead.candidates(PLAIN, made, x[:0]).kernels == []

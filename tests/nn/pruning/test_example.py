"""The language model of examples/pruned_llm.py, pruned in float32, beside the references in
float64."""

from __future__ import annotations

import copy
import runpy

import pytest
import torch

from kernlib.sparse import prune
from tests.nn.pruning.models import inputs_of
from tests.nn.pruning.references import PRUNED
from tests.support.paths import ROOT

NAMES = ("qkv", "out", "up", "down")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "pruned_llm.py"))


@pytest.fixture(scope="module")
def trained(example):
    """A model that has learnt for some seconds, text to test it by, and text to calibrate by."""
    grammar = example["Grammar"](0)
    model = example["trained"](grammar, 20, "cpu")
    return model, grammar.text(16), [*grammar.text(16)[:, :-1].split(8)]


@pytest.mark.parametrize("method", PRUNED)
def test_perplexity_is_that_of_the_reference(method, example, trained):
    model, text, batches = trained
    expected = copy.deepcopy(model).double()
    for block in range(len(model.blocks)):
        names = [f"blocks.{block}.{name}" for name in NAMES]
        inputs = {name: inputs_of(expected, name, batches) for name in names}
        for name, x in inputs.items():
            weight = expected.get_submodule(name).weight
            weight.copy_(PRUNED[method](weight, x, 0.3))
    pruned = copy.deepcopy(model)
    getattr(prune, method)(pruned, batches, density=0.3, match=r"blocks\.")
    before, reference, result = (example["perplexity"](m, text) for m in (model, expected, pruned))
    assert reference > 1.001 * before and abs(result - reference) < 0.02 * reference
    for name, layer in pruned.named_modules():
        if name.endswith(NAMES):
            stays = layer.weight != 0
            same = (stays == (expected.get_submodule(name).weight != 0)).double().mean()
            assert same > 0.99, name
    assert torch.equal(pruned.head.weight, model.head.weight)

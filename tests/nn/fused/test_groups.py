"""Which layers are fused, which stay apart, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib.nn import sparsify
from tests.nn.fused.models import DENSITY, block, close, inputs


def test_groups_by_names(products):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 32)
            self.a, self.b = nn.Linear(64, 16), nn.Linear(64, 16)

        def forward(self, x):
            return [layer(x) for layer in (self.query, self.key, self.a, self.b)]

    torch.manual_seed(0)
    model = nn.Sequential(Mixed())
    plain = copy.deepcopy(model)
    sparsify(plain, density=DENSITY)
    new = sparsify(model, density=DENSITY, fuse=[["query", "key"], ["0.a", "0.b"]])
    assert list(new) == ["0.query", "0.key", "0.a", "0.b"] and new["0.key"] is model[0].key
    products.clear()
    with torch.no_grad():
        for ours, theirs in zip(model(inputs(3)), plain(inputs(3)), strict=True):
            close(ours, theirs)
    assert products[:2] == [(96, 64), (32, 64)]


@pytest.mark.parametrize(
    "fuse, error, words",
    [
        ([["q_proj", "key"]], ValueError, "fuse names 'key', and the model has no such layer.*q_p"),
        ([["q_proj", "gate_proj"]], ValueError, "no module has all of these layers"),
        ([["q_proj"]], ValueError, "two layers or more"),
        ([["q_proj", "q_proj"]], ValueError, "two layers or more"),
        ([["q_proj", "k_proj"], ["k_proj", "v_proj"]], ValueError, "'self_attn.k_proj' in two"),
        (["q_proj", "k_proj"], TypeError, "a group of fuse must be a list of names"),
        ("q_proj", TypeError, "fuse must be a bool or a list of groups"),
        (3, TypeError, "fuse must be a bool or a list of groups"),
        ([[1, 2]], TypeError, "a group of fuse must be a list of names"),
    ],
)
def test_groups_that_are_none_are_refused(fuse, error, words):
    model = block()
    with pytest.raises(error, match=words):
        sparsify(model, density=DENSITY, fuse=fuse)
    assert type(model.self_attn.q_proj) is nn.Linear


def with_hook(layers):
    layers.k_proj.register_forward_hook(lambda *_: None)


def with_bias(layers):
    layers.k_proj.bias = nn.Parameter(torch.zeros(32))


def of_other_dtype(layers):
    layers.k_proj.half()


def of_other_inputs(layers):
    layers.k_proj = nn.Linear(32, 32, bias=False)


def in_two_places(layers):
    layers.other = layers.k_proj


def an_adapter(layers):
    layers.k_proj = nn.Sequential(layers.k_proj)


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_hook, "a layer has hooks"), (with_bias, "some have a bias"),
        (of_other_dtype, "they differ in dtype: torch.float16, torch.float32"),
        (of_other_inputs, "they differ in inputs: 32, 64"),
        (in_two_places, "a layer stands in several places"),
        (an_adapter, "self_attn.k_proj is not swapped"),
    ],
)  # fmt: skip
def test_groups_that_stay_apart_are_warned_of(change, reason):
    model = block()
    change(model.self_attn)
    with pytest.warns(kl.KernlibWarning, match=rf"leaves 1 of 2 groups apart: self_attn.*{reason}"):
        new = sparsify(model, density=DENSITY, fuse=True)
    assert not hasattr(new["self_attn.q_proj"], "joint") and new["mlp.up_proj"].joint


def test_models_without_groups_are_warned_of():
    class Phi3Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj = nn.Linear(64, 96)

    with pytest.warns(kl.KernlibWarning, match="fuses nothing.*'0.qkv_proj' is one product"):
        sparsify(nn.Sequential(Phi3Attention()), density=DENSITY, fuse=True)


def test_groups_of_known_models_are_fused_unless_somebody_says_otherwise(recwarn):
    model = block()
    new = sparsify(model, density=DENSITY)
    assert new["self_attn.q_proj"].joint is new["self_attn.v_proj"].joint
    assert not hasattr(sparsify(block(), density=DENSITY, fuse=False)["mlp.up_proj"], "joint")
    sparsify(nn.Sequential(nn.Linear(64, 64)), density=DENSITY)
    model = block()
    assert list(sparsify(model, match="mlp|q_proj", density=DENSITY)) != []
    assert not hasattr(model.self_attn.q_proj, "joint") and model.mlp.up_proj.joint
    model = block()
    sparsify(model, density=DENSITY, match="gate_proj|q_proj")
    sparsify(model, density=DENSITY, match="up_proj|k_proj|v_proj")
    assert not recwarn.list
    model = block()
    an_adapter(model.self_attn)
    with pytest.warns(kl.KernlibWarning, match="self_attn.k_proj is not swapped"):
        sparsify(model, density=DENSITY)


def test_what_match_leaves_out_is_not_fused():
    model = block()
    with pytest.warns(kl.KernlibWarning, match="self_attn.q_proj is not swapped"):
        sparsify(model, match="mlp", density=DENSITY, fuse=True)
    assert type(model.self_attn.q_proj) is nn.Linear and model.mlp.up_proj.joint


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip

    class Swapped(transformers.LlamaForCausalLM):
        fuse: bool | list = True

        def __init__(self, config):
            super().__init__(config)
            sparsify(self, match="mlp|self_attn", density=0.4, fuse=self.fuse)

    class Apart(Swapped):
        fuse = False

    tokens, folder = torch.arange(10)[None], str(tmp_path / "model")
    for source, target in ((Swapped, Swapped), (Swapped, Apart), (Apart, Swapped)):
        wanted = source(config).eval()
        wanted.save_pretrained(folder)
        model, info = target.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
        with torch.no_grad():
            close(model.eval()(tokens).logits, wanted(tokens).logits)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens, **options), wanted.generate(tokens, **options))

"""Converted checkpoints in transformers: from what ``save_pretrained`` wrote to tokens and back."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from kernlib import sparse
from kernlib.checkpoints import CheckpointError, convert, plan, to_dense
from kernlib.errors import KernlibWarning
from kernlib.nn import SparseLinear, sparsify
from kernlib.nn.linears import is_conv1d

transformers = pytest.importorskip("transformers", reason="comes with kernlib[checkpoints]")

pytestmark = pytest.mark.few(1000)  # each model is of another kind
COMMON = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **COMMON,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, **COMMON
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=64, max_position_embeddings=64, **COMMON,
    ),
}  # fmt: skip
HALF = {"density": 0.5, "format": "bitmap"}
TOKENS = torch.arange(3, 13)[None]


@pytest.fixture(params=MODELS)
def model(request, seed):
    return transformers.AutoModelForCausalLM.from_config(MODELS[request.param]()).eval()


def pruned(model, density):
    """A copy whose linear layers, but for the head, are pruned by magnitude."""
    other, head = copy.deepcopy(model), model.get_output_embeddings()
    names = [n for n, m in model.named_modules() if m is not head and is_layer(m)]
    for name in names:
        layer = other.get_submodule(name)
        weight = layer.weight.data.t() if is_conv1d(type(layer)) else layer.weight.data
        weight.copy_(sparse.magnitude(weight, density))
    return other, names


def is_layer(module):
    return type(module) is torch.nn.Linear or is_conv1d(type(module))


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_converted_model_computes_as_the_pruned_one(model, tmp_path):
    other, names = pruned(model, 0.5)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    expected = plan(tmp_path / "model", **HALF)
    layers = convert(tmp_path / "model", tmp_path / "out", **HALF)
    assert {layer.name for layer in layers} == {layer.name for layer in expected}
    assert len(layers) == len(names)
    result = loaded(tmp_path / "out")
    swapped = [m for m in result.modules() if isinstance(m, SparseLinear)]
    assert len(swapped) >= len(names)
    with torch.no_grad():
        torch.testing.assert_close(result(TOKENS).logits, other(TOKENS).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(result.generate(TOKENS, **options), other.generate(TOKENS, **options))


def test_dense_again(model, tmp_path):
    """By the converter, and by the converter from what transformers has saved of the result."""
    other, _ = pruned(model, 0.5)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", **HALF)
    loaded(tmp_path / "out").save_pretrained(tmp_path / "saved")
    for name in ("out", "saved"):
        to_dense(tmp_path / name, tmp_path / f"{name}-dense")
        result = loaded(tmp_path / f"{name}-dense")
        assert not any(isinstance(m, SparseLinear) for m in result.modules())
        state = other.state_dict()
        assert result.state_dict().keys() == state.keys()
        assert all(torch.equal(v, state[k]) for k, v in result.state_dict().items())


def test_a_part_first_and_the_rest_later(model, tmp_path):
    """Layers are the same matrices whether their weights are stored transposed, packed or not."""
    other, names = pruned(model, 0.5)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "part", match="attn", **HALF)
    layers = convert(tmp_path / "part", tmp_path / "out", match=r"\.\d+\.", **HALF)
    assert len(layers) == len(names)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "out")(TOKENS).logits, other(TOKENS).logits)


def test_the_head_goes_where_it_is_named(tmp_path, seed):
    config = MODELS["llama"]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (layer,) = convert(tmp_path / "model", tmp_path / "out", match="lm_head", **HALF)
    assert layer.name == "lm_head"
    assert isinstance(loaded(tmp_path / "out").lm_head, SparseLinear)


def test_names_of_former_versions(tmp_path, seed):
    """Of models whose parts have moved since, which transformers saves by the names of before."""
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    layers = convert(tmp_path / "model", tmp_path / "out", density=0.5, format="bitmap")
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    assert len(layers) >= len(linears) - 1
    result = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert sum(isinstance(m, SparseLinear) for m in result.modules()) == len(layers)


def test_pruned_checkpoints_need_no_density(model, tmp_path):
    other, names = pruned(model, 0.4)
    other.save_pretrained(tmp_path / "pruned")
    layers = convert(tmp_path / "pruned", tmp_path / "out", format="u4")
    assert len(layers) == len(names) and all(layer.density < 0.45 for layer in layers)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "out")(TOKENS).logits, other(TOKENS).logits)


def test_a_config_that_makes_no_model_is_named(tmp_path, seed):
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"]())
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": "four"}))
    with pytest.raises(CheckpointError, match=r"config\.json.*LlamaForCausalLM"):
        convert(tmp_path / "model", tmp_path / "out", **HALF)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_of_derived_classes_are_named(is_tied, tmp_path, seed):
    """Falcon's override what nn.Linear computes, as others do that compute something else."""
    config = transformers.FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **COMMON
    )
    config.tie_word_embeddings = is_tied
    model = transformers.FalconForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    name = r"'transformer\.h\.0\.self_attention\.query_key_value'"
    message = rf"{name} is a transformers\..*FalconLinear, a subclass of nn\.Linear"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "model", tmp_path / "out", **HALF)
    with pytest.warns(KernlibWarning, match=message):
        assert not sparsify(model, match=r"\.h\.", **HALF)

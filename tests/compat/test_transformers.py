"""Models of transformers whose layers are compressed, by from_pretrained and save_pretrained."""

from __future__ import annotations

import copy
import os
import pickle
import sys

import pytest
import torch
from torch import nn

from kernlib.errors import KernlibWarning
from kernlib.nn import SparseLinear, sparsify
from kernlib.nn.fused_linear import FusedLinear
from kernlib.nn.sparse_holding import PACKED

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
ours = pytest.importorskip("kernlib.compat.transformers")
from tests.compat.transformers_cases import (  # noqa: E402
    MATCHES,
    SIZES,
    TOKENS,
    bert,
    config_of,
    copied,
    edit,
    generated,
    gpt2,
    layers_of,
    llama,
    loaded,
    logits,
    run,
    save_llama,
    since_5,
    sparse,
)

with_accelerate = pytest.mark.skipif(
    not transformers.utils.is_accelerate_available(), reason="accelerate is not installed"
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return save_llama(tmp_path_factory)


@pytest.fixture
def saved(first, tmp_path):
    return copied(first, tmp_path)


# There and back.


@pytest.mark.few(12)
@pytest.mark.parametrize("make", MATCHES)
def test_a_model_comes_back_as_it_was_saved(make, tmp_path):
    model = sparse(make)
    model.save_pretrained(tmp_path / "first")
    kind = "AutoModelForMaskedLM" if make is bert else "AutoModelForCausalLM"
    again = loaded(tmp_path / "first", kind)
    assert {n: type(x) for n, x in layers_of(again).items()} == {
        n: type(x) for n, x in layers_of(model).items()
    }
    assert torch.equal(logits(again), logits(model)) and not again.training
    for name, layer in layers_of(again).items():
        wanted = model.get_submodule(name)
        assert layer.matrix.format == wanted.matrix.format
        assert torch.equal(layer.to_dense(), wanted.to_dense())
        assert layer.bias is None or layer.bias.requires_grad
    if make is not bert:
        assert generated(again) == generated(model)
    again.save_pretrained(tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        first, second = ((tmp_path / part / file).read_bytes() for part in ("first", "second"))
        assert first == second
    assert torch.equal(logits(loaded(tmp_path / "second", kind)), logits(model))


def test_what_config_json_says(saved):
    model, folder = saved
    assert config_of(folder)["quantization_config"] == {
        "quant_method": "kernlib", "version": 1, "modules": [*layers_of(model)], "fuse": True,
    }  # fmt: skip
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        keys = {*file.keys()}
    for name in layers_of(model):
        assert f"{name}.{PACKED}" in keys and f"{name}.weight" not in keys


@pytest.mark.parametrize("fuse", [True, False])
def test_layers_are_fused_or_not_as_it_says(saved, fuse):
    model, folder = saved
    edit(folder, fuse=fuse)
    again = loaded(folder)
    kinds = {type(x) for n, x in layers_of(again).items() if "q_proj" in n or "up_proj" in n}
    assert kinds == {FusedLinear if fuse else SparseLinear}
    torch.testing.assert_close(logits(again), logits(model))
    again.save_pretrained(folder)
    assert config_of(folder)["quantization_config"]["fuse"] is fuse


def test_a_file_of_a_converter_needs_no_fuse(saved):
    _, folder = saved
    edit(folder, fuse=None)
    assert type(loaded(folder).model.layers[0].mlp.up_proj) is FusedLinear


def test_shards(tmp_path):
    model = sparse()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 3
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


@since_5
def test_pickled_weights_of_torch(saved):
    model, folder = saved
    torch.save(safetensors.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(loaded(folder, use_safetensors=False)), logits(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_rounds_the_values(saved, dtype):
    model, folder = saved
    again = loaded(folder, dtype=dtype)
    for name, layer in layers_of(again).items():
        assert layer.matrix.dtype == dtype
        assert torch.equal(layer.to_dense(), model.get_submodule(name).to_dense().to(dtype))
    assert {p.dtype for p in again.parameters()} == {dtype}
    torch.testing.assert_close(logits(again).float(), logits(model), rtol=0, atol=0.03)


def test_a_model_in_half_precision_is_saved_in_it(saved, tmp_path):
    for model in (sparse(), loaded(saved[1])):
        model.half().save_pretrained(tmp_path / "half")
        again = loaded(tmp_path / "half", dtype="auto")
        for name, layer in layers_of(again).items():
            assert layer.matrix.dtype == torch.float16
            assert torch.equal(layer.to_dense(), model.get_submodule(name).to_dense())
        # half() rounds buffers that from_pretrained computes in float32.
        torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=2e-3)


def test_layers_that_transformers_keeps_in_float32(tmp_path):
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=96
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    sparsify(model, match=r"wo$|wi$", density=0.4)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, "T5ForConditionalGeneration", dtype=torch.float16)
    ends = {n.rpartition(".")[2]: x.matrix.dtype for n, x in layers_of(again).items()}
    assert ends == {"wo": torch.float32, "wi": torch.float16}
    assert again(input_ids=TOKENS, decoder_input_ids=TOKENS).logits.isfinite().all()


PLACED = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu",
          "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip


@with_accelerate
@pytest.mark.few(12)
@pytest.mark.parametrize("low", [True, None])
@pytest.mark.parametrize(
    "device_map", ["auto", "cpu", {"": "cpu"}, {**PLACED, "model.layers.1": "cpu"}]
)
def test_device_maps(saved, device_map, low):
    options = {} if low is None else {"low_cpu_mem_usage": low}
    model, folder = saved
    again = loaded(folder, device_map=device_map, **options)
    assert torch.equal(logits(again), logits(model)) and generated(again) == generated(model)


@since_5
@with_accelerate
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_layers_on_disk_are_there_in_calls_alone(saved, tmp_path, offload_buffers):
    model, folder = saved
    again = loaded(
        folder,
        device_map={**PLACED, "model.layers.1": "disk"},
        offload_folder=tmp_path / "offloaded",
        offload_buffers=offload_buffers,
    )
    for _ in range(2):
        torch.testing.assert_close(logits(again), logits(model))
        for name, layer in layers_of(again).items():
            if "layers.1." in name:
                assert layer.nbytes == 0
                assert layer._buffers[PACKED].is_meta and layer._buffers[PACKED].numel()
    assert generated(again) == generated(model)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


@since_5
@with_accelerate
def test_an_automatic_device_map_counts_compressed_bytes(saved):
    _, folder = saved
    stored = os.path.getsize(folder / "model.safetensors")
    dense = sum(p.numel() for p in llama().parameters()) * 4
    sizes = {}

    class Noting(ours.KernlibQuantizer):
        def preprocess_model(self, model, **named):
            super().preprocess_model(model, **named)
            from transformers.integrations.accelerate import compute_module_sizes

            sizes.update(compute_module_sizes(model, self)[0])

    mapping = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING
    mapping["kernlib"] = Noting
    try:
        loaded(folder, device_map="auto")
    finally:
        mapping["kernlib"] = ours.KernlibQuantizer
    assert 0.9 * stored < sizes[""] < 1.1 * stored < dense


MEMORY = """
import resource, sys, torch, kernlib, transformers
torch.set_num_threads(1)
tiny, large = sys.argv[1:]
transformers.AutoModelForCausalLM.from_pretrained(tiny)(torch.arange(4)[None])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = transformers.AutoModelForCausalLM.from_pretrained(large)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
def test_loading_holds_no_dense_copy(saved, tmp_path):
    """Of 200 MB: what is read of the file and the layers, no more than a dense layer beside."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = llama(**sizes, num_attention_heads=8, num_key_value_heads=8)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data.mul_(torch.rand_like(parameter) < 0.05)
    dense = sum(p.numel() * 4 for p in model.parameters())
    sparsify(model, match="proj", format="bitmap")
    model.save_pretrained(tmp_path / "large")
    stored = os.path.getsize(tmp_path / "large/model.safetensors")
    layer = 2 * 4096 * 1024 * 4  # gate and up, which are fused
    assert dense > 2e8 and 2 * stored + layer < dense / 2
    grown = int(run(MEMORY, saved[1], tmp_path / "large"))
    assert grown < 2 * stored + layer + 16e6


# Parts of a model, and changes to it.


def test_names_follow_the_layers(tmp_path):
    model = sparse(match="up_proj")
    sparsify(model, match="q_proj", density=0.4)  # one by one, so nothing is fused
    sparsify(model, match="o_proj", density=0.4)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = mlp.up_proj.to_linear()
    model.save_pretrained(tmp_path)
    said = config_of(tmp_path)["quantization_config"]
    assert {*said["modules"]} == {*layers_of(model)} and len(said["modules"]) == 5
    again = loaded(tmp_path)
    assert torch.equal(logits(again), logits(model))
    sparsify(again, match="down_proj", density=0.4)
    again.save_pretrained(tmp_path)
    assert len(config_of(tmp_path)["quantization_config"]["modules"]) == 7
    assert torch.equal(logits(loaded(tmp_path)), logits(again))


def test_a_model_that_is_dense_again_is_a_plain_one(saved):
    _, folder = saved
    model = loaded(folder)
    for name, layer in layers_of(model).items():
        prefix, _, child = name.rpartition(".")
        setattr(model.get_submodule(prefix), child, layer.to_linear())
    wanted = logits(model)
    model.save_pretrained(folder)
    assert "quantization_config" not in config_of(folder)
    assert torch.equal(logits(loaded(folder)), wanted)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_dequantize(make, tmp_path):
    model = sparse(make)
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    again.dequantize()
    assert not layers_of(again)
    torch.testing.assert_close(logits(again), wanted)
    again.save_pretrained(tmp_path)
    assert "quantization_config" not in config_of(tmp_path)
    again = loaded(tmp_path)
    torch.testing.assert_close(logits(again), wanted)
    assert {n: type(x) for n, x in again.named_modules()} == {
        n: type(x) for n, x in make().named_modules()
    }


def test_copies_save_their_own_layers(saved, tmp_path):
    model, _ = saved
    for use in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        other = use(model)
        other.lm_head = other.lm_head.to_linear()
        other.save_pretrained(tmp_path / "other")
        assert "lm_head" not in config_of(tmp_path / "other")["quantization_config"]["modules"]
        torch.testing.assert_close(logits(loaded(tmp_path / "other")), logits(model))
    model.save_pretrained(tmp_path / "model")
    assert "lm_head" in config_of(tmp_path / "model")["quantization_config"]["modules"]


def test_a_part_of_a_model_is_swapped(tmp_path):
    torch.manual_seed(0)
    model = llama().eval()
    sparsify(model.model, match="proj", density=0.4)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))
    wrapped = nn.ModuleDict({"lm": sparse(match="mlp")})
    sparsify(wrapped, match="self_attn", density=0.4)
    wrapped["lm"].save_pretrained(tmp_path)
    assert len(config_of(tmp_path)["quantization_config"]["modules"]) == 14


def test_the_base_and_other_heads_of_a_model(saved, tmp_path):
    model, folder = saved
    with torch.no_grad():
        wanted = model.model(TOKENS).last_hidden_state
    base = transformers.AutoModel.from_pretrained(folder)
    assert torch.equal(base(TOKENS).last_hidden_state, wanted)
    base.save_pretrained(tmp_path / "base")
    assert config_of(tmp_path / "base")["quantization_config"]["modules"][0].startswith("layers.0")
    headed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(headed.model(TOKENS).last_hidden_state, wanted)
    other = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert torch.equal(other.model(TOKENS).last_hidden_state, wanted)


def test_a_class_that_swaps_its_layers_itself(tmp_path):
    class Swapped(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            sparsify(self, match="mlp", density=0.4, format="u4")

    torch.manual_seed(0)
    model = Swapped(transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    again, info = Swapped.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


def test_a_state_dict_for_save_pretrained_is_what_is_saved(saved, tmp_path):
    model, _ = saved
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["model.norm.weight"] += 1
    model.save_pretrained(tmp_path / "other", state_dict=state)
    again = loaded(tmp_path / "other")
    assert torch.equal(again.model.norm.weight, model.model.norm.weight + 1)


def test_layers_put_there_by_hand(tmp_path):
    torch.manual_seed(0)
    model = llama().eval()
    model.lm_head = SparseLinear.from_linear(model.lm_head, density=0.4)
    assert ours.attach(model) == ["lm_head"]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))
    model.lm_head = SparseLinear.from_linear(llama().lm_head, density=0.4, activation="relu")
    for call in (lambda: ours.attach(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="lm_head computes an activation"):
            call()
    with pytest.raises(TypeError, match="must be a PreTrainedModel"):
        ours.attach(nn.Linear(2, 2))


def test_a_quantization_config_of_another_library_stays():
    model = llama()
    model.hf_quantizer = other = type("Other", (), {})()
    other.quantization_config = type("Config", (), {"quant_method": "bitnet"})()
    with pytest.warns(KernlibWarning, match="has the quantization_config of bitnet"):
        sparsify(model, match="proj", density=0.4)
    assert model.hf_quantizer is other


def test_a_loaded_model_is_trained(saved):
    from transformers.trainer_utils import validate_quantization_for_training

    model = loaded(saved[1])
    validate_quantization_for_training(model)
    assert model.hf_quantizer.is_trainable and model.hf_quantizer.is_serializable()
    model.train()(TOKENS, labels=TOKENS).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0

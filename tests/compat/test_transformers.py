"""Models of transformers whose layers are compressed, by from_pretrained and save_pretrained."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib.errors import KernlibWarning
from kernlib.nn import SparseLinear, sparsify
from kernlib.nn.fused_linear import FusedLinear
from kernlib.nn.sparse_holding import PACKED
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("kernlib.compat.transformers")
safetensors = pytest.importorskip("safetensors.torch")
with_accelerate = pytest.mark.skipif(
    not transformers.utils.is_accelerate_available(), reason="accelerate is not installed"
)
since_5 = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="of transformers 5.0"
)

TOKENS = torch.arange(3, 11)[None]
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0,
}  # fmt: skip


def llama(**options):
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **options})
    return transformers.LlamaForCausalLM(config)


def tied():
    return llama(tie_word_embeddings=True)


def biased():
    return llama(attention_bias=True, mlp_bias=True)


def gpt2():
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    return transformers.MixtralForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=96,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MATCHES = {
    llama: "proj|lm_head", tied: "proj", biased: "proj", gpt2: r"c_attn|c_proj|c_fc",
    mixtral: r"[qkvo]_proj", bert: r"query|key|value|dense",
}  # fmt: skip


def sparse(make=llama, seed: int = 0, **options):
    torch.manual_seed(seed)
    model = make().eval()
    for name, parameter in model.named_parameters():  # transformers draws zeros
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    options = {"match": MATCHES[make], "density": 0.4} | options
    sparsify(model, **options)
    return model


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A saved llama: the model, and its folder."""
    folder = tmp_path_factory.mktemp("first")
    model = sparse()
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def saved(first, tmp_path):
    """The same, in a folder that may be changed."""
    model, folder = first
    return model, Path(shutil.copytree(folder, tmp_path / "saved"))


def loaded(folder, kind="AutoModelForCausalLM", **options):
    kind = getattr(transformers, kind)
    model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def generated(model) -> list:
    return model.generate(TOKENS, max_new_tokens=6, do_sample=False).tolist()


def config_of(folder) -> dict:
    return json.loads(Path(folder, "config.json").read_text())


def layers_of(model) -> dict[str, SparseLinear]:
    return {n: x for n, x in model.named_modules() if PACKED in x._buffers and n[-6:] != ".joint"}


def edit(folder, **changes) -> None:
    """Change entries of the quantization_config in a folder; None takes one out."""
    config = config_of(folder)
    entries = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in entries.items() if v is not None}
    Path(folder, "config.json").write_text(json.dumps(config))


def rewrite(folder, change, file: str = "model.safetensors") -> None:
    """Change the tensors in a file."""
    tensors = dict(safetensors.load_file(Path(folder, file)))
    change(tensors)
    safetensors.save_file(tensors, Path(folder, file), metadata={"format": "pt"})


def run(program: str, *arguments, **environment) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        **environment,
    }
    process = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


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
                assert layer._matrix is None and layer._other is None
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
        def adjust_max_memory(self, max_memory):
            return max_memory

        def _process_model_before_weight_loading(self, model, **named):
            super()._process_model_before_weight_loading(model, **named)
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


# What is wrong.

WRONG = {
    "version 2": ({"version": 2}, "has version 2, and this kernlib reads version 1"),
    "no version": ({"version": None}, "has no 'version'"),
    "a text as version": ({"version": "1"}, "has version '1'"),
    "no modules": ({"modules": None}, "has no 'modules'"),
    "a text as modules": ({"modules": "lm_head"}, "a list of whole names"),
    "numbers as modules": ({"modules": [3]}, "a list of whole names"),
    "a name twice": ({"modules": ["lm_head", "lm_head"]}, "names 'lm_head' twice"),
    "fuse as number": ({"fuse": 1}, "must have a bool for fuse"),
    "another entry": ({"bits": 4}, "has 'bits', which version 1 does not"),
    "no layer": ({"modules": ["model.layers.7.mlp.up_proj"]}, "'model.layers.7.mlp.up_proj' in"),
    "no name": ({"modules": ["up_proj"]}, "has no such layer: names are whole ones, such as 'mo"),
    "no linear layer": ({"modules": ["model.layers.0.mlp"]}, "LlamaMLP: only nn.Linear and"),
    "no dense one": ({"modules": ["lm_head", "model.embed_tokens"]}, "Embedding: only nn.Linear"),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_refused_by_name(saved, case):
    changes, match = WRONG[case]
    edit(saved[1], **changes)
    with pytest.raises(ValueError, match=match):
        transformers.AutoModelForCausalLM.from_pretrained(saved[1])


KEY = f"lm_head.{PACKED}"


def _short(tensors):
    tensors[KEY] = tensors[KEY][: tensors[KEY].numel() // 2].clone()


FILES = {
    "lacking": (lambda t: t.pop(KEY), f"whose compressed weights the files .* '{KEY}'"),
    "dense": (lambda t: t.update({"lm_head.weight": t.pop(KEY)}), f"the files .* lack: '{KEY}'"),
    "renamed": (lambda t: t.update({f"head.{PACKED}": t.pop(KEY)}), f"lack: '{KEY}'"),
    "floats": (lambda t: t.update({KEY: t[KEY].float()}), f"{KEY} must be a vector of uint8"),
    "matrix": (lambda t: t.update({KEY: t[KEY][None]}), f"{KEY} must be a vector of uint8"),
    "another": (
        lambda t: t.update({KEY: t[f"model.layers.0.mlp.up_proj.{PACKED}"].clone()}),
        rf"{KEY} is a matrix of shape \[128, 64\], and the layer has \[96, 64\]",
    ),
    "damaged": (lambda t: t.update({KEY: torch.zeros_like(t[KEY])}), f"{KEY}: these bytes do not"),
    "short": (_short, "must lie in its"),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", FILES)
def test_wrong_weights_are_refused_by_name(saved, case):
    change, match = FILES[case]
    rewrite(saved[1], change)
    with pytest.raises(ValueError, match=match):
        transformers.AutoModelForCausalLM.from_pretrained(saved[1])


def test_a_shard_that_lacks_a_weight(tmp_path):
    sparse().save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    rewrite(tmp_path, lambda tensors: tensors.pop(KEY), index["weight_map"][KEY])
    with pytest.raises(ValueError, match=f"names 1 layers .* '{KEY}'. Copy the missing files"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@since_5
def test_pickled_weights_that_lack_one(saved):
    _, folder = saved
    tensors = safetensors.load_file(folder / "model.safetensors")
    tensors.pop(KEY)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"the files .* lack: '{KEY}'"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)


def test_a_tied_head_is_refused(tmp_path):
    model = sparse(tied)
    model.save_pretrained(tmp_path)
    edit(tmp_path, modules=[*layers_of(model), "lm_head"])
    with pytest.raises(ValueError, match=r"weight is tied to model\.embed_tokens\.weight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_dense_folder_is_not_compressed_while_it_is_read(tmp_path):
    llama().save_pretrained(tmp_path)
    config = ours.KernlibConfig(["lm_head"])
    with pytest.raises(ValueError, match=r"compress the model by kernlib\.nn\.sparsify"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_configurations():
    config = ours.KernlibConfig(["a", "b"], fuse=False)
    assert ours.KernlibConfig.from_dict(config.to_dict()) == config == copy.deepcopy(config)
    assert ours.KernlibConfig(["a"]) != config and dict(config) == config.to_dict()
    assert json.loads(config.to_json_string()) == config.to_dict()
    other, rest = ours.KernlibConfig.from_dict(config.to_dict(), return_unused_kwargs=True, x=3)
    assert other == config and rest == {"x": 3}
    with pytest.raises(ValueError, match="has quant_method 'gptq', which must be 'kernlib'"):
        ours.KernlibConfig([], quant_method="gptq")
    with pytest.raises(TypeError):
        ours.KernlibConfig()


# Registration.

LOADS = """
import sys
{imports}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
import torch
print(type(model.lm_head).__name__, model(torch.arange(3, 11)[None]).logits.double().sum().item())
"""
IMPORTS = {
    "kernlib first": "import kernlib\nassert 'transformers' not in sys.modules\n"
    "assert 'torch' not in sys.modules\nimport transformers",
    "transformers first": "import transformers, transformers.quantizers.auto, kernlib",
    "between": "import transformers, kernlib",
    "twice": "import kernlib, importlib, transformers\nimportlib.reload(kernlib)\n"
    "importlib.reload(kernlib.hooks)",
    "by its own name": "import kernlib.compat.transformers, transformers",
    "anew": "import kernlib\n"
    "for name in [n for n in sys.modules if n.startswith('kernlib')]: del sys.modules[name]\n"
    "import kernlib, transformers",
    "threads": "import threading, kernlib, importlib\n"
    "names = ['transformers.quantizers.auto', 'kernlib.compat.transformers'] * 3\n"
    "threads = [threading.Thread(target=importlib.import_module, args=(n,)) for n in names]\n"
    "[t.start() for t in threads], [t.join() for t in threads]\nimport transformers",
    "asked for": "import kernlib, importlib.util\n"
    "importlib.util.find_spec('transformers.quantizers.auto')\nimport transformers",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("order", IMPORTS)
def test_importing_kernlib_suffices(saved, order):
    model, folder = saved
    kind, total = run(LOADS.format(imports=IMPORTS[order]), folder).split()
    assert kind == "SparseLinear" and float(total) == pytest.approx(
        logits(model).double().sum().item(), rel=1e-4, abs=1e-4
    )


def test_two_processes_load_one_folder(saved):
    _, folder = saved
    program = LOADS.format(imports="import kernlib, transformers")
    command = [sys.executable, "-c", program, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    first, second = [process.communicate()[0] for process in both]
    assert first == second and first.startswith("SparseLinear")


def test_the_finder_goes_and_the_module_keeps_its_loader():
    program = """
import sys, kernlib
waiting = [f for f in sys.meta_path if type(f).__module__ == "kernlib.hooks"]
import transformers.quantizers.auto as auto
print(len(waiting), waiting[0] in sys.meta_path)
print(type(auto.__loader__).__name__, type(auto.__spec__.loader).__name__)
"""
    assert run(program).split() == ["1", "False", "SourceFileLoader", "SourceFileLoader"]


@pytest.mark.parametrize("missing", ["transformers", "transformers.quantizers"])
def test_without_transformers_it_says_what_to_install(missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
import kernlib, torch
from kernlib.compat import transformers as ours
layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
kernlib.nn.sparsify(layer, density=0.5)
for call in (ours.register, lambda: ours.attach(layer), lambda: ours.KernlibConfig(["a"])):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    lines = run(program).splitlines()
    assert len(lines) == 3 and all("pip install 'transformers>=" in line for line in lines)


def test_registering_again_changes_nothing():
    auto = transformers.quantizers.auto
    kl.compat.transformers.register()
    assert auto.AUTO_QUANTIZER_MAPPING["kernlib"] is ours.KernlibQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["kernlib"] is ours.KernlibConfig

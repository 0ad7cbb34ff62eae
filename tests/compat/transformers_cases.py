"""Small models of transformers with compressed layers, saved and loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kernlib.nn import SparseLinear, sparsify
from kernlib.nn.sparse_holding import PACKED
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
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


def save_llama(tmp_path_factory) -> tuple:
    """A saved llama: the model, and its folder."""
    folder = tmp_path_factory.mktemp("first")
    model = sparse()
    model.save_pretrained(folder)
    return model, folder


def copied(first: tuple, tmp_path) -> tuple:
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

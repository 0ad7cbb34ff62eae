#!/usr/bin/env bash
# transformers 5.24.0 (4.57.6 alike; torch 2.13.0, CPU): model.save_pretrained(folder, state_dict=s)
# writes s, unless the model was loaded with a quantization_config. Then s is dropped without a word
# and the weights that the model has at present are written, for every quantizer: all but two
# inherit a method that returns None in place of s, and torchao's and mxfp4's return the model's
# state. A model whose Linear layers are BitNet's, which need no further package, and the same model
# without a quantizer, both saved with a state of zeros:
#
#     no quantizer: largest weight saved 0.0
#     BitNetHfQuantizer: largest weight saved 1.0
#
# What does: load the state into the model before saving it, or write it with save_file of
# safetensors beside model.config.save_pretrained. A state that was collected from several
# processes, averaged or pruned is lost otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    safetensors==0.8.0 numpy 2>/dev/null
cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

place = sys.argv[1]
quantization = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
}


def largest(model):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(f"{place}/zeros", state_dict=zeros)
    saved = load_file(f"{place}/zeros/model.safetensors")
    return max(tensor.abs().max().item() for tensor in saved.values())


sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
config = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **sizes)
model = LlamaForCausalLM(config)
print("no quantizer: largest weight saved", largest(model))
model.config.quantization_config = quantization
model.save_pretrained(f"{place}/model")
model = AutoModelForCausalLM.from_pretrained(f"{place}/model")
print(f"{type(model.hf_quantizer).__name__}: largest weight saved", largest(model))
PYTHON
said=$("$folder/venv/bin/python" "$folder/save.py" "$folder" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

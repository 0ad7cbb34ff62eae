#!/usr/bin/env bash
# transformers 5.24.0 with compressed-tensors 0.20.1 (torch 2.13.0, CPU): a pruned model that was
# saved in the format "sparse-bitmask", as published sparse language models are, loads without an
# error and with new random weights in every compressed layer. compressed-tensors still has a config
# class for the format, but nothing that reads it; transformers takes no "sparsity_config" any more,
# finds no `weight`, and initialises it. All that tells is a report of MISSING and UNEXPECTED names in
# the log. compressed-tensors 0.12.2, which wrote the file, reads it back bit for bit:
#
#     tensors of a layer: bitmask, compressed, row_offsets, shape
#     read by compressed-tensors 0.12.2: the weights, bit for bit
#     loaded by transformers 5.24.0: no error, zeros in the weights 0.00 of 0.50, logits are others
#
# What does: pass output_loading_info=True and look at missing_keys, or check the density of what was
# loaded; convert such files to dense ones with a version that still reads them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/old"
"$folder/old/bin/pip" install --quiet torch==2.13.0 compressed-tensors==0.12.2 transformers==4.57.6 \
    numpy 2>/dev/null
python3 -m venv "$folder/new"
"$folder/new/bin/pip" install --quiet torch==2.13.0 compressed-tensors==0.20.1 \
    transformers==5.24.0 accelerate==1.15.0 numpy 2>/dev/null
cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig
from transformers import LlamaConfig, LlamaForCausalLM

place = sys.argv[1]
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
with torch.no_grad():
    for name, p in model.named_parameters():
        if "proj" in name:
            p.mul_(torch.rand_like(p) < 0.5)
    torch.save(model(torch.arange(5)[None]).logits, f"{place}.logits")
compressor = ModelCompressor(sparsity_config=BitmaskConfig(targets=["Linear"], ignore=["lm_head"]))
state = compressor.compress(model)
names = sorted(name.rpartition(".")[2] for name in state if "q_proj" in name)
print("tensors of a layer:", ", ".join(names))
model.save_pretrained(place, state_dict=state)
compressor.update_config(place)
weights = dict(model.named_parameters())
same = [
    torch.equal(tensors, weights[name])
    for name, tensors in compressor.sparsity_compressor.decompress(place)
]
print("read by compressed-tensors 0.12.2: the weights,", "bit for bit" if len(same) == 12 and all(same) else "others")
PYTHON
cat >"$folder/load.py" <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM

place = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(place)
with torch.no_grad():
    weight, logits = model.model.layers[0].self_attn.q_proj.weight, torch.load(f"{place}.logits")
    zeros, found = (weight == 0).float().mean().item(), model(torch.arange(5)[None]).logits
close = torch.allclose(found, logits, atol=1e-2)
print(f"loaded by transformers 5.24.0: no error, zeros in the weights {zeros:.2f} of 0.50,", end=" ")
print("logits are", "the same" if close else "others")
PYTHON
said=$("$folder/old/bin/python" "$folder/save.py" "$folder/model" 2>/dev/null
    "$folder/new/bin/python" "$folder/load.py" "$folder/model" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

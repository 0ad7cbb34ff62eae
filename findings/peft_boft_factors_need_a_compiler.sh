#!/usr/bin/env bash
# peft 0.21.2, torch 2.13.0 (CPU), transformers 5.24.0: how many butterfly factors a BOFT adapter has
# depends on the machine. Where peft cannot build its CUDA extension (no compiler, or no GPU), a
# config that asks for two factors makes one, with a UserWarning that calls it faster, and the saved
# adapter_config.json still says two. So the same script trains another model, with half of the
# parameters, on another machine, and an adapter of two factors that was trained where the extension
# could be built does not load where it cannot: its file has tensors of another size.
#
#     asked for: 2 factors
#     made: (1, 4, 4, 4), 80 parameters trained
#     saved config says: 2
#     two factors load: RuntimeError, size mismatch
#
# What does: leave boft_n_butterfly_factor at 1 where adapters have to move between machines, and
# look at the first size of boft_R, not at the config.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 \
    numpy 2>/dev/null
cat >"$folder/factors.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import peft
from safetensors.torch import load_file, save_file
from torch import nn

place = Path(sys.argv[1])


def base():
    return nn.Sequential(nn.Linear(16, 16))


config = peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, target_modules=["0"])
print("asked for:", config.boft_n_butterfly_factor, "factors")
model = peft.get_peft_model(base(), config)
trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
blocks = next(p for name, p in trained.items() if "boft_R" in name)
count = sum(p.numel() for p in trained.values())
print(f"made: {tuple(blocks.shape)}, {count} parameters trained")
model.save_pretrained(place)
said = json.loads((place / "adapter_config.json").read_text())
print("saved config says:", said["boft_n_butterfly_factor"])

# The file as another machine writes it.
file = place / "adapter_model.safetensors"
tensors = load_file(file)
name = next(name for name in tensors if "boft_R" in name)
tensors[name] = tensors[name].repeat(2, 1, 1, 1)
save_file(tensors, file, metadata={"format": "pt"})
try:
    peft.PeftModel.from_pretrained(base(), place)
    print("two factors load: yes")
except RuntimeError as error:
    print("two factors load: RuntimeError,", "size mismatch" if "size mismatch" in str(error) else "")
PYTHON
said=$(CUDA_VISIBLE_DEVICES="" "$folder/environment/bin/python" "$folder/factors.py" "$folder/saved" \
    2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

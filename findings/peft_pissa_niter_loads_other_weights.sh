#!/usr/bin/env bash
# peft 0.21.2, torch 2.13.0 (CPU), transformers 5.24.0: an adapter that was trained with
# init_lora_weights="pissa_niter_4", the fast form of PiSSA, and saved with save_pretrained computes
# something else on the same base weights when it is loaded, and something else at each load. PiSSA
# takes its first factors off the base weight. The file holds the trained factors alone; loading
# computes the first ones anew to take them off, by a randomised SVD of other random numbers.
# "pissa", an exact SVD, and "olora" come back bit for bit. An adapter of rank 4 of two layers of 64
# random weights each, trained for 5 steps:
#
#     pissa: loaded equal, loaded again equal
#     olora: loaded equal, loaded again equal
#     pissa_niter_4: loaded off by more than training changed, loaded again other numbers
#     pissa_niter_16: loaded off by more than training changed, loaded again other numbers
#     pissa_niter_4, converted when saved: loaded equal, loaded again equal
#
# What does: save the adapter before training, and hand its folder to save_pretrained after it
# (path_initial_model_for_weight_conversion); or save the base weights too. Weights whose singular
# values fall fast are off by less.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 \
    accelerate==1.15.0 numpy 2>/dev/null
cat >"$folder/pissa.py" <<'PYTHON'
import copy
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model


def try_adapter(name, init, place, convert=False):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    x = torch.randn(5, 64)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], init_lora_weights=init)
    model = get_peft_model(copy.deepcopy(base), config)
    conversion = {}
    if convert:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(f"{place}/{name} first")
        model.peft_config["default"].init_lora_weights = init
        conversion = {"path_initial_model_for_weight_conversion": f"{place}/{name} first"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.001)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        trained, before = model(x), base(x)
        model.save_pretrained(f"{place}/{name}", **conversion)
        first, second = (
            PeftModel.from_pretrained(copy.deepcopy(base), f"{place}/{name}")(x) for _ in range(2)
        )
    off, change = (first - trained).abs().max(), (trained - before).abs().max()
    loaded = "equal" if off < 1e-5 else "off"
    loaded += " by more than training changed" if off > change else ""
    again = "equal" if torch.allclose(first, second, atol=1e-5) else "other numbers"
    print(f"{name}: loaded {loaded}, loaded again {again}")


for init in ("pissa", "olora", "pissa_niter_4", "pissa_niter_16"):
    try_adapter(init, init, sys.argv[1])
try_adapter("pissa_niter_4, converted when saved", "pissa_niter_4", sys.argv[1], convert=True)
PYTHON
said=$("$folder/venv/bin/python" "$folder/pissa.py" "$folder" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

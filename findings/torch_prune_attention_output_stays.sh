#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.nn.utils.prune makes a pruned weight anew in a hook before the layer's
# forward pass. MultiheadAttention never calls its out_proj, it only reads the weight of it, so the
# hook does not run. A pruned out_proj computes for good with the weight that it had when it was
# pruned: load_state_dict reports that all names match and changes nothing of what it computes. In
# training the first step changes nothing either, and the second backward pass fails.
# in_proj_weight, which is the attention's, and layers beside it are right. Checkpoints of pruned
# modules, and whether the output is that of the same module without pruning and with the product as
# its weight:
#
#     Linear: <All keys matched successfully>, equal
#     MultiheadAttention, in_proj_weight: <All keys matched successfully>, equal
#     MultiheadAttention, out_proj: <All keys matched successfully>, other numbers
#     second step: RuntimeError
#
# What does: prune.remove before the model is loaded or run, and keep the mask oneself; or call the
# hooks: for hook in out_proj._forward_pre_hooks.values(): hook(out_proj, None).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/prune.py" <<'PYTHON'
import torch
from torch.nn.utils import prune

torch.manual_seed(0)
x = torch.randn(1, 3, 4)


def run(module):
    with torch.no_grad():
        return module(x) if isinstance(module, torch.nn.Linear) else module(x, x, x)[0]


def compare(name, make, place, weight):
    module, dense = make(), make()
    pruned = module.get_submodule(place)
    prune.l1_unstructured(pruned, weight, 0.5)
    state = {
        key: tensor if key.endswith("_mask") else torch.randn_like(tensor)
        for key, tensor in module.state_dict().items()
    }
    print(f"{name}:", module.load_state_dict(state), end=", ")
    key = f"{place}.{weight}" if place else weight
    state[key] = state.pop(f"{key}_orig") * state.pop(f"{key}_mask")
    dense.load_state_dict(state)
    print("equal" if torch.allclose(run(module), run(dense)) else "other numbers")


attention = lambda: torch.nn.MultiheadAttention(4, 1)
compare("Linear", lambda: torch.nn.Linear(4, 4), "", "weight")
compare("MultiheadAttention, in_proj_weight", attention, "", "in_proj_weight")
compare("MultiheadAttention, out_proj", attention, "out_proj", "weight")

module = attention()
prune.l1_unstructured(module.out_proj, "weight", 0.5)
module(x, x, x)[0].sum().backward()
try:
    module(x, x, x)[0].sum().backward()
except RuntimeError as error:
    print("second step:", type(error).__name__)
PYTHON
said=$("$folder/venv/bin/python" "$folder/prune.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

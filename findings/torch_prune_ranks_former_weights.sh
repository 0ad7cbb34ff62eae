#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.nn.utils.prune keeps a pruned weight as weight_orig and weight_mask, and
# `weight` is a product that is made anew only before a forward pass. A second pruning ranks that
# product. After load_state_dict, or a step of an optimizer, without a forward pass between, it
# ranks the former weights, so it keeps small numbers and prunes large ones of those that the layer
# has, and nothing tells. prune.remove makes the product anew and is right. A layer of the weights 1
# 2 3 4 lost the 1; then a checkpoint with 9 8 0.5 7 and a mask of ones is loaded, and one more is
# pruned, which should be 0.5:
#
#     at once: mask 0 1 1 1
#     after a forward pass: mask 1 1 0 1
#     the weights handed over as importance_scores: mask 1 1 0 1
#     removed at once: weight 9 8 0.5 7
#
# What does: run one forward pass after loading, or pass importance_scores=weight_orig *
# weight_mask. Going back to earlier weights between two prunings is the case where it matters most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/prune.py" <<'PYTHON'
import torch
from torch.nn.utils import prune


def loaded():
    layer = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    prune.l1_unstructured(layer, "weight", 1)
    weight = torch.tensor([[9.0, 8.0, 0.5, 7.0]])
    layer.load_state_dict({"weight_orig": weight, "weight_mask": torch.ones(1, 4)})
    return layer


def numbers(tensor):
    return " ".join(f"{number:g}" for number in tensor.flatten().tolist())


layer = loaded()
prune.l1_unstructured(layer, "weight", 1)
print("at once: mask", numbers(layer.weight_mask))
layer = loaded()
layer(torch.ones(1, 4))
prune.l1_unstructured(layer, "weight", 1)
print("after a forward pass: mask", numbers(layer.weight_mask))
layer = loaded()
prune.l1_unstructured(layer, "weight", 1, importance_scores=layer.weight_orig * layer.weight_mask)
print("the weights handed over as importance_scores: mask", numbers(layer.weight_mask))
layer = loaded()
prune.remove(layer, "weight")
print("removed at once: weight", numbers(layer.weight))
PYTHON
said=$("$folder/venv/bin/python" "$folder/prune.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 (CPU): a step of an optimizer with fused=True between forward and backward makes
# gradients silently wrong, where the same optimizer with foreach=True, or neither, raises.
#
# Autograd saves tensors with the number of writes to them, and refuses a backward pass whose saved
# tensors have been written since. Fused steps of SGD, Adam, AdamW and Adagrad write the parameters
# without counting it, so the new values take the place of the saved ones. Whatever else goes by the
# counter, such as a cache of what was derived of a weight, is misled too. Output seen, of the
# gradient of sum(w * w) at w = (2, 3), whose right value is (4, 6):
#
#     SGD foreach: 1 write, RuntimeError
#     SGD fused: 0 writes, [3.0, 5.0]
#     Adam foreach: 1 write, RuntimeError
#     Adam fused: 0 writes, [3.0, 5.0]
#     Adagrad foreach: 1 write, RuntimeError
#     Adagrad fused: 0 writes, [3.0, 5.0]
#
# What does: step after backward, or call torch.autograd.graph.increment_version(parameters) behind
# a fused step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/steps.py" <<'PYTHON'
import torch


def gradient_behind_a_step(optimizer, **kind):
    w = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    loss = (w * w).sum()
    before = w._version
    w.grad = torch.ones(2)
    optimizer([w], lr=0.5, **kind).step()
    w.grad = None
    writes = w._version - before
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return f"{writes} write, RuntimeError"
    return f"{writes} writes, {w.grad.tolist()}"


for name in ("SGD", "Adam", "Adagrad"):
    for kind in ("foreach", "fused"):
        optimizer = getattr(torch.optim, name)
        print(f"{name} {kind}:", gradient_behind_a_step(optimizer, **{kind: True}))
PYTHON
said=$("$folder/environment/bin/python" "$folder/steps.py")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 (CPU): of two layers that share one weight, as an embedding and the head of a
# language model do, torch.nn.utils.prune prunes one. The other goes on with all of the weight,
# through pruning, training and saving. Then prune.remove, which is to make permanent what is there,
# writes the zeros into the shared memory: the other layer is pruned too, and the model computes
# something else than before. Zeros among the 12 numbers of an embedding and of a head that share
# them, of which half is pruned in the head:
#
#     pruned: head 6, embedding 0, shared True
#     removed: head 6, embedding 6, shared True
#     output of the model: changed by remove
#
# What does: untie the two first (head.weight = Parameter(head.weight.detach().clone())), or prune
# both by one mask (prune.custom_from_mask) from the start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/prune.py" <<'PYTHON'
import torch
from torch.nn.utils import prune

torch.manual_seed(0)
embedding = torch.nn.Embedding(4, 3)
head = torch.nn.Linear(3, 4, bias=False)
head.weight = embedding.weight


def zeros(weight):
    return (weight == 0).sum().item()


prune.l1_unstructured(head, "weight", 0.5)
shared = head.weight_orig is embedding.weight
print(f"pruned: head {zeros(head.weight)}, embedding {zeros(embedding.weight)}, shared {shared}")
before = head(embedding(torch.arange(4))).detach()
prune.remove(head, "weight")
shared = head.weight is embedding.weight
print(f"removed: head {zeros(head.weight)}, embedding {zeros(embedding.weight)}, shared {shared}")
after = head(embedding(torch.arange(4)))
print("output of the model:", "the same" if torch.equal(before, after) else "changed by remove")
PYTHON
said=$("$folder/venv/bin/python" "$folder/prune.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.matmul of a matrix and a batch of matrices takes another way where the
# matrix requires a gradient: it folds the batch into one product, else it multiplies batch by batch.
# The flag alone decides, so it is so under no_grad and inference_mode too, where nothing is recorded.
# A weight that is a Parameter and its detached copy therefore give results whose bits differ, on the
# same input: exported weights, an EMA's copies, .data and requires_grad_(False) all change a little
# what a frozen model computes. Operators seen, and whether the results are equal:
#
#     plain: bmm
#     requires a gradient: mm, equal: False
#     the same under no_grad: mm, equal: False
#     the same under inference_mode: equal: False
#     frozen again: bmm, equal: True
#
# What does: compare models by a tolerance, or with weights of the same flag.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/fold.py" <<'PYTHON'
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Notes the products of matrices that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


torch.manual_seed(0)
weight = torch.randn(10, 10, dtype=torch.float64)
batch = torch.randn(100, 10, 100, dtype=torch.float64)


def multiplied(matrix, context=nullcontext):
    with context(), Products() as products:
        y = matrix @ batch
    return y.detach(), " ".join(products.names)


plain, names = multiplied(weight)
print(f"plain: {names}")
trained = torch.nn.Parameter(weight.clone())
for what, context in (
    ("requires a gradient", nullcontext),
    ("the same under no_grad", torch.no_grad),
    ("the same under inference_mode", torch.inference_mode),
):
    y, names = multiplied(trained, context)
    assert torch.allclose(y, plain)
    seen = f"{names}, " if names else ""  # inference mode hands over matmul as a whole
    print(f"{what}: {seen}equal: {torch.equal(y, plain)}")
y, names = multiplied(trained.requires_grad_(False))
print(f"frozen again: {names}, equal: {torch.equal(y, plain)}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/fold.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

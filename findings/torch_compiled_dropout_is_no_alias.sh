#!/usr/bin/env bash
# torch 2.13.0 (CPU): dropout that drops nothing (eval, or p=0) returns its input, the same tensor,
# so an operator in place behind it writes the input. In a compiled function dropout is a copy, and
# the input stays as it is: eager and compiled code return other numbers, and leave other numbers
# behind. An exported program does as eager code, until run_decompositions, which makes it as the
# compiled. Other dropouts (alpha_dropout, dropout2d) and Identity are alike in all. For y =
# dropout(x); y += 1; return x + y with x = 0, what is returned and x behind it:
#
#     eager, training=False: returns 2, x is 1
#     compiled, training=False: returns 1, x is 0
#     exported, training=False: returns 2, x is 1
#     exported and decomposed, training=False: returns 1, x is 0
#     eager, p=0: returns 2, x is 1
#     compiled, p=0: returns 1, x is 0
#     eager, alpha_dropout: returns 2, x is 1
#     compiled, alpha_dropout: returns 2, x is 1
#
# In training with p > 0 all copy, so a residual written in place is right there, wrong in eager
# evaluation, and right again in what is compiled. What does: no operator in place behind dropout.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/dropout.py" <<'PYTHON'
import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        y = self.dropout(x)
        y += 1
        return x + y


def evaluation(x):
    return F.dropout(x, 0.5, training=False)


def nothing(x):
    return F.dropout(x, 0.0, training=True)


def alpha(x):
    return F.alpha_dropout(x, 0.5, training=False)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


def exported(model):
    return torch.export.export(model, (torch.zeros(3),)).module()


def decomposed(model):
    return torch.export.export(model, (torch.zeros(3),)).run_decompositions().module()


for name, way, dropout in (
    ("eager, training=False", nn.Identity(), evaluation),
    ("compiled, training=False", compiled, evaluation),
    ("exported, training=False", exported, evaluation),
    ("exported and decomposed, training=False", decomposed, evaluation),
    ("eager, p=0", nn.Identity(), nothing),
    ("compiled, p=0", compiled, nothing),
    ("eager, alpha_dropout", nn.Identity(), alpha),
    ("compiled, alpha_dropout", compiled, alpha),
):
    x = torch.zeros(3)
    result = way(Residual(dropout))(x)
    print(f"{name}: returns {result[0]:g}, x is {x[0]:g}")
PYTHON
said=$("$folder/venv/bin/python" "$folder/dropout.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.export of a module that counts in a buffer. In place, the update is in
# the exported program. As an assignment, self.count = self.count + 1, it is there only for the
# module that is exported itself, and only with strict=False: in a module within it, or with
# strict=True, it is dropped, and nothing raises. strict=True warns of "side effects", of += as
# well, which is right; strict=False says nothing. The program then computes with the values of the
# day of its export for good. Three calls of a module that returns the count, in eager calls 1 2 3:
#
#     the module itself, count = count + 1: strict=False 1 2 3, strict=True 1 1 1
#     the module itself, count += 1: strict=False 1 2 3, strict=True 1 2 3
#     within another, count = count + 1: strict=False 1 1 1, strict=True 1 1 1
#     within another, count += 1: strict=False 1 2 3, strict=True 1 2 3
#     within another, count.copy_(count + 1): strict=False 1 2 3, strict=True 1 2 3
#     warnings of strict=False about it: 0
#
# What does: in-place writes alone (+=, copy_, lerp_). Moving averages, observers of quantization
# and caches of keys are written as assignments, and a test of one call passes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/counts.py" <<'PYTHON'
import warnings

import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Assigned(Counter):
    def forward(self, x):
        self.count = self.count + 1
        return x * self.count


class Added(Counter):
    def forward(self, x):
        self.count += 1
        return x * self.count


class Copied(Counter):
    def forward(self, x):
        self.count.copy_(self.count + 1)
        return x * self.count


def counts(make, strict):
    x = torch.ones(2)
    program = torch.export.export(make(), (x,), strict=strict).module()
    return " ".join(f"{program(x)[0]:g}" for _ in range(3))


loose_warnings = 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    for name, make in (
        ("the module itself, count = count + 1", Assigned),
        ("the module itself, count += 1", Added),
        ("within another, count = count + 1", lambda: nn.Sequential(Assigned())),
        ("within another, count += 1", lambda: nn.Sequential(Added())),
        ("within another, count.copy_(count + 1)", lambda: nn.Sequential(Copied())),
    ):
        loose = counts(make, False)
        about = ("side effects", "buffer", "attribute")
        loose_warnings += sum(any(word in str(w.message) for word in about) for w in caught)
        print(f"{name}: strict=False {loose}, strict=True {counts(make, True)}")
        caught.clear()
print("warnings of strict=False about it:", loose_warnings)
PYTHON
said=$("$folder/venv/bin/python" "$folder/counts.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

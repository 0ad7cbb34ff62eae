#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.export with a size that is dynamic follows the branch of the example,
# and the program refuses sizes for which the module would take another. But not the sizes 1 and 0:
# a branch on size > 1, size == 1 or size > 0 leaves no check, is not told of by Dim either, and the
# program takes such a batch through the branch of the larger ones. Exported with 4 rows, called
# with 3, 1 and 0, what the module and the program return:
#
#     a spread, 0 for one row: module 1 0 0, program 1 nan nan
#     rows != 1: module 2 3 2, program 2 2 2
#     a mean, 7 for no rows: module 2 1 7, program 2 1 nan
#     rows > 2: module 2 3 3, program 2 AssertionError AssertionError
#     rows % 2 == 0: module 3 3 2, program AssertionError AssertionError 2
#     one row, after Dim("rows"): nan
#     one row, after Dim("rows", min=2): nan
#     one row, after Dim("rows", min=3): AssertionError
#
# What does: look at the size before the program is called, or min=3 and another program for fewer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/branches.py" <<'PYTHON'
import torch
from torch import nn
from torch.export import Dim, export


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def spread(x):
    return x.std(0) if x.shape[0] > 1 else x.new_zeros(())


def mean(x):
    return x.mean(0) if x.shape[0] > 0 else x.new_full((), 7)


def call(function, x):
    try:
        return f"{function(x).item():g}"
    except AssertionError:
        return "AssertionError"


for name, function in (
    ("a spread, 0 for one row", spread),
    ("rows != 1", lambda x: x.new_full((), 2) if x.shape[0] != 1 else x.new_full((), 3)),
    ("a mean, 7 for no rows", mean),
    ("rows > 2", lambda x: x.new_full((), 2) if x.shape[0] > 2 else x.new_full((), 3)),
    ("rows % 2 == 0", lambda x: x.new_full((), 2) if x.shape[0] % 2 == 0 else x.new_full((), 3)),
):
    module = Module(function)
    program = export(module, (torch.arange(4.0),), dynamic_shapes=({0: Dim.AUTO},)).module()
    batches = [torch.arange(1.0, rows + 1) for rows in (3, 1, 0)]
    said = [" ".join(call(f, x) for x in batches) for f in (module, program)]
    print(f"{name}: module {said[0]}, program {said[1]}")
for size in ('Dim("rows")', 'Dim("rows", min=2)', 'Dim("rows", min=3)'):
    shapes = ({0: eval(size)},)
    program = export(Module(spread), (torch.arange(4.0),), dynamic_shapes=shapes).module()
    print(f"one row, after {size}: {call(program, torch.ones(1))}")
PYTHON
said=$("$folder/venv/bin/python" "$folder/branches.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.load reads an archive of torch.save also if its entries were compressed
# later by a usual zip tool, under the same names. With mmap=True it takes the compressed bytes for
# the numbers and goes on past them, also with weights_only=True: the same names, shapes and dtypes,
# other values, no error. The state of two Linear layers, as torch.save wrote it and zipped anew with
# zipfile.ZIP_DEFLATED:
#
#     stored, mmap=False: 0.weight equal, 0.bias equal, 1.weight equal, 1.bias equal
#     stored, mmap=True: 0.weight equal, 0.bias equal, 1.weight equal, 1.bias equal
#     deflated, mmap=False: 0.weight equal, 0.bias equal, 1.weight equal, 1.bias equal
#     deflated, mmap=True: 0.weight other, 0.bias other, 1.weight other, 1.bias other
#
# What does: look at compress_type of every entry (zipfile.ZIP_STORED is right) before mapping a
# file that others have packed, or load it without mmap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/deflated.py" <<'PYTHON'
import zipfile

import torch
from torch import nn

torch.manual_seed(0)
state = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).state_dict()
torch.save(state, "stored")
with zipfile.ZipFile("stored") as old, zipfile.ZipFile("deflated", "w", zipfile.ZIP_DEFLATED) as new:
    for name in old.namelist():
        new.writestr(name, old.read(name))
for file in ("stored", "deflated"):
    for mmap in (False, True):
        read = torch.load(file, mmap=mmap, weights_only=True)
        assert all(read[key].shape == value.shape for key, value in state.items())
        same = (f"{key} {'equal' if torch.equal(read[key], state[key]) else 'other'}" for key in state)
        print(f"{file}, mmap={mmap}:", ", ".join(same))
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" deflated.py)
cd "$OLDPWD"
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

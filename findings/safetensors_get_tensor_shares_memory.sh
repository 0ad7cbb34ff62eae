#!/usr/bin/env bash
# safetensors 0.8.0 (torch 2.13.0, CPU): tensors that safe_open(file, "pt").get_tensor(name) returns
# share memory with all others of the same handle. Writing in place into one changes what the next
# get_tensor and get_slice of that handle give. The file stays as it was, and so does what another
# handle gives. With "np" each call gives a copy. A tensor of ones in the file, the first one
# multiplied by 3 in place:
#
#     pt, the next get_tensor of the handle: [3.0, 3.0]
#     pt, the next get_slice of the handle: [3.0, 3.0]
#     pt, get_tensor of another handle: [1.0, 1.0]
#     pt, load_file: [1.0, 1.0]
#     np, the next get_tensor of the handle: [1.0, 1.0]
#     bytes of the file: the same
#
# So code that scales, merges or prunes in place, and reads a tensor once more to compare or for a
# layer that shares it, compares with its own result or does it twice. What does: clone what
# get_tensor returns before writing into it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy 2>/dev/null
cat >"$folder/shares.py" <<'PYTHON'
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

place = sys.argv[1]
save_file({"weight": torch.ones(2)}, place)
before = pathlib.Path(place).read_bytes()
with safe_open(place, "pt") as file, safe_open(place, "pt") as other:
    file.get_tensor("weight").mul_(3)
    print("pt, the next get_tensor of the handle:", file.get_tensor("weight").tolist())
    print("pt, the next get_slice of the handle:", file.get_slice("weight")[:].tolist())
    print("pt, get_tensor of another handle:", other.get_tensor("weight").tolist())
    print("pt, load_file:", load_file(place)["weight"].tolist())
with safe_open(place, "np") as file:
    weight = file.get_tensor("weight")
    weight *= 3
    print("np, the next get_tensor of the handle:", file.get_tensor("weight").tolist())
same = pathlib.Path(place).read_bytes() == before
print("bytes of the file:", "the same" if same else "others")
PYTHON
said=$("$folder/environment/bin/python" "$folder/shares.py" "$folder/file.safetensors" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

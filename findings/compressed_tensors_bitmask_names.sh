#!/usr/bin/env bash
# compressed-tensors 0.8.1 and 0.14.0.1 (0.9.4 like the latter; torch 2.13.0, CPU): two versions
# name the tensors of the format "sparse-bitmask" in two ways, and the format has no version. The
# older one puts ".bitmask" and the others behind the name of the weight, the newer one in place of
# its ".weight". Each reads the file of the other without an error and gives every weight, bit for
# bit, under a name that no model has: one ".weight" too many, or none. What loads them with
# strict=False, or as transformers does, leaves the layers as they were initialised. Who writes, the
# names, and what either reads:
#
#     0.8.1 writes: layer.weight.bitmask
#     0.8.1 reads 0.8.1: layer.weight, equal
#     0.14.0.1 reads 0.8.1: layer.weight.weight, equal
#     0.14.0.1 writes: layer.bitmask
#     0.8.1 reads 0.14.0.1: layer, equal
#     0.14.0.1 reads 0.14.0.1: layer.weight, equal
#
# What does: look at the names in the file; if they have ".weight.bitmask", read it with 0.8.1 or
# cut the surplus ".weight" off, and load with strict=True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
versions="0.8.1 0.14.0.1"
for version in $versions; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet torch==2.13.0 "compressed-tensors==$version" \
        transformers==4.57.6 accelerate==1.15.0 numpy 2>/dev/null
done
cat >"$folder/bitmask.py" <<'PYTHON'
import os
import sys

import torch
from compressed_tensors.compressors import BitmaskCompressor
from compressed_tensors.config import BitmaskConfig
from safetensors.torch import save_file

version, what, place = sys.argv[1:]
compressor = BitmaskCompressor(config=BitmaskConfig())
weight = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
if what == "write":
    targets = {} if version == "0.8.1" else {"compression_targets": ["layer"]}
    tensors = compressor.compress({"layer.weight": weight}, **targets)
    print(f"{version} writes:", next(name for name in tensors if name.endswith("bitmask")))
    os.makedirs(place)
    save_file(tensors, f"{place}/model.safetensors")
else:
    ((name, read),) = compressor.decompress(place)
    same = "equal" if torch.equal(read, weight) else "other numbers"
    print(f"{version} reads {os.path.basename(place)}: {name}, {same}")
PYTHON
mkdir "$folder/files"
said=$(for writer in $versions; do
    "$folder/$writer/bin/python" "$folder/bitmask.py" "$writer" write "$folder/files/$writer"
    for reader in $versions; do
        "$folder/$reader/bin/python" "$folder/bitmask.py" "$reader" read "$folder/files/$writer"
    done
done 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

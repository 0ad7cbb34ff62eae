#!/usr/bin/env bash
# compressed-tensors 0.12.2 and 0.20.1 (torch 2.13.0, CPU): weights of 3, 5 or 6 bits that one
# version saved in the format "pack-quantized" are other numbers in the other version, without an
# error. The older one puts 32 // bits numbers into each 32-bit word and leaves the rest of it empty,
# the newer one packs them without gaps, across words. The name of the format, the names of its
# tensors and the config are the same, and the newer one cuts the surplus words off, so that shapes
# agree too. With 2, 4 and 8 bits both are the same. A weight (8, 64) of random numbers, its scales
# for each row, saved by 0.12.2 and read by 0.20.1:
#
#     2 bits: packed (8, 4), read (8, 64), equal
#     3 bits: packed (8, 7), read (8, 64), other numbers
#     4 bits: packed (8, 8), read (8, 64), equal
#     5 bits: packed (8, 11), read (8, 64), other numbers
#     6 bits: packed (8, 13), read (8, 64), other numbers
#     8 bits: packed (8, 16), read (8, 64), equal
#
# What does: compare the columns of weight_packed with ceil(columns * bits / 32) before reading; a
# file that has more was packed with gaps. Formats of one's own need a version in the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.12.2 0.20.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet torch==2.13.0 "compressed-tensors==$version" \
        numpy 2>/dev/null
done
cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs

torch.manual_seed(0)
saved = {}
for bits in (2, 3, 4, 5, 6, 8):
    numbers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (8, 64))
    scale = torch.full((8, 1), 0.5)
    state = PackedQuantizationCompressor().compress_weight(
        weight=numbers * scale,
        scale=scale,
        quantization_args=QuantizationArgs(num_bits=bits, strategy="channel", symmetric=True),
    )
    saved[bits] = (numbers * scale, state | {"weight_scale": scale})
torch.save(saved, sys.argv[1])
PYTHON
cat >"$folder/load.py" <<'PYTHON'
import sys

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

for bits, (weight, state) in torch.load(sys.argv[1]).items():
    weights = QuantizationArgs(num_bits=bits, strategy="channel", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    read = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    same = "equal" if torch.equal(read.float(), weight) else "other numbers"
    shapes = tuple(state["weight_packed"].shape), tuple(read.shape)
    print(f"{bits} bits: packed {shapes[0]}, read {shapes[1]}, {same}")
PYTHON
"$folder/0.12.2/bin/python" "$folder/save.py" "$folder/saved.pt" 2>/dev/null
said=$("$folder/0.20.1/bin/python" "$folder/load.py" "$folder/saved.pt" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# compressed-tensors 0.14.0.1 (torch 2.13.0, CPU): the format "sparse-24-bitmask" does not look
# whether a matrix is 2:4. It takes the two largest of each four numbers, packs them and says
# nothing of the others, so that a dense matrix, or one of half zeros in other places, is pruned by
# being saved. In float8_e4m3fn it keeps other ones: it compares the bytes as int8, where a negative
# number is the larger the nearer it is to zero. One group of four, packed and unpacked:
#
#     float32: 1 -2 3 -4 becomes 0 0 3 -4
#     float32: -1 -2 -3 -4 becomes 0 0 -3 -4
#     bfloat16: 1 -2 3 -4 becomes 0 0 3 -4
#     float8_e4m3fn: 1 -2 3 -4 becomes 0 -2 3 0
#     float8_e4m3fn: -1 -2 -3 -4 becomes -1 -2 0 0
#     float8_e4m3fn: 0 0 0 -4 becomes 0 0 0 -4
#
# What does: count the numbers that are not zero in each four before packing (weight.view(-1, 4)),
# and prune in a float dtype of 16 bits or more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 compressed-tensors==0.14.0.1 \
    transformers==4.57.6 accelerate==1.15.0 numpy 2>/dev/null
cat >"$folder/pack.py" <<'PYTHON'
import torch
from compressed_tensors.compressors.sparse_compressors import sparse_24_bitmask

for dtype, row in (
    (torch.float32, (1, -2, 3, -4)),
    (torch.float32, (-1, -2, -3, -4)),
    (torch.bfloat16, (1, -2, 3, -4)),
    (torch.float8_e4m3fn, (1, -2, 3, -4)),
    (torch.float8_e4m3fn, (-1, -2, -3, -4)),
    (torch.float8_e4m3fn, (0, 0, 0, -4)),
):
    weight = torch.tensor([row * 2], dtype=torch.float32).to(dtype)
    packed = sparse_24_bitmask.Sparse24BitMaskTensor.from_dense(weight)
    back = packed.decompress().float().int().tolist()[0][:4]
    print(f"{str(dtype)[6:]}:", *row, "becomes", *back)
PYTHON
said=$("$folder/venv/bin/python" "$folder/pack.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

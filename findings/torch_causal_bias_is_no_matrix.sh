#!/usr/bin/env bash
# torch 2.13.0 (CPU): a CausalBias of torch.nn.attention.bias is a float32 tensor whose shape and
# memory are not those of the mask that it stands for. The number of its variant is its first size,
# and its memory is never written. Only torch's scaled_dot_product_attention and repr know the mask.
# All else goes by the memory without a word: arithmetic, numpy(), tolist(), from_dlpack(), and any
# extension that reads data_ptr(). Of what operations return, which is a CausalBias without a
# variant, nothing but the repr fails. Output seen for 2 queries and 5 keys:
#
#     upper left: shape (1, 2, 5), numpy (1, 2, 5), the mask: False
#     lower right: shape (2, 2, 5), numpy (2, 2, 5), the mask: False
#     plus 1: shape (2, 2, 5), its repr: AttributeError
#
# What does: test for torch.nn.attention.bias.CausalBias before a mask is read, and make the mask of
# its variant, seq_len_q and seq_len_kv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/bias.py" <<'PYTHON'
import warnings

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

warnings.simplefilter("ignore")
for name, make, shift in (("upper left", causal_upper_left, 0), ("lower right", causal_lower_right, 3)):
    bias = make(2, 5)
    mask = np.where(np.tri(2, 5, shift, dtype=bool), 0.0, -np.inf)
    values = bias.numpy()
    same = values.shape == mask.shape and np.array_equal(values, mask)
    print(f"{name}: shape {tuple(bias.shape)}, numpy {values.shape}, the mask: {same}")
plus = bias + 1
try:
    said = repr(plus)
except AttributeError:
    said = "AttributeError"
print(f"plus 1: shape {tuple(plus.shape)}, its repr: {said}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/bias.py")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

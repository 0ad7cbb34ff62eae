#!/usr/bin/env bash
# gguf 0.19.0, numpy 2.4.6: Q8_0, the format of 8 bits that is taken where weights must hardly
# change, keeps small ones worse than the formats of 4 and 5 bits do. Each block of 32 has a float16
# scale, max(|w|) / 127 in Q8_0 and max(|w|) / 8 in Q4_0, so the scale of Q8_0 runs out of float16
# 16 times earlier: where the largest weight is below 0.008 it is subnormal and has fewer digits, by
# which all of the block is wrong, and below 4e-6 it is 0, and with it the block. Nothing is raised.
# Relative error of normal random numbers of this size, after quants.quantize and quants.dequantize:
#
#     size 1e-02: Q8_0 0.005, Q5_0 0.043, Q4_0 0.086, MXFP4 0.11
#     size 1e-05: Q8_0 0.094, Q5_0 0.044, Q4_0 0.086, MXFP4 0.12
#     size 1e-06: Q8_0 1, Q5_0 0.12, Q4_0 0.11, MXFP4 0.11
#
# What does: keep tensors whose largest weights are below 1e-3 as F32 or BF16 (F16 loses them as
# well), or multiply them by a power of two that goes into another tensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 numpy==2.4.6 2>/dev/null
cat >"$folder/quantize.py" <<'PYTHON'
import numpy as np
from gguf import GGMLQuantizationType, quants

weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
for size in (1e-2, 1e-5, 1e-6):
    small = weights * np.float32(size)
    said = []
    for name in ("Q8_0", "Q5_0", "Q4_0", "MXFP4"):
        kind = GGMLQuantizationType[name]
        read = quants.dequantize(quants.quantize(small, kind), kind)
        error = np.linalg.norm(read - small) / np.linalg.norm(small)
        said.append(f"{name} {error:.{2 if error > 0.01 else 1}g}")
    print(f"size {size:.0e}:", ", ".join(said))
PYTHON
said=$("$folder/venv/bin/python" "$folder/quantize.py")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

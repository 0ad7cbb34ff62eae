#!/usr/bin/env bash
# onnx 1.18.0 and 1.19.1 (1.17.0 like the former, 1.23.2 like the latter): helper.make_tensor of
# INT4 and UINT4 takes whole numbers beyond the range in both. The older one writes the nearest
# number of the range, the newer one drops the upper bits, so that 8 becomes -8. No error, no
# warning. A symmetric quantizer that divides by max(|w|) / 8 makes just this 8, of its largest
# weight. INT8 raises in the newer one, and so do INT4 numbers that are not whole:
#
#     onnx 1.18.0: INT4 of 7 8 9 -8 -9 is 7 7 7 -8 -8
#     onnx 1.18.0: UINT4 of 15 16 -1 is 15 15 0
#     onnx 1.18.0: INT8 of 127 128 is 127 -128
#     onnx 1.19.1: INT4 of 7 8 9 -8 -9 is 7 -8 -7 -8 7
#     onnx 1.19.1: UINT4 of 15 16 -1 is 15 0 15
#     onnx 1.19.1: INT8 of 127 128 is OverflowError
#
# What does: clip the numbers to -8 .. 7 (numpy.clip) before make_tensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 1.18.0 1.19.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "onnx==$version" numpy==2.3.5 \
        ml_dtypes==0.5.4 2>/dev/null
done
cat >"$folder/make.py" <<'PYTHON'
import onnx
from onnx import TensorProto, helper, numpy_helper

for name, numbers in (
    ("INT4", [7, 8, 9, -8, -9]),
    ("UINT4", [15, 16, -1]),
    ("INT8", [127, 128]),
):
    print(f"onnx {onnx.__version__}: {name} of", *numbers, end=" is ")
    try:
        tensor = helper.make_tensor("w", getattr(TensorProto, name), [len(numbers)], numbers)
        print(*numpy_helper.to_array(tensor).astype(int).tolist())
    except OverflowError as error:
        print(type(error).__name__)
PYTHON
said=$(for version in 1.18.0 1.19.1; do
    "$folder/$version/bin/python" -W ignore "$folder/make.py"
done)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# sparse 0.19.3 (PyData; numpy 2.4.6, scipy 1.17.1, numba 0.68.1): sums of small integers depend on
# how many elements are summed over, not on their values. sum, mean, var, std and prod of an int8
# COO array raise OverflowError as soon as the axis is longer than 127 (255 for uint8, 32767 for
# int16), because the number of places that are not stored is multiplied into the fill value, in the
# type of the data. Below that they are right, and wider than int8 as in numpy. max, min, any and
# all work. Output seen for one stored 1 in a row of zeros:
#
#     int8, 127 columns: sum 1 of int64, mean as numpy: True
#     int8, 128 columns: sum OverflowError, mean OverflowError
#     uint8, 255 columns: sum 1 of uint64, mean as numpy: True
#     uint8, 256 columns: sum OverflowError, mean OverflowError
#     int8, 128 columns, dtype=int64: sum OverflowError
#     int8, 128 columns, astype(int64): sum 1
#     bool, 1000 columns: sum 1 of int64, mean as numpy: True
#
# So a table of counts or of quantised weights passes tests on small shapes and fails on real ones;
# the message, "Python integer 128 out of bounds for int8", names the length and no value of the
# data. dtype= comes too late. What does: astype(int64) before the sum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet sparse==0.19.3 numpy==2.4.6 scipy==1.17.1 \
    numba==0.68.1 2>/dev/null
cat >"$folder/sums.py" <<'PYTHON'
import numpy as np
import sparse


def row(dtype, columns):
    dense = np.zeros((1, columns), dtype)
    dense[0, 3] = 1
    return dense, sparse.COO.from_numpy(dense)


def attempt(call):
    try:
        return call().todense()[0]
    except OverflowError:
        return "OverflowError"


for dtype, columns in (("int8", 127), ("int8", 128), ("uint8", 255), ("uint8", 256)):
    dense, array = row(dtype, columns)
    total, mean = attempt(lambda: array.sum(axis=1)), attempt(lambda: array.mean(axis=1))
    if isinstance(total, str):
        print(f"{dtype}, {columns} columns: sum {total}, mean {mean}")
    else:
        same = bool(mean == dense.mean(axis=1)[0])
        print(f"{dtype}, {columns} columns: sum {total} of {total.dtype}, mean as numpy: {same}")
dense, array = row("int8", 128)
print("int8, 128 columns, dtype=int64: sum", attempt(lambda: array.sum(axis=1, dtype=np.int64)))
print("int8, 128 columns, astype(int64): sum", attempt(lambda: array.astype(np.int64).sum(axis=1)))
dense, array = row("bool", 1000)
total, same = array.sum(axis=1).todense()[0], np.isclose(array.mean(axis=1).todense()[0], 0.001)
print(f"bool, 1000 columns: sum {total} of {total.dtype}, mean as numpy: {bool(same)}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/sums.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

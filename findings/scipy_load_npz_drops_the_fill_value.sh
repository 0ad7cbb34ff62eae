#!/usr/bin/env bash
# scipy 1.17.1 and sparse 0.19.3 (PyData), numpy 2.4.6: scipy.sparse.load_npz reads a file that
# sparse.save_npz wrote of a COO array, and drops its fill value, which is an entry of the file that
# load_npz does not look at. Where an array stores what differs from 1, or from -inf, all other
# places read as 0. Nothing is raised. The GCXS format is refused, and so is a file of scipy by
# sparse.load_npz. The array [[2, 1], [1, 3]], and the same less 1, stored by what is not the fill
# value:
#
#     fill value 0: entries coords data fill_value format shape, scipy reads [[1, 0], [0, 2]]
#     fill value 1: entries coords data fill_value format shape, scipy reads [[2, 0], [0, 3]]
#     fill value 1, by sparse: [[2, 1], [1, 3]]
#     fill value 1, GCXS: scipy ValueError
#     file of scipy, by sparse: TypeError
#
# What does: look at numpy.load(file)["fill_value"] first, or save array.to_scipy_sparse() by scipy,
# which raises for a fill value other than 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scipy==1.17.1 sparse==0.19.3 numpy==2.4.6 2>/dev/null
cat >"$folder/read.py" <<'PYTHON'
import sys

import numpy as np
import scipy.sparse
import sparse

path = f"{sys.argv[1]}/array.npz"
array = np.array([[2.0, 1.0], [1.0, 3.0]])


def integers(numbers):
    return numbers.astype(int).tolist()


for fill in (0, 1):
    stored = sparse.COO.from_numpy(array - 1 + fill, fill_value=float(fill))
    sparse.save_npz(path, stored)
    print(f"fill value {fill}: entries", *sorted(np.load(path)), end=", ")
    print("scipy reads", integers(scipy.sparse.load_npz(path).toarray()))
print("fill value 1, by sparse:", integers(sparse.load_npz(path).todense()))
try:
    stored.to_scipy_sparse()
    print("to_scipy_sparse: no error")
except ValueError:
    pass
sparse.save_npz(path, sparse.GCXS.from_numpy(array, fill_value=1.0))
try:
    print("fill value 1, GCXS: scipy", integers(scipy.sparse.load_npz(path).toarray()))
except ValueError as error:
    print("fill value 1, GCXS: scipy", type(error).__name__)
scipy.sparse.save_npz(path, scipy.sparse.coo_array(array))
try:
    print("file of scipy, by sparse:", integers(sparse.load_npz(path).todense()))
except TypeError as error:
    print("file of scipy, by sparse:", type(error).__name__)
PYTHON
said=$("$folder/venv/bin/python" "$folder/read.py" "$folder")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

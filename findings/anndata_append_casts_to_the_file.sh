#!/usr/bin/env bash
# anndata 0.12.19, h5py 3.16.0, zarr 3.1.6: append of a sparse_dataset, which adds rows to a CSR
# matrix on disk, turns the new rows into the dtype of the file and says nothing. Fractions are cut
# off and stay as stored zeros; in an HDF5 file what is out of the range of the dtype becomes its
# nearest end, in a zarr store it wraps around. In memory anndata.concat and scipy's vstack of the
# same matrices widen the dtype. A file of small counts and one more row of 0.75 300 -1:
#
#     h5 uint8: 0 255 0, 3 stored
#     h5 int32: 0 300 -1, 3 stored
#     h5 float32: 0.75 300 -1, 3 stored
#     zarr uint8: 0 44 255, 3 stored
#     zarr int32: 0 300 -1, 3 stored
#     vstack uint8: 0.75 300 -1, 3 stored
#
# What does: compare the dtype of the file with numpy.result_type of both before appending, and
# write the first part in the dtype that the last part needs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet anndata==0.12.19 h5py==3.16.0 zarr==3.1.6 numpy==2.4.6 \
    scipy==1.17.1 pandas==2.3.3 2>/dev/null
cat >"$folder/append.py" <<'PYTHON'
import sys

import h5py
import numpy as np
import scipy.sparse
import zarr
from anndata.io import sparse_dataset, write_elem

place = sys.argv[1]
row = scipy.sparse.csr_matrix(np.array([[0.75, 300, -1]]))


def show(name, matrix):
    print(f"{name}:", *(f"{x:g}" for x in matrix.toarray()[-1]), end=", ")
    print(matrix[-1:].nnz, "stored")


for kind, dtype in (
    ("h5", "uint8"),
    ("h5", "int32"),
    ("h5", "float32"),
    ("zarr", "uint8"),
    ("zarr", "int32"),
):
    counts = scipy.sparse.csr_matrix(np.array([[1, 0, 2], [0, 3, 0]], dtype))
    path = f"{place}/{dtype}.{kind}"
    file = h5py.File(path, "w") if kind == "h5" else zarr.open_group(path, mode="w")
    write_elem(file, "X", counts)
    dataset = sparse_dataset(file["X"])
    dataset.append(row)
    show(f"{kind} {dtype}", dataset.to_memory())
    if dtype == "uint8":
        stacked = scipy.sparse.vstack([counts, row]).tocsr()
show("vstack uint8", stacked)
PYTHON
said=$("$folder/venv/bin/python" -W ignore "$folder/append.py" "$folder" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

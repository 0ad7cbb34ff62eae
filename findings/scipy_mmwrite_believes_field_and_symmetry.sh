#!/usr/bin/env bash
# scipy 1.17.1, numpy 2.4.6: the arguments field and symmetry of scipy.io.mmwrite say what is
# written, not what the matrix has to be. Without a word field="real" drops imaginary parts,
# "integer" cuts fractions off, "pattern" drops the values of a sparse matrix and is passed over for
# a dense one, and "unsigned-integer" wraps negative numbers. symmetry= keeps one triangle of any
# matrix; "skew-symmetric" drops the diagonal of a dense matrix and writes that of a sparse one,
# which the format forbids. What mmread gives of a matrix of one number, and of a 2 x 2 one:
#
#     complex as real: dense 1, sparse 1
#     2.75 as integer: dense 2, sparse 2
#     2.75 as pattern: dense 2.75, sparse 1
#     -1 as unsigned-integer: dense 18446744073709551615, sparse 18446744073709551615
#     1 2 / 3 4 as symmetric: dense 1 3 3 4, sparse 1 3 3 4
#     1 2 / 3 4 as hermitian: dense 1 3 3 4, sparse 1 3 3 4
#     1 2 / 3 4 as skew-symmetric: dense 0 -3 3 0, sparse 1 -3 3 4
#
# What does: leave field and symmetry out, then both are read off the matrix (symmetry below 100
# rows alone), or compare the matrix with its transpose before naming one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scipy==1.17.1 numpy==2.4.6 2>/dev/null
cat >"$folder/write.py" <<'PYTHON'
import sys

import numpy as np
import scipy.io
import scipy.sparse

place = sys.argv[1]


def back(matrix, **kind):
    said = []
    for name, written in (("dense", matrix), ("sparse", scipy.sparse.coo_array(matrix))):
        scipy.io.mmwrite(f"{place}/a.mtx", written, **kind)
        read = scipy.io.mmread(f"{place}/a.mtx")
        read = read if name == "dense" else read.toarray()
        said.append(" ".join([name] + [str(x).removesuffix(".0") for x in read.flatten().tolist()]))
    return ", ".join(said)


for name, number, field in (
    ("complex", 1 + 2j, "real"),
    ("2.75", 2.75, "integer"),
    ("2.75", 2.75, "pattern"),
    ("-1", -1, "unsigned-integer"),
):
    print(f"{name} as {field}:", back(np.array([[number]]), field=field, symmetry="general"))
for symmetry in ("symmetric", "hermitian", "skew-symmetric"):
    print(f"1 2 / 3 4 as {symmetry}:", back(np.array([[1.0, 2.0], [3.0, 4.0]]), symmetry=symmetry))
PYTHON
said=$("$folder/venv/bin/python" "$folder/write.py" "$folder")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# torch 2.13.0 and 2.14.1 (CPU, MKL): the product of two CSR matrices has rows whose columns are not
# in order, against torch's own rule for CSR, and elementwise products with it are silently wrong.
# It is right by itself: to_dense(), sums and further products with it are. But `*` looks for places
# that both have, which needs the order, and misses some. to_sparse_coo() of it says that it is
# coalesced, so coalesce() changes nothing and the COO matrix is multiplied as wrongly. Products of
# two COO matrices are in order. The triangles of a graph, sum((A @ A) * A) / 6, which has 168:
#
#     dense: 168
#     COO: 168
#     CSR: other, columns in order: False, sum of the product: right
#     CSR times a dense matrix: other
#     CSR, to_sparse_coo().coalesce(): other
#     CSR, to_sparse_csc().to_sparse_csr(): 168, columns in order: True
#     with check_sparse_tensor_invariants: RuntimeError
#
# What does: convert the product to CSC and back, or multiply COO matrices. Triangle counts, masks
# on powers of an adjacency matrix and A * (B @ C) of any sampled product are of this kind.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/triangles.py" <<'PYTHON'
import warnings

import torch

warnings.simplefilter("ignore")
torch.manual_seed(0)
upper = (torch.rand(50, 50) < 0.2).float().triu(1)
dense = upper + upper.T
csr, coo = dense.to_sparse_csr(), dense.to_sparse()


def triangles(product, other):
    count = (product * other).sum().item() / 6
    return "168" if count == 168 else "other"


def in_order(matrix):
    starts, columns = matrix.crow_indices(), matrix.col_indices()
    return all((columns[i:j].diff() > 0).all() for i, j in zip(starts[:-1], starts[1:]))


product = csr @ csr
by_csc = product.to_sparse_csc().to_sparse_csr()
total = "right" if product.sum() == (dense @ dense).sum() else "other"
print("dense:", triangles(dense @ dense, dense))
print("COO:", triangles(coo @ coo, coo))
print(f"CSR: {triangles(product, csr)}, columns in order: {in_order(product)}, "
      f"sum of the product: {total}")
print("CSR times a dense matrix:", triangles(product, dense))
print("CSR, to_sparse_coo().coalesce():", triangles(product.to_sparse_coo().coalesce(), coo))
print(f"CSR, to_sparse_csc().to_sparse_csr(): {triangles(by_csc, csr)}, "
      f"columns in order: {in_order(by_csc)}")
try:
    with torch.sparse.check_sparse_tensor_invariants():
        torch.sparse_csr_tensor(product.crow_indices(), product.col_indices(), product.values())
except RuntimeError:
    print("with check_sparse_tensor_invariants: RuntimeError")
PYTHON
said=$("$folder/venv/bin/python" "$folder/triangles.py")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

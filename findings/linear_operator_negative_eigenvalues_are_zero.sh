#!/usr/bin/env bash
# linear_operator 0.6.1 (torch 2.13.0, CPU): eigenvalues below zero come out as 0. eigh(),
# eigvalsh() and svd() of an operator, and those of torch.linalg on it, clamp the eigenvalues at 0
# and say nothing, as operators are taken to be positive semi-definite. So all eigenvalues of -K are
# 0, and singular values of such a matrix are lost, not made positive. A DiagLinearOperator keeps
# its signs. cholesky(), solve() and logdet() of the same matrix raise NotPSDError. Output seen for
# diag(-1, 2):
#
#     torch.linalg.eigvalsh of the tensor: [-1.0, 2.0]
#     torch.linalg.eigvalsh of the operator: [0.0, 2.0]
#     V diag(w) V^T of torch.linalg.eigh of it: [[0.0, 0.0], [0.0, 2.0]]
#     singular values of it: [0.0, 2.0]
#     eigenvalues of -1 times the operator of diag(1, 2): [0.0, 0.0]
#     eigenvalues of a difference, diag(1, 2) - 3 I: [0.0, 0.0]
#     eigenvalues of the DiagLinearOperator: [-1.0, 2.0]
#     logdet of the operator: NotPSDError
#
# So a check that a kernel matrix or a Hessian is positive semi-definite by its smallest eigenvalue
# passes always, and a spectral sum is that of another matrix. What does: torch's own functions on
# to_dense().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    linear_operator==0.6.1 2>/dev/null
cat >"$folder/signs.py" <<'PYTHON'
import torch
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator
from linear_operator.utils.errors import NotPSDError

diagonal = torch.tensor([-1.0, 2.0])
operator = DenseLinearOperator(torch.diag(diagonal))
positive = DenseLinearOperator(torch.diag(diagonal.abs()))
eigvalsh = torch.linalg.eigvalsh
print("torch.linalg.eigvalsh of the tensor:", eigvalsh(operator.to_dense()).tolist())
print("torch.linalg.eigvalsh of the operator:", eigvalsh(operator).tolist())
values, vectors = torch.linalg.eigh(operator)
vectors = vectors.to_dense()
print("V diag(w) V^T of torch.linalg.eigh of it:", (vectors * values @ vectors.mT).tolist())
print("singular values of it:", torch.linalg.svd(operator)[1].tolist())
print("eigenvalues of -1 times the operator of diag(1, 2):", eigvalsh(positive * -1.0).tolist())
difference = positive - DenseLinearOperator(3 * torch.eye(2))
print("eigenvalues of a difference, diag(1, 2) - 3 I:", eigvalsh(difference).tolist())
print("eigenvalues of the DiagLinearOperator:", eigvalsh(DiagLinearOperator(diagonal)).tolist())
try:
    print("logdet of the operator:", operator.logdet().item())
except NotPSDError:
    print("logdet of the operator: NotPSDError")
PYTHON
said=$("$folder/environment/bin/python" "$folder/signs.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

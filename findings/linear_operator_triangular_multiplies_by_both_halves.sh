#!/usr/bin/env bash
# linear_operator 0.6.1 (torch 2.13.0, CPU): TriangularLinearOperator of a matrix that has entries
# on both sides of its diagonal keeps all of them, and its methods disagree about what it is.
# solve(), inverse() and logdet() read the triangle alone; to_dense(), @, sums and multiples read
# the whole, and .mT turns the whole. So T @ T.inverse() is not the identity. Nothing is raised.
# Output seen for [[2, 5], [1, 4]] and upper=False, of which the triangle is [[2, 0], [1, 4]]:
#
#     to_dense: [[2.0, 5.0], [1.0, 4.0]]
#     T @ [1, 1]: [7.0, 5.0]
#     solve of [2, 5]: [1.0, 1.0]
#     T @ T.inverse(): [[0.375, 1.25], [0.0, 1.0]]
#     the same of tril: [[1.0, 0.0], [0.0, 1.0]]
#
# So a factor that is packed with something else in its other half (LU in one matrix, or what LAPACK
# leaves there) solves right and multiplies wrong. What does: tril() or triu() before wrapping.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    linear_operator==0.6.1 2>/dev/null
cat >"$folder/triangle.py" <<'PYTHON'
import torch
from linear_operator.operators import TriangularLinearOperator

full = torch.tensor([[2.0, 5.0], [1.0, 4.0]])
operator = TriangularLinearOperator(full, upper=False)
print("to_dense:", operator.to_dense().tolist())
print("T @ [1, 1]:", (operator @ torch.ones(2)).tolist())
print("solve of [2, 5]:", operator.solve(torch.tensor([[2.0], [5.0]])).flatten().tolist())
print("T @ T.inverse():", (operator @ operator.inverse().to_dense()).tolist())
operator = TriangularLinearOperator(full.tril(), upper=False)
print("the same of tril:", (operator @ operator.inverse().to_dense()).tolist())
PYTHON
said=$("$folder/environment/bin/python" "$folder/triangle.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

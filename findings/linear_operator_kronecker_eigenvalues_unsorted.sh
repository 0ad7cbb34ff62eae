#!/usr/bin/env bash
# linear_operator 0.6.1 (torch 2.13.0, CPU): torch.linalg.eigh and eigvalsh promise ascending
# eigenvalues, and of dense, Toeplitz and sum operators they are. Of a Kronecker product the same
# functions give them in the order of the factors (of a DiagLinearOperator in that of the diagonal),
# not sorted; of its to_dense() they are sorted. Only the docstring of the method eigvalsh says so.
# Vectors and values belong together in both. svd is alike: torch's are descending. Output seen for
# the Kronecker product of diag(1, 5) and diag(1, 10):
#
#     eigvalsh of the operator: [1.0, 10.0, 5.0, 50.0]
#     eigvalsh of its to_dense(): [1.0, 5.0, 10.0, 50.0]
#     eigh of the operator: [1.0, 10.0, 5.0, 50.0]
#     eigvalsh of the operator in a DenseLinearOperator: [1.0, 5.0, 10.0, 50.0]
#     singular values of the operator: [1.0, 10.0, 5.0, 50.0]
#     singular values of its to_dense(): [50.0, 10.0, 5.0, 1.0]
#
# So values[-k:] and vectors[..., -k:], the usual way to the leading components, are others once the
# operator has structure. (Of factors that are sorted and not negative the last one alone is in its
# place.) What does: sort the values, and take the columns of the vectors in that order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    linear_operator==0.6.1 2>/dev/null
cat >"$folder/order.py" <<'PYTHON'
import torch
from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator

factors = [DenseLinearOperator(torch.diag(torch.tensor([1.0, top]))) for top in (5.0, 10.0)]
operator = KroneckerProductLinearOperator(*factors)
dense = operator.to_dense()


def values(numbers):
    return [round(number, 4) for number in numbers.tolist()]


print("eigvalsh of the operator:", values(torch.linalg.eigvalsh(operator)))
print("eigvalsh of its to_dense():", values(torch.linalg.eigvalsh(dense)))
print("eigh of the operator:", values(torch.linalg.eigh(operator)[0]))
wrapped = torch.linalg.eigvalsh(DenseLinearOperator(dense))
print("eigvalsh of the operator in a DenseLinearOperator:", values(wrapped))
print("singular values of the operator:", values(torch.linalg.svd(operator)[1]))
print("singular values of its to_dense():", values(torch.linalg.svd(dense)[1]))
PYTHON
said=$("$folder/environment/bin/python" "$folder/order.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

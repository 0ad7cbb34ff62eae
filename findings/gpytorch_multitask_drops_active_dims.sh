#!/usr/bin/env bash
# gpytorch 1.15.2 (linear_operator 0.6.1, torch 2.13.0, CPU): MultitaskKernel and LCMKernel call
# forward() of the kernel they are given, and it is the call, not forward(), that picks the columns
# of active_dims. So the active_dims of the kernel inside do nothing, and the columns that were to
# be left out take part. A sum or a product of kernels inside calls its parts and respects theirs;
# ScaleKernel alone hands its kernel's active_dims on to itself, but inside of MultitaskKernel they
# are lost as well. active_dims of the MultitaskKernel itself work. Output seen for two points that
# differ in column 0 only, with active_dims=[1] (1 is right):
#
#     RBFKernel: 1.000
#     ScaleKernel of it: 1.000
#     MultitaskKernel of RBFKernel: 0.000
#     MultitaskKernel of ScaleKernel: 0.000
#     LCMKernel of RBFKernel: 0.000
#     MultitaskKernel of a sum of two: 1.000
#     MultitaskKernel with active_dims of its own: 1.000
#
# So a model of one task that is turned into one of several reads columns it never read, such as
# identifiers or time, and nothing is raised. What does: give active_dims to the outermost kernel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    gpytorch==1.15.2 linear_operator==0.6.1 2>/dev/null
cat >"$folder/tasks.py" <<'PYTHON'
import torch
from gpytorch.kernels import LCMKernel, MultitaskKernel, RBFKernel, ScaleKernel

points = torch.tensor([[0.0, 0.0], [5.0, 0.0]])


def kernel():
    return RBFKernel(active_dims=[1])


kernels = {
    "RBFKernel": kernel(),
    "ScaleKernel of it": ScaleKernel(kernel()),
    "MultitaskKernel of RBFKernel": MultitaskKernel(kernel(), num_tasks=2),
    "MultitaskKernel of ScaleKernel": MultitaskKernel(ScaleKernel(kernel()), num_tasks=2),
    "LCMKernel of RBFKernel": LCMKernel([kernel()], num_tasks=2),
    "MultitaskKernel of a sum of two": MultitaskKernel(kernel() + kernel(), num_tasks=2),
    "MultitaskKernel with active_dims of its own": MultitaskKernel(
        RBFKernel(), num_tasks=2, active_dims=[1]
    ),
}
for name, kernel in kernels.items():
    matrix = kernel(points).to_dense().detach()
    second = len(matrix) // 2  # the row of the second point, in the first task
    print(f"{name}: {matrix[0, second] / matrix[0, 0]:.3f}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/tasks.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

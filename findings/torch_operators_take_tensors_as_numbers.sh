#!/usr/bin/env bash
# torch 2.13.0 (CPU): an operator made with torch.library takes a tensor of one element for a
# `float` or an `int` argument. For a float, the tensor may require a gradient: nothing raises, and
# its gradient is None. For an int, tensor(3.7) becomes 3, where the number 3.7 raises. torch's
# functions refuse such tensors, also through torch.ops, but for linspace and logspace, which take
# them and give no gradient. Under torch.compile the same call raises. A learnable scale is handed
# over, and then its gradient:
#
#     custom operator, float: gradient None
#     custom operator, float of a list: gradient None
#     custom operator, compiled: TorchRuntimeError
#     torch.nn.functional.leaky_relu: TypeError
#     torch.ops.aten.leaky_relu: RuntimeError
#     torch.linspace: gradient None
#     custom operator, int of tensor(3.7): 3
#     custom operator, int of 3.7: RuntimeError
#
# So a bandwidth or a scale that has become an nn.Parameter trains everything but itself. What does:
# refuse tensors for numbers in the function that calls the operator, or take them as Tensor
# arguments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/scales.py" <<'PYTHON'
from collections.abc import Sequence

import torch
from torch import Tensor

given = []


@torch.library.custom_op("demo::scale", mutates_args=())
def scale(x: Tensor, factor: float, factors: Sequence[float], count: int = 1) -> Tensor:
    given.append(count)
    return x * factor * factors[0]


def backward(ctx, grad):
    return grad * ctx.factor, None, None, None


def setup_context(ctx, inputs, output):
    ctx.factor = inputs[1] * inputs[2][0]


scale.register_fake(lambda x, factor, factors, count=1: torch.empty_like(x))
scale.register_autograd(backward, setup_context=setup_context)
compiled = torch.compile(scale, backend="eager")
one = [1.0]
x = torch.ones(3, requires_grad=True)
for name, function in (
    ("custom operator, float", lambda x, factor: scale(x, factor, one)),
    ("custom operator, float of a list", lambda x, factor: scale(x, 1.0, [factor])),
    ("custom operator, compiled", lambda x, factor: compiled(x, factor, one)),
    ("torch.nn.functional.leaky_relu", torch.nn.functional.leaky_relu),
    ("torch.ops.aten.leaky_relu", torch.ops.aten.leaky_relu),
    ("torch.linspace", lambda x, factor: x * torch.linspace(0, factor, 3)),
):
    factor = torch.nn.Parameter(torch.tensor(2.0))
    try:
        function(x, factor).sum().backward()
        print(f"{name}: gradient {factor.grad}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
scale(x, 1.0, one, count=torch.tensor(3.7))
print("custom operator, int of tensor(3.7):", given[-1])
try:
    scale(x, 1.0, one, count=3.7)
except RuntimeError:
    print("custom operator, int of 3.7: RuntimeError")
PYTHON
said=$("$folder/venv/bin/python" "$folder/scales.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

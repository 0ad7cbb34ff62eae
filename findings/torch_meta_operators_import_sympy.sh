#!/usr/bin/env bash
# torch 2.13.0: operators on tensors of "meta", which compute nothing, are not alike in what they
# cost at first. A first `mul_`, `clone` or `new_empty` there imports nothing. A first `a @ a`, `sum`
# or `torch.empty_like` imports sympy with some hundred modules, half a second, and a first `a + a`
# several hundred more, among them torch.distributed's, torch._dynamo's and cProfile: one second and
# more. Those operators have meta kernels in Python, and what registers these is imported with
# the first of them. It happens in the thread that calls, once a process, and never on a CPU or GPU.
#
# Output seen (modules that the first call of a fresh process imports, and whether sympy is there):
#
#     mul_ 0 False
#     clone 0 False
#     new_empty 0 False
#     empty_like 487 True
#     matmul 487 True
#     add 823 True
#
# Why it matters: a library that plans with meta tensors (shapes of a step, memory, kernels to
# compile) in a short process or in the first call pays more for `torch.empty_like(t)` than for the
# work itself. What does: `t.new_empty_strided(t.shape, t.stride())`, and operators in place.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/first.py" <<'PYTHON'
import sys

import torch

CALLS = {
    "mul_": lambda t: t.mul_(2),
    "clone": lambda t: t.clone(),
    "new_empty": lambda t: t.new_empty(5),
    "empty_like": lambda t: torch.empty_like(t),
    "matmul": lambda t: t @ t,
    "add": lambda t: t + t,
}
name = sys.argv[1]
t = torch.empty(4, 4, device="meta")
before = len(sys.modules)
CALLS[name](t)
print(name, len(sys.modules) - before, "sympy" in sys.modules)
PYTHON
cd "$folder"
for name in mul_ clone new_empty; do
    said=$("$folder/environment/bin/python" first.py "$name")
    printf '%s\n' "$said"
    [[ $said == "$name 0 False" ]]
done
for name in empty_like matmul add; do
    said=$("$folder/environment/bin/python" first.py "$name")
    printf '%s\n' "$said"
    read -r _ count has_sympy <<<"$said"
    ((count > 100)) && [[ $has_sympy == True ]]
done

#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.compile(dynamic=True) compiles once for tensors of every size, unless one
# of them is an nn.Parameter. Its sizes are constants of the program, also where it comes as an
# argument of a plain function; and so is each size of another argument that must fit it. Buffers of
# a module do no better. The ninth size is an error with fullgraph=True, and without it the function
# runs as if it had not been compiled, with one line in a log. Of 12 sizes:
#
#     tensors: 1
#     parameters as arguments: 8, then FailOnRecompileLimitHit
#     a module with a buffer: 8, then FailOnRecompileLimitHit
#     a module with a parameter: 8, then FailOnRecompileLimitHit
#     parameters that are detached outside: 1
#     parameters, force_parameter_static_shapes off: 1
#
# So layers that differ in size alone, such as those of a model that has been pruned or decomposed
# layer by layer, take a program each, and one that compiles them one by one stops at the ninth.
# What does: pass detached views, or turn torch._dynamo.config.force_parameter_static_shapes off (and
# force_nn_module_property_static_shapes for modules), which dynamic=True does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/sizes.py" <<'PYTHON'
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter


def product(x, weight):
    return x @ weight


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)

    def forward(self, x):
        return x @ self.weight


def compiles(calls):
    """How many programs 12 calls of other sizes take."""
    torch._dynamo.reset()
    counter = CompileCounter()
    options = {"backend": counter, "dynamic": True, "fullgraph": True}
    try:
        for n in range(3, 15):
            function, values = calls(torch.randn(2 + n, 2 * n), torch.randn(2 * n, 3 * n))
            torch.compile(function, **options)(*values)
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        return f"{counter.frame_count}, then FailOnRecompileLimitHit"
    return str(counter.frame_count)


print("tensors:", compiles(lambda x, w: (product, (x, w))))
print("parameters as arguments:", compiles(lambda x, w: (product, (x, nn.Parameter(w)))))
print("a module with a buffer:", compiles(lambda x, w: (Layer(w), (x,))))
print("a module with a parameter:", compiles(lambda x, w: (Layer(nn.Parameter(w)), (x,))))
detached = compiles(lambda x, w: (product, (x, nn.Parameter(w).detach())))
print("parameters that are detached outside:", detached)
torch._dynamo.config.force_parameter_static_shapes = False
free = compiles(lambda x, w: (product, (x, nn.Parameter(w))))
print("parameters, force_parameter_static_shapes off:", free)
PYTHON
said=$("$folder/environment/bin/python" "$folder/sizes.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

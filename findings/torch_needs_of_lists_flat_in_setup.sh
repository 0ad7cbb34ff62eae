#!/usr/bin/env bash
# torch 2.13.0: in the setup_context of torch.library.register_autograd, ctx.needs_input_grad of an
# operator with a Tensor[] has one entry for each tensor of a list, and two more at its end. In the
# backward of the same call it has one entry for each argument, with a list of bools for a list. So
# what setup_context reads by an argument's place is that of another argument behind a list of two,
# and it saves too much or too little: nothing raises there. Of an operator without lists both have
# one entry an argument.
#
# Here the list has two tensors without a gradient, and x, behind it, requires one. Output seen:
#
#     setup_context [False, False, True, False, False]
#     backward [[False, False], True]
#
# What does: in setup_context count tensors of the lists in `inputs` on the way, as
# kernlib/runtime/schema.py does, or save by what the inputs require themselves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/needs.py" <<'PYTHON'
import torch


@torch.library.custom_op("needs::scaled", mutates_args=())
def scaled(parts: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x * sum(part.sum() for part in parts)


def setup_context(ctx, inputs, output):
    print("setup_context", list(ctx.needs_input_grad))
    ctx.parts = inputs[0]


def backward(ctx, grad):
    print("backward", list(ctx.needs_input_grad))
    return [None for _ in ctx.parts], grad * sum(part.sum() for part in ctx.parts)


scaled.register_autograd(backward, setup_context=setup_context)
scaled([torch.ones(2), torch.ones(3)], torch.ones(4, requires_grad=True)).sum().backward()
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" needs.py)
printf '%s\n' "$said"
grep -qx 'setup_context \[False, False, True, False, False\]' <<<"$said"
grep -qx 'backward \[\[False, False\], True\]' <<<"$said"

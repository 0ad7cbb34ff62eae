#!/usr/bin/env bash
# torch 2.13.0: a tensor's Python attributes reach the backward pass of a compiled function, unless
# the tensor is a view. An operator saves its second argument for its gradient and asks there for an
# attribute that was set on it outside. In eager calls the attribute is there for every tensor. Under
# torch.compile it is there for a tensor of its own and for what `detach()` returns, be that a part
# of another tensor or not; of a slice, `as_strided` or a slice made in no_grad it is gone, as the
# backward pass gets another Python object. Values and version counters are right in all cases.
#
# Output seen (who saved it, the attribute in eager calls, in compiled ones):
#
#     own own own
#     slice slice None
#     slice_detached slice_detached slice_detached
#     as_strided as_strided None
#     slice_in_no_grad slice_in_no_grad None
#
# Why it matters: programs mark tensors (quantization scales, static inputs, a handle of what the
# memory holds) and look the mark up in backward operators. With weights cut out of one buffer that
# works until the model is compiled. What does: mark `view.detach()`, which shares memory and version.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/marks.py" <<'PYTHON'
import torch

seen = []


@torch.library.custom_op("marks::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w.sum()


@torch.library.custom_op("marks::scaled_gradient", mutates_args=())
def scaled_gradient(grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    seen.append(getattr(w, "mark", None))
    return grad * w.sum()


for operator in (scaled, scaled_gradient):
    operator.register_fake(lambda x, w: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (scaled_gradient(grad, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
buffer = torch.ones(8)
tensors = {
    "own": torch.ones(4),
    "slice": buffer[:4],
    "slice_detached": buffer[:4].detach(),
    "as_strided": buffer.as_strided((4,), (1,)),
}
with torch.no_grad():
    tensors["slice_in_no_grad"] = buffer[:4]
for name, w in tensors.items():
    w.mark = name
    seen.clear()
    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for call in (scaled, compiled):
        call(torch.ones(4, requires_grad=True), w).sum().backward()
    print(name, *seen)
PYTHON
said=$(cd "$folder" && "$folder/environment/bin/python" marks.py)
printf '%s\n' "$said"
[[ $said == "own own own
slice slice None
slice_detached slice_detached slice_detached
as_strided as_strided None
slice_in_no_grad slice_in_no_grad None" ]]

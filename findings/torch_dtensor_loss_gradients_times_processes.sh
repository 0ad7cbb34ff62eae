#!/usr/bin/env bash
# torch 2.13.0 and 2.14.1 (CPU, gloo, 2 processes): losses of DTensors that are sharded by rows,
# with their default reduction "mean". Where the rows divide evenly the loss is right. Its gradient
# is not: that of mse_loss, smooth_l1_loss, huber_loss and binary_cross_entropy is as many times too
# large as there are processes. Where the rows do not divide evenly the loss is wrong too, and so is
# that of binary_cross_entropy_with_logits. Nothing raises. l1_loss and the formula with mean() are
# right in all cases. With 4 and with 3 rows, loss and gradient, each over the right one:
#
#     mse_loss: 4 rows 1.000 and 2.000, 3 rows 0.962 and 2.000
#     smooth_l1_loss: 4 rows 1.000 and 2.000, 3 rows 0.962 and 2.000
#     huber_loss: 4 rows 1.000 and 2.000, 3 rows 0.962 and 2.000
#     binary_cross_entropy: 4 rows 1.000 and 2.000, 3 rows 0.959 and 2.000
#     binary_cross_entropy_with_logits: 4 rows 1.000 and 1.000, 3 rows 1.013 and 1.000
#     l1_loss: 4 rows 1.000 and 1.000, 3 rows 1.000 and 1.000
#     (input - target).square().mean(): 4 rows 1.000 and 1.000, 3 rows 1.000 and 1.000
#
# What does: the formula with mean(), or reduction="sum" divided by numel(). Adam, which divides the
# scale out, hides it; clipping, weight decay, SGD and sums with another loss do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/losses.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing import spawn

LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "l1_loss": F.l1_loss,
    "(input - target).square().mean()": lambda input, target: (input - target).square().mean(),
}
INPUT = torch.tensor([[0.2, 0.9], [0.4, 0.7], [0.6, 0.3], [0.8, 0.1]])
TARGET = torch.tensor([[0.5, 0.25], [0.75, 0.5], [0.125, 0.5], [0.5, 0.625]])


def loss_and_gradient(loss, input, target):
    result = loss(input.requires_grad_(), target)
    result.backward()
    return [getattr(t, "full_tensor", lambda t=t: t)() for t in (result, input.grad)]


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, loss in LOSSES.items():
        said = []
        for rows in (4, 3):
            plain = [INPUT[:rows].clone(), TARGET[:rows].clone()]
            sharded = [distribute_tensor(t, mesh, [Shard(0)]) for t in plain]
            pairs = zip(loss_and_gradient(loss, *sharded), loss_and_gradient(loss, *plain))
            value, gradient = ((a / b).mean() for a, b in pairs)
            said.append(f"{rows} rows {value:.3f} and {gradient:.3f}")
        if rank == 0:
            print(f"{name}: {', '.join(said)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/venv/bin/python" "$folder/losses.py" "$folder/store" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

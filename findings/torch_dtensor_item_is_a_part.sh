#!/usr/bin/env bash
# torch 2.13.0 (CPU, gloo, 2 processes): a sum over the sharded dimension of a DTensor is a part of
# a sum in each process until somebody asks for it. item(), float(), int() and bool() do not ask:
# they return the part, another in each process, and nothing tells. clone() of the same tensor or
# adding 0 to it sums first, multiplying by 2 does not. Of x = 1 2 3 4, of which each process holds
# two, and of the same with a NaN for the 4, what the two processes read:
#
#     x.sum().item(): 3.0 and 7.0
#     (x.sum() * 2).item(): 6.0 and 14.0
#     (x.sum() + 0).item(): 10.0 and 10.0
#     x.sum().clone().item(): 10.0 and 10.0
#     float(x.mean()): 1.5 and 3.5
#     bool((x > 3).any()): False and True
#     bool(x.isnan().any()): False and False
#     bool(with_nan.isnan().any()): False and True
#     x.sum().full_tensor().item(): 10.0 and 10.0
#
# In torch 2.14.1 any() and all() are of everything, and clone() returns the part as well.
# What does: full_tensor() before each of them. `if loss.isnan().any()` lets one process skip a step
# that the other takes; a best loss or an early stop is decided by each process on its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/parts.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing import spawn

WAYS = (
    "x.sum().item()",
    "(x.sum() * 2).item()",
    "(x.sum() + 0).item()",
    "x.sum().clone().item()",
    "float(x.mean())",
    "bool((x > 3).any())",
    "bool(x.isnan().any())",
    "bool(with_nan.isnan().any())",
    "x.sum().full_tensor().item()",
)


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    x = distribute_tensor(numbers, mesh, [Shard(0)])
    with_nan = distribute_tensor(numbers / (numbers != 4) * (numbers != 4), mesh, [Shard(0)])
    for way in WAYS:
        said = [None, None]
        dist.all_gather_object(said, eval(way, {"x": x, "with_nan": with_nan}))
        if rank == 0:
            print(f"{way}: {said[0]} and {said[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/venv/bin/python" "$folder/parts.py" "$folder/store" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

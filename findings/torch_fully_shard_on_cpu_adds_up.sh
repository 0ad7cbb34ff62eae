#!/usr/bin/env bash
# torch 2.8.0 and 2.13.0 (gloo, 3 processes): fully_shard on CPU tensors averages gradients over the
# processes in 2.13, as it does over NCCL. In 2.8 it adds them up, so that they are as many times too
# large as there are processes, with and without a MixedPrecisionPolicy, and nothing says so.
# DistributedDataParallel averages in both. Of a weight whose gradient is 1 in each process:
#
#     2.8.0 DistributedDataParallel: 1.0
#     2.8.0 fully_shard: 3.0
#     2.8.0 fully_shard, reduced in float32: 3.0
#     2.13.0 DistributedDataParallel: 1.0
#     2.13.0 fully_shard: 1.0
#     2.13.0 fully_shard, reduced in float32: 1.0
#
# What does: torch 2.13; or, for tests on a CPU with 2.8, comparing with what a plain nn.Linear has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/mean.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ways = {
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "fully_shard, reduced in float32": lambda model: fully_shard(
            model, mesh=mesh, mp_policy=policy
        ),
    }
    for name, way in ways.items():
        model = torch.nn.Linear(1, 1, bias=False)
        way(model)(torch.ones(1, 1)).sum().backward()
        grad = model.weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        if rank == 0:
            print(f"{torch.__version__.partition('+')[0]} {name}: {grad.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=3)
PYTHON
said=$(for version in 2.8.0 2.13.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "torch==$version" numpy 2>/dev/null
    "$folder/$version/bin/python" "$folder/mean.py" "$folder/store-$version" 2>/dev/null |
        grep "^$version"
done)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

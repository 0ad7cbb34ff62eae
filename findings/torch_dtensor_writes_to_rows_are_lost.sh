#!/usr/bin/env bash
# torch 2.13.0 and 2.14.1 (CPU, gloo, 2 processes): writing to a part of a DTensor is silently lost
# if the part was cut along the sharded dimension, since the part is a copy then, gathered from the
# processes. Along another dimension the part is a view and the write arrives. So nn.Embedding after
# fully_shard does not zero the row of its padding: reset_parameters(), by which a model that was
# made on "meta" is initialised, leaves random numbers there. What became of it, sharded by rows:
#
#     x[3] += 1: lost
#     x[3].fill_(1): lost
#     x[1:3].fill_(1): lost
#     x.chunk(2)[0].fill_(1): lost
#     x[:, 3] += 1: arrived
#     x[:, 3].fill_(1): arrived
#     x[3] = y[3]: lost
#     x[:, 3] = y[:, 3]: arrived
#     x.diagonal().fill_(1): lost
#     torch.nn.init.ones_(x[3]): lost
#     embedding of a plain tensor: padding row zero: True
#     embedding after fully_shard: padding row zero: False
#     embedding after fully_shard, zeroed through to_local(): padding row zero: True
#
# What does: multiply by a mask of the rows that is a DTensor too, or write to to_local().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/writes.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing import spawn
from torch.nn import Embedding

WRITES = (
    "x[3] += 1",
    "x[3].fill_(1)",
    "x[1:3].fill_(1)",
    "x.chunk(2)[0].fill_(1)",
    "x[:, 3] += 1",
    "x[:, 3].fill_(1)",
    "x[3] = y[3]",
    "x[:, 3] = y[:, 3]",
    "x.diagonal().fill_(1)",
    "torch.nn.init.ones_(x[3])",
)


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def say(*words):
        if rank == 0:
            print(*words, flush=True)

    for write in WRITES:
        x = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
        exec(write, {"x": x, "y": x + 1, "torch": torch})
        say(f"{write}:", "arrived" if x.full_tensor().any() else "lost")
    embedding = Embedding(4, 4, padding_idx=1)
    say("embedding of a plain tensor: padding row zero:", not embedding.weight[1].any().item())
    with torch.device("meta"):
        embedding = Embedding(4, 4, padding_idx=1)
    fully_shard(embedding, mesh=mesh)
    embedding.to_empty(device="cpu")
    embedding.reset_parameters()
    is_zero = not embedding.weight.full_tensor()[1].any().item()
    say("embedding after fully_shard: padding row zero:", is_zero)
    with torch.no_grad():
        if rank == 0:
            embedding.weight.to_local()[1] = 0
    is_zero = not embedding.weight.full_tensor()[1].any().item()
    say("embedding after fully_shard, zeroed through to_local(): padding row zero:", is_zero)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/venv/bin/python" "$folder/writes.py" "$folder/store" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

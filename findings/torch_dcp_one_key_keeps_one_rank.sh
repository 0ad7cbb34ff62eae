#!/usr/bin/env bash
# torch 2.13.0 (CPU, gloo, 2 processes): torch.distributed.checkpoint.save writes a plain tensor that
# several processes have under one key once, from the first of them, whatever the others hold: their
# numbers are lost, and neither save nor load says so. Only where sizes differ, load raises. Of
# x = 1.0 in the first process and 2.0 in the second:
#
#     one key: 1.0 and 1.0
#     a key for each process: 1.0 and 2.0
#     a DTensor in two parts: 1.0 and 2.0
#
# What does: a key with the rank in it for whatever differs between processes, such as the state of a
# solver, a generator or a loader of data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/keys.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.multiprocessing import spawn


def read(name, folder, tensor):
    """What this process reads of what both have written."""
    dcp.save({name: tensor}, checkpoint_id=folder)
    other = {name: torch.zeros_like(tensor)}
    dcp.load(other, checkpoint_id=folder)
    value = other[name]
    return (value.to_local() if isinstance(value, DTensor) else value).item()


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.full((1,), rank + 1.0)
    ways = {
        "one key": ("x", x),
        "a key for each process": (f"x{rank}", x),
        "a DTensor in two parts": ("x", DTensor.from_local(x, mesh, [Shard(0)])),
    }
    for place, (way, (name, tensor)) in enumerate(ways.items()):
        said = [None, None]
        dist.all_gather_object(said, read(name, f"{folder}/{place}", tensor))
        if rank == 0:
            print(f"{way}: {said[0]} and {said[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/venv/bin/python" "$folder/keys.py" "$folder" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

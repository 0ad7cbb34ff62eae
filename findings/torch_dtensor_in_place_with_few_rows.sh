#!/usr/bin/env bash
# torch 2.13.0 (CPU, gloo, 3 processes): a parameter that fully_shard deals out has Shard(0), also
# where it has fewer rows than there are processes. copy_(), mul_() and add_() of such a one with a
# replicated tensor of its shape raise ("in-place operations that require placement changes are not
# supported"), while those of parameters with more rows do what they say, and w * t of the small one
# works too, as a Replicate(). So what writes parameters of a sharded model runs with some numbers of
# processes, and with more of them stops at the bias of its last layer. Of w (n, 4), and t:
#
#     n=1 w * t: (Replicate(),)
#     n=1 w.mul_(t): RuntimeError
#     n=1 w.copy_(t): RuntimeError
#     n=2 w.mul_(t): RuntimeError
#     n=3 w * t: (Shard(dim=0),)
#     n=3 w.mul_(t): (Shard(dim=0),)
#     n=4 w.copy_(t): (Shard(dim=0),)
#     n=1 w.copy_(t, sharded as w): (Shard(dim=0),)
#     n=1 w.mul_(t of shape ()): (Shard(dim=0),)
#
# What does: t.redistribute(placements=w.placements) before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/place.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing import spawn


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    w = {n: distribute_tensor(torch.ones(n, 4), mesh, [Shard(0)]) for n in (1, 2, 3, 4)}
    t = {n: distribute_tensor(torch.full((n, 4), 2.0), mesh, [Replicate()]) for n in w}
    two = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    ways = {
        "n=1 w * t": lambda: w[1] * t[1],
        "n=1 w.mul_(t)": lambda: w[1].mul_(t[1]),
        "n=1 w.copy_(t)": lambda: w[1].copy_(t[1]),
        "n=2 w.mul_(t)": lambda: w[2].mul_(t[2]),
        "n=3 w * t": lambda: w[3] * t[3],
        "n=3 w.mul_(t)": lambda: w[3].mul_(t[3]),
        "n=4 w.copy_(t)": lambda: w[4].copy_(t[4]),
        "n=1 w.copy_(t, sharded as w)": lambda: w[1].copy_(
            t[1].redistribute(placements=w[1].placements)
        ),
        "n=1 w.mul_(t of shape ())": lambda: w[1].mul_(two),
    }
    for name, way in ways.items():
        try:
            said = way().placements
        except RuntimeError as error:
            assert "require placement changes" in str(error)
            said = "RuntimeError"
        if rank == 0:
            print(f"{name}: {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=3)
PYTHON
said=$("$folder/venv/bin/python" "$folder/place.py" "$folder" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

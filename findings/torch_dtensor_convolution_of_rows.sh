#!/usr/bin/env bash
# torch 2.13.0 (CPU, gloo, 2 processes): conv2d and conv1d of a DTensor that is sharded along its
# rows or columns, with a replicated weight. Each process convolves its half as if it were an image,
# without the rows of its neighbour, and the result says Replicate: its shape is that of the image,
# what it holds is a half, and full_tensor() is another half in each process. Sharded by images it is
# right; by channels it raises. A 3 x 3 mean of 6 x 4 pixels, and patches of 3 x 2:
#
#     sharded by images: (Shard(dim=0),), shape (2, 1, 6, 4), full_tensor (2, 1, 6, 4), equal: True
#     sharded by rows: (Replicate(),), shape (2, 1, 6, 4), full_tensor (2, 1, 3, 4), equal: False
#     sharded by columns: (Replicate(),), shape (2, 1, 6, 4), full_tensor (2, 1, 6, 2), equal: False
#     patches, by rows: (Replicate(),), shape (2, 1, 2, 2), full_tensor (2, 1, 1, 2), equal: False
#     patches, by columns: (Replicate(),), shape (2, 1, 2, 2), full_tensor (2, 1, 2, 1), equal: False
#     the local result is that of the half alone: True
#
# In torch 2.14.1 patches by columns are right, and the others as here.
# What does: redistribute to Shard(0) or Replicate before it; for patches that lie in one process,
# DTensor.from_local(result.to_local(), mesh, [Shard(2)]) behind it. A mean over the pixels of the
# result is that of half an image, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/convolution.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing import spawn

IMAGES = torch.arange(48.0).reshape(2, 1, 6, 4)
MEAN = (torch.ones(1, 1, 3, 3) / 9, {"padding": 1})
PATCHES = (torch.ones(1, 1, 3, 2), {"stride": (3, 2)})


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def convolve(dim, weight, options):
        images = distribute_tensor(IMAGES, mesh, [Shard(dim)])
        return F.conv2d(images, distribute_tensor(weight, mesh, [Replicate()]), **options)

    def equals(result, weight, options):
        right = F.conv2d(IMAGES, weight, **options)
        return result.shape == right.shape and torch.allclose(result, right)

    for name, dim, case in (
        ("sharded by images", 0, MEAN),
        ("sharded by rows", 2, MEAN),
        ("sharded by columns", 3, MEAN),
        ("patches, by rows", 2, PATCHES),
        ("patches, by columns", 3, PATCHES),
    ):
        result = convolve(dim, *case)
        full = result.full_tensor()
        shapes = f"shape {tuple(result.shape)}, full_tensor {tuple(full.shape)}"
        if rank == 0:
            print(f"{name}: {result.placements}, {shapes}, equal: {equals(full, *case)}", flush=True)
    half = IMAGES.chunk(2, 2)[rank].contiguous()
    is_half = torch.allclose(convolve(2, *MEAN).to_local(), F.conv2d(half, MEAN[0], **MEAN[1]))
    if rank == 0:
        print("the local result is that of the half alone:", is_half, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/venv/bin/python" "$folder/convolution.py" "$folder/store" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

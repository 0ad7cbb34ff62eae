#!/usr/bin/env bash
# torch 2.13.0 (CPU): AveragedModel(use_buffers=True) averages whole numbers among the buffers too,
# and each of its ways does something else with them. The plain mean and the moving average cut every
# step off: the count of batches of a BatchNorm stays 1 for good, whatever comes. The mean over lists
# of tensors is a RuntimeError, where floats alone would have worked. Which mean is the default
# depends on the device: the plain one on a CPU, that over lists on a GPU. So a script that averages a
# model with BatchNorm runs on a CPU, with a wrong count, and stops on a GPU. The counts are 1, 2 and
# 3; get_swa_avg_fn() and its like in turn:
#
#     swa: 1
#     ema: 1
#     swa of lists: RuntimeError
#     ema of lists: 1
#     swa of lists, the count as float64: 2
#
# What does: keep whole numbers out of buffers that somebody may average, or hold them as floats.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/counts.py" <<'PYTHON'
import torch
from torch import nn
from torch.optim import swa_utils


def average(options, dtype=torch.int64):
    """The average of the counts of batches 1, 2 and 3."""
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked = norm.num_batches_tracked.to(dtype)
    averaged = swa_utils.AveragedModel(norm, use_buffers=True, **options)
    try:
        for _ in range(3):
            norm(torch.randn(8, 4))
            averaged.update_parameters(norm)
    except RuntimeError:
        return "RuntimeError"
    return f"{averaged.module.num_batches_tracked.item():g}"


lists = {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}
print("swa:", average({"avg_fn": swa_utils.get_swa_avg_fn()}))
print("ema:", average({"avg_fn": swa_utils.get_ema_avg_fn(0.9)}))
print("swa of lists:", average(lists))
print("ema of lists:", average({"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}))
print("swa of lists, the count as float64:", average(lists, torch.float64))
PYTHON
said=$("$folder/environment/bin/python" "$folder/counts.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

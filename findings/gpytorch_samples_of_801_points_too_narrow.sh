#!/usr/bin/env bash
# gpytorch 1.15.2 (linear_operator 0.6.1, torch 2.13.0, CPU): MultivariateNormal.rsample draws from
# an exact root of the covariance up to 800 points (settings.max_cholesky_size). Of more points the
# root comes from at most 100 steps of Lanczos (max_root_decomposition_size), so it has rank 100 at
# most, and nothing warns of it. Where the covariance has a higher rank, the samples lack most of
# their variance. Output seen, 400 samples at points of [0, 1], RBF kernel with variance 1:
#
#     lengthscale 0.001, 800 points: 1.0
#     lengthscale 0.001, 801 points: 0.1
#     lengthscale 0.100, 801 points: 1.0
#     lengthscale 0.001, 801 points, max_cholesky_size(801): 1.0
#     lengthscale 0.001, 801 points, variance that is stated: 1.0
#
# So posterior samples (Thompson sampling, simulated data) are right in tests of a few hundred
# points and have a seventh of the variance on the real grid, though .variance says 1. What does:
# draw within settings.max_cholesky_size(n), or raise max_root_decomposition_size to the rank that
# the kernel has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    gpytorch==1.15.2 linear_operator==0.6.1 2>/dev/null
cat >"$folder/samples.py" <<'PYTHON'
import contextlib

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel
from gpytorch.settings import max_cholesky_size


@torch.no_grad()
def normal(count, lengthscale):
    points = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    kernel = RBFKernel().double()
    kernel.lengthscale = lengthscale
    return MultivariateNormal(points[:, 0] * 0, kernel(points))


def say(count, lengthscale, setting=None):
    torch.manual_seed(0)
    with torch.no_grad(), setting or contextlib.nullcontext():
        variance = normal(count, lengthscale).rsample(torch.Size([400])).var().item()
    name = f", max_cholesky_size({count})" if setting else ""
    print(f"lengthscale {lengthscale:.3f}, {count} points{name}: {variance:.1f}")


say(800, 0.001)
say(801, 0.001)
say(801, 0.1)
say(801, 0.001, max_cholesky_size(801))
stated = normal(801, 0.001).variance.mean()
print(f"lengthscale 0.001, 801 points, variance that is stated: {stated:.1f}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/samples.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

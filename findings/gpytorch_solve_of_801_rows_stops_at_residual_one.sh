#!/usr/bin/env bash
# gpytorch 1.15.2 (linear_operator 0.6.1, torch 2.13.0, CPU): above 800 rows (max_cholesky_size) a
# solve goes from Cholesky to conjugate gradients that stop as soon as the relative residual is
# below cg_tolerance, which is 1 by default, after ten steps at least. That is a residual of the
# size of the right-hand side, counts as converged and warns of nothing. log_prob of a
# MultivariateNormal is off as well, and its log-determinant is other in each call (random probes).
# Output seen in float64, y drawn from the model, an RBF kernel of lengthscale 0.05 and noise 0.01;
# y K^-1 y by inv_quad, the right one is near the number of points:
#
#     800 points: residual 0.0, y K^-1 y is 1.00 of the right one, log_prob off by 0
#     801 points: residual above 0.1, y K^-1 y is below 0.2 of the right one, log_prob off by > 10
#     801 points, cg_tolerance(1e-4): residual 0.0, y K^-1 y is 1.00 of the right one
#
# So likelihoods, chi squares and whitened residuals of 801 points are other numbers than those of
# 800, and the model comparison made of them as well. What does: settings.max_cholesky_size(n) up to
# a few thousand rows, else cg_tolerance(1e-4); eval_cg_tolerance is a setting of predictions alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 \
    gpytorch==1.15.2 linear_operator==0.6.1 2>/dev/null
cat >"$folder/solve.py" <<'PYTHON'
import warnings

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DenseLinearOperator
from linear_operator.settings import cg_tolerance

warnings.simplefilter("error")  # nothing warns
torch.set_default_dtype(torch.float64)


def numbers(count):
    torch.manual_seed(1)
    points = torch.linspace(0, 1, count)[:, None]
    matrix = torch.exp(-(((points - points.T) / 0.05) ** 2) / 2) + 0.01 * torch.eye(count)
    y = torch.linalg.cholesky(matrix) @ torch.randn(count)
    operator = DenseLinearOperator(matrix)
    residual = ((matrix @ operator.solve(y[:, None]))[:, 0] - y).norm() / y.norm()
    ratio = operator.inv_quad(y[:, None]) / (y @ torch.linalg.solve(matrix, y))
    right = torch.distributions.MultivariateNormal(0 * y, matrix).log_prob(y)
    off = MultivariateNormal(0 * y, operator).log_prob(y) - right
    return residual.item(), ratio.item(), abs(off.item())


tail = "of the right one"
residual, ratio, off = numbers(800)
ratio = f"{ratio:.2f}"
print(f"800 points: residual {residual:.1f}, y K^-1 y is {ratio} {tail}, log_prob off by {off:.0f}")
residual, ratio, off = numbers(801)
residual = "above 0.1" if residual > 0.1 else residual
ratio = "below 0.2" if ratio < 0.2 else ratio
off = "> 10" if off > 10 else off
print(f"801 points: residual {residual}, y K^-1 y is {ratio} {tail}, log_prob off by {off}")
with warnings.catch_warnings(), cg_tolerance(1e-4):
    warnings.simplefilter("ignore")
    residual, ratio, _ = numbers(801)
print(f"801 points, cg_tolerance(1e-4): residual {residual:.1f}, y K^-1 y is {ratio:.2f} {tail}")
PYTHON
said=$("$folder/environment/bin/python" "$folder/solve.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

#!/usr/bin/env bash
# scikit-learn 1.9.1 (numpy 2.4.6, scipy 1.17.1): KernelDensity(kernel="cosine") is no density in an
# even number of dimensions. The normalisation of cos(pi r / 2) lacks its last term there, so the
# integral of exp(score_samples) is not 1: it is 0.363 in two dimensions. In four the factor is
# negative and its logarithm NaN, and so is every score. In one and three dimensions it is right,
# and so are the other kernels in all of them. Output seen, the integral over the ball of radius 1
# of one point's density of bandwidth 1, by radius:
#
#     cosine: 1.000 in 1 dimension, 0.363 in 2, 1.000 in 3, nan in 4
#     epanechnikov: 1.000 in 1 dimension, 1.000 in 2, 1.000 in 3, 1.000 in 4
#     linear: 1.000 in 1 dimension, 1.000 in 2, 1.000 in 3, 1.000 in 4
#     tophat: 1.000 in 1 dimension, 1.000 in 2, 1.000 in 3, 1.000 in 4
#
# So on maps (two coordinates) the log-likelihood of each point is 1.01 too small, and a search over
# kernels by cross-validation never picks this one. The shape is right. What does: add
# log(pi/(pi-2)) = 1.012 in two dimensions, or take another kernel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet scikit-learn==1.9.1 numpy==2.4.6 \
    scipy==1.17.1 2>/dev/null
cat >"$folder/integral.py" <<'PYTHON'
import math

import numpy as np
from sklearn.neighbors import KernelDensity

radius = (np.arange(20000) + 0.5) / 20000
for name in ("cosine", "epanechnikov", "linear", "tophat"):
    integrals = []
    for dimension in (1, 2, 3, 4):
        points = np.zeros((len(radius), dimension))
        points[:, 0] = radius
        density = KernelDensity(kernel=name, bandwidth=1.0).fit(np.zeros((1, dimension)))
        sphere = 2 * math.pi ** (dimension / 2) / math.gamma(dimension / 2)
        values = np.exp(density.score_samples(points)) * sphere * radius ** (dimension - 1)
        integrals.append(values.mean())
    one, two, three, four = integrals
    print(f"{name}: {one:.3f} in 1 dimension, {two:.3f} in 2, {three:.3f} in 3, {four:.3f} in 4")
PYTHON
said=$("$folder/environment/bin/python" "$folder/integral.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

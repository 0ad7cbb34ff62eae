#!/usr/bin/env bash
# scikit-learn 1.9.1 (numpy 2.4.6, scipy 1.17.1): Matern(nu) for a nu other than 0.5, 1.5, 2.5 and
# inf goes by a formula that overflows for large nu: from about 19.5 on the kernel of a point with
# itself is inf, then NaN, and from 170 on other distances give 0 or NaN. nu = inf is the RBF kernel
# that these should come near. Called with one argument, as fit() does, the kernel gets its diagonal
# set to 1 and looks right; with two, as predict() does, it does not. Only numpy's RuntimeWarning of
# an invalid value tells. Output seen at the distances 0 and 1, and of a process fitted to 5 points:
#
#     nu 18: k(x, y) 1.000 0.594, k(x) 1.000 0.594, mean at a training point 0.250
#     nu 25: k(x, y) nan 0.597, k(x) 1.000 0.597, mean at a training point nan
#     nu 170: k(x, y) nan 0.000, k(x) 1.000 0.000, mean at a training point nan
#     nu inf: k(x, y) 1.000 0.607, k(x) 1.000 0.607, mean at a training point 0.250
#
# So a model with a large nu fits, has a finite likelihood and predicts between its training points,
# and gives NaN at them; a search over nu fails on the training score alone. What does: nu = inf
# above 10 or so, where the two differ by a few per cent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet scikit-learn==1.9.1 numpy==2.4.6 \
    scipy==1.17.1 2>/dev/null
cat >"$folder/matern.py" <<'PYTHON'
import warnings

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

warnings.simplefilter("ignore")
points = np.linspace(0, 1, 5)[:, None]
ends = points[[0, -1]]
for nu in (18, 25, 170, np.inf):
    kernel = Matern(nu=nu)
    process = GaussianProcessRegressor(kernel, optimizer=None, alpha=1e-6)
    mean = process.fit(points, points[:, 0]).predict(points[1:2])[0]
    two, one = kernel(ends[:1], ends)[0], kernel(ends)[0]
    print(
        f"nu {nu}: k(x, y) {two[0]:.3f} {two[1]:.3f}, k(x) {one[0]:.3f} {one[1]:.3f}, "
        f"mean at a training point {mean:.3f}"
    )
PYTHON
said=$("$folder/environment/bin/python" "$folder/matern.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

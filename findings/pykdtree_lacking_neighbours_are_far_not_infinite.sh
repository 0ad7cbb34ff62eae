#!/usr/bin/env bash
# pykdtree 1.4.3 (numpy 2.4.6, scipy 1.17.1): KDTree.query marks a neighbour that there is not in
# two ways. With a finite distance_upper_bound it does as scipy's cKDTree: distance inf, index n,
# the number of points. Without one (more neighbours asked for than there are points, or than the
# mask leaves, or a query that is NaN) the distance is a large finite number and the index
# 4294967295. The number is the root of the largest of the type, so it is other for float32 and with
# sqr_dists. Output seen for 3 points and 4 neighbours, the last one:
#
#     scipy: distance inf, index 3
#     distance_upper_bound=100: distance inf, index 3
#     no bound: distance 1.3e+154, index 4294967295, finite
#     no bound, sqr_dists: distance 1.8e+308, index 4294967295, finite
#     no bound, float32: distance 1.8e+19, index 4294967295, finite
#     bound, two points left by the mask: distance inf, index 3
#     no bound, two points left by the mask: distance 1.3e+154, index 4294967295, finite
#     no bound, query NaN: distance 1.3e+154, index 4294967295, finite
#
# So isfinite() and index == n, the tests that work with scipy and with a bound, let it pass, and a
# mean of the distances is beyond 1e153. Cast to int32 the index is -1, the last point. What does:
# test index < n, or pass a large finite bound.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet pykdtree==1.4.3 numpy==2.4.6 \
    scipy==1.17.1 2>/dev/null
cat >"$folder/neighbours.py" <<'PYTHON'
import numpy as np
from pykdtree.kdtree import KDTree
from scipy.spatial import cKDTree

points, query = np.array([[0.0], [1.0], [3.0]]), np.zeros((1, 1))
small = points.astype(np.float32), query.astype(np.float32)
mask = np.array([False, False, True])


def say(name, distances, indices):
    distance, index = distances[0, -1], int(indices[0, -1])
    finite = ", finite" if np.isfinite(distance) else ""
    print(f"{name}: distance {distance:.1e}, index {index}{finite}")


tree = KDTree(points)
say("scipy", *cKDTree(points).query(query, k=4))
say("distance_upper_bound=100", *tree.query(query, k=4, distance_upper_bound=100))
say("no bound", *tree.query(query, k=4))
say("no bound, sqr_dists", *tree.query(query, k=4, sqr_dists=True))
say("no bound, float32", *KDTree(small[0]).query(small[1], k=4))
bounded = tree.query(query, k=3, mask=mask, distance_upper_bound=100)
say("bound, two points left by the mask", *bounded)
say("no bound, two points left by the mask", *tree.query(query, k=3, mask=mask))
say("no bound, query NaN", *tree.query(query * np.nan, k=4))
PYTHON
said=$("$folder/environment/bin/python" "$folder/neighbours.py" 2>/dev/null)
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")

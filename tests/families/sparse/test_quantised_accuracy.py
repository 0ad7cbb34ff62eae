"""The errors of products with values in fewer bits, which docs/concepts/accuracy.md lists: beside
those of dense matrices in as many bits, on weights of normal and of heavy tails."""

from __future__ import annotations

import pytest
import torch

from kernlib import sparse
from kernlib.families.sparse.formats import quantiser
from kernlib.families.sparse.lowering.quantised import VALUES

ROWS, COLUMNS, VECTORS = 1024, 4096, 8
MARGIN = 1.1
# ||Q(W) x - W x|| / ||W x||: of a matrix pruned to half, and of the whole one in dense groups.
MEASURED = {
    ("normal", "int8"): (0.00505, 0.0085),
    ("normal", "fp8"): (0.0261, 0.0259),
    ("normal", "int4"): (0.0838, 0.1159),
    ("heavy tails", "int8"): (0.0124, 0.0428),
    ("heavy tails", "fp8"): (0.0235, 0.026),
    ("heavy tails", "int4"): (0.182, 0.225),
}


def weights(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """W in float16, and x. Heavy tails are Student's t with 3 degrees of freedom."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(ROWS, COLUMNS, generator=g)
    if kind == "heavy tails":
        w = w / (torch.randn(3, ROWS, COLUMNS, generator=g).square().sum(0) / 3).sqrt()
    return (0.02 * w).half(), torch.randn(COLUMNS, VECTORS, generator=g).double()


def in_dense_groups(w: torch.Tensor, values: str) -> torch.Tensor:
    """Each row with one scale in 8 bits, with one for 128 columns in 4."""
    code = VALUES[values]
    groups = w.float().view(ROWS, -1, COLUMNS if code.bits == 8 else 128)
    scale = quantiser.scales_of(groups.abs().amax(-1), code, w.dtype)[..., None]
    codes = quantiser.codes_of(groups, scale, code)
    return quantiser.values_of(codes, scale, code, w.dtype).view(w.shape)


def error(found: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> float:
    wanted = w.double() @ x
    return ((found.double() @ x - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_errors_are_those_of_the_page(kind):
    w, x = weights(kind)
    pruned = sparse.magnitude(w, 0.5)
    for values in VALUES:
        small, dense = MEASURED[kind, values]
        ours = error(sparse.compress(pruned, values=values).to_dense(), pruned, x)
        assert ours < MARGIN * small
        assert error(in_dense_groups(w, values), w, x) == pytest.approx(dense, rel=0.1)
        # Groups of 256 and 128 columns lose no more than whole rows do.
        assert ours < 1.05 * error(in_dense_groups(pruned, values), pruned, x)

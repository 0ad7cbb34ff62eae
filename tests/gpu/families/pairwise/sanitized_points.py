"""Small odd gradients of many features, by tensor cores and on the lanes, to be run under
compute-sanitizer; with "racecheck" as an argument for that tool."""

from __future__ import annotations

import sys
from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import points as lowering
from tests.gpu.every_lane import let_every_lane_arrive
from tests.gpu.families.pairwise.sanitized_products import points

SHAPES = ((1, 1, 17), (67, 33, 20), (68, 196, 64), (130, 193, 128))


def gradients(descriptor, a: torch.Tensor, b: torch.Tensor, columns: int, **values) -> None:
    """Of two sets of points and of one; b is that of a in part."""
    a, b = (t.detach().requires_grad_() for t in (a, b))
    v = torch.randn(b.shape[0], columns, device="cuda").to(a.dtype).requires_grad_()
    values = {name: torch.tensor(x, device="cuda", requires_grad=True) for name, x in
              values.items()}  # fmt: skip
    for x in (a, b):
        kl.kernel_matmul(descriptor, x, b, v, **values).sum().backward()


# Two stages, as of 128 features, are the fewest: these calls fill no other ring twice.
ARRIVALS = {
    "pairwise/points/points.cuh": (
        ("barrier_arrive_by_warp(&s.empty", "barrier_arrive(&s.empty"),
        ("barrier_init(&s.empty[i], 4 *", "barrier_init(&s.empty[i], 128 *"),
    )
}


def main() -> None:
    torch.manual_seed(0)
    if "racecheck" in sys.argv:
        let_every_lane_arrive(ARRIVALS)
    with mock.patch.object(lowering, "pays", lambda *given: True):
        for shape in SHAPES:
            a, b = points(*shape, torch.float32)
            apart = b + 0.5 * torch.randn_like(b)  # of which few pairs are doubtful
            apart[0] = a[0]
            for second in (b, apart):
                for columns in (1, 3):
                    gradients(kl.gaussian(), a, second, columns, bandwidth=4.0)
                    gradients(kl.gaussian(direct=True), a, second, columns, bandwidth=4.0)
            gradients(kl.matern32(), a, apart * float("nan"), 1, bandwidth=4.0)
            dot = kl.dot_product(epilogue=kl.Custom("tanh(s * v)", ("s",)))
            gradients(dot, a, b, 2, s=0.05)
            kl.kernel_sum(kl.gaussian(), a.requires_grad_(), a, bandwidth=4.0).sum().backward()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

"""A kernel function of your own, compiled into the same kernel as the distance.

    python examples/custom_epilogue.py

``Custom`` takes one expression of ``v``, the value that reaches it, and the names of its
parameters; they become arguments of the call, as numbers or as tensors with one value for each
batch entry.
Runs on the first CUDA GPU, or on the CPU when there is none.
"""

from __future__ import annotations

import torch

import kernlib as kl

BOUND = 1e-5  # relative error, for float32

# A cosine that fades with the distance: v is the Euclidean distance of two points.
FADING_COSINE = kl.Custom("cos(2 * pi * v / period) * exp(-v / reach)", ("period", "reach"))
WAVES = kl.l2_distance(epilogue=(FADING_COSINE, kl.Scale("amplitude")))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(300, 16, device=device)
    y = torch.randn(200, 16, device=device)
    print(WAVES.describe())

    one = kl.run_kernel(WAVES, x, y, period=5.0, reach=4.0, amplitude=2.0)
    check("numbers", one, waves(x, y, 5.0, 4.0, 2.0))

    periods = torch.tensor([4.0, 5.0, 6.0], device=device)
    several = kl.run_kernel(WAVES, x, y, period=periods, reach=4.0, amplitude=2.0)
    check("a tensor of periods", several, waves(x, y, periods.double()[:, None, None], 4.0, 2.0))

    try:
        kl.Custom("v * gain", ("gian",))
    except ValueError as error:
        print(f"a misspelt parameter is refused at once: {error}")


def waves(x: torch.Tensor, y: torch.Tensor, period, reach: float, amplitude: float) -> torch.Tensor:
    v = (x.double()[:, None] - y.double()[None]).square().sum(-1).sqrt()
    return amplitude * torch.cos(2 * torch.pi * v / period) * torch.exp(-v / reach)


def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    shape = " x ".join(str(size) for size in got.shape)
    print(f"{what:20s} {shape:16s} {got.device.type:5s} relative error {error:.1e}")
    if not error <= BOUND:
        raise SystemExit(f"{what}: the error is above {BOUND:g}")


if __name__ == "__main__":
    main()

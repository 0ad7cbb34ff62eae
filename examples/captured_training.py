"""A training step that is one CUDA graph: forward, backward and optimizer, replayed.

    python examples/captured_training.py [--device cuda] [--points 2000] [--steps 200]

The values of a function at some points are predicted at each of them from all others, by means
that a Gaussian kernel weighs. What is learnt are the kernel's bandwidth and how much each feature
counts, by the squares of the errors: the function reads two of eight features. One product
``K (y, 1)`` by kernel_matmul gives numerators and denominators, without the matrix K.

A step of so few points keeps the host busy for longer than the GPU. In a CUDA graph the host only
starts it. For that

- the optimizer must never wait for the GPU: ``Adam(capturable=True)``,
- kernels must be loaded and torch's libraries be there: the first steps run eagerly, on a stream
  of their own, and count like all others,
- nothing may move: a replay reads points, parameters and gradients where they were.

Both loops begin at the same parameters, and their losses are compared. Runs in float32 on the first
CUDA GPU. CPUs have no CUDA graphs: there the loop runs eagerly alone, with 400 points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import kernlib as kl

ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
POINTS, STEPS = {"cpu": 400, "cuda": 2000}, {"cpu": 20, "cuda": 200}
FEATURES, RATE, NOISE = 8, 0.05, 0.1
WARM_UPS = 3  # eager steps before the capture
BOUND, APART = 1e-5, 1e-3  # of a product beside float64, and of losses beside each other
GAUSSIAN = kl.gaussian()


def data(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and a function of two features with noise."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, generator=random)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1].square()
    y += NOISE * torch.randn(count, generator=random)
    return x.to(device), y.to(device)


class Training:
    """Parameters at their start, and a step of theirs."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.columns = x, torch.stack((y, torch.ones_like(y)), 1)
        self.log_bandwidth = torch.zeros((), device=x.device, requires_grad=True)
        self.logits = torch.zeros(x.shape[1], device=x.device, requires_grad=True)
        parameters = [self.log_bandwidth, self.logits]
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, capturable=x.is_cuda)

    @property
    def weights(self) -> torch.Tensor:
        """Of features: as many as there are in all."""
        return self.logits.softmax(0) * len(self.logits)

    def product(self) -> torch.Tensor:
        """``K (y, 1)`` of the weighted points."""
        z, bandwidth = self.x * self.weights, self.log_bandwidth.exp()
        return kl.kernel_matmul(GAUSSIAN, z, z, self.columns, bandwidth=bandwidth)

    def step(self) -> torch.Tensor:
        """One step. Returns the loss before it."""
        self.optimizer.zero_grad()
        others = self.product() - self.columns  # each point's weight for itself is 1
        errors = others[:, 0] / (others[:, 1] + 1e-3) - self.columns[:, 0]
        loss = errors.square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def eagerly(training: Training, steps: int) -> tuple[torch.Tensor, float]:
    """The losses of so many steps, and milliseconds of one behind the first few."""
    losses = [training.step() for _ in range(WARM_UPS)]
    rest, milliseconds = timed(training.step, steps - WARM_UPS)
    return torch.stack(losses + rest), milliseconds


def captured(training: Training, steps: int) -> tuple[torch.Tensor, float]:
    """The same by replays of one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [training.step() for _ in range(WARM_UPS)]
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # notes launches, runs nothing
        loss = training.step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss.clone()  # the next replay writes the same place

    rest, milliseconds = timed(replay, steps - WARM_UPS)
    return torch.stack(losses + rest), milliseconds


def timed(step: Callable[[], torch.Tensor], count: int) -> tuple[list[torch.Tensor], float]:
    """What so many steps return, and the milliseconds of one."""
    synchronize()
    start = time.perf_counter()
    results = [step() for _ in range(count)]
    synchronize()
    return results, (time.perf_counter() - start) / count * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(training: Training) -> None:
    """The trained product beside float64."""
    with torch.no_grad():
        z = (training.x * training.weights).double()
        squares = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist").square()
        kernel = torch.exp(-squares / (2 * training.log_bandwidth.double().exp().square()))
        exact = kernel @ training.columns.double()
        error = ((training.product().double() - exact).norm() / exact.norm()).item()
    shape = " x ".join(str(size) for size in exact.shape)
    print(f"{'kernel_matmul':16s} {shape:10s} {z.device.type:5s} relative error {error:.1e}")
    if not error <= BOUND:
        raise SystemExit(f"kernel_matmul: the error is above {BOUND:g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(POINTS), default=default)
    parser.add_argument("--points", type=int, help="2000, or 400 on a CPU")
    parser.add_argument("--steps", type=int, help="of training: 200, or 20 on a CPU")
    options = parser.parse_args()
    options.points = POINTS[options.device] if options.points is None else options.points
    options.steps = STEPS[options.device] if options.steps is None else options.steps
    if options.points < 2:
        parser.error(f"--points must be 2 or more, got {options.points}")
    if options.steps <= WARM_UPS:
        parser.error(f"--steps must be more than {WARM_UPS}, got {options.steps}")
    return options


def main() -> None:
    options = parse()
    x, y = data(options.points, options.device)
    training = Training(x, y)
    losses, milliseconds = eagerly(training, options.steps)
    print(
        f"{options.points} points, {options.steps} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    print("weights of features:", " ".join(f"{weight:.2f}" for weight in training.weights.tolist()))
    check(training)
    print(f"eager     {milliseconds:8.3f} ms a step")
    if options.device == "cpu":
        print("captured  left out: there is no CUDA graph without a GPU")
        print(ON_CPU)
        return
    replayed, milliseconds = captured(Training(x, y), options.steps)
    print(f"captured  {milliseconds:8.3f} ms a step")
    apart = ((replayed - losses).abs() / losses).max().item()
    print(f"losses of both differ by {apart:.1e} at most")
    if not apart <= APART:
        raise SystemExit(f"the captured loop is another: its losses differ by more than {APART:g}")


if __name__ == "__main__":
    main()

"""LoKr: adapters that are Kronecker products.

A trained layer stays frozen, and learns a change of a few numbers: `y = x W^T + b + scale * x (A ⊗
B)`. With A and B of 16 x 16, a layer of 256 features has an adapter of 512 numbers, which may still
have full rank. `kl.kron_matmul` multiplies by A and B alone, so the product A ⊗ B, as large as W,
is never made. The frozen network here tells noisy patterns from each other; then all images come
mirrored, and each of three ways has as many steps to learn that.

**Your own data.** Put `LoKr(layer, left, right)` in the place of the layers that you adapt, with
the rows and columns of A in `left` and of B in `right`: they multiply to the layer's input and
output features. For LyCORIS' and peft's LoKr, whose B is a product of two thin matrices, give
`self.b` as that product. A whole layer without the frozen part is `kernlib.nn.KroneckerLinear`.
"""

import copy

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch import nn

import kernlib as kl

CLASSES = 32
SCALE = 1.0


class Patterns:
    """Noisy images (rows, side²) of smooth patterns; the number of each."""

    def __init__(self, side: int, device: torch.device):
        noise = torch.randn(CLASSES, 1, side, side, device=device)
        smooth = nn.functional.avg_pool2d(nn.functional.pad(noise, 4 * [2], "circular"), 5, 1)
        self.clean, self.noise = (smooth / smooth.std())[:, 0], 1.5 * side / 16

    def draw(self, rows: int, mirrored: bool) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(CLASSES, (rows,), device=self.clean.device)
        x = self.clean[labels]
        x = x.flip(-1) if mirrored else x
        return (x + self.noise * torch.randn_like(x)).flatten(1), labels


class LoKr(nn.Module):
    """A frozen layer and its adapter, by kernlib."""

    def __init__(self, frozen: nn.Linear, left: tuple[int, int], right: tuple[int, int]):
        super().__init__()
        self.frozen, where = frozen.requires_grad_(False), frozen.weight.device
        self.a = nn.Parameter(torch.randn(left, device=where) * left[0] ** -0.5)
        self.b = nn.Parameter(torch.zeros(right, device=where))  # so that nothing changes at first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x)
        return kl.kron_matmul(x, [self.a, self.b], alpha=SCALE, beta=1, y=y)


class DenseLoKr(LoKr):
    """The same by a matrix as large as the layer's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = SCALE * torch.kron(self.a, self.b)
        return nn.functional.linear(x, self.frozen.weight + change.T, self.frozen.bias)


class LoRA(nn.Module):
    """A frozen layer and a change of a low rank."""

    def __init__(self, frozen: nn.Linear, rank: int):
        super().__init__()
        self.frozen, where = frozen.requires_grad_(False), frozen.weight.device
        inside, outside = frozen.in_features, frozen.out_features
        self.down = nn.Parameter(torch.randn(inside, rank, device=where) * inside**-0.5)
        self.up = nn.Parameter(torch.zeros(rank, outside, device=where))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + x @ self.down @ self.up


def train(model: nn.Module, data: Patterns, args, rate: float, mirrored: bool) -> list[float]:
    """The loss of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(parameters, lr=rate), []
    for _ in range(args.steps):
        x, labels = data.draw(args.batch, mirrored)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def step(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y.square().mean(), (layer.a, layer.b))


def main() -> None:
    args = parse(__doc__, {"side": (16, 64), "batch": (128, 4096), "steps": (300, 300)})
    side, features = args.side, args.side**2
    data = Patterns(side, args.device)
    hidden = [m for _ in range(2) for m in (nn.Linear(features, features), nn.ReLU())]
    base = nn.Sequential(*hidden, nn.Linear(features, CLASSES)).to(args.device)
    train(base, data, args, 0.5 / features, mirrored=False)
    base.requires_grad_(False)
    ways = {
        "LoKr": lambda layer: LoKr(layer, (side, side), (side, side)),
        "LoRA, rank 1": lambda layer: LoRA(layer, 1),
        "all weights": lambda layer: layer.requires_grad_(),
    }
    losses = {}
    for name, adapter in ways.items():
        model = copy.deepcopy(base)
        model[0], model[2] = adapter(model[0]), adapter(model[2])
        rate = 0.5 / features if name == "all weights" else 0.16 / side
        losses[name] = train(model, data, args, rate, mirrored=True)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{name:14s} {count:10,d} numbers learn, loss {sum(losses[name][-20:]) / 20:.3f}")
        if name == "LoKr":
            ours = model[0]
    dense = DenseLoKr(ours.frozen, (side, side), (side, side))
    dense.load_state_dict(ours.state_dict())
    x, _ = data.draw(args.batch, mirrored=True)
    times = {
        "kernlib": milliseconds(lambda: step(ours, x), args.device),
        "torch, A ⊗ B stored": milliseconds(lambda: step(dense, x), args.device),
    }
    exact = step(copy.deepcopy(dense).double(), x.double())
    error = max(map(relative_error, step(ours, x), exact))

    def draw():
        page, (curve,) = figure()
        for (name, values), colour in zip(losses.items(), (BLUE, ORANGE, GREY), strict=True):
            mean = torch.tensor(values).unfold(0, 10, 1).mean(-1)
            curve.semilogy(range(10, len(values) + 1), mean, label=name, color=colour)
        curve.set(title="learning that images come mirrored", xlabel="step", ylabel="loss in nats")
        curve.legend(frameon=False)
        return page

    finish(args, times, error, 1e-4, draw)


if __name__ == "__main__":
    main()

"""A vision transformer with Monarch layers.

A Monarch layer is a product of two Kronecker-sparse factors in place of a dense weight: one of p
diagonal blocks, then one whose p blocks are interleaved, so that each output depends on each input.
A square weight of d² numbers becomes 2 d² / p. The model here is a small vision transformer, its
images are noisy shapes that are drawn as they are needed, and `replace_linear` puts a
`kernlib.nn.KSLinear` in the place of each dense layer of its blocks.

**Your own data.** Put your images and labels in the place of `images`, and your model in the place
of `ViT`: `replace_linear(model, monarch, match=...)` takes any model with `nn.Linear` layers, such
as timm's, before its optimizer is made. More blocks mean fewer parameters and less work.
`layer.estimate(rows)` says whether a chain is faster than its dense layer; layers of a few hundred
features rarely are.
"""

import copy

import torch
from harness import BLUE, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch import nn

from kernlib.nn import KSLinear, replace_linear

NAMES = "disc", "ring", "square", "frame", "plus", "cross", "bars", "stripes"
SIZE, PATCH, NOISE = 32, 8, 0.35


def images(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, 1, SIZE, SIZE) and the number of the shape in each."""
    labels = torch.randint(len(NAMES), (count,), device=device)
    centre = SIZE * (0.35 + 0.3 * torch.rand(2, count, 1, device=device))
    radius = SIZE * (0.2 + 0.15 * torch.rand(count, 1, 1, device=device))
    axis = torch.arange(SIZE, device=device)
    x, y = ((axis - c) / radius.squeeze(-1) for c in centre)
    x, y = torch.broadcast_tensors(x[:, None, :], y[:, :, None])
    far, wide = x.hypot(y), x.abs().maximum(y.abs())
    thin, slant = x.abs().minimum(y.abs()), (x - y).abs().minimum((x + y).abs())
    inside = far < 1
    shapes = torch.stack((
        inside, (far - 0.8).abs() < 0.2, wide < 0.9, (wide - 0.75).abs() < 0.2,
        (thin < 0.25) & inside, (slant < 0.35) & inside,
        ((3 * y).floor() % 2 == 0) & inside, ((3 * x).floor() % 2 == 0) & inside,
    ))  # fmt: skip
    clean = shapes[labels, torch.arange(count, device=device)].float()
    return (clean + NOISE * torch.randn_like(clean))[:, None], labels


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), dim // 32
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        apart = [layer(y).unflatten(-1, (self.heads, -1)) for layer in
                 (self.to_q, self.to_k, self.to_v)]  # fmt: skip
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in apart))
        x = x + self.to_out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim: int, depth: int):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, len(NAMES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).mT + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def train(model: nn.Module, args) -> tuple[list[float], float]:
    """The part of each batch that is told right before the step on it, and the time of a step."""
    device, rate = args.device, 0.2 / args.dim
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    right = []

    def step(x: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((logits.argmax(-1) == labels).float().mean())

    torch.manual_seed(args.seed)  # both models see the same images
    for _ in range(args.steps):
        step(*images(args.batch, device))
        warm_up.step()
    curve = torch.stack(right).tolist()
    return curve, milliseconds(lambda: step(*images(args.batch, device)), device)


def main() -> None:
    sizes = {"dim": (64, 1024), "depth": (2, 4), "blocks": (4, 16), "batch": (48, 1024),
             "steps": (160, 400)}  # fmt: skip
    args = parse(__doc__, sizes)

    def monarch(name: str, inside: int, outside: int) -> list[tuple[int, int, int, int]]:
        p, between = args.blocks, min(inside, outside)
        return [(p, between // p, inside // p, 1), (1, outside // p, between // p, p)]

    dense = ViT(args.dim, args.depth).to(args.device)
    sparse = copy.deepcopy(dense)
    layers = replace_linear(sparse, monarch, match=r"blocks\.")
    curves, times = {}, {}
    for name, model in (("kernlib, Monarch", sparse), ("torch, dense", dense)):
        curves[name], times[name] = train(model, args)
        numbers = sum(p.numel() for p in model.parameters())
        print(f"{name:24s} {numbers:10,d} parameters, {sum(curves[name][-20:]) / 20:.3f} right")
    layer: KSLinear = layers["blocks.0.mlp.0"]
    x = torch.randn(1000, args.dim, device=args.device)
    reference = x.double() @ layer.to_dense().double().T + layer.bias.double()

    def draw():
        page, (sample, curve) = figure(2)
        x, labels = images(200, torch.device("cpu"))
        first = [int((labels == index).nonzero()[0]) for index in range(len(NAMES))]
        grid = x[first, 0].view(2, 4, SIZE, SIZE).transpose(1, 2).reshape(2 * SIZE, 4 * SIZE)
        sample.imshow(grid, cmap="Greys", vmin=-1, vmax=2, rasterized=True)
        sample.set(title="one image of each class", xticks=[], yticks=[])
        for (name, right), colour in zip(curves.items(), (BLUE, ORANGE), strict=True):
            mean = torch.tensor(right).unfold(0, 10, 1).mean(-1)
            curve.plot(range(10, len(right) + 1), mean, label=name, color=colour)
        curve.set(title="new images told right", xlabel="step", ylabel="part of 10 batches")
        curve.legend(frameon=False)
        return page

    finish(args, times, relative_error(layer(x).detach(), reference), 1e-5, draw)


if __name__ == "__main__":
    main()

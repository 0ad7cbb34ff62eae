"""A block-sparse MLP that finds its inputs.

A layer stores some blocks of its weight and no others; `kernlib.nn.BlockSparseLinear` multiplies
by those alone. Here a network of three such layers fits a function of many features of which few
matter, in groups of one block. Now and then each layer drops its blocks of least norm and regrows
as many where the gradient is largest (RigL: Evci et al. 2020), so that the blocks move to the
groups that matter. Beside it stand the same network without moves, and a dense one.

**Your own data.** Put your pairs in the place of `Task.draw`. `kernlib.nn.block_sparsify(model,
block, density=...)` makes such layers of a trained model, of the blocks of largest norm. It pays
for layers of some thousand features, in blocks of 64 or 128, half of them or fewer stored.
"""

from itertools import pairwise

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch import nn

from kernlib.nn import BlockSparseLinear

MATTER = 4  # groups of features that the function reads
RATE, EVERY, MOVED = 2e-3, 20, 0.3  # steps between moves; the part that moves at first


class Task:
    """A function of the features of a few groups, which is itself a small network."""

    def __init__(self, features: int, block: int, device: torch.device):
        groups = torch.randperm(features // block, device=device)[:MATTER].sort().values
        self.columns = (block * groups[:, None] + torch.arange(block, device=device)).flatten()
        self.groups, self.features = groups.tolist(), features
        self.teacher = nn.Sequential(
            nn.Linear(len(self.columns), 32), nn.Tanh(), nn.Linear(32, block)
        ).to(device)
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.mul_(2)

    @torch.no_grad()
    def draw(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, self.features, device=self.columns.device)
        return x, self.teacher(x[:, self.columns])


def network(args, density: float | None) -> nn.Sequential:
    """Three layers, block-sparse ones if there is a density."""
    widths = args.features, args.hidden, args.hidden, args.block
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        if density is None or outside == args.block:
            layers.append(nn.Linear(inside, outside, device=args.device))
        else:
            layers.append(BlockSparseLinear(inside, outside, args.block, density=density,
                                            device=args.device))  # fmt: skip
        layers.append(nn.ReLU())
    return nn.Sequential(*layers[:-1])


def norms(layer: BlockSparseLinear) -> torch.Tensor:
    """Of each block of the weight, 0 for those that are not stored."""
    rows, cols = layer.layout.block
    blocks = layer.to_dense().detach().unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    return blocks.square().sum((1, 3)).sqrt().cpu()


def train(model: nn.Sequential, task: Task, args, moves: bool) -> list[float]:
    """The loss of each step, in parts of the variance of what is fitted."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE * (256 / args.hidden) ** 0.5)
    layers = [layer for layer in model if isinstance(layer, BlockSparseLinear)]
    losses = []
    for number in range(args.steps):
        x, y = task.draw(args.batch)
        # None of the last third, in which the blocks that there are settle.
        change = moves and (number + 1) % EVERY == 0 and number < 2 * args.steps // 3
        for layer in layers:
            layer.watch_growth(change)  # the gradient by blocks that are not stored, for this step
        loss = (model(x) - y).square().mean() / y.var()
        loss.backward()
        optimizer.step()
        if change:
            for layer in layers:
                part = MOVED * (1 - number / args.steps)
                count = round(part * layer.layout.capacity)
                layer.drop_(count, optimizer=optimizer).regrow_(count, optimizer=optimizer)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    sizes = {"features": (512, 8192), "hidden": (256, 4096), "block": (16, 64),
             "batch": (256, 4096), "steps": (400, 400)}  # fmt: skip
    args = parse(__doc__, sizes)
    task = Task(args.features, args.block, args.device)
    moving, fixed, dense = (network(args, density) for density in (0.1, 0.1, None))
    before = norms(moving[0])
    losses = {
        "blocks that move": train(moving, task, args, moves=True),
        "blocks that stay": train(fixed, task, args, moves=False),
        "dense": train(dense, task, args, moves=False),
    }
    for name, values in losses.items():
        print(f"{name:24s} loss {sum(values[-20:]) / 20:.3f}")
    after = norms(moving[0])
    part = after[:, task.groups].square().sum() / after.square().sum()
    print(f"{part:.2f} of the first layer's weight reads the {MATTER} groups that matter")

    x, y = task.draw(args.batch)

    def step(model: nn.Module) -> None:
        (model(x) - y).square().mean().backward()

    times = {
        "kernlib, block-sparse": milliseconds(lambda: step(moving), args.device),
        "torch, dense": milliseconds(lambda: step(dense), args.device),
    }

    def draw():
        page, (curve, first, last) = figure(3, width=3.8)
        for (name, values), colour in zip(losses.items(), (BLUE, ORANGE, GREY), strict=True):
            mean = torch.tensor(values).unfold(0, 10, 1).mean(-1)
            curve.plot(range(10, len(values) + 1), mean, label=name, color=colour)
        curve.set(title="loss on new data", xlabel="step", ylabel="part of the variance")
        curve.set_ylim(0)
        curve.legend(frameon=False)
        for axis, values, title in ((first, before, "at first"), (last, after, "trained")):
            axis.imshow(values, cmap="Blues", aspect="auto", interpolation="nearest",
                        rasterized=True)  # fmt: skip
            axis.set_title(f"norms of blocks, {title}", pad=12)
            axis.set(xlabel="group of features (▼ those that matter)", ylabel="group of outputs")
            axis.plot(task.groups, MATTER * [1.02], "v", color=ORANGE, clip_on=False, ms=5,
                      transform=axis.get_xaxis_transform())  # fmt: skip
        return page

    with torch.no_grad():
        layer = moving[0]
        exact = layer.to_linear().double()(x.double())
        error = relative_error(layer(x), exact)
    finish(args, times, error, 1e-5, draw)


if __name__ == "__main__":
    main()

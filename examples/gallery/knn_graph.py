"""Graph of nearest neighbours: distances along a surface.

`kl.kernel_topk` gives each point's k nearest others, by any distance, and never stores the matrix
of distances. Shortest paths along these edges measure how far points are from each other on the
surface: each round takes `d_i = min_j (d_j + |x_i - x_j|)` over the neighbours j of i, until
nothing changes. The plain way is `torch.cdist` and `topk`, a block of rows at a time.

**Your own data.** Put your points (n, features) in the place of `x`. Any descriptor stands in the
place of `kl.l2_distance()`: `kl.l1_distance()`, or `kl.dot_product()` with `largest=True` for the
most similar. With two tensors, `kl.kernel_topk(kl.l2_distance(), queries, x, k)` is a search.
Squared distances of more features than a few, up to 128, go through tensor cores.
"""

import torch
from harness import GREY, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

NEIGHBOURS, BLOCK, SHOWN, FEW = 8, 4096, 800, 500


def roll(n: int, device: torch.device) -> torch.Tensor:
    """Points of a rolled-up sheet in space."""
    angle = 1.5 * torch.pi * (1 + 2 * torch.rand(n, device=device))
    return torch.stack(
        (angle * angle.cos(), 21 * torch.rand(n, device=device), angle * angle.sin()), 1
    )


def by_kernlib(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and indices of the neighbours, (n, k) each."""
    distances, indices = kl.kernel_topk(kl.l2_distance(), x, x, NEIGHBOURS + 1)
    return distances[:, 1:], indices[:, 1:]  # without the point itself


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = [torch.cdist(rows, x).topk(NEIGHBOURS + 1, largest=False) for rows in x.split(BLOCK)]
    distances, indices = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return distances[:, 1:], indices[:, 1:]


def shortest_paths(distances: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """From one point to all, along edges in either direction."""
    count, k = indices.shape
    rows = torch.arange(count, device=indices.device).repeat_interleave(k)
    ends = torch.cat((rows, indices.flatten())), torch.cat((indices.flatten(), rows))
    lengths = distances.flatten().repeat(2)
    paths = torch.full((count,), torch.inf, device=distances.device)
    paths[start] = 0
    while True:
        shorter = paths.scatter_reduce(0, ends[0], paths[ends[1]] + lengths, "amin")
        if shorter.equal(paths):
            return paths
        paths = shorter


def main() -> None:
    args = parse(__doc__, {"n": (3000, 60000)})
    x = roll(args.n, args.device)
    distances, _ = by_kernlib(x)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x), args.device, repeats=3),
        "torch, by blocks": milliseconds(lambda: by_torch(x), args.device, repeats=1),
    }

    def draw():
        from matplotlib.collections import LineCollection

        page, (edges, paths) = figure(2, width=3.7, height=3.1)
        few = x[:SHOWN]
        lengths, neighbours = by_kernlib(few)
        view = torch.tensor([[1.0, 0.0], [0.45, 0.3], [0.0, 1.0]])  # from the side and above
        ends = few.cpu() @ view
        pairs = torch.stack((ends[:, None].expand(-1, NEIGHBOURS, -1), ends[neighbours.cpu()]), 2)
        lines = LineCollection(pairs.flatten(0, 1).numpy(), colors=GREY, linewidths=0.4)
        lines.set_rasterized(True)
        edges.add_collection(lines)
        along = shortest_paths(lengths, neighbours, few[:, 0].square().add(few[:, 2] ** 2).argmin())
        style = {"s": 4, "c": along.cpu(), "cmap": "viridis", "rasterized": True}
        page.colorbar(paths.scatter(*ends.T, **style), ax=paths, label="length of the path")
        edges.set(title=f"edges to {NEIGHBOURS} neighbours")
        paths.set(title="shortest paths from the inner end")
        for axis in (edges, paths):
            axis.set(aspect="equal", xlim=(-12, 24), ylim=(-13, 22), xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        return page

    # Of some points by differences: torch's product of matrices cancels between neighbours.
    some = x[:FEW].double()
    exact = torch.cdist(some, x.double()).topk(NEIGHBOURS + 1, largest=False)[0][:, 1:]
    error = relative_error(distances[:FEW], exact)
    finish(args, times, error, 1e-5, draw)


if __name__ == "__main__":
    main()

"""A kernel function of your own, and its gradient.

`kl.Custom` takes one expression of `v`, the value that reaches it, and the names of its parameters.
Here v is the distance of two points and the expression Wendland's function `(1 - v / reach)^4 (4 v
/ reach + 1)`, which is 0 from `reach` on. Compiled into the kernel of the distance, it goes
wherever a named kernel goes: `f(x) = sum_j w_j k(x, c_j)` is `kl.kernel_matmul(KERNEL, x, centres,
w, reach=...)`, no matrix of it is stored, and its gradient by the centres, the weights and the
reach follows from the same expression. With it f learns a picture.

**Your own data.** Write your expression and its parameters in the place of `WENDLAND`: it may use
`+ - * / **`, `max`, `min`, `exp`, `log`, `cos` and the like. Put your points (n, features) and
their values in the place of `x` and `y`. `kl.run_kernel(KERNEL, x, centres, reach=...)` gives the
matrix itself.
"""

from functools import partial

import torch
from harness import BLUE, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

WENDLAND = kl.Custom("max(1 - v / reach, 0) ** 4 * (4 * v / reach + 1)", ("reach",))
KERNEL = kl.l2_distance(epilogue=WENDLAND)
REACH, RATE = 4.3, 0.25  # in distances of neighbouring centres


def picture(x: torch.Tensor) -> torch.Tensor:
    """Of points in the unit square: rings that fade, and an edge."""
    a, b = x.T
    rings = torch.cos(25 * (x - 0.4).norm(dim=1)) * torch.exp(-8 * (x - 0.4).square().sum(1))
    return rings + 0.6 * torch.tanh(30 * (a + 0.5 * b - 1.05))


def by_kernlib(x, centres, weights, reach) -> torch.Tensor:
    return kl.kernel_matmul(KERNEL, x, centres, weights, reach=reach)


def by_torch(x, centres, weights, reach) -> torch.Tensor:
    """The same with the matrix stored."""
    v = torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist") / reach
    return ((1 - v).clamp(min=0) ** 4 * (4 * v + 1)) @ weights


def gradients(way, x, y, leaves) -> tuple[torch.Tensor, ...]:
    loss = (way(x, *leaves) - y).square().mean()
    return torch.autograd.grad(loss, leaves)


def spacing(args) -> float:
    return args.centres**-0.5


def learn(leaves: list[torch.Tensor], x, y, args) -> list[float]:
    """The loss of each step, on points that are drawn anew; of the leaves that require one, by
    their gradients."""
    optimizer = torch.optim.Adam([t for t in leaves if t.requires_grad], lr=RATE * spacing(args))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    losses = []
    for _ in range(args.steps):
        some = torch.randint(len(x), (args.points,), device=x.device)
        loss = (by_kernlib(x[some], *leaves) - y[some]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    sizes = {"points": (600, 40000), "centres": (150, 1000), "steps": (250, 400)}
    args = parse(__doc__, sizes)
    x = torch.rand(4 * args.points, 2, device=args.device)
    y = picture(x)
    centres = torch.rand(args.centres, 2, device=args.device)
    weights = torch.zeros(args.centres, device=args.device, requires_grad=True)
    reach = torch.tensor(REACH * spacing(args), device=args.device)
    leaves = [t.clone().requires_grad_() for t in (centres, weights.detach(), reach)]
    losses = {
        "all learn": learn(leaves, x, y, args),
        "weights alone": learn([centres, weights, reach], x, y, args),
    }
    for name, values in losses.items():
        print(f"{name:24s} loss {sum(values[-20:]) / 20:.1e}")
    x, y = x[: args.points], y[: args.points]
    ways = {"kernlib": by_kernlib, "torch, matrix stored": by_torch}
    times = {
        name: milliseconds(partial(gradients, way, x, y, leaves), args.device)
        for name, way in ways.items()
    }
    exact = [t.detach().double().requires_grad_() for t in leaves]
    reference = gradients(by_torch, x.double(), y.double(), exact)
    error = max(map(relative_error, gradients(by_kernlib, x, y, leaves), reference))

    @torch.no_grad()
    def draw():
        page, (target, fit, curve) = figure(3, width=3.7)
        line = torch.linspace(0, 1, 80, device=args.device)
        grid = torch.cartesian_prod(line, line)
        for axis, values in ((target, picture(grid)), (fit, by_kernlib(grid, *leaves))):
            axis.imshow(values.view(80, 80).T.cpu(), cmap="RdBu", vmin=-1.6, vmax=1.6,
                        extent=(0, 1, 0, 1), origin="lower", interpolation="none")  # fmt: skip
        target.set(title="the picture", xlabel="feature 1", ylabel="feature 2")
        fit.scatter(*leaves[0].cpu().T, s=3, color="black", rasterized=True)
        fit.set(title="learnt, with the centres", xlim=(0, 1), ylim=(0, 1), xlabel="feature 1")
        for (name, values), colour in zip(losses.items(), (BLUE, ORANGE), strict=True):
            curve.semilogy(values, label=name, color=colour)
        curve.set(title="learning", xlabel="step", ylabel="mean squared error")
        curve.legend(frameon=False)
        return page

    finish(args, times, error, 1e-3, draw)


if __name__ == "__main__":
    main()

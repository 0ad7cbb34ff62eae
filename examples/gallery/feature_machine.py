"""Recursive feature machine: a kernel machine that learns which features count.

Each round fits `f(z) = K_M(z, x) w` by `(K_M(x, x) + ridge I) w = y`, with a Laplace kernel of the
distance `(x - z)^T M (x - z)`, then takes for M the average of the outer products of the gradients
of f at the data, `mean_i grad f(x_i) grad f(x_i)^T` (Radhakrishnan, Beaglehole, Pandit and Belkin
2024). `kl.agop` gives that average, and `kl.linalg.solve_cholesky` solves. The plain way is
`torch.cdist`, `torch.linalg.cholesky` and autograd.

**Your own data.** Put features (n, features), scaled to a spread of about one, in the place of `x`,
and values, or classes as 0 and 1, in the columns of `y` (n, outputs). Stop at the round with the
least error at points that were left out. Large eigenvalues of M say which combinations of features
count. With `diagonal=True` `agop` learns a weight for each feature alone.
"""

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL, BANDWIDTH, RIDGE, NOISE = kl.laplace_l2(), 5.0, 0.05, 0.1


def data(n: int, features: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of the first two features and of the sum of the next two; the others say
    nothing."""
    x = torch.randn(n, features, device=device)
    return x, (x[:, 0] * x[:, 1] + torch.sin(x[:, 2] + x[:, 3]))[:, None]


def root(m: torch.Tensor) -> torch.Tensor:
    """The matrix by which points are multiplied, of the largest eigenvalue 1."""
    values, vectors = torch.linalg.eigh(m.double())
    values = (values / values[-1]).clamp_min(0)
    return ((vectors * values.sqrt()) @ vectors.T).to(m)


def by_kernlib(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, rounds: int):
    """The metric M, and the predictions at z of each round."""
    mapping, predictions = torch.eye(x.shape[1], device=x.device), []
    for _ in range(rounds):
        a = x @ mapping
        k = kl.run_kernel(KERNEL, a, a, bandwidth=BANDWIDTH, regularization=RIDGE)
        w, _, _ = kl.linalg.solve_cholesky(k, y, overwrite_a=True)
        predictions.append(kl.kernel_matmul(KERNEL, z @ mapping, a, w, bandwidth=BANDWIDTH))
        metric = mapping @ kl.agop(KERNEL, a, a, w.T, bandwidth=BANDWIDTH) @ mapping
        mapping = root(metric)
    return metric, predictions


def laplace(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact = "donot_use_mm_for_euclid_dist"  # the other way has no gradient at equal points
    return torch.exp(-torch.cdist(a, b, compute_mode=exact) / BANDWIDTH)


def by_torch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, rounds: int):
    mapping, predictions = torch.eye(x.shape[1], device=x.device), []
    for _ in range(rounds):
        a = x @ mapping
        k = laplace(a, a)
        k.diagonal().add_(RIDGE)
        w = torch.cholesky_solve(y, torch.linalg.cholesky(k))
        predictions.append(laplace(z @ mapping, a) @ w)
        queries = a.clone().requires_grad_()
        (slopes,) = torch.autograd.grad((laplace(queries, a) @ w).sum(), queries)
        metric = mapping @ (slopes.T @ slopes / len(x)) @ mapping
        mapping = root(metric)
    return metric, predictions


def main() -> None:
    sizes = {"n": (1000, 16000), "tests": (500, 4000), "features": (12, 48), "rounds": (5, 5)}
    args = parse(__doc__, sizes)
    points, values = data(args.n + args.tests, args.features, args.device)
    (x, z), (y, truth) = points.split((args.n, args.tests)), values.split((args.n, args.tests))
    y = y + NOISE * torch.randn_like(y)
    metric, predictions = by_kernlib(x, y, z, args.rounds)
    calls = by_kernlib, by_torch
    ours, plain = (
        milliseconds(lambda c=c: c(x, y, z, args.rounds), args.device, repeats=1) for c in calls
    )

    def draw():
        page, (heat, curve) = figure(2)
        few = min(args.features, 12)
        names = range(1, few + 1)
        part = (metric / metric.abs().max())[:few, :few].cpu()
        shown = heat.imshow(part, cmap="RdBu_r", vmin=-1, vmax=1)
        page.colorbar(shown, ax=heat, shrink=0.8)
        heat.set(title="learnt metric M", xlabel="feature", ylabel="feature")
        heat.set(xticks=range(few), xticklabels=names, yticks=range(few), yticklabels=names)
        errors = [(p - truth).square().mean().sqrt().item() for p in predictions]
        curve.plot(range(1, len(errors) + 1), errors, "o-", color=BLUE, label="feature machine")
        curve.axhline(errors[0], color=GREY, linestyle=":", label="kernel ridge regression")
        curve.axhline(NOISE, color=ORANGE, linestyle=":", label="noise of the data")
        curve.set(title="error at points that were left out", xlabel="round")
        curve.set(ylabel="root mean square error", ylim=(0, 1.25 * errors[0]))
        curve.set_xticks(range(1, len(errors) + 1))
        curve.legend(frameon=False, fontsize="small")
        return page

    error = relative_error(metric, by_torch(x, y, z, args.rounds)[0])
    finish(args, {"kernlib": ours, "torch": plain}, error, 2e-2, draw)


if __name__ == "__main__":
    main()

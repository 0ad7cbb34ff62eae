"""The recipes of docs/guides/kernel_machines.md, block by block in float64, are their formulas."""

import re

import pytest
import torch

import kernlib as kl
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "kernel_machines.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture
def doubles(seed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the page takes a GPU
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def kernel(v, a, b, width):
    """exp(-(dist_p / width)^q)."""
    return torch.exp(-(((sums(v, a, b) ** (1 / v["p"])) / width) ** v["q"]))


def sums(v, a, b):
    return ((a[:, None] - b[None]).abs() ** v["p"]).sum(-1)


def of_outputs(v, function):
    """The gradients by z of the outputs of ``function(points)``, (O, N, K)."""
    points = v["z"].clone().requires_grad_()
    f = function(points)
    return torch.stack(
        [torch.autograd.grad(one.sum(), points, retain_graph=True)[0] for one in f.unbind(1)]
    )


def average(slopes):
    flat = slopes.flatten(0, 1)
    return flat.mT @ flat / len(flat)


def close(found, wanted, **options):
    torch.testing.assert_close(found, wanted, **(CLOSE | options))


# What holds after each block.


def the_points(v):
    assert v["kernel"] == kl.laplace_pq()


def the_matrix(v):
    close(v["k"], torch.exp(-sums(v, v["x"], v["z"]) / 5.0 ** v["p"]))
    x, values = v["x"], {"p": v["p"], "q": v["q"], "bandwidth": 5.0}
    close(kl.run_kernel(v["kernel"], x, v["z"], **values), kernel(v, x, v["z"], 5.0))
    whole = kl.run_kernel(v["symmetric"], x, regularization=v["ridge"], **values)
    assert torch.equal(whole, whole.mT)
    assert (whole.diagonal() == 1 + v["ridge"]).all()


def the_metric(v):
    close(v["k"], kernel(v, v["x"] @ v["matrix"], v["z"] @ v["matrix"], 5.0))


def the_bandwidth(v):
    chosen = v["x"][v["rows"]]
    pairs = torch.triu_indices(len(chosen), len(chosen), 1)
    wanted = (sums(v, chosen, chosen) ** (1 / v["p"]))[pairs[0], pairs[1]]
    close(v["bandwidth"], 2.0 * wanted.sort().values[(len(wanted) - 1) // 2])
    close(v["k"], kernel(v, v["x"], v["z"], v["bandwidth"]))


def the_categories(v):
    a, b = (torch.nn.functional.one_hot(v[n], 3).double() for n in ("x_category", "z_category"))
    total = sums(v, v["x"], v["z"]) + sums(v, a, b)
    close(v["sums"], total)
    close(v["k"], torch.exp(-(total ** (v["q"] / v["p"])) / v["bandwidth"] ** v["q"]))


def the_solutions(v):
    x, z, width = v["x"], v["z"], v["bandwidth"]
    system = kernel(v, x, x, width) + torch.eye(len(x))
    residual = (system @ v["w"] - v["y"]).norm(dim=0) / v["y"].norm(dim=0)
    assert (residual <= 1.001e-4).all()
    close(v["predictions"], kernel(v, z, x, width) @ v["w"])
    distances = sums(v, z, x) ** (1 / v["p"])
    close(v["near"], distances.topk(10, largest=False).values)
    assert torch.equal(v["nearest"], distances.argmin(1))


def the_gradients(v):
    wanted = of_outputs(v, lambda points: kernel(v, points, v["x"], v["bandwidth"]) @ v["w"])
    close(v["slopes"], wanted, atol=1e-9)
    again = torch.autograd.grad(
        kl.kernel_matmul(v["kernel"], v["points"], v["x"], v["w"], **v["values"])[:, 1].sum(),
        v["points"],
    )[0]
    close(again, wanted[1], atol=1e-9)


def the_products(v):
    def value(points, m):
        return kernel(v, points @ m, v["x"] @ m, v["bandwidth"]) @ v["w"]

    plain = of_outputs(v, lambda points: value(points, torch.eye(8)))
    moved = plain - plain.mean(1, keepdim=True)
    close(v["scales"], average(moved).diagonal(), atol=1e-8)
    close(v["metric"], average(of_outputs(v, lambda points: value(points, v["matrix"]))), atol=1e-8)


def the_rounds(v):
    assert v["scales"].amax() == 1 and (v["scales"] > 0).all()


def the_sums_of_kernels(v):
    x, z = v["x"], v["z"]

    def value(a, b):
        terms = torch.exp(-((a[:, None] - b[None]).abs() ** v["p"]) / 5.0 ** v["p"])
        return (0.9 * terms.mean(-1) + 0.1) ** 2

    close(v["k"], value(x, z))
    wanted = of_outputs(v, lambda points: value(points, x) @ v["w"])
    close(v["slopes"], wanted, atol=1e-9)
    close(v["metric"], average(wanted), atol=1e-9)


CHECKS = (
    the_points, the_matrix, the_metric, the_bandwidth, the_categories, the_solutions,
    the_gradients, the_products, the_rounds, the_sums_of_kernels,
)  # fmt: skip


def test_every_recipe_is_its_formula(doubles):
    space = {}
    for block, check in zip(BLOCKS, CHECKS, strict=True):
        exec(block, space)
        check(space)

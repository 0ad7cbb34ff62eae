"""Reductions by KeOps, where it is installed: formulas that it compiles to one kernel each.

Points are divided by the bandwidth before it sees them, so that no pair is. Its kernels run on
CUDA's default stream, and each call waits for them: no graph can hold it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable

import torch

from benchmarks.pairwise.by_hand import half_norms

NAME, OF_PRODUCTS = "keops", "keops products"
PRODUCT_FEATURES = 16  # above it norms and a product, an operation a feature, may beat differences


def is_there() -> bool:
    return importlib.util.find_spec("pykeops") is not None


def lazy(x: torch.Tensor) -> Callable:
    """KeOps's LazyTensor for tensors beside x. Raises RuntimeError where KeOps would give their
    addresses on a GPU to the CPU."""
    if x.is_cuda and not importlib.import_module("pykeops.config").gpu_available:
        raise RuntimeError("KeOps finds no GPU, NVRTC or compiler")
    return importlib.import_module("pykeops.torch").LazyTensor


def ways(make: Callable, problem) -> dict[str, Callable]:
    """The rivals of a problem in float32: ``make(problem, products)`` by their names."""
    if not is_there() or problem.kind != "fp32":
        return {}
    found = {NAME: make(problem, False)}
    if problem.kernel == "gaussian" and problem.features > PRODUCT_FEATURES:
        found[OF_PRODUCTS] = make(problem, True)
    return found


def logarithms(kernel: str, a: torch.Tensor, b: torch.Tensor, bandwidth, products: bool):
    """Of the entries of K."""
    tensor = lazy(a)
    scale = 1 / bandwidth if products or kernel != "gaussian" else math.sqrt(0.5) / bandwidth
    a, b = a * scale, b * scale
    rows, columns = tensor(a[:, None]), tensor(b[None])
    if products:
        ours, theirs = tensor(half_norms(a)[:, None, None]), tensor(half_norms(b)[None, :, None])
        return (rows | columns) - ours - theirs
    return -distances(kernel, rows, columns)


def distances(kernel: str, rows, columns):
    """Squares for the Gaussian, else sums of absolute differences."""
    return rows.sqdist(columns) if kernel == "gaussian" else (rows - columns).abs().sum(-1)


def products(problem) -> dict[str, Callable]:
    """Ways of ``f(a, b, v, out)``."""

    def make(problem, of_products: bool) -> Callable:
        def call(a, b, v, out):
            found = logarithms(problem.kernel, a, b, problem.bandwidth, of_products)
            return found.exp() @ v

        return call

    return ways(make, problem)


def gradients(problem) -> dict[str, Callable]:
    """Ways of ``f(x, v, bandwidth, g, _)``, by autograd."""

    def make(problem, of_products: bool) -> Callable:
        def call(x, v, bandwidth, g, _):
            given = x, v, bandwidth
            x, v, bandwidth = (t.detach().requires_grad_(t.requires_grad) for t in given)
            if "x" in problem.wanted:
                found = logarithms(problem.kernel, x, x, bandwidth, of_products)
            else:
                found = scaled_inside(problem.kernel, x, bandwidth)
            named = {"x": x, "v": v, "bandwidth": bandwidth}
            wanted = [named[name] for name in problem.wanted]
            return torch.autograd.grad(found.exp() @ v, wanted, g)

        return call

    return ways(make, problem)


def scaled_inside(kernel: str, x: torch.Tensor, bandwidth: torch.Tensor):
    """The same of points as they are: where only the bandwidth has a gradient, that is one sum and
    not those of all features."""
    tensor = lazy(x)
    scale = -0.5 / bandwidth**2 if kernel == "gaussian" else -1 / bandwidth
    return distances(kernel, tensor(x[:, None]), tensor(x[None])) * tensor(scale.view(1))


def nearest(k: int) -> dict[str, Callable]:
    """``f(a, b, out)``: squared distances to the k nearest points, and their places."""

    def call(a, b, out):
        tensor = lazy(a)
        return tensor(a[:, None]).sqdist(tensor(b[None])).Kmin_argKmin(k, dim=1)

    return {NAME: call} if is_there() else {}

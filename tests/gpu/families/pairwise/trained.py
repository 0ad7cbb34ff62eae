"""What gradients of a product with a kernel matrix must keep to, whichever kernels they use: their
memory, their bits, and that a graph may hold them."""

from collections.abc import Callable, Iterable, Iterator

import torch

import kernlib as kl
from kernlib.lowering import division
from tests.gpu.families.pairwise.cases import points
from tests.gpu.watched import capture, nothing_waits, peak

# Numbers that partial sums of the launches of a call take at the most, in bytes of two of them.
PARTIAL_BYTES = 2 * division.WORKSPACE_BYTES


def leaves(count: int, features: int, width: float) -> tuple[torch.Tensor, ...]:
    """Points, one column and a bandwidth, of all of which gradients are wanted."""
    x, v = points(count, features).requires_grad_(), points(count, 1).requires_grad_()
    return x, v, torch.tensor(width, device="cuda", requires_grad=True)


def gradients_of(x, v, bandwidth, y=None) -> tuple[torch.Tensor, ...]:
    """Of all leaves of a product with the matrix of x and itself, or of x and y."""
    out = kl.kernel_matmul(kl.gaussian(), x, x if y is None else y, v, bandwidth=bandwidth)
    wanted = (x, v, bandwidth) if y is None else (x, y, v, bandwidth)
    return torch.autograd.grad(out, wanted, torch.ones_like(out))


def beside_float64(
    named: dict[str, torch.Tensor],
    g: torch.Tensor,
    wanted: Iterable[str] | None = None,
    **values,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of a product with a Gaussian matrix by those arguments of ``named`` that are
    wanted, all of them without ``wanted``, each beside what float64 makes of it."""
    names = [*(named if wanted is None else wanted)]
    found = []
    for dtype in (g.dtype, torch.float64):
        given = {
            name: t.detach().to(dtype).requires_grad_(name in names) for name, t in named.items()
        }
        out = kl.kernel_matmul(kl.gaussian(), **given, **values)
        found.append(torch.autograd.grad(out, [given[name] for name in names], g.to(dtype)))
    return zip(*found, strict=True)


def peak_of_gradients(count: int, features: int, width: float, shared: bool) -> int:
    """The most bytes that a product and its gradients hold beside the tensors that they are of."""
    x, v, bandwidth = leaves(count, features, width)
    y = None if shared else points(count, features).requires_grad_()
    gradients_of(x, v, bandwidth, y)
    _, held = peak(lambda: gradients_of(x, v, bandwidth, y))
    return held


def assert_same_bits(find: Callable[[], tuple]) -> None:
    first = find()
    for _ in range(3):
        assert all(torch.equal(s, t) for s, t in zip(first, find(), strict=True))


def captured(find: Callable[[], tuple]) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """A graph of a call that waits for nothing, and the tensors that it fills."""
    find()
    with nothing_waits():
        find()
    with capture() as graph:
        kept = find()
    return graph, kept

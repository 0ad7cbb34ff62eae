"""vmap, grad and jvp of torch.func give what they say, or are refused, in compiled calls too."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import kernlib as kl
from kernlib.blocksparse import Layout, attention, softmax
from tests.contract.library.calls import close, compiled
from tests.contract.library.operations import OPERATIONS, every, parameters

pytestmark = pytest.mark.few(by="operation")

MAPPED = [
    pytest.param(one, name, place, id=f"{one.name}-{name}-{place}")
    for one in OPERATIONS
    for name, given in one.transforms.items()
    for place in given.mapped
]

FORWARD = ("blocksparse", "kronecker_product", "kronecker_sparse", "sparse")  # jvp is compiled
REFUSED = r"forward mode .* is not known|is inside a transform of torch.func"


def judge(run, message, wanted, near) -> None:
    """It gives what is wanted, or it says so."""
    if message is None:
        close(run(), wanted(), near)
        return
    with pytest.raises(RuntimeError, match=message):
        run()


@pytest.mark.parametrize(("operation", "case", "place"), MAPPED)
def test_vmap_is_done_or_refused(operation, case, place):
    given = operation.transforms[case]
    tensors = given.call.leaves()
    dims = tuple(0 if n == place else None for n in range(len(tensors)))
    tensors[place] = torch.stack((tensors[place], tensors[place] * 0.5))

    def one_by_one():
        rest = tensors[:place], tensors[place + 1 :]
        return torch.stack([given.call.run(*rest[0], t, *rest[1]) for t in tensors[place]])

    mapped = torch.vmap(given.call.run, in_dims=dims)
    near = operation.near.recorded
    judge(lambda: mapped(*tensors), given.vmap, one_by_one, near)
    judge(lambda: compiled(mapped)(*tensors), given.compiled_vmap, one_by_one, near)


def differentiated(call):
    """A function, and its gradients by autograd."""

    def summed(*tensors):
        return call.run(*tensors).square().sum()

    def wanted():
        tensors = call.leaves(True)
        return torch.autograd.grad(summed(*tensors), [tensors[place] for place in call.places])

    return torch.func.grad(summed, argnums=call.places), wanted


@every(lambda one: one.transforms)
def test_grad_is_done_or_refused(operation, case):
    given = operation.transforms[case]
    run, wanted = differentiated(given.call)
    judge(lambda: run(*given.call.leaves()), given.grad, wanted, operation.near.slopes)


@pytest.mark.parametrize(
    ("operation", "case"), parameters(lambda one: one.transforms, promise="compiled grad")
)
def test_compiled_grad_is_done_or_refused(operation, case):
    given = operation.transforms[case]
    run, wanted = differentiated(given.call)
    run = compiled(run)
    judge(lambda: run(*given.call.leaves()), given.compiled_grad, wanted, operation.near.slopes)


@pytest.mark.parametrize("traced", ["compiled", "make_fx"])
@every(lambda one: one.transforms)
def test_traced_forward_mode_is_done_or_refused(operation, case, traced):
    call = operation.transforms[case].call
    tensors, place = call.leaves(), call.places[-1]

    def pushed(t):
        rest = tensors[:place], tensors[place + 1 :]
        return torch.func.jvp(lambda t: call.run(*rest[0], t, *rest[1]), (t,), (t,))[1]

    run = compiled(pushed) if traced == "compiled" else lambda t: make_fx(pushed)(t)(t)
    message = None if operation.name in FORWARD else REFUSED
    near = operation.near.recorded
    judge(lambda: run(tensors[place]), message, lambda: pushed(tensors[place]), near)


# Layers, and what else lists the tensors of a layout or of a matrix.

LAYOUT = Layout([[1, 0], [1, 1]], 16)
LAYERS = {
    "SparseLinear": lambda: kl.nn.SparseLinear.from_linear(nn.Linear(32, 32), density=0.3),
    "BlockSparseLinear": lambda: kl.nn.BlockSparseLinear(32, 48, 16, density=0.5),
    "BlockSparseConv2d": lambda: kl.nn.BlockSparseConv2d(32, 32, 3, layout=16, density=0.4),
    "KSLinear": lambda: kl.nn.KSLinear([(2, 4, 4, 4)], activation="gelu"),
    "KroneckerLinear": lambda: kl.nn.KroneckerLinear((4, 8), (4, 5)),
    "BlockSparseMultiheadAttention": lambda: kl.nn.BlockSparseMultiheadAttention(
        16, 2, LAYOUT, batch_first=True
    ),
    "softmax": lambda: lambda x: softmax(x, LAYOUT, 0.5),
    "attention": lambda: lambda x: attention(x, x, x, LAYOUT, causal=True, score="v * 2"),
}
SIZES = {"BlockSparseConv2d": (2, 32, 5, 5), "softmax": (3, 16, 16), "attention": (1, 2, 32, 8)}


def size_of(call):
    return call.square().sum()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda v: size_of(f(v)))(x),
    "each grad": lambda f, x: torch.vmap(torch.func.grad(lambda v: size_of(f(v))))(x[None]),
    "second": lambda f, x: torch.func.grad(
        lambda u: size_of(torch.func.grad(lambda v: size_of(f(v)))(u))
    )(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x * 2,))[1],
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_transforms_of_layers_give_what_eager_ones_give(name, transform, seed):
    layer, x = LAYERS[name](), torch.randn(SIZES.get(name, (2, 32)))
    call = layer
    if name.endswith("MultiheadAttention"):
        x = torch.randn(2, 32, 16)
        call = lambda v: layer(v, v, v)[0]  # noqa: E731
    run = TRANSFORMS[transform]
    found = compiled(lambda x: run(call, x))(x)
    torch.testing.assert_close(found, run(call, x), rtol=1e-4, atol=1e-4)

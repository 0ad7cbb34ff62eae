"""vmap, grad and jvp of torch.func give what they say, or are refused, in compiled calls too."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.contract.library.calls import close, compiled
from tests.contract.library.operations import OPERATIONS, every, parameters

pytestmark = pytest.mark.few(by="operation")

MAPPED = [
    pytest.param(one, name, place, id=f"{one.name}-{name}-{place}")
    for one in OPERATIONS
    for name, given in one.transforms.items()
    for place in given.mapped
]

FORWARD = ("blocksparse", "kronecker_product", "kronecker_sparse")  # of which jvp is compiled
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

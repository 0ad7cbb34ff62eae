"""Fake tensors have shapes, of every device, and no memory that a call could read."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contract.library.cases import tuple_of
from tests.contract.library.operations import OPERATIONS, every, marks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.few(by="operation"),
]

# torch without CUDA records no gradient of a fake tensor of it.
PLACES = [("cpu", False), ("cpu", True), ("cuda", False)]
FAKES = [
    pytest.param(
        *(one, name, *place, inside),
        id=f"{one.name}-{name}-{place[0]}-{place[1]}-{inside}",
        marks=marks(one, name, "recorded outside" if place[1] and not inside else ""),
    )
    for one in OPERATIONS
    for name, call in one.fakes.items()
    for place in PLACES
    if call.places or not place[1]
    for inside in (True, False)
]


def fake(mode, tensors, device):
    """Of the same shapes and strides, with memory of nobody."""
    with mode:
        made = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors
        ]
    for ours, theirs in zip(made, tensors, strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return made


@pytest.mark.parametrize(("operation", "case", "device", "recording", "inside"), FAKES)
def test_a_fake_call_has_the_shape_of_the_real_one(operation, case, device, recording, inside):
    call, mode = operation.fakes[case], FakeTensorMode()
    tensors = call.leaves(recording)
    wanted = tuple_of(call.run(*tensors))
    fakes = fake(mode, tensors, device)
    with mode if inside else torch.enable_grad():
        found = tuple_of(call.run(*fakes))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert (ours.dtype, ours.device.type) == (theirs.dtype, device)
        assert (ours.requires_grad, ours.fake_mode) == (theirs.requires_grad, mode)
    if recording:
        leaves = [t for t in fakes if t.requires_grad]
        with mode:
            kept = sum(y.sum() for y in found if y.requires_grad)
            slopes = torch.autograd.grad(kept, leaves)
        assert [g.shape for g in slopes] == [t.shape for t in leaves]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@every(lambda one: [name for name, out in one.outs.items() if out.fake])
def test_a_fake_out_is_returned(operation, case, device, inside):
    given, mode = operation.outs[case], FakeTensorMode()
    if device == "cuda" and given.copied and not torch.cuda.is_available():
        pytest.skip("torch without CUDA copies no fake tensor of it")
    *fakes, out = fake(mode, [*given.operands, torch.empty(given.shape, dtype=given.dtype)], device)
    with mode if inside else torch.enable_grad():
        assert given.run(*fakes, out=out) is out

"""What is wrong with a call is said in compiled calls, and to fake tensors, as in eager calls."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernlib as kl
from tests.contract.library.calls import compiled
from tests.contract.library.operations import every, recordings
from tests.support.dynamo_messages import said

pytestmark = pytest.mark.few(by="operation")

ERRORS = (ValueError, TypeError, RuntimeError)


@recordings(lambda one: one.wrong, records="recorded", sweep=False)
def test_what_is_wrong_is_said_as_in_eager_calls(operation, case, recording):
    wrong = operation.wrong[case]
    for run in (wrong.run, compiled(wrong.run)):
        with pytest.raises(ERRORS, match=wrong.message):
            run(*operation.typical.leaves(recording))


@every(lambda one: one.nonsense)
def test_what_is_no_number_and_no_descriptor_is_an_error(operation, case):
    call = operation.nonsense[case]
    for run in (call, compiled(call)):
        with pytest.raises((TypeError, torch._dynamo.exc.Unsupported)):
            run(*operation.typical.leaves())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("inside", [True, False])
@every(lambda one: one.wrong_fakes)
def test_what_is_wrong_with_fake_tensors_is_said_too(operation, case, inside):
    call, message = operation.wrong_fakes[case]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in call.operands]
        if inside:
            with pytest.raises(ValueError, match=message):
                call.run(*fakes)
    if not inside:
        with pytest.raises(ValueError, match=message):
            call.run(*fakes)


WRONG = {
    "list": ({"bandwidth": [1.0]}, r"bandwidth must be a real number .* got \[1.0\]"),
    "array": ({"bandwidth": np.ones(3)}, "bandwidth must be a real number .* a ndarray of shape"),
    "map": (
        {"bandwidth": 1.0, "feature_map": [1.0]},
        "feature_map must be a tensor, got list: pass torch.tensor",
    ),
    "scale": (
        {"bandwidth": 1.0, "lengthscale": np.ones(3)},
        "lengthscale must be a tensor .* got ndarray",
    ),
    "offset": ({"bandwidth": 1.0, "row_offset": 1.5}, "row_offset must be an int, got 1.5"),
    "tensor": ({"bandwidth": 1.0, "v": torch.ones(3, 2)}, "v is no argument of gaussian; it takes"),
    "number": ({"bandwith": 1.0}, "bandwith is no argument of gaussian; .* mean bandwidth"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["run_kernel", "kernel_sum", "kernel_argmin", "kernel_topk"])
@pytest.mark.parametrize("case", WRONG)
def test_messages_are_made_while_dynamo_traces(case, name):
    given, message = WRONG[case]
    call = getattr(kl, name)
    a, b = torch.randn(4, 3), torch.randn(5, 3)
    for run, pattern in ((call, message), (compiled(call, "eager"), said(message))):
        with pytest.raises(Exception, match=pattern):
            run(kl.gaussian(), a, b, **given)
        assert torch.is_grad_enabled()

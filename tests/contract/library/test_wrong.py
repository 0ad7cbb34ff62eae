"""What is wrong with a call is said in compiled calls, and to fake tensors, as in eager calls."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contract.library.calls import compiled
from tests.contract.library.operations import every, recordings

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

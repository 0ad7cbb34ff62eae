"""A compiled call is the eager one, through one operator, whatever changes from call to call."""

import contextlib
import warnings

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from tests.contract.library.calls import EXACT, close, compiled, same, slopes, targets
from tests.contract.library.operations import each, every, recordings
from tests.support.speeds import slow_but

pytestmark = pytest.mark.few(by="operation")


@contextlib.contextmanager
def silence():
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# What AOTAutograd traces holds for what Dynamo does alone, but for what it would repair.
@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("eager", "aot_eager")))
@recordings(lambda one: one.calls)
def test_a_compiled_call_is_the_eager_one_and_says_nothing(operation, case, recording, backend):
    call = operation.calls[case]
    # What backends say beyond Dynamo is torch's own.
    with silence() if backend == "eager" and not recording else contextlib.nullcontext():
        same(operation, call, compiled(call.run, backend), recording)


@pytest.mark.slow
@every(lambda one: one.inductor)
def test_inductor_takes_the_operators(operation, case):
    call = operation.calls[case]
    run = compiled(call.run, "inductor")
    for recording in (False, True):
        same(operation, call, run, recording)


@each()
def test_a_call_is_one_operator_with_the_text(operation):
    graphs = {"dynamo": [], "aot": []}

    def keep(where):
        def compiler(graph_module, inputs):
            graphs[where].append(graph_module)
            return graph_module

        return compiler

    call, operator = operation.typical, f"kernlib.{operation.operator}.default"
    compiled(call.run, keep("dynamo"))(*call.leaves())
    torch._dynamo.reset()
    compiled(call.run, aot_autograd(fw_compiler=keep("aot")))(*call.leaves())
    (traced,), (lowered,) = graphs["dynamo"], graphs["aot"]
    seen = targets(traced)
    assert seen == [operator] if operation.dynamo_sees else len(seen) == 1
    assert targets(lowered) == [operator]
    assert operation.text in traced.code and operation.text in lowered.code


@each()
def test_an_expression_inside_breaks_the_graph_and_nothing_else(operation):
    call = operation.breaking
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(call.run)(*call.leaves())
    run = torch.compile(call.run, backend="aot_eager")
    close(run(*call.leaves()), call.run(*call.leaves()), operation.near.plain)


# What changes from call to call.


@every(lambda one: one.changes, promise="changing")
def test_what_changes_is_never_a_constant(operation, case):
    changes = operation.changes[case]
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(changes.run, counter)
    for arguments in changes.arguments:
        close(run(*arguments), changes.run(*arguments), operation.near.plain)
    assert changes.programs in (None, counter.frame_count)


@pytest.mark.parametrize("given", ["inside", "outside"])
@each()
def test_a_descriptor_that_changes_takes_another_program(operation, given):
    run, pairs = operation.descriptors
    current = None
    if given == "inside":
        made = compiled(run)
    else:
        found_outside = compiled(lambda *tensors: run(current, *tensors))
        made = lambda _, *tensors: found_outside(*tensors)  # noqa: E731
    for descriptor, *tensors in (*pairs, pairs[0]):
        current = descriptor
        close(made(current, *tensors), run(current, *tensors), EXACT)


@pytest.mark.parametrize("marked", slow_but((True,), (False, True)))
@recordings(lambda one: one.sizes)
def test_every_size_may_be_dynamic(operation, case, recording, marked):
    sizes, near = operation.sizes[case], operation.near
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    run = compiled(sizes.run, counter, dynamic=None if marked else True)
    for tensors in sizes.operands:
        ours, theirs = ([fresh(t) for t in tensors] for _ in range(2))
        for place in sizes.places if recording else ():
            ours[place].requires_grad_(), theirs[place].requires_grad_()
        if marked:
            mark(ours, sizes.operands)
        found, wanted = run(*ours), sizes.run(*theirs)
        if recording:
            close(slopes(found, ours), slopes(wanted, theirs), near.slopes, operation.strides)
        else:
            close(found, wanted, near.plain)
        counts.add(counter.frame_count)
    # Without a gradient Dynamo may begin anew in the first call.
    assert counts == {1} if recording else len(counts) == 1


def fresh(value):
    """A tensor of the test's own; a matrix is one for all."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def mark(tensors, every_size) -> None:
    """What differs between the sizes is dynamic."""
    for place, tensor in enumerate(tensors):
        for dim in range(tensor.dim() if isinstance(tensor, torch.Tensor) else 0):
            if len({given[place].shape[dim] for given in every_size}) > 1:
                torch._dynamo.mark_dynamic(tensor, dim)


# What is around a call.


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("recording", [False, True])
@each()
def test_autocast_is_that_of_eager_calls(operation, recording, where):
    call, dtype, near = operation.autocast

    def cast(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call.run(*tensors)

    if where == "inside":
        found = compiled(cast)(*call.leaves(recording))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled(call.run)(*call.leaves(recording))
    assert (found.dtype, found.requires_grad) == (dtype, recording)
    close(found.detach(), cast(*call.leaves()), near)


@each()
def test_gradients_flow_around_a_call_under_no_grad(operation):
    call = operation.typical

    def around(weight, *tensors):
        with torch.no_grad():
            y = call.run(*tensors)
        return (y * weight).sum() + sum(tensors[place].sum() for place in call.places)

    tensors, weight = call.leaves(True), torch.ones((), requires_grad=True)
    compiled(around)(weight, *tensors).backward()
    torch.testing.assert_close(weight.grad, call.run(*call.leaves()).sum())
    for place in call.places:
        assert torch.equal(tensors[place].grad, torch.ones_like(tensors[place]))

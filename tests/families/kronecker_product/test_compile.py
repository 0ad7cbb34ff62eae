"""Compiled calls of ``kron_matmul``, whose sizes may change. What every operation promises there is
in ``tests/contract/library``."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernlib as kl
from tests.families.kronecker_product.cases import SHAPES, operands
from tests.support.speeds import slow_but


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No program of another test."""
    yield
    torch._dynamo.reset()


def function(x, first, second, y, alpha):
    made = kl.kron_matmul(x, [first, second], alpha=alpha, beta=0.5, y=y)
    return kl.kron_matmul(made, [first.mT, second.mT]).square()


def compiled(**options):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def given(shapes, rows, grad):
    x, factors = operands(shapes, rows, grad=grad)
    wide = shapes[0][1] * shapes[1][1]
    y, alpha = (torch.randn(n, dtype=x.dtype, requires_grad=grad) for n in ((wide,), ()))
    return x, *factors, y, alpha


def check(run, tensors, grad) -> None:
    found, wanted = run(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted)
    if grad:
        ours, theirs = (torch.autograd.grad(t.sum(), tensors) for t in (found, wanted))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.few(1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", slow_but((None,), (None, True)))
def test_any_number_of_rows_is_one_program(dynamic, grad, seed):
    """With sizes that are symbols Dynamo begins anew in the first call, where it meets those of
    factors, which are constants."""
    run, counter = compiled(dynamic=dynamic)
    counts = []
    for rows in (7, 9, 11, 300):
        tensors = given(SHAPES, rows, grad)
        if dynamic is None:
            torch._dynamo.mark_dynamic(tensors[0], 0)
        check(run, tensors, grad)
        counts.append(counter.frame_count)
    assert len({*counts}) == 1 and counts[0] <= 2


def test_a_beta_of_0_reads_no_y_there_either(seed):
    run = torch.compile(
        lambda x, f, y, beta: kl.kron_matmul(x, [f], beta=beta, y=y),
        backend="aot_eager",
        fullgraph=True,
    )
    x, (factor,) = operands(((3, 2),), 4)
    y = torch.full((4, 2), float("nan")).double()
    for beta in (torch.tensor(0.0), 0.0):
        torch.testing.assert_close(run(x, factor, y, beta), x @ factor)


def test_a_record_of_a_compiled_call_is_gone_under_no_grad(seed):
    run, _ = compiled()
    tensors = given(SHAPES, 5, True)
    with torch.no_grad():
        assert not run(*tensors).requires_grad
    assert run(*tensors).requires_grad

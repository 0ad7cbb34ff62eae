"""What no graph can hold: torch.compile leaves its graph for the call, and with ``fullgraph=True``
says so in one sentence."""

import pytest
import torch

import kernlib as kl
from kernlib import linalg, sparse
from tests.contract.library.calls import compiled


def positive(size):
    half = torch.randn(size, size, dtype=torch.float64)
    return half @ half.mT + size * torch.eye(size, dtype=torch.float64)


torch.manual_seed(5)
A, FACTORS, ROWS = positive(6), [positive(2), positive(3)], torch.tensor([0, 2, 5])
POINTS, WEIGHTS = torch.randn(6, 3, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
GAUSSIAN, SHIFT = {"bandwidth": 1.0}, {"bandwidth": 1.0, "regularization": 0.1}
CROW, COL, ONES = torch.arange(7), torch.arange(6), torch.ones(6)
CALLS = {
    "solve_cholesky": lambda b: linalg.solve_cholesky(A, b)[0],
    "solve_lu": lambda b: linalg.solve_lu(A, b)[0],
    "eigh": lambda b: linalg.eigh(A)[0],
    "conjugate_gradient": lambda b: linalg.conjugate_gradient(lambda v: A @ v, b).x,
    "solve_kernel": lambda b: linalg.solve_kernel(kl.gaussian(), POINTS, b, **SHIFT).x,
    "falkon": lambda b: linalg.falkon(kl.gaussian(), POINTS, b, POINTS[:4], **SHIFT).coefficients,
    "nystrom": lambda b: linalg.nystrom(kl.gaussian(), POINTS, 6, **SHIFT)(b),
    "kron_cholesky": lambda b: linalg.kron_cholesky(FACTORS)[0],
    "kron_inverse": lambda b: linalg.kron_inverse(FACTORS)[1],
    "kron_eigh": lambda b: linalg.kron_eigh(FACTORS).eigenvalues(),
    "kron_solve": lambda b: linalg.kron_solve(FACTORS, b),
    "kron_logdet": lambda b: linalg.kron_logdet(FACTORS),
    "masked_kron_solve": lambda b: linalg.masked_kron_solve(FACTORS, b[ROWS], ROWS, noise=0.5).x,
    "agop": lambda b: kl.agop(kl.gaussian(), POINTS, POINTS, WEIGHTS, **GAUSSIAN),
    "cdist_grad": lambda b: kl.cdist_grad(A, POINTS.mT, WEIGHTS, POINTS.mT),
    "cdist_grad_expadd": lambda b: kl.cdist_grad_expadd(
        A, POINTS.mT, WEIGHTS, POINTS.mT, lengthscale=2.0
    ),
    "magnitude": lambda b: sparse.magnitude(b, 0.5),
    "compress": lambda b: sparse.compress(b.float(), "u8").to_dense(),
    "from_csr": lambda b: sparse.from_csr(CROW, COL, ONES, (6, 6), format="u8").to_dense(),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_is_left_for_the_call_and_fullgraph_says_so(name):
    call, b = CALLS[name], torch.randn(6, 2, dtype=torch.float64)

    def run(b):
        return call(b) * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="run outside of a graph: call them"):
        compiled(run)(b)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(b), call(b) * 2)


def test_no_public_function_of_linalg_is_missed():
    functions = {n for n in linalg.__all__ if not isinstance(getattr(linalg, n), type)}
    assert functions - CALLS.keys() == {"masked_kron_matmul"}  # a product, which graphs hold
    x = torch.randn(3, 2, dtype=torch.float64)
    product = compiled(lambda x: linalg.masked_kron_matmul(x, FACTORS, ROWS))
    torch.testing.assert_close(product(x), linalg.masked_kron_matmul(x, FACTORS, ROWS))


def test_gradients_pass_where_the_graph_is_left():
    b = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)

    def run(b):
        return linalg.kron_solve(FACTORS, b * 3).square().sum()

    slopes = [torch.autograd.grad(f(b), b)[0] for f in (run, torch.compile(run, backend="eager"))]
    torch.testing.assert_close(*slopes)

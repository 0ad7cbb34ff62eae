"""Tensors of the meta device give shapes, dtypes and whether a gradient is recorded, as torch's own
functions do; what decides by values refuses them in words."""

import pytest
import torch

import kernlib as kl
from kernlib import linalg, sparse
from kernlib.compat import kermac

pytestmark = pytest.mark.few(1000)  # each public function is a promise

GAUSSIAN, FACTOR = kl.gaussian(), kl.KroneckerSparse(2, 3, 4, 5)
CHAIN = kl.KroneckerSparseChain((FACTOR, kl.KroneckerSparse(1, 4, 6, 5)))
WIDTH = {"bandwidth": 2.0}


def of(*shape, **options):
    """Made anew by each device that a case runs on."""
    return lambda device: torch.rand(shape, **options).to(device)


A, B, V = of(5, 3), of(4, 3), of(4, 2)
MANY, OTHER = of(2, 1, 5, 3), of(3, 4, 3)
PAIRS = of(4, 5), of(3, 4), of(2, 4), of(3, 5)  # a, b, c, d of cdist_grad

CALLS = {
    "run_kernel": (kl.run_kernel, (GAUSSIAN, A, B), WIDTH),
    "run_kernel batch": (kl.run_kernel, (GAUSSIAN, of(7, 5, 3), B), {"bandwidth": of(7)}),
    "run_kernel symmetric": (kl.run_kernel, (GAUSSIAN.replace(symmetric=True), A), WIDTH),
    "run_kernel mapped": (kl.run_kernel, (GAUSSIAN, A, B), WIDTH | {"feature_map": of(3, 2)}),
    "run_kernel out": (kl.run_kernel, (GAUSSIAN, A, B), WIDTH | {"out": of(5, 4)}),
    "cdist": (kl.cdist, (A, B), {}),
    "cdist batch": (kl.cdist, (MANY, OTHER), {"p": 1.5}),
    "cdist p": (kl.cdist, (A, B), {"p": of()}),
    "cdist_grad": (kl.cdist_grad, PAIRS, {}),
    "cdist_expadd": (kl.cdist_expadd, (A, B), {"lengthscale": of(2)}),
    "cdist_grad_expadd": (kl.cdist_grad_expadd, PAIRS, {"lengthscale": of(), "q": 2.0}),
    "agop": (kl.agop, (GAUSSIAN, A, B, of(2, 4)), WIDTH),
    "agop diagonal": (kl.agop, (GAUSSIAN, A, B, of(4)), WIDTH | {"diagonal": True}),
    "kernel_matmul": (kl.kernel_matmul, (GAUSSIAN, A, B, V), WIDTH),
    "kernel_matmul out": (kl.kernel_matmul, (GAUSSIAN, A, B, V), WIDTH | {"out": of(5, 2)}),
    "kernel_sum": (kl.kernel_sum, (GAUSSIAN, of(6, 5, 3), B), WIDTH),
    "kernel_logsumexp": (kl.kernel_logsumexp, (GAUSSIAN, A, B), WIDTH),
    "kernel_min": (kl.kernel_min, (GAUSSIAN, A, B), WIDTH),
    "kernel_argmin": (kl.kernel_argmin, (GAUSSIAN, A, B), WIDTH),
    "kernel_topk": (kl.kernel_topk, (GAUSSIAN, A, B, 2), WIDTH),
    "factor": (kl.run_kernel, (FACTOR, of(7, 40), of(2, 3, 4, 5)), {}),
    "chain": (kl.run_kernel, (CHAIN, of(7, 40), of(2, 3, 4, 5), of(1, 4, 6, 5)), {}),
    "solve_cholesky": (linalg.solve_cholesky, (of(2, 4, 4), of(4, 3)), {}),
    "solve_lu": (linalg.solve_lu, (of(4, 4), of(4)), {}),
    "eigh": (linalg.eigh, (of(4, 4),), {}),
    "kermac cdist": (kermac.cdist, (A, B), {}),
    "kermac cdist_grad": (kermac.cdist_grad, PAIRS, {}),
    "kermac cdist_grad_expadd": (kermac.cdist_grad_expadd, PAIRS, {"lengthscale": of()}),
}


def called(name: str, device: str, recorded: bool = False) -> list:
    function, arguments, options = CALLS[name]
    leaves = []

    def make(value):
        if not callable(value) or not hasattr(value, "__closure__"):
            return value
        tensor = value(device)
        leaves.append(tensor.requires_grad_() if recorded and not leaves else tensor)
        return tensor

    made = function(*map(make, arguments), **{k: make(v) for k, v in options.items()})
    parts = made if isinstance(made, tuple) else (made,)
    return [(t.device.type, tuple(t.shape), t.dtype, t.requires_grad) for t in parts]


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_give_what_others_do_but_values(name):
    wanted = [("meta", *rest) for _, *rest in called(name, "cpu")]
    assert called(name, "meta") == wanted


RECORDED = [
    "run_kernel", "run_kernel batch", "run_kernel mapped", "cdist", "cdist batch", "cdist_expadd",
    "kernel_matmul", "kernel_sum", "kernel_logsumexp", "kernel_min", "kernel_topk", "factor",
]  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_gradients_too(name):
    wanted = [("meta", *rest) for _, *rest in called(name, "cpu", recorded=True)]
    assert called(name, "meta", recorded=True) == wanted and wanted[0][-1]


def test_a_gradient_has_the_shape_of_its_tensor():
    x = torch.empty(5, 3, device="meta", requires_grad=True)
    for y in (kl.cdist(x, x), kl.kernel_sum(GAUSSIAN, x, x, **WIDTH)):
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.is_meta and found.shape == x.shape


def test_products_of_matrices():
    w = sparse.compress(torch.rand(16, 64)).to("meta")
    assert sparse.matmul(w, torch.empty(3, 64, device="meta")).shape == (3, 16)


def meta(*shape):
    return torch.empty(*shape, device="meta")


WRONG = {
    "no bandwidth": (lambda: kl.run_kernel(GAUSSIAN, meta(5, 3), meta(4, 3)), "bandwidth"),
    "p": (lambda: kl.cdist(meta(5, 3), meta(4, 3), p=-1.0), "p must be"),
    "shapes": (lambda: kl.cdist(meta(5, 3), meta(4, 2)), "x1 and x2"),
    "out": (lambda: kl.run_kernel(GAUSSIAN, meta(5, 3), meta(4, 3), out=meta(5), **WIDTH), "out"),
    "k": (lambda: kl.kernel_topk(GAUSSIAN, meta(5, 3), meta(4, 3), 9, **WIDTH), "k must be"),
    "devices": (lambda: kl.cdist(meta(5, 3), torch.rand(4, 3)), "x1 and x2 must be on one device"),
    "cg": (lambda: linalg.conjugate_gradient(torch.clone, meta(5)), "b must have values"),
    "nystrom": (
        lambda: linalg.nystrom(GAUSSIAN, meta(5, 3), 2, regularization=1.0, **WIDTH),
        "x must have values",
    ),
    "check_errors": (lambda: linalg.eigh(meta(4, 4), check_errors=True), "check_errors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_of_meta_tensors_too(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()

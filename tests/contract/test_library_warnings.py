"""A compiled call says nothing: what Dynamo traces of descriptors and calls is what it knows."""

import warnings

import pytest
import torch

import kernlib as kl

X, WEIGHT = torch.rand(10, 6), torch.ones(1, 4, 6, 1)
CUSTOM = kl.Custom("tanh(v)")  # parsed once, by a cache of which Dynamo warns where it traces it
MATRIX = kl.sparse.compress(torch.eye(6))

CALLS = {
    "laplace_l1": lambda x: kl.run_kernel(kl.laplace_l1(), x, x, bandwidth=2.0),
    "gaussian": lambda x: kl.run_kernel(kl.gaussian(), x, x, bandwidth=2.0),
    "matern52": lambda x: kl.run_kernel(kl.matern52(), x, x, bandwidth=2.0),
    "distance": lambda x: kl.run_kernel(kl.p_distance(), x, x, p=1.5),
    "symmetric": lambda x: kl.run_kernel(kl.gaussian(symmetric=True), x, bandwidth=2.0),
    "laplace_pq": lambda x: kl.run_kernel(kl.laplace_pq(), x, x, p=1.5, q=0.9, bandwidth=2.0),
    "polynomial": lambda x: kl.run_kernel(kl.polynomial(), x, x, gamma=1.0, offset=1.0),
    "Custom": lambda x: kl.run_kernel(kl.l1_distance(epilogue=CUSTOM), x, x),
    "cdist": lambda x: kl.cdist(x, x),
    "kernel_sum": lambda x: kl.kernel_sum(kl.gaussian(), x, x, bandwidth=2.0),
    "kernel_topk": lambda x: kl.kernel_topk(kl.l1_distance(), x, x, 3),
    "KroneckerSparse": lambda x: kl.run_kernel(
        kl.KroneckerSparse(1, 4, 6, 1, epilogue=kl.LeakyRelu(0.1)), x, WEIGHT
    ),
    "sparse": lambda x: kl.sparse.matmul(MATRIX, x, epilogue=kl.Gelu()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_warns_of_nothing(name):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(CALLS[name], backend="eager", fullgraph=True)(X)
    expected = CALLS[name](X)
    torch.testing.assert_close(found, expected)

"""What products with compressed matrices promise beyond every operation's
``tests/contract/library``: whom vmap maps, and where a matrix is."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernlib.families.sparse import operation, operators
from kernlib.runtime import expressions
from kernlib.sparse import compress
from tests.families.sparse.library_cases import DENSE, GAIN, GELU, PLAIN, SCALED, TURNED, B, W, X


def test_no_matrix_is_made_of_fake_tensors():
    """Outside of their mode too."""
    with FakeTensorMode():
        dense = torch.empty(2, 39)
    with pytest.raises(ValueError, match="no values here to compress"):
        compress(dense, "bitmap")


def test_the_operators_vmap():
    """Which eager calls on a GPU go by; on the CPU torch maps the reference."""

    def whole(x, bias, gain):
        given = {"bias": bias, "gain": gain, "shift": 0.5}
        return operators.called(SCALED, W, x, given)

    def product(x, bias):
        return operators.product(x, operators.Matrix.of(TURNED), bias, False, False)

    def turned(y):
        return operators.product(y, operators.Matrix.of(TURNED), None, True, False)

    def scaled(x, bias, gain):
        return torch.nn.functional.silu(x @ DENSE.t() + bias) * gain + 0.5

    each, gains, y = torch.randn(6, 24), torch.randn(6), torch.randn(6, 24)
    many = torch.randn(2, 40, 6)
    for ours, theirs, dims, tensors in (
        (whole, scaled, (0, None, None), (X, B, GAIN)),
        (whole, scaled, (0, 0, 0), (X, each, gains)),
        (whole, scaled, (None, None, 0), (X, B, gains)),
        (whole, scaled, (2, 1, None), (many, each.t().contiguous(), GAIN)),
        (product, lambda x, b: x @ DENSE.t() + b, (0, None), (X, B)),
        (product, lambda x, b: x @ DENSE.t() + b, (None, 0), (X, each)),
        (product, lambda x, b: x @ DENSE.t() + b, (2, 0), (many, each)),
        (turned, lambda y: y @ DENSE, (0,), (y,)),
    ):
        given = [t.clone().requires_grad_() for t in tensors]
        found = torch.vmap(ours, in_dims=dims)(*given)
        wanted = torch.vmap(theirs, in_dims=dims)(*given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        grads = [torch.autograd.grad(y.square().sum(), given) for y in (found, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_no_matrix_is_mapped_over():
    data = torch.stack((W.operands[0], W.operands[0]))

    def call(data):
        return operators.whole.overload(
            X, [data, W.operands[1]], [], W.layout, "", PLAIN.text, "", [], [], False
        )

    with pytest.raises(RuntimeError, match="no compressed matrix"):
        torch.vmap(call)(data)


def test_a_matrix_stays_where_it_is_in_cuda_graphs_of_compiled_code():
    for w in (W, TURNED.transpose(), W.to("meta"), copy.deepcopy(W)):
        for tensor in w.operands:
            assert tensor._dynamo_static_input_type == "unguarded"
    assert not any(t.__dict__ for t in W.state()[1].values())


def near(found: torch.Tensor, wanted: torch.Tensor, ulps: int) -> bool:
    """Within so many units in the last place of the largest, in float32."""
    return (found - wanted).abs().max() <= ulps * 2**-23 * wanted.abs().max()


@pytest.mark.parametrize("w", [W, TURNED], ids=["no transpose", "a transpose"])
def test_eager_functions_are_the_operators(w):
    """Which record eager calls on a GPU; here on CPU tensors. With a known transpose they are two
    routes through BLAS, which on some CPUs sum in another order: 2 units in the last place were
    seen. Both are as near to float64."""

    def exact(descriptor, w, x, given):
        return expressions.apply(descriptor.epilogue, x @ DENSE.double().mT, given)

    def eager(descriptor, w, x, given):
        return operation.RECORDING.result((descriptor, (w, x), None, given))

    def recorded(descriptor, w, x, given):
        return operators.recorded(descriptor, (w, x), given)

    for descriptor in (PLAIN, GELU, SCALED):
        values = {n: v for n, v in (("bias", B), ("gain", GAIN), ("shift", GAIN * 2))}

        def results(run, dtype=torch.float32, descriptor=descriptor, values=values):
            names = descriptor.parameters
            given = {n: values[n].to(dtype, copy=True).requires_grad_() for n in names}
            tensors = [X.to(dtype, copy=True).requires_grad_(), *given.values()]
            y = run(descriptor, w, tensors[0], given)
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            twice = torch.autograd.grad(sum(t.square().sum() for t in first), tensors)
            return [t.detach() for t in (y, *first, *twice)]

        found, wanted = results(eager), results(recorded)
        for ours, theirs, true in zip(found, wanted, results(exact, torch.float64), strict=True):
            assert near(ours, theirs, 4) and near(ours, true, 8) and near(theirs, true, 8)

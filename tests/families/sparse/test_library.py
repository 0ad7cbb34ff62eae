"""Compiled, exported and traced products with compressed matrices on CPU tensors give the eager
result."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
import kernlib.families.sparse.library
from kernlib.families.sparse import gradients as autograd
from kernlib.families.sparse import operators
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.runtime import expressions
from kernlib.sparse import SparseMatrix, compress, matmul
from tests.families.sparse.cases import BIASED, FORMATS, made, random
from tests.support.dynamo_messages import said

torch.manual_seed(5)
PLAIN = SparseMatmul()
GELU = SparseMatmul((kl.Bias(), kl.Gelu()))
SCALED = SparseMatmul((kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift"))))
DENSE = random(24, 40)
W = compress(DENSE, "bitmap")
TURNED = compress(DENSE, "bitmap")  # whose transpose is known
TURNED.transpose()
X, B, GAIN = torch.randn(6, 40), torch.randn(24), torch.tensor(1.5)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def targets(graph_module) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


def into(x):
    """Written, and used again."""
    out = torch.full((6, 24), 2.0)
    first = kl.run_kernel(BIASED, W, x, bias=B, out=out)
    return out + 1, first * 2


def of_layout(x):
    """A matrix that the compiled function makes of tensors, as a layer does whose buffers somebody
    has put others in place of."""
    return matmul(SparseMatrix.from_layout(W.layout, (W.operands[0], W.operands[1])), x, B)


CALLS = {
    "plain": lambda x: kl.run_kernel(PLAIN, W, x),
    "epilogue": lambda x: kl.run_kernel(GELU, W, x, bias=B),
    "matmul": lambda x: matmul(W, x, B),
    "matmul without a bias": lambda x: matmul(W, x),
    "matmul with an epilogue": lambda x: matmul(W, x, B, kl.Gelu()),
    "matmul with a parameter": lambda x: matmul(W, x, epilogue=(kl.Scale(),), scale=2.0),
    "further dimensions": lambda x: matmul(W, x.view(2, 1, 3, 40), B),
    "one row": lambda x: matmul(W, x[0], B),
    "numbers": lambda x: kl.run_kernel(SCALED, W, x, bias=B, gain=2, shift=0.5),
    "tensors": lambda x: kl.run_kernel(SCALED, W, x, bias=B, gain=GAIN, shift=GAIN * 2),
    "a known transpose": lambda x: matmul(TURNED, x, B),
    "the transpose": lambda x: matmul(TURNED.transpose(), matmul(TURNED, x, B)),
    "a layout": of_layout,
    "out": into,
}


@pytest.mark.parametrize(
    ("case", "recording"), [(c, r) for c in CALLS for r in (False, True) if (c, r) != ("out", True)]
)
def test_a_compiled_call_is_the_eager_one(case, recording):
    found = compiled(CALLS[case])(X.clone().requires_grad_(recording))
    torch.testing.assert_close(found, CALLS[case](X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_call_of_each_format(format):
    w = compress(DENSE, format)
    found = compiled(lambda x, bias: matmul(w, x, bias))(X, B)
    torch.testing.assert_close(found, matmul(w, X, B))


@pytest.mark.parametrize("w", [W, TURNED], ids=["no transpose", "a transpose"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_trains(dynamic, w):
    def call(w, x, bias, gain):
        y = matmul(w, x, bias, kl.Gelu())
        scaled = kl.run_kernel(SCALED, w, x, bias=bias, gain=gain, shift=1.0)
        return y.square().sum() + scaled.sum()

    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(call, backend=counter, dynamic=dynamic)
    for rows in (7, 9, 31) if dynamic else (6,):
        tensors = [torch.randn(rows, 40), B.clone(), GAIN.clone()]
        for tensor in tensors:
            tensor.requires_grad_()
        found = torch.autograd.grad(run(w, *tensors), tensors)
        wanted = torch.autograd.grad(call(w, *tensors), tensors)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_another_matrix_makes_a_new_program_and_the_right_one():
    run = compiled(lambda w, x: matmul(w, x))
    for rows, density in ((24, 0.5), (24, 0.3), (16, 0.1)):
        dense, w = made(rows, 40, density=density)
        torch.testing.assert_close(run(w, X), X @ dense.t())


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("recording", [False, True])
def test_autocast_is_that_of_eager_calls(where, recording):
    half = compress(DENSE.half(), "bitmap")

    def call(x):
        return matmul(half, x, B)

    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    x = X.clone().requires_grad_(recording)
    if where == "inside":
        found = compiled(cast)(x)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled(call)(x)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, cast(X), rtol=1e-3, atol=1e-3)


WRONG = {
    "features": (lambda x: matmul(W, x[:, 1:]), r"x must be \(\.\.\., 40\)"),
    "dtypes": (lambda x: matmul(W, x.half()), "must have one dtype"),
    "bias": (lambda x: matmul(W, x, B[1:]), "bias must have shape"),
    "missing": (lambda x: kl.run_kernel(BIASED, W, x), "needs bias"),
    "unknown": (lambda x: kl.run_kernel(PLAIN, W, x, gain=1), "gain is no argument"),
    "operands": (lambda x: kl.run_kernel(PLAIN, W, x, x), "takes w and x, got 3"),
    "no matrix": (lambda x: kl.run_kernel(PLAIN, x, x), "w must be a SparseMatrix"),
    "a list": (lambda x: kl.run_kernel(PLAIN, W, [1.0]), "x must be a tensor"),
    "out": (lambda x: matmul(W, x, out=X), "out must have shape"),
    "out's dtype": (lambda x: matmul(W, x, out=torch.ones(6, 24).int()), "out must be torch.float"),
    "nan": (
        lambda x: kl.run_kernel(SCALED, W, x, bias=B, gain=float("nan"), shift=1),
        "gain must be a number, got nan",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_as_in_eager_calls(case):
    call, message = WRONG[case]
    for run in (call, compiled(call)):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=said(message)):
            run(X)


def test_out_takes_no_result_whose_gradient_is_recorded():
    run = compiled(lambda x, out: matmul(W, x, out=out))
    x, out = X.clone().requires_grad_(), torch.empty(6, 24)
    with pytest.raises(RuntimeError, match=said("out takes no result whose gradient")):
        run(x, out)
    with torch.no_grad():
        assert torch.equal(run(x, out), matmul(W, X))


# Export.


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.bias = W, torch.nn.Parameter(B.clone())

    def forward(self, x):
        return matmul(self.w, x, self.bias, kl.Gelu()) + 1


def exported(strict, dynamic):
    sizes = ({0: torch.export.Dim("n", min=2)},) if dynamic else None
    return torch.export.export(Layer(), (X,), dynamic_shapes=sizes, strict=strict)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_the_eager_one(strict, dynamic):
    program = exported(strict, dynamic)
    assert "kernlib.sparse_matmul.default" in targets(program.graph_module)
    for rows in (6, 2, 31) if dynamic else (6,):
        x = torch.randn(rows, 40)
        for each in (program, program.run_decompositions()):
            torch.testing.assert_close(each.module()(x), Layer()(x), rtol=1e-6, atol=1e-6)


CHILD = """
import sys, torch
import kernlib
kernlib.register_operators()
program = torch.export.load(sys.argv[1]).module()
x, wanted = torch.load(sys.argv[2])
print(torch.allclose(program(x), wanted))
"""


@pytest.mark.slow
def test_a_saved_program_runs_in_another_process(tmp_path):
    x = torch.randn(11, 40)
    torch.export.save(exported(False, True), tmp_path / "program.pt2")
    torch.save((x, Layer()(x).detach()), tmp_path / "wanted.pt")
    files = [str(tmp_path / name) for name in ("program.pt2", "wanted.pt")]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, *files], capture_output=True, text=True, env=os.environ
    )
    assert run.stdout == "True\n", run.stderr


# Fake tensors, make_fx, other modes and transforms.


@pytest.mark.parametrize("leading", [(), (6,), (0,), (2, 3), (1, 2, 2)])
def test_a_fake_call_has_the_shape_of_the_real_one(leading):
    x = torch.ones(*leading, 40)
    wanted = matmul(W, x, B, kl.Gelu())
    for recording in (False, True):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in (x, B)]
            fakes[0].requires_grad_(recording)
            w = SparseMatrix.from_layout(W.layout, [mode.from_tensor(t) for t in W.operands])
            found = matmul(w, fakes[0], fakes[1], kl.Gelu())
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        assert (found.dtype, found.device) == (wanted.dtype, wanted.device)
        assert found.requires_grad == recording


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_have_no_memory_to_read(device):
    """Outside of their mode too."""
    with FakeTensorMode() as mode, torch.device(device):
        x, narrow, bias = torch.empty(2, 3, 40), torch.empty(2, 39), torch.empty(24)
        fakes = [torch.empty(t.shape, dtype=t.dtype) for t in W.operands]
        w = SparseMatrix.from_layout(W.layout, fakes)
    found = matmul(w, x, bias)
    assert (found.shape, found.dtype, found.fake_mode) == ((2, 3, 24), torch.float32, mode)
    assert found.device == x.device
    with pytest.raises(ValueError, match="x must be"):
        matmul(w, narrow, bias)
    with pytest.raises(ValueError, match="no values here to compress"):
        compress(narrow, "bitmap")


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(tracing, recording):
    def call(x, data, offsets, bias):
        w = SparseMatrix.from_layout(W.layout, (data, offsets))
        return kl.run_kernel(GELU, w, x, bias=bias)

    tensors = X.clone().requires_grad_(recording), *W.operands, B
    graph_module = make_fx(call, tracing_mode=tracing)(*tensors)
    product = "_product" if recording else ""
    assert f"kernlib.sparse_matmul{product}.default" in targets(graph_module)
    given = torch.randn(6, 40), *W.operands, B
    torch.testing.assert_close(graph_module(*given), call(*given), rtol=1e-6, atol=1e-6)


def test_other_modes_see_the_operator():
    seen = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Listening():
        found = matmul(W, X, B)
    assert torch.equal(found, matmul(W, X, B))
    assert torch.ops.kernlib.sparse_matmul.default in seen


def test_functional_tensors_are_tensors():
    call = torch.func.functionalize(lambda x: matmul(W, x, B))
    assert torch.equal(call(X), matmul(W, X, B))


def test_the_operators_vmap():
    """Which eager calls on a GPU go by; on the CPU torch maps the reference."""

    def whole(x, bias, gain):
        given = {"bias": bias, "gain": gain, "shift": 0.5}
        return operators.called(SCALED, W, x, given)

    def product(x, bias):
        return operators.product(x, *operators.listed(TURNED), bias, False, False)

    def turned(y):
        return operators.product(y, *operators.listed(TURNED), None, True, False)

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


def test_a_compiled_vmap():
    mapped = torch.vmap(lambda x: matmul(W, x, B))
    torch.testing.assert_close(compiled(mapped)(X), matmul(W, X, B))


def test_no_matrix_is_mapped_over():
    data = torch.stack((W.operands[0], W.operands[0]))

    def call(data):
        return operators.whole(
            X, [data, W.operands[1]], [], W.layout, "", PLAIN.text, "", [], [], False
        )

    with pytest.raises(RuntimeError, match="no compressed matrix"):
        torch.vmap(call)(data)


# torch's own checks.


OPCHECK = {
    "plain": (X, PLAIN, "", [], []),
    "epilogue": (X, GELU, "bias", [], [B]),
    "mixed": (X.view(2, 3, 40), SCALED, "shift bias gain", [0.5], [B, GAIN]),
    "strided": (X.t().contiguous().t(), GELU, "bias", [], [B.expand(24)]),
    "one": (X[0], PLAIN, "", [], []),
}


@pytest.mark.parametrize("w", [W, TURNED], ids=["no transpose", "a transpose"])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("case", OPCHECK)
def test_torchs_own_checks_of_operators_pass(case, recording, w):
    x, descriptor, names, numbers, tensors = OPCHECK[case]
    x = x.detach().requires_grad_(recording)
    tensors = [t.detach().requires_grad_(recording) for t in tensors]
    arguments = (x, *operators.listed(w), descriptor.text, names, numbers, tensors, False)
    opcheck(operators.whole, arguments)


@pytest.mark.parametrize("w", [W, TURNED], ids=["no transpose", "a transpose"])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_torchs_own_checks_of_the_products_operator_pass(turned, recording, w):
    x = torch.randn(2, 3, 24 if turned else 40).requires_grad_(recording)
    bias = torch.randn(40 if turned else 24).requires_grad_(recording)
    for added in (None,) if turned else (None, bias):
        opcheck(operators.product, (x, *operators.listed(w), added, turned, False))


@pytest.mark.filterwarnings("ignore:Input #")  # that they are not float64
@pytest.mark.parametrize("known", [False, True])
def test_gradients_of_the_operators_are_those_of_numbers(known):
    """In float32: differences are coarse, and these functions are linear."""
    _, w = made(4, 5)
    if known:
        w.transpose()

    def product(x, *added, turned=False):
        return operators.product(x, *operators.listed(w), *(added or (None,)), turned, False)

    options = {"eps": 0.1, "atol": 1e-2, "rtol": 1e-2}
    x, bias, y = (torch.randn(n, requires_grad=True) for n in (5, 4, 4))
    for tensors in ((x,), (x, bias)):
        assert torch.autograd.gradcheck(product, tensors, **options)
        assert torch.autograd.gradgradcheck(product, tensors, **options)
    assert torch.autograd.gradcheck(lambda y: product(y, turned=True), (y,), **options)


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

        found, wanted = results(autograd.recorded), results(operators.recorded)
        for ours, theirs, true in zip(found, wanted, results(exact, torch.float64), strict=True):
            assert near(ours, theirs, 4) and near(ours, true, 8) and near(theirs, true, 8)


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
def test_a_traced_call_is_recorded():
    def call(x):
        return matmul(W, x, B) + 1

    traced = torch.jit.trace(call, (X,))
    x = torch.randn(6, 40)
    assert torch.equal(traced(x), call(x))


EAGER = """
import sys, torch
import kernlib as kl
from kernlib.sparse import compress, matmul
w = compress(torch.eye(40), "bitmap")
x, bias = torch.ones(6, 40, requires_grad=True), torch.ones(40, requires_grad=True)
matmul(w, x, bias, kl.Gelu()).sum().backward()
here = "kernlib.families"
names = (f"{here}.sparse.library", f"{here}.kronecker_sparse.operation", "torch._dynamo")
print([name for name in names if name in sys.modules])
"""


def test_an_eager_call_loads_nothing_that_compiles():
    run = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def test_none_stands_for_an_empty_list():
    """As AOTInductor passes it."""
    found = operators._whole(
        X, list(W.operands), None, W.layout, "", PLAIN.text, "", None, None, False
    )
    assert torch.equal(found, kl.run_kernel(PLAIN, W, X))


def test_debug_writes_events_of_compiled_calls_too(capsys):
    found = compiled(lambda x: kl.run_kernel(BIASED, W, x, bias=B, debug=True))(X)
    assert torch.equal(found, kl.run_kernel(BIASED, W, X, bias=B))

"""Compiled, exported and traced Kronecker-sparse calls on CPU tensors give the eager result."""

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
import kernlib.families.kronecker_sparse.library
from tests.support.dynamo_messages import said

PATTERN = (2, 3, 5, 4)
EPILOGUE = (kl.Bias(), kl.Gelu())
FIRST = kl.KroneckerSparse(*PATTERN, epilogue=EPILOGUE)
LAST = kl.KroneckerSparse(*PATTERN, batch_last=True, epilogue=EPILOGUE)
PLAIN = kl.KroneckerSparse(*PATTERN)
SCALED = kl.KroneckerSparse(
    *PATTERN, epilogue=(kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift")))
)
SECOND = kl.KroneckerSparse(3, 2, 8, 1, epilogue=(kl.Bias("b2"), kl.Relu()))
CHAIN = kl.KroneckerSparseChain((FIRST, SECOND))


def values(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + len(shape) + shape[0])
    return torch.randn(shape, generator=generator).requires_grad_(grad)


X, W, B, W2, B2 = values(6, 40), values(*PATTERN), values(24), values(3, 2, 8, 1), values(6)
GAIN = torch.tensor(1.5)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def targets(graph_module) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


def into(descriptor, x, **arguments):
    """Written, and used again."""
    out = torch.full((6, 24), 2.0)
    first = kl.run_kernel(descriptor, x, W, out=out, **arguments)
    return out + 1, first * 2


def inside(x):
    """A descriptor that the compiled function makes."""
    made = kl.KroneckerSparse(2, 3, 5, 4, epilogue=(kl.Bias(), kl.Gelu()))
    return kl.run_kernel(made, x, W, bias=B)


CALLS = {
    "plain": lambda x: kl.run_kernel(PLAIN, x, W),
    "epilogue": lambda x: kl.run_kernel(FIRST, x, W, bias=B),
    "further dimensions": lambda x: kl.run_kernel(FIRST, x.view(2, 1, 3, 40), W, bias=B),
    "one row": lambda x: kl.run_kernel(FIRST, x[0], W, bias=B),
    "batch last": lambda x: kl.run_kernel(LAST, x.T, W, bias=B),
    "chain": lambda x: kl.run_kernel(CHAIN, x, W, W2, bias=B, b2=B2),
    "two of one kind": lambda x: kl.run_kernel(
        kl.KroneckerSparse(5, 8, 4, 2), kl.run_kernel(kl.KroneckerSparse(5, 4, 4, 2), x, ONE), TWO
    ),
    "numbers": lambda x: kl.run_kernel(SCALED, x, W, bias=B, gain=2, shift=0.5),
    "tensors": lambda x: kl.run_kernel(SCALED, x, W, bias=B, gain=GAIN, shift=GAIN * 2),
    "tf32": lambda x: kl.run_kernel(PLAIN.replace(precision="tf32"), x, W),
    "out": lambda x: into(FIRST, x, bias=B),
    "inside": inside,
}
ONE, TWO = values(5, 4, 4, 2), values(5, 8, 4, 2)


@pytest.mark.parametrize(
    ("case", "recording"), [(c, r) for c in CALLS for r in (False, True) if (c, r) != ("out", True)]
)
def test_row_20_a_compiled_call_is_the_eager_one(case, recording):
    found = compiled(CALLS[case])(X.clone().requires_grad_(recording))
    wanted = CALLS[case](X)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_row_20_a_compiled_call_trains(dynamic, batch_last):
    descriptor = LAST if batch_last else FIRST

    def call(x, weight, bias, gain):
        y = kl.run_kernel(descriptor, x, weight, bias=bias)
        return kl.run_kernel(SCALED, x if not batch_last else x.mT, weight, bias=bias, gain=gain,
                             shift=1.0).sum() + y.square().sum()  # fmt: skip

    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(call, backend=counter, dynamic=dynamic)
    for rows in (7, 9, 11) if dynamic else (6,):  # a 4 would count as that of the pattern
        x = values(40, rows, grad=True) if batch_last else values(rows, 40, grad=True)
        tensors = x, values(*PATTERN, grad=True), values(24, grad=True), GAIN.clone()
        tensors[3].requires_grad_()
        found = torch.autograd.grad(run(*tensors), tensors)
        wanted = torch.autograd.grad(call(*tensors), tensors)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_sizes_that_differ_make_a_new_program_and_the_right_one():
    def call(x, weight, factor):
        return kl.run_kernel(factor, x, weight)

    run = compiled(call)
    for pattern in (PATTERN, (2, 3, 4, 5), (4, 3, 5, 2)):
        factor = kl.KroneckerSparse(*pattern)
        x, weight = values(3, factor.in_features), values(*pattern)
        assert torch.equal(run(x, weight, factor), call(x, weight, factor))


def test_numbers_that_change_are_seen():
    run = compiled(lambda x, gain: kl.run_kernel(SCALED, x, W, bias=B, gain=gain, shift=1))
    for gain in (1.5, 2.5, 3.5):
        wanted = kl.run_kernel(SCALED, X, W, bias=B, gain=gain, shift=1)
        torch.testing.assert_close(run(X, gain), wanted)


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("recording", [False, True])
def test_row_17_autocast_is_that_of_eager_calls(where, recording):
    def call(x):
        return kl.run_kernel(CHAIN, x, W, W2, bias=B, b2=B2)

    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    x = X.clone().requires_grad_(recording)
    if where == "inside":
        found = compiled(cast)(x)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled(call)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, cast(X), rtol=2e-2, atol=2e-2)


WRONG = {
    "features": (lambda x: kl.run_kernel(FIRST, x[:, 1:], W, bias=B), r"x must be \(\.\.\., 40\)"),
    "weight": (lambda x: kl.run_kernel(FIRST, x, W.mT, bias=B), "weight must have shape"),
    "dtypes": (lambda x: kl.run_kernel(FIRST, x, W.double(), bias=B), "must have one dtype"),
    "bias": (lambda x: kl.run_kernel(FIRST, x, W, bias=B[1:]), "bias must have shape"),
    "missing": (lambda x: kl.run_kernel(FIRST, x, W), "needs bias"),
    "unknown": (lambda x: kl.run_kernel(FIRST, x, W, bias=B, gain=1), "gain is no argument"),
    "weights": (lambda x: kl.run_kernel(CHAIN, x, W, bias=B, b2=B2), "takes x and 2 weights"),
    "a list": (lambda x: kl.run_kernel(PLAIN, x, [1.0]), "weight must be a tensor"),
    "out": (lambda x: kl.run_kernel(PLAIN, x, W, out=X), "out must have shape"),
    "out's dtype": (
        lambda x: kl.run_kernel(PLAIN, x, W, out=torch.ones(6, 24).int()),
        "out must be torch.float32",
    ),
    "number": (
        lambda x: kl.run_kernel(SCALED, x, W, bias=B, gain="1", shift=1),
        "gain must be a real number",
    ),
    "nan": (
        lambda x: kl.run_kernel(SCALED, x, W, bias=B, gain=float("nan"), shift=1),
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
    run = compiled(lambda x, out: kl.run_kernel(PLAIN, x, W, out=out))
    x, out = X.clone().requires_grad_(), torch.empty(6, 24)
    with pytest.raises(RuntimeError, match=said("out takes no result whose gradient")):
        run(x, out)
    with torch.no_grad():
        assert torch.equal(run(x, out), kl.run_kernel(PLAIN, X, W))


# Export.


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(W.clone()), torch.nn.Parameter(B.clone())

    def forward(self, x):
        return kl.run_kernel(FIRST, x, self.weight, bias=self.bias) + 1


def exported(strict, dynamic):
    sizes = ({0: torch.export.Dim("n", min=2)},) if dynamic else None
    return torch.export.export(Layer(), (X,), dynamic_shapes=sizes, strict=strict)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_the_eager_one(strict, dynamic):
    program = exported(strict, dynamic)
    assert "kernlib.kronecker_sparse.default" in targets(program.graph_module)
    for rows in (6, 2, 11) if dynamic else (6,):
        x = values(rows, 40, seed=3)
        wanted = Layer()(x)
        for made in (program, program.run_decompositions()):
            torch.testing.assert_close(made.module()(x), wanted, rtol=1e-6, atol=1e-6)


def test_an_exported_program_trains():
    module, layer = exported(False, False).module(), Layer()
    module(X).sum().backward()
    layer(X).sum().backward()
    found, wanted = (dict(m.named_parameters()) for m in (module, layer))
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[name].grad, wanted[name].grad)


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
    x = values(11, 40, seed=3)
    torch.export.save(exported(False, True), tmp_path / "program.pt2")
    torch.save((x, Layer()(x).detach()), tmp_path / "wanted.pt")
    files = [str(tmp_path / name) for name in ("program.pt2", "wanted.pt")]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, *files], capture_output=True, text=True, env=os.environ
    )
    assert run.stdout == "True\n", run.stderr


# Fake tensors, make_fx, other modes and transforms.


@pytest.mark.parametrize("batch", [(), (6,), (0,), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize("batch_last", [False, True])
def test_a_fake_call_has_the_shape_of_the_real_one(batch_last, batch):
    descriptor = LAST if batch_last else FIRST
    x = torch.ones((40, *batch) if batch_last else (*batch, 40))
    wanted = kl.run_kernel(descriptor, x, W, bias=B)
    for recording in (False, True):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in (x, W, B)]
            fakes[1].requires_grad_(recording)
            found = kl.run_kernel(descriptor, *fakes[:2], bias=fakes[2])
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        assert (found.dtype, found.device) == (wanted.dtype, wanted.device)
        assert found.requires_grad == recording


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("device", "recording"), [("cpu", False), ("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("within", [True, False])
def test_fake_tensors_have_no_memory_to_read(within, device, recording):
    with FakeTensorMode() as mode, torch.device(device):
        x, weight = torch.empty(2, 3, 40).half(), torch.empty(PATTERN).half()
        bias, narrow = torch.empty(24).half(), torch.empty(2, 39).half()
        weight.requires_grad_(recording)
        if within:
            found = kl.run_kernel(FIRST, x, weight, bias=bias)
    if not within:
        found = kl.run_kernel(FIRST, x, weight, bias=bias)
    assert (found.shape, found.dtype, found.fake_mode) == ((2, 3, 24), torch.half, mode)
    assert found.device == x.device and found.requires_grad == recording
    with pytest.raises(ValueError, match="x must be"):
        kl.run_kernel(FIRST, narrow, weight, bias=bias)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(tracing, recording):
    def call(x, weight, bias):
        return kl.run_kernel(FIRST, x, weight, bias=bias)

    tensors = X, W.clone().requires_grad_(recording), B
    graph_module = make_fx(call, tracing_mode=tracing)(*tensors)
    wanted = "kernlib.kronecker_sparse_product.default" if recording else (
        "kernlib.kronecker_sparse.default")  # fmt: skip
    assert wanted in targets(graph_module)
    x = values(6, 40, seed=5)
    torch.testing.assert_close(graph_module(x, W, B), call(x, W, B), rtol=1e-6, atol=1e-6)


def test_other_modes_see_the_operator():
    seen = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Listening():
        found = kl.run_kernel(FIRST, X, W, bias=B)
    assert torch.equal(found, kl.run_kernel(FIRST, X, W, bias=B))
    assert torch.ops.kernlib.kronecker_sparse.default in seen


def test_functional_tensors_are_tensors():
    call = torch.func.functionalize(lambda x: kl.run_kernel(FIRST, x, W, bias=B))
    assert torch.equal(call(X), kl.run_kernel(FIRST, X, W, bias=B))


def test_a_compiled_vmap_is_refused():
    mapped = torch.vmap(lambda x: kl.run_kernel(FIRST, x, W, bias=B))
    torch.testing.assert_close(mapped(X), kl.run_kernel(FIRST, X, W, bias=B))
    with pytest.raises(RuntimeError, match=r"(?i)batching rule not implemented for kernlib"):
        compiled(mapped)(X)


OPCHECK = {
    "plain": (X, W, PLAIN, "", [], []),
    "epilogue": (X, W, FIRST, "bias", [], [B]),
    "batch last": (X.T, W, LAST, "bias", [], [B]),
    "mixed": (X.view(2, 3, 40), W, SCALED, "shift bias gain", [0.5], [B, GAIN]),
    "strided": (X.T.contiguous().T, W.mT.contiguous().mT, FIRST, "bias", [], [B.expand(24)]),
}


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("case", OPCHECK)
def test_row_20_torchs_own_checks_of_operators_pass(case, recording):
    x, weight, descriptor, names, numbers, tensors = OPCHECK[case]
    x, weight = (t.detach().requires_grad_(recording) for t in (x, weight))
    tensors = [t.detach().requires_grad_(recording) for t in tensors]
    arguments = (x, weight, descriptor.text, names, numbers, tensors, False)
    opcheck(torch.ops.kernlib.kronecker_sparse.default, arguments)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("batch", [(6,), (2, 3), ()])
@pytest.mark.parametrize("batch_last", [False, True])
def test_row_20_torchs_own_checks_of_the_gradients_operators_pass(batch_last, batch, recording):
    x = values(40, *batch) if batch_last else values(*batch, 40)
    grad = values(24, *batch) if batch_last else values(*batch, 24)
    x, grad, weight, bias = (t.detach().requires_grad_(recording) for t in (x, grad, W, B))
    for added in (bias, None):
        arguments = (x, weight, added, batch_last, None, False)
        opcheck(torch.ops.kernlib.kronecker_sparse_product.default, arguments)
    arguments = (grad, x, list(PATTERN), batch_last, "tf32", False)
    opcheck(torch.ops.kernlib.kronecker_sparse_weight_gradient.default, arguments)


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
def test_a_traced_call_is_recorded():
    def call(x):
        return kl.run_kernel(FIRST, x, W, bias=B) + 1

    traced = torch.jit.trace(call, (X,))
    x = values(6, 40, seed=3)
    assert torch.equal(traced(x), call(x))


EAGER = """
import sys, torch
import kernlib as kl
layer = kl.KroneckerSparse(2, 3, 5, 4, epilogue=(kl.Bias(), kl.Gelu()))
tensors = [torch.ones(s, requires_grad=True) for s in ((6, 40), (2, 3, 5, 4), (24,))]
kl.run_kernel(layer, *tensors[:2], bias=tensors[2]).sum().backward()
from kernlib.families.kronecker_sparse import operators
operators.recorded(layer, *tensors[:2], {"bias": tensors[2]}).sum().backward()
here = "kernlib.families"
names = (f"{here}.kronecker_sparse.library", f"{here}.pairwise.operation", "torch._dynamo")
print([name for name in names if name in sys.modules])
"""


def test_an_eager_call_loads_nothing_that_compiles():
    run = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def test_none_stands_for_an_empty_list():
    """As AOTInductor passes it."""
    operators = kernlib.families.kronecker_sparse.operators
    found = operators._whole(X, W, PLAIN.text, "", None, None, False)
    assert torch.equal(found, kl.run_kernel(PLAIN, X, W))


def test_debug_writes_events_of_compiled_calls_too(capsys):
    found = compiled(lambda x: kl.run_kernel(FIRST, x, W, bias=B, debug=True))(X)
    assert torch.equal(found, kl.run_kernel(FIRST, X, W, bias=B))

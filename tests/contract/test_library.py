"""Compiled, exported and traced calls on CPU tensors give the eager result through one operator."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
import kernlib.families.pairwise.library

M, N, K, L = 5, 7, 9, 3
LAPLACE, SYMMETRIC, NORM = kl.laplace_l1(), kl.gaussian(symmetric=True), kl.p_distance()
PQ = kl.laplace_pq()
CUSTOM = kl.l1_distance(epilogue=kl.Custom("tanh(gain * v) + shift", ("gain", "shift")))


def points(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + 100 * len(shape) + shape[-2])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


A, B, BATCH_A, BATCH_B = points(M, K), points(N, K), points(L, M, K), points(L, N, K)
ONE, SEVERAL = torch.tensor(2.0), torch.tensor([0.8, 1.6, 2.4])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def targets(graph_module) -> list:
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def into(descriptor, a, b, **arguments):
    """Written, added to, and used again."""
    out = torch.full((a.shape[-2], b.shape[-2]), 2.0)
    first = kl.run_kernel(descriptor, a, b, out=out, **arguments)
    kl.run_kernel(descriptor, a, b, out=first, accumulate=True, **arguments)
    return out + 1, first * 2


CALLS = {
    "float": lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=10.0),
    "int": lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=10),
    "0-d": lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=ONE),
    "(L,)": lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=SEVERAL),
    "mixed": lambda: kl.run_kernel(PQ, BATCH_A, B, q=0.8, bandwidth=SEVERAL, p=1.3),
    "p tensor": lambda: kl.run_kernel(NORM, A, BATCH_B, p=SEVERAL),
    "custom": lambda: kl.run_kernel(CUSTOM, A, B, shift=0.5, gain=SEVERAL),
    "symmetric": lambda: kl.run_kernel(SYMMETRIC, BATCH_A, bandwidth=2.0),
    "offsets": lambda: kl.run_kernel(
        LAPLACE, A, B, bandwidth=2.0, regularization=0.5, row_offset=3, col_offset=1
    ),
    "debug": lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=2.0, debug=True),
    "half": lambda: kl.run_kernel(LAPLACE, A.half(), B.half(), bandwidth=2.0),
    "double": lambda: kl.run_kernel(LAPLACE, A.double(), B.double(), bandwidth=2.0),
    "transposed": lambda: kl.run_kernel(LAPLACE, A.T.contiguous().T, B[:, ::1], bandwidth=2.0),
    "out": lambda: into(LAPLACE, A, B, bandwidth=2.0),
    "half into float": lambda: into(LAPLACE, A.half(), B.half(), bandwidth=2.0),
    "cdist": lambda: kl.cdist(A, B),
    "cdist p": lambda: kl.cdist(A, B, p=1.5),
    "cdist inf": lambda: kl.cdist(A, B, p=float("inf")),
    "cdist batches": lambda: kl.cdist(BATCH_A[:, None], BATCH_B, p=1.5),
    "cdist batch p": lambda: kl.cdist(BATCH_A[:1], B, p=SEVERAL),
    "cdist out": lambda: kl.cdist(BATCH_A[None], BATCH_B, 3, out=torch.ones(1, L, M, N)) + 1,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", CALLS)
def test_a_compiled_call_is_the_eager_one(case, backend):
    call = CALLS[case]
    torch.testing.assert_close(compiled(call, backend)(), call(), rtol=0, atol=0)


def test_the_graph_holds_one_operator_and_the_text():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module

    def call(x, y):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=2.0) + kl.run_kernel(
            SYMMETRIC, x, bandwidth=2
        )

    compiled(call, keep)(A, A)
    assert targets(graphs[0])[:2] == 2 * [torch.ops.kernlib.pairwise.default]
    assert "epilogue=(Laplace(),)" in graphs[0].code


def test_numbers_that_change_are_never_constants():
    def call(x, y, width, offset):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width, regularization=1.0, row_offset=offset)

    run = compiled(call)
    for width, offset in [(2.0, 0), (3.0, 0), (4.5, 1), (5, 2), (7, 2), (2.0, 0)]:
        assert torch.equal(run(A, B, width, offset), call(A, B, width, offset))


def test_exponents_that_change_choose_their_own_formula():
    run = compiled(lambda x, y, p: kl.cdist(x, y, p))
    for p in (2.0, 1.0, 1.5, 0.0, float("inf"), 2.5):
        assert torch.equal(run(A, B, p), kl.cdist(A, B, p)), p


def test_tensors_that_change_take_no_other_program():
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(lambda x, y, w: kl.run_kernel(LAPLACE, x, y, bandwidth=w), counter)
    for width in (0.5, 2.0, 3.0):
        wanted = kl.run_kernel(LAPLACE, A, B, bandwidth=width)
        assert torch.equal(run(A, B, torch.tensor(width)), wanted)
    assert counter.frame_count == 1


def test_a_descriptor_that_changes_takes_another_program():
    current = kl.laplace_l1()

    def call(x, y):
        return kl.run_kernel(current, x, y, bandwidth=2.0)

    run = compiled(call)
    for epilogue in (kl.Laplace(), kl.Gaussian(), kl.Matern(1.5), kl.Matern(2.5), kl.Laplace()):
        current = current.replace(epilogue=epilogue)
        assert torch.equal(run(A, B), call(A, B)), epilogue
    given = compiled(lambda d, x, y: kl.run_kernel(d, x, y, bandwidth=2.0))
    for descriptor in (kl.laplace_l1(), kl.laplace_l2(), kl.gaussian()):
        assert torch.equal(given(descriptor, A, B), kl.run_kernel(descriptor, A, B, bandwidth=2.0))


INSIDE = {
    "laplace": lambda: kl.run_kernel(kl.laplace_l1(), A, B, bandwidth=2.0),
    "symmetric": lambda: kl.run_kernel(kl.gaussian(symmetric=True), A, bandwidth=2.0),
    "polynomial": lambda: kl.run_kernel(kl.polynomial(2), A, B, gamma=0.5, offset=1.0),
    "power": lambda: kl.run_kernel(kl.laplace_pq(), A, B, p=1.3, q=0.8, bandwidth=2.0),
    "matern": lambda: kl.run_kernel(kl.matern52(), A, B, bandwidth=2.0),
    "parts": lambda: kl.run_kernel(
        kl.Pairwise(inner=kl.Square(), outer=kl.Sqrt(), epilogue=(kl.Laplace(), kl.Scale("gain"))),
        A, B, bandwidth=2.0, gain=3.0,
    ),
    "replaced": lambda: kl.run_kernel(LAPLACE.replace(symmetric=True), A, bandwidth=2.0),
    "default": lambda: kl.run_kernel(kl.Pairwise(), A, B),
}  # fmt: skip


@pytest.mark.parametrize("case", INSIDE)
def test_descriptors_may_be_built_inside(case):
    assert torch.equal(compiled(INSIDE[case])(), INSIDE[case]())


def test_an_expression_inside_breaks_the_graph_and_nothing_else():
    def call(x, y):
        custom = kl.Custom("tanh(gain * v)", ("gain",))
        return kl.run_kernel(kl.l1_distance(epilogue=custom), x, y, gain=0.5)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(call)(A, B)
    assert torch.equal(torch.compile(call, backend="aot_eager")(A, B), call(A, B))


SIZES = [(4, 6, 5), (7, 2, 8), (2, 9, 3)]


@pytest.mark.parametrize("marked", [True, False])
def test_every_size_may_be_dynamic(marked):
    counter = CompileCounterWithBackend("aot_eager")

    def call(x, y, width):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width) + kl.cdist(x, y)

    run = compiled(call, counter, dynamic=None if marked else True)
    counts = set()
    for batch, m, n in SIZES:
        x, y, width = points(batch, m, K + n), points(batch, n, K + n), torch.rand(batch) + 0.5
        if marked:
            for tensor in (x, y, width):
                for dim in range(tensor.dim()):
                    torch._dynamo.mark_dynamic(tensor, dim)
        assert torch.equal(run(x, y, width), call(x, y, width))
        counts.add(counter.frame_count)
    assert len(counts) == 1  # though dynamo may begin anew in the first call


def test_dynamic_sizes_reach_out_symmetric_and_offsets():
    def call(x, y):
        out = x.new_zeros(x.shape[0], y.shape[0])
        kl.run_kernel(LAPLACE, x, y, out=out, bandwidth=2.0, regularization=1.0,
                      row_offset=x.shape[0] - y.shape[0])  # fmt: skip
        return out, kl.run_kernel(SYMMETRIC, x, bandwidth=2.0)

    run = compiled(call, dynamic=True)
    for m, n in ((4, 6), (8, 5), (3, 3)):
        x, y = points(m, K), points(n, K)
        torch.testing.assert_close(run(x, y), call(x, y), rtol=0, atol=0)


OUTS = {
    "row": lambda: torch.full((M, N), 2.0),
    "column": lambda: torch.full((N, M), 2.0).T,
    "part": lambda: torch.full((M + 2, N + 3), 2.0)[1:-1, 2:-1],
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", OUTS)
def test_out_is_written_in_place_and_returned(layout, accumulate):
    def call(x, y, out):
        return kl.run_kernel(
            LAPLACE, x, y, out=out, accumulate=accumulate, bandwidth=2.0, regularization=1.0
        )

    out, wanted = OUTS[layout](), OUTS[layout]()
    memory, expected = (t._base if t._base is not None else t for t in (out, wanted))
    version = out._version
    found = compiled(call)(A, B, out)
    call(A, B, wanted)
    assert found.data_ptr() == out.data_ptr() and found.stride() == out.stride()
    assert torch.equal(memory, expected)
    assert out._version > version


# Gradients and what is wrong.


def test_what_requires_a_gradient_is_refused_through_out():
    run = compiled(lambda x, y, w, out: kl.run_kernel(LAPLACE, x, y, bandwidth=w, out=out))
    for place, name in enumerate(("a", "b", "bandwidth", "out")):
        given = [A.clone(), B.clone(), ONE.clone(), torch.empty(M, N)]
        given[place].requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} requires a gradient"):
            run(*given)
        with torch.no_grad():
            assert not run(*given).isnan().any()


def test_gradients_flow_around_a_call_under_no_grad():
    def call(x, y, weight):
        with torch.no_grad():
            kernel = kl.run_kernel(LAPLACE, x, y, bandwidth=2.0)
        return (kernel @ weight).sum() + x.sum() + kl.cdist(x.detach(), y).sum()

    x, weight = A.clone().requires_grad_(), torch.ones(N, requires_grad=True)
    compiled(call)(x, B, weight).backward()
    assert torch.equal(x.grad, torch.ones(M, K))
    torch.testing.assert_close(weight.grad, kl.run_kernel(LAPLACE, A, B, bandwidth=2.0).sum(0))


WRONG = {
    "features": (lambda: kl.run_kernel(LAPLACE, A, B[:, 1:], bandwidth=2.0), "same number of feat"),
    "dimensions": (
        lambda: kl.run_kernel(LAPLACE, A[0], B, bandwidth=2.0),
        "a must be .* got shape",
    ),
    "dtypes": (lambda: kl.run_kernel(LAPLACE, A, B.double(), bandwidth=2.0), "must have one dtype"),
    "int": (lambda: kl.run_kernel(LAPLACE, A.int(), B.int(), bandwidth=2.0), "a must be one of"),
    "batches": (lambda: kl.run_kernel(LAPLACE, BATCH_A, BATCH_B[:2], bandwidth=2.0), "a: 3, b: 2"),
    "batch of p": (lambda: kl.cdist(BATCH_A, B, SEVERAL[:2]), "batches must be 1 or equal"),
    "matrix": (lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=A), "bandwidth must have shape"),
    "bool": (lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=ONE > 1), "bandwidth must be real"),
    "out": (lambda: kl.cdist(A, B, out=torch.ones(N, M)), "out must have shape"),
    "out's dtype": (
        lambda: kl.cdist(A, B, out=torch.ones(M, N).int()),
        "out must be torch.float32",
    ),
    "missing": (lambda: kl.run_kernel(LAPLACE, A, B), "needs bandwidth"),
    "b missing": (lambda: kl.run_kernel(LAPLACE, A, bandwidth=2.0), "b is missing"),
    "unknown": (lambda: kl.run_kernel(LAPLACE, A, B, width=2.0), "width is no argument"),
    "negative": (lambda: kl.run_kernel(LAPLACE, A, B, bandwidth=-2.0), "bandwidth .* than 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_as_in_eager_calls(case):
    call, message = WRONG[case]
    for run in (call, compiled(call)):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            run()


@pytest.mark.parametrize("argument", ["bandwidth", "descriptor"])
def test_what_is_no_number_and_no_descriptor_is_an_error(argument):
    given = {"descriptor": LAPLACE, "bandwidth": 2.0} | {argument: "wide"}
    for run in (kl.run_kernel, compiled(kl.run_kernel)):
        with pytest.raises((TypeError, torch._dynamo.exc.Unsupported)):
            run(given["descriptor"], A, B, bandwidth=given["bandwidth"])


# Export.


class Kernel(torch.nn.Module):
    """Kernel matrix of the input and points of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("points", B.clone())
        self.register_buffer("width", ONE.clone())
        self.descriptor = CUSTOM

    def forward(self, x):
        kernel = kl.run_kernel(LAPLACE, x, self.points, bandwidth=self.width)
        kl.run_kernel(self.descriptor, x, self.points, out=kernel, accumulate=True, gain=2, shift=1)
        return kernel + kl.cdist(x, self.points, p=float("inf"))


def exported(strict, dynamic):
    sizes = ({0: torch.export.Dim("m", min=2)},) if dynamic else None
    return torch.export.export(Kernel(), (A,), dynamic_shapes=sizes, strict=strict)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_the_eager_one(strict, dynamic):
    program = exported(strict, dynamic)
    names = {str(target) for target in targets(program.graph_module)}
    assert {"kernlib.pairwise.default", "kernlib.pairwise_out.default"} <= names
    for m in (M, 2, 11) if dynamic else (M,):
        x = points(m, K, seed=3)
        assert torch.equal(program.module()(x), Kernel()(x))
    decomposed = program.run_decompositions()
    assert torch.equal(decomposed.module()(A), Kernel()(A))


CHILD = """
import sys, torch
import kernlib
kernlib.register_operators()
program = torch.export.load(sys.argv[1]).module()
x, wanted = torch.load(sys.argv[2])
print(torch.equal(program(x), wanted))
"""


@pytest.mark.slow
def test_a_saved_program_runs_in_another_process(tmp_path):
    x = points(11, K, seed=3)
    torch.export.save(exported(False, True), tmp_path / "program.pt2")
    torch.save((x, Kernel()(x)), tmp_path / "wanted.pt")
    files = [str(tmp_path / name) for name in ("program.pt2", "wanted.pt")]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, *files], capture_output=True, text=True, env=os.environ
    )
    assert run.stdout == "True\n", run.stderr


# Fake tensors, make_fx, other modes and transforms.

SHAPES = [
    ((M, K), (N, K)),
    ((L, M, K), (N, K)),
    ((1, M, K), (N, K)),
    ((1, M, K), (L, N, K)),
    ((L, M, K), (L, N, K)),
    ((0, K), (N, K)),
    ((0, M, K), (1, N, K)),
    ((M, 0), (N, 0)),
]


@pytest.mark.parametrize("width", [2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.ones(L)])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_a_fake_call_has_the_shape_of_the_real_one(left, right, width):
    given = torch.ones(left), torch.ones(right)
    if 0 in left[:-2] and isinstance(width, torch.Tensor) and width.numel() == L:
        return
    wanted = kl.run_kernel(LAPLACE, *given, bandwidth=width)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in (*given, width)]
        found = kl.run_kernel(LAPLACE, *fakes[:2], bandwidth=fakes[2])
        out = torch.empty(wanted.shape)
        assert kl.run_kernel(LAPLACE, *fakes[:2], bandwidth=fakes[2], out=out) is out
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
    assert (found.dtype, found.device) == (wanted.dtype, wanted.device)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_no_memory_to_read(inside, device):
    with FakeTensorMode() as mode, torch.device(device):
        x, y = torch.empty(L, M, K, dtype=torch.half), torch.empty(N, K, dtype=torch.half)
        narrow, width, out = torch.empty(N, 1).half(), torch.empty(L), torch.empty(L, M, N)
        if inside:
            results = kl.run_kernel(LAPLACE, x, y, bandwidth=width), kl.cdist(x, y, out=out)
    if not inside:
        results = kl.run_kernel(LAPLACE, x, y, bandwidth=width), kl.cdist(x, y, out=out)
    for found, dtype in zip(results, (torch.half, torch.float32), strict=True):
        assert (found.shape, found.dtype, found.fake_mode) == ((L, M, N), dtype, mode)
        assert found.device == x.device
    with pytest.raises(ValueError, match="same number of features"):
        kl.run_kernel(LAPLACE, x, narrow, bandwidth=2.0)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(tracing):
    def call(x, y, width):
        out = torch.ones(x.shape[0], y.shape[0])
        kl.run_kernel(LAPLACE, x, y, out=out, accumulate=True, bandwidth=width)
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width) + out + kl.cdist(x, y, 1.5)

    graph_module = make_fx(call, tracing_mode=tracing)(A, B, ONE)
    recorded = {str(target) for target in targets(graph_module)}
    assert {"kernlib.pairwise.default", "kernlib.pairwise_out.default"} <= recorded
    x, y, width = points(M, K, seed=5), points(N, K, seed=5), torch.tensor(3.0)
    assert torch.equal(graph_module(x, y, width), call(x, y, width))


def test_other_modes_see_the_operator():
    seen = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Listening():
        found = kl.run_kernel(LAPLACE, A, B, bandwidth=2.0)
    assert torch.equal(found, kl.run_kernel(LAPLACE, A, B, bandwidth=2.0))
    assert torch.ops.kernlib.pairwise.default in seen


def test_functional_tensors_are_tensors():
    call = torch.func.functionalize(lambda x, y: kl.run_kernel(LAPLACE, x, y, bandwidth=2.0))
    assert torch.equal(call(A, B), kl.run_kernel(LAPLACE, A, B, bandwidth=2.0))


@pytest.mark.parametrize("place", range(3))
def test_vmap_is_refused(place):
    given, dims = [A, B, ONE], [None] * 3
    given[place], dims[place] = torch.stack([given[place]] * 2), 0

    def call(x, y, width):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width)

    mapped = torch.vmap(call, in_dims=tuple(dims))
    with pytest.raises(RuntimeError, match="vmap"):
        mapped(*given)
    with pytest.raises(RuntimeError, match=r"(?i)batching rule not implemented for kernlib"):
        compiled(mapped)(*given)


def test_grad_is_refused():
    with pytest.raises(RuntimeError, match=r"x1 is inside a transform of torch\.func"):
        torch.func.grad(lambda x: kl.cdist(x, B).sum())(A)


OPCHECK = {
    "plain": (A, B, kl.laplace_l1(), "bandwidth", [2.0], []),
    "mixed": (BATCH_A, B, PQ, "p q bandwidth", [1.3, 0.8], [SEVERAL]),
    "symmetric": (A, None, SYMMETRIC, "bandwidth regularization", [2.0, 0.5], []),
    "strided": (A.T.contiguous().T, B.expand(L, N, K), kl.l1_distance(), "", [], []),
}


@pytest.mark.parametrize("case", OPCHECK)
def test_torchs_own_checks_of_operators_pass(case):
    a, b, descriptor, *values = OPCHECK[case]
    rest = (descriptor.text, *values, 1, 1, False)
    named = dict(zip(values[0].split(), values[1] + values[2], strict=True))
    tensors = [a] if b is None else [a, b]
    wanted = kl.run_kernel(descriptor, *tensors, row_offset=1, col_offset=1, **named)
    torch.library.opcheck(torch.ops.kernlib.pairwise.default, (a, b, *rest))
    for accumulate in (False, True):
        out = torch.zeros_like(wanted)
        arguments = (a, b, out, accumulate, *rest)
        torch.library.opcheck(torch.ops.kernlib.pairwise_out.default, arguments)
        torch.ops.kernlib.pairwise_out(*arguments)
        assert torch.equal(out, wanted)


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
def test_a_traced_call_is_recorded():
    def call(x, y):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=2.0) + 1

    traced = torch.jit.trace(call, (A, B))
    x = points(M, K, seed=3)
    assert torch.equal(traced(x, B), call(x, B))


EAGER = """
import sys, torch
import kernlib as kl
kl.cdist(torch.ones(2, 3), torch.ones(4, 3))
names = ("kernlib.families.pairwise.library", "kernlib.descriptors.text", "torch._dynamo")
print([name for name in names if name in sys.modules])
"""


def test_an_eager_call_registers_nothing():
    run = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def test_none_stands_for_an_empty_list():
    """As AOTInductor passes it."""
    library = kernlib.families.pairwise.library
    found = library._call_new(A, B, kl.l1_distance().text, "", None, None, 0, 0, False)
    assert torch.equal(found, kl.cdist(A, B, p=1))

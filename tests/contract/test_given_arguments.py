"""What a call is told of its arguments is about those that it was given: ``out`` must not share
memory with them, copied first or not, flags are flags, and names are the caller's."""

import re
from fractions import Fraction
from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib import linalg
from kernlib.compat import kermac, torch_blocksparse
from kernlib.runtime.plan import forget_plans
from tests.contract.wrong import Sharded

pytestmark = pytest.mark.few(1000)  # each public function is a promise

GAUSSIAN, WIDTH = kl.gaussian(), {"bandwidth": 2.0}
FACTOR = kl.KroneckerSparse(2, 3, 3, 2)


def square(n=6, dtype=torch.float32):
    return torch.rand(n, n, dtype=dtype) + n * torch.eye(n, dtype=dtype)


def mapped(which):
    def call(out):
        given = {"a": square(), "b": square(), "feature_map": square(), which: out}
        a, b, feature_map = given.values()
        return kl.run_kernel(GAUSSIAN, a, b, out=out, feature_map=feature_map, **WIDTH)

    return call


def mapped_product(which):
    def call(out):
        given = {"a": square(), "b": square(), "v": square(), "feature_map": square(), which: out}
        a, b, v, feature_map = given.values()
        return kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, feature_map=feature_map, **WIDTH)

    return call


def negated(t):
    return torch._neg_view(t)


# To the argument that out is, and the call.
OVERLAPS = {
    **{f"run_kernel {name} mapped": (name, mapped(name)) for name in ("a", "b", "feature_map")},
    **{
        f"kernel_matmul {name} mapped": (name, mapped_product(name))
        for name in ("a", "b", "v", "feature_map")
    },
    "run_kernel negated": (
        "b",
        lambda out: kl.run_kernel(GAUSSIAN, square(), negated(out), out=out, **WIDTH),
    ),
    "kernel_matmul negated": (
        "v",
        lambda out: kl.kernel_matmul(GAUSSIAN, square(), square(), negated(out), out=out, **WIDTH),
    ),
    "cdist": ("x1", lambda out: kl.cdist(out, square(), out=out)),
    "cdist negated": ("x2", lambda out: kl.cdist(square(), negated(out), out=out)),
    "cdist_grad negated": (
        "d",
        lambda out: kl.cdist_grad(square(), square(), square(1 * 6)[:1], negated(out), out[None]),
    ),
    "cdist_expadd lengthscale": (
        "lengthscale",
        lambda out: kl.cdist_expadd(square(), square(), lengthscale=out[0, 0], out=out),
    ),
    "agop x": ("x", lambda out: kl.agop(GAUSSIAN, out, square(), square(), out=out, **WIDTH)),
    "agop z": ("z", lambda out: kl.agop(GAUSSIAN, square(), out, square(), out=out, **WIDTH)),
    "agop coefficients": (
        "coefficients",
        lambda out: kl.agop(GAUSSIAN, square(), square(), out, out=out, **WIDTH),
    ),
    "agop bandwidth": (
        "bandwidth",
        lambda out: kl.agop(GAUSSIAN, square(), square(), square(), out=out, bandwidth=out[0, 0]),
    ),
    "kermac run_kernel": (
        "a",
        lambda out: kermac.run_kernel(kermac.laplace_l1, out, square(), out=out, bandwidth=1.0),
    ),
    "kermac cdist_expadd": (
        "lengthscale",
        lambda out: kermac.cdist_expadd(square(), square(), out=out, lengthscale=out[0, 0]),
    ),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_out_shares_no_memory_with_what_is_copied_first(case):
    name, call = OVERLAPS[case]
    out = square()
    before = out.clone()
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        call(out)
    assert torch.equal(out, before)


def test_a_batch_that_is_copied_is_looked_at_before():
    whole = torch.rand(2, 3, 6, 6)
    x2, before = whole[:, :2], whole.clone()
    with pytest.raises(ValueError, match="out shares memory with x2"):
        kl.cdist(torch.rand(2, 2, 6, 6), x2, out=whole.view(3, 2, 6, 6)[:2])
    assert torch.equal(whole, before)


# Flags.

POINTS = torch.rand(5, 3), torch.rand(4, 3)
PAIRS = torch.rand(4, 5), torch.rand(3, 4), torch.rand(2, 4), torch.rand(3, 5)
SOLVE = "overwrite_a overwrite_b check_errors"
FLAGS = {  # of each call, by name
    "run_kernel": (partial(kl.run_kernel, GAUSSIAN, *POINTS, **WIDTH), "debug accumulate"),
    "factor": (partial(kl.run_kernel, FACTOR, torch.rand(12), torch.rand(2, 3, 3, 2)), "debug"),
    "cdist": (partial(kl.cdist, *POINTS), "root debug"),
    "cdist_grad": (partial(kl.cdist_grad, *PAIRS), "debug"),
    "cdist_expadd": (partial(kl.cdist_expadd, *POINTS, scale=-1.0), "debug"),
    "cdist_grad_expadd": (partial(kl.cdist_grad_expadd, *PAIRS, scale=-1.0), "debug"),
    "agop": (partial(kl.agop, GAUSSIAN, *POINTS, PAIRS[2], **WIDTH), "diagonal centred"),
    "kernel_topk": (partial(kl.kernel_topk, GAUSSIAN, *POINTS, 1, **WIDTH), "largest"),
    "compile": (partial(kl.compile, []), "debug progress"),
    "prepare": (partial(kl.prepare, GAUSSIAN, *POINTS, **WIDTH), "debug progress"),
    "tune": (partial(kl.tune, GAUSSIAN, *POINTS, **WIDTH), "debug progress"),
    "solve_cholesky": (partial(linalg.solve_cholesky, square(), square()), f"upper {SOLVE}"),
    "solve_lu": (partial(linalg.solve_lu, square(), square()), SOLVE),
    "eigh": (partial(linalg.eigh, square()), "upper overwrite_a check_errors"),
    "kermac run_kernel": (
        partial(kermac.run_kernel, kermac.l1_norm, *POINTS),
        "try_to_align debug",
    ),
    "kermac cdist": (partial(kermac.cdist, *POINTS), "skip_epilogue try_to_align"),
    "kermac cdist_expadd": (partial(kermac.cdist_expadd, *POINTS, scale=-1.0), "try_to_align"),
    "kermac cdist_grad_expadd": (
        partial(kermac.cdist_grad_expadd, *PAIRS, scale=-1.0),
        "try_to_align",
    ),
    "kermac solve_cholesky": (partial(kermac.solve_cholesky, square(), square()), SOLVE),
    "kermac solve_lu": (partial(kermac.solve_lu, square(), square()), "debug"),
    "kermac pre_compile_descriptors": (
        partial(kermac.pre_compile_descriptors, 0, kermac.l1_norm),
        "debug",
    ),
}


@pytest.mark.parametrize("value", ("no", 0, 1.0, [], torch.tensor(True)), ids=repr)
@pytest.mark.parametrize(
    ("case", "flag"), [(case, flag) for case in FLAGS for flag in FLAGS[case][1].split()]
)
def test_flags_are_true_or_false(case, flag, value):
    forget_plans()  # 0 finds that of False
    with pytest.raises(TypeError, match=f"{flag} must be"):
        FLAGS[case][0](**{flag: value})


def test_power_sums_of_an_infinite_exponent_are_refused_in_tensors_too():
    for p in (float("inf"), torch.tensor(float("inf")), torch.tensor([1.0, float("inf")])):
        with pytest.raises(ValueError, match="root=False asks for power sums"):
            kl.cdist(*POINTS, p=p, root=False)
        with pytest.raises(ValueError, match="skip_epilogue asks for power sums"):
            kermac.cdist(*POINTS, p=p, skip_epilogue=True)
        with pytest.raises(ValueError, match="p must be 0 or greater and finite"):
            kl.cdist_expadd(*POINTS, p=p, scale=-1.0)


# Names and kinds.

X, Y = POINTS
LAYOUT = kl.blocksparse.Layout([[1, 0], [1, 1]], 16)
Q = torch.ones(1, 1, 32, 16)
SIZES = {
    "num_heads": 2, "num_blocks": 4, "mode": "fixed", "block_stride": 4, "unidirectional": False,
    "numverts": 1, "vertsize": 1,
}  # fmt: skip


def attention(**given):
    return kl.blocksparse.attention(Q, Q, Q, LAYOUT, **given)


NAMES = {
    "x1's dtype": (lambda: kl.cdist(X.int(), Y.int()), "x1 must be one of"),
    "dtypes": (lambda: kl.cdist(X, Y.double()), "x1 and x2 must have one dtype"),
    "x2 nested": (lambda: kl.cdist(X, torch.nested.nested_tensor([X, Y])), "x2 must be a dense"),
    "x2 sparse": (lambda: kl.cdist(X, Y.to_sparse()), "x2 must be a dense tensor"),
    "out": (lambda: kl.cdist(X, Y, out="x"), "out must be a tensor, got str"),
    "out of a batch": (lambda: kl.cdist(X[None], Y, out="x"), "out must be a tensor, got str"),
    "bandwidth sparse": (
        lambda: kl.run_kernel(GAUSSIAN, X, Y, bandwidth=torch.ones(1).to_sparse()),
        "bandwidth must be a dense tensor",
    ),
    "bandwidth nested": (
        lambda: kl.run_kernel(GAUSSIAN, X, Y, bandwidth=torch.nested.nested_tensor([X])),
        "bandwidth must be a dense tensor",
    ),
    "bandwidth quantized": (
        lambda: kl.run_kernel(
            GAUSSIAN, X, Y, bandwidth=torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8)
        ),
        "bandwidth must be a dense tensor",
    ),
    "a quantized": (
        lambda: kl.run_kernel(GAUSSIAN, torch.quantize_per_tensor(X, 1.0, 0, torch.qint8), Y),
        "a must be a dense tensor",
    ),
    "scale": (lambda: kl.cdist_expadd(X, Y, scale=torch.ones(2, 2)), "scale must have shape"),
    "a huge number": (lambda: kl.cdist(X, Y, p=10**400), "p must fit a float64"),
    "a listener": (lambda: kl.events.subscribe(3), "listener must be a function"),
    "dtypes of compile": (lambda: kl.compile(GAUSSIAN, dtypes="x"), "dtypes must be"),
    "offset": (
        lambda: kermac.run_kernel(kermac.laplace_l1, X, Y, bandwidth=1.0,
                                  regularization_offset_x=2**62),
        "regularization_offset_x must be",
    ),
    "d of kermac": (
        lambda: kermac.cdist_grad_expadd(*PAIRS[:3], PAIRS[3].int(), lengthscale=1.0),
        "d must be one of",
    ),
    "a single point": (
        lambda: kl.run_kernel(GAUSSIAN, X[0], Y, bandwidth=1.0),
        r"a must be \(N, K\).*; one point is a\[None\], .* metric='precomputed'",
    ),
    "a jagged": (
        lambda: kl.run_kernel(
            GAUSSIAN, torch.nested.nested_tensor([X, Y], layout=torch.jagged), Y, bandwidth=1.0
        ),
        "a must be a dense tensor, got a nested one",
    ),
    "a class of tensors": (
        lambda: kl.kernel_sum(GAUSSIAN, torch.Tensor, Y, bandwidth=1.0),
        "a must be a tensor, got the class Tensor",
    ),
    "a class of layouts": (
        lambda: kl.blocksparse.softmax(torch.ones(3, 16, 16), kl.blocksparse.Layout),
        r"layout must be a kernlib.blocksparse.Layout, got .*\(mask, block\) makes one",
    ),
    "a tensor with a dispatcher of its own": (
        lambda: kl.run_kernel(GAUSSIAN, X, Sharded(Y), bandwidth=1.0),
        r"b is a Sharded, .* does not take kernlib::pairwise .*: pass the plain tensor",
    ),
    "factors with a dispatcher of their own": (
        lambda: kl.kron_matmul(X, [torch.eye(3), Sharded(torch.eye(1))]),
        r"factor2 is a Sharded, .* does not take kernlib::kronecker_product .*: pass the plain",
    ),
    "a class to compile": (lambda: kl.compile(kl.Pairwise), r"call it, kernlib.Pairwise\(\)"),
    "a function to compile": (lambda: kl.compile([kl.gaussian]), r"call it, kernlib.gaussian\(\)"),
    "a class to prepare": (
        lambda: kl.prepare(kl.BlockSparseAttention), r"call it, kernlib.BlockSparseAttention\(\)"
    ),
    "scales left out": (
        lambda: kl.run_kernel(kl.BlockSparseScaledMatmul("dsd"), LAYOUT, Q),
        r"takes layout, a, b, scale_a and scale_b, got 2 operands",
    ),
    "an index of a score": (
        lambda: attention(score="v + bias[row - col]", bias=torch.zeros(63)),
        r"^score 'v \+ bias\[row - col\]': 'bias\[row - col\]' has an index; .*is a tensor of row "
        r"and col, as of bias\[torch.arange\(rows\)\[:, None\] - torch.arange\(cols\)\]",
    ),
    "an index of a mask": (
        lambda: attention(mask="docs[row] == docs[col]", docs=torch.zeros(32)),
        r"^mask 'docs\[row\] == docs\[col\]': 'docs\[row\]' has an index; .*with axes=\{'docs': "
        r"\('row',\)\}; what is read at two places has two names, as in query_docs == key_docs",
    ),
    "an index of axes that are given": (
        lambda: attention(score="v + x[head]", x=torch.zeros(1), axes={"x": "head"}),
        r"'x\[head\]' has an index; .*with axes=\{'x': \('head',\)\}",
    ),
    "factors of one matrix": (
        lambda: kl.kron_matmul(X, square()), r"factors must be a list .*, got one tensor"
    ),
    "factors of an array": (
        lambda: kl.kron_matmul(X, square().numpy()),
        r"factors must .*got ndarray: pass \[torch.from_numpy\(factor\) for factor in factors\]",
    ),
    "factors of an iterator": (
        lambda: kl.kron_matmul(X, iter([square()])), r"factors must .*: pass list\(factors\)"
    ),
    "batches of factors": (
        lambda: linalg.kron_eigh([square().expand(2, 6, 6), square().expand(3, 6, 6)]),
        r"the batches of factors \(2,\), \(3,\) do not broadcast",
    ),
    "the right-hand side of a system": (
        lambda: linalg.kron_solve([square()], X[0]),
        r"b must be \(6,\) or \(\.\.\., 6, C\) for these factors, got shape",
    ),
    "rows of no grid": (
        lambda: linalg.masked_kron_matmul(
            X[0], [torch.ones(0, X.shape[1])], torch.tensor([0]), torch.arange(X.shape[1])
        ),
        "rows must be empty, as the grid is, got 0",
    ),
    "a nested layout": (
        lambda: torch_blocksparse.MatMul(torch.nested.nested_tensor([X]), 16, "sdd"),
        "layout must be a dense tensor, got a nested one",
    ),
    "a jagged layout": (
        lambda: torch_blocksparse.Softmax(
            torch.nested.nested_tensor([X, Y], layout=torch.jagged), 16
        ),
        "layout must be a dense tensor, got a nested one",
    ),
    **{
        f"{name} of make_layout": (
            partial(torch_blocksparse.make_layout, **SIZES | {name: None}), f"{name} must be an int"
        )
        for name in ("num_heads", "num_blocks", "block_stride", "numverts", "vertsize")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_errors_name_the_argument_as_the_caller_does(case):
    call, message = NAMES[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


class OfDlpack:
    """An array of a library that knows DLPack alone."""

    def __dlpack__(self, **_):
        raise AssertionError

    def __dlpack_device__(self):
        raise AssertionError


class Frame:
    def to_numpy(self):
        raise AssertionError


ARRAYS = {
    "torch.from_numpy({})": X.numpy(),
    "torch.from_numpy({}.copy())": X.numpy()[::-1],
    "torch.tensor({})": X.tolist(),
    "torch.from_dlpack({})": OfDlpack(),
    "torch.from_numpy({}.to_numpy())": Frame(),
}
OF_ARRAYS = {
    "a": lambda x: kl.run_kernel(GAUSSIAN, x, Y, bandwidth=1.0),
    "x2": lambda x: kl.cdist(X, x),
    "v": lambda x: kl.kernel_matmul(GAUSSIAN, X, Y, x, bandwidth=1.0),
    "lengthscale": lambda x: kl.run_kernel(GAUSSIAN, X, Y, lengthscale=x),
    "input": lambda x: kl.nn.KroneckerLinear([3], [2])(x),
    "factors[0]": lambda x: kl.kron_matmul(X, [x]),
    "bias": lambda x: kl.run_kernel(
        kl.KroneckerSparse(1, 3, 3, 1, epilogue=kl.Bias()), X, torch.ones(1, 3, 3, 1), bias=x
    ),
    "values": lambda x: kl.blocksparse.dsd(x, Y, kl.blocksparse.Layout([[1]], 16)),
    "dense": lambda x: kl.sparse.compress(x),
    "weight": lambda x: kl.sparse.magnitude(x, 0.5),
    "b": lambda x: linalg.conjugate_gradient(lambda v: v, x),
}


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays_are_refused_with_the_line_that_makes_a_tensor_of_them(name):
    for line, value in ARRAYS.items():
        with pytest.raises(TypeError, match=re.escape(name)) as caught:
            OF_ARRAYS[name](value)
        assert line.format(name) in str(caught.value), caught.value


def test_a_gradient_beside_out_is_refused_by_the_callers_name():
    with pytest.raises(RuntimeError, match="x2 requires a gradient"):
        kl.cdist(X, Y.clone().requires_grad_(), out=torch.empty(5, 4))


def test_fractions_are_numbers():
    half, three, matrix = Fraction(1, 2), Fraction(3, 1), square() * torch.eye(6)
    for call in (
        lambda n: kl.cdist(X, Y, p=n(three)),
        lambda n: kl.run_kernel(GAUSSIAN, X, Y, bandwidth=n(half)),
        lambda n: kl.cdist_grad(*PAIRS, p=n(three)),
        lambda n: kl.cdist_expadd(X, Y, p=n(three), lengthscale=n(half)),
        lambda n: kl.cdist_grad_expadd(*PAIRS, p=n(three), q=n(three), scale=-n(half), c0=n(half)),
        lambda n: kl.agop(GAUSSIAN, X, Y, PAIRS[2], bandwidth=n(half)),
        lambda n: kl.kernel_sum(GAUSSIAN, X, Y, bandwidth=n(half)),
        lambda n: kl.kernel_sum(GAUSSIAN, X.clone().requires_grad_(), Y, bandwidth=n(half)),
        lambda n: kl.cdist(X.clone().requires_grad_(), Y, p=n(three)),
        lambda n: linalg.conjugate_gradient(matrix.matmul, torch.ones(6), tol=n(half)).x,
    ):
        torch.testing.assert_close(call(lambda x: x), call(float), equal_nan=True)


def test_tensors_of_inference_mode_are_constants_of_recorded_calls():
    with torch.inference_mode():
        b = torch.rand(4, 3)
    for call in (kl.cdist, lambda a, b: kl.kernel_sum(GAUSSIAN, a, b, **WIDTH)):
        a, other = X.clone().requires_grad_(), X.clone().requires_grad_()
        call(a, b).sum().backward()
        call(other, b.clone()).sum().backward()
        assert torch.equal(a.grad, other.grad)


def test_out_of_inference_mode_is_written_inside_of_it_alone():
    with torch.inference_mode():
        out = torch.zeros(5, 4)
        assert kl.cdist(X, Y, out=out) is out
    with pytest.raises(ValueError, match="out was made in inference mode"):
        kl.cdist(X, Y, out=out)

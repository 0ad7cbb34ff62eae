"""What is said of calls that are right in form, and of those whose arguments have other names."""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.expression import RESERVED

K = 8
A, B = torch.randn(5, K), torch.randn(6, K)
GAUSSIAN = kl.gaussian()

CALLS = {
    "misspelt": (
        lambda: kl.run_kernel(GAUSSIAN, A, B, bandwith=1.0),
        "bandwith is no argument of .*; it takes .*; did you mean bandwidth",
    ),
    "other name": (
        lambda: kl.run_kernel(GAUSSIAN, A, B, sigma=1.0),
        "sigma is no argument of .*; did you mean bandwidth",
    ),
    "option": (
        lambda: kl.run_kernel(kl.l1_distance(), A, B, row_ofset=1),
        "it takes none; did you mean row_offset",
    ),
    "missing": (
        lambda: kl.run_kernel(GAUSSIAN, A, B),
        r"needs bandwidth: run_kernel\(descriptor, a, b, bandwidth=\.\.\.\)$",
    ),
    "no tensor": (
        lambda: kl.run_kernel(GAUSSIAN, bandwidth=1.0),
        r"a must be a tensor, got None; the call is run_kernel\(descriptor, a, b, bandwidth=",
    ),
    "number without a name": (
        lambda: kl.run_kernel(GAUSSIAN, A, B, 1.0),
        r"takes tensors a and b, got 3; .* run_kernel\(descriptor, a, b, bandwidth=",
    ),
    "cdist": (
        lambda: kl.cdist(a=A, b=B),
        r"cdist\(\) got an unexpected keyword argument 'a': its points are x1 and x2",
    ),
    "solver": (
        lambda: kl.linalg.solve_kernel(
            GAUSSIAN, A, A, regularization=1.0, bandwidth=1.0, maxiter=3
        ),
        r"maxiter is no argument of solve_kernel; did you mean max_iter\?",
    ),
    "bias of a factor": (
        lambda: kl.run_kernel(
            kl.KroneckerSparse(2, 4, 4, 1), A, torch.ones(2, 4, 4, 1), bias=torch.ones(8)
        ),
        r"bias is no argument of .*; with epilogue=kernlib.Bias\(\) it takes bias",
    ),
    "arch": (
        lambda: kl.compile(GAUSSIAN, arch="sm_80"),
        r"compile\(\) got an unexpected keyword argument 'arch'; did you mean archs\?",
    ),
    "spec": (
        lambda: kl.compile(GAUSSIAN, spec=(A, B), bandwidth=1.0),
        r"argument 'spec'; did you mean specs\?",
    ),
    "tensors of compile": (
        lambda: kl.compile(GAUSSIAN, A, B, bandwidth=1.0),
        r"2 unexpected positional argument\(s\): tensors are its specs, as in compile\(",
    ),
    "no specs": (
        lambda: kl.compile(GAUSSIAN, bandwidth=1.0),
        "bandwidth: arguments of a call need its tensors",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_an_argument_of_another_name_is_told_its_own(case):
    call, message = CALLS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_what_a_descriptor_takes_is_no_misspelt_argument_of_compile():
    scaled = kl.l1_distance(epilogue=kl.Scale("arch"))
    meta = torch.empty(4, 3, device="meta")
    with pytest.raises(ValueError, match="arch must be one of"):
        kl.compile(scaled, archs="sm_0", specs=(meta, meta), arch=2.0)


# A value for each feature.


def widths(count):
    return torch.linspace(1, 2, count)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kl.run_kernel(GAUSSIAN, A, B, bandwidth=widths(K)),
        lambda: kl.kernel_sum(GAUSSIAN, A, B, bandwidth=widths(K)),
        lambda: kl.run_kernel(kl.p_distance(), A, B, p=widths(K)),
    ],
)
def test_as_many_values_as_features_warn_of_lengthscale(call):
    with pytest.warns(kl.KernlibWarning, match="none for each of the 8 features: .* length") as w:
        assert call().shape[0] == K
    assert w[0].filename == __file__
    assert "warnings.filterwarnings('ignore', category=kernlib.KernlibWarning)" in str(w[0].message)


def test_what_says_that_a_batch_is_meant_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", kl.KernlibWarning)
        kl.run_kernel(GAUSSIAN, A, B, bandwidth=widths(K - 1))
        kl.run_kernel(GAUSSIAN, A[None], B, bandwidth=widths(K))
        kl.run_kernel(GAUSSIAN, A, B, bandwidth=widths(K), out=torch.empty(K, 5, 6))
        kl.run_kernel(GAUSSIAN, A[:, :1], B[:, :1], bandwidth=widths(1))
        kl.run_kernel(GAUSSIAN, A, B, lengthscale=widths(K))


TRAP = """
import warnings
import torch, kernlib as kl
{silence}
x = torch.ones(4, 8)
for _ in range(5):
    kl.run_kernel(kl.gaussian(), x, x, bandwidth=torch.ones(8))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("silence, count", [
    ("", 1),
    ("warnings.filterwarnings('ignore', category=kl.KernlibWarning)", 0),
])  # fmt: skip
def test_a_line_is_warned_of_once_or_not_at_all(silence, count):
    run = subprocess.run(
        [sys.executable, "-c", TRAP.format(silence=silence)], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stderr.count("KernlibWarning: bandwidth") == count


def test_a_solver_that_has_not_converged_says_how_to_hide_it():
    x, y = torch.randn(60, 3), torch.randn(60)
    with pytest.warns(kl.ConvergenceWarning, match="category=kernlib.ConvergenceWarning") as found:
        kl.linalg.solve_kernel(
            GAUSSIAN, x, y, regularization=1e-6, bandwidth=1.0, max_iter=1, rank=0
        )
    assert len(found) == 1 and issubclass(kl.ConvergenceWarning, kl.KernlibWarning)


# Parameters by the names of arguments.

TAKERS = {  # and their first arguments
    kl.kernel_topk: (A, B),
    kl.agop: (A, B, torch.ones(6)),
    kl.linalg.nystrom: (A, 2),
    kl.linalg.solve_kernel: (A, torch.ones(5)),
}


def own_names(function):
    """What a function may be given by name that no Custom refuses to have for a parameter."""
    return sorted(set(inspect.signature(function).parameters) - {"hyperparameters"} - RESERVED)


@pytest.mark.parametrize(("function", "name"), [(f, name) for f in TAKERS for name in own_names(f)])
def test_a_parameter_by_the_name_of_an_argument_is_named(function, name):
    descriptor = kl.squared_distance(epilogue=kl.Custom(f"exp(-{name} * v)", (name,)))
    kl.run_kernel(descriptor, A, B, **{name: 1.0})
    rest = dict.fromkeys({"regularization"} & inspect.signature(function).parameters.keys(), 1.0)
    said = rf"parameter name '{name}' of .* by an argument of {function.__name__}"
    with pytest.raises(ValueError, match=said):
        function(descriptor, *TAKERS[function], **rest)


@pytest.mark.parametrize("reduce", [kl.kernel_topk, kl.kernel_min, kl.kernel_argmin, kl.kernel_sum])
def test_a_class_in_the_place_of_a_descriptor(reduce):
    with pytest.raises(TypeError, match="got the class Pairwise: call it"):
        reduce(kl.Pairwise, A, B, *[1] * (reduce is kl.kernel_topk))


@pytest.mark.parametrize("name", ["feature_map", "lengthscale"])
def test_agop_says_that_it_takes_mapped_points(name):
    with pytest.raises(TypeError, match=f"agop takes no {name}: give it the points"):
        kl.agop(GAUSSIAN, A, B, torch.ones(6), **{name: torch.ones(K)})


# Debugging where there is no kernel.


def test_debugging_says_that_torch_computes_a_call(capsys):
    kl.run_kernel(GAUSSIAN, A, B, bandwidth=1.0, debug=True)
    assert capsys.readouterr().err == (
        "kernlib torch   pairwise on cpu: no kernel, computed by torch\n"
    )
    factor, weight = kl.KroneckerSparse(2, 4, 4, 1), torch.ones(2, 4, 4, 1)
    kl.run_kernel(factor, A, weight, debug=True)
    assert "on cpu: no kernel, computed by torch" in capsys.readouterr().err
    kl.run_kernel(GAUSSIAN, A, B, bandwidth=1.0)
    assert not capsys.readouterr().err


def test_listeners_hear_of_calls_without_kernels():
    heard = []
    end = kl.events.subscribe(heard.append)
    try:
        kl.run_kernel(GAUSSIAN, A, B, bandwidth=1.0)
    finally:
        end()
    assert [event.name for event in heard] == ["torch"] and heard[0].name in kl.events.NAMES

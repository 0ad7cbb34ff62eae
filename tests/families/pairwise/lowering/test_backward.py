"""Lowering of gradients of reductions: code, grid, parameters, and what NVRTC makes of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.kernels import backward
from kernlib.families.pairwise.lowering import backward as lowering
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.lowering.problem import scalar_count
from kernlib.families.pairwise.reductions import arguments, fused
from kernlib.jit import targets
from kernlib.lowering import division
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only
from tests.support.speeds import slow_but

GAUSSIAN = kl.gaussian()
HERE = "sm_90a"
TENSOR = torch.tensor(1.5)


def lowered(
    descriptor=GAUSSIAN, wanted=("a", "b"), role="both", processors=132, rows=None, numbers=None,
    **changes,
):  # fmt: skip
    """A launch of a call with some of its problem's fields changed; hyperparameters in ``numbers``,
    a bandwidth that is a tensor if there are none."""
    if numbers is None:
        numbers = {"bandwidth": TENSOR}
    m, n, k = (changes.get(name, value) for name, value in (("m", 5000), ("n", 7000), ("k", 3)))
    a, b, v = torch.ones(1, k).expand(m, k), torch.ones(1, k).expand(n, k), torch.ones(n, 1)
    request = arguments.request_of(descriptor, a, b, v, 0, 0, numbers)
    shape = arguments.shape_of(request)
    route = fused.route_of(request, tuple(wanted))
    points = "a" in wanted, "b" in wanted
    hyper, derivatives = fused.derivatives_of(request, route, any(points))
    assert set(hyper) <= set(wanted)
    gradient = torch.ones(1, m, 1)
    problem = fused.problem_of(request, shape, points, gradient)
    problem = problem._replace(role=role, values="v" in wanted, **changes)
    if role == "second":
        derivatives = derivatives._replace(others=())
    strides = (0,) * scalar_count(descriptor)
    return backward.lower(descriptor, derivatives, problem, HERE, processors, strides, rows)


def source(*args, **changes):
    return only(lowered(*args, **changes)).spec.source


# The text of Slopes.


QUOTIENTS = {
    "squares": (GAUSSIAN, {}, "AccT(2)"),
    "differences": (kl.laplace_l1(), {}, "AccT(1)"),
    "root of squares": (kl.matern32(), {}, "AccT(2)"),
    "norm": (kl.laplace_pq(), {"p": 1.3, "q": 0.9}, "read(0)"),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_of_quotients_by_the_bandwidth_its_gradient_is_one_product(name):
    descriptor, values, degree = QUOTIENTS[name]
    numbers = {"bandwidth": TENSOR, **values}
    text = source(descriptor, ("bandwidth",), "first", numbers=numbers)
    assert f"-({degree}) * reciprocal(parameter_bandwidth)" in text
    assert "totals[0] = multiply_add(x, fminf(s, 3.402823466e38f), totals[0]);" in text


def test_other_parameters_have_derivatives_of_their_own():
    descriptor = kl.l1_distance(epilogue=kl.Custom("s * log(1 + t * v)", ("s", "t")))
    numbers = {"s": TENSOR, "t": TENSOR}
    text = source(descriptor, ("a", "s", "t"), "first", numbers=numbers)
    assert "constexpr int HYPER = 2;" in text
    assert "parameter_s = read(5);" in text and "parameter_t = read(6);" in text
    assert text.count("totals[0] = multiply_add(w, ") == 1
    assert text.count("totals[1] = multiply_add(w, ") == 1


def test_an_epsilon_and_an_exponent_are_read_from_their_places():
    descriptor = kl.Pairwise(
        inner=kl.Power(), outer=kl.Power(), epilogue=kl.Custom("exp(-v / s)", ("s",))
    )
    numbers = {"inner_p": 1.5, "outer_p": 0.7, "epsilon": 1e-3, "s": 2.0}
    text = source(descriptor, ("a",), "first", numbers=numbers)
    assert "parameter_exponent = read(1);" in text and "parameter_limit = read(2);" in text
    numbers = {"p": 1.5, "epsilon": 1e-3, "s": 2.0}
    assert "parameter_exponent = read(0) == AccT(0)" in source(
        descriptor, ("a",), "first", numbers=numbers
    )


@pytest.mark.parametrize(
    ("descriptor", "curved"),
    [(GAUSSIAN, True), (kl.l1_distance(), False),
     (kl.l1_distance(epilogue=kl.Custom("3 * v + 1")), False)],
    ids=str,
)  # fmt: skip
def test_whether_a_nan_reaches_the_slope(descriptor, curved):
    numbers = {"bandwidth": TENSOR} if descriptor == GAUSSIAN else {}
    text = source(descriptor, numbers=numbers)
    assert f"constexpr bool CURVED = {str(curved).lower()};" in text


# How n is divided.


@settings(max_examples=100)
@given(
    st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([1, 3, 16]), st.integers(1, 4),
    st.integers(1, 100), st.integers(1, 200),
)  # fmt: skip
def test_splits_cover_n_and_fit_the_workspace(m, n, k, columns, batch, processors):
    sizes = {"m": m, "n": n, "k": k, "columns": columns, "batch": batch}
    found = lowered(wanted=("a", "b", "v"), processors=processors, **sizes)
    assert found.per_part % reduce.FEWEST_POINTS == 0
    assert (found.parts - 1) * found.per_part < n <= found.parts * found.per_part
    partial = found.parts * m * batch * (k + columns)
    assert found.parts == 1 or 4 * partial <= division.WORKSPACE_BYTES


def test_few_rows_fill_a_gpu():
    assert only(lowered(m=10, n=10**6)).grid[0] >= 132


@pytest.mark.parametrize("m", [100, 1000, 2000])
def test_small_problems_leave_no_partial_sums_of_points(m):
    found = lowered(wanted=LEAVES, m=m, n=m)
    assert found.parts == 1 and "partners=32" in only(found).spec.description


# What NVRTC makes of it.

LEAVES = ("a", "b", "v", "bandwidth")
COMPILED = {
    "gaussian": {"wanted": LEAVES},
    "first": {"wanted": ("a", "bandwidth"), "role": "first"},
    "second": {"wanted": ("b", "v"), "role": "second"},
    "16 features": {"wanted": LEAVES, "k": 16},
    "16 features, 4 columns": {"wanted": LEAVES, "k": 16, "columns": 4},
    "10 features, 2 columns": {"wanted": LEAVES, "k": 10, "columns": 2},
    "partners": {"wanted": LEAVES, "m": 500, "n": 500},
    "partners of 16 features": {"wanted": LEAVES, "k": 16, "columns": 4, "m": 500, "n": 500},
    "two rows of partners": {"wanted": LEAVES, "m": 2000, "n": 2000, "k": 8},
    "8 features, 4 columns": {"wanted": LEAVES, "k": 8, "columns": 4},
    "3 features, 4 columns": {"wanted": LEAVES, "columns": 4},
    "sum": {"wanted": ("a", "b", "bandwidth"), "weighted": False},
    "l1": {"descriptor": kl.laplace_l1(), "wanted": LEAVES, "k": 10},
    "distances alone": {"descriptor": kl.l1_distance(), "numbers": {}, "k": 7},
    "matern": {"descriptor": kl.matern52(), "wanted": LEAVES},
    "pq": {
        "descriptor": kl.laplace_pq(), "wanted": ("a", "b", "bandwidth", "q"),
        "numbers": {"bandwidth": TENSOR, "q": TENSOR, "p": 1.3}, "k": 16,
    },
    "exponent on the device": {
        "descriptor": kl.p_distance(), "wanted": ("a", "b"), "numbers": {"p": TENSOR}, "k": 10,
    },
    "sums of exponentials": {
        "descriptor": kl.exp_power_sum(), "wanted": ("a", "b", "v"),
        "numbers": {"p": 1.3, "inner_scale": -0.5}, "k": 5,
    },
    "dot": {"descriptor": kl.dot_product(), "wanted": ("a", "b", "v"), "numbers": {}, "k": 8},
    "signed": {
        "descriptor": kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v)")),
        "wanted": ("b", "v"), "numbers": {}, "role": "second",
    },
    "epsilon": {
        "descriptor": kl.laplace_l2(), "wanted": ("a", "b", "v"),
        "numbers": {"bandwidth": 2.0, "epsilon": 1e-3},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(("gaussian", "partners", "l1"), COMPILED))
def test_the_kernel_compiles_without_a_spill(name):
    wanted = only(lowered(**COMPILED[name])).spec
    made = compiled(wanted, HERE)
    assert made.entry.kernel == wanted.entry
    assert made.registers <= 128 and made.spilled == 0 and made.shared <= lowering.STATIC_BYTES
    held = targets.resident_blocks(HERE, wanted.threads, made.registers, made.shared)
    assert held >= reduce.RESIDENT


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in targets.SHARED_BYTES if arch != HERE])
def test_other_architectures_compile_it(arch):
    for name in ("gaussian", "10 features, 2 columns", "8 features, 4 columns", "pq", "partners"):
        assert compiled(only(lowered(**COMPILED[name])).spec, arch).spilled == 0


def test_sizes_and_numbers_do_not_reach_the_source():
    for sizes in ((100, 1000), (10**5, 10**6)):  # of few pairs a thread has one row
        small, large = ({"m": m, "n": 2 * m} for m in sizes)
        assert only(lowered(**small)).spec == only(lowered(**large)).spec

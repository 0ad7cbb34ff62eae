"""Gradients of the pairwise op on CPU tensors: of eager calls, and of the operators that compiled
calls and gradients of gradients take."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.gradients import backward, operators
from tests.support.speeds import slow_but

M, N, K, L = 4, 3, 5, 2
DOUBLE = torch.float64
EAGER, REGISTERED = "eager", "registered"
CUSTOM = kl.l1_distance(epilogue=kl.Custom("tanh(gain * v) + shift", ("gain", "shift")))
EXPONENTIAL = kl.Pairwise(inner=norms.ExpPower())


def points(*shape, grad=True, dtype=DOUBLE):
    return torch.randn(shape, dtype=DOUBLE).to(dtype).requires_grad_(grad)


def apart(*shapes):
    """Two sets of points with no two coordinates so near that a difference quotient of a power's
    second derivative says nothing."""
    while True:
        a, b = (points(*shape) for shape in shapes)
        if (a.detach().unsqueeze(-2) - b.detach()).abs().min() > 1e-3:
            return a, b


def number(*values, grad=True):
    """A tensor of shape () for one value, else (L,)."""
    made = torch.tensor(values if len(values) > 1 else values[0], dtype=DOUBLE)
    return made.requires_grad_(grad)


def call(how, descriptor, a, b, values):
    if how == EAGER:
        tensors = (a,) if b is None else (a, b)
        return kl.run_kernel(descriptor, *tensors, **values)
    return operators.recorded(descriptor, a, b, values, 0)


def loss_gradients(found, tensors, along):
    return torch.autograd.grad(found, tensors, along, allow_unused=True)


def assert_same(found, wanted, **tolerance):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def differentiable(how, descriptor, values, a, b):
    """Once and twice, by points and hyperparameters."""
    given = {name: number(*entries) for name, entries in values.items()}

    def function(a, b, *tensors):
        return call(how, descriptor, a, b, dict(zip(given, tensors, strict=True)))

    assert gradcheck(function, (a, b, *given.values()))
    assert gradgradcheck(function, (a, b, *given.values()))


SMOOTH = {  # descriptor, hyperparameters
    "squares": (kl.squared_distance(), {}),
    "dot": (kl.dot_product(), {}),
    "gaussian": (kl.gaussian(), {"bandwidth": (1.7,)}),
    "gaussian (L,)": (kl.gaussian(), {"bandwidth": (1.7, 2.4)}),
    "polynomial": (kl.polynomial(3), {"gamma": (0.4,), "offset": (0.7,)}),
    "rational": (kl.rational_quadratic(), {"bandwidth": (1.5,), "alpha": (0.8, 1.3)}),
    "cauchy": (kl.cauchy(), {"bandwidth": (1.5,)}),
    "matern": (kl.matern52(), {"bandwidth": (2.0,)}),
    "l2": (kl.l2_distance(), {}),
    "p": (kl.p_distance(), {"p": (2.7,)}),
    "p (L,)": (kl.p_distance(), {"p": (2.3, 3.4)}),
    "pq": (kl.laplace_pq(), {"p": (2.4,), "q": (0.8, 1.7), "bandwidth": (2.0,)}),
    "powers": (
        kl.Pairwise(inner=norms.Power(), outer=norms.Power()),
        {"inner_p": (2.5,), "outer_p": (0.7,)},
    ),
    "custom": (
        kl.squared_distance(epilogue=CUSTOM.epilogue),
        {"gain": (0.3,), "shift": (0.1, 0.2)},
    ),
    "exponential": (EXPONENTIAL, {"p": (2.5,), "inner_scale": (-0.6, -0.3)}),
    "regularized": (kl.gaussian(), {"bandwidth": (1.7,), "regularization": (0.3, 0.4)}),
}


@pytest.mark.parametrize("how", slow_but((EAGER,), (EAGER, REGISTERED)))
@pytest.mark.parametrize("case", SMOOTH)
def test_first_and_second_gradients_are_right(case, how, seed):
    batch = (L,) if how == EAGER else ()
    differentiable(how, *SMOOTH[case], *apart((*batch, M, K), (N, K)))


ROUGH = {
    "l1": (kl.l1_distance(), {}),
    "laplace": (kl.laplace_l1(), {"bandwidth": (3.0,)}),
    "p": (kl.p_distance(), {"p": (1.3,)}),
    "small p": (kl.laplace_pq(), {"p": (0.7,), "q": (0.5,), "bandwidth": (3.0,)}),
    "sums": (kl.power_sum(), {"p": (0.8, 1.2)}),
    "exponential": (EXPONENTIAL, {"p": (1.2,), "inner_scale": (-0.6,)}),
}


@pytest.mark.parametrize("how", slow_but((EAGER,), (EAGER, REGISTERED)))
@pytest.mark.parametrize("case", ROUGH)
def test_gradients_of_kernels_with_edges_are_right(case, how, seed):
    # Apart from each other in every coordinate, as differences across an edge are no derivative.
    a = (torch.rand(M, K, dtype=DOUBLE) + torch.arange(K) % 2 * 4).requires_grad_()
    b = (torch.rand(N, K, dtype=DOUBLE) + 2).requires_grad_()
    differentiable(how, *ROUGH[case], a, b)


def stages():
    for operator, inner, outer in itertools.product(
        ("difference", "dot"), norms.INNER, norms.OUTER
    ):
        if outer is not norms.Root or inner is norms.Power:
            yield kl.Pairwise(operator, inner=inner(), outer=outer())


STAGES = [*stages()]
PLAIN_STAGES = [d for d in STAGES if isinstance(d.inner, kl.Identity) or d.outer == kl.Identity()]


@pytest.mark.parametrize("descriptor", slow_but(PLAIN_STAGES, STAGES), ids=lambda d: d.describe())
def test_every_combination_of_stages_has_its_gradient(descriptor, seed):
    values = {}
    if isinstance(descriptor.inner, norms.EXPONENTS):
        values["inner_p"] = (1.4,)
    if isinstance(descriptor.inner, norms.ExpPower):
        values["inner_scale"] = (-0.4,)
    if isinstance(descriptor.outer, norms.Power):
        values["outer_p"] = (0.6,)
    # Differences above 1, so that nothing is negative.
    a = (torch.rand(2, 3, dtype=DOUBLE) / 2 + 1).requires_grad_()
    b = (torch.rand(2, 3, dtype=DOUBLE) + 2.6).requires_grad_()
    differentiable(EAGER, descriptor, values, a, b)


@pytest.mark.parametrize("batches", [((), ()), ((2,), ()), ((2, 1), (3,))])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.3, 2.0, 2.5, 4.0, float("inf")])
def test_cdist_has_the_gradients_of_torch_zero_distances_included(p, batches, seed):
    x, y = (points(*batch, rows, K) for batch, rows in zip(batches, (M, N), strict=True))
    with torch.no_grad():
        y[..., 0, :] = x[..., 0, :].reshape(-1, K)[0]  # equal points
        if p != float("inf"):  # where torch gives each of equal coordinates the whole gradient
            y[..., 1, 2] = x[..., 1, 2].reshape(-1)[0]  # and an equal coordinate
    theirs = torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist")
    along = torch.randn_like(theirs)
    found = loss_gradients(kl.cdist(x, y, p), (x, y), along)
    assert_same(found, loss_gradients(theirs, (x, y), along))


def test_the_gradient_of_a_largest_difference_is_shared_by_equal_ones():
    x, y = torch.tensor([[3.0, -3.0, 1.0]], requires_grad=True), torch.zeros(1, 3)
    kl.cdist(x, y, float("inf")).backward()
    assert torch.equal(x.grad, torch.tensor([[0.5, -0.5, 0.0]]))


NAMED = {
    "l1": (kl.l1_distance, {}),
    "l2": (kl.l2_distance, {}),
    "p": (kl.p_distance, {"p": 1.3}),
    "small p": (kl.p_distance, {"p": 0.6}),
    "laplace": (kl.laplace_l2, {"bandwidth": 2.0}),
    "laplace_l1": (kl.laplace_l1, {"bandwidth": 2.0}),
    "matern32": (kl.matern32, {"bandwidth": 2.0}),
    "matern52": (kl.matern52, {"bandwidth": 2.0}),
    "gaussian": (kl.gaussian, {"bandwidth": 2.0}),
    "pq": (kl.laplace_pq, {"p": 1.3, "q": 0.7, "bandwidth": 2.0}),
    "q = p": (kl.laplace_pq, {"p": 0.7, "q": 0.7, "bandwidth": 2.0}),
}


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("how", [EAGER, REGISTERED])
@pytest.mark.parametrize("case", NAMED)
def test_equal_points_and_coordinates_give_no_gradient_and_no_nan(case, how, tensors, seed):
    make, values = NAMED[case]
    a = torch.randint(0, 3, (8, 2)).double().requires_grad_()  # many of both
    if tensors:
        values = {name: number(value) for name, value in values.items()}
    k = call(how, make(), a, a.detach(), values)
    leaves = (a, *(values.values() if tensors else ()))
    found = loss_gradients(k, leaves, torch.ones_like(k))
    pairs = (a.detach()[:, None] != a.detach()).any(-1)
    apart = [  # pair by pair, without those of equal points
        call(how, make(), a[i : i + 1], a.detach()[j : j + 1], values)
        for i, j in pairs.nonzero().tolist()
    ]
    wanted = loss_gradients(torch.cat(apart), leaves, torch.ones(len(apart), 1, dtype=DOUBLE))
    assert_same(found, wanted)
    assert all(g.isfinite().all() for g in found)
    k = call(how, make(), a, a.detach(), values)
    (first,) = torch.autograd.grad(k.sum(), a, create_graph=True)
    if first.requires_grad:
        assert torch.autograd.grad(first.sum(), a)[0].isfinite().all()


def test_third_gradients_of_smooth_kernels(seed):
    a, b = points(2, 2), points(2, 2)

    def function(a, b):
        k = kl.run_kernel(kl.gaussian(), a, b, bandwidth=1.5).sum()
        return torch.autograd.grad(k, (a, b), create_graph=True)

    assert gradgradcheck(function, (a, b))


# Which arguments, of which shapes.


@pytest.mark.parametrize("shape", [(), (1,), (L,)])
@pytest.mark.parametrize("name", ["p", "q", "bandwidth", "regularization"])
def test_hyperparameters_of_every_shape_receive_theirs(name, shape, seed):
    a, b = points(L, M, K, grad=False), points(N, K, grad=False)
    values = {"p": 1.4, "q": 0.9, "bandwidth": 3.0, "regularization": 0.5}
    entries = (torch.rand(shape, dtype=DOUBLE) + 0.7).requires_grad_()
    found = kl.run_kernel(kl.laplace_pq(), a, b, **(values | {name: entries}))
    along = torch.randn_like(found)
    (ours,) = torch.autograd.grad(found, entries, along)
    wanted = torch.zeros(L, dtype=DOUBLE)
    for l in range(L):
        value = entries.detach().expand(L)[l].clone().requires_grad_()
        one = kl.run_kernel(kl.laplace_pq(), a[l], b, **(values | {name: value}))
        (wanted[l],) = torch.autograd.grad(one, value, along[l])
    assert ours.shape == shape
    torch.testing.assert_close(ours, wanted if shape == (L,) else wanted.sum().view(shape))


@pytest.mark.parametrize("width", [2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.ones(L)])
@pytest.mark.parametrize(
    ("left", "right"), [((M,), (N,)), ((1, M), (N,)), ((M,), (L, N)), ((L, M), (1, N))]
)
def test_recorded_calls_have_the_shapes_of_eager_ones(left, right, width, seed):
    a, b = points(*left, K), points(*right, K)
    found = call(REGISTERED, kl.laplace_l1(), a, b, {"bandwidth": width})
    torch.testing.assert_close(found, call(EAGER, kl.laplace_l1(), a, b, {"bandwidth": width}))


@pytest.mark.parametrize("shapes", [((M,), (L, N)), ((L, M), (1, N)), ((1, M), (N,))])
def test_broadcast_batches_are_summed(shapes, seed):
    a, b = (points(*shape, K) for shape in shapes)
    found = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=number(2.0, 3.0, grad=False))
    along = torch.randn_like(found)
    ours = torch.autograd.grad(found, (a, b), along)
    wide_a, wide_b = (x.expand(L, *x.shape[-2:]) for x in (a, b))
    parts = [
        kl.run_kernel(kl.laplace_l1(), wide_a[l], wide_b[l], bandwidth=2.0 + l) for l in range(L)
    ]
    assert_same(ours, torch.autograd.grad(torch.stack(parts), (a, b), along))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [EAGER, REGISTERED])
@pytest.mark.parametrize("case", ["gaussian", "pq", "polynomial"])
def test_gradients_of_every_dtype_match_float64(case, how, dtype, seed):
    descriptor, values = SMOOTH[case]
    given = {name: number(entries[0]) for name, entries in values.items()}
    a, b = (points(65, 9, dtype=dtype) for _ in range(2))
    k = call(how, descriptor, a, b, given)
    along = torch.randn(65, 65).to(dtype)
    found = torch.autograd.grad(k, (a, b, *given.values()), along)
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    k = kl.run_kernel(descriptor, *wide, **given)
    wanted = torch.autograd.grad(k, (*wide, *given.values()), along.double())
    gate = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, theirs, x in zip(found[:2], wanted, (a, b), strict=False):
        assert ours.dtype == x.dtype
        assert (ours - theirs).norm() <= gate * theirs.norm()
    exact = [x.detach() for x in wide]
    for name, ours, theirs in zip(given, found[2:], wanted[2:], strict=True):
        assert ours.dtype == given[name].dtype
        ends = [given | {name: given[name].detach() + step} for step in (1e-5, -1e-5)]
        values = [kl.run_kernel(descriptor, *exact, **end).detach() for end in ends]
        terms = (values[0] - values[1]) / 2e-5 * along.double()  # whose sum may cancel
        assert (ours - theirs).abs() <= gate * terms.abs().sum()


@pytest.mark.parametrize("name", ["a", "b", "bandwidth", "out"])
def test_a_gradient_is_not_recorded_through_out(name):
    given = {"a": points(M, K), "b": points(N, K), "bandwidth": number(2.0)}
    given = {key: t.detach() for key, t in (given | {"out": torch.ones(M, N).double()}).items()}
    given[name].requires_grad_()
    a, b = given.pop("a"), given.pop("b")
    for accumulate in (False, True):
        with pytest.raises(RuntimeError, match=f"^{name} requires a gradient.* out"):
            kl.run_kernel(kl.laplace_l1(), a, b, accumulate=accumulate, **given)
    with torch.no_grad():
        kl.run_kernel(kl.laplace_l1(), a, b, **given)
    if name != "out":
        given.pop("out")
        with pytest.raises(ValueError, match="no out is given"):
            kl.run_kernel(kl.laplace_l1(), a, b, accumulate=True, **given)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["gaussian", "pq", "l1"])
def test_a_symmetric_kernel_has_both_roles_of_a(case, seed):
    descriptor, values = (SMOOTH | ROUGH)[case]
    values = {name: number(entries[0]) for name, entries in values.items()}
    if descriptor.epilogue:
        values["regularization"] = number(0.3)
    a = points(L, M, K)
    k = kl.run_kernel(descriptor.replace(symmetric=True), a, **values)
    whole = kl.run_kernel(descriptor, a, a, **values)
    along = torch.randn_like(k)
    leaves = (a, *values.values())
    assert_same(torch.autograd.grad(k, leaves, along), torch.autograd.grad(whole, leaves, along))

    def function(a, *tensors):
        given = dict(zip(values, tensors, strict=True))
        return kl.run_kernel(descriptor.replace(symmetric=True), a, **given)

    assert gradgradcheck(function, leaves) or case == "l1"


@pytest.mark.parametrize("accuracy", ["whole", "rows", "batch"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_add_up(symmetric, accuracy, monkeypatch, seed):
    descriptor = kl.laplace_pq(symmetric=symmetric)
    a = points(3, 7, K)
    b = None if symmetric else points(6, K)
    values = {"p": number(1.3), "q": number(0.9, 1.1, 1.3), "bandwidth": number(3.0)}
    values["regularization"] = number(0.2)
    leaves = (a, *([] if symmetric else [b]), *values.values())
    offsets = {} if symmetric else {"row_offset": 2, "col_offset": 1}
    given = (a,) if symmetric else (a, b)

    def found():
        k = kl.run_kernel(descriptor, *given, **offsets, **values)
        return torch.autograd.grad(k, leaves, along)

    along = torch.randn(3, 7, 7 if symmetric else 6, dtype=DOUBLE)
    wanted = found()
    fewest, entries = {"whole": (128, 1), "rows": (2, 1), "batch": (128, 100)}[accuracy]
    monkeypatch.setattr(backward, "FEWEST_ROWS", fewest)
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", entries)
    assert_same(found(), wanted)


@pytest.mark.parametrize("shapes", [((0, K), (N, K)), ((M, K), (0, K)), ((M, 0), (N, 0))])
@pytest.mark.parametrize("batch", [(), (0,), (L,)])
def test_empty_inputs_have_empty_gradients(batch, shapes):
    a, b = (points(*batch, *shape) for shape in shapes)
    width = number(2.0)
    k = kl.run_kernel(kl.gaussian(), a, b, bandwidth=width)
    found = torch.autograd.grad(k.sum(), (a, b, width))
    assert [g.shape for g in found] == [a.shape, b.shape, width.shape]
    assert not any(g.any() for g in found)


def test_only_inputs_are_kept(seed):
    a, b, width = points(50, K), points(40, K), number(2.0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kl.run_kernel(kl.gaussian(), a, b, bandwidth=width)
    assert sum(t.numel() for t in kept) == a.numel() + b.numel() + 1


# What torch does to tensors and gradients.


def test_one_tensor_in_several_roles(seed):
    a = points(M, K)
    width = number(2.0)
    k = kl.run_kernel(kl.polynomial(2), a * width, a, gamma=width, offset=width)
    found = torch.autograd.grad(k.sum(), (a, width))
    wanted = torch.autograd.grad(((width * (a * width) @ a.T + width) ** 2).sum(), (a, width))
    assert_same(found, wanted)
    assert gradgradcheck(
        lambda a, w: kl.run_kernel(kl.polynomial(2), a * w, a, gamma=w, offset=w), (a, width)
    )


@pytest.mark.parametrize("kind", ["expanded", "transposed", "negated", "zero"])
def test_gradients_that_arrive_in_any_form(kind, seed):
    a, b = points(M, K), points(M, K)
    k = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=2.0)
    along = {
        "expanded": torch.tensor(1.5, dtype=DOUBLE).expand(M, M),
        "transposed": torch.randn(M, M, dtype=DOUBLE).T,
        "negated": torch.randn(M, M, dtype=torch.complex128).conj().imag,
        "zero": torch._efficientzerotensor(M, M, dtype=DOUBLE),
    }[kind]
    found = torch.autograd.grad(k, (a, b), along, retain_graph=True)
    assert_same(found, torch.autograd.grad(k, (a, b), along.clone().resolve_neg()))


def test_inputs_of_any_layout(seed):
    wide = torch.randn(K, 2 * M, dtype=torch.complex128)
    views = {
        "transposed": wide.real.T,
        "step": wide.real.T[::2],
        "negated": wide.conj().imag.T,
        "expanded": wide.real[:1].expand(M, 2 * M)[:, :K],
    }
    b = points(N, K)
    for name, view in views.items():
        x, copy = view.detach().requires_grad_(), view.clone().resolve_neg().requires_grad_()
        found = torch.autograd.grad(kl.cdist(x, b, 1.5).sum(), (x, b))
        assert_same(found, torch.autograd.grad(kl.cdist(copy, b, 1.5).sum(), (copy, b)), msg=name)


def test_what_changed_in_between_is_refused():
    a, b = points(M, K), points(N, K, grad=False)
    k = kl.run_kernel(kl.l1_distance(), a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        k.sum().backward()


def test_a_tensor_exponent_of_the_host_may_be_half_or_float(seed):
    a, b = points(M, K), points(N, K)
    p = torch.tensor([1.5], dtype=torch.float32, requires_grad=True)
    kl.run_kernel(kl.p_distance(), a, b, p=p).sum().backward()
    exact = torch.tensor(1.5, dtype=DOUBLE, requires_grad=True)
    ((a - b[:, None]).abs() ** exact).sum(-1).pow(1 / exact).sum().backward()
    assert (p.grad.dtype, p.grad.shape) == (torch.float32, (1,))
    torch.testing.assert_close(p.grad.double()[0], exact.grad)


def test_epsilon_cuts_gradients_off(seed):
    a, b = points(M, K), points(N, K)
    known = kl.cdist(a, b, 1).detach()  # of which one is the limit, to the last bit
    limit = known.median().item()
    k = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=2.0, epsilon=limit)
    distance = (a[:, None] - b).abs().sum(-1)
    wanted = torch.exp(-torch.where(known < limit, 0.0, distance) / 2)
    along = torch.randn_like(k)
    torch.testing.assert_close(k, wanted)
    assert_same(loss_gradients(k, (a, b), along), loss_gradients(wanted, (a, b), along))


def test_no_gradient_reaches_what_no_value_depends_on(seed):
    a, gain = points(M, K), number(2.0)
    constant = kl.l1_distance(epilogue=kl.Custom("gain * 2", ("gain",)))
    k = kl.run_kernel(constant, a, a.detach(), gain=gain)
    to_a, to_gain = torch.autograd.grad(k.sum(), (a, gain))
    assert not to_a.any() and to_gain == 2 * M * M

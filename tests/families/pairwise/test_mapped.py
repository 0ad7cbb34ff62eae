"""torch.vmap of pairwise calls and of reductions: what calls one by one give."""

import pytest
import torch

import kernlib as kl

SIZE, L, M, N, K = 4, 3, 7, 5, 6
GAUSSIAN, LAPLACE = kl.gaussian(), kl.laplace_l1()


def kernel(a, b, width):
    return kl.run_kernel(GAUSSIAN, a, b, bandwidth=width)


def product(a, b, v, width):
    return kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=width)


def nearest(a, b):
    return kl.kernel_topk(kl.l1_distance(), a, b, 3)


def smallest(a, b):
    return kl.kernel_min(kl.l1_distance(), a, b)


def nearest_by_width(a, b, width):
    return kl.kernel_topk(GAUSSIAN, a, b, 2, bandwidth=width)


def nearest_by_number(a, b):
    return kl.kernel_topk(GAUSSIAN, a, b, 2, bandwidth=1.5)


def nearest_by_exponent(a, b):
    return kl.kernel_argmin(kl.p_distance(), a, b, p=3.0)


def by_lengths(a, b, lengths):
    return kl.kernel_sum(GAUSSIAN, a, b, lengthscale=lengths)


def total(a, b, width):
    return kl.kernel_logsumexp(LAPLACE, a, b, bandwidth=width)


A, B, W = (M, K), (N, K), ()
# A function, and the shapes of one call's operands.
CASES = {
    "cdist": (kl.cdist, (A, B)),
    "cdist of batches": (kl.cdist, ((L, M, K), (1, N, K))),
    "kernel": (kernel, (A, B, W)),
    "kernel, one of a batch": (kernel, ((L, M, K), B, W)),
    "kernel, widths of a batch": (kernel, (A, (L, N, K), (L,))),
    "product with a vector": (product, (A, B, (N,), W)),
    "product with a matrix": (product, (A, B, (N, 2), W)),
    "product of batches": (product, ((L, M, K), B, (L, N, 2), (L,))),
    "product with a batch": (product, (A, B, (L, N, 2), W)),
    "log-sum-exp": (total, (A, B, W)),
    "nearest": (nearest, (A, B)),
    "smallest of batches": (smallest, ((L, M, K), B)),
    "nearest by a width": (nearest_by_width, (A, B, W)),
    "nearest by widths of a batch": (nearest_by_width, ((L, M, K), B, (L,))),
    "nearest by a number": (nearest_by_number, (A, B)),
    "nearest by an exponent": (nearest_by_exponent, (A, B)),
    "lengths of features": (by_lengths, (A, B, (K,))),
}


def tensor(shape):
    return torch.rand(shape) + 1 if len(shape) < 2 else torch.randn(shape)


def compared(run, tensors, dims):
    found = torch.vmap(run, in_dims=dims)(*tensors)
    each = [
        run(*(t if d is None else t.select(d, n) for t, d in zip(tensors, dims, strict=True)))
        for n in range(SIZE)
    ]
    if isinstance(found, tuple):
        for ours, theirs in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(found, torch.stack(each), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_any_operand_may_be_mapped_over(case, seed):
    run, shapes = CASES[case]
    given = [tensor(shape) for shape in shapes]
    alone = [{place} for place in range(len(shapes))]
    for places in (*alone, set(range(len(shapes)))):
        tensors = [
            torch.stack([t + n for n in range(SIZE)]) if place in places else t
            for place, t in enumerate(given)
        ]
        dims = tuple(0 if place in places else None for place in range(len(shapes)))
        compared(run, tensors, dims)


def test_any_axis_and_one_call_alone(seed):
    a, width = torch.randn(M, K, SIZE), torch.rand(SIZE)
    compared(lambda a, w: kernel(a, torch.ones(B), w), (a, width), (2, 0))
    one = torch.vmap(lambda w: kernel(a[..., 0], torch.ones(B), w))(width[:1])
    assert one.shape == (1, M, N)


def test_mapped_twice(seed):
    a, b = torch.randn(2, SIZE, *A), torch.randn(SIZE, *B)
    found = torch.vmap(torch.vmap(kl.cdist), (0, None))(a, b)
    torch.testing.assert_close(found, kl.cdist(a, b))


@pytest.mark.few(by="case")
@pytest.mark.parametrize("case", ["kernel", "product with a vector", "nearest"])
def test_gradients_by_autograd_pass_through(case, seed):
    run, shapes = CASES[case]
    tensors = [tensor((SIZE, *shape)).requires_grad_() for shape in shapes]
    mapped, each = torch.vmap(run)(*tensors), [run(*one) for one in zip(*tensors, strict=True)]
    if isinstance(mapped, tuple):
        mapped, each = mapped[0], [values for values, _ in each]
    found = torch.autograd.grad(mapped.square().sum(), tensors)
    wanted = torch.autograd.grad(torch.stack(each).square().sum(), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Calls of none of the mapped tensors, which stand between the others.
UNMAPPED = {
    "kernel": lambda a, b: kernel(a, b, 2.0),
    "symmetric": lambda a, b: kl.run_kernel(kl.gaussian(symmetric=True), a, bandwidth=2.0),
    "distance": lambda a, b: kl.cdist(a, b),
    "product": lambda a, b: product(a, b, torch.ones(N, 2), 2.0),
    "sum": lambda a, b: kl.kernel_sum(LAPLACE, a, b, bandwidth=2.0),
    "logarithm": lambda a, b: kl.kernel_logsumexp(LAPLACE, a, b, bandwidth=2.0),
    "smallest": lambda a, b: smallest(a, b)[0],
    "nearest": lambda a, b: nearest(a, b)[0],
    "categories": lambda a, b: kl.run_kernel(kl.gaussian(categories=1), a, b, **CODES),
    "product with categories": lambda a, b: kl.kernel_matmul(
        kl.gaussian(categories=1), a, b, b, **CODES
    ),
    "nearest with categories": lambda a, b: kl.kernel_topk(
        kl.gaussian(categories=1), a, b, 2, **CODES
    )[0],
}
CODES = {
    "a_codes": torch.arange(M)[:, None] % 3, "b_codes": torch.arange(N)[:, None] % 3,
    "tables": 1.0 - torch.eye(3)[None], "bandwidth": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("case", UNMAPPED)
def test_a_call_inside_whose_tensors_are_not_mapped_is_recorded(case, seed):
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    scales, call = torch.rand(SIZE), UNMAPPED[case]
    used = [t for t in (a, b) if t is a or case != "symmetric"]
    mapped = torch.vmap(lambda scale: scale * call(a, b))(scales)
    each = scales.view(-1, *[1] * (mapped.dim() - 1)) * call(a, b)
    torch.testing.assert_close(mapped, each)
    found, wanted = (torch.autograd.grad(y.square().sum(), used) for y in (mapped, each))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["kernel", "symmetric", "distance", "sum", "logarithm"])
def test_a_call_inside_whose_tensors_are_not_differentiated_is_computed(case, seed):
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    call = UNMAPPED[case]
    found = torch.func.grad(lambda scale: (scale * call(a, b)).sum())(torch.ones(()))
    torch.testing.assert_close(found, call(a, b).sum().detach())


REFUSED = {
    "grad": lambda a, b: torch.func.grad(lambda a: kernel(a, b, 2.0).sum())(a[0]),
    "grad by a number": lambda a, b: torch.func.grad(lambda w: kernel(a[0], b, w).sum())(
        torch.ones(())
    ),
    "grad inside": lambda a, b: torch.vmap(torch.func.grad(lambda a: kl.cdist(a, b).sum()))(a),
    "grad outside": lambda a, b: torch.func.grad(
        lambda a: torch.vmap(lambda a: kernel(a, b, 2.0))(a).sum()
    )(a),
    "forward mode": lambda a, b: torch.func.jvp(lambda a: kernel(a, b, 2.0), (a[0],), (a[0],)),
    "out": lambda a, b: torch.vmap(
        lambda a: kl.run_kernel(kl.l1_distance(), a, b, out=torch.empty(M, N))
    )(a),
    "reduction": lambda a, b: torch.func.grad(
        lambda a: kl.kernel_sum(GAUSSIAN, a, b, bandwidth=2.0).sum()
    )(a[0]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case, seed):
    with pytest.raises(RuntimeError, match=r"support as torch\.vmap alone, where they take no out"):
        REFUSED[case](torch.randn(SIZE, *A), torch.randn(B))

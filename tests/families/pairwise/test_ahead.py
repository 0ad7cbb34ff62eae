"""Kernels that are listed ahead of calls, of reductions and of backward passes too, are those that
the calls load, on GPUs that exist only by name."""

import random

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.cli.options import Sizes
from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.gradients import backward, products
from kernlib.families.pairwise.reductions import blocks
from kernlib.families.pairwise.reductions import gradients as reduced
from kernlib.families.pairwise.reductions.arguments import Request
from kernlib.jit import service, targets
from tests.architecture import golden_launches
from tests.support import fakes
from tests.support.fakes import OnGpu

GAUSSIAN, L1 = kl.gaussian(), kl.laplace_l1()
DOUBLE, HALF = torch.float64, torch.float16


def points(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).as_subclass(OnGpu).requires_grad_()


def number(dtype=torch.float32):
    return points(dtype=dtype)


@pytest.fixture
def used(monkeypatch):
    """The kernels that calls ask for, in order."""
    fakes.forget()
    golden_launches.install(monkeypatch)
    empty, zeros = torch.empty, torch.zeros

    def of_zeros(*size, **options):  # places are read, though nobody has written them
        made = empty if str(options.get("device")) == "meta" else zeros
        return made(*size, **options)

    monkeypatch.setattr(torch, "empty", of_zeros)
    seen, loaded = [], service.loaded

    def noted(spec, device, arch):
        seen.append(spec)
        return loaded(spec, device, arch)

    monkeypatch.setattr(service, "loaded", noted)
    # What autograd hands over has forgotten that it is on a GPU.
    for module in (backward, reduced):
        real = module.gradients
        monkeypatch.setattr(module, "gradients", lambda *given, f=real: f(*map(there, given)))
    yield seen
    fakes.forget()


def there(value):
    """A value with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.as_subclass(OnGpu)
    if isinstance(value, dict):
        return {name: there(each) for name, each in value.items()}
    if isinstance(value, Request):
        return Request(*map(there, value))
    return tuple(map(there, value)) if type(value) is tuple else value


def call(descriptor, tensors, values) -> None:
    """A call, and backward passes of its first result."""
    values = dict(values)
    name = values.pop("reduction", None)
    function = getattr(kl, name) if name else kl.run_kernel
    if name and descriptor.symmetric:
        tensors = (tensors[0], None, *tensors[1:])
    made = function(descriptor, *tensors, **values)
    made = made[0] if isinstance(made, tuple) else made
    if not made.requires_grad:
        return
    plain = made.as_subclass(torch.Tensor)
    ones = torch.ones((), dtype=plain.dtype).expand(plain.shape)
    for gradient in (torch.ones(plain.shape, dtype=plain.dtype), ones):
        plain.backward(gradient, retain_graph=True)


def of(reduction, **values):
    return {"reduction": f"kernel_{reduction}", **values}


def calls():
    a, b, v, thin, few = (
        points(100, 30),
        points(83, 30),
        points(83, 4),
        points(90, 3),
        points(70, 3),
    )
    a64, b64, v64 = (
        points(100, 30, dtype=DOUBLE),
        points(83, 30, dtype=DOUBLE),
        points(83, dtype=DOUBLE),
    )
    half = [points(*t.shape, dtype=HALF) for t in (thin, few)]
    plain = points(90, 3).detach()
    return {
        "matrix": (GAUSSIAN, (a, b), {"bandwidth": number()}),
        "matrix, a alone": (L1, (a, b.detach()), {"bandwidth": 2.0}),
        "matrix, plain": (kl.l1_distance(), (a, b), {}),
        "matrix of half types": (GAUSSIAN, half, {"bandwidth": 2.0}),
        "matrix, symmetric": (kl.gaussian(symmetric=True), (a,), {"bandwidth": number()}),
        "matrix, p": (kl.p_distance(), (a, b), {"p": number()}),
        "matrix, infinite": (kl.p_distance(), (a, b), {"p": float("inf")}),
        "matrix, batches": (L1, (points(2, 9, 5), points(7, 5)), {"bandwidth": number()}),
        "matrix, products": (kl.dot_product(), (a, b), {}),
        "matrix, lengthscale": (GAUSSIAN, (a, b), {"lengthscale": points(30)}),
        "matmul": (GAUSSIAN, (a, b, v), of("matmul", bandwidth=number())),
        "matmul, v alone": (L1, (plain, few.detach(), points(70, 2)), of("matmul", bandwidth=2.0)),
        "matmul of few features": (GAUSSIAN, (thin, few, points(70)), of("matmul", bandwidth=2.0)),
        "matmul, shared": (GAUSSIAN, (thin, thin, points(90)), of("matmul", bandwidth=number())),
        "matmul, symmetric": (
            kl.gaussian(symmetric=True),
            (thin, points(90, 2)),
            of("matmul", bandwidth=2.0, regularization=0.1),
        ),
        "matmul of norms": (kl.laplace_l2(), (thin, few, points(70)), of("matmul", bandwidth=2.0)),
        "matmul, signed": (
            kl.Pairwise(inner=kl.Identity()), (plain, few, points(70, 2)), of("matmul"),
        ),
        "matmul of many columns": (L1, (thin, few, points(70, 90)), of("matmul", bandwidth=2.0)),
        "matmul, a batch of v": (L1, (thin, few, points(3, 70, 9)), of("matmul", bandwidth=2.0)),
        "matmul of half types": (GAUSSIAN, (*half, half[1]), of("matmul", bandwidth=2.0)),
        "matmul of float64": (GAUSSIAN, (a64, b64, v64), of("matmul", bandwidth=number(DOUBLE))),
        "matmul, feature map": (
            GAUSSIAN, (a, b, v), of("matmul", bandwidth=2.0, feature_map=points(30, 4)),
        ),
        "sum": (kl.p_distance(), (thin, few), of("sum", p=1.5)),
        "sum of few, p": (kl.p_distance(), (thin, few), of("sum", p=number())),
        "logsumexp": (kl.squared_distance(), (a, b), of("logsumexp")),
        "min": (GAUSSIAN, (a, b), of("min", bandwidth=number())),
        "argmin": (L1, (a, b), of("argmin", bandwidth=number())),
        "topk": (L1, (thin, few), of("topk", k=5, bandwidth=number())),
        "topk of many": (kl.l1_distance(), (thin, points(600, 3)), of("topk", k=300, largest=True)),
    }  # fmt: skip


@pytest.mark.parametrize("small", [False, True], ids=["whole", "by blocks"])
@pytest.mark.parametrize("name", calls())
def test_what_is_listed_is_what_a_call_loads(name, small, used, monkeypatch):
    """Neither less nor more; ``small`` blocks, so that there are several of most kinds."""
    if small:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 4 * 700)
        monkeypatch.setattr(reduced, "MOST_BYTES", 4 * 3 * 2900)
        monkeypatch.setattr(backward, "BLOCK_ENTRIES", 3000)
    descriptor, tensors, values = calls()[name]
    listed = ahead.specs(descriptor, "sm_90a", tensors, values, 0)
    fakes.forget()
    used.clear()
    call(descriptor, tensors, values)
    assert set(used) == set(listed) and len(set(listed)) == len(listed) > 0


def test_products_of_gradients_are_listed(used, monkeypatch):
    """Those of large calls, which are said to be large here, by the kernel of dot products."""
    monkeypatch.setattr(products, "is_torchs", lambda *given: False)
    monkeypatch.setattr(products, "FEWEST", 1)
    monkeypatch.setattr(products, "SHORTEST_PART", 8)
    a, b = points(64, 24), points(96, 24)
    for descriptor, values in ((GAUSSIAN, {"bandwidth": number()}), (kl.dot_product(), {})):
        for given in (values, of("matmul", **values)):
            tensors = (a, b) if given is values else (a, b, points(96, 20))
            listed = ahead.specs(descriptor, "sm_90a", tensors, given, 0)
            fakes.forget()
            used.clear()
            call(descriptor, tensors, given)
            assert set(used) == set(listed)
            assert any("dot_product" in spec.description for spec in listed)


@pytest.mark.parametrize(
    "name", ["matmul of few features", "matmul", "logsumexp", "topk", "matrix"]
)
def test_a_first_call_after_prepare_compiles_nothing(name, used, monkeypatch):
    descriptor, tensors, values = calls()[name]
    kl.prepare(descriptor, *tensors, **values)

    def refuse(spec, *rest):
        raise AssertionError(f"{spec.description} was not prepared")

    monkeypatch.setattr(service, "build", refuse)
    monkeypatch.setattr(service, "build_ahead", refuse)
    monkeypatch.setattr(service, "kernel", refuse)
    kl.prepare(descriptor, *tensors, **values)
    call(descriptor, tensors, values)


def test_meta_tensors_list_what_their_likes_load(used):
    for descriptor, tensors, values in list(calls().values())[::4]:
        wanted = ahead.specs(descriptor, "sm_90a", tuple(tensors), values, 0)
        meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
        given = {
            n: torch.empty(v.shape, device="meta", requires_grad=True)
            if isinstance(v, torch.Tensor)
            else v
            for n, v in values.items()
        }
        for one, t in zip(meta, tensors, strict=True):
            one.requires_grad_(t.requires_grad)
        assert ahead.specs(descriptor, "sm_90a", tuple(meta), given, 0) == wanted


def test_alignment_and_strides_are_those_of_the_tensors(used):
    wide = points(101, 40).detach()
    for a in (wide[1:, 1:31], wide[:100, :30], wide.T[:30].T[:100]):
        given = a.requires_grad_(), points(83, 30)
        listed = ahead.specs(kl.l1_distance(), "sm_90a", given, {}, 0)
        fakes.forget()
        used.clear()
        call(kl.l1_distance(), given, {})
        assert set(used) == set(listed)


# GPUs of an arch.


def meta(*shape, gradient=True, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_no_gpu_of_an_arch_misses_a_kernel(capability, used, monkeypatch):
    """Of the numbers of multiprocessors that its GPUs have the ends and some between."""
    arch = targets.arch_of(capability)
    fewest, most = targets.MULTIPROCESSORS[arch]
    for descriptor, tensors, values in (
        (GAUSSIAN, (meta(3000, 200), meta(2000, 200)), {"bandwidth": meta()}),
        (L1, (meta(900, 40), meta(800, 40)), {"bandwidth": 1.0}),
        (L1, (meta(900, 40), meta(90, 40)), of("topk", k=5, bandwidth=1.0)),
        (GAUSSIAN, (meta(9000, 30), meta(3000, 30), meta(3000, 200)), of("matmul", bandwidth=1.0)),
    ):
        listed = set(ahead.specs(descriptor, arch, tensors, values))
        for count in (fewest, *range(fewest + 1, most, 9), most):
            monkeypatch.setitem(fakes.MODELS, 0, (capability, f"GPU of {count}", count))
            fakes.forget()
            assert set(ahead.specs(descriptor, arch, tensors, values, 0)) <= listed


def test_a_rehearsal_leaves_no_plan_behind(used):
    a, b = meta(30, 4), meta(20, 4)
    before = ahead.specs(L1, "sm_80", (a, b), of("sum", bandwidth=1.0))
    assert ahead.specs(L1, "sm_80", (a, b), of("sum", bandwidth=1.0)) == before
    assert kl.kernel_sum(L1, a, b, bandwidth=1.0).is_meta
    assert kl.run_kernel(L1, a, b, bandwidth=1.0).is_meta
    assert used == []


def test_large_calls_are_listed_in_a_moment():
    """Of a million points, 60000 blocks of which a few kinds are looked at."""
    a, v = meta(1_000_000, 30, dtype=DOUBLE), meta(1_000_000, dtype=DOUBLE)
    listed = ahead.specs(GAUSSIAN, "sm_90a", (a, a, v), of("matmul", bandwidth=1.0))
    assert 0 < len(listed) < 20


# Ranges of sizes, as the command line makes them.


@pytest.mark.few(1)
@pytest.mark.parametrize(("descriptor", "features", "values"), [
    (GAUSSIAN, 3, of("matmul", bandwidth=1.0)), (GAUSSIAN, 64, of("matmul", bandwidth=1.0)),
    (L1, 20, of("topk", k=5, bandwidth=1.0)),
])  # fmt: skip
def test_sizes_within_a_range_take_kernels_that_are_listed_for_it(descriptor, features, values):
    _, sizes = Sizes().convert("M=900..70000", None, None)

    def listed(m, n):
        tensors = meta(m, features), meta(n, features)
        tensors += (meta(n, 2),) if "matmul" in values["reduction"] else ()
        return ahead.specs(descriptor, "sm_90a", tensors, values)

    known = {spec for m in sizes for n in sizes for spec in listed(m, n)}
    chosen = random.Random(0)
    for _ in range(20):
        m, n = (int(2 ** chosen.uniform(9.9, 16)) for _ in range(2))
        assert set(listed(m, n)) <= known, (m, n)


def test_cpu_tensors_of_a_reduction_are_only_checked():
    x, there = torch.zeros(9, 3, requires_grad=True), meta(9, 3)
    kl.prepare(L1, x, x, bandwidth=1.0, reduction="kernel_sum")
    with pytest.raises(ValueError, match="k must be from 1 to the 9 points"):
        kl.prepare(L1, x, x, bandwidth=1.0, reduction=kl.kernel_topk, k=10)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        kl.prepare(L1, there, there, bandwidth=1.0, reduction="kernel_sum")

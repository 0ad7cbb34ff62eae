"""Kernels that could compute a product, timed and kept: with GPUs that exist only by name, whose
kernels the host runs."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead, tuner
from kernlib.families.kronecker_product.lowering import choose
from kernlib.jit import tuning
from kernlib.jit.entry import Entry
from tests.families.kronecker_product.cases import GATES, by_modes
from tests.families.kronecker_product.emulated import kinds, operands
from tests.families.kronecker_product.lowering.test_choose import NUMBERS, problem
from tests.families.kronecker_product.lowering.test_choose import SHAPES as NAMED
from tests.support.emulation.gpus import gpu, host

pytestmark = pytest.mark.emulated

F16, F32 = torch.float16, torch.float32
SHAPES = ((8, 8), (16, 8))
BUILT = Entry("kronecker_product", b"", {})


@pytest.fixture
def kept(monkeypatch):
    """Choices that are kept, by signature."""
    found = {}
    monkeypatch.setattr(
        tuning, "choice", lambda family, model, signature: found.get((family, model, signature))
    )

    def keep(family, model, signature, choice):
        found[family, model, signature] = choice
        return True

    monkeypatch.setattr(tuning, "keep", keep)
    return found


def fastest(monkeypatch, kind):
    """Let kernels of one kind take the least time."""

    def measure(launches, names, progress):
        return [1.0 if f" {kind} " in name else 2.0 for name in names]

    monkeypatch.setattr(tuner, "measure", measure)


@pytest.mark.parametrize("kind", ["modes", "halves"])
def test_the_fastest_is_kept_and_runs(kind, gpus, kept, monkeypatch, seed):
    fastest(monkeypatch, kind)
    monkeypatch.setattr(tuner, "build_all", lambda kernels, *_: [BUILT] * len(kernels))
    descriptor = kl.KroneckerProduct(SHAPES, epilogue=(kl.Bias(), kl.Add()))
    x, *factors = operands(SHAPES, 5, "right", F16)
    bias, y = torch.randn(64).to(F16), torch.randn(5, 64).to(F16)
    given = [*map(gpu, (x, *factors))]
    arguments = {"bias": gpu(bias), "y": gpu(y), "beta": 2.0}
    out = torch.full((5, 64), 7.0, dtype=F16)
    found = kl.tune(descriptor, *given, out=gpu(out), **arguments, progress=False)
    assert found.winner == {"kind": kind} and found.kept and len(found.timings) == 2
    assert (out == 7).all()
    gpus.specs.clear()
    y_now = host(kl.run_kernel(descriptor, *given, **arguments))
    assert kinds(gpus) == [kind]
    wanted = by_modes(x, factors) + bias.double() + 2 * y.double()
    assert (y_now.double() - wanted).norm() <= GATES[F16] * wanted.norm()
    assert ahead.specs(descriptor, "sm_90a", tuple(given), arguments, 0) == gpus.specs


@pytest.mark.few(1)
def test_a_choice_that_nobody_knows_is_passed_over():
    given = problem(5, SHAPES)
    for odd in ({"kind": "other"}, {"tile": "64"}, {"kind": "slabs"}, {"kind": "hopper"}):
        tuned = choose.lower((), given, "sm_90a", 132, odd)
        assert tuned == choose.lower((), given, "sm_90a", 132)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_kinds_are_of_their_own_kernels(dtype, side):
    """In one launch or several; products that are not named so are never those."""
    numbers = {given[0]: name for name, given in NUMBERS.items() if given[1] == "fp32"}[dtype]
    words = {
        "hopper": {"hopper", "hopper_slabs"},
        "halves": {"halves", "half_slabs", "pairs", "pair_slabs"},
        "slabs": {"slabs"},
        "modes": {"modes"},
    }
    for rows, sizes in NAMED.values():
        given = problem(rows, sizes, numbers, side == "left")
        found = choose.candidates((), given, "sm_90a", 132)
        assert found[-1][0] == {"kind": "modes"}
        assert choose.lower((), given, "sm_90a", 132) in [lowered for _, lowered in found]
        for choice, lowered in found:
            assert choose.lower((), given, "sm_90a", 132, choice) == lowered
            used = {step.spec.description.split()[1] for step in lowered.steps}
            used -= {"clear", "largest"}
            assert used <= words[choice["kind"]]


def test_nothing_is_timed_for_an_empty_result(gpus, seed):
    x, *factors = map(gpu, operands(SHAPES, 0, "right", F32))
    found = kl.tune(kl.KroneckerProduct(SHAPES), x, *factors, progress=False)
    assert not found.timings and not found.kept


@pytest.mark.few(1)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("needs", [(True, True), (False, True), (True, False)])
def test_variants_hold_the_kernels_of_gradients(needs, side):
    """Of products in one run and in two, for any number of rows."""
    many = ((5, 4),) * 9
    for shapes in (SHAPES, many):
        descriptor = kl.KroneckerProduct(shapes, side=side)
        known = set(ahead.variants(descriptor, "sm_90a", (F32,)))
        factors = [torch.empty(s, device="meta").requires_grad_(needs[1]) for s in shapes]
        for rows in (1, 9, 70, 1000):
            shape = (rows, descriptor.in_features)
            shape = shape if side == "right" else shape[::-1]
            x = torch.empty(shape, device="meta").requires_grad_(needs[0])
            assert set(ahead.specs(descriptor, "sm_90a", (x, *factors), {})) <= known

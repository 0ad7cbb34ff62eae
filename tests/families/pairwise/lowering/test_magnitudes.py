"""Norms and sums of powers of any magnitude, by kernels that threads of the host run."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import matrix
from kernlib.families.pairwise.kernels.few import Few
from kernlib.families.pairwise.reductions import operation
from kernlib.runtime.plan import forget_plans
from tests.families.pairwise import magnitudes
from tests.support import fakes
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu, host

pytestmark = pytest.mark.emulated
ON_DEVICE = {"p": torch.tensor(10.0)}
# What is computed, its arguments, the exponent, whether it is under a root.
CALLS = {
    "power sums": (kl.power_sum(), {"p": 7.3}, 7.3, False),
    "power sums, p on the device": (kl.power_sum(), ON_DEVICE, 10.0, False),
    "roots": (kl.power_sum(), {"p": 0.3}, 0.3, False),
    "large powers": (kl.power_sum(), {"p": 64.5}, 64.5, False),
    "distances": (kl.l2_distance(), {}, 2.0, True),
    "norms": (kl.p_distance(), {"p": 20.0}, 20.0, True),
}


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    forget_plans()
    fakes.forget()
    folder = kernels_of(tmp_path_factory)
    yield emulated.install(monkeypatch, folder, matrix, operation)
    fakes.forget()
    forget_plans()


def compute(kind: str, call: str, features: int):
    """Results and what they are in float64, with a word on which."""
    descriptor, given, p, root = CALLS[call]
    given = {name: gpu(value) for name, value in given.items()}
    rows, columns = (9, 13) if kind == "few" else (17, 40)
    for name, (a, b) in magnitudes.points(rows, columns, features, p):
        wanted, where = magnitudes.exact(a, b, p, root), f"{call}, {kind}, {name}"
        operands = descriptor, gpu(a), gpu(b)
        if kind in ("few", "direct"):
            yield kl.run_kernel(*operands, **given), wanted, where
        elif kind == "lists":
            values, places = kl.kernel_topk(*operands, 4, **given)
            yield values, wanted.sort(1).values[:, :4], where
            yield wanted.gather(1, host(places)).sort(1).values, wanted.sort(1).values[:, :4], where
        else:
            yield kl.kernel_min(*operands, **given)[0], wanted.amin(1), where
            yield kl.kernel_sum(*operands, **given), wanted.sum(1), where


@pytest.mark.few(by="call")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kind", "features"),
    [("direct", 3), ("direct", 40), ("few", 40), ("reduced", 3), ("reduced", 20), ("lists", 3),
     ("lists", 20)],
)  # fmt: skip
def test_results_of_any_magnitude_are_right_where_float32_has_them(
    kind, features, call, gpus, monkeypatch
):
    if kind == "direct":
        monkeypatch.setattr(Few, "takes", lambda *_: False)
    _, _, p, root = CALLS[call]
    for result, wanted, where in compute(kind, call, features):
        magnitudes.check(host(result), wanted, magnitudes.bar(p, root), where)
    assert gpus.specs

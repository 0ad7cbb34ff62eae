"""The pairwise benchmark: its cases, floors, rivals and errors; times need a GPU."""

import math
from dataclasses import replace

import pytest
import torch

import kernlib as kl
from benchmarks.common import harness, timing
from benchmarks.common.harness import Session
from benchmarks.pairwise import (
    gradient,
    keops,
    logsumexp,
    matmul,
    matmul_gradient,
    nearest,
    problems,
    system,
)
from benchmarks.pairwise import run as pairwise
from kernlib.ahead import specs as lowered
from tests.benchmarks.cases import Clock, committed

H200 = timing.Device(132, 1.98e9)
MATRICES = {problem.name: problem for problem in pairwise.PROBLEMS}
GRADIENTS = {problem.name: problem for problem in gradient.PROBLEMS}
PRODUCTS = {problem.name: problem for problem in matmul.PROBLEMS}
NEAREST = {problem.name: problem for problem in nearest.PROBLEMS}
TRAINING = {problem.name: problem for problem in matmul_gradient.PROBLEMS}
EVERY = {**MATRICES, **GRADIENTS, **PRODUCTS, **NEAREST, **TRAINING}
BY_HAND = {"torch", "addmm", "torch.compile"}
TF32 = 2e-3  # which the CPU does not use


# Cases.


def test_other_kernels_are_measured_by_a_setting():
    names = {case.name for case in pairwise.cases()}
    portable = {case.name for case in pairwise.cases(portable=True)}
    assert {name.removesuffix(" portable") for name in portable} < names and not portable & names
    assert "kernel_topk k=10 100000x100000 D=3 fp32 portable" in portable


@pytest.mark.parametrize("name", EVERY)
def test_floors_are_those_that_were_measured_against(name):
    milliseconds, bound = EVERY[name].floor(H200)
    row = committed("pairwise")[name]
    known = row["floor"] / harness.UNITS_PER_MS[row["unit"]]
    assert (milliseconds, bound) == (pytest.approx(known, rel=2e-3), row["bound"])


def test_floor_of_bytes():
    assert problems.floor_ms(H200, moved=4.3e9) == (pytest.approx(1.0), "bytes")


def test_targets_are_above_their_floors():
    targets = {name: problem.must for name, problem in EVERY.items() if problem.must}
    assert all(must > EVERY[name].floor(H200)[0] for name, must in targets.items())
    assert targets["cdist p=2 30000x30000x1024 fp32"] == 20.0
    assert targets["kernel_matmul gaussian 100000x100000 D=64 tf32"] == 6.0


def test_the_digest_covers_every_kernel_of_the_family():
    for name in ("direct", "gradient", "reduce"):
        assert f'#include "pairwise/{name}/{name}.cuh"' in pairwise.SOURCE


def test_systems_of_ours_and_torch_agree(seed):
    problem = system.Problem(90, 5)
    row = system.measure(problem, Session(timer=Clock(5.0, 5.0)), "cpu")
    assert row.error < 2e-6 and row.rival_errors["torch"] < 2e-6
    assert row.must == pytest.approx(1.15 * row.floor) and row.must_error == problem.tol
    assert system.PROBLEMS[0].name == "solve_kernel gaussian 60000 D=64 fp32"


# Matrices.


def small(problem, k=11):
    return replace(problem, m=7, n=7 if problem.symmetric else 9, k=k)


@pytest.mark.parametrize("name", [name for name in MATRICES if not name.endswith("fp16")])
def test_ours_torch_and_exact_agree(name):
    problem = small(MATRICES[name])
    a, b, out = pairwise.tensors(problem, "cpu")
    rows = timing.sample_rows(problem.m, "cpu")
    exact = pairwise.exact(problem, a, b, rows)
    bound = TF32 if problem.dtype == "tf32" else 1e-5
    assert timing.relative_error(pairwise.kernel(problem)(a, b, out)[rows], exact) < bound
    assert timing.relative_error(pairwise.plain(problem)(a, b, out)[rows], exact) < 1e-5


def test_exact_works_in_blocks(monkeypatch):
    problem = small(MATRICES["cdist p=1.3 30000x30000x1024 fp32"])
    a, b, _ = pairwise.tensors(problem, "cpu")
    rows = timing.sample_rows(problem.m, "cpu")
    whole = pairwise.exact(problem, a, b, rows)
    monkeypatch.setattr(problems, "EXACT_ELEMENTS", 2 * 9 * 11)
    assert torch.equal(pairwise.exact(problem, a, b, rows), whole)


def test_laplace_may_take_little_more_than_p1():
    session = Session(ours={pairwise.P1: 60.0})
    laplace = MATRICES["laplace_l1 30000x30000x1024 fp32"]
    assert pairwise.required(laplace, session) == pytest.approx(61.8)
    assert pairwise.required(MATRICES[pairwise.P1], session) == 70.0


@pytest.mark.parametrize("name", MATRICES)
def test_every_case_has_a_kernel(name):
    problem = MATRICES[name]
    points = torch.empty(problem.m, problem.k, dtype=problems.DTYPES[problem.dtype], device="meta")
    descriptor, arguments = pairwise.described(problem)
    tensors = (points,) if problem.symmetric else (points, points)
    assert lowered(descriptor, "sm_90a", tensors, arguments)


def test_rivals_are_those_that_a_case_is_about():
    names = {name: list(pairwise.rivals(problem)) for name, problem in MATRICES.items()}
    assert names["cdist p=2 30000x30000x1024 fp32"] == ["torch"]
    assert names["cdist p=2 hard 30000x30000x1024 fp32"] == ["torch", "torch direct"]
    assert names["dot_product 30000x30000x1024 fp32"] == ["cublas"]
    assert names["gaussian 30000x30000x32 fp32"] == ["torch", "torch.compile"]


# Hard data.

HARD = replace(MATRICES["cdist p=2 hard 30000x30000x1024 fp32"], m=1000, n=900, k=64)


def test_hard_data_has_means_far_away_and_points_side_by_side():
    a, b, _ = pairwise.tensors(HARD, "cpu")
    assert a.mean(0).abs().min() > 99 and a.std(0).max() < 1.2
    rows = pairwise.sampled(HARD, a, b)
    assert len(set(rows.tolist())) == 9  # 1 % of the smaller side
    nearest = pairwise.exact(HARD, a, b, rows).min(1).values
    assert (nearest > 0).all() and nearest.min() < 0.01 and nearest.max() < 1.5
    others = pairwise.exact(HARD, a, b, torch.tensor([5, 300, 900])).min(1).values
    assert others.min() > 4


@pytest.mark.slow
def test_error_of_hard_data_is_that_of_the_worst_distance():
    a, b, out = pairwise.tensors(HARD, "cpu")
    rows = pairwise.sampled(HARD, a, b)
    exact = pairwise.exact(HARD, a, b, rows)
    found = exact.clone()
    found[3, 4] *= 1.5
    assert pairwise.error(HARD, found, exact) == pytest.approx(0.5)
    assert pairwise.error(HARD, pairwise.kernel(HARD)(a, b, out)[rows], exact) < 1e-5
    plain = {name: pairwise.error(HARD, call(a, b, out)[rows], exact)
             for name, call in pairwise.rivals(HARD).items()}  # fmt: skip
    assert plain["torch"] > 0.1 and plain["torch direct"] < 1e-5
    found[0, 0] = math.nan
    with pytest.raises(ValueError, match="nan"):
        pairwise.error(HARD, found, exact)


# Gradients.


def small_gradient(problem):
    return problem._replace(points=13, queries=11, features=9)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_agree_with_float64_and_torch(name):
    problem = small_gradient(GRADIENTS[name])
    *tensors, out = gradient.tensors(problem, "cpu")
    sample = gradient.exact(problem, *tensors)
    for call in (gradient.kernel(problem), gradient.plain(problem)):
        result = call(*tensors, out.fill_(math.nan))
        assert result.shape == (problem.outputs, 9, 11)
        assert gradient.largest_error(result, sample) < 1e-5


def test_error_of_a_gradient_is_over_the_sum_of_its_terms():
    a, b = torch.tensor([[1.0], [2.0]]), torch.zeros(1, 2)
    c, d = torch.tensor([[3.0, -1.0]]), torch.ones(1, 1)
    problem = gradient.Problem(1.0, 1, points=2, queries=1, features=1)
    sample = gradient.exact(problem, a, b, c, d)
    assert sample.values.item() == 1.0 and sample.sizes.item() == 5.0
    assert gradient.largest_error(torch.full((1, 1, 1), 1.5), sample) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="nan"):
        gradient.largest_error(torch.full((1, 1, 1), math.nan), sample)


def test_sampled_features_reach_both_ends():
    problem = gradient.Problem(1.0, 2, points=3, queries=5, features=768)
    *tensors, _ = gradient.tensors(problem, "cpu")
    features = gradient.exact(problem, *tensors).features.tolist()
    assert len(features) == 8 and (features[0], features[-1]) == (0, 767)


# Products without the matrix, whose values are in test_pairwise_rivals.py.


def test_the_row_of_memory(monkeypatch):
    held = iter([12 << 20, 3 << 30])
    monkeypatch.setattr(matmul, "tensors", lambda problem: ())
    monkeypatch.setattr(matmul, "peak_bytes", lambda call, buffers: next(held))
    row = matmul.measure_memory(Session())
    assert row.case == "kernel_matmul gaussian 100000x100000 D=64 memory"
    assert (row.unit, row.ours, row.rivals) == ("bytes", 12 << 20, {"torch": 3 << 30})
    assert harness.verdict(row).startswith("met")


def test_memory_may_grow_with_the_points_alone():
    problem = matmul.MEMORY
    assert problem.most_bytes < 200e6 < 4 * problem.points**2
    doubled = problem._replace(points=2 * problem.points)
    assert doubled.most_bytes < 2 * problem.most_bytes


# Rows.


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(timing.Device, "current", classmethod(lambda cls: H200))


@pytest.mark.parametrize(
    ("module", "problem", "rivals"),
    [
        (pairwise, small(MATRICES["cdist p=2 30000x30000x1024 tf32"], 70), {"torch"}),
        (pairwise, small(MATRICES["dot_product 30000x30000x1024 fp32"], 70), {"cublas"}),
        (gradient, small_gradient(gradient.PROBLEMS[2]), {"torch"}),
        (matmul, matmul.PROBLEMS[0]._replace(points=50), BY_HAND),
        (matmul_gradient, matmul_gradient.PROBLEMS[0]._replace(points=50), BY_HAND),
        (nearest, nearest.Problem(50, 3), {"torch", "addmm"}),
        (logsumexp, logsumexp.Problem(50, 3, True), {"torch", "addmm"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_row_of_each_kind(module, problem, rivals, device, monkeypatch):
    monkeypatch.setattr(keops, "is_there", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    before = torch.get_float32_matmul_precision()
    row = module.measure(problem, Session(timer=Clock(5.0, 5.0)), "cpu")
    assert torch.get_float32_matmul_precision() == before
    assert (row.case, row.unit, row.ours) == (problem.name, "ms", 5.0)
    assert row.rivals == dict.fromkeys(rivals, 5.0) and row.rival_errors.keys() == rivals
    assert row.error < TF32 and max(row.rival_errors.values()) < TF32 and row.floor > 0
    assert row.must == problem.must


def timed(ms, eager):
    out, clock = torch.empty(3), Clock(ms, ms)
    session = Session(timer=clock)
    found = problems.timed(session, lambda out: out.fill_(1), (out,), lambda r: r[0].item(), eager)
    return found, clock.sweeps + clock.replays


def test_a_rival_that_takes_seconds_is_called_once():
    assert timed(2000.0, True) == ((2000.0, 1.0), 1)
    assert timed(2000.0, False) == ((2000.0, 1.0), 1 + 2)
    assert timed(5.0, True)[1] > 7


def test_calls_that_write_nothing_are_caught():
    with pytest.raises(ValueError, match="nan"):
        problems.timed(
            Session(timer=Clock()),
            lambda out: out,
            (torch.empty(3),),
            lambda result: timing.relative_error(result, torch.ones(3, dtype=torch.float64)),
        )


def test_products_follow_the_kind_of_numbers():
    with problems.float32_products("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with problems.float32_products("fp32"):
        assert torch.get_float32_matmul_precision() == "highest"
    assert pairwise.described(MATRICES["cdist p=2 30000x30000x1024 tf32"])[0].precision == "tf32"
    assert matmul.PROBLEMS[2].descriptor == kl.gaussian(precision="tf32")

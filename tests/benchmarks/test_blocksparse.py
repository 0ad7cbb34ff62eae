"""The benchmark of block-sparse matrices: its cases, its targets, and that all ways agree."""

import math
import sys

import pytest
import torch
from torch.torch_version import TorchVersion

from benchmarks.blocksparse import problems, rivals, run
from benchmarks.blocksparse.problems import Problem
from benchmarks.common.harness import Row, Session
from kernlib.blocksparse import Layout
from tests.benchmarks.cases import Clock

CASES = problems.problems()
NAMES = [case.name for case in CASES]


@pytest.fixture
def session():
    return Session(timer=Clock())


def small(section, mode, kind="fp32", **fields):
    numbers = {"n": 128, "block": 16, "density": 0.25, "columns": 32, **fields}
    return Problem(section, mode, kind=kind, **numbers)


# Cases.


def test_other_kernels_are_measured_by_a_setting():
    names = {portable: [case.name for case in run.cases(portable)] for portable in (False, True)}
    assert all(name.endswith(" portable") for name in names[True]) and names[True]
    assert not any(name.endswith(" portable") for name in names[False])
    assert "blocksparse layout 4096/64 from a mask on the device" in names[False]
    assert run.HOT_NAME in names[False] and "blocksparse compile maximum" in names[False]
    assert {name for part in names.values() for name in part} > set(NAMES)


def test_the_digest_covers_all_kernels():
    assert "blocksparse/" in run.SOURCE


# Floors and targets.


def test_floors_are_of_memory_or_of_operations():
    one = Problem("table", "dsd", 4096, 128, 0.5, "fp16", 4096)
    assert one.operations == 4096**3
    assert one.floor() == (pytest.approx(4096**3 / 768e9), "tensor cores")
    read, written = one.bytes()
    assert (read, written) == (3 * 4096**2, 2 * 4096**2)
    decode = Problem("decode", "dds", 8192, 16, 0.1, "fp16", 1, "nt")
    assert decode.floor()[1] == "memory" and 0.003 < decode.floor()[0] < 0.0032
    train = one._replace(section="train")
    assert train.operations == 3 * one.operations
    assert train.bytes() == (2 * read + written, read + written)
    softmax = Problem("softmax", "softmax", 4096, 64, 0.25, heads=16)
    assert softmax.bytes() == (2 * 16 * 4096**2 // 4,) * 2 and softmax.operations == 0


def test_targets_are_those_of_the_figures():
    at = {case.name: case.must() for case in CASES}
    for n in (4096, 8192):
        for words, rate in (("128 density=0.5", 600), ("64 density=0.25", 380),
                            ("16 density=0.1", 100)):  # fmt: skip
            found = at[f"blocksparse dds {n} block={words} fp16"]
            assert 2 * n**3 * float(words.split("=")[1]) / found == pytest.approx(
                rate * 1e9, rel=2e-3
            )
    assert at["blocksparse dsd 4096 block=128 density=0.5 fp32"] == pytest.approx(4096**3 / 150e9)
    written = 2 * 16 * 4096**2 // 4
    assert at["blocksparse sdd 4096 K=64 heads=16 block=64 density=0.25 fp16"] == pytest.approx(
        1.3 * written / 3.37e9
    )
    decode = next(case for case in CASES if case.section == "decode")
    assert decode.must() == pytest.approx(1.25 * decode.floor()[0] + 3e-3)
    assert at["blocksparse dsd 4096 block=64 density=0.5 bf16"] is None


def test_targets_beside_what_is_measured(session):
    def row(problem, **times):
        return Row(problem.name, "ms", 1.0, rivals=times)

    half = Problem("table", "dsd", 4096, 64, 0.5, "fp16", 4096)
    wanted = half.must()
    assert run.must(half, row(half, cublas=0.1), session, None) == 0.1
    assert run.must(half, row(half, cublas=1.0), session, None) == wanted
    few = half._replace(density=0.1)
    assert run.must(few, row(few, cublas=1e-4), session, None) == few.must()
    turned = half._replace(section="transposed", transposes="tn")
    assert run.must(turned, row(turned), session, lambda: 2.0) == pytest.approx(2.2)
    session.ours[half.name] = 1.0
    assert run.must(turned, row(turned), session, None) == pytest.approx(1.1)
    diagonal = half._replace(section="diagonal")
    assert run.must(diagonal, row(diagonal), session, None) is None
    times = {"cublas": 0.1, "grouped_mm": 3.0, "grouped_mm bf16": 1.0}
    assert run.must(diagonal, row(diagonal, **times), session, None) == pytest.approx(1 / 0.93)


# Values.


def agree(problem, session):
    """Our row, with all rivals that can be computed here."""
    row = run.measure(problem, session, "cpu")
    layout = problems.layout_of(problem, "cpu")
    wanted = rivals.rivals(problem, layout, problems.tensors(problem, layout, "cpu"))
    assert set(row.rivals) == set(row.rival_errors) == set(wanted) - {"blksprs"}  # of GPUs alone
    assert row.error < 1e-5 and max(row.rival_errors.values(), default=0) < 1e-5
    assert math.isfinite(row.floor)
    return row


@pytest.mark.parametrize("mode", ["dsd", "dds", "sdd"])
@pytest.mark.parametrize("transposes", problems.TRANSPOSES)
def test_ours_and_cublas_agree(mode, transposes, session):
    section = "table" if transposes == "nn" else "transposed"
    problem = small(section, mode, transposes=transposes)
    row = agree(problem, session)
    assert set(row.rivals) == {"cublas"}
    assert row.must_error == pytest.approx(1.5 * row.rival_errors["cublas"])
    if section == "transposed":
        assert row.must == pytest.approx(1.1 * 0.25)


@pytest.mark.parametrize("heads", [None, 3])
def test_blocks_of_heads(heads, session):
    row = agree(small("sdd", "sdd", heads=heads), session)
    assert row.must > 0 and ("heads=3" in row.case) == (heads == 3)


def test_groups_along_the_diagonal(session):
    problem = small("diagonal", "dsd")
    row = run.measure(problem, session, "cpu")
    assert "cublas" in row.rivals and row.error < 1e-5
    if "grouped_mm" not in row.rivals:  # which torch 2.8 has on GPUs alone
        assert TorchVersion(torch.__version__) < (2, 9) and row.must is None
        return
    assert row.rival_errors["grouped_mm"] < 1e-5
    assert row.must == pytest.approx(0.25 / 0.93)


class FakeProject:
    """blksprs as it is called, by torch."""

    class utils:
        disable_validation = staticmethod(lambda: None)

    class ops:
        @staticmethod
        def matmul(a, of_a, b, of_b, of_result, block, layout_cache):
            left, right = (Layout(m, block).to_dense(t) for t, m in ((a, of_a), (b, of_b)))
            return Layout(of_result, block).to_blocks(left @ right)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("mode", ["dsd", "dds", "sdd"])
def test_blksprs_is_given_the_same_product(mode, heads, monkeypatch):
    monkeypatch.setitem(sys.modules, "blksprs", FakeProject)
    problem = small("table", mode, heads=heads)
    layout = problems.layout_of(problem, "cpu")
    operands = problems.tensors(problem, layout, "cpu")
    way = rivals.blksprs(problem, layout, operands)
    found = problems.sampled(problem, layout, way.read(way.call(*way.buffers)))
    wanted = problems.exact(problem, layout, *operands[:2])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["dsd", "dds"])
def test_bsr_agrees(mode):
    problem = small("table", mode)
    layout = problems.layout_of(problem, "cpu")
    operands = problems.tensors(problem, layout, "cpu")
    way = rivals.bsr(problem, layout, operands)
    found = problems.sampled(problem, layout, way.read(way.call(*way.buffers)))
    wanted = problems.exact(problem, layout, *operands[:2])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_bsr_is_tuned_where_half_of_the_small_table_is_stored_alone():
    layout, operands = object(), ()
    found = [p for p in CASES if "bsr" in rivals.rivals(p, layout, operands)]
    assert [p.block for p in found] == [16, 32, 64, 128]
    assert all((p.mode, p.n, p.density, p.kind) == (*rivals.TUNED, "fp16") for p in found)


def test_bsr_parameters_are_searched(monkeypatch):
    best = {"SPLIT_N": 64, "num_warps": 8, "num_stages": 2, "GROUP_SIZE_ROW": 4}
    tried = []

    def milliseconds(call):
        tried.append(call.args[0])
        return 1.0 + sum(abs(math.log2(tried[-1][name] / best[name])) for name in best)

    monkeypatch.setattr(rivals, "least_milliseconds", milliseconds)
    assert rivals.searched(lambda meta: None, rivals.BSR_START) == best and len(tried) < 20
    monkeypatch.setattr(rivals, "least_milliseconds", lambda call: math.inf)
    with pytest.raises(ValueError, match="no parameters"):
        rivals.searched(lambda meta: None, rivals.BSR_START)


def test_few_rows_and_softmax(session):
    decode = agree(small("decode", "dds", transposes="nt", columns=8), session)
    assert decode.must == pytest.approx(1.25 * decode.floor + 3e-3)
    row = agree(small("softmax", "softmax", columns=0, heads=2), session)
    assert set(row.rivals) == {"torch"} and row.must is None


@pytest.mark.parametrize("mode", ["dsd", "dds"])
def test_gradients_are_measured_beside_their_product(mode, session):
    row = run.measure(small("train", mode), session, "cpu")
    assert row.must == pytest.approx(problems.TRAIN_SHARE * 0.25)
    assert row.error < 1e-5 and row.rival_errors["cublas"] < 1e-5


def test_a_layout_is_written_anew(session):
    row = run.measure_layout(128, 16, 2, 25.0, session, "cpu")
    assert row.case == "blocksparse layout 128/16 heads=2 from a mask on the device"
    assert (row.ours, row.unit, row.must) == (250.0, "us", 25.0)


def test_stand_ins_are_on_meta():
    problem = Problem("train", "dds", 4096, 64, 0.5, "fp16", 16, "nt")
    layout, a, b = run.stand_ins(problem)
    assert {layout.device.type, a.device.type, b.device.type} == {"meta"}
    assert a.shape == (16, 4096) and b.shape == (2048, 64, 64) and a.requires_grad

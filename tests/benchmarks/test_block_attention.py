"""The benchmark of attention over stored blocks: its cases, its targets, and that ways agree."""

import sys
from collections import namedtuple
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from benchmarks.blocksparse import attention
from benchmarks.common.harness import Session
from tests.benchmarks.cases import Clock

CASES = {problem.name: problem for problem in attention.problems()}


def test_some_cases_have_targets_and_all_have_floors():
    assert CASES["attention window=512 forward bf16"].must == 0.2
    for which in ("bias 4096", "bias 4096 batch=4", "slopes 16384"):
        problem = CASES[f"attention {which} hd=64 block=128 density=0.25 backward bf16"]
        assert problem.must is None and problem.floor(0.25)[0] > 0


@pytest.mark.parametrize(
    ("name", "ms"),
    [
        ("attention hd=128 block=128 density=0.5 forward bf16", 1.963),
        ("attention hd=64 block=128 density=0.1 forward bf16", 0.323),
        ("attention hd=128 block=32 density=0.1 forward bf16", 1.1),
        ("attention hd=128 block=128 density=0.1 backward bf16", 1.666),
    ],
)
def test_targets_are_those_of_the_figures(name, ms):
    problem = CASES[name]
    assert problem.must == pytest.approx(ms, rel=2e-3)
    assert problem.floor(problem.density)[0] < problem.must


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_ours_and_the_formula_agree(window, backward, monkeypatch, seed):
    problem = attention.Problem(16, 16, 0.5, backward, 96, 1, 2, window)
    monkeypatch.setattr(attention, "rivals", lambda *_: {})
    row = attention.measure(problem, Session(timer=Clock()), "cpu")
    assert row.error < 2e-2 and row.ours > 0 and row.floor > 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("learned", attention.LEARNED)
def test_what_is_learned_is_in_the_formula_and_has_a_gradient(learned, backward, monkeypatch, seed):
    problem = attention.Problem(16, 16, 0.5, backward, 96, 2, 2, learned=learned)
    seen = []
    monkeypatch.setattr(attention, "rivals", lambda *_: {})
    monkeypatch.setattr(attention, "learned_of", watched(attention.learned_of, seen))
    row = attention.measure(problem, Session(timer=Clock()), "cpu")
    assert row.error < 2e-2 and row.ours > 0 and row.floor > 0
    assert bool(seen) == backward and all(t.any() for t in seen)


def watched(make, seen: list):
    """What ``make`` makes, whose gradients are noted."""

    def made(*given):
        found = make(*given)
        found.register_hook(lambda grad: seen.append(grad))
        return found

    return made


def test_the_dense_rival_is_of_the_same_tensors(monkeypatch, seed):
    problem = attention.Problem(16, 16, 1.0, False, 64, 1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention, "_cudnn", plain)
    row = attention.measure(problem, Session(timer=Clock()), "cpu")
    assert list(row.rivals) == [attention.DENSE]


def test_flash_attention_is_given_the_same_blocks(monkeypatch, seed):
    """As its package takes them: heads behind rows, lists of whole blocks in both directions."""
    problem = attention.Problem(16, 64, 0.5, False, 256, 1, 2)

    def stored(lists) -> torch.Tensor:
        assert lists.block_size == (64, 64) and not lists.mask_block_cnt.any()
        places = torch.arange(4) < lists.full_block_cnt[..., None]
        found = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
        return found.scatter(-1, lists.full_block_idx.long(), places)

    def attend(q, k, v, block_sparse_tensors, block_sparse_tensors_bwd):
        mask = stored(block_sparse_tensors)
        assert torch.equal(stored(block_sparse_tensors_bwd), mask.mT)
        mask = mask.repeat_interleave(64, 2).repeat_interleave(64, 3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2), None

    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size")
    sparsity = ModuleType("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = namedtuple("BlockSparseTensorsTorch", names)
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_func = attend
    for module in (package, cute, sparsity):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(attention, "_flex", lambda *_: attention._cudnn)
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention, "_cudnn", plain)
    row = attention.measure(problem, Session(timer=Clock()), "cpu")
    assert list(row.rivals) == [attention.DENSE, "FlexAttention", "FlashAttention 4"]
    assert row.rival_errors["FlashAttention 4"] < 2e-2

"""What families ask of tensors and numbers, whatever they compute."""

import math
import subprocess
import sys

import pytest
import torch

from kernlib.ops import hyperparameters as numbers
from kernlib.ops import tensors

SPARSE = torch.eye(3).to_sparse()


def test_none_will_do_where_it_is_not_required():
    tensors.check_dense(("x",), x=torch.ones(2), bias=None)
    with pytest.raises(TypeError, match="x must be a tensor, got NoneType"):
        tensors.check_dense(("x",), x=None, bias=None)


@pytest.mark.parametrize(
    ("value", "message"),
    [([1.0], "bias must be a tensor, got list"), (SPARSE, "bias .*sparse_coo")],
)
def test_what_is_no_dense_tensor_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        tensors.check_dense(("x",), x=torch.ones(2), bias=value)


def test_a_transform_is_refused_with_the_familys_advice():
    def inside(x):
        tensors.refuse_transforms("no kernel takes: call it outside", y=None, x=x)
        return x

    tensors.refuse_transforms("no kernel takes", x=torch.ones(2))
    with pytest.raises(RuntimeError, match=r"x is inside .*vmap.*, which no kernel takes: call it"):
        torch.vmap(inside)(torch.ones(2))


def test_signatures_tell_apart_what_plans_depend_on():
    x = torch.zeros(8, 8)
    z = torch.zeros(8, 8, dtype=torch.complex64)
    alike = [x, torch.zeros(8, 8), x.clone()]
    others = [x[:, 1:], x.T[1:], x.double(), x[:7], x.view(4, 16), z.imag, z.conj().imag]
    assert len({tensors.signature(t) for t in alike}) == 1
    assert len({tensors.signature(t) for t in [x, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("inputs", "meets"),
    [([], False), ([(0, 10)], False), ([(0, 11)], True), ([(20, 5)], False), ([(19, 1)], True),
     ([(0, 1), (12, 2)], True), ([(0, 1), (30, 1)], False)],
)  # fmt: skip
def test_ranges_meet_where_they_share_a_byte(inputs, meets):
    assert tensors.ranges_meet(10, 10, inputs) is meets


def far_from(x: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: more of it than two views are compared over lies between."""
    address, needed = x.data_ptr(), tensors.MAX_EXACT_OVERLAP * x.element_size()
    kept = []
    for _ in range(64):
        kept.append(torch.empty(needed // 16, dtype=x.dtype))  # reserved, never written
        if abs(kept[-1].data_ptr() - address) > needed:
            return kept[-1][:4].fill_(0)
    pytest.skip("no memory is far enough from x")


def test_an_input_far_away_is_not_taken_for_one_that_is_shared():
    whole = torch.zeros(2, 4, 16)
    out, beside = whole[..., 8:], whole[..., :8]
    tensors.refuse_overlap(out, beside=beside, far=far_from(out))
    with pytest.raises(ValueError, match="out shares memory with late"):
        tensors.refuse_overlap(out, beside=beside, far=far_from(out), late=whole[..., 7:9])


def test_memory_that_cannot_be_written_is_refused():
    tensors.check_memory(torch.zeros(3, 4).T)
    with pytest.raises(ValueError, match=r"out overlaps itself .*\(3, 4\).*\(0, 1\)"):
        tensors.check_memory(torch.zeros(4).expand(3, 4))
    with pytest.raises(ValueError, match="out is a negated view"):
        tensors.check_memory(torch.zeros(3, dtype=torch.complex64).conj().imag)


def test_the_shapes_that_an_error_offers_are_those_that_would_do():
    with pytest.raises(TypeError, match=r"of shape \(\), got 'x'"):
        numbers.host_value("gain", "x", dimensions=0)
    with pytest.raises(TypeError, match=r"of shape \(\) or \(L,\), got 'x'"):
        numbers.host_value("gain", "x")
    with pytest.raises(ValueError, match=r"gain must have shape \(\), got \(2,\)"):
        numbers.check_kind("gain", torch.ones(2), dimensions=0)
    numbers.check_kind("gain", torch.ones(2))


@pytest.mark.parametrize("name", ["p", "inner_p", "epsilon", "gain"])
def test_no_name_has_a_meaning_to_all_families(name):
    numbers.check_host(name, -1.0, frozenset())
    numbers.check_tensor(name, torch.tensor(-1.0), frozenset())
    for wrong in (math.nan, -1.0, 0.0):
        with pytest.raises(ValueError, match=f"{name} must be greater than 0, got {wrong}"):
            numbers.check_tensor(name, torch.tensor([1.0, wrong]), frozenset((name,)))
    with pytest.raises(ValueError, match=f"{name} must be a number, got nan"):
        numbers.check_host(name, math.nan, frozenset())


def test_a_call_loads_nothing_that_only_tuning_needs():
    code = (
        "import sys, torch, kernlib as kl; kl.run_kernel(kl.l1_distance(), *torch.ones(2, 3, 4)); "
        "print(sorted(m for m in sys.modules if m.endswith(('choices', 'candidates', 'tuner')) "
        "and m.startswith('kernlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

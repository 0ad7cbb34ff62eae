"""What hot calls and imports cost, in calls of Python functions and in modules: no clock runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import kernlib as kl
from tests.architecture import golden_launches
from tests.support import fakes

PACKAGE = str(Path(kl.__file__).resolve().parent)

# Frames of kernlib in a call whose plan is there; comprehensions of Python 3.11 count.
FRAMES = {
    "l1": 12,
    "gaussian": 18,
    "Kronecker-sparse": 12,
    "sparse": 14,
    "pair gradient": 27,
    "attention": 22,
}

# Frames and switches of a backward pass whose plans are there: switches are frames whose code lies
# in another file than that of the frame before.
BACKWARDS = {"l1": (37, 17), "gaussian": (51, 28), "a alone": (37, 21), "p": (59, 34)}

# Modules of kernlib that an import loads, and packages that it must not.
IMPORTS = {
    "kernlib": (2, ("torch", "cuda", "lmdb", "numpy")),
    "kernlib.jit.store": (10, ("torch", "cuda")),
    "kernlib.descriptors": (3, ("torch", "cuda", "lmdb")),
}


def calls() -> dict:
    a, b = golden_launches.normal(100, 64), golden_launches.normal(80, 64)
    few = [golden_launches.normal(*shape) for shape in ((50, 40), (20, 50), (3, 50), (20, 40))]
    l1, gaussian, factor = kl.l1_distance(), kl.gaussian(), kl.KroneckerSparse(2, 48, 192, 1)
    x, w = golden_launches.normal(100, 384), golden_launches.normal(*factor.weight_shape)
    matrix = golden_launches.compressed(torch.eye(512, 1024).half(), "u8")
    vector = golden_launches.normal(1, 1024, dtype=torch.float16)
    return {
        "l1": lambda: kl.run_kernel(l1, a, b),
        "gaussian": lambda: kl.run_kernel(gaussian, a, b, bandwidth=2.0),
        "Kronecker-sparse": lambda: kl.run_kernel(factor, x, w),
        "sparse": lambda: kl.sparse.matmul(matrix, vector),
        "pair gradient": lambda: kl.cdist_grad(*few, p=1),
        "attention": attention(),
    }


def attention() -> Callable:
    made = kl.blocksparse.Layout([[1, 1], [1, 1]], 128)
    layout = kl.blocksparse.Layout.from_layout(
        made.text, [t.as_subclass(fakes.OnGpu) for t in made.tensors]
    )
    shape = 1, 2, 256, 64
    q, k, v = (golden_launches.normal(*shape, dtype=torch.bfloat16) for _ in range(3))
    return lambda: kl.blocksparse.attention(q, k, v, layout)


def backwards(name: str) -> Callable:
    descriptor, values = {
        "l1": (kl.l1_distance(), {}),
        "p": (kl.p_distance(), {"p": 1.7}),
    }.get(name, (kl.gaussian(), {"bandwidth": 2.0}))
    a, b = golden_launches.normal(100, 64), golden_launches.normal(80, 64)
    y = kl.run_kernel(descriptor, a.requires_grad_(), b.requires_grad_(name != "a alone"), **values)
    # A pass that begins with a plain tensor: in one that begins with a subclass torch makes all
    # that is computed plain, and so on no GPU.
    y.register_hook(lambda grad: grad.as_subclass(fakes.OnGpu))
    plain = y.as_subclass(torch.Tensor)
    return lambda: plain.backward(torch.zeros(plain.shape), retain_graph=True)


def hot_frames(call: Callable) -> list[tuple[str, str]]:
    """Files and names of a call's second time."""
    call()
    frames = []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            frames.append((code.co_filename.removeprefix(PACKAGE), code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    fakes.forget()
    return frames


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", FRAMES)
def test_a_hot_call_is_short(name, monkeypatch):
    fakes.forget()
    golden_launches.install(monkeypatch)
    frames = hot_frames(calls()[name])
    assert 0 < len(frames) <= FRAMES[name], frames


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_hot_backward_pass_is_short(name, monkeypatch):
    fakes.forget()
    golden_launches.install(monkeypatch)
    frames = hot_frames(backwards(name))
    switches = sum(one[0] != other[0] for one, other in pairwise(frames))
    assert 0 < len(frames) <= BACKWARDS[name][0], frames
    assert 0 < switches <= BACKWARDS[name][1], frames


def printed(program: str) -> list[str]:
    """The JSON that a program prints in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("module", IMPORTS)
def test_an_import_loads_little(module):
    program = f"""
import json, sys
before = set(sys.modules)  # a .pth file may have loaded some
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = printed(program)
    most, forbidden = IMPORTS[module]
    own = [name for name in loaded if name.split(".")[0] == "kernlib"]
    assert len(own) <= most, own
    assert not {name.split(".")[0] for name in loaded} & set(forbidden)


@pytest.mark.few(0)
def test_attention_loads_nothing_of_other_block_sparse_operations():
    program = """
import json, sys, torch, kernlib as kl
layout = kl.blocksparse.Layout([[1, 0], [1, 1]], 16)
kl.blocksparse.attention(*torch.randn(3, 1, 1, 32, 16), layout)
print(json.dumps([name for name in sys.modules if name.startswith("kernlib.families.")]))
"""
    loaded = printed(program)
    home = "kernlib.families.blocksparse"
    assert f"{home}.attention.operation" in loaded
    for name in ("softmax.operation", "scaled", "product", "plans", "operation"):
        assert f"{home}.{name}" not in loaded


def test_a_first_call_of_attention_loads_the_modules_of_its_kernel_alone():
    """And none of scores, where there is none."""
    program = """
import json, sys, pytest
from tests.architecture import golden_launches, test_costs
golden_launches.install(pytest.MonkeyPatch())
test_costs.attention()()
print(json.dumps([name for name in sys.modules if name.startswith("kernlib.")]))
"""
    loaded = printed(program)
    home = "kernlib.families.blocksparse.lowering.attention"
    assert f"{home}.hopper" in loaded
    others = ("hopper_gradient", "portable", "portable_gradient", "deltas", "score_struct")
    assert not [name for name in others if f"{home}.{name}" in loaded]

"""What hot calls and imports cost, in calls of Python functions and in modules: no clock runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernlib as kl
from tests.architecture import golden_launches
from tests.support import fakes

PACKAGE = str(Path(kl.__file__).resolve().parent)

# Frames of kernlib in a call whose plan is there; comprehensions of Python 3.11 count.
FRAMES = {"l1": 12, "gaussian": 18, "Kronecker-sparse": 12, "sparse": 14, "pair gradient": 27}

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
    }


@pytest.mark.parametrize("name", FRAMES)
def test_a_hot_call_is_short(name, monkeypatch):
    fakes.forget()
    golden_launches.install(monkeypatch)
    call = calls()[name]
    call()
    frames = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            frames.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    fakes.forget()
    assert 0 < len(frames) <= FRAMES[name], frames


@pytest.mark.parametrize("module", IMPORTS)
def test_an_import_loads_little(module):
    program = f"""
import json, sys
before = set(sys.modules)  # a .pth file may have loaded some
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = json.loads(run.stdout)
    most, forbidden = IMPORTS[module]
    own = [name for name in loaded if name.split(".")[0] == "kernlib"]
    assert len(own) <= most, own
    assert not {name.split(".")[0] for name in loaded} & set(forbidden)

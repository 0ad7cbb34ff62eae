"""What hot calls and imports cost, in calls of Python functions and in modules: no clock runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture import walks

# Frames of kernlib, distinct files of theirs, and switches, which are frames in another file than
# the one before, of calls whose plans are there: numbers that may fall. Comprehensions of Python
# 3.11 count.
WALKS = {
    "l1": (9, 5, 5),
    "gaussian": (13, 7, 7),
    "Kronecker-sparse": (10, 7, 7),
    "Kronecker-sparse, recorded": (16, 8, 11),
    "Kronecker-sparse, backward": (22, 8, 14),
    "chain": (22, 10, 17),
    "chain, recorded": (24, 10, 18),
    "chain, backward": (39, 10, 27),
    "sparse": (12, 6, 7),
    "sparse, recorded": (23, 10, 16),
    "pair gradient": (24, 9, 15),
    "dsd": (20, 12, 13),
    "dsd, recorded": (30, 13, 22),
    "dsd, backward": (22, 10, 16),
    "attention": (21, 12, 14),
    "attention, recorded": (32, 13, 21),
    "attention, backward": (29, 10, 16),
    "kron_matmul": (26, 9, 10),
    "kron_matmul, recorded": (32, 10, 14),
    "kron_matmul, backward": (21, 9, 12),
    "gaussian, recorded": (21, 10, 12),
    "l1, backward": (37, 6, 15),
    "gaussian, backward": (51, 11, 25),
    "gaussian, backward by a": (37, 11, 19),
    "p, backward": (54, 12, 30),
    "kernel_matmul": (25, 11, 16),
    "kernel_matmul, recorded": (36, 12, 20),
    "kernel_matmul, backward": (58, 10, 21),
    "kernel_matmul, backward by blocks": (148, 18, 73),
    "chain, compiled": (29, 12, 22),
    "chain, compiled backward": (43, 11, 29),
    "kron_matmul, compiled": (22, 12, 13),
    "kron_matmul, compiled backward": (27, 12, 17),
    "dsd, compiled": (33, 15, 24),
    "dsd, compiled backward": (40, 14, 29),
}

# Modules of kernlib that an import loads, and packages that it must not.
IMPORTS = {
    "kernlib": (3, ("torch", "cuda", "lmdb", "numpy")),
    "kernlib.jit.store": (11, ("torch", "cuda")),
    "kernlib.descriptors": (4, ("torch", "cuda", "lmdb")),
}


# Modules of kernlib that a process has loaded when the kernels of its first call are chosen: the
# time of a first call from the cache is mostly theirs. Numbers that may fall.
FIRST_CALLS = {
    "kl.cdist(t(2000, 64), t(3000, 64))": 68,
    "kl.kernel_matmul(kl.gaussian(), t(2000, 64), t(3000, 64), t(3000, 2), bandwidth=8.0)": 77,
    "kl.run_kernel(kl.KroneckerSparse(16, 64, 64, 1), t(256, 1024), t(16, 64, 64, 1))": 77,
    "kl.kron_matmul(t(256, 4096), [t(16, 16) for _ in range(3)])": 75,
    "kl.blocksparse.dsd(t(77, 64, 64), t(1024, 256), layout(64))": 91,
    "kl.blocksparse.sdd(t(1024, 256), t(256, 1024), layout(64))": 91,
    "kl.blocksparse.attention(*[t(2, 8, 2048, 128).half()] * 3, layout(128))": 95,
    "kl.sparse.matmul(compressed('bitmap largest=5000', 16, 4), t(4096).half())": 86,
    "kl.sparse.matmul(compressed('u4 parts=8 width=4096', 16, 4, 2), t(4096).half())": 83,
}


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", WALKS)
def test_a_hot_call_is_short(name, monkeypatch):
    """A forward one, and a backward pass."""
    walks.install(monkeypatch)
    frames = walks.hot_frames(name)
    measured, bounds = walks.measured(frames), WALKS[name]
    within = [size <= bound for size, bound in zip(measured, bounds, strict=True)]
    assert frames and all(within), (measured, bounds, frames)


def test_every_way_has_bounds():
    assert WALKS.keys() == walks.WAYS.keys()


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


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_first_call_loads_few_modules(call):
    program = f"""
import functools, json, sys, torch, kernlib as kl
from kernlib.runtime import devices
t = functools.partial(torch.empty, device="meta")
layout = lambda block: kl.blocksparse.Layout(torch.ones(16, 16) > 0, block, 77, "meta")
def compressed(text, *sizes):
    format, *facts = text.split()
    layout = " ".join([format, "4096x4096 float16", *facts])
    return kl.sparse.SparseMatrix.from_layout(layout, tuple(map(t, sizes)))
with devices.rehearse("sm_90a") as rehearsal:
    {call}
assert rehearsal.specs
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "kernlib"]))
"""
    loaded = printed(program)
    assert len(loaded) <= FIRST_CALLS[call], loaded


@pytest.mark.few(0)
def test_attention_on_a_cpu_loads_nothing_of_other_block_sparse_operations():
    """But what its reference has of softmax's."""
    program = """
import json, sys, torch, kernlib as kl
layout = kl.blocksparse.Layout([[1, 0], [1, 1]], 16)
kl.blocksparse.attention(*torch.randn(3, 1, 1, 32, 16), layout)
print(json.dumps([name for name in sys.modules if name.startswith("kernlib.families.")]))
"""
    loaded = printed(program)
    home = "kernlib.families.blocksparse"
    assert f"{home}.attention.operation" in loaded
    for name in ("softmax.operation", "scaled", "plans", "operation"):
        assert f"{home}.{name}" not in loaded


def test_attention_loads_nothing_of_other_block_sparse_operations():
    """On a GPU no module of theirs, and of kernels those of its forward pass: none of gradients,
    and none of scores, where there is none."""
    program = """
import json, sys, pytest, torch, kernlib as kl
from tests.architecture import golden_launches
from tests.support.fakes import OnGpu
host = kl.blocksparse.Layout([[1, 1], [1, 1]], 128)
tensors = [t.as_subclass(OnGpu) for t in host.tensors]
golden_launches.install(pytest.MonkeyPatch())
qkv = [golden_launches.normal(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
kl.blocksparse.attention(*qkv, kl.blocksparse.Layout.from_layout(host.text, tensors))
print(json.dumps([name for name in sys.modules if name.startswith("kernlib.families.")]))
"""
    home = "kernlib.families.blocksparse"
    loaded = {name.removeprefix(f"{home}.") for name in printed(program)}
    kernels = {f"kernels.{name}" for name in ("order", "attention")}
    kernels |= {f"kernels.attention.{name}" for name in ("base", "hopper", "portable")}
    assert {name for name in loaded if name.startswith("kernels.")} == kernels
    assert "attention.operation" in loaded and "lowering.attention.score_struct" not in loaded
    others = ("softmax", "scaled", "plans", "operation", "lowering.choose", "lowering.softmax")
    assert not [name for name in loaded if name.startswith(others)]

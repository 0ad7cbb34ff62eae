"""The service on a real driver: loading, shared memory, first calls, the hot call."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

import kernlib as kl
from kernlib import ahead
from kernlib.jit import entry, service
from kernlib.jit.spec import KernelSpec
from tests.gpu.watched import heard

SHARED = 200 * 1024
BIG_SHARED = f"""
extern "C" __global__ void fill(float* out) {{
    extern __shared__ float line[];
    for (int i = threadIdx.x; i < {SHARED // 4}; i += blockDim.x) line[i] = i;
    __syncthreads();
    out[threadIdx.x] = line[{SHARED // 4 - 1} - threadIdx.x];
}}
"""

FIRST_CALL = """
import json, sys, torch
torch.cuda.init()
a, b = torch.randn(70, 12, device="cuda"), torch.randn(60, 12, device="cuda")
before = "libnvrtc" in open("/proc/self/maps").read()  # some builds of torch load it themselves
import kernlib as kl
names = []
kl.events.subscribe(lambda event: names.append(event.name))
out = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=2.0)
wanted = torch.exp(-torch.cdist(a.double(), b.double(), p=1) / 2)
assert (out - wanted).abs().max() < 1e-6
after = "libnvrtc" in open("/proc/self/maps").read()
print(json.dumps({"events": names, "nvrtc": after and not before}))
"""


def first_call(tmp_path, **environment) -> dict:
    env = {**os.environ, "KERNLIB_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_and_does_not_load_nvrtc(tmp_path):
    first = first_call(tmp_path)
    assert first["events"] == ["lookup", "compile", "store", "load", "launch"]
    second = first_call(tmp_path, KERNLIB_ASSERT_CACHED="1")
    assert second == {"events": ["lookup", "hit", "load", "launch"], "nvrtc": False}


SHIP = """
import sys, torch, kernlib as kl
from kernlib.jit import bundle, service
x, y = torch.empty(70, 12, device="meta"), torch.empty(60, 12, device="meta")
kl.compile(kl.laplace_l1(), archs=("sm_80", "sm_90a", "sm_120"), specs=(x, y), bandwidth=2.0)
bundle.write(sys.argv[1], bundle.collect(service.layers().store.items()))
"""


def test_a_read_only_bundle_of_three_archs_leaves_nothing_to_compile(tmp_path):
    folder = tmp_path / "bundle"
    env = {**os.environ, "KERNLIB_CACHE_DIR": str(tmp_path / "maker")}
    subprocess.run([sys.executable, "-c", SHIP, str(folder)], env=env, check=True, timeout=120)
    for path in (folder / "kernels.mdb", folder):
        path.chmod(path.stat().st_mode & 0o555)
    roots = os.pathsep.join(map(str, (tmp_path / "empty", folder)))
    found = first_call(tmp_path, KERNLIB_CACHE_DIR=roots, KERNLIB_ASSERT_CACHED="1")
    assert found == {"events": ["lookup", "hit", "load", "launch"], "nvrtc": False}


RECORDED = """
import json, sys, threading, torch
from contextlib import nullcontext
import kernlib as kl
names = []
kl.events.subscribe(lambda event: names.append(event.name))
torch.manual_seed(0)
x = torch.randn(300, 12, device="cuda", requires_grad=True)
v = torch.randn(300, 2, device="cuda")
bandwidth = torch.tensor(2.0, device="cuda", requires_grad=True)
patterns = [(1, 64, 64, 8), (8, 64, 64, 1)]
layer = kl.nn.KSLinear(patterns, algo="kernel", activation="gelu", device="cuda")
small, done = torch.randn(50, 12, device="cuda"), []

def other():
    done.append(kl.run_kernel(kl.laplace_l1(), small, small, bandwidth=2.0))

def step():
    y = kl.kernel_matmul(kl.gaussian(), x, x, v, bandwidth=bandwidth)
    (y.sum() + layer(torch.randn(256, 512, device="cuda")).square().mean()).backward()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done.pop().shape == (50, 50)
    torch.cuda.synchronize()

block = nullcontext()
if len(sys.argv) > 1:
    step()  # warm: its plans are there
    block = kl.recording(sys.argv[1], archs=sys.argv[2:] or None)
with block:
    step()
print(json.dumps(names))
"""


def recorded(cache, *arguments, **environment) -> list[str]:
    """The events of a process that makes one step, or records its second."""
    env = {**os.environ, "KERNLIB_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED, *map(str, arguments)],
        env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_recorded_step_compiles_nothing_elsewhere(tmp_path):
    """Not its backward pass either, nor a call of another thread."""
    folder = tmp_path / "bundle"
    assert "compile" in recorded(tmp_path / "maker", folder)
    roots = os.pathsep.join(map(str, (tmp_path / "empty", folder)))
    events = recorded(roots, KERNLIB_ASSERT_CACHED="1")
    assert events.count("load") > 4 and "compile" not in events


def test_a_step_is_recorded_for_a_gpu_that_is_not_here(tmp_path):
    from kernlib.jit import bundle

    recorded(tmp_path / "maker", tmp_path / "bundle", "sm_80")
    values = bundle.open_bundle(tmp_path / "bundle").items()
    found = [entry.unpack(key, value) for key, value in values]
    assert len(found) > 4 and {each.meta["arch"] for each in found} == {"sm_80"}


def test_more_than_48_kb_of_shared_memory(device):
    from cuda.bindings import driver

    spec = KernelSpec("service", BIG_SHARED, "fill", 256, SHARED, description="fill")
    out = torch.empty(256, device="cuda")  # and with it a context
    kernel = service.kernel(spec, torch.cuda.current_device(), "sm_90a")
    import ctypes

    pointer = ctypes.c_uint64(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    stream = torch.cuda.current_stream().cuda_stream
    status = driver.cuLaunchKernel(
        kernel.function, 1, 1, 1, 256, 1, 1, SHARED, stream, ctypes.addressof(arguments), 0
    )[0]
    assert int(status) == 0
    assert torch.equal(out.cpu(), SHARED // 4 - 1 - torch.arange(256.0))


def test_a_whole_entry_that_the_driver_rejects_is_compiled_anew(device):
    a, b = torch.randn(70, 12, device="cuda"), torch.randn(60, 12, device="cuda")
    descriptor = kl.Pairwise(epilogue=kl.Custom("v * 7.75"))
    (spec,) = ahead.specs(descriptor, "sm_90a", (a, b), {})
    key = service.digest(spec, "sm_90a")
    store = service.layers().store
    store.put(key, entry.pack(key, entry.Entry("pairwise", b"not a cubin", {})))
    with heard() as events:
        out = kl.run_kernel(descriptor, a, b)
    assert [event.name for event in events].count("compile") == 1
    assert (out - torch.cdist(a, b, p=1) * 7.75).abs().max() < 1e-3


FRAMES = 40  # of a hot call, which has 25


def test_the_hot_call_is_short(device):
    a, b = torch.randn(64, 8, device="cuda"), torch.randn(64, 8, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    descriptor = kl.l1_distance()
    kl.run_kernel(descriptor, a, b, out=out)
    names = []
    note = {"call": lambda frame: names.append(frame.f_code.co_name)}  # of Python, not of C
    sys.setprofile(lambda frame, event, _: note.get(event, id)(frame))
    try:
        kl.run_kernel(descriptor, a, b, out=out)
    finally:
        sys.setprofile(None)
    assert 0 < len(names) <= FRAMES, names  # the benchmark measures their microseconds

"""NVRTC takes a declared matrix of pairwise kernels, and none spills, grows or takes too long."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

import kernlib as kl
from kernlib.jit.compiler import compile_spec
from kernlib.ops.pairwise_lowering import INNER_CODE, Variant, spec

HERE = "sm_90a"
SPILL_BYTES, REGISTERS = 128, 128  # two blocks of 256 threads share a multiprocessor
CUBIN_BYTES = 100 * 1000
COMPILE_MS = 4000  # a slow machine's; a fast one takes 400

POWER = kl.p_distance()
STAGES = {"Identity": kl.Identity(), "Abs": kl.Abs(), "Square": kl.Square(), "Sqrt": kl.Sqrt()}


def variant(
    dtype="float32", tile=128, a="features", b="features", inner="any", out=None,
    long_k=True, swapped=False, root=False,
):  # fmt: skip
    return Variant(dtype, out or dtype, tile, long_k, a, b, swapped, inner, "any", root)


def matrix():
    """Name to (descriptor, variant, arch): each choice of lowering at least once."""
    cases = {}
    for name, stage in STAGES.items():
        cases[f"term {name}"] = (kl.Pairwise(inner=stage), variant(), HERE)
        cases[f"dot {name}"] = (kl.Pairwise("dot", inner=stage), variant(tile=64), HERE)
    for power, code in INNER_CODE.items():
        cases[f"term {code} p={power}"] = (POWER, variant(inner=power, root=True), HERE)
    accesses = ("features", "points", "strided")
    for a in accesses:
        for b in accesses:
            cases[f"access {a} {b}"] = (kl.l1_distance(), variant(a=a, b=b), HERE)
    for dtype in ("float64", "float16", "bfloat16"):
        for a, b in zip(accesses, accesses[1:] + accesses[:1], strict=True):
            tile = 64 if dtype == "float64" else 128
            made = variant(dtype=dtype, tile=tile, a=a, b=b)
            cases[f"{dtype} {a} {b}"] = (kl.l2_distance(), made, HERE)
    cases["float16 to float32"] = (kl.l1_distance(), variant("float16", out="float32"), HERE)
    cases["float64 p"] = (POWER, variant("float64", 64, inner="device", root=True), HERE)
    for tile in (64, 128):
        for long_k in (False, True):
            made = variant(tile=tile, long_k=long_k)
            cases[f"tile {tile} long={long_k}"] = (kl.gaussian(), made, HERE)
    cases["symmetric"] = (kl.laplace_l1(symmetric=True), variant(), HERE)
    cases["swapped"] = (kl.Pairwise(inner=kl.Identity()), variant(swapped=True), HERE)
    epilogues = {
        "matern52": kl.matern52(),
        "rational quadratic": kl.rational_quadratic(),
        "polynomial": kl.polynomial(16),
        "power exponential": kl.laplace_pq(),
        "custom": kl.l1_distance(epilogue=kl.Custom("erf(v) + log1p(v) * s", ("s",))),
    }
    for name, descriptor in epilogues.items():
        made = variant(root=descriptor == kl.laplace_pq())
        cases[f"epilogue {name}"] = (descriptor, made, HERE)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        cases[f"{arch} laplace"] = (kl.laplace_l1(), variant(), arch)
        cases[f"{arch} half"] = (POWER, variant("bfloat16", b="points", root=True), arch)
        if arch in ("sm_80", "sm_120"):
            cases[f"{arch} double"] = (kl.l2_distance(), variant("float64", 64, a="strided"), arch)
    return cases


CASES = matrix()


@cache
def compiled():
    """All of them, on the machine's cores: NVRTC leaves the interpreter to other threads."""

    def build(case):
        descriptor, made, arch = case
        return compile_spec(spec(descriptor, made, arch), arch)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(build, CASES.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_compiles_within_its_bounds(name):
    entry = compiled()[name]
    meta = {key: int(entry.meta[key]) for key in ("registers", "spill_bytes", "compile_ms")}
    assert entry.kernel == "pairwise"
    assert entry.cubin[:4] == b"\x7fELF"
    assert 0 < meta["registers"] <= REGISTERS
    assert meta["compile_ms"] <= COMPILE_MS
    _, made, arch = CASES[name]
    if made.dtype == "float32":
        assert len(entry.cubin) <= CUBIN_BYTES
        if arch == HERE and made.tile == 128:
            assert meta["spill_bytes"] <= SPILL_BYTES


def test_the_matrix_has_every_term_and_every_access():
    text = "".join(spec(d, v, arch).source for d, v, arch in CASES.values())
    for code in (*STAGES, *INNER_CODE.values()):
        assert f"#define INNER {code}\n" in text
    for side in "AB":
        for access in ("features", "points", "strided"):
            assert f"#define ACCESS_{side} Access::{access}\n" in text


def test_the_report_counts_dynamic_shared_memory():
    descriptor, made, arch = CASES["tile 128 long=True"]
    reported = int(compiled()["tile 128 long=True"].meta["shared_bytes"])
    assert reported == spec(descriptor, made, arch).shared_bytes == 99 * 1024

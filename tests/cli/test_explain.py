"""`kernlib explain` and `kernlib show`: what they say of a call, and that they refuse what compile
refuses, in its words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.cli import formulas, machine, reasons
from kernlib.cli.machine import Gpu
from kernlib.jit import sources, targets
from kernlib.runtime import devices
from tests.cli.cases import command, plain

CALL = ("--shape", "1000x64", "--shape", "800x64", "--argument", "bandwidth=8.0")
FACTOR = "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(), Scale()))"
INTERLEAVED = ("KroneckerSparse(a=1, b=768, c=192, d=2)", "--dtype", "float16")
OF_INTERLEAVED = ("--shape", "512x384", "--shape", "1x768x192x2")
RAGGED = "KroneckerProduct(shapes=((97, 89), (31, 33)))"
OF_RAGGED = ("--shape", "8x3007", "--shape", "97x89", "--shape", "31x33")
COMMANDS = (("explain",), ("show", "--source"))


def explained(run, *arguments) -> list[dict]:
    result = run("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# Explain.


def test_what_it_says_of_a_call(run, compiles):
    result = run("explain", "gaussian", *CALL, "--arch", "90a")
    assert result.exit_code == 0 and result.stderr == ""
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[:7] == [
        "gaussian",
        "formula     v = sum_k (b[n, k] - a[m, k]) ** 2",
        "            out[m, n] = exp(-v / (2 * bandwidth * bandwidth))",
        "call        run_kernel(descriptor, a, b, bandwidth=...)",
        "arguments   a float32 1000x64, b float32 800x64, bandwidth 8.0",
        "result      float32 1000x800",
        "at least    3.5 MB, of arguments 450.0 KB and of the result 3.1 MB; "
        "102,400,000 operations, 28 a byte",
    ]
    assert lines[8] == "sm_90a, 78 to 132 multiprocessors"
    assert lines[11].split()[:5] == ["direct", "40", "0", "17408", "50"] and len(compiles) == 1
    assert lines[12].startswith("direct: ") and lines[12].endswith(".")
    assert lines[13] == "`kernlib.tune` chooses among 3 candidates: split (1), direct (2)."


def test_bytes_and_operations_of_a_call(run, compiles):
    shapes = ("--shape", "512x384", "--shape", "6x64x64x1", "--shape", "bias=384")
    options = ("--argument", "scale=inf", "--dtype", "float16", "--arch", "80")
    (facts,) = explained(run, FACTOR, *shapes, *options)
    assert facts["operations"] == 2 * 512 * 6 * 64 * 64
    assert facts["bytes"] == {"arguments": 2 * (512 * 384 + 6 * 64 * 64 + 384), "result": 393216}
    assert facts["result"] == {"dtype": "float16", "shape": [512, 384]}
    assert facts["arguments"]["bias"] == {"dtype": "float16", "shape": [384]}
    assert facts["arguments"]["scale"] == {"value": "inf"}


def test_an_out_is_written_alone(run, compiles):
    (facts,) = explained(run, "gaussian", *CALL, "--shape", "out=1000x800", "--arch", "80")
    assert facts["bytes"] == {"arguments": 4 * 64 * 1800, "result": 4 * 1000 * 800}


def test_kernels_by_the_gpus_that_take_them(run, compiles):
    """On every number of multiprocessors that compile makes kernels for."""
    (facts,) = explained(run, *INTERLEAVED, *OF_INTERLEAVED, "--arch", "80", "--arch", "120")
    for target in facts["targets"]:
        ranges = [place["multiprocessors"] for place in target["places"]]
        fewest, most = targets.MULTIPROCESSORS[target["arch"]]
        assert [ranges[0][0], ranges[-1][1]] == [fewest, most] and len(ranges) > 1
        assert [first for first, _ in ranges[1:]] == [last + 1 for _, last in ranges[:-1]]
        for row in (row for place in target["places"] for row in place["kernels"]):
            assert row["name"] == "portable" and row["blocks"] >= 1
            assert (sources.root().parent / row["source"]).is_file()
    made = run("compile", *INTERLEAVED, *OF_INTERLEAVED, "--arch", "80", "--arch", "120", "--json")
    known = {row["key"] for row in json.loads(made.stdout)["kernels"]}
    listed = {
        row["key"]
        for target in facts["targets"]
        for place in target["places"]
        for row in place["kernels"]
    }
    assert listed == known


def test_estimates_that_decide(run, compiles):
    (facts,) = explained(run, *INTERLEAVED, *OF_INTERLEAVED, "--arch", "90a")
    (target,) = facts["targets"]
    assert set(target["estimates_us"]) == {"interleaved", "transposed", "portable"}
    fastest = min(target["estimates_us"], key=target["estimates_us"].__getitem__)
    assert fastest == target["places"][0]["kernels"][-1]["name"] == "interleaved"
    assert set(target["candidates"]) == set(target["estimates_us"])
    assert set(target["reasons"]) == {"hopper/pack", "interleaved"}
    text = run("explain", *INTERLEAVED, *OF_INTERLEAVED, "--arch", "90a").stdout
    assert "Estimated microseconds on an H100: interleaved " in text


@pytest.mark.parametrize(
    "call, first, last",
    [
        ((RAGGED, *OF_RAGGED), [78, 131, False], [132, 132, True]),
        ((RAGGED, *OF_RAGGED, "--dtype", "float16"), [78, 132, False], [78, 132, False]),
        (
            (*INTERLEAVED[:1], *OF_INTERLEAVED, "--dtype", "float64"),
            [78, 132, True],
            [78, 132, True],
        ),
    ],
)
def test_where_torch_computes(run, compiles, call, first, last):
    (facts,) = explained(run, *call, "--arch", "90a")
    found = [
        [*place["multiprocessors"], place["by_torch"]] for place in facts["targets"][0]["places"]
    ]
    assert (found[0], found[-1]) == (first, last)
    text = run("explain", *call, "--arch", "90a").stdout
    assert ("Torch computes it" in text) == last[-1] and "launches no kernel" not in text


def test_a_call_without_elements(run, compiles):
    result = run("explain", "l1_distance", "--shape", "0x8", "--shape", "9x8", "--arch", "80")
    assert result.exit_code == 0 and "Such a call launches no kernel." in result.stdout
    assert compiles == []


def test_without_shapes_it_lists_what_compile_lists(run, compiles):
    options = ("l1_distance", "--arch", "80", "--dtype", "float32", "--dtype", "float64")
    (facts,) = explained(run, *options)
    made = json.loads(run("compile", *options, "--json").stdout)
    rows = [row for place in facts["targets"][0]["places"] for row in place["kernels"]]
    assert {row["key"] for row in rows} == {row["key"] for row in made["kernels"]}
    assert "arguments" not in facts and facts["dtypes"] == ["float32", "float64"]
    text = run("explain", *options).stdout
    assert "every kernel that any call of float32, float64 may use; --shape asks for" in text


def test_the_gpus_of_this_machine(run, compiles, monkeypatch):
    gpus = [Gpu(0, "A", "sm_80"), Gpu(1, "B", None, "too old"), Gpu(2, "A", "sm_80")]
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(devices, "real_model", lambda device: devices.Model("A", 108))
    (facts,) = explained(run, *INTERLEAVED, *OF_INTERLEAVED)
    (target,) = facts["targets"]
    assert target["gpu"] == "A"
    assert [place["multiprocessors"] for place in target["places"]] == [[108, 108]]
    text = run("explain", *INTERLEAVED, *OF_INTERLEAVED).stdout
    assert "A, sm_80, 108 multiprocessors" in text


# What both refuse.


@pytest.mark.parametrize("first", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "arguments",
    [
        ("gausian",),
        ("KroneckerSparse",),
        ("gaussian", "--arch", "sm_75"),
        ("gaussian", "--dtype", "float33"),
        ("gaussian", "--dtype", "int8"),
        ("gaussian", "--shape", "10by4"),
        ("gaussian", "--shape", "bias=4"),
        ("gaussian", *CALL, "--shape", "bandwidth=1"),
        ("gaussian", "--shape", f"{1 << 70}x4"),
        ("l1_distance", *2 * ("--shape", f"{1 << 40}x1")),
        ("gaussian", "--argument", "bandwidth=1"),
        ("gaussian", *CALL, "--argument", "colour=1"),
        ("gaussian", "--shape", "10x4", "--shape", "9x4"),
        ("gaussian", *CALL, "--argument", "bandwith=1"),
        ("gaussian", *CALL, "--shape", "1x64"),
        ("l1_distance", "--shape", "10x4"),
        (FACTOR, "--shape", "512x384", "--shape", "6x64x64x1"),
        (RAGGED, "--shape", "9x3007"),
        ("BlockSparseMatmul(mode='dds')", *3 * ("--shape", "4x4")),
    ],
)
def test_what_compile_refuses_is_refused_in_its_words(run, compiles, first, arguments):
    given = arguments if "--arch" in arguments else (*arguments, "--arch", "80")
    expected, result = run("compile", *given), run(*first, *given)
    plain(result, expected.exit_code)
    assert result.exit_code == 2 and result.stdout == "" and compiles == []
    messages = [text.stderr.partition("Error: ")[2] for text in (expected, result)]
    assert messages[0] == messages[1]


@pytest.mark.parametrize("first", COMMANDS, ids=" ".join)
def test_letters_stand_for_nothing_here(run, first):
    plain(run(*first, "gaussian", "--shape", "Mx4"), 2, "--shape", "M stands for no size here")


@pytest.mark.parametrize("name", ["explain", "show"])
def test_a_misspelt_name_waits_for_no_torch(name):
    more = ["--source"] * (name == "show")
    code = (
        "import sys; from kernlib.cli import main\n"
        f"try: main({[name, 'gausian', '--shape', '9x4', *more]})\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean gaussian?" in done.stderr
    assert done.stdout.strip() == "False"


# Show.


def test_the_source_that_nvrtc_is_given(run, compiles):
    result = run("show", "gaussian", *CALL, "--arch", "90a", "--source")
    assert result.exit_code == 0 and result.stderr == "" and compiles == []
    heading, launch, first, *_ = result.stdout.splitlines()
    assert heading == "// sm_90a gaussian float32 tile=64 features/features"
    assert launch.endswith(": 256 threads, 17408 B of dynamic shared memory")
    assert first.startswith("#define pairwise_direct kernlib_pairwise_direct_")
    assert '#include "' not in result.stdout
    (facts,) = json.loads(
        run("show", "gaussian", *CALL, "--arch", "90a", "--source", "--json").stdout
    )
    assert f"{facts['source']}\n" in result.stdout
    assert '#include "pairwise/direct/direct.cuh"' in facts["generated"]
    assert (facts["threads"], facts["arch"]) == (256, "sm_90a")


def test_all_sources(run, compiles):
    result = run("show", "l1_distance", "--arch", "80", "--source")
    specs = ahead.variants(kl.l1_distance(), "sm_80", (torch.float32,))
    assert len(re.findall("(?m)^// sm_80 l1_distance", result.stdout)) == len(specs)
    assert f"Without --shape: {len(specs)} kernels, all that any call may use." in result.stderr


def test_one_of_source_and_sass_is_shown(run):
    for options in ((), ("--source", "--sass")):
        plain(run("show", "gaussian", *options), 2, "one of --source and --sass")


@pytest.fixture
def nvdisasm(tmp_path, monkeypatch):
    """Puts a program of this text into PATH in the place of nvdisasm."""

    def write(text):
        path = tmp_path / "bin" / "nvdisasm"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)

    return write


def test_machine_code_by_the_disassembler_of_the_path(run, compiles, nvdisasm):
    nvdisasm('echo "option $1"; cat "$2" | head -c 6')
    result = run("show", "gaussian", *CALL, "--arch", "90a", "--sass")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2:] == ["option -c", "sm_90a"]  # as cubins of compiles begin
    assert len(compiles) == 1


def test_a_disassembler_that_does_not_read_a_cubin(run, compiles, nvdisasm):
    nvdisasm("echo first >&2; echo it is too new >&2; exit 3")
    result = run("show", "gaussian", *CALL, "--arch", "90a", "--sass")
    plain(result, 1, "does not read a cubin of NVRTC 13.4.92 (it is too new)", "pip install")


def test_without_a_disassembler(run, compiles, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("show", "gaussian", *CALL, "--arch", "90a", "--sass")
    plain(result, 1, "nvdisasm is neither in PATH nor in a wheel; `pip install nvidia-cuda-nvdis")
    assert compiles == []


# Of real kernels.


def test_a_real_kernel_explained(cache_dir):
    done = command("explain", "l1_distance", "--shape", "1000x64", "--shape", "800x64", "--json")
    assert done.returncode == 0, done.stderr
    (facts,) = json.loads(done.stdout)
    (row,) = facts["targets"][0]["places"][0]["kernels"]
    assert row["registers"] > 16 and row["spill_bytes"] == 0 and row["cubin_bytes"] > 1000
    assert row["blocks"] >= 1 and row["compile_ms"] > 0


def test_real_machine_code(cache_dir):
    shapes = ("--shape", "9x16", "--shape", "4x4", "--shape", "4x4")
    done = command("show", "KroneckerProduct(shapes=(4, 4))", "--sass", *shapes, "--arch", "80")
    if "nvdisasm is neither" in done.stderr:
        pytest.skip("needs nvdisasm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("// sm_80 kronecker_product ")
    assert " EXIT " in done.stdout and "/*0000*/" in done.stdout


# Formulas and reasons.


FORMULAS = {
    kl.l2_distance(symmetric=True): ["v = sum_k (a[n, k] - a[m, k]) ** 2", "out[m, n] = sqrt(v)"],
    kl.p_distance(): ["v = sum_k |b[n, k] - a[m, k]| ** p", "out[m, n] = v ** (1 / p)"],
    kl.dot_product(): ["out[m, n] = sum_k b[n, k] * a[m, k]"],
    kl.KroneckerProduct(((2, 3), 4), transposed=(True, False), side="left", epilogue=kl.Relu()): [
        "v = (factor1.mT ⊗ factor2) x",
        "out = max(v, 0)",
    ],
    kl.SparseMatmul(kl.Bias()): ["v = sum_c w[r, c] * x[..., c]", "out[..., r] = v + bias"],
    kl.BlockSparseMatmul("dds", transpose_b=True): [
        "out = a b.mT, where b holds the layout's blocks"
    ],
    kl.BlockSparseScaledMatmul("dsd"): [
        "out = (scale_a * a) (scale_b * b), where a holds the layout's blocks"
    ],
}


@pytest.mark.parametrize("descriptor", FORMULAS, ids=lambda each: each.describe())
def test_formulas(descriptor):
    assert formulas.formula(descriptor) == FORMULAS[descriptor]


def test_a_formula_of_a_chain_has_a_line_for_each_factor():
    first = kl.KroneckerSparse(6, 64, 64, 1)
    chain = kl.KroneckerSparseChain((first, kl.KroneckerSparse(1, 64, 64, 6)))
    read, written = "[..., i*c*d + k*d + l]", "[..., i*b*d + j*d + l]"
    assert formulas.formula(chain) == [
        f"h1{written} = sum_k weight1[i, j, k, l] * x{read}, where a, b, c, d = 6, 64, 64, 1",
        f"out{written} = sum_k weight2[i, j, k, l] * h1{read}, where a, b, c, d = 1, 64, 64, 6",
    ]
    last = kl.KroneckerSparse(6, 64, 64, 1, batch_last=True)
    assert formulas.formula(last)[0].startswith("out[i*b*d + j*d + l, ...] = sum_k")


def test_every_class_of_descriptors_has_a_formula():
    for descriptor in (kl.BlockSparseSoftmax(), kl.BlockSparseAttention(), kl.gaussian()):
        assert formulas.formula(descriptor)[-1].startswith("out")


@pytest.mark.parametrize(
    "descriptor",
    [
        kl.gaussian(),
        kl.KroneckerSparse(1, 768, 192, 2),
        kl.KroneckerSparseChain(
            (kl.KroneckerSparse(6, 64, 64, 1), kl.KroneckerSparse(1, 8, 64, 6))
        ),
        kl.KroneckerProduct((64, 64, 64, 64)),
        kl.KroneckerProduct((7, 9, 3)),
        kl.SparseMatmul(),
        kl.BlockSparseMatmul("sdd"),
        kl.BlockSparseMatmul("dds"),
        kl.BlockSparseScaledMatmul("dsd"),
        kl.BlockSparseSoftmax(),
        kl.BlockSparseAttention(),
    ],
    ids=lambda each: each.describe(),
)
def test_every_kernel_has_a_reason(descriptor):
    kinds = (torch.float32, torch.float16)
    specs = [s for arch in ("sm_80", "sm_90a") for s in ahead.variants(descriptor, arch, kinds)]
    assert not [name for name, text in reasons.reasons(specs).items() if text == "by rule"]

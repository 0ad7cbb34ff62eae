"""`kernlib compile`: which kernels, for which targets, and what it says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import kernlib as kl
from kernlib.cli import lookup, machine
from kernlib.cli.machine import Gpu
from tests.cli.cases import command, fresh, plain

CALL = ("--shape", "1000x64", "--shape", "800x64", "--argument", "bandwidth=8.0")
LAYER = "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(), Scale()))"
GRID = "KroneckerProduct(shapes=((4, 4), (4, 4)), epilogue=(Add(),))"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A working directory whose modules the command may import; write(name, source)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)

    def write(name, source):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("own"):
            del sys.modules[name]


@pytest.fixture
def asked(monkeypatch):
    """What kernlib.compile would be asked for."""
    calls = []

    def compile(descriptors, *, archs, specs=None, dtypes=None, workers=None, **arguments):
        given = {"descriptors": descriptors, "archs": archs, "specs": specs, "dtypes": dtypes}
        calls.append(SimpleNamespace(**given, workers=workers, arguments=arguments))
        return []

    monkeypatch.setattr(kl, "compile", compile)
    return calls


# Which kernels.


def test_the_kernels_of_one_call(run, compiles, cache_dir):
    result = run("compile", "laplace_l1", "--arch", "sm_90a", *CALL)
    assert result.exit_code == 0 and result.stderr == ""
    rows = [line for line in result.stdout.splitlines() if "laplace_l1 float32" in line]
    assert len(rows) == len(compiles) == 1
    for cell in ("sm_90a", "40", "0", "17408", "50", "compiled"):
        assert cell in rows[0].split()
    last = result.stdout.splitlines()[-1]
    assert last.startswith("1 compiled, 0 found, in ")
    assert last.endswith(f" s; kernels are kept in {cache_dir}")


def test_all_variants_for_several_archs_and_the_second_time_none(run, compiles):
    arguments = ("compile", "laplace_l1", "gaussian", "--arch", "sm_80", "--arch", "sm_120")
    first = json.loads(run(*arguments, "--json").stdout)
    assert first["archs"] == ["sm_80", "sm_120"]
    assert first["compiled"] == first["kept"] == len(first["kernels"]) == len(compiles) > 100
    assert first["found"] == 0
    fresh()
    second = json.loads(run(*arguments, "--json").stdout)
    assert (second["compiled"], second["found"]) == (0, len(compiles))
    assert {row["from"] for row in second["kernels"]} == {"store"}
    assert {row["key"] for row in second["kernels"]} == {row["key"] for row in first["kernels"]}


def test_json(run, compiles, cache_dir):
    facts = json.loads(run("compile", "gaussian", *CALL, "--arch", "sm_80", "--json").stdout)
    names = {"archs", "compiled", "found", "kept", "seconds", "path", "kernels"}
    assert set(facts) == names and facts["path"] == str(cache_dir)
    row = facts["kernels"][0]
    assert (row["arch"], row["from"], row["registers"]) == ("sm_80", "compiled", 40)
    assert (row["compile_ms"], row["family"], len(row["key"])) == (50, "pairwise", 64)
    assert run("cache", "show", row["key"]).exit_code == 0


def test_what_a_call_is_made_of(run, asked):
    import torch

    options = ("--dtype", "float16", "--dtype", "float64", "--workers", "3", "--arch", "sm_80")
    numbers = ("--argument", "p=inf", "--argument", "row_offset=4", "--argument", "flag=true")
    run("compile", "p_distance", "--shape", "2x30x4", "--shape", "5x4", *options, *numbers)
    for call, dtype in zip(asked, (torch.float16, torch.float64), strict=True):
        assert call.descriptors == [kl.p_distance()]
        assert call.archs == ("sm_80",) and call.workers == 3
        assert [(t.shape, t.dtype) for t in call.specs] == [((2, 30, 4), dtype), ((5, 4), dtype)]
        assert call.arguments == {"p": float("inf"), "row_offset": 4, "flag": True}
        assert type(call.arguments["row_offset"]) is int


def test_dtypes_without_a_call(run, asked):
    import torch

    run("compile", "gaussian", "--arch", "sm_80")
    run("compile", "gaussian", "--arch", "sm_80", "--dtype", "float16", "--dtype", "float32")
    assert [call.dtypes for call in asked] == [(torch.float32,), (torch.float16, torch.float32)]


def test_a_call_without_elements(run, compiles):
    result = run("compile", "l1_distance", "--shape", "0x8", "--shape", "9x8")
    assert result.exit_code == 0 and "Such a call launches no kernel." in result.stdout


def test_an_argument_that_is_a_tensor(run, compiles):
    """As a bias is: its sizes stand in place of its numbers."""
    factor = "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(), Gelu()))"
    shapes = ("--shape", "512x384", "--shape", "6x64x64x1", "--shape", "bias=384")
    result = run("compile", factor, *shapes, "--arch", "sm_80")
    assert result.exit_code == 0, result.output
    assert len(compiles) == 1 and "Bias(parameter='bias')" in compiles[0][0]
    plain(run("compile", factor, *shapes[:4], "--arch", "sm_80"), 2, "needs bias")


# Reductions, gradients, ranges of sizes.


OF_MATMUL = ("--reduction", "kernel_matmul", "--shape", "Mx3", "--shape", "Nx3", "--shape", "N")


def test_the_names_of_reductions_are_those_of_the_functions():
    from kernlib.cli import compile as module
    from kernlib.families.pairwise import operation

    assert tuple(operation.reductions()) == module.REDUCTIONS
    assert all(getattr(kl, name) is function for name, function in operation.reductions().items())


def test_a_reduction_and_what_it_is_differentiated_by(run, asked):
    import torch

    options = ("--gradient", "b", "--gradient", "bandwidth", "--dtype", "float16", "--arch", "80")
    sizes = ("--size", "M=900", "--size", "N=700")
    number = ("--argument", "bandwidth=2")
    result = run("compile", "gaussian", "cauchy", *OF_MATMUL, *sizes, *number, *options)
    assert result.exit_code == 0, result.output
    assert [call.descriptors for call in asked] == [[kl.gaussian()], [kl.cauchy()]]
    for call in asked:
        a, b, v = call.specs
        assert [tuple(t.shape) for t in (a, b, v)] == [(900, 3), (700, 3), (700,)]
        assert [t.requires_grad for t in (a, b, v)] == [False, True, False]
        assert a.is_meta and a.dtype == torch.float16
        assert call.arguments["reduction"] == "kernel_matmul"
        bandwidth = call.arguments["bandwidth"]
        assert bandwidth.requires_grad and bandwidth.dtype == torch.float32
        assert bandwidth.shape == ()


def test_a_gradient_of_a_symmetric_matrix_and_of_another_family(run, asked):
    symmetric = ("--reduction", "kernel_matmul", "--shape", "90x3", "--shape", "90")
    text = repr(kl.l1_distance(symmetric=True))
    result = run("compile", text, *symmetric, "--gradient", "v", "--arch", "80")
    assert result.exit_code == 0, result.output
    factor = "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(),))"
    shapes = ("--shape", "512x384", "--shape", "6x64x64x1", "--shape", "bias=384")
    wanted = ("--gradient", "weight", "--gradient", "bias", "--arch", "80")
    result = run("compile", factor, *shapes, *wanted)
    assert result.exit_code == 0, result.output
    assert [[t.requires_grad for t in call.specs] for call in asked] == [[False, True]] * 2
    layer = asked[1].arguments
    assert layer["bias"].requires_grad and "reduction" not in layer


def test_a_range_of_sizes_is_its_ends_and_powers_of_two_with_one_more(run, compiles, monkeypatch):
    from kernlib import ahead

    found, known = [], ahead.specs

    def specs(descriptor, arch, tensors, arguments):
        found.append((arch, *(t.shape[0] for t in tensors)))
        return known(descriptor, arch, tensors, arguments)

    monkeypatch.setattr(ahead, "specs", specs)
    sizes = ("--size", "M=100..1024", "--size", "N=5..5")
    result = run("compile", "l1_distance", *OF_MATMUL, *sizes, "--arch", "80", "--arch", "120")
    assert result.exit_code == 0, result.output
    expected = (100, 101, 128, 129, 256, 257, 512, 513, 1024)
    assert found == [(arch, m, 5, 5) for arch in ("sm_80", "sm_120") for m in expected]
    assert len(compiles) == 2


def test_kernels_of_a_reduction_and_its_gradients(run, compiles):
    sizes = ("--size", "M=900..2000", "--size", "N=700")
    options = ("--argument", "bandwidth=2.0", "--gradient", "a", "--arch", "80", "--json")
    first = json.loads(run("compile", "gaussian", *OF_MATMUL, *sizes, *options).stdout)
    said = [row["description"] for row in first["kernels"]]
    assert len(compiles) == len(said)  # some of each, as blocks are divided by size
    assert {"gradient first points" in text for text in said} == {False, True}
    fresh()
    second = json.loads(run("compile", "gaussian", *OF_MATMUL, *sizes, *options).stdout)
    assert (second["compiled"], second["found"]) == (0, len(said))


# For which targets.


SPELLINGS = {
    "80": "sm_80", "8.0": "sm_80", "sm80": "sm_80", "SM_120": "sm_120", "compute_86": "sm_86",
    "12.1": "sm_121", "sm_90a": "sm_90a", "sm_90": "sm_90",
    "90": "sm_90a", "9.0": "sm_90a", "90a": "sm_90a",  # of a Hopper: its own target
}  # fmt: skip


@pytest.mark.parametrize("given, arch", SPELLINGS.items())
def test_spellings_of_a_target(run, asked, given, arch):
    assert run("compile", "gaussian", "--arch", given).exit_code == 0
    assert asked[0].archs == (arch,)


def test_the_targets_of_this_machine_by_name(run, asked, monkeypatch):
    plain(run("compile", "gaussian", "--arch", "native"), 2, "'native' is this machine's GPU")
    found = [Gpu(0, "A", "sm_80"), Gpu(1, "B", "sm_120"), Gpu(2, "C", None, "C is too old")]
    monkeypatch.setattr(machine, "gpus", lambda: found)
    run("compile", "gaussian", "--arch", "native", "--arch", "80", "--arch", "sm_90")
    assert asked[0].archs == ("sm_80", "sm_120", "sm_90")


def test_without_an_arch_and_a_gpu(run, asked, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "old", None, "too old")])
    result = run("compile", "gaussian", "--json")
    assert asked[0].archs == ("sm_90a",) and "no GPU is here" in result.stderr
    assert json.loads(result.stdout)["archs"] == ["sm_90a"]


def test_without_an_arch_for_the_gpus_here(run, asked, monkeypatch):
    found = [Gpu(0, "A", "sm_80"), Gpu(1, "B", "sm_120"), Gpu(2, "A", "sm_80")]
    monkeypatch.setattr(machine, "gpus", lambda: found)
    result = run("compile", "gaussian")
    assert asked[0].archs == ("sm_80", "sm_120") and "machine's sm_80, sm_120." in result.stderr


# Whose descriptors.


def test_the_ready_made_ones():
    known = lookup.ready_made()
    assert {"laplace_l1", "gaussian", "p_distance", "polynomial", "l2_distance"} <= set(known)
    assert not {"Pairwise", "Abs", "Laplace", "run_kernel", "compile"} & set(known)
    assert known["gaussian"]() == kl.gaussian()


def test_a_function_as_it_is_called_in_python(run, asked, modules):
    modules("own.kernels", "import kernlib as kl\ndef made(): return kl.matern32()\n")
    texts = ("gaussian()", "own.kernels:made()", "polynomial(degree=2, symmetric=True)")
    result = run("compile", *texts, "l2_distance(epilogue=(Gaussian(),))", "--arch", "sm_80")
    assert result.exit_code == 0, result.output
    assert asked[0].descriptors == [
        *(kl.gaussian(), kl.matern32(), kl.polynomial(2, symmetric=True)),
        kl.l2_distance(epilogue=(kl.Gaussian(),)),
    ]


@pytest.mark.parametrize("name", ["one", "several", "made", "made_several", "Box.inner", "kind"])
def test_descriptors_of_the_working_directory(run, asked, modules, name):
    modules(
        "own.kernels",
        "import kernlib as kl\none = kl.gaussian()\nseveral = [one, one]\nkind = kl.Pairwise\n"
        "def made(): return one\ndef made_several(): return (one, one)\n"
        "class Box: inner = one\n",
    )
    result = run("compile", f"own.kernels:{name}", "laplace_l1", "--arch", "sm_80")
    assert result.exit_code == 0, result.output
    descriptors = asked[0].descriptors
    assert all(isinstance(found, kl.Pairwise) for found in descriptors)
    assert len(descriptors) == (3 if "several" in name else 2)
    assert descriptors[-1] == kl.laplace_l1()


@pytest.mark.parametrize(
    "name, parts",
    [
        ("laplace", ("'laplace'", "laplace_l1", "package.module:name")),
        ("gausian", ("'gausian'", "Did you mean gaussian?")),
        ("Gaussian", ("'Gaussian'", "Did you mean gaussian?")),
        ("zzz", ("'zzz'", "There are cauchy, ", "squared_distance. package.module:name")),
        ("KroneckerSparse", ("KroneckerSparse needs to be told", "a=6", "package.module:name")),
        ("KroneckerSparse(6, 64, 64, 1)", ("fields are given by name",)),
        ("KroneckerSparse(a=6, b=64, c=64, d=0)", ("d must be at least 1",)),
        ("Nothing(a=6)", ("'Nothing' is no type of a descriptor",)),
        ("nothing()", ("'nothing' is none of kernlib's",)),
        ("gaussian(bandwidth=2)", ("unexpected keyword argument 'bandwidth'",)),
        ("own_missing:x", ("own_missing", "cannot be imported", "ModuleNotFoundError")),
        ("own_bad:x", ("own_bad", "ZeroDivisionError")),
        ("own_exit:x", ("own_exit", "SystemExit")),
        ("own:nothing", ("own:nothing", "cannot be found")),
        ("own:", ("own:", "cannot be found")),
        (":own", ("cannot be imported",)),
        ("own:number", ("own:number", "holds a int", "kernlib.laplace_l1()")),
        ("own:mixed", ("own:mixed", "holds a str")),
        ("own:empty", ("own:empty", "is an empty list")),
        ("own:greedy", ("own:greedy() failed", "TypeError")),
        ("own:broken", ("own:broken() failed", "no luck")),
    ],
)
def test_names_that_say_no_descriptor(run, asked, modules, name, parts):
    modules("own_bad", "1 / 0")
    modules("own_exit", "raise SystemExit(3)")
    modules(
        "own",
        "import kernlib\nnumber = 3\nmixed = [kernlib.gaussian(), 'x']\nempty = []\n"
        "def greedy(x): return x\ndef broken(): raise RuntimeError('no luck')\n",
    )
    plain(run("compile", name), 2, "DESCRIPTOR", *parts)
    assert asked == []


# What cannot be used.


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ((), ("DESCRIPTOR",)),
        (("gaussian", "--arch", "sm_75"), ("--arch", "sm_80", "'sm_75'")),
        (("gaussian", "--dtype", "float33"), ("--dtype", "'float33'", "float32")),
        (("gaussian", "--dtype", "int8"), ("no kernels for torch.int8",)),
        (("gaussian", "--shape", "10by4"), ("--shape", "'10by4'", "1000x64")),
        (("gaussian", "--arch", "80a"), ("--arch", "'80a' is no target", "native")),
        (("gaussian", "--shape", "-1x4"), ("--shape", "'-1x4'")),
        (("gaussian", "--shape", "=4"), ("--shape", "'=4'", "bias=384")),
        (("gaussian", "--shape", "bias=4"), ("--shape",)),
        (("gaussian", *CALL, "--shape", "bandwidth=1"), ("bandwidth is given twice",)),
        (("gaussian", "--shape", f"{1 << 40}x{1 << 40}"), ("--shape", "no tensor of 109951")),
        (("gaussian", "--shape", f"{1 << 70}x4"), ("--shape", "no tensor of 118059")),
        (("l1_distance", *2 * ("--shape", f"{1 << 40}x1")), ("--shape", "output", "too large")),
        (("gaussian", *CALL[:-1], "bandwidth=" + "9" * 400), ("bandwidth must fit a float64",)),
        (("gaussian", "--argument", "bandwidth"), ("--argument", "bandwidth=8.0")),
        (("gaussian", "--argument", "bandwidth=wide"), ("--argument", "'wide' of bandwidth")),
        (("gaussian", "--argument", "bandwidth=1"), ("--argument", "--shape")),
        (("gaussian", *CALL, "--argument", "bandwidth=1"), ("bandwidth is given twice",)),
        (("gaussian", *CALL, "--argument", "archs=1"), ("archs is no argument of a call",)),
        (("gaussian", *CALL, "--argument", "colour=1"), ("colour is no argument", "bandwidth")),
        (("gaussian", *CALL, "--argument", "row_offset=0.5"), ("row_offset must be an int",)),
        (
            ("gaussian", "--shape", "10x4", "--shape", "9x4"),
            ("needs bandwidth, such as --argument bandwidth=1.0.",),
        ),
        (
            ("p_distance", "--shape", "10x4", "--shape", "9x4"),
            ("needs p (or inner_p), such as --argument p=1.0.",),
        ),
        (
            (LAYER, "--shape", "512x384", "--shape", "6x64x64x1"),
            ("needs bias, scale, such as --shape bias=384 --argument scale=1.0.",),
        ),
        (
            (GRID, "--shape", "9x16", "--shape", "4x4", "--shape", "4x4"),
            ("needs beta, y, such as --argument beta=1.0 --shape y=384.",),
        ),
        ((GRID, "--shape", "9x16"), ("factor1 is missing", "takes x, factor1, factor2, and")),
        (("gaussian", *CALL, "--argument", "bandwith=1"), ("did you mean bandwidth?",)),
        (("gaussian", *CALL, "--shape", "1x64"), ("specs must be the tensors of one call",)),
        (("l1_distance", "--shape", "10x4"), ("b is missing",)),
        (("gaussian", "--workers", "0"), ("--workers",)),
        (("gaussian", "--reduction", "matmul"), ("--reduction", "'kernel_matmul'")),
        (("gaussian", "--reduction", "kernel_sum"), ("--reduction is about one call", "--shape")),
        (("gaussian", "--gradient", "a"), ("--gradient is about one call", "--shape")),
        (("gaussian", "--size", "M=3"), ("--size is about one call", "--shape")),
        (("gaussian", *CALL, "--gradient", "c"), ("--gradient", "'c' is nothing", "a, b, bandw")),
        (("gaussian", *CALL, "--gradient", "v"), ("--gradient", "a, b, bandwidth")),
        (("gaussian", *CALL, "--shape", "1x64", "--gradient", "a"), ("tensors of one call",)),
        (("gaussian", *OF_MATMUL[:6]), ("--size", "M of --shape has no size: M=1000")),
        (("gaussian", *CALL, "--size", "M=3"), ("--size", "M is in no --shape")),
        (("gaussian", *CALL, *2 * ("--size", "M=3")), ("--size", "given twice")),
        (("gaussian", *CALL, "--size", "M=9..3"), ("--size", "'M=9..3' is no range")),
        (("gaussian", *CALL, "--size", "m=9"), ("--size", "'m=9' is no size", "M=1000..100000")),
        (("gaussian", *CALL, "--size", "M=9.."), ("--size", "'M=9..' is no size")),
        (("gaussian", *CALL, "--shape", "bias=M"), ("--shape", "sizes of bias", "are numbers")),
        (
            ("gaussian", "--reduction", "kernel_matmul", *CALL),
            ("v is missing: kernel_matmul of gaussian takes a, b, v",),
        ),
        (
            ("gaussian", "--reduction", "kernel_topk", *CALL, "--argument", "k=900"),
            ("k must be from 1 to the 800 points",),
        ),
        (
            (LAYER, "--reduction", "kernel_sum", "--shape", "512x384", "--shape", "6x64x64x1"),
            ("reduction is no argument of KroneckerSparse",),
        ),
    ],
)
def test_what_cannot_be_used_is_named(run, compiles, arguments, parts):
    result = run("compile", *arguments)
    plain(result, 2, *parts)
    assert compiles == [] and result.stdout == "" and "run_kernel" not in result.stderr


def test_a_misspelt_name_waits_for_no_torch():
    code = (
        "import sys; from kernlib.cli import main\n"
        "try: main(['compile', 'gausian', '--shape', '9x4', '--arch', '80'])\n"
        "finally: print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2 and "Did you mean gaussian?" in found.stderr
    assert found.stdout.strip() == "False"


def test_a_kernel_found_under_another_description(run, compiles, monkeypatch):
    """No key holds a description, so that an entry may be older than its words."""
    run("compile", "gaussian", *CALL)
    fresh()
    from kernlib.families.pairwise.descriptor import Pairwise

    monkeypatch.setattr(Pairwise, "describe", lambda self: "in other words")
    facts = json.loads(run("compile", "gaussian", *CALL, "--json").stdout)
    assert (facts["compiled"], facts["found"]) == (0, 1)
    assert facts["kernels"][0]["from"] == "store"


def test_a_real_compile_in_a_process_of_its_own(cache_dir, tmp_path):
    (tmp_path / "own.py").write_text("import kernlib\nkernel = kernlib.matern32()\n")
    found = command("compile", "own:kernel", *CALL, "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts["compiled"] == facts["kept"] == len(facts["kernels"]) > 0
    assert all(row["registers"] > 16 and row["cubin_bytes"] > 1000 for row in facts["kernels"])
    assert found.stderr.startswith("Compiling for sm_90a: ")

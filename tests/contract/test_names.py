"""Names that are not there: what is raised says what may have been meant."""

import pickle
import subprocess
import sys

import pytest

import kernlib
from kernlib.hints import spelling

# The module and the name that somebody wrote, and what the error names.
MEANT = {
    ("kernlib", "gausian"): "kernlib.gaussian",
    ("kernlib", "run_kernal"): "kernlib.run_kernel",
    ("kernlib", "compile_"): "kernlib.compile",
    ("kernlib", "ConvergenceWaring"): "kernlib.ConvergenceWarning",
    ("kernlib", "rbf"): "kernlib.gaussian",
    ("kernlib", "RBF"): "kernlib.gaussian",
    ("kernlib", "laplace"): "kernlib.laplace_l1, kernlib.laplace_l2 or kernlib.Laplace",
    ("kernlib", "matern"): "kernlib.matern32, kernlib.matern52 or kernlib.Matern",
    ("kernlib", "matern12"): "kernlib.laplace_l2?",
    ("kernlib", "kernel_max"): "kernlib.kernel_topk(..., k=1, largest=True)?",
    ("kernlib", "kernel_argmax"): "kernlib.kernel_topk(..., k=1, largest=True)?",
    ("kernlib", "kernel_softmax"): "kernlib.blocksparse.attention?",
    ("kernlib", "LazyTensor"): "kernlib.kernel_matmul, kernlib.kernel_sum, ",
    ("kernlib", "MonarchLinear"): "kernlib.nn.KSLinear?",
    ("kernlib", "ButterflyLinear"): "kernlib.nn.KSLinear?",
    ("kernlib.nn", "MonarchLinear"): "kernlib.nn.KSLinear?",
    ("kernlib", "euclidean"): "kernlib.l2_distance",
    ("kernlib", "SiLU"): "kernlib.Silu",
    ("kernlib", "ReLU"): "kernlib.Relu",
    ("kernlib", "LeakyReLU"): "kernlib.LeakyRelu",
    ("kernlib", "swish"): "kernlib.Silu",
    ("kernlib", "KSLinear"): "kernlib.nn.KSLinear",
    ("kernlib", "Linear"): "kernlib.nn.SparseLinear",
    ("kernlib", "compress"): "kernlib.sparse.compress",
    ("kernlib", "Layout"): "kernlib.blocksparse.Layout",
    ("kernlib", "solve_kernel"): "kernlib.linalg.solve_kernel",
    ("kernlib", "subscribe"): "kernlib.events.subscribe",
    ("kernlib", "kernel_descriptor_p_norm"): "kernlib.compat.kermac.kernel_descriptor_p_norm",
    ("kernlib", "gemkm"): "kernlib.kron_matmul or kernlib.compat.fastkron",
    ("kernlib.nn", "KSLinaer"): "kernlib.nn.KSLinear",
    ("kernlib.nn", "Relu"): "kernlib.Relu",
    ("kernlib.nn", "sparsfy"): "kernlib.nn.sparsify",
    ("kernlib.sparse", "compres"): "kernlib.sparse.compress",
    ("kernlib.blocksparse", "Layot"): "kernlib.blocksparse.Layout",
    ("kernlib.compat", "kermak"): "kernlib.compat.kermac",
    ("kernlib.compat.fastkron", "fastKronMgSGEMM"): "kernlib.distributed.kron_matmul?",
    ("kernlib.compat.fastkron", "fastkron_torch"): "kernlib.compat.fastkron.fastkrontorch",
    ("kernlib.compat.torch_blocksparse", "MatMull"): "kernlib.compat.torch_blocksparse.MatMul",
}


@pytest.mark.parametrize("module, name", MEANT, ids=".".join)
def test_a_misspelt_name_names_what_was_meant(module, name):
    loaded = spelling.import_module(module)
    with pytest.raises(AttributeError) as caught:
        getattr(loaded, name)
    text = str(caught.value)
    assert text.startswith(f"module {module!r} has no attribute {name!r}; did you mean kernlib.")
    assert MEANT[module, name] in text
    assert caught.value.name == name and str(pickle.loads(pickle.dumps(caught.value))) == text


def test_what_is_named_is_there():
    """Of the tables of other libraries' names too, and so it is when a name moves."""
    for names in spelling.OTHERS.values():
        for whole in names:
            module, _, name = whole.partition("(")[0].rpartition(".")
            assert hasattr(spelling.import_module(module), name), whole


@pytest.mark.parametrize("name", ["zzz", "_private", "__wrapped__"])
def test_a_name_like_no_other_is_said_not_to_be_there(name):
    with pytest.raises(AttributeError, match=rf"^module 'kernlib' has no attribute '{name}'$"):
        getattr(kernlib, name)
    assert not hasattr(kernlib, name)


def test_a_hint_loads_no_torch():
    program = """
import sys, kernlib
try:
    kernlib.solve_kernl
except AttributeError as error:
    print(error)
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "did you mean kernlib.linalg.solve_kernel" in run.stdout, run.stderr
    assert run.stdout.endswith("False\n")


def test_python_adds_no_second_suggestion():
    run = subprocess.run(
        [sys.executable, "-c", "import kernlib; kernlib.gausian"], capture_output=True, text=True
    )
    assert run.stderr.lower().count("did you mean") == 1


def test_a_star_import_leaves_the_builtin_compile_alone():
    names = {}
    exec("from kernlib import *", names)
    assert "compile" not in names and names["run_kernel"] is kernlib.run_kernel
    assert set(dir(kernlib)) - set(names) == {"compile"}

"""What a type checker sees of kernlib: names, signatures, and what is wrong with a call."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kernlib
from tests.support.paths import ROOT

LAZY = (  # they have stubs
    *("kernlib", "kernlib.nn", "kernlib.sparse", "kernlib.blocksparse", "kernlib.compat"),
    "kernlib.compat.fastkron",
)
PUBLIC = (
    *("kernlib", "kernlib.nn", "kernlib.nn.compat", "kernlib.linalg", "kernlib.distributed"),
    *("kernlib.sparse", "kernlib.sparse.prune", "kernlib.blocksparse"),
    *("kernlib.compat.kermac", "kernlib.compat.kermac.linalg", "kernlib.compat.macko"),
    *("kernlib.compat.fastkron.fastkrontorch", "kernlib.compat.fastkron.fastkronnumpy"),
    *("kernlib.compat.linear_operator", "kernlib.compat.peft", "kernlib.compat.transformers"),
    *("kernlib.settings", "kernlib.events"),
)
DOCUMENTS = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]

# Lines to what both checkers must say of them; without a text, nothing.
SNIPPET = {
    "K = kl.run_kernel(kl.laplace_l1(), x, x, bandwidth=10.0)": "",
    "K.mul_(2.0)": "",
    "factor = kl.KroneckerSparse(6, 64, 64, 1, epilogue=(kl.Bias(), kl.Gelu()))": "",
    "single = kl.KroneckerSparse(6, 64, 64, 1, epilogue=kl.Sigmoid())": "",
    "y = kl.sparse.matmul(kl.sparse.compress(x), x, epilogue=kl.Relu())": "",
    "near, places = kl.kernel_topk(kl.p_distance(), x, x, 10, p=1.5)": "",
    "blocks = kl.blocksparse.causal(64, 16)": "",
    "kl.blocksparse.attention(x, x, x, blocks).square()": "",
    "kl.blocksparse.attention(x, x, x, blocks, return_lse=True)[1].square()": "",
    "kl.blocksparse.attention(x, x, x, blocks, return_lse=True).square()": "square",
    "kl.gausian()": "gausian",
    "kl.nn.KSLiner([(1, 2, 2, 1)])": "KSLiner",
    "kl.cdist(x, x, pp=1.0)": "pp",
    "kl.cdist(x)": "x2",
    "kl.gaussian(bandwidth=1.0)": "bandwidth",
    "kl.KroneckerSparse('six', 64, 64, 1)": "int",
    "kl.run_kernel(kl.Relu(), x)": "Descriptor",
    "kl.sparse.matmul(x, x)": "SparseMatrix",
    "kl.kernel_topk(kl.p_distance(), x, x, 10, smallest=x, largest='no', p=1.0)": "largest",
}
HEAD = "import torch\nimport kernlib as kl\n\nx = torch.rand(8, 8)\n"


def stub_of(module) -> Path:
    return Path(module.__file__).with_suffix(".pyi")


def named_in(stub: Path) -> dict[str, str]:
    """The names that a stub exports to the modules that it has them from."""
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "only `import x as x` is exported"
                found[alias.name] = node.module
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = ""
    return found


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", LAZY)
def test_a_stub_names_what_the_module_loads(name):
    """From where that has it: its parent for a module, for a function or a class its own."""
    module = import_module(name)
    stub = named_in(stub_of(module))
    assert set(stub) == set(dir(module))
    for each, home in stub.items():
        value = getattr(module, each)
        if each == "__version__":
            assert home == ""
        elif inspect.ismodule(value):
            assert f"{home}.{each}" == value.__name__ == f"{name}.{each}"
        else:
            assert getattr(import_module(home), each) is value
            assert not callable(value) or value.__module__ == home


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", LAZY)
def test_all_is_what_can_be_loaded(name):
    module = import_module(name)
    assert set(dir(module)) == set(named_in(stub_of(module)))
    for each in dir(module):
        getattr(module, each)
    hidden = {"compile"} if module is kernlib else set()  # which would hide the builtin
    assert set(module.__all__) == set(dir(module)) - hidden


def test_a_checker_sees_what_a_star_import_brings():
    body = ast.parse(stub_of(kernlib).read_text()).body
    (listed,) = [ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign)]
    assert listed == kernlib.__all__


def public_callables():
    """Functions, and methods of classes, that PUBLIC modules hold, by name."""
    found = {}
    for name in PUBLIC:
        module = import_module(name)
        for each in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, each)
            if not getattr(value, "__module__", "").startswith("kernlib") or each[0] == "_":
                continue
            if inspect.isclass(value):
                members = [m for m in vars(value) if m == "__init__" or not m.startswith("_")]
                found |= {f"{name}.{each}.{m}": vars(value)[m] for m in members}
            elif inspect.isfunction(value):
                found[f"{name}.{each}"] = value
    return {key: inspect.unwrap(getattr(value, "__func__", value)) for key, value in found.items()}


def test_public_signatures_are_annotated():
    holes = {}
    for name, function in public_callables().items():
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            bare = [
                p.name
                for p in signature.parameters.values()
                if p.annotation is p.empty and p.name not in ("self", "cls")
            ]
            if signature.return_annotation is signature.empty and not name.endswith("__init__"):
                bare.append("return")
            if bare:
                holes[name] = bare
    assert not holes


# Both checkers, over the code that users read first.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Blocks of documents, examples, and the snippet, where checkers find the tests' kernlib."""
    made = tmp_path_factory.mktemp("typed")
    for document in DOCUMENTS:
        blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
        if blocks:
            name = "_".join(document.relative_to(ROOT).with_suffix("").parts).lower()
            (made / f"{name}_blocks.py").write_text("\n".join(blocks))
    for example in (ROOT / "examples").glob("*.py"):
        (made / f"{example.stem}_example.py").write_text(example.read_text())
    (made / "snippet.py").write_text(HEAD + "\n".join(SNIPPET) + "\n")
    return made


def run_checker(folder, module: str, *arguments: str) -> str:
    pytest.importorskip(module, reason="comes with kernlib[typing]")
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def mypy(folder) -> dict[str, list[tuple[int, str]]]:
    settings = folder / "mypy.ini"  # a document is one program, whose blocks use names again
    settings.write_text(
        f"[mypy]\nallow_redefinition = True\nfollow_imports = silent\nmypy_path = {ROOT}\n"
    )
    said = run_checker(folder, "mypy", "--config-file", str(settings), "--no-pretty", ".")
    assert "checked" in said or "no issues" in said, said
    return errors(r"^(\S+?):(\d+): error: (.*)$", said)


def pyright(folder) -> dict[str, list[tuple[int, str]]]:
    (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}')
    said = run_checker(folder, "pyright", "--pythonpath", sys.executable, ".")
    assert re.search(r"^\d+ errors?, ", said, re.M), said
    return errors(r"^\s*(\S+?):(\d+):\d+ - error: (.*(?:\n    .*)*)$", said)


def errors(pattern: str, said: str) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {}
    for name, line, text in re.findall(pattern, said, re.M):
        found.setdefault(Path(name).name, []).append((int(line), text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_documents_and_examples_are_clean_and_wrong_calls_are_seen(checker, folder):
    found = checker(folder)
    snippet = found.pop("snippet.py", [])
    assert not found
    for number, (line, expected) in enumerate(SNIPPET.items(), len(HEAD.splitlines()) + 1):
        said = " ".join(text for at, text in snippet if at == number)
        if expected:
            assert expected in said, line
        else:
            assert not said, line


def test_the_package_says_that_it_is_typed():
    assert (Path(kernlib.__file__).parent / "py.typed").exists()

"""What counts as a change of a file that the GPU record covers."""

import ast

import pytest

from tests.architecture.package import MODULES
from tests.support import meaning

PYTHON = '''"""Doc."""
import os  # why


def f(a, *, key=1):
    """Two
    lines."""
    total = [each for each in a if each]  # café
    def inner():
        nonlocal total
        total = key
    try:
        return total
    except ValueError as error:
        raise error
'''


@pytest.mark.few(100)
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (PYTHON, PYTHON.replace('"""Doc."""', "").replace("# why", "")),
        (PYTHON, PYTHON.replace("total", "lines").replace("each", "x").replace("error", "e")),
        ("def f(): return (\n  1)", 'def f():\n    """Doc."""\n    return 1\n'),
        ("x = lambda a: [b for b in a]", "x = lambda a: [c for c in a]"),
        ("def f(x):\n  if (n := x): return n", "def f(x):\n  if (m := x): return m"),
    ],
)
def test_layout_and_names_of_locals_do_not_count(one, two):
    assert meaning.of_python(one) == meaning.of_python(two)


@pytest.mark.few(100)
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(a): return a", "def f(b): return b"),  # who calls may name it
        ("def f():\n  a = b = 1\n  return a", "def f():\n  a = b = 1\n  return b"),
        ("def f():\n  a = 1\n  return b", "def f():\n  b = 1\n  return b"),
        ("x = 1", "y = 1"),
        ("class A:\n  x = 1", "class A:\n  y = 1"),
        ("def f():\n  global x\n  x = 1", "def f():\n  global y\n  y = 1"),
        ("def f():\n  import os", "def f():\n  import sys"),
        ("x = 1", "x = 1.0"),
        ("x = '# a'", "x = '# b'"),
        ("if a:\n  x = 1\n  y = 1", "if a:\n  x = 1\ny = 1"),
        ("def f(a): return [a for a in a]", "def f(a): return [b for b in b]"),
    ],
)
def test_what_callers_see_counts(one, two):
    assert meaning.of_python(one) != meaning.of_python(two)


def test_the_meaning_of_a_module_is_that_of_its_unparsed_tree():
    """Which has other line ends, brackets and quotes, and no comments."""
    for path in MODULES[::7]:
        text = path.read_text()
        assert meaning.of_python(text) == meaning.of_python(ast.unparse(ast.parse(text))), path


@pytest.mark.few(100)
@pytest.mark.parametrize(
    "other",
    [
        "int  f( int a ){ return a+1; }",
        "int f(int a) {\n\n  return a + 1;  // one more\n}\n",
        "/* a\n b */ int f(int a) { return /* x */ a + 1; }",
    ],
)
def test_cuda_comments_and_space_do_not_count(other):
    assert meaning.of_cuda(other) == meaning.of_cuda("int f(int a) { return a + 1; }")


@pytest.mark.few(100)
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("int a;", "inta;"),
        ("a + +b", "a ++b"),
        ('"a // b"', '"a"'),
        ("#define F(x) x", "#define F (x) x"),
        ("#define A 1\nB", "#define A 1 B"),
        ("x = '\"'; // y", "x = '\"'; y"),
    ],
)
def test_cuda_changes_count(one, two):
    assert meaning.of_cuda(one) != meaning.of_cuda(two)

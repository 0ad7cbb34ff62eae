"""What docstrings of kernlib's public objects lack.

``python -m tests.support.reference [MODULE ...]`` prints each fault with its place, examples that
fail, and the count of faults by module; it exits with 1 if there is any.

The objects are functions, classes and exceptions that a public module lists, and methods and
properties that kernlib defines on those classes. A docstring

- says what it is: formula, shapes, dtypes, units;
- names each parameter, for a method here or in its class's docstring;
- says which errors there are, "Raises ValueError for ...", for a method here or in its class's;
- ends with an example, or for a method or property, one of its class or of a class that derives
  from it has ``.name``:

    Example:
        >>> x = torch.randn(4, 3)
        >>> kl.cdist(x, x).shape
        torch.Size([4, 4])

Examples have 2 to 6 lines, need no GPU, and show the point of an object, by a value where that is
short; what does need one is a line with ``# doctest: +SKIP``. They run as doctests that have
``torch`` and ``kl`` (kernlib), seeded with 0; "..." stands for any text, and runs of space do not
count. In :mod:`kernlib.compat` one of a module's docstring serves all that the module lists.
Exceptions and records that functions return need none, and of methods that override others those
that are overridden have the docstring.
"""

from __future__ import annotations

import dataclasses
import doctest
import enum
import inspect
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import torch

import kernlib
from tests.support.paths import ROOT

MODULES = (
    "kernlib",
    "kernlib.blocksparse",
    "kernlib.sparse",
    "kernlib.sparse.prune",
    "kernlib.linalg",
    "kernlib.distributed",
    "kernlib.nn",
    "kernlib.nn.compat",
    "kernlib.descriptors",
    "kernlib.events",
    "kernlib.settings",
    "kernlib.checkpoints",
    "kernlib.compat",
    "kernlib.compat.fastkron",
    "kernlib.compat.fastkron.fastkrontorch",
    "kernlib.compat.fastkron.fastkronnumpy",
    "kernlib.compat.kermac",
    "kernlib.compat.kermac.linalg",
    "kernlib.compat.linear_operator",
    "kernlib.compat.macko",
    "kernlib.compat.peft",
    "kernlib.compat.torch_blocksparse",
    "kernlib.compat.transformers",
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MARK = re.compile(r"^\s*>>> ", re.M)
_CODE = re.compile(r"^\s*(?:>>>|\.\.\.) (.*)", re.M)
_ERRORS = re.compile(r"\braises?\b", re.I)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PASSED_ON = {"args", "kwargs"}


class Public(NamedTuple):
    """A public object: the module that lists it, its name there, and the class that has it."""

    module: str
    name: str
    value: Any
    owner: type | None = None

    @property
    def label(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def function(self) -> Callable | None:
        """What a call of it runs, None of a property."""
        value = self.value
        if isinstance(value, (staticmethod, classmethod)):
            return value.__func__
        return value if callable(value) else None

    @property
    def doc(self) -> str:
        return docstring(self.value) if self.owner is None else _inherited(self)


def listed(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that a module says are public, or else those that it defines."""
    names = getattr(module, "__all__", None)
    if module is kernlib:
        names = dir(module)
    if names is None:
        here = module.__name__
        items = vars(module).items()
        names = [n for n, v in items if n[0] != "_" and getattr(v, "__module__", "") == here]
    values = {name: getattr(module, name) for name in sorted(names)}
    return {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isroutine(v)}


def is_kernlibs(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "kernlib"


def public(modules: tuple[str, ...] = MODULES) -> Iterator[Public]:
    """Each object once, of the first module and class that has it."""
    seen: set[int] = set()
    for home in modules:
        for name, value in listed(import_module(home)).items():
            if id(value) in seen or not is_kernlibs(value):
                continue
            seen.add(id(value))
            yield Public(home, name, value)
            for member in _members(home, name, value) if inspect.isclass(value) else ():
                if id(member.value) not in seen:
                    seen.add(id(member.value))
                    yield member


def _members(home: str, name: str, cls: type) -> Iterator[Public]:
    for base in filter(is_kernlibs, cls.__mro__):
        for key, value in vars(base).items():
            is_member = inspect.isroutine(value) or isinstance(
                value, (staticmethod, classmethod, property, cached_property)
            )
            if is_member and (key[0] != "_" or key == "__call__"):
                yield Public(home, f"{name}.{key}", value, cls)


def docstring(value: Any) -> str:
    """One that somebody wrote: dataclasses and named tuples make one of their fields."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    is_automatic = inspect.isclass(value) and (doc or "").startswith(f"{value.__name__}(")
    return "" if is_automatic or doc is None else inspect.cleandoc(doc)


def _inherited(member: Public) -> str:
    key = member.name.rpartition(".")[2]
    values = filter(_is_of_kernlib, (member.value, *_further_up(member, key)))
    return next(filter(None, map(docstring, values)), "")


def _further_up(member: Public, key: str) -> list[Any]:
    """What a member stands in place of, of classes further up."""
    values = [vars(base)[key] for base in member.owner.__mro__ if key in vars(base)]
    at = next(i for i, value in enumerate(values) if value is member.value)
    return [value for value in values[at + 1 :] if value is not vars(object).get(key)]


def _is_of_kernlib(value: Any) -> bool:
    function = (
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
    )
    return is_kernlibs(function)


def of_class(cls: type) -> str:
    """The docstrings of a class and of those that it derives from in kernlib."""
    bases = [base for base in cls.__mro__ if is_kernlibs(base)]
    inits = [vars(base)["__init__"] for base in bases if is_kernlibs(vars(base).get("__init__"))]
    return "\n".join(filter(None, map(docstring, (*bases, *inits))))


def is_record(cls: type) -> bool:
    """Whether values of a class are what functions return, or names of numbers."""
    if issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return True
    return dataclasses.is_dataclass(cls) and cls.__name__ in _results()


@cache
def _results() -> frozenset[str]:
    """What public functions say they return, descriptors left out."""
    texts = set()
    for home in MODULES:
        functions = filter(inspect.isfunction, listed(import_module(home)).values())
        texts |= {str(function.__annotations__.get("return", "")) for function in functions}
    descriptor = import_module("kernlib.descriptors.base").Descriptor
    names = {word for text in texts for word in re.findall(r"\w+", text)}
    return frozenset(names - {cls.__name__ for cls in _below(descriptor)})


def _below(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


def parameters(value: Any) -> list[str]:
    """Those to be named, a method's self left out."""
    try:
        every = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return []
    passed_on = [p for p in every if p.kind in _VARIADIC and p.name in _PASSED_ON]
    return [p.name for p in every if p not in passed_on and p.name[0] != "_"]


def names(doc: str, parameter: str) -> bool:
    if parameter in ("a", "A"):  # which is an article too
        form = rf"`[^`]*\b{parameter}\b[^`]*`|\b{parameter} (\(|and b\b)"
        return re.search(form, doc) is not None
    return re.search(rf"(?<!\w){re.escape(parameter)}(?!\w)", doc) is not None


def lacks(each: Public) -> Iterator[str]:
    """What the docstring of one object lacks."""
    if each.owner is not None:
        yield from _lacks_of_member(each)
    elif inspect.isclass(each.value):
        yield from _lacks_of_class(each)
    else:
        yield from _lacks(each, each.doc, parameters(each.value))


def _lacks(each: Public, doc: str, required: list[str]) -> Iterator[str]:
    if not doc:
        yield "a docstring"
        return
    unnamed = [name for name in required if not names(doc, name)]
    if unnamed:
        yield "its parameters " + ", ".join(unnamed)
    if required and not _ERRORS.search(doc):
        yield 'its errors ("Raises ...")'
    if not (_MARK.search(doc) or has_example_of_module(each.module)):
        yield "an example"


def _lacks_of_class(each: Public) -> Iterator[str]:
    cls = each.value
    if issubclass(cls, BaseException) or is_record(cls):
        if not each.doc:
            yield "a docstring"
        fields = getattr(cls, "_fields", None) or getattr(cls, "__dataclass_fields__", ())
        unnamed = [name for name in fields if name[0] != "_" and not names(each.doc, name)]
        if each.doc and unnamed:
            yield "its fields " + ", ".join(unnamed)
        return
    init = vars(cls).get("__init__")
    doc = each.doc and "\n".join((each.doc, docstring(init) if is_kernlibs(init) else ""))
    yield from _lacks(each, doc, parameters(cls))


def _lacks_of_member(each: Public) -> Iterator[str]:
    key = each.name.rpartition(".")[2]
    around = f"{each.doc}\n{of_class(each.owner)}"
    required = parameters(each.function)[not isinstance(each.value, staticmethod) :]
    overridden = next(iter(_further_up(each, key)), None)
    if overridden is not None:
        if key == "forward" and len(required) < 2:  # its input
            required = []
        others = parameters(overridden)
        required = [name for name in required if name not in others]
    unnamed = [name for name in required if not names(around, name)]
    if not each.doc and overridden is None:
        yield "a docstring"
        return
    if unnamed:
        yield "its parameters " + ", ".join(unnamed)
    if overridden is not None:
        return
    if required and not _ERRORS.search(around):
        yield 'its errors ("Raises ...")'
    if issubclass(each.owner, BaseException) or is_record(each.owner):
        return
    if not (_is_shown(each, key) or has_example_of_module(each.module)):
        yield f"an example, or one of its class with .{key}"


def _is_shown(each: Public, key: str) -> bool:
    if _MARK.search(each.doc):
        return True
    home = next(base for base in each.owner.__mro__ if vars(base).get(key) is each.value)
    sharing = [each.owner, *(cls for cls in _classes() if issubclass(cls, home))]
    code = [line for cls in sharing for line in _code(cls)]
    if key == "__call__":
        return bool(code)
    return any(re.search(rf"\.{key}\b", line) for line in code)


@cache
def _code(cls: type) -> tuple[str, ...]:
    """Lines of code in docstrings of a class, its bases in kernlib and their members."""
    docs = (of_class(cls), *(member.doc for member in _members("", "", cls)))
    return tuple(line for doc in docs for line in _CODE.findall(doc))


@cache
def _classes() -> tuple[type, ...]:
    values = [value for home in MODULES for value in listed(import_module(home)).values()]
    return tuple(value for value in values if inspect.isclass(value) and is_kernlibs(value))


def has_example_of_module(home: str) -> bool:
    """Whether the docstring of a module, or of one around it, has one for all that it lists."""
    while home.startswith("kernlib.compat."):
        if _MARK.search(import_module(home).__doc__ or ""):
            return True
        home = home.rpartition(".")[0]
    return False


def failures(modules: tuple[str, ...] = MODULES) -> list[str]:
    """What each example that fails printed, those of the modules' own docstrings among them."""
    texts: dict[str, str] = {}
    for home in modules:
        texts[inspect.cleandoc(import_module(home).__doc__ or "")] = home
    for each in public(modules):
        texts.setdefault(each.doc, each.label)
        init = vars(each.value).get("__init__") if inspect.isclass(each.value) else None
        if is_kernlibs(init):
            texts.setdefault(docstring(init), f"{each.label}.__init__")
    parser, out = doctest.DocTestParser(), []
    for text, label in texts.items():
        if _MARK.search(text):
            globs = {"torch": torch, "kl": kernlib}
            test = parser.get_doctest(text, globs, label, label, 0)
            torch.manual_seed(0)
            printed = io.StringIO()
            runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
            with redirect_stderr(io.StringIO()):  # where events are written
                result = runner.run(test, out=printed.write)
            if result.failed:
                out.append(f"{label}: its example fails\n{printed.getvalue()}")
    return out


def faults(modules: tuple[str, ...] = MODULES) -> list[tuple[str, str]]:
    """Modules, and what their objects lack, with the places of those."""
    return [
        (each.module, f"{each.label}: lacks {lack}  ({place(each)})")
        for each in public(modules)
        for lack in lacks(each)
    ]


def place(each: Public) -> str:
    value = getattr(each.value, "fget", None) or each.function or each.value
    try:
        path = inspect.getsourcefile(inspect.unwrap(value)) or ""
        line = inspect.getsourcelines(value)[1]
    except (OSError, TypeError):
        return "?"
    return f"{path.removeprefix(str(ROOT))[1:]}:{line}"


def main(modules: tuple[str, ...]) -> int:
    rows = faults(modules)
    for _, text in rows:
        print(text)
    with TemporaryDirectory() as folder, kernlib.settings.override(cache_dir=(Path(folder),)):
        failed = failures(modules)
    print("\n".join(failed))
    for home, count in Counter(home for home, _ in rows).items():
        print(f"{count:4d}  {home}")
    print(f"{len(rows)} faults, {len(failed)} examples that fail")
    return 1 if rows or failed else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or MODULES))

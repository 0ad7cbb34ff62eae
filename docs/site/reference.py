"""What is public, module by module, and the pages of the reference that list it.

A name is public that its module lists: ``dir`` of a module that answers it itself, else its
``__all__``, else functions and classes that it defines. So a new name has its place here without
an edit, and so has a module below one of ROOTS.
"""

from __future__ import annotations

import inspect
import pkgutil
import pprint
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

ROOTS = (
    "kernlib",
    "kernlib.blocksparse",
    "kernlib.sparse",
    "kernlib.linalg",
    "kernlib.distributed",
    "kernlib.nn",
    "kernlib.nn.compat",
    "kernlib.descriptors",
    "kernlib.events",
    "kernlib.settings",
    "kernlib.checkpoints",
    "kernlib.compat",
)
# Headings of the page of kernlib, which has the names of many modules: the first words of the
# module that defines a name, and what such names are. The first that fits holds.
GROUPS = (
    ("kernlib.run", "Calls of descriptors"),
    ("kernlib.families.pairwise.descriptor", "Pairwise descriptors"),
    ("kernlib.families.pairwise.stages", "Stages of pairwise descriptors"),
    ("kernlib.families.pairwise", "Distances, reductions and gradients"),
    ("kernlib.families", "Other families"),
    ("kernlib.descriptors", "Epilogues"),
    ("kernlib.ahead", "Compiling ahead and tuning"),
    ("kernlib.bundles", "Compiling ahead and tuning"),
    ("kernlib.tuner", "Compiling ahead and tuning"),
    ("kernlib.errors", "Errors and warnings"),
)
OTHER = "More"
INDEX = "reference/index.md"
MARK = "<!-- names -->"  # in the index, where its table belongs


def public_names(name: str) -> list[str]:
    """The names that a module says are public, in their order."""
    module = import_module(name)
    members = vars(module)
    if "__dir__" in members:
        names = dir(module)
    elif "__all__" in members:
        names = list(members["__all__"])
    else:
        names = [key for key, value in members.items() if _is_defined_in(module, value)]
    return [key for key in names if not key.startswith("_")]


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    is_object = inspect.isclass(value) or inspect.isroutine(value)
    return is_object and value.__module__ == module.__name__


@cache
def modules() -> tuple[str, ...]:
    """The public modules: the roots, and those that one of them lists."""
    names: list[str] = []
    left = list(ROOTS)
    while left:
        name = left.pop(0)
        if name not in names:
            names.append(name)
            below = [f"{name}.{key}" for key in public_names(name) if _is_module(name, key)]
            left = below + left if name not in ("kernlib", "kernlib.nn") else left + below
    return tuple(names)


def _is_module(home: str, key: str) -> bool:
    return inspect.ismodule(getattr(import_module(home), key))


def names_of(module: str) -> list[str]:
    """The public names of a module that are no modules themselves."""
    return [key for key in public_names(module) if not _is_module(module, key)]


@cache
def values() -> dict[str, Any]:
    """Every public name with its module, such as kernlib.nn.KSLinear, and its value."""
    return {
        f"{module}.{key}": getattr(import_module(module), key)
        for module in modules()
        for key in names_of(module)
    }


@cache
def same_as(name: str) -> str | None:
    """The public name that one is another name of."""
    value = values()[name]
    same = [other for other, one in values().items() if one is value]
    title = getattr(value, "__qualname__", None)
    first = next((other for other in same if other.rpartition(".")[2] == title), same[0])
    return None if first == name else first


def anchor(name: str) -> str:
    """The anchor of a name. Where a module has the same path, as that of a function with the name
    of its module, it is the path that the function has there."""
    home = getattr(values().get(name), "__module__", None)
    return f"{name}.{name.rpartition('.')[2]}" if home == name else name


def undocumented() -> list[str]:
    """Public modules, functions and classes without a docstring of their own."""
    silent = [name for name in modules() if not import_module(name).__doc__]
    for name, value in values().items():
        if callable(value) and not _has_docstring(value):
            silent.append(name)
    return silent


def _has_docstring(value: Any) -> bool:
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # Dataclasses and named tuples make one of their fields.
    return bool(text) and not text.startswith(f"{getattr(value, '__name__', '')}(")


# Pages.


def page_of(module: str) -> str:
    return f"reference/{module}.md"


def summary(value: Any) -> str:
    """The first sentence of a docstring, as it stands there."""
    text = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    head, dot, _ = text.partition(". ")
    return head if dot else text.removesuffix(".")


def groups(module: str) -> dict[str, list[str]]:
    """The names of a module under the headings of its page; one heading where it has few."""
    names = names_of(module)
    if module != "kernlib":
        return {"": names}
    sections: dict[str, list[str]] = {title: [] for _, title in GROUPS} | {OTHER: []}
    for key in names:
        home = getattr(values()[f"{module}.{key}"], "__module__", "")
        titles = (title for prefix, title in GROUPS if f"{home}.".startswith(f"{prefix}."))
        sections[next(titles, OTHER)].append(key)
    return {title: keys for title, keys in sections.items() if keys}


def page(module: str) -> str:
    """The page of a module: its docstring, then each name, for mkdocstrings to fill in."""
    # The anchor of the module is that of its heading.
    lines = [f"# {module} {{ #{module} }}", ""]
    lines += [f"::: {module}", "    options:", "      members: false"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", ""]
    for title, keys in groups(module).items():
        level = 3 if title else 2
        lines += [f"## {title}", ""] if title else []
        for key in keys:
            lines += _entry(f"{module}.{key}", level)
    inside = [name for name in modules() if name.rpartition(".")[0] == module]
    if inside:
        rows = [f"| [`{name}`]({name}.md) | {_cell(import_module(name))} |" for name in inside]
        lines += ["## Modules", "", "| module | about |", "|---|---|", *rows, ""]
    elif not names_of(module):
        rows = [f"| `{name}` | {_cell(import_module(name))} |" for name in _below(module)]
        lines += ["| module | about |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _below(module: str) -> list[str]:
    """The modules of a package that define something."""
    package = import_module(module)
    names = [f"{module}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    return [name for name in names if _defines(import_module(name))]


def _defines(module: ModuleType) -> bool:
    return any(_is_defined_in(module, value) for value in vars(module).values())


def _entry(name: str, level: int) -> list[str]:
    heading = [f"{'#' * level} `{name.rpartition('.')[2]}` {{ #{name} }}", ""]
    same = same_as(name)
    if same is not None:
        return [*heading, f"Another name of [`{same}`][{anchor(same)}].", ""]
    if not callable(values()[name]):
        text = pprint.pformat(values()[name], width=88, sort_dicts=False)
        return [*heading, "A constant:", "", "```python", text, "```", ""]
    return [f"::: {anchor(name)}", "    options:", f"      heading_level: {level}", ""]


def table() -> str:
    """Every public name, module by module, for the index."""
    lines = []
    for module in modules():
        lines += [f"## [`{module}`]({module}.md)", "", _cell(import_module(module)) + ".", ""]
        for title, keys in groups(module).items():
            rows = [_row(module, key) for key in keys]
            if rows:
                lines += [f"| {title.lower() or 'name'} | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(module: str, key: str) -> str:
    name = f"{module}.{key}"
    same = same_as(name)
    about = _cell(values()[name]) if callable(values()[name]) else "a constant"
    about = about if same is None else f"the same as `{same}`"
    return f"| [`{key}`]({module}.md#{anchor(name)}) | {about} |"


def _cell(value: Any) -> str:
    import roles  # beside this file, as the hooks of MkDocs see it

    return roles.inline(summary(value), "", links=False)


def index(text: str) -> str:
    """The index with its table in place of the mark."""
    return text.replace(MARK, table())


def pages() -> dict[str, str]:
    return {page_of(module): page(module) for module in modules()}

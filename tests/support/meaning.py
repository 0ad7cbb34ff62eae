"""Source code as what it means: the same bytes whatever its comments, layout and names of locals.

The GPU record's digests are made of it. Python is its syntax tree without docstrings, in which each
function's local variables have the names that their order gives them; parameters keep theirs, since
callers may say them. CUDA is its tokens. Neither follows the version of Python that reads it:
fields of the tree that are empty, as a newer version's are in code for an older one, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)
# Where a syntax tree holds a variable's name as text.
_NAMED = {"Name": "id", "ExceptHandler": "name", "MatchAs": "name", "MatchStar": "name",
          "MatchMapping": "rest", "Nonlocal": "names"}  # fmt: skip


@cache  # a run asks of each file once for every family
def of_python(text: str) -> str:
    """A module's meaning. Raises SyntaxError."""
    return "\n".join(_dumped(ast.parse(text), {}, 0))


def _dumped(node: ast.AST, names: dict[str, str], depth: int) -> Iterator[str]:
    """A node as lines; ``names`` are those that take the place of a scope's variables."""
    inside, depth = names, depth + isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS))
    if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS)):
        inside = {**names, **_renamed(node, depth)}
    elif isinstance(node, ast.ClassDef):  # whose variables are attributes
        inside = {k: v for k, v in names.items() if k not in set(_stored(node.body))}
    yield f"({type(node).__name__}"
    if isinstance(node, _COMPREHENSIONS):  # what the first loop runs over is no part of the scope
        first, *rest = node.generators
        yield from _dumped(first.iter, names, depth)
        looped = ast.comprehension(first.target, ast.Constant(None), first.ifs, first.is_async)
        fields = {**dict(ast.iter_fields(node)), "generators": [looped, *rest]}
    else:
        fields = dict(ast.iter_fields(node))
    for field, value in fields.items():
        if field in ("ctx", "type_comment", "kind") or value is None or value == []:
            continue
        if field == "body" and isinstance(node, _DOCUMENTED):
            value = value[_has_docstring(node) :]
        # Defaults, decorators and annotations are read where a function is defined.
        scope = names if isinstance(node, _FUNCTIONS) and field != "body" else inside
        yield field
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _dumped(each, scope, depth)
            elif _NAMED.get(type(node).__name__) == field:
                yield scope.get(each, each)
            else:
                yield f"{type(each).__name__} {each!r}"
    yield ")"


def _has_docstring(node: ast.AST) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _renamed(node: ast.AST, depth: int) -> dict[str, str]:
    """A scope's variables, by new names in the order in which they first are assigned; its
    parameters by their own."""
    if isinstance(node, _COMPREHENSIONS):
        targets = [generator.target for generator in node.generators]
        stored = list(_stored(targets))
        parameters: list[str] = []
    else:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += filter(None, [arguments.vararg, arguments.kwarg])
        parameters = [argument.arg for argument in every]
        body = node.body if isinstance(node.body, list) else [node.body]
        outside = set(_outside(body))
        stored = [name for name in _stored(body) if name not in outside]
    found = {name: name for name in parameters}
    for name in stored:
        found.setdefault(name, f"{depth}.{len(found)}")
    return found


def _here(nodes: list) -> Iterator[ast.AST]:
    """All nodes of a scope in order, those of scopes inside it left out but for assignments that a
    comprehension makes around itself (``:=``)."""
    for node in nodes:
        if isinstance(node, _COMPREHENSIONS):
            yield from (x for x in ast.walk(node) if isinstance(x, ast.NamedExpr))
        yield node
        if not isinstance(node, _SCOPES):
            yield from _here(list(ast.iter_child_nodes(node)))


def _stored(nodes: list) -> Iterator[str]:
    """Variables that a scope assigns, imports and definitions left out: their names mean more."""
    for node in _here(nodes):
        if isinstance(node, ast.NamedExpr):
            yield node.target.id
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest


def _outside(nodes: list) -> Iterator[str]:
    """Variables that a scope says are not its own."""
    for node in _here(nodes):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from node.names


_LITERAL_OR_COMMENT = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\\n])*"|\'(?:\\.[^\'\n]*|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S
)
_CUDA_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.[^\'\n]*|[^\'\\\n])\'|\w+|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>'
    r"|[<>=!]=|&&|\|\||[-+*/%&|^]=|::|\S"
)


@cache
def of_cuda(text: str) -> str:
    """Source as tokens, without comments; only the ends of directives keep their lines."""
    text = text.replace("\\\n", " ")
    text = _LITERAL_OR_COMMENT.sub(lambda found: found["literal"] or " ", text)
    return "".join(_cuda_line(line) for line in text.splitlines() if line.strip())


def _cuda_line(line: str) -> str:
    if line.lstrip().startswith("#"):  # F(x) and F (x) differ here: only runs of space do not count
        return "\n" + " ".join(line.split()) + "\n"
    return "".join(f"{token} " for token in _CUDA_TOKEN.findall(line))

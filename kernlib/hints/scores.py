"""Messages for wrong scores and masks. Loaded when one is needed."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernlib.descriptors.expression import POSITIONS, VALUE
from kernlib.descriptors.score.kinds import ARGUMENTS
from kernlib.hints import spelling

# FlexAttention's names for them.
_OTHERS = {
    "score": VALUE, "q_idx": "row", "kv_idx": "col", "b": "batch", "h": "head",
    "batch_idx": "batch", "head_idx": "head", "i": "row", "j": "col", "logit": VALUE, "s": VALUE,
}  # fmt: skip
_FUNCTIONS = {"maximum": "max", "minimum": "min", "remainder": "mod", "clip": "clamp"}
_FUNCTIONS |= {"exp2": "2 ** x", "log2": "log(x) / log(2)", "rsqrt": "1 / sqrt(x)"}
_FUNCTIONS |= {"ceil": "-floor(-x)", "round": "floor(x + 0.5)", "square": "x * x"}
_FUNCTIONS |= {"sigmoid": "1 / (1 + exp(-x))", "relu": "max(x, 0)"}
_FUNCTIONS |= {"logical_and": "and", "logical_or": "or", "logical_not": "not", "if_else": "where"}

# Arguments of other libraries' attention, and their counterparts here, by names without
# underscores.
_CAPPED = "a cap is score='cap * tanh(v / cap)'"
_MASKED = "score='v + {0}' adds floats, mask='{0}' keeps the places where bools are True"
_DONE = {
    "keypaddingmask": "mask='{0}' with axes={{'{0}': ('batch', 'col')}} keeps the keys where it is "
    "True, mask='not {0}' the others",
    "attnmask": _MASKED,
    "attentionmask": _MASKED,
    "attnbias": "score='v + {0}' adds it",
    "alibislopes": "score='v - {0} * abs(row - col)' with axes={{'{0}': ('head',)}} is its bias",
    "softcap": _CAPPED,
    "softcapping": _CAPPED,
    "logitcap": _CAPPED,
    "logitsoftcap": _CAPPED,
    "logitssoftcap": _CAPPED,
    "blockmask": "layout=Layout.from_block_mask({0}) has its blocks",
    "enablegqa": "leave it out: which heads share k and v is taken from the shapes",
}


def instead(name: str) -> str:
    """The counterpart here of an argument that other libraries have, or nothing."""
    return _DONE.get(name.replace("_", "").lower(), "").format(name)


def unread(name: str, names: Iterable[str]) -> str:
    """What to do about a tensor that no text reads and whose name is none of the arguments'
    ``names``."""
    done = instead(name)
    if done:
        return f"; attention has no argument {name}: {done}"
    return spelling.argument(name, names)


def unknown_argument(name: str, names: Iterable[str]) -> str:
    """Why a keyword is refused that is no tensor and that nothing names."""
    done = instead(name)
    hint = f"; {done}" if done else spelling.argument(name, names)
    return f"attention has no argument {name}{hint}"


def unknown_name(what: str, name: str, names: tuple[str, ...]) -> str:
    """Why a name is refused."""
    if what == "formula":
        return _unknown_in_formula(name, names)
    if name == VALUE:
        return "is the logit, which a mask does not see; its score may be where(condition, v, -inf)"
    if name in (*ARGUMENTS, "q", "k") and name not in _OTHERS:
        return "is an argument of attention; give the tensor another name"
    meant = _OTHERS.get(name, "")
    hint = f"; write {meant}" if meant in names else spelling.argument(name, names)
    if not hint or len(name) == 1:  # which may as well be a tensor that was forgotten
        hint += "" if hint.endswith("?") else "."
        hint += (
            f" A tensor is captured with its axes, as in {{{name!r}: {POSITIONS[1:]}}}, and given "
            "to the call by its name"
        )
    return f"is not known to a {what}; known are {', '.join(names)}, pi, e and inf{hint}"


def _unknown_in_formula(name: str, names: tuple[str, ...]) -> str:
    meant = {"i": "row", "j": "col"}.get(name, "")
    hint = f"; write {meant} for its place" if meant else spelling.argument(name, names)
    hint += "" if hint.endswith("?") else "."
    return (
        f"is not known to a formula; known are {', '.join(names)}, pi, e and inf{hint} A tensor is "
        f"named in axes, as in {{{name!r}: 'row'}}, and passed to the call by its name"
    )


def indexed(name: str, index: str) -> str:
    """Why an index of a captured tensor is refused, and what does the same."""
    axes = tuple(part.strip() for part in index.split(","))
    if set(axes) <= set(POSITIONS):
        meant = (
            f"{name}[{index}] is {name} with axes={{{name!r}: {axes!r}}}; what is read at two "
            f"places has two names, as in query_{name} == key_{name}"
        )
    else:
        meant = (
            f"what is looked up by {index} is a tensor of row and col, as of "
            f"{name}[torch.arange(rows)[:, None] - torch.arange(cols)] for row - col"
        )
    return (
        "has an index; a captured tensor is named without one, and read where the axes that it was "
        f"declared with say: {meant}"
    )


def wrong_call(name: str, node: ast.Call, calls: dict[str, int]) -> str:
    """Why a call is refused."""
    if name in calls and node.keywords:
        return f"names an argument of {name}, which are given by place"
    if name in calls:
        count = len(node.args)
        nest = f"; nest them, as in {name}(x, {name}(y, z))" * (
            name in ("min", "max") and count > 2
        )
        return f"is no call of {name}, which takes {calls[name]} argument(s), not {count}{nest}"
    name = name or getattr(node.func, "attr", "")
    meant = name if name in calls else _FUNCTIONS.get(name, "")
    hint = f"; write {meant}" if meant else spelling.argument(name, calls)
    return f"calls none of {', '.join(sorted(calls))}{hint}"


def unknown_part(node: ast.expr, calls: Iterable[str], what: str = "score") -> str:
    """Why something else is refused."""
    if what == "formula":
        return _no_part_of_formula(node, calls)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return indexed(node.value.id, ast.unparse(node.slice))
    if isinstance(node, ast.Subscript):
        return "has an index; captured tensors are read where their axes say, without one"
    return (
        "is not part of the language; use numbers, v, row, col, head, batch, names of captured "
        "tensors, + - * / ** // %, comparisons, and, or, not, & | ~, parentheses and "
        f"{', '.join(sorted(calls))}"
    )


def _no_part_of_formula(node: ast.expr, calls: Iterable[str]) -> str:
    if isinstance(node, ast.Subscript):
        return (
            "has an index; a tensor is read at the pair's row and column, and some of its features "
            "are those of a sum, as in sum(x * y, 0, 8)"
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "is a product of matrices; that of two vectors is sum(x * y)"
    return (
        "is not part of the language; use numbers, row, col, names of tensors, sum(term), + - * / "
        f"** // %, comparisons, and, or, not, & | ~, parentheses and {', '.join(sorted(calls))}"
    )

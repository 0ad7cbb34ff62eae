"""Reads the CUDA text of a kernel as far as tests need it: constants, parameter structs, straight
integer code, so that a test computes what the kernel does and not what it did."""

from __future__ import annotations

import ctypes
import re
from collections import ChainMap
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace

from kernlib.jit import sources

SIZES = {"half_t": 2, "bfloat16_t": 2, "float": 4}
FIELDS = {
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "int": ctypes.c_int32,
    "View": ctypes.c_int64 * 4,
    "FactorStrides": ctypes.c_int64 * 4,
    "TensorMap": ctypes.c_uint64 * 16,
    "pointer": ctypes.c_uint64,
}
SCALAR = [("value", ctypes.c_double), ("device", ctypes.c_uint64)]
UNION = "union "  # no name of C++
CASTS = {name: lambda x: x for name in ("int", "i64", "u32", "u64")}


class Text(Mapping):
    """The text of a kernel with all that it includes, without what ``#if`` leaves out, and its
    constants of file scope."""

    def __init__(self, source: str):
        text, defined = _preprocessed(re.sub(r"//.*", "", _included(source, set())))
        facts = _facts(text)
        text = re.sub(r"\bConfig::(\w+)", lambda match: facts[match[1]], text)
        self.text = text.replace("if constexpr (", "if (")
        self._values = {"true": True, "false": False, "sizeof": lambda size: size, **CASTS}
        self._values |= {name: values for name, values in _arrays(self.text)}
        self._texts = defined | facts | dict(re.findall(r"using (\w+) = (\w+);", self.text))
        for declared in re.findall(r"^constexpr (?:int|bool|u32) (.*?);", self.text, re.S | re.M):
            self._texts |= re.findall(r"(\w+)\s*=\s*(.*?)(?:, (?=\w+ =)|$)", declared, re.S)

    def __getitem__(self, name: str):
        """The value of a constant, the size of a type."""
        if name not in self._values:
            if name in SIZES:
                return SIZES[name]
            self._values[name] = eval(expression(self._texts[name]), {}, self)
        return self._values[name]

    def __iter__(self):
        return iter({*self._values, *self._texts})

    def __len__(self) -> int:
        return len({*self._values, *self._texts})

    def body(self, head: str) -> str:
        """What stands in the braces that follow ``head``."""
        start = self.text.index("{", self.text.index(head)) + 1
        return self.text[start : _end(self.text, start, "{", "}")]

    def run(self, code: str, **values) -> SimpleNamespace:
        """The variables of straight code: declarations, assignments and ``if``."""
        made = ChainMap({}, values, self)
        exec(_compiled(code), {}, made)
        return SimpleNamespace(**(values | made.maps[0]))

    def parameters(self) -> type[ctypes.Structure]:
        """struct Parameters, as a C++ compiler lays it out; names of two bases' fields differ."""
        bases = re.search(r"struct Parameters(?: : ([^{]*))? \{", self.text)
        if bases[1] is None:
            return _structure(_fields(self.body("struct Parameters {")))
        fields = []
        for base in re.split(r",\s+(?![^<]*>)", bases[1]):
            name, _, argument = base.strip().removesuffix(">").partition("<")
            count = argument and eval(expression(argument), {}, self)
            if base.startswith("VectorPointers"):
                fields += [(f"vector{k}", ctypes.c_uint64) for k in range(count)]
            elif base.startswith("Scalars"):
                fields += [(f"{name}{k}", t) for k in range(count) for name, t in SCALAR]
            elif count is False:
                fields += _fields(self.body(f"struct {name}<false> {{"))
            else:
                fields += _fields(self.body(f"struct {name} {{"))
        return _structure(fields)


def _included(source: str, seen: set[str]) -> str:
    def content(match: re.Match) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _included((sources.root() / name).read_text(), seen)

    return re.sub(r'^#include "(.*)"$', content, source, flags=re.M)


def _facts(text: str) -> dict[str, str]:
    """Of ``struct Config``."""
    config = re.search(r"struct Config \{(.*?)\};", text, re.S)
    return dict(re.findall(r"(\w+) = (.*?);", config[1])) if config else {}


def _arrays(text: str) -> list[tuple[str, list[int]]]:
    found = re.findall(r"(\w+)\[\] = \{(.*?)\};", text)
    return [(name, [int(value) for value in values.split(",")]) for name, values in found]


def _preprocessed(text: str) -> tuple[str, dict[str, str]]:
    """After ``#if`` of a NAME, ``!NAME`` or ``NAME == number``; and each NAME of ``#define NAME
    value``."""
    defined, taken, lines = {}, [True], []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#if"):
            taken.append(_holds(line.strip(), defined))
        elif line.startswith("#else"):
            taken[-1] = not taken[-1]
        elif line.startswith("#endif"):
            taken.pop()
        elif line.startswith("#define"):
            defined[words[1]] = words[2]
        elif all(taken) and not line.startswith("#pragma"):
            lines.append(line)
    return "\n".join(lines), defined


def _holds(line: str, defined: dict[str, str]) -> bool:
    found = re.fullmatch(r"#if (?:(!?)(\w+)|(\w+) == (\d+))", line)
    if found is None:
        raise ValueError(f"{line} is not understood; write #if NAME, !NAME or NAME == number")
    if found[3]:
        return int(defined[found[3]]) == int(found[4])
    return bool(int(defined[found[2]])) != bool(found[1])


def _fields(body: str) -> list[tuple[str, type]]:
    """Of a struct; names of anonymous unions begin with UNION."""
    found = []
    for part in filter(str.strip, _split(body, ";", "{", "}")):
        line = part.rstrip().removesuffix(";")
        union = re.fullmatch(r"\s*union \{(.*)\}", line, re.S)
        if union:
            made = type("Union", (ctypes.Union,), {"_fields_": _fields(union[1])})
            found.append((f"{UNION}{len(found)}", made))
            continue
        kind, names = re.fullmatch(
            r"((?:const )?(?:unsigned )?\w+\*?)\s+(.*)", line.strip()
        ).groups()
        base = FIELDS["pointer" if "*" in kind else kind]
        found += [(name.strip(), base) for name in names.split(",")]
    return found


def _structure(fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    """Tensor maps align a struct to 64 bytes, which shows at its end alone: they come first."""
    size = ctypes.sizeof(type("Fields", (ctypes.Structure,), {"_fields_": fields}))
    if fields[0][1] is FIELDS["TensorMap"]:
        fields = [*fields, ("padding", ctypes.c_char * (-size % 64))]
    unions = [name for name, _ in fields if name.startswith(UNION)]
    members = {"_anonymous_": unions, "_fields_": fields}
    return type("Parameters", (ctypes.Structure,), members)


def _end(text: str, start: int, opening: str, closing: str) -> int:
    """Where what has been opened before ``start`` closes."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if not depth:
            return place
    raise ValueError(f"no {closing} in {text[start:]!r}")


def _split(text: str, marks: str, opening: str = "([", closing: str = ")]") -> list[str]:
    """Parts between those marks that stand in no parentheses, each mark at the end of its part."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in opening) - (character in closing)
        parts[-1] += character
        if character in marks and not depth:
            parts.append("")
    return parts


def expression(text: str) -> str:
    """A C++ expression over integers as Python's."""
    before, *after = _split(" ".join(text.split()), "?")
    if after:
        inside, depth = 0, 1
        rest = "".join(after)
        for part in _split(rest, "?:"):
            depth += (part[-1:] == "?") - (part[-1:] == ":")
            inside += len(part)
            if not depth:
                break
        then, otherwise = expression(rest[: inside - 1]), expression(rest[inside:])
        return f"({then} if {expression(before[:-1])} else {otherwise})"
    text, made, place = before, "", 0
    for match in re.finditer(r"[(\[]", text):
        if match.start() < place:
            continue
        closing = ")" if match[0] == "(" else "]"
        end = _end(text, match.end(), match[0], closing)
        parts = [expression(part.rstrip(",")) for part in _split(text[match.end() : end], ",")]
        made += _operators(text[place : match.start()]) + match[0] + ", ".join(parts) + closing
        place = end + 1
    return (made + _operators(text[place:])).strip()


def _operators(text: str) -> str:
    for old, new in (("&&", " and "), ("||", " or "), ("/", "//")):
        text = text.replace(old, new)
    return re.sub(r"!(?!=)", " not ", text)


def statements(code: str) -> str:
    """Straight C++ code as Python's."""
    lines, indent = [], 0
    for part in _split(code, ";{}"):
        text, mark = part[:-1].strip(), part[-1:]
        if mark in "};" and text:
            lines += ["    " * indent + line for line in _statement(text)]
        if mark == "{":
            condition = re.match(r"(else )?if \((.*)\)$", text, re.S)
            head = (
                f"{'el' if condition[1] else ''}if {expression(condition[2])}"
                if condition
                else text
            )
            lines.append("    " * indent + head + ":")
        indent += (mark == "{") - (mark == "}")
    return "\n".join(lines)


@cache
def _compiled(code: str):
    return compile(statements(code), "<CUDA>", "exec")


def _statement(text: str) -> list[str]:
    if text.startswith("if ("):
        end = _end(text, 4, "(", ")")
        return [f"if {expression(text[4:end])}: {'; '.join(_statement(text[end + 1 :].strip()))}"]
    declared = re.match(r"(?:const |constexpr )?(?:int|bool|u32|u64|i64) (.*)", text, re.S)
    parts = _split(declared[1], ",") if declared else [text]
    return [_assignment(part.rstrip(",").strip()) for part in parts if "=" in part]


def _assignment(text: str) -> str:
    targets, operator, value = re.fullmatch(
        r"((?:\w+ = )*\w+) ([-+*/%^]?)= (.*)", text, re.S
    ).groups()
    return f"{targets} {operator.replace('/', '//')}= {expression(value)}"

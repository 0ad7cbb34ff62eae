"""What a script of the gallery says of itself: its docstring is the text of its page."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "gallery"
SHARED = "harness.py"  # what the scripts import
YOURS = "**Your own data.** "  # begins the paragraph that says what to change


@dataclass(frozen=True)
class Script:
    """``title`` and ``summary``, a sentence, from the first line; the ``text`` behind it; the whole
    ``code``."""

    name: str
    title: str
    summary: str
    text: str
    code: str

    @property
    def digest(self) -> str:
        """Of what is behind the docstring: text may change without a new run."""
        body = self.code.partition('"""')[2].partition('"""')[2]
        return hashlib.sha256(body.encode()).hexdigest()


def read(path: Path) -> Script:
    """A script. Raises ValueError where its docstring lacks a part."""
    code = path.read_text()
    first, _, text = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")
    if not code.startswith('"""') or "\n" in first or not first.endswith("."):
        raise ValueError(f"{path.name}: a docstring must come first, with a title and a full stop")
    if not re.search(rf"^{re.escape(YOURS)}", text, re.M) or text.startswith(YOURS):
        raise ValueError(f"{path.name}: the docstring lacks a text, or a paragraph {YOURS!r}")
    title, colon, rest = first.removesuffix(".").partition(": ")
    said = f"{rest[0].upper()}{rest[1:]}." if colon else _sentence(text)
    return Script(path.stem, title, said, text, code)


def read_all(folder: Path = FOLDER) -> list[Script]:
    """All scripts, in the order of their titles."""
    paths = (path for path in folder.glob("*.py") if path.name != SHARED)
    return sorted(map(read, paths), key=lambda script: script.title.lower().removeprefix("a "))


def _sentence(text: str) -> str:
    """The first sentence of a text."""
    return re.split(r"(?<=[.?])\s", " ".join(text.split()), maxsplit=1)[0]

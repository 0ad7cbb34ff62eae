"""Where the site has what lies in the checkout, and links between Markdown files rewritten to that.

Documents link to files outside of ``docs/`` as a reader of the checkout needs it. Each file that
one of them leads to becomes a page: Markdown as it is, a picture as a picture, any other text as a
page with its lines. So a new link needs no edit here.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {".svg", ".png"}
LANGUAGES = {
    ".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".sh": "bash",
    ".cuh": "cuda", ".cu": "cuda",
}  # fmt: skip
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
# What Markdown takes literally, before what is looked for in the rest of it.
_LITERAL = r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$"
_LINK = r"(?P<open>!?\[[^\[\]]*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
_CODE = r"(?<!`)`(?P<code>[^`\n]+)`(?!`)"
_FORMS = re.compile(f"{_LITERAL}|^#.*?$|{_LINK}|{_CODE}", re.M | re.S)


def page_of(path: str) -> str:
    """Where the site has a file of the checkout, both by their paths."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = posixpath.splitext(path)[1]
    if suffix in PICTURES:
        return f"pictures/{path}"
    if path.startswith("examples/"):
        return posixpath.splitext(path)[0] + ".md"
    folder = "project" if "/" not in path else "source"
    return f"{folder}/{path}" if suffix == ".md" else f"{folder}/{path}.md"


def targets(text: str, path: str) -> set[str]:
    """The files of the checkout that a document leads to, by links or by names in code."""
    paths = set()
    for match in _FORMS.finditer(text):
        if match["code"] is not None:
            paths |= {match["code"]} & examples()
        elif match["target"] and not re.match(r"\w+:", match["target"]):
            paths.add(_absolute(match["target"], path))
    return paths


@cache
def examples() -> set[str]:
    files = (ROOT / "examples").rglob("*.py")
    return {path.relative_to(ROOT).as_posix() for path in files}


@cache
def documents() -> list[str]:
    """All Markdown of ``docs/``, by its path in the checkout."""
    files = (ROOT / "docs").rglob("*.md")
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@cache
def outside() -> list[str]:
    """The files outside of ``docs/`` that the site holds."""
    paths = {*PROJECT, *examples()}
    left = [*documents(), *PROJECT]
    while left:
        path = left.pop()
        new = {x for x in targets((ROOT / path).read_text(), path) if not x.startswith("docs/")}
        new = {x for x in new - paths if (ROOT / x).is_file()}
        left += [x for x in new if x.endswith(".md")]
        paths |= new
    return sorted(paths)


def forget() -> None:
    """Look at the files anew, as a server does whose files have changed."""
    for function in (examples, documents, outside):
        function.cache_clear()


def _absolute(target: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def page_text(text: str, path: str) -> str:
    """A document, by its path in the checkout, with the links of its page in the site. Names of
    examples and of the reference in code become links too."""
    here = posixpath.dirname(page_of(path))

    def one(match: re.Match) -> str:
        whole = match[0]
        if match["code"] is not None:
            return _linked_code(match["code"], here)
        target = match["target"]
        if not target or re.match(r"\w+:", target):
            return whole
        place = _absolute(target, path)
        if not (ROOT / place).is_file():
            return whole  # which MkDocs reports
        relative = posixpath.relpath(page_of(place), here or ".")
        return f"{match['open']}({relative}{match['anchor'] or ''})"

    return _FORMS.sub(one, with_wide_lists(text))


def with_wide_lists(text: str) -> str:
    """A document whose lists are as Python-Markdown needs them: what belongs to an item is indented
    by 4, in place of its marker's 2 or 3, and an item of several paragraphs ends by an empty
    line."""
    lines: list[str] = []
    width, fence, has_paragraphs = 0, "", False
    for line in text.splitlines():
        opens = re.match(r"(```+|~~~+)", line.strip())
        if opens:
            fence = opens[0] if not fence else "" if line.strip() == fence else fence
        marker = re.match(r"(?:[-*]|\d+\.) +(?=\S)", line)
        if marker and not fence:
            if width and has_paragraphs:
                lines.append("")
            width, has_paragraphs = len(marker[0]), False
        elif not line.strip():
            has_paragraphs = True
        elif len(line) - len(line.lstrip()) < width:
            width = 0
        is_inside = bool(width) and line.startswith(" " * width)
        lines.append(" " * max(0, 4 - width) + line if is_inside else line)
    return "\n".join(lines) + "\n"


def _linked_code(code: str, here: str) -> str:
    code = code.replace("\\|", "|")  # as GitHub's tables need it, and Python-Markdown's do not
    if code in examples():
        return f"[`{code}`]({posixpath.relpath(page_of(code), here or '.')})"
    name = re.sub(r"\(.*\)$", "", code, flags=re.S)
    name = re.sub(r"^kl\.", "kernlib.", name)
    if name in reference.values():
        shown = code.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
        name = reference.anchor(name)
        return f'<autoref identifier="{name}" optional hover><code>{shown}</code></autoref>'
    return f"`{code}`"


def page_of_text(path: str) -> str:
    """A file that is no Markdown as a page."""
    text = (ROOT / path).read_text()
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, *(length + 1 for length in runs), 3)
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    title = posixpath.basename(path) if "/" in path else path.capitalize()
    return f'# {title}\n\n{fence}{language} title="{path}"\n{text.rstrip()}\n{fence}\n'

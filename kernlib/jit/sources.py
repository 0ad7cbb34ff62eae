"""The CUDA sources: where they lie, the one text that a kernel is compiled from, and its digest.

A kernel is compiled from the very texts that its key was made of: they are put in place of the
includes that ask for them. So NVRTC, which looks in the working directory first, opens no file of
ours, and a change of the sources meanwhile cannot get under a key that it does not belong to.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path

from kernlib.errors import KernlibError


@lru_cache(maxsize=1)
def root() -> Path:
    """The folder of CUDA sources: inside the installed package, or beside it in a checkout.

    Raises KernlibError when neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernel_sources", package.parent / "kernel_sources"):
        if (folder / "common").is_dir():
            return folder
    raise KernlibError(f"kernel_sources is missing beside {package}; reinstall kernlib")


@cache
def closure(source: str) -> tuple[str, ...]:
    """Names, relative to :func:`root`, of all files that ``source`` includes, sorted."""
    names: set[str] = set()
    waiting = _included(source)[0]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += _included(read(name))[0]
    return tuple(sorted(names))


@cache
def system_includes(source: str) -> frozenset[str]:
    """CUDA headers (``<cuda_fp16.h>`` ...) that ``source`` and its closure ask for."""
    texts = (source, *(read(name) for name in closure(source)))
    return frozenset(name for text in texts for name in _included(text)[1])


def lines_with(word: str, text: str) -> Iterator[str]:
    """The lines that contain a word. They are found by searching for it: a regex would cost each
    hit 0.2 ms, and a list of all lines of CUDA's headers (cuda_fp16.h includes 1.3 MB) several
    ms."""
    place = text.find(word)
    while place >= 0:
        end = text.find("\n", place)
        end = len(text) if end < 0 else end
        yield text[text.rfind("\n", 0, place) + 1 : end]
        place = text.find(word, end)


def _included(text: str) -> tuple[list[str], list[str]]:
    """Names of our own files and of CUDA headers that a text includes."""
    lines = [_asked(line) for line in lines_with("include", text)]
    return _between(lines, '"', '"'), _between(lines, "<", ">")


def _between(asked: list[str], first: str, last: str) -> list[str]:
    """The names between these two characters behind ``#include`` in some lines."""
    return [name[1:].split(last)[0] for name in asked if name.startswith(first)]


def _asked(line: str) -> str:
    """The text behind ``#include`` in a line, "" for any other line."""
    word = _directive(line)
    return word.removeprefix("include").lstrip() if word.startswith("include") else ""


def _directive(line: str) -> str:
    """The text behind the ``#`` of a line, "" for one that does not begin with it."""
    line = line.strip()
    return line[1:].lstrip() if line.startswith("#") else ""


def assemble(source: str, name: str) -> str:
    """``source`` with all files of its closure in place of the includes that ask for them, each
    file once, as with ``#pragma once``. In messages of the compiler, lines of ``source`` are those
    of ``name``, and others those of their files."""
    return "\n".join(_assembled(source, name, set(), True)) + "\n"


def _assembled(text: str, name: str, done: set[str], certain: bool) -> Iterator[str]:
    """The lines of a text. A file that is included inside an ``#if``, or in a text that is not
    ``certain`` to be compiled, may be skipped by the compiler; then the next include must bring
    it."""
    depth = 0
    for number, line in enumerate(text.split("\n"), 1):
        headers = _between([_asked(line)], '"', '"')
        if headers:
            yield from _inserted(headers[0], done, certain and depth == 0)
            yield f'#line {number + 1} "{name}"'
            continue
        word = _directive(line)
        depth += word.startswith("if") - word.startswith("endif")
        yield "" if word.split() == ["pragma", "once"] else line


def _inserted(name: str, done: set[str], certain: bool) -> Iterator[str]:
    if name in done:
        return
    if certain:
        done.add(name)
    else:
        done = done | {name}  # within this file alone, which may include itself indirectly
    guard = "KERNLIB_HAS_" + "".join(c if c.isalnum() else "_" for c in name)
    yield from (f"#ifndef {guard}", f"#define {guard}", f'#line 1 "{name}"')
    yield from _assembled(read(name), name, done, certain)
    yield "#endif"


@cache
def _digest_of(names: tuple[str, ...]) -> bytes:
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{len(read(name))}\0".encode())
        digest.update(read(name).encode())
    return digest.digest()


def digest(source: str) -> bytes:
    """Digest of the contents of all files that ``source`` includes, which are read once a
    process."""
    return _digest_of(closure(source))


def folder_digest(folder: Path, names: Iterable[str]) -> bytes:
    """Digest of the contents of these files of a folder, and of what they include there. Raises
    OSError."""
    texts: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = os.path.normpath(waiting.pop())
        if name not in texts and (folder / name).is_file():
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="surrogateescape")
            beside, elsewhere = _included(texts[name])
            waiting += [os.path.join(os.path.dirname(name), other) for other in beside]
            waiting += beside + elsewhere
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        data = text.encode("utf-8", "surrogateescape")
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.digest()


@cache
def read(name: str) -> str:
    """The text of a file below :func:`root`, read once a process."""
    return (root() / name).read_text(encoding="utf-8")


def forget() -> None:
    """Have all files read again, after an edit of kernels in a running process."""
    for cached in (root, closure, system_includes, _digest_of, read):
        cached.cache_clear()

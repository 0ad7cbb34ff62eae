"""The site's navigation, from the files that there are: a new page has its place without an edit.

Pages that are named here come first in their section, the others of that folder behind them.
"""

from __future__ import annotations

from collections.abc import Iterable

import links
import reference

# Sections, the folder of each, and its pages in reading order.
FOLDERS = {
    "Families": ("families", (
        "pairwise", "kronecker_sparse", "kronecker_sparse_kernels", "kronecker_product", "sparse",
        "sparse_formats", "blocksparse",
    )),
    "Concepts": ("concepts", (
        "epilogues", "scores", "gradients", "accuracy", "running", "layers", "cache",
        "architecture",
    )),
    "Guides": ("guides", (
        "install", "command_line", "coming_from", "checkpoints", "kernel_matmul", "linalg",
        "distributed", "kernel_machines",
    )),
    "Gallery": ("gallery", ("index",)),
    "Results": ("results", (
        "programs", "pairwise", "kronecker_sparse", "kronecker_product", "sparse", "blocksparse",
        "distributed", "service", "cpu", "auto",
    )),
}  # fmt: skip
DEVELOPMENT = ("adding_a_family.md", "versions.md")
EXAMPLES = "examples/"


def ordered(pages: Iterable[str], folder: str, first: Iterable[str]) -> list[str]:
    """The pages of a folder, those that are named first."""
    inside = sorted(page for page in pages if page.startswith(f"{folder}/"))
    named = [f"{folder}/{name}.md" for name in first]
    return [page for page in named if page in inside] + [x for x in inside if x not in named]


def navigation(pages: Iterable[str]) -> list:
    """As ``nav`` of mkdocs.yml has it, of these pages of ``docs/``."""
    pages = [page for page in pages if page != reference.INDEX]
    sections = {title: ordered(pages, *where) for title, where in FOLDERS.items()}
    placed = {"index.md", *DEVELOPMENT, *(x for names in sections.values() for x in names)}
    programs = sorted(map(links.page_of, links.examples()))
    sections["Guides"].append({"Example programs": [x for x in programs if x.count("/") == 1]})
    sections["Gallery"] += [{"Scripts": [x for x in programs if x.count("/") > 1]}]
    development = [x for x in DEVELOPMENT if x in pages] + sorted(set(pages) - placed)
    development += map(links.page_of, links.PROJECT)
    results = [{_short(page): page} for page in sections.pop("Results")]
    return [
        {"Start": "index.md"},
        *({title: names} for title, names in sections.items()),
        {"Reference": [reference.INDEX, *_nested(reference.modules())]},
        {"Results": results},
        {"Development": development},
    ]


def _short(page: str) -> str:
    """The heading of a page of results, without what all of them begin with."""
    title = (links.ROOT / "docs" / page).read_text().partition("\n")[0].removeprefix("# ")
    title = title.removeprefix("Results: ").replace("cpu", "CPU")
    return title[:1].upper() + title[1:]


def _nested(modules: Iterable[str]) -> list:
    """Predecessors' modules under one heading, behind all others."""
    kernlibs = [reference.page_of(name) for name in modules if ".compat" not in name]
    others = [reference.page_of(name) for name in modules if ".compat" in name]
    return [*kernlibs, {"Predecessors' names": others}]


def pages_in(nav: list) -> set[str]:
    """All pages of a navigation."""
    paths: set[str] = set()
    for entry in nav:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        paths |= {inside} if isinstance(inside, str) else pages_in(inside)
    return paths

"""What the site has beside the files of ``docs/``, for MkDocs: pages of the reference and of files
that documents lead to, the navigation, and links that lead to these pages.

``mkdocs build --strict`` fails by each warning from here.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import links
import navigation
import reference
import roles
from mkdocs.structure.files import File, InclusionLevel

log = logging.getLogger("mkdocs.hooks.kernlib")
# What counts less in the search than the reference and the guides.
MINOR = ("results/", "examples/", "source/", "project/", "reference/kernlib.compat")


def on_config(config):
    links.forget()
    pages = [path.removeprefix("docs/") for path in links.documents()]
    config.nav = navigation.navigation(pages)
    return config


def on_files(files, config):
    in_nav = navigation.pages_in(config.nav)
    texts = reference.pages()
    for path in links.outside():
        uri = links.page_of(path)
        if not uri.endswith(".md"):
            source = str(links.ROOT / path)
            files.append(File.generated(config, uri, abs_src_path=source))
        elif path.endswith(".md"):
            texts[uri] = (links.ROOT / path).read_text()
        else:
            texts[uri] = links.page_of_text(path)
    for uri, text in texts.items():
        level = InclusionLevel.INCLUDED if uri in in_nav else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=text, inclusion=level))
    for name in reference.undocumented():
        log.warning(f"{name} has no docstring")
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    page.meta.setdefault("search", {"boost": 0.5 if uri.startswith(MINOR) else 1.5})
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]  # which is all in the tabs
    if uri == reference.INDEX:
        markdown = reference.index(markdown)
    paths = {links.page_of(path): path for path in (*links.documents(), *links.outside())}
    path = paths.get(uri)
    return links.page_text(markdown, path) if path and path.endswith(".md") else markdown


def on_page_content(html, page, config, files):
    text = re.sub(r"<(pre|script)\b.*?</\1>", "", html, flags=re.S)
    for role in set(re.findall(r":(?:\w+):(?:`|<code>)", text)) | set(re.findall(roles.ROLE, text)):
        log.warning(f"{page.file.src_uri} shows a role: {role}")
    # The search shows and weighs what a docstring says, beside the name.
    signature = '<div class="doc-signature'
    return html.replace(signature, signature.replace("div", "div data-search-exclude"))

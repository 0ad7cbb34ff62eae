"""The description of an archive: README.md, whose links are of a checkout, with links that work on
the page of a package index."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")


def description(text: str, source: str | None) -> str:
    """README's text for a page elsewhere: links below ``source``, the address of the files of the
    repository, or their words alone as long as there is none; pictures go then."""

    def link(match: re.Match) -> str:
        mark, words, path = match.groups()
        if source is not None:
            return f"{mark}[{words}]({source.rstrip('/')}/{path})"
        return "" if mark else words

    return LINK.sub(link, text)


class Description(MetadataHookInterface):
    """Sets ``readme``. The address is ``project.urls.Source``."""

    def update(self, metadata: dict) -> None:
        source = metadata.get("urls", {}).get("Source")
        text = (Path(self.root) / "README.md").read_text()
        content = description(text, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": content}

"""Compares a wheel and an sdist with the checkout, file by file: what they must hold and no more.

python .ci/contents.py WHEEL SDIST
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of the sdist, which is the checkout without its history; the wheel has the first two.
FOLDERS = ("kernlib", "kernel_sources", "examples", "tests", "benchmarks", "docs", "findings",
           ".ci")  # fmt: skip
FILES = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", ".gitignore",
         "hatch_build.py", "mkdocs.yml")  # fmt: skip
# What each extra must bring for kernels to be compiled and launched, and for cuSOLVER.
BROUGHT = {
    "cu12": {"cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvmath-python"},
    "cu13": {"cuda-core", "cuda-python", "nvidia-cuda-nvrtc", "nvmath-python"},
}


def files_below(folder: Path) -> dict[str, bytes]:
    """All files that are not Python's own, by their path in the checkout."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in found
        if "__pycache__" not in path.parts
    }


def wanted_wheel() -> dict[str, bytes]:
    sources = files_below(ROOT / "kernel_sources")
    inside = {f"kernlib/{name}": content for name, content in sources.items()}
    return {**files_below(ROOT / "kernlib"), **inside}


def wanted_sdist() -> dict[str, bytes]:
    wanted = {name: (ROOT / name).read_bytes() for name in FILES}
    for folder in FOLDERS:
        wanted |= files_below(ROOT / folder)
    return wanted


def words(text: str) -> str:
    """Markdown without pictures, and with the words of its links alone."""
    return re.sub(r"!\[[^\]]*\]\([^)]*\)|\[([^\]]*)\]\([^)]*\)", r"\1", text).strip()


def in_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_sdist(path: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if member.isfile():
                found[member.name.partition("/")[2]] = archive.extractfile(member).read()
    return found


def differences(wanted: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    lacks = [f"lacks {name}" for name in sorted(wanted.keys() - found.keys())]
    extra = [f"holds {name}" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    return lacks + extra + [f"has another {name}" for name in both if wanted[name] != found[name]]


def faults_of_metadata(metadata: Message) -> list[str]:
    """What is wrong with the name card of an archive."""
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "kernlib/__init__.py").read_text(), re.M)
    faults = [] if metadata["Version"] == version[1] else [f"is version {metadata['Version']}"]
    text = metadata.get_payload()
    if words(text) != words((ROOT / "README.md").read_text()):
        faults.append("describes itself by another text than README.md")
    if broken := re.findall(r"\]\((?!https?:)([^)]*)\)", text):
        faults.append(f"links to {broken[0]}, which no page elsewhere has")
    for extra, names in BROUGHT.items():
        brought = {
            re.match(r"[\w-]+", line)[0]
            for line in metadata.get_all("Requires-Dist", [])
            if re.search(rf"extra == ['\"]{extra}['\"]", line)
        }
        faults += [f"its extra {extra} lacks {name}" for name in sorted(names - brought)]
    return faults


def faults_of_wheel(path: Path) -> list[str]:
    found = in_wheel(path)
    cards = {name: found.pop(name) for name in list(found) if ".dist-info/" in name}
    (metadata,) = (content for name, content in cards.items() if name.endswith("/METADATA"))
    names = {name.partition(".dist-info/")[2] for name in cards}
    needed = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    faults = [f"lacks or adds {name} of its dist-info" for name in sorted(names ^ needed)]
    faults += faults_of_metadata(Parser().parsestr(metadata.decode()))
    return faults + differences(wanted_wheel(), found)


def faults_of_sdist(path: Path) -> list[str]:
    found = in_sdist(path)
    metadata = found.pop("PKG-INFO")
    faults = faults_of_metadata(Parser().parsestr(metadata.decode()))
    return faults + differences(wanted_sdist(), found)


def main(wheel: str, sdist: str) -> int:
    checked = ((wheel, faults_of_wheel(Path(wheel))), (sdist, faults_of_sdist(Path(sdist))))
    for path, faults in checked:
        said = "".join(f"\n  {fault}" for fault in faults) or " holds what it must, and no more"
        print(f"{Path(path).name}{said}")
    return int(any(faults for _, faults in checked))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

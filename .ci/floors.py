"""Prints the oldest versions that pyproject.toml permits, as constraints of pip."""

import re
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
runs = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1]
extras = "\n".join(re.findall(r"^(?:cu12|test) = (.*)$", text, re.M))
for name, floor in re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', runs + extras):
    print(f"{name}=={floor}")

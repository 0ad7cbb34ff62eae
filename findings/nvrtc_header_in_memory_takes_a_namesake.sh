#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, cuda-bindings 13.4.4, no GPU: a header on disk that says
# `#include "detail.h"` gets the one in its own folder, as in every C++ compiler. A header that is
# handed to nvrtcCreateProgram as text does not, whatever folder its name has: "detail.h" is looked
# for by that very name alone. If the program brings another header "detail.h", that one is taken,
# and if it brings none, the compile fails, though "first/detail.h" is there. Two headers of one
# name are refused when the program is created, and not when it is compiled.
#
# Output seen (the number that first/detail.h defines is 7001, second's 7002, detail.h's 7003):
#
#     on disk: 7001 7002
#     in memory, with detail.h: 7003 7003
#     in memory, without it: NVRTC_ERROR_COMPILATION
#     two of one name: NVRTC_ERROR_INVALID_INPUT
#
# Why it matters: packing a tree of headers into one text for a cache or a wheel, name by name,
# changes what the includes mean, and where two folders have files of one name it may still compile.
# What does instead: write the includes as paths from the root, `#include "first/detail.h"`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/headers.py" <<'PYTHON'
import re
from pathlib import Path

from cuda.bindings import nvrtc

TREE = {
    "first/part.h": '#include "detail.h"\n',
    "first/detail.h": "#define VALUE 7001\n",
    "second/part.h": '#include "detail.h"\n',
    "second/detail.h": "#define VALUE 7002\n",
    "detail.h": "#define VALUE 7003\n",
}


def stored(part, headers, *options):
    """The number that a kernel stores, or the name of the error."""
    source = f'#include "{part}"\nextern "C" __global__ void kernel(int* p) {{ *p = VALUE; }}'
    names, texts = [name.encode() for name, _ in headers], [text.encode() for _, text in headers]
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", len(names), texts, names)
    if int(status):
        return status.name
    options = [b"-arch=sm_90a", b"-no-cache", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        return status.name
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return re.search(rb"\b(7\d{3});", ptx)[1].decode()


for name, text in TREE.items():
    path = Path("tree", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
parts = "first/part.h", "second/part.h"
print("on disk:", *[stored(part, [], b"-Itree") for part in parts])
tree = list(TREE.items())
print("in memory, with detail.h:", *[stored(part, tree) for part in parts])
print("in memory, without it:", stored(parts[0], tree[:-1]))
print("two of one name:", stored(parts[0], [*tree, tree[-1]]))
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" headers.py)
printf '%s\n' "$said"
[[ $said == "on disk: 7001 7002
in memory, with detail.h: 7003 7003
in memory, without it: NVRTC_ERROR_COMPILATION
two of one name: NVRTC_ERROR_INVALID_INPUT" ]]

#!/usr/bin/env bash
# cuda-core 1.2.2, cuda-bindings 13.4.4, nvidia-cuda-nvrtc 13.5.37, no GPU: ProgramOptions does not
# check what it is handed. include_path and pre_include take a string or a list. A pathlib.Path is
# neither and is dropped without a word; a list with a Path in it works, and so does a Path as
# pch_dir. time, the name of a file, takes False for a name: it is not "off", but a table of times
# in a file "False" of the working directory.
#
# Output seen:
#
#     include_path "headers": 7002
#     include_path [Path("headers")]: 7002
#     include_path Path("headers"): 7001
#     time=False wrote a file: True
#
# Why it matters: with a Path the compile mostly fails, and the error names a header, not the
# option. Where a header of that name lies in the working directory as well, as below, it succeeds
# with the wrong one. What does instead: str(path), and None for time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 cuda-core==1.2.2 2>/dev/null
cat >"$folder/options.py" <<'PYTHON'
from pathlib import Path

from cuda.core import Program, ProgramOptions

Path("headers").mkdir()
Path("value.h").write_text("#define VALUE 7001\n")
Path("headers/value.h").write_text("#define VALUE 7002\n")
SOURCE = """
#if __has_include(<value.h>)
#include <value.h>
#else
#include "value.h"
#endif
extern "C" __global__ void kernel(int* p) { *p = VALUE; }
"""


def stored(include_path):
    options = ProgramOptions(arch="sm_90a", include_path=include_path)
    code = bytes(Program(SOURCE, "c++", options).compile("cubin").code)
    return next(value for value in (7001, 7002) if value.to_bytes(4, "little") in code)


print('include_path "headers":', stored("headers"))
print('include_path [Path("headers")]:', stored([Path("headers")]))
print('include_path Path("headers"):', stored(Path("headers")))
Program(SOURCE, "c++", ProgramOptions(arch="sm_90a", time=False)).compile("cubin")
print("time=False wrote a file:", Path("False").exists())
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" options.py)
printf '%s\n' "$said"
[[ $said == 'include_path "headers": 7002
include_path [Path("headers")]: 7002
include_path Path("headers"): 7001
time=False wrote a file: True' ]]

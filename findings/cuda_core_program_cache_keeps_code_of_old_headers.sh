#!/usr/bin/env bash
# cuda-core 1.2.2, cuda-bindings 13.4.4, nvidia-cuda-nvrtc 13.5.37, no GPU: the program cache of
# cuda.core (Program.compile(cache=...)) refuses options that read files, such as include_path,
# since it cannot see the files' content. But NVRTC also looks for `#include "x.h"` in the working
# directory, without any option, and that is neither refused nor in the key. When the header
# changes, the cache hands back the code of the old one. no_source_include=True makes NVRTC look
# nowhere: then such a source does not compile, instead of being kept under a wrong key.
#
# Output seen:
#
#     without a cache: 7001 7002
#     with a cache: 7001 7001
#     include_path: ValueError
#     no_source_include: NVRTCError
#
# Why it matters: the refusal of include_path reads like a promise that what is not refused is safe.
# Whoever runs a program beside its headers gets yesterday's kernels. The same key answers in every
# other working directory, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 cuda-core==1.2.2 2>/dev/null
cat >"$folder/cached.py" <<'PYTHON'
from pathlib import Path

from cuda.core import Program, ProgramOptions
from cuda.core.utils import InMemoryProgramCache

SOURCE = '#include "value.h"\nextern "C" __global__ void kernel(int* p) { *p = VALUE; }'
VALUES = (7001, 7002)


def compiled(value, cache=None, **options):
    """The number that is in the code, when the header defines `value`."""
    Path("value.h").write_text(f"#define VALUE {value}\n")
    program = Program(SOURCE, "c++", ProgramOptions(arch="sm_90a", **options))
    code = bytes(program.compile("cubin", cache=cache).code)
    return next(value for value in VALUES if value.to_bytes(4, "little") in code)


print("without a cache:", *[compiled(value) for value in VALUES])
cache = InMemoryProgramCache()
print("with a cache:", *[compiled(value, cache) for value in VALUES])
for option in ({"include_path": "."}, {"no_source_include": True}):
    try:
        print(*option, compiled(7001, InMemoryProgramCache(), **option))
    except Exception as error:
        print(f"{next(iter(option))}: {type(error).__name__}")
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" cached.py)
printf '%s\n' "$said"
[[ $said == "without a cache: 7001 7002
with a cache: 7001 7001
include_path: ValueError
no_source_include: NVRTCError" ]]

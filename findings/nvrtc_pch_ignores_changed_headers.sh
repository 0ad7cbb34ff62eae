#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, cuda-bindings 13.4.4, no GPU: with `-pch` NVRTC keeps the headers of a
# program compiled before in the same process and takes them for the next program that includes
# files of the same names under the same options. It compares neither their text nor, for files,
# time and size: the old header goes in without an error, for headers in memory and on disk alike,
# and even when the file has been removed. Other options (-D) and -arch it does notice.
#
# Output seen (the number that the header defines, and the one that the code stores):
#
#     in memory: defined 7001 7002, stored 7001 7001
#     on disk: defined 7003 7004 none, stored 7003 7003 7003
#     on disk, with -DOTHER: defined 7005, stored 7005
#     without -pch: defined 7001 7002, stored 7001 7002
#
# Why it matters: generated code often writes its constants into a small header of a fixed name, in
# memory. `-pch` looks like an option that only saves time, and turns the second kernel into the
# first. What does instead: constants as -D or in the main source, or the text's digest in the
# header's name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/headers.py" <<'PYTHON'
import re
import time
from pathlib import Path

from cuda.bindings import nvrtc


def stored(name, options, headers=()):
    """The number that a kernel stores which includes the header `name`."""
    source = f'#include "{name}"\nextern "C" __global__ void kernel(int* p) {{ *p = VALUE; }}'
    texts, names = [text for _, text in headers], [name for name, _ in headers]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", len(names), texts, names)
    options = [b"-arch=sm_90a", b"-no-cache", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return re.search(rb"\b(7\d{3});", ptx)[1].decode()


def in_memory(*options):
    texts = [b"#define VALUE 7001\n", b"#define VALUE 7002\n"]
    return " ".join(stored("value.h", options, [(b"value.h", text)]) for text in texts)


print(f"in memory: defined 7001 7002, stored {in_memory(b'-pch')}")
header = Path("file.h")
options = [b"-pch", b"-I."]
header.write_text("#define VALUE 7003\n")
first = stored("file.h", options)
time.sleep(2)  # so that a clock of seconds tells the two apart
header.write_text("// now a longer file\n#define VALUE 7004\n")
second = stored("file.h", options)
header.unlink()
third = stored("file.h", options)
print(f"on disk: defined 7003 7004 none, stored {first} {second} {third}")
header.write_text("#define VALUE 7005\n")
print(f"on disk, with -DOTHER: defined 7005, stored {stored('file.h', [*options, b'-DOTHER'])}")
print(f"without -pch: defined 7001 7002, stored {in_memory()}")
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" headers.py)
printf '%s\n' "$said"
[[ $said == "in memory: defined 7001 7002, stored 7001 7001
on disk: defined 7003 7004 none, stored 7003 7003 7003
on disk, with -DOTHER: defined 7005, stored 7005
without -pch: defined 7001 7002, stored 7001 7002" ]]

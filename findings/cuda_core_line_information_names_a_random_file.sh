#!/usr/bin/env bash
# cuda-core 1.2.2, cuda-bindings 13.4.4, nvidia-cuda-nvrtc 13.5.37, no GPU: ProgramOptions(
# lineinfo=True) without a name writes the source to a temporary file of a random name, for the
# debugger, and this name goes into the cubin. So one program compiled twice in one process has two
# cubins that differ; the name also tells the Python file and the kernel. With name="..." no file is
# written and the bytes repeat, as they do with -lineinfo in NVRTC itself. The folder that the
# process works in is in the cubin in either case.
#
# Output seen:
#
#     no line information: 1 cubin of 3 compiles
#     lineinfo=True: 3 cubins of 3 compiles
#     lineinfo=True, name="kernel.cu": 1 cubin of 3 compiles
#     lineinfo=True, name="kernel.cu", in another folder: another cubin
#
# Why it matters: caches addressed by content, reproducible builds and tests that compare cubins see
# a change each time. A name is enough for two compiles at one place; for bytes that do not depend
# on the place leave line information out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 cuda-core==1.2.2 2>/dev/null
cat >"$folder/lines.py" <<'PYTHON'
import os

from cuda.core import Program, ProgramOptions

SOURCE = 'extern "C" __global__ void kernel(float* p) { p[0] = p[1] * p[2] + p[3]; }'


def compiled(**options):
    options = ProgramOptions(arch="sm_90a", no_cache=True, **options)
    return bytes(Program(SOURCE, "c++", options).compile("cubin").code)


def count(**options):
    cubins = len({compiled(**options) for _ in range(3)})
    return f"{cubins} cubin{'s' * (cubins > 1)} of 3 compiles"


print("no line information:", count())
print("lineinfo=True:", count(lineinfo=True))
print('lineinfo=True, name="kernel.cu":', count(lineinfo=True, name="kernel.cu"))
here = compiled(lineinfo=True, name="kernel.cu")
os.mkdir("other")
os.chdir("other")
which = "the same" if compiled(lineinfo=True, name="kernel.cu") == here else "another"
print(f'lineinfo=True, name="kernel.cu", in another folder: {which} cubin')
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" lines.py)
printf '%s\n' "$said"
[[ $said == 'no line information: 1 cubin of 3 compiles
lineinfo=True: 3 cubins of 3 compiles
lineinfo=True, name="kernel.cu": 1 cubin of 3 compiles
lineinfo=True, name="kernel.cu", in another folder: another cubin' ]]

#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, cuda-bindings 13.4.4, no GPU: whether a cubin is for sm_90 or only for
# sm_90a is not in the flags of its ELF header, where the number 90 is (bits 8 to 15). sm_100,
# sm_100f and sm_100a have equal flags too. The letter "a" is in the section .nv.compat; a plain
# kernel for sm_100f has the bytes of sm_100 there. Beside that, only the options of ptxas differ,
# which stand as text in .note.nv.tkinfo. The instructions of a plain kernel are the same.
#
# Output seen (flags, architecture of the flags, and which sections differ from those of the first):
#
#     sm_90 0x6005a04 90
#     sm_90a 0x6005a04 90 .note.nv.tkinfo .nv.compat
#     sm_100 0x6006402 100
#     sm_100f 0x6006402 100 .note.nv.tkinfo
#     sm_100a 0x6006402 100 .note.nv.tkinfo .nv.compat
#
# Why it matters: tools that sort cubins by the header cannot tell one of sm_90a from one that
# is for all of 9.x. What does instead: keep the name of the target beside the cubin, or in its key.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/flags.py" <<'PYTHON'
import struct

from cuda.bindings import nvrtc

SOURCE = b"""extern "C" __global__ void kernel(float* p, int n) {
    for (int i = 0; i < n; ++i) p[threadIdx.x + i] = p[i] * p[i + 1] + 1.0f;
}"""


def compiled(target):
    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"kernel.cu", 0, [], [])
    options = [b"-no-cache", f"-arch={target}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin


def sections(cubin):
    """The bytes of each section of an ELF file, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    start = rows[names][4]
    return {
        cubin[start + row[0] :].split(b"\0")[0].decode(): cubin[row[4] : row[4] + row[5]]
        for row in rows
    }


for first, *others in (("sm_90", "sm_90a"), ("sm_100", "sm_100f", "sm_100a")):
    plain = sections(compiled(first))
    for target in (first, *others):
        cubin = compiled(target)
        (flags,) = struct.unpack_from("<I", cubin, 48)
        unlike = sorted(name for name, part in sections(cubin).items() if part != plain[name])
        print(target, hex(flags), flags >> 8 & 255, *unlike)
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" flags.py)
printf '%s\n' "$said"
[[ $said == "sm_90 0x6005a04 90
sm_90a 0x6005a04 90 .note.nv.tkinfo .nv.compat
sm_100 0x6006402 100
sm_100f 0x6006402 100 .note.nv.tkinfo
sm_100a 0x6006402 100 .note.nv.tkinfo .nv.compat" ]]

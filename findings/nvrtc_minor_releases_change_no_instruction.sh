#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.0.88, 13.2.51, 13.4.92 and 13.5.37, cuda-bindings 13.4.4, sm_90a, no GPU: of
# one source every release, and every build of a release, makes another cubin, since the version
# stands in the section .note.nv.tkinfo. The instructions are another matter: 13.0 differs from 13.1
# in most kernels, and from 13.2.51 to 13.5.37 none of twelve tried differed in a byte of its code
# (three of them below; 13.1 has other code for one of the twelve; the two builds each of 13.0, 13.1
# and 13.4 and the three of 13.2 have equal code).
#
# Output seen (instructions of the three kernels, and how many have the code, and the cubin, of the
# release before):
#
#     13.0.88: 80 312 144
#     13.2.51: 80 312 144, equal code 0, equal cubins 0
#     13.4.92: 80 312 144, equal code 3, equal cubins 0
#     13.5.37: 80 312 144, equal code 3, equal cubins 0
#
# Why it matters: a cache whose key holds the full version compiles everything anew at each update,
# mostly to get the same code, and a comparison of whole cubins finds a change where there is none.
# That is the price of being right; for a regression of speed or of bits between such releases look
# elsewhere first, and compare the sections .text.*.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/code.py" <<'PYTHON'
import json
import struct
import sys
from pathlib import Path

from cuda.bindings import nvrtc

KERNELS = (
    "for (int i = 0; i < n; ++i) o[threadIdx.x + i] = o[i] * o[i + 1] + 1.f;",
    """__shared__ float s[32]; float m = -1e30f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) m = fmaxf(m, p[i]);
    for (int j = 16; j; j /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, j));
    if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = m;
    __syncthreads(); m = s[0]; for (int j = 1; j < blockDim.x / 32; ++j) m = fmaxf(m, s[j]);
    float t = 0; for (int i = threadIdx.x; i < n; i += blockDim.x) t += expf(p[i] - m);
    for (int j = 16; j; j /= 2) t += __shfl_xor_sync(~0u, t, j);
    for (int i = threadIdx.x; i < n; i += blockDim.x) o[i] = expf(p[i] - m) / t;""",
    """float d[4] = {}; const unsigned* s = (const unsigned*)p; for (int i = 0; i < n; ++i) {
    unsigned a[4]; for (int j = 0; j < 4; ++j) a[j] = s[i * 128 + j * 32 + threadIdx.x];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]),
          "r"(a[3]), "r"(s[i + 7]), "r"(s[i + 9])); }
    for (int j = 0; j < 4; ++j) o[threadIdx.x * 4 + j] = d[j];""",
)


def compiled(body):
    source = f'extern "C" __global__ void kernel(float* o, const float* p, int n) {{ {body} }}'
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_90a"])
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin


def instructions(cubin):
    """The bytes of the section .text.kernel of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    for name, _, _, _, start, size in rows:
        if cubin[rows[names][4] + name :].startswith(b".text.kernel\0"):
            return cubin[start : start + size]


cubins = [compiled(body) for body in KERNELS]
code = [instructions(cubin) for cubin in cubins]
said = f"{sys.argv[1]}: " + " ".join(str(len(part) // 16) for part in code)
before, now = Path("before.json"), [[part.hex() for part in parts] for parts in (code, cubins)]
if before.exists():
    same = [sum(map(str.__eq__, *pair)) for pair in zip(json.loads(before.read_text()), now)]
    said += f", equal code {same[0]}, equal cubins {same[1]}"
before.write_text(json.dumps(now))
print(said)
PYTHON
cd "$folder"
for version in 13.0.88 13.2.51 13.4.92 13.5.37; do
    "$folder/environment/bin/pip" install --quiet nvidia-cuda-nvrtc=="$version" 2>/dev/null
    "$folder/environment/bin/python" code.py "$version" | tee -a said
done
[[ $(<said) == "13.0.88: 80 312 144
13.2.51: 80 312 144, equal code 0, equal cubins 0
13.4.92: 80 312 144, equal code 3, equal cubins 0
13.5.37: 80 312 144, equal code 3, equal cubins 0" ]]

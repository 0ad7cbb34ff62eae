#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, cuda-bindings 13.4.4, sm_90a, no GPU: with `__launch_bounds__(threads,
# 1)` the most registers that ptxas gives a thread are not 65536 / threads in steps of 8. They are
# 16384 divided by the threads of the fullest of four schedulers. So from 512 threads to 544, by one
# warp that only loads, a thread's limit goes from 128 to 96 and not to 120, and all sizes up to 640
# threads have it. Nothing says so: what the limit takes away is spilled.
#
# Output seen (threads, registers of the kernel, and what the division gives):
#
#     384 168 168
#     480 128 136
#     512 128 128
#     544 96 120
#     640 96 96
#     672 80 96
#
# Why it matters: kernels that give copying to a warp of its own, beside four warpgroups that
# multiply, expect to pay a sixteenth of the registers and pay a quarter. Whole multiples of 128
# threads waste none: a fifth warpgroup that gives its registers up by setmaxnreg costs the same as
# that one warp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/registers.py" <<'PYTHON'
import re
import sys

from cuda.bindings import nvrtc

VALUES = 200  # more than any limit leaves room for
SOURCE = """
extern "C" __global__ void __launch_bounds__(%d, 1) kernel(float* p, int n) {
    float v[%d];
    #pragma unroll
    for (int i = 0; i < %d; ++i) v[i] = p[threadIdx.x + i * 1024];
    for (int r = 0; r < n; ++r) {
        #pragma unroll
        for (int i = 0; i < %d; ++i) v[i] = v[i] * v[(i * 7 + 3) %% %d] + p[r];
    }
    #pragma unroll
    for (int i = 0; i < %d; ++i) p[threadIdx.x + i * 1024] = v[i];
}
"""
threads = int(sys.argv[1])
source = SOURCE % (threads, *[VALUES] * 5)
_, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
options = [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v"]
(status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
assert int(status) == 0
_, size = nvrtc.nvrtcGetProgramLogSize(program)
log = b" " * size
nvrtc.nvrtcGetProgramLog(program, log)
used = int(re.search(rb"Used (\d+) registers", log)[1])
print(threads, used, 65536 // threads // 8 * 8)
PYTHON
cd "$folder"
for expected in "384 168 168" "480 128 136" "512 128 128" "544 96 120" "640 96 96" "672 80 96"; do
    said=$("$folder/environment/bin/python" registers.py "${expected%% *}")
    printf '%s\n' "$said"
    [[ $said == "$expected" ]]
done

#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, cuda-bindings 13.4.4, sm_90a, no GPU: a loop of wgmma whose left
# operand is in registers reads the next step's fragment while a group is under way. Whether ptxas
# leaves that asynchronous depends on where the fragment goes. Read into a second array, from which
# it moves to the first behind the wait, all wgmma of the function wait for each other (C7513, "non
# wgmma instructions defining input registers"), though the moves stand behind wait_group 0. Two
# arrays that are taken by turns, in a loop unrolled by two, stay asynchronous, though they are
# written while a group is under way. The result is right in both cases; an info line of the log is
# all that tells.
#
# Output seen:
#
#     read, multiply, wait: asynchronous
#     read ahead, moved behind the wait: C7513
#     read ahead, two arrays by turns: asynchronous
#
# Why it matters: the first way of reading ahead is how software pipelines are written elsewhere,
# where the compiler renames the registers. Here it is slower than not reading ahead at all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/wgmma.py" <<'PYTHON'
import re

from cuda.bindings import nvrtc

SUMS = ", ".join(f"%{i}" for i in range(32))
BOUND = ", ".join(f'"+f"(d[{i}])' for i in range(32))
HEAD = """
__device__ __forceinline__ void multiply(float (&d)[32], const unsigned (&a)[4],
                                         unsigned long long b) {
    asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%s}, {%%32, %%33, %%34, %%35},"
                 " %%36, p, 1, 1, 0;\\n}"
                 : %s : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned %%0;" :: "n"(n) : "memory")
__device__ __forceinline__ void read(unsigned (&a)[4], const unsigned* s, int k) {
    for (int i = 0; i < 4; ++i) a[i] = s[(k * 4 + i) * 128 + threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(128)
kernel(float* out, const unsigned* in, unsigned long long b, int n) {
    extern __shared__ unsigned s[];
    for (int i = threadIdx.x; i < 4096; i += 128) s[i] = in[i];
    __syncthreads();
    float d[32] = {};
""" % (SUMS, BOUND)
TAIL = """
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}
"""
LOOPS = {
    "read, multiply, wait": """
    unsigned a[4];
    #pragma unroll 1
    for (int k = 0; k < n; ++k) {
        read(a, s, k); FENCE; multiply(d, a, b + k); COMMIT; WAIT(0);
    }""",
    "read ahead, moved behind the wait": """
    unsigned a[4], next[4];
    read(a, s, 0);
    #pragma unroll 1
    for (int k = 0; k < n; ++k) {
        FENCE; multiply(d, a, b + k); COMMIT; read(next, s, k + 1); WAIT(0);
        for (int i = 0; i < 4; ++i) a[i] = next[i];
    }""",
    "read ahead, two arrays by turns": """
    unsigned a[2][4];
    #pragma unroll 1
    for (int k = 0; k < n; k += 2) {
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            WAIT(1); read(a[i], s, k + i); FENCE; multiply(d, a[i], b + k + i); COMMIT;
        }
    }
    WAIT(0);""",
}
for name, loop in LOOPS.items():
    _, program = nvrtc.nvrtcCreateProgram((HEAD + loop + TAIL).encode(), b"kernel.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    said = re.search(rb"\((C75\d\d)\)", log)
    print(f"{name}: {said[1].decode() if said else 'asynchronous'}")
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" wgmma.py)
printf '%s\n' "$said"
[[ $said == "read, multiply, wait: asynchronous
read ahead, moved behind the wait: C7513
read ahead, two arrays by turns: asynchronous" ]]

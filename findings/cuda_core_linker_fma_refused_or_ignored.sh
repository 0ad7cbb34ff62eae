#!/usr/bin/env bash
# cuda-core 1.2.2, cuda-bindings 13.4.4, nvidia-nvjitlink 13.5.37, nvidia-cuda-nvrtc 13.5.37, no
# GPU: fma, ftz, prec_div and prec_sqrt of LinkerOptions are written as -fma=false and its like,
# where nvJitLink expects -fma=0. With link-time optimization nvJitLink refuses each of them,
# whichever the value, "unsupported option". Without it the value is not read: a Program of PTX
# text, which is linked, takes ProgramOptions(fma=False) and fuses multiply and add all the same.
# ptxas_options=["-fmad=false"] keeps them apart there.
#
# Output seen (the instructions of PTX's mul.f32 and add.f32):
#
#     PTX, nothing said: FFMA
#     PTX, fma=False: FFMA
#     PTX, ptxas_options: FMUL FADD
#     LTO, fma=False: nvJitLinkError
#     LTO, fma=True: nvJitLinkError
#     LTO, ptxas_options: FFMA
#
# Why it matters: the same ProgramOptions, with fma=False, keep a C++ program from fusing and not a
# PTX one. In LTO the linker fuses before ptxas is asked; there nvJitLink itself, through
# cuda.bindings and with -fma=0, is the way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet nvidia-cuda-nvrtc==13.5.37 \
    nvidia-nvjitlink==13.5.37 nvidia-cuda-nvdisasm==13.5.37 cuda-bindings==13.4.4 \
    cuda-core==1.2.2 2>/dev/null
cat >"$folder/fused.py" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

from cuda.core import Linker, LinkerOptions, Program, ProgramOptions

PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 pointer) {
    .reg .f32 %f<6>;
    .reg .b64 %r<3>;
    ld.param.u64 %r1, [pointer];
    cvta.to.global.u64 %r2, %r1;
    ld.global.f32 %f1, [%r2];
    ld.global.f32 %f2, [%r2+4];
    ld.global.f32 %f3, [%r2+8];
    mul.f32 %f4, %f1, %f2;
    add.f32 %f5, %f4, %f3;
    st.global.f32 [%r2], %f5;
    ret;
}
"""
SOURCE = 'extern "C" __global__ void kernel(float* p) { p[0] = p[1] * p[2] + p[3]; }'
LTO = {"arch": "sm_90a", "link_time_optimization": True}


def of_ptx(**options):
    return Program(PTX, "ptx", ProgramOptions(arch="sm_90a", **options)).compile("cubin")


def of_lto(**options):
    code = Program(SOURCE, "c++", ProgramOptions(**LTO)).compile("ltoir")
    return Linker(code, options=LinkerOptions(**LTO, **options)).link("cubin")


def instructions(make, **options):
    try:
        Path("kernel.cubin").write_bytes(make(**options).code)
    except Exception as error:
        return type(error).__name__
    nvdisasm = next(Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/nvdisasm"))
    text = subprocess.run([nvdisasm, "-c", "kernel.cubin"], capture_output=True, text=True).stdout
    return " ".join(re.findall(r"\bF(?:FMA|MUL|ADD)\b", text))


assembler = {"ptxas_options": ["-fmad=false"]}
print("PTX, nothing said:", instructions(of_ptx))
print("PTX, fma=False:", instructions(of_ptx, fma=False))
print("PTX, ptxas_options:", instructions(of_ptx, **assembler))
print("LTO, fma=False:", instructions(of_lto, fma=False))
print("LTO, fma=True:", instructions(of_lto, fma=True))
print("LTO, ptxas_options:", instructions(of_lto, **assembler))
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" fused.py)
printf '%s\n' "$said"
[[ $said == "PTX, nothing said: FFMA
PTX, fma=False: FFMA
PTX, ptxas_options: FMUL FADD
LTO, fma=False: nvJitLinkError
LTO, fma=True: nvJitLinkError
LTO, ptxas_options: FFMA" ]]

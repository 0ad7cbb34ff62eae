#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.5.37, nvidia-nvjitlink 13.5.37, cuda-bindings 13.4.4, sm_90a, no GPU: with
# link-time optimization (-dlto, then nvJitLink -lto) an option of floating point counts at one of
# the two steps, and which one depends on the option. -fmad, -ftz and -prec-div count at the link:
# what NVRTC was told of them is dropped without a word. -prec-sqrt counts at the compile, and the
# link ignores it. --use_fast_math at the compile gives approximate division, root and sine, and
# loses its -ftz.
#
# Output seen (is the code that of the option, as NVRTC alone makes it?):
#
#     p[1] * p[2] + p[3], -fmad=false: compile no, link yes
#     p[1] * p[2], -ftz=true: compile no, link yes
#     p[1] / p[2], -prec-div=false: compile no, link yes
#     sqrtf(p[1]), -prec-sqrt=false: compile yes, link no
#     p[1] / p[2], -use_fast_math: compile yes
#     p[1] * p[2], -use_fast_math: compile no
#
# Why it matters: a kernel that needs -fmad=false (error-free sums, a difference of products that
# must be 0) is fused again as soon as it goes through LTO. Give every option to both steps, in the
# spelling of each: nvJitLink's are -fma=0, -ftz=1, -prec-div=0. Explicit intrinsics (__fmul_rn,
# __fadd_rn) need no option.
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet nvidia-cuda-nvrtc==13.5.37 \
    nvidia-nvjitlink==13.5.37 cuda-bindings==13.4.4 2>/dev/null
cat >"$folder/steps.py" <<'PYTHON'
import struct

from cuda.bindings import nvjitlink, nvrtc


def compiled(body, what, *options):
    source = f'extern "C" __global__ void kernel(float* p) {{ p[0] = {body}; }}'
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [b"-arch=sm_90a", b"-no-cache", *[option.encode() for option in options]]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    code = b" " * size
    getattr(nvrtc, f"nvrtcGet{what}")(program, code)
    return code


def linked(code, *options):
    options = ["-arch=sm_90a", "-lto", *options]
    handle = nvjitlink.create(len(options), options)
    nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
    nvjitlink.complete(handle)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, cubin)
    return bytes(cubin)


def instructions(cubin):
    """The bytes of the section .text.kernel of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    for name, _, _, _, start, size in sections:
        if cubin[sections[names][4] + name :].startswith(b".text.kernel\0"):
            return cubin[start : start + size]


def same(cubin, expected):
    return "yes" if instructions(cubin) == expected else "no"


for body, option, of_link in (
    ("p[1] * p[2] + p[3]", "-fmad=false", "-fma=0"),
    ("p[1] * p[2]", "-ftz=true", "-ftz=1"),
    ("p[1] / p[2]", "-prec-div=false", "-prec-div=0"),
    ("sqrtf(p[1])", "-prec-sqrt=false", "-prec-sqrt=0"),
    ("p[1] / p[2]", "-use_fast_math", None),
    ("p[1] * p[2]", "-use_fast_math", None),
):
    expected = instructions(compiled(body, "CUBIN", option))
    without = compiled(body, "LTOIR", "-dlto")
    assert same(linked(without), instructions(compiled(body, "CUBIN"))) == "yes"
    said = f"compile {same(linked(compiled(body, 'LTOIR', '-dlto', option)), expected)}"
    said += f", link {same(linked(without, of_link), expected)}" if of_link else ""
    print(f"{body}, {option}: {said}")
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" steps.py)
printf '%s\n' "$said"
[[ $said == "$(sed -n 's/^#     //p' "$script")" ]]

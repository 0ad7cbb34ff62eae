"""CUDA text of wgmma, Hopper's matrix instruction, for any width of tile."""

from __future__ import annotations

# By torch's name of a dtype: wgmma's name, and the depth of one instruction.
KINDS = {
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
    "float32": ("tf32", 8),
    "float8_e4m3fn": ("e4m3", 32),
}


def multiply(
    dtype: str, columns: int, registers: bool, left_lines: bool = False, right_lines: bool = False
) -> str:
    """CUDA text of ``multiply(sums, a, b, accumulate)``: one wgmma of 64 rows by ``columns``. ``a``
    is in four registers of a thread if ``registers``, else in shared memory, as ``b`` is; a
    descriptor says where. There neighbours along the depth lie side by side; with ``left_lines``
    the rows of ``a`` do, and with ``right_lines`` the columns of ``b``."""
    kind, depth = KINDS[dtype]
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        parameter, left, next_ = "const u32 (&a)[4]", "{%%%d, %%%d, %%%d, %%%d}", count + 4
        left = left % tuple(range(count, count + 4))
        given = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    else:
        parameter, left, next_ = "u64 a", f"%{count}", count + 1
        given = '"l"(a)'
    transposes = "" if registers else f", {int(left_lines)}"
    is_turned = kind in ("f16", "bf16")  # others only take what lies along the depth
    transposes = f"{transposes}, {int(right_lines)}" if is_turned else ""
    shape = f"m64n{columns}k{depth}.f32.{kind}.{kind}"
    return f"""__device__ __forceinline__ void multiply(float (&d)[{count}], {parameter},
                                         u64 b, int accumulate) {{
    asm volatile("{{\\n\\t"
                 ".reg .pred p;\\n\\t"
                 "setp.ne.b32 p, %{next_ + 1}, 0;\\n\\t"
                 "wgmma.mma_async.sync.aligned.{shape} "
                 "{{{sums}}}, {left}, %{next_}, p, 1, 1{transposes};\\n\\t"
                 "}}"
                 : {bound}
                 : {given}, "l"(b), "r"(accumulate));
}}
"""

"""What a descriptor computes, as lines of a formula: ``v`` is the result of the line before, and an
epilogue's expression is a line of its own."""

from __future__ import annotations

from collections.abc import Callable

STAGES = {
    "Identity": "{v}",
    "Abs": "|{v}|",
    "Square": "({v}) ** 2",
    "Sqrt": "sqrt({v})",
    "Power": "|{v}| ** p",
    "ExpPower": "exp(inner_scale * |{v}| ** p)",
    "PowerLog": "|{v}| ** p * ln|{v}|",
}
OUTER = STAGES | {"Square": "v ** 2", "Power": "v ** outer_p", "Root": "v ** (1 / p)"}
TABLES = " + sum_c tables[c][a_codes[m, c], b_codes[n, c]]"


def formula(descriptor) -> list[str]:
    """The lines for a descriptor, the last of which says what the result is; of a class without a
    formula here its description."""
    for kind in type(descriptor).__mro__:
        if kind.__name__ in _OF:
            return _OF[kind.__name__](descriptor)
    return [descriptor.describe()]


def _finished(first: list[str], epilogues: tuple, result: str) -> list[str]:
    """Right-hand sides one behind the other, and the epilogues' behind them."""
    *before, last = [*first, *(epilogue.expression for epilogue in epilogues)]
    return [*(f"v = {line}" for line in before), f"{result} = {last}"]


def _pairwise(descriptor) -> list[str]:
    sign = "-" if descriptor.operator == "difference" else "*"
    second = "a" if descriptor.symmetric else "b"
    inner = STAGES[type(descriptor.inner).__name__].format(v=f"{second}[n, k] {sign} a[m, k]")
    sums = f"sum_k {inner}" + TABLES * bool(descriptor.categories)
    outer = OUTER[type(descriptor.outer).__name__].format(v="v")
    stages = [sums] if outer == "v" else [sums, outer]
    return _finished(stages, descriptor.epilogue, "out[m, n]")


def _factor(descriptor, x: str = "x", weight: str = "weight", out: str = "out") -> list[str]:
    read, written = "i*c*d + k*d + l", "i*b*d + j*d + l"
    places = "{}[{}, ...]" if descriptor.batch_last else "{}[..., {}]"
    sums = f"sum_k {weight}[i, j, k, l] * {places.format(x, read)}"
    sizes = ", ".join(map(str, descriptor.pattern))
    *lines, last = _finished([sums], descriptor.epilogue, places.format(out, written))
    return [*lines, f"{last}, where a, b, c, d = {sizes}"]


def _chain(descriptor) -> list[str]:
    lines, count = [], len(descriptor.factors)
    for number, factor in enumerate(descriptor.factors, 1):
        x = f"h{number - 1}" if number > 1 else "x"
        out = f"h{number}" if number < count else "out"
        lines += _factor(factor, x, f"weight{number}", out)
    return lines


def _kronecker(descriptor) -> list[str]:
    _, *names = descriptor.operands
    turned = zip(names, descriptor.transposed, strict=True)
    factors = " ⊗ ".join(f"{name}.mT" if flag else name for name, flag in turned)
    multiplied = f"x ({factors})" if descriptor.side == "right" else f"({factors}) x"
    return _finished([multiplied], descriptor.epilogue, "out")


def _sparse(descriptor) -> list[str]:
    return _finished(["sum_c w[r, c] * x[..., c]"], descriptor.epilogue, "out[..., r]")


def _block_sparse(descriptor) -> list[str]:
    a, b = _turned(descriptor)
    first = {
        "sdd": f"{a} {b}, in the blocks that the layout stores",
        "dsd": f"{a} {b}, where a holds the layout's blocks",
        "dds": f"{a} {b}, where b holds the layout's blocks",
    }
    return _finished([first[descriptor.mode]], descriptor.epilogue, "out")


def _scaled(descriptor) -> list[str]:
    a, b = _turned(descriptor)
    sparse = "a" if descriptor.mode == "dsd" else "b"
    return [f"out = (scale_a * {a}) (scale_b * {b}), where {sparse} holds the layout's blocks"]


def _turned(descriptor) -> tuple[str, str]:
    """a and b, each transposed or not."""
    flags = descriptor.transpose_a, descriptor.transpose_b
    a, b = (name + ".mT" * flag for name, flag in zip("ab", flags, strict=True))
    return a, b


def _softmax(descriptor) -> list[str]:
    return ["out = softmax over each row's stored blocks of (x * scale + scores and masks)"]


def _attention(descriptor) -> list[str]:
    return ["out = softmax(score(q k.mT * scale)) v, over the blocks that the layout stores"]


_OF: dict[str, Callable] = {
    "Pairwise": _pairwise,
    "KroneckerSparse": _factor,
    "KroneckerSparseChain": _chain,
    "KroneckerProduct": _kronecker,
    "SparseMatmul": _sparse,
    "BlockSparseMatmul": _block_sparse,
    "BlockSparseScaledMatmul": _scaled,
    "BlockSparseSoftmax": _softmax,
    "BlockSparseAttention": _attention,
}

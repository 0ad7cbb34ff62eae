"""Products of float8 with block-sparse matrices, and what makes float8."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib.blocksparse import quantize, scaled_dds, scaled_dsd
from kernlib.families.blocksparse.layout import Layout
from tests.contract import plain
from tests.contract.cases import Context, Entry
from tests.contract.of_blocksparse import KINDS as KINDS_OF_PRODUCTS
from tests.contract.of_blocksparse import NAMES as NAMES_OF_PRODUCTS
from tests.contract.of_blocksparse import a_layout
from tests.families.blocksparse.scaled import cases

F8 = torch.float8_e4m3fn
KINDS = KINDS_OF_PRODUCTS | {"out_dtype": "any", "dim": "any"}
NAMES = (*NAMES_OF_PRODUCTS, "scale_a", "scale_b", "out_dtype", "dim", "Dimension", "slots")
FUNCTIONS = {"dsd": scaled_dsd, "dds": scaled_dds}


def with_scales(c: Context, mode: str, layout: Layout, turned) -> list:
    """a, b and their scales, on the context's device."""
    torch.manual_seed(c.random.randrange(1 << 30))
    batches = c.random.choice([((), ()), ((), ()), ((2,), ()), ((3, 1), (2,))])
    made = cases.operands(layout.to("cpu"), mode, turned, batches, c.random.choice([1, 5]))
    dense = 3 if mode == "dsd" else 2
    if c.random.random() < 0.3:
        made[dense] = torch.tensor(0.5)
    return [t.to(c.device) for t in made]


def of_mode(mode: str):
    first, second = {"dsd": ("values", "b"), "dds": ("a", "values")}[mode]

    def arguments(c: Context) -> dict:
        layout, turned = a_layout(c), tuple(c.random.random() < 0.5 for _ in range(2))
        a, b, scale_a, scale_b = with_scales(c, mode, layout, turned)
        given = {first: a, second: b, "layout": layout, "scale_a": scale_a, "scale_b": scale_b}
        given |= {"transpose_a": turned[0], "transpose_b": turned[1]}
        if c.random.random() < 0.5:
            given["out_dtype"] = c.random.choice([torch.bfloat16, torch.float16])
        if c.random.random() < 0.4:
            shape = cases.formula(layout.to("cpu"), mode, turned, *(
                t.cpu() for t in (a, b, scale_a, scale_b))).shape  # fmt: skip
            dtype = given.get("out_dtype", torch.bfloat16)
            given["out"] = torch.zeros(shape, dtype=dtype, device=c.device)
        return given

    def wanted(layout, scale_a, scale_b, transpose_a=False, transpose_b=False,
               out_dtype=torch.bfloat16, out=None, **rest):  # fmt: skip
        plain.flag(transpose_a, transpose_b)
        if out_dtype not in (torch.bfloat16, torch.float16):
            raise TypeError("out_dtype")
        turned = transpose_a, transpose_b
        given = rest.pop(first), rest.pop(second), scale_a, scale_b
        return product(mode, layout, turned, given, out_dtype, out)

    return arguments, wanted


def product(mode, layout, turned, given, dtype, out):
    """In float64, of what has the right kinds and shapes."""
    if type(layout) is not Layout:
        raise TypeError("layout")
    a, b, scale_a, scale_b = given
    for t, kind in ((a, F8), (b, F8), (scale_a, torch.float32), (scale_b, torch.float32)):
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.dtype != kind:
            raise TypeError("no dense tensor of its kind")
    if len({t.device for t in given}) != 1:  # copies on the host, but for those of no memory
        raise ValueError("devices differ")
    stored = 0 if mode == "dsd" else 1
    values, dense = given[stored], given[1 - stored]
    slots, columns = given[2 + stored], given[3 - stored]
    inner = layout.heads is not None
    if values.dim() < 3 or tuple(values.shape[-3:]) != (layout.capacity, *layout.block):
        raise ValueError("values")
    if dense.dim() < 2 + inner or (inner and dense.shape[-3] not in (1, layout.heads)):
        raise ValueError("heads")
    if slots.shape != values.shape[:-2]:
        raise ValueError("slots")
    layout = layout.to("cpu")
    given = [t.detach().cpu() for t in given]
    y = cases.formula(layout, mode, turned, *given[:2], *(
        torch.ones(()) if i == 1 - stored else t for i, t in enumerate(given[2:])))  # fmt: skip
    columns = columns.detach().cpu().double()
    columns.expand(*y.shape[:-2], y.shape[-1 if mode == "dsd" else -2])
    y = y * (columns.unsqueeze(-2 if mode == "dsd" else -1) if columns.dim() else columns)
    if out is not None and (tuple(out.shape) != tuple(y.shape) or out.dtype != dtype):
        raise ValueError("out")
    return y


def described(c: Context) -> dict:
    mode = c.random.choice([*FUNCTIONS])
    layout, turned = a_layout(c), tuple(c.random.random() < 0.5 for _ in range(2))
    made = kl.BlockSparseScaledMatmul(
        mode, transpose_a=turned[0], transpose_b=turned[1], out_dtype="float16"
    )
    a, b, scale_a, scale_b = with_scales(c, mode, layout, turned)
    return {"descriptor": made, "layout": layout, "a": a, "b": b, "scale_a": scale_a,
            "scale_b": scale_b}  # fmt: skip


def wanted_described(descriptor, layout, a, b, scale_a, scale_b):
    if type(descriptor) is not kl.BlockSparseScaledMatmul:
        raise TypeError("no product of these")
    turned = descriptor.transpose_a, descriptor.transpose_b
    given = a, b, scale_a, scale_b
    return product(descriptor.mode, layout, turned, given, torch.float16, None)


def descriptor(c: Context) -> dict:
    return {"mode": c.random.choice([*FUNCTIONS]), "transpose_a": c.random.random() < 0.5,
            "transpose_b": False, "out_dtype": "bfloat16"}  # fmt: skip


def quantized(c: Context) -> dict:
    return {"x": c.randn(3, 4, 5, dtype=c.float_type()), "dim": c.random.choice([-1, (-2, -1)])}


def call_quantize(x, dim):
    return quantize(x, dim)[1]


def entry(call, arguments, positional, wanted=None, weight=1, kinds=None) -> Entry:
    return Entry(call, arguments, positional, KINDS | (kinds or {}), wanted, NAMES, weight)


ENTRIES = {
    "kernlib.run_kernel block-sparse float8": entry(kl.run_kernel, described, 6, wanted_described),
    "kernlib.BlockSparseScaledMatmul": entry(
        kl.BlockSparseScaledMatmul, descriptor, 1, kinds={"out_dtype": "text"}
    ),
    "kernlib.blocksparse.quantize": entry(call_quantize, quantized, 2),
}
ENTRIES |= {
    f"kernlib.blocksparse.scaled_{mode}": entry(function, of_mode(mode)[0], 5, of_mode(mode)[1], 2)
    for mode, function in FUNCTIONS.items()
}

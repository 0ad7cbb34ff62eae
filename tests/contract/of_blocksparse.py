"""Block-sparse matrices: their products, layouts and what makes layouts."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from tests.contract import plain
from tests.contract.cases import Context, Entry
from tests.families.blocksparse import cases

KINDS = {
    "descriptor": "descriptor", "layout": "any", "transpose_a": "flag", "transpose_b": "flag",
    "epilogue": "epilogue", "precision": "text", "scale": "number", "beta": "number",
    "debug": "flag", "mode": "text", "block": "any", "capacity": "int", "device": "device",
    "rows": "int", "cols": "int", "length": "int", "window": "int", "size": "int",
    "density": "number", "heads": "int", "n_heads": "int", "seed": "int", "stride": "int",
    "attention": "text", "numverts": "int", "vertsize": "int", "k": "int", "grid": "any",
}  # fmt: skip
NAMES = (
    "layout", "a", "b", "values", "out", "x", "y", "bias", "beta", "scale", "mode", "transpose_a",
    "transpose_b", "epilogue", "epilogues", "precision", "descriptor", "dimensions", "mask",
    "block", "capacity", "device", "rows", "cols", "heads", "grid", "n_heads", "length", "window",
    "size", "density", "seed", "stride", "attention", "numverts", "vertsize", "k", "scores",
    "needs y", "tensors", "header", "bsr", "block_mask", "dense", "layouts",
)  # fmt: skip
MASKS = (
    [[1, 0, 1], [0, 1, 0]],
    [[0, 0], [0, 0]],
    [[[1, 0], [0, 1]], [[0, 0], [0, 1]]],
)


HEADS = Layout(MASKS[2], (16, 32), 4)


def a_layout(c: Context) -> Layout:
    mask = torch.tensor(c.random.choice(MASKS))
    block = c.random.choice([16, (16, 32)])
    return Layout(mask, block, int(mask.sum()) + c.random.choice([0, 1]), c.device)


# Products.


def operands(c: Context, mode: str, layout: Layout, turned, dtype) -> list:
    ends = cases.shapes(mode, layout, turned, size=c.random.choice([1, 5]))
    leads = c.random.choice([((), ()), ((), ()), ((2,), ()), ((3, 1), (2,))])
    return [c.randn(*lead, *end, dtype=dtype) for lead, end in zip(leads, ends, strict=True)]


def of_mode(mode: str):
    """What makes arguments of a mode's function, and what it should give."""
    first, second = {"sdd": ("a", "b"), "dsd": ("values", "b"), "dds": ("a", "values")}[mode]

    def arguments(c: Context) -> dict:
        layout, dtype = a_layout(c), c.float_type()
        turned = tuple(c.random.random() < 0.5 for _ in range(2))
        a, b = operands(c, mode, layout, turned, dtype)
        given = {first: a, second: b, "layout": layout}
        given |= {"transpose_a": turned[0], "transpose_b": turned[1]}
        y = cases.formula(mode, layout, a, b, turned)
        if c.random.random() < 0.3:
            given |= {
                "epilogue": (kl.Scale(),),
                "scale": c.random.choice([0.5, 2, torch.tensor(1.5)]),
            }
        elif c.random.random() < 0.4:
            given["epilogue"] = kl.Add()
            given["y"] = c.randn(*y.shape[-1:], dtype=dtype)
            given["beta"] = c.random.choice([0.0, 1, 0.5, torch.tensor(2.0)])
        elif c.random.random() < 0.2:
            given["precision"] = c.random.choice([None, "fp32"])
        if c.random.random() < 0.4:
            given["out"] = torch.zeros(y.shape, dtype=dtype, device=c.device)
        return given

    def wanted(layout, transpose_a=False, transpose_b=False, **rest):
        plain.flag(transpose_a, transpose_b)
        return product(mode, layout, rest.pop(first), rest.pop(second),
                       (transpose_a, transpose_b), **rest)  # fmt: skip

    return arguments, wanted


def product(mode, layout, a, b, turned, *, epilogue=(), precision=None, out=None, **values):
    """In float64, of what are matrices with values and of one kind."""
    if type(layout) is not Layout or precision not in (None, "fp32", "tf32", "bf16"):
        raise TypeError("no layout, or no precision")
    layout = layout.to("cpu")
    plain.same_kind(a, b)
    y = formula(mode, layout, plain.wide(a), plain.wide(b), turned)
    epilogue = epilogue if isinstance(epilogue, (tuple, list)) else (epilogue,)
    known = [name for part in epilogue for name in part.parameters]
    if sorted(known) != sorted(values):
        raise ValueError("parameters")
    y = finished(mode, layout, y, epilogue, values, a)
    if out is not None and (
        tuple(out.shape) != tuple(y.shape) or (out.dtype, out.device) != (a.dtype, a.device)
    ):
        raise ValueError("out")
    return y


def formula(mode, layout, a, b, turned):
    """That of the tests of the family, where shapes are right."""
    inner = layout.heads is not None
    for t, letter in zip((a, b), mode[1:], strict=True):
        if letter == "s":
            if t.dim() < 3 or tuple(t.shape[-3:]) != (layout.capacity, *layout.block):
                raise ValueError("values")
        elif t.dim() < 2 + inner or (inner and t.shape[-3] not in (1, layout.heads)):
            raise ValueError("heads")
    y = cases.formula(mode, layout, a, b, turned)
    rows, cols = layout.shape
    if mode == "sdd" and a.shape[-1 if turned[0] else -2] != rows:
        raise ValueError("rows")
    if mode == "sdd" and b.shape[-2 if turned[1] else -1] != cols:
        raise ValueError("columns")
    return y


def finished(mode, layout, y, epilogue, values, a):
    for part in epilogue:
        if isinstance(part, kl.Scale):
            y = y * scalar(values[part.parameter])
        elif isinstance(part, kl.Add):
            plain.same_kind(a, values["y"])
            share, added = scalar(values["beta"]), plain.wide(values["y"])
            y = y if share == 0 else y + share * added.expand(y.shape)
        elif isinstance(part, kl.Relu):
            y = y.relu()
        elif isinstance(part, kl.Gelu):
            y = torch.nn.functional.gelu(y, approximate=part.approximate)
        else:
            raise TypeError("an epilogue of other cases")
    used = len(cases.places(layout))
    if mode == "sdd":
        y[..., used:, :, :] = 0
    return y


def scalar(value):
    if isinstance(value, torch.Tensor) and (value.dim() or value.layout != torch.strided):
        raise ValueError("a number has no dimensions")
    return plain.number(value)


def described(c: Context) -> dict:
    mode = c.random.choice(cases.MODES)
    turned = tuple(c.random.random() < 0.5 for _ in range(2))
    layout, dtype = a_layout(c), c.float_type()
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1])
    a, b = operands(c, mode, layout, turned, dtype)
    given = {"descriptor": made, "layout": layout, "a": a, "b": b}
    if c.random.random() < 0.4:
        shape = cases.formula(mode, layout, a, b, turned).shape
        given["out"] = torch.zeros(shape, dtype=dtype, device=c.device)
    return given


def wanted_described(descriptor, layout, a, b, out=None):
    if type(descriptor) is not BlockSparseMatmul:
        raise TypeError("no product of these")
    turned = descriptor.transpose_a, descriptor.transpose_b
    return product(descriptor.mode, layout, a, b, turned, out=out)


def descriptor(c: Context) -> dict:
    return {"mode": c.random.choice(cases.MODES), "transpose_a": c.random.random() < 0.5,
            "transpose_b": False, "epilogue": (), "precision": None}  # fmt: skip


# Layouts.


def layout(c: Context) -> dict:
    mask = torch.tensor(c.random.choice(MASKS))
    mask = c.random.choice([mask, mask.bool(), mask.tolist()])
    return {"mask": mask, "block": c.random.choice([16, (32, 16)]),
            "capacity": c.random.choice([None, 4]), "device": c.device}  # fmt: skip


def call_layout(mask, block, capacity=None, device=None):
    return Layout(mask, block, capacity, device).mask()


def indices(c: Context) -> dict:
    rows, cols = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    given = {"rows": rows, "cols": cols, "grid": (2, 3), "block": 16}
    if c.random.random() < 0.4:
        given |= {"heads": torch.tensor([0, 1, 0]), "n_heads": 2}
    return given | {"capacity": 3, "device": c.device}


def call_indices(rows, cols, grid, block, **rest):
    return Layout.from_indices(rows, cols, grid, block, **rest).mask()


def moved(c: Context) -> dict:
    lead = c.random.choice([(), (2, 3)])
    return {"values": c.randn(*lead, HEADS.capacity, *HEADS.block, dtype=c.float_type())}


def of_any_type(t) -> torch.Tensor:
    """The values of a dense tensor, which a layout moves whatever they are."""
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.is_nested:
        raise TypeError("no dense tensor")
    return t.detach().clone()


def heads_beside(t) -> Layout:
    """The layout where a tensor lies, or on the CPU."""
    on_gpu = isinstance(t, torch.Tensor) and t.device.type == "cuda"
    return HEADS.to("cuda") if on_gpu else HEADS


def call_moved(values):
    return heads_beside(values).to_dense(values)


def call_back(dense):
    return heads_beside(dense).to_blocks(dense)


def wanted_moved(values):
    values = of_any_type(values)
    if values.dim() < 3 or tuple(values.shape[-3:]) != (HEADS.capacity, *HEADS.block):
        raise ValueError("values")
    return cases.matrix(HEADS, values)


def back(c: Context) -> dict:
    lead, heads = c.random.choice([(), (2, 3)]), c.random.choice([1, HEADS.heads])
    return {"dense": c.randn(*lead, heads, *HEADS.shape, dtype=c.float_type())}


def wanted_back(dense):
    dense = of_any_type(dense)
    return cases.blocks(HEADS, dense.expand(*dense.shape[:-3], HEADS.heads, *HEADS.shape))


def update(c: Context) -> dict:
    return {"mask": torch.tensor([[0, 1, 1], [1, 0, 0]])}


def call_update(mask):
    return Layout(MASKS[0], 16, 6).update_(mask).mask()


def state(c: Context) -> dict:
    header, tensors = a_layout(c).state()
    return {"header": header} | tensors


def call_state(header=None, **tensors):
    return Layout.from_state(header, tensors).mask()


def bsr(c: Context) -> dict:
    return {"bsr": c.randn(32, 48).to_sparse_bsr((16, 16))}


def call_bsr(bsr):
    made, values = Layout.from_bsr(bsr)
    return made.to_dense(values)


def sized(**fixed):
    """Arguments of a builder, with heads or without."""

    def arguments(c: Context) -> dict:
        heads = {"heads": 2} if c.random.random() < 0.5 else {}
        return fixed | {"block": c.random.choice([16, 32])} | heads | {"device": c.device}

    return arguments


def call_of(builder):
    return lambda **given: builder(**given).mask()


def call_top_k(scores, block, k):
    return builders.top_k(scores, block, k).mask()


def top_k(c: Context) -> dict:
    heads = c.random.choice([(), (2,)])
    return {"scores": c.randn(*heads, 3, 4), "block": 16, "k": 2}


def entry(call, arguments, positional, wanted=None, weight=1) -> Entry:
    return Entry(call, arguments, positional, KINDS, wanted, NAMES, weight)


FUNCTIONS = {"sdd": sdd, "dsd": dsd, "dds": dds}
BUILDERS = {
    "dense": sized(rows=64, cols=96),
    "causal": sized(length=96),
    "sliding_window": sized(length=96, window=20),
    "block_diagonal": sized(length=96, size=32),
    "random": sized(rows=64, cols=96, density=0.5, seed=3),
    "fixed": sized(length=128, stride=64, attention="bidirectional", numverts=1, vertsize=1),
}
ENTRIES = {
    "kernlib.run_kernel blocksparse": entry(kl.run_kernel, described, 4, wanted_described, 4),
    "kernlib.BlockSparseMatmul": entry(BlockSparseMatmul, descriptor, 1, weight=2),
    "kernlib.blocksparse.Layout": entry(call_layout, layout, 2, weight=3),
    "kernlib.blocksparse.Layout from_indices": entry(call_indices, indices, 4, weight=2),
    "kernlib.blocksparse.Layout to_dense": entry(call_moved, moved, 1, wanted_moved, 2),
    "kernlib.blocksparse.Layout to_blocks": entry(call_back, back, 1, wanted_back, 2),
    "kernlib.blocksparse.Layout update_": entry(call_update, update, 1),
    "kernlib.blocksparse.Layout from_state": entry(call_state, state, 0, weight=2),
    "kernlib.blocksparse.Layout from_bsr": entry(call_bsr, bsr, 1),
    "kernlib.blocksparse.top_k": entry(call_top_k, top_k, 2),
}
ENTRIES |= {
    f"kernlib.blocksparse.{mode}": entry(function, of_mode(mode)[0], 3, of_mode(mode)[1], 3)
    for mode, function in FUNCTIONS.items()
}
ENTRIES |= {
    f"kernlib.blocksparse.{name}": entry(call_of(getattr(builders, name)), arguments, 0)
    for name, arguments in BUILDERS.items()
}

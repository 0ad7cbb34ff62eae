"""Calls of block-sparse operations: which kernels are compiled for some, and launches of others on
GPUs that exist only by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product

import torch

import kernlib as kl
from kernlib import blocksparse
from kernlib.blocksparse import Layout
from tests.architecture.golden_cases import ARCHS, HALVES, compiled, meta
from tests.support.fakes import OnGpu, OnSecondGpu

HALF, BFLOAT, SINGLE, BYTE = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
EPILOGUES = {
    "plain": (),
    "ends": (kl.Scale(), kl.Gelu()),
    "sum": (kl.Add(),),
    "gated": (kl.Gate(), kl.Add()),
}


def specs() -> Iterator[tuple[str, Callable]]:
    """Every variant of some descriptors, and calls whose gradient is recorded."""
    for mode, epilogue, dtype, arch in VARIANTS:
        descriptor = kl.BlockSparseMatmul(mode, epilogue=EPILOGUES[epilogue], precision="tf32")
        name = f"{mode} {epilogue} {dtype} {arch}"
        yield name, partial(compiled, descriptor, (arch,), dtypes=dtype)
    for mode in ("dsd", "dds"):
        scaled = kl.BlockSparseScaledMatmul(mode, transpose_b=True)
        yield f"scaled {mode}", partial(compiled, scaled)
    for options in ({"causal": True}, {"rpe": True, "attn_mask": "mul"}):
        softmax = kl.BlockSparseSoftmax(**options)
        yield f"softmax {options}", partial(compiled, softmax, dtypes=(SINGLE, *HALVES))
    for name, options in DESCRIBED.items():
        attention = kl.BlockSparseAttention(**options)
        archs = ARCHS if name == "plain" else ARCHS[1:2]
        yield f"attention {name}", partial(compiled, attention, archs, dtypes=BFLOAT)
    layout = Layout(_mask((8, 8)), 64).to("meta")
    for dtype in (SINGLE, HALF):
        values = meta(layout.capacity, 64, 64, dtype=dtype, grad=True)
        dense = meta(512, 2048, dtype=dtype, grad=True)
        tensors = layout, values, dense
        yield (
            f"dsd {dtype}, recorded",
            partial(compiled, kl.BlockSparseMatmul("dsd"), specs=tensors),
        )
        softmax = kl.BlockSparseSoftmax()
        yield f"softmax {dtype}, recorded", partial(compiled, softmax, specs=(layout, values))
    q = meta(2, 4, 512, 64, dtype=HALF, grad=True)
    attention = kl.BlockSparseAttention(causal=True)
    yield "attention, recorded", partial(compiled, attention, specs=(layout, q, q, q))


VARIANTS = (
    ("sdd", "plain", HALF, "sm_90a"),
    ("sdd", "gated", SINGLE, "sm_90a"),
    ("dsd", "ends", HALF, "sm_90a"),
    ("dds", "sum", SINGLE, "sm_90a"),
    ("dds", "plain", BFLOAT, "sm_120"),
)
DESCRIBED = {
    "plain": {},
    "causal": {"causal": True, "window": True, "lengths": True},
    "dropout": {"dropout": True},
    "score": {
        "score": "v * slope + bias",
        "mask": "col <= row + 5",
        "captured": {"slope": ("head",), "bias": ("batch", "row")},
    },
}


# On a GPU that exists only by name.


def tensor(*shape: int, dtype=SINGLE, kind: type = OnGpu) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype).as_subclass(kind)  # whose values nobody reads


def _mask(grid: tuple[int, int]) -> torch.Tensor:
    """A third of all blocks."""
    rows, cols = (torch.arange(size) for size in grid)
    return (rows[:, None] + cols) % 3 == 0


@lru_cache
def layout(block, grid: tuple[int, int], heads: int | None = None, kind: type = OnGpu) -> Layout:
    mask = _mask(grid)
    host = Layout(mask if heads is None else mask.expand(heads, *grid), block)
    return Layout.from_layout(host.text, [t.as_subclass(kind) for t in host.tensors])


def operands(mode: str, s: Layout, size: int, turned=(False, False), lead=(), dtype=SINGLE):
    """a and b of a product of a mode, where the layout ``s`` is."""
    place = {"dtype": dtype, "kind": type(s.tensors[0])}
    heads = () if s.heads is None else (s.heads,)
    rows, cols = s.shape
    shapes = {
        "sdd": ((rows, size), (size, cols)),
        "dsd": (None, (rows if turned[0] else cols, size)),
        "dds": ((size, cols if turned[1] else rows), None),
    }[mode]
    for shape, across in zip(shapes, turned, strict=True):
        if shape is None:
            yield tensor(*lead, s.capacity, *s.block, **place)
        else:
            yield tensor(*lead, *heads, *(shape[::-1] if across else shape), **place)


def matmul(
    mode, block, grid, size, dtype, turned="", heads=None, lead=(), kind=OnGpu, **options
) -> Callable:
    """A product of a mode, whose operands that ``turned`` names are transposed."""
    s, flags = layout(block, grid, heads, kind), ("a" in turned, "b" in turned)
    a, b = operands(mode, s, size, flags, lead, dtype)
    options |= {"transpose_a": flags[0], "transpose_b": flags[1]}
    return lambda: getattr(blocksparse, mode)(a, b, s, **options)


SMALL, GRID = (4, 6), (32, 32)
SPMM = {  # block, grid, columns of the dense operand, dtype
    "decode": (16, SMALL, 1, HALF),
    "portable": (64, SMALL, 64, SINGLE),
    "portable (32, 64)": ((32, 64), SMALL, 64, BFLOAT),
    "parts": (32, GRID, 8, SINGLE),
    "narrow": (32, GRID, 2048, HALF),
    "hopper": (64, SMALL, 2048, HALF),
    "hopper in order": (128, GRID, 2048, BFLOAT),
    "hopper_words": (64, GRID, 256, SINGLE),
    "hopper_words in order": (64, GRID, 2048, SINGLE),
}
SDD = {
    "sampled": (16, SMALL, 8, SINGLE),
    "parts": (16, SMALL, 256, HALF),
    "hopper": (64, SMALL, 64, HALF),
    "hopper (128, 64)": ((128, 64), SMALL, 256, BFLOAT),
    "tiles": (64, GRID, 2048, HALF),
    "stationary": (16, (128, 128), 64, HALF),
}


def launches() -> dict[str, Callable]:
    return {**products(), **scaled(), **softmaxes(), **attentions(), **layouts()}


def products() -> dict[str, Callable]:
    calls = {}
    for mode, kinds in (("dsd", SPMM), ("dds", SPMM), ("sdd", SDD)):
        for name, sizes in kinds.items():
            for turned in ("", "a", "b") if mode == "sdd" else ("", "ab"):
                calls[f"{mode} {name} {turned}"] = matmul(mode, *sizes, turned=turned)
        for name, sizes in (("half", (64, GRID, 256, HALF)), ("float32", (64, GRID, 256, SINGLE))):
            calls[f"{mode} {name} on sm_86"] = matmul(mode, *sizes, kind=OnSecondGpu)
            calls[f"{mode} {name} of heads"] = matmul(mode, *sizes, heads=3, lead=(2,))
        y = tensor(*((341, 64, 64) if mode == "sdd" else (2048, 2048)), dtype=HALF)
        for name, options in {
            "tf32": (SINGLE, {"precision": "tf32"}),
            "ends": (HALF, {"epilogue": EPILOGUES["ends"], "scale": 0.5}),
            "sum": (HALF, {"epilogue": kl.Add(), "y": y, "beta": 2.0}),
            "sum into": (HALF, {"epilogue": kl.Add(), "y": y, "beta": tensor(1)[0], "out": y}),
            "into a view": (HALF, {"out": y.mT.contiguous().mT}),
        }.items():
            dtype, options = options
            calls[f"{mode} {name}"] = matmul(mode, 64, GRID, 2048, dtype, **options)
    for mode in ("dsd", "dds"):
        biased = {"epilogue": (kl.Bias(), kl.Gelu()), "bias": tensor(2048, dtype=HALF)}
        calls[f"{mode} biased"] = matmul(mode, 64, GRID, 2048, HALF, **biased)
    return calls


def scaled() -> dict[str, Callable]:
    """Of blocks that kernels take, and of others."""
    calls = {}
    for block, mode, flag in product((128, 64), ("dsd", "dds"), (False, True)):
        s = layout(block, (4, 4))
        flags = {"transpose_a": False, "transpose_b": flag or mode == "dds"}
        a, b = operands(mode, s, 32, tuple(flags.values()), dtype=BYTE)
        scales = [tensor(s.capacity), tensor(32) if flag else tensor(1)[0]]
        scales = scales if mode == "dsd" else scales[::-1]
        call = partial(getattr(blocksparse, f"scaled_{mode}"), a, b, s, *scales, **flags)
        calls[f"scaled {mode} {block} {flag}"] = call
    return calls


def softmaxes() -> dict[str, Callable]:
    calls = {}
    for block, heads, dtype in (
        (16, None, SINGLE), (128, None, HALF), ((32, 64), 2, HALF), (128, 2, SINGLE)
    ):  # fmt: skip
        s = layout(block, (8, 8), heads)
        rows, cols = s.shape
        x = tensor(3, s.capacity, *s.block, dtype=dtype)
        key, attn = tensor(3, cols, dtype=dtype), tensor(rows, cols, dtype=dtype)
        beside = (heads,) if heads else ()
        name = f"softmax {dtype} {block} {heads}"
        calls[name] = partial(blocksparse.softmax, x, s, 0.5)
        calls[f"{name} causal"] = partial(
            blocksparse.softmax, x, s, tensor(1)[0], causal=True, out=x
        )
        calls[f"{name} masked"] = partial(
            blocksparse.softmax, x, s, rpe=tensor(*beside, rows, cols, dtype=dtype),
            key_padding_mask=key > 0, attn_mask=attn, attn_mask_mode="mul",
        )  # fmt: skip
    return calls


def attentions() -> dict[str, Callable]:
    calls, lengths = {}, torch.tensor([100, 256]).as_subclass(OnGpu)
    window = {"causal": True, "window": (100, None), "q_lengths": lengths}
    scored = {
        "score": "v * slope + bias",
        "mask": "col <= row + 5",
        "axes": {"slope": "head", "bias": ("row", "col")},
        "slope": tensor(4),
        "bias": tensor(256, 256, dtype=HALF),
    }
    for dtype, block, features in product(HALVES, (64, 32), (64, 128, 40)):
        if dtype == BFLOAT and block == 32:
            continue
        for kind in (OnGpu, OnSecondGpu):
            s = layout(block, (256 // block,) * 2, kind=kind)
            q, k, v = (tensor(2, n, 256, features, dtype=dtype, kind=kind) for n in (4, 2, 2))
            name = f"attention {dtype} {block} {features} {kind.__name__}"
            calls[name] = partial(blocksparse.attention, q, k, v, s)
            if kind is OnSecondGpu or features != 64 or dtype != HALF:
                continue
            for more, options in {
                "windowed": window,
                "scored": scored,
                "dropped": {"dropout_p": 0.1, "seed": 3, "scale": 0.25, "return_lse": True},
            }.items():
                calls[f"{name} {more}"] = partial(blocksparse.attention, q, k, v, s, **options)
    return calls


def layouts() -> dict[str, Callable]:
    """Made and written by kernels, without a look at what they hold."""
    mask = torch.ones(2, 40, 50, dtype=torch.bool).as_subclass(OnGpu)
    indices = [torch.arange(30).as_subclass(OnGpu) for _ in range(2)]
    scores = tensor(40, 50)
    written = layout(32, (40, 50), 2)
    return {
        "layout of a mask": lambda: Layout(mask, 32, 4000),
        "layout of indices": lambda: Layout.from_indices(*indices, (40, 50), 32),
        "layout of indices of heads": lambda: Layout.from_indices(
            *indices, (40, 50), 64, indices[0].int(), n_heads=30
        ),
        "layout of scores": lambda: blocksparse.top_k(scores, 16, 3),
        "layout written": lambda: written.write_(mask),
        "layout turned": lambda: written.transpose(),
    }


def tunable() -> dict[str, tuple]:
    """Descriptors, and tensors of a call of each that can be tuned."""
    calls = {}
    for mode, dtype, block in (("dsd", HALF, 64), ("dds", SINGLE, (32, 64)), ("sdd", BFLOAT, 128)):
        s = layout(block, GRID)
        tensors = operands(mode, s, 2048, dtype=dtype)
        calls[f"{mode} {dtype} {block}"] = (kl.BlockSparseMatmul(mode), s, *tensors)
    s = layout(64, (4, 4))
    calls["softmax"] = kl.BlockSparseSoftmax(causal=True), s, tensor(s.capacity, 64, 64)
    for kind in (OnGpu, OnSecondGpu):
        s, q = layout(64, (4, 4), kind=kind), tensor(1, 2, 256, 64, dtype=HALF, kind=kind)
        calls[f"attention {kind.__name__}"] = (kl.BlockSparseAttention(causal=True), s, q, q, q)
    s = layout(128, (4, 4))
    a, b = operands("dsd", s, 32, (False, True), dtype=BYTE)
    descriptor = kl.BlockSparseScaledMatmul("dsd", transpose_b=True)
    return calls | {"scaled": (descriptor, s, a, b, tensor(s.capacity), tensor(1)[0])}

"""Kernels of attention that are none: launches on the tests' fake GPUs, computed by the formula on
what their parameter blocks say lies in memory, and nothing else."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from kernlib.families.blocksparse.attention import plans
from kernlib.families.blocksparse.contents import bits
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.attention import choose
from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    AttentionGradient,
    Score,
)
from kernlib.families.blocksparse.lowering.attention.score_source import SCALARS, pointers
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import NUMBER, Lowered, Step
from kernlib.runtime import driver
from tests.families.blocksparse.attention.cases import F16, LOWEST, Shape, formula
from tests.support.fakes import Gpus, OnGpu, at


class Kernels:
    """What stands for lowering and for launches. ``problems`` are those lowered, in order, and
    ``function`` what becomes of a logit: of captured tensors as a dict by place."""

    def __init__(self, monkeypatch, gpus: Gpus):
        self.problems, self.function, self.numbers = [], None, []
        self._by_spec: dict[str, tuple] = {}
        monkeypatch.setattr(choose, "takes", lambda problem, arch: True)
        monkeypatch.setattr(choose, "lower", self._lower)
        monkeypatch.setattr(choose, "candidates", lambda problem, arch: [{"kind": "host"}])
        monkeypatch.setattr(choose, "variants", self._variants)
        noted = gpus.launch

        def launch(config, function, block, extra):
            spec = gpus.loads[int(function) - 1].what
            self._run(*self._by_spec[spec], block)
            return noted(config, function, block, extra)

        monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launch)

    def _variants(self, score: Score, dtypes: tuple[str, ...], arch: str) -> list[KernelSpec]:
        return [KernelSpec("blocksparse", f"{score} {name}", "entry", 128, 0) for name in dtypes]

    def _lower(self, problem: Attention | AttentionGradient, arch: str, count: int, choice=None):
        self.problems.append(problem)
        if isinstance(problem, Attention):
            names, score, what = plans.OPERANDS, problem.score, "attention"
        else:
            score, what = problem.attention.score, "attention gradient"
            collected = (f"collected{place}" for place in range(len(problem.collected)))
            names = (*plans.GRADIENT_OPERANDS, *collected)
        names = (*names, *pointers(score))
        description = f"blocksparse {what} {len(self.problems)}"
        spec = KernelSpec("blocksparse", description, "entry", 128, 0, description=description)
        self._by_spec[description] = problem, names
        places = tuple((name, 0) for name in names)
        return Lowered((Step(spec, (1, 1), b"", places, len(SCALARS)),))

    def _run(self, problem, names: tuple, block: int) -> None:
        parameters = ctypes.c_void_p.from_address(block).value
        layout = f"@{len(names)}P"
        size = struct.calcsize(layout)
        raw = (ctypes.c_char * (size + struct.calcsize("<" + NUMBER * 5))).from_address(parameters)
        addresses = dict(zip(names, struct.unpack_from(layout, raw), strict=True))
        pairs = struct.unpack_from("<" + NUMBER * 5, raw, size)
        self.numbers.append(dict(zip(SCALARS, zip(pairs[::2], pairs[1::2], strict=True),
                                     strict=True)))  # fmt: skip
        if isinstance(problem, Attention):
            _forward(problem, addresses, self.numbers[-1], self.function)
        else:
            _backward(problem, addresses, self.numbers[-1], self.function)


def _forward(problem: Attention, addresses: dict, numbers: dict, function: Callable | None) -> None:
    tensors = _read(problem, addresses)
    out, lse = _computed(problem, addresses, numbers, function, *tensors)
    at_out = _seen(addresses["out"], problem.out, problem, "queries", problem.values)
    at_out.copy_(out)
    if addresses["lse"]:
        _rows(addresses["lse"], problem, torch.float32).copy_(lse)


@torch.enable_grad()
def _backward(problem: AttentionGradient, addresses, numbers, function) -> None:
    attention = problem.attention
    leaves = [t.double().requires_grad_() for t in _read(attention, addresses)[:3]]
    captured = [t.requires_grad_(t.is_floating_point()) for t in _captured(attention, addresses)]
    out, lse = _computed(attention, addresses, numbers, function, *leaves, captured)
    given = _seen(addresses["out"], attention.out, attention, "queries", attention.values)
    torch.testing.assert_close(given.double(), out.detach(), rtol=1e-2, atol=2e-2)
    logs = _rows(addresses["lse"], attention, torch.float32)
    torch.testing.assert_close(logs.double(), lse.detach(), rtol=1e-3, atol=1e-3)
    grad = _seen(addresses["grad"], problem.grad, attention, "queries", attention.values)
    results, grads = [out], [grad.double()]
    assert problem.has_grad_lse == bool(addresses["grad_lse"])
    if problem.has_grad_lse:
        results.append(torch.where(lse == LOWEST, 0.0, lse))
        grads.append(_rows(addresses["grad_lse"], attention, torch.float32).double())
    made = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    for name, need, operand, t in zip(
        ("dq", "dk", "dv"), problem.needs, (problem.dq, problem.dk, problem.dv), made, strict=True
    ):
        assert need == bool(addresses[name])
        if need:
            rows = "queries" if name == "dq" else "keys"
            _seen(addresses[name], operand, attention, rows, t.shape[-1], name != "dq").copy_(t)
    for place, each in enumerate(problem.collected):
        (found,) = torch.autograd.grad(results, captured[each.index], grads, retain_graph=True)
        axes = ("row", "col") if each.axes == "pair" else (each.axes,)
        whole = [2 + n for n, axis in enumerate(("row", "col")) if axis not in axes]
        summed = found.sum(whole, keepdim=True) if whole else found
        if each.axes == "pair":  # of which kernels add up batches and heads
            over = [n for n in (0, 1) if not each.strides[n]]
            summed = summed.sum(over, keepdim=True) if over else summed
        target = at(addresses[f"collected{place}"], each.strides, summed.shape, torch.float32)
        target.copy_(summed)


def _read(problem: Attention, addresses: dict) -> tuple:
    """q, k, v and captured tensors where the parameters say they are."""
    q = _seen(addresses["q"], problem.q, problem, "queries", problem.features)
    k = _seen(addresses["k"], problem.k, problem, "keys", problem.features, True)
    v = _seen(addresses["v"], problem.v, problem, "keys", problem.values, True)
    return q, k, v, _captured(problem, addresses)


def _captured(problem: Attention, addresses: dict) -> list[torch.Tensor]:
    """Of all batches, heads, rows and columns."""
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    found = []
    for place, (view, name) in enumerate(
        zip(problem.captured, problem.score.captured, strict=True)
    ):
        t = at(addresses[f"captured{place}"], view, shape, getattr(torch, name))
        found.append(t.double() if t.is_floating_point() else t.clone())
    return found


def _computed(problem: Attention, addresses, numbers, function, q, k, v, captured) -> tuple:
    given = {"causal": problem.score.causal}
    value, address = numbers["scale"]
    given["scale"] = at(address, (1,), (1,), torch.float32)[0] if address else value
    if problem.score.window:
        given["window"] = tuple(int(numbers[name][0]) for name in ("left", "right"))
    if problem.score.lengths:
        for name in ("q_lengths", "kv_lengths"):
            given[name] = at(addresses[name], (1,), (problem.batch,), torch.int32)
    if problem.score.dropout:
        seed, address = numbers["seed"]
        seed = int(at(address, (1,), (1,), torch.int64)[0]) if address else int(seed)
        given |= {"dropout_p": numbers["dropout_p"][0], "seed": seed}
    if problem.score.has_score:
        given["score"] = lambda v, *places: function(v, captured)
    return formula(q, k, v, _layout(problem, addresses["row_bits"]), **given)


def _layout(problem: Attention, address: int) -> Layout:
    """What the bits of rows say, one mask for each batch and head."""
    blocks = problem.blocks
    shape = blocks.heads * blocks.grid_rows, blocks.row_words
    words = at(address, (blocks.row_words, 1), shape, torch.int32)
    masks = bits.unpack(words, blocks.grid_cols).view(blocks.heads, blocks.grid_rows, -1)
    heads = [
        b * problem.layout_batch + h * problem.layout_head
        for b in range(problem.batch) for h in range(problem.heads)
    ]  # fmt: skip
    return Layout(masks[heads], (blocks.rows, blocks.cols))


def _seen(address: int, operand, problem: Attention, rows: str, features: int, keys: bool = False):
    """A tensor as a kernel sees it, which moves 16 bytes at once."""
    assert address % 16 == 0 and all(stride % 8 == 0 for stride in operand[:3])
    heads = problem.kv_heads if keys else problem.heads
    shape = problem.batch, heads, getattr(problem, rows), features
    return at(address, (*operand[:3], 1), shape, getattr(torch, problem.dtype))


def _rows(address: int, problem: Attention, dtype: torch.dtype) -> torch.Tensor:
    shape = problem.batch, problem.heads, problem.queries
    return at(address, (shape[1] * shape[2], shape[2], 1), shape, dtype)


def on_gpu(value):
    """The same tensor or layout there."""
    if isinstance(value, Layout):
        return Layout.from_layout(value.text, tuple(map(on_gpu, value.tensors)))
    return value.as_subclass(OnGpu)


def operands(shape: Shape, dtype=F16, heads=None, grad: bool = False) -> tuple:
    """A layout there, and q, k and v."""
    made, tensors = shape.layout(heads), shape.tensors(dtype)
    return on_gpu(made), [on_gpu(t).requires_grad_(grad) for t in tensors]

"""Damage within the tensors that weights are stored as: masks, bitmasks and matrices of kernlib."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import safetensors.torch
import torch

import kernlib as kl
from kernlib.families.sparse.packed import MAGIC, packed
from tests.checkpoints.damage import SAFE, TORCH, Damage, content, file, saved
from tests.checkpoints.values import pruned

Tensors = dict[str, torch.Tensor]


def stored_damages() -> Iterator[Damage]:
    for group in (masks, bitmasks, bitmasks_24, matrices, quantised):
        yield from group()


@cache
def tensors_of(name: str) -> Tensors:
    return safetensors.torch.load(content(name))


def changed(source: str, changes: dict[str, torch.Tensor | None]) -> Tensors:
    """The tensors of a file with others in the places of some, or none."""
    tensors = {**tensors_of(source), **changes}
    return {
        name: value.contiguous().clone() for name, value in tensors.items() if value is not None
    }


def damaged(text: str, tensors: Tensors) -> Damage:
    return text, file(SAFE, safetensors.torch.save(tensors))


def with_bit(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    result = tensor.clone()
    result.view(-1)[place] ^= 1 << bit
    return result


def masks() -> Iterator[Damage]:
    source = "prune.safetensors"
    for name in ("linear.weight", "linear.bias", "convolution.weight"):
        mask, orig = f"{name}_mask", f"{name}_orig"
        value, weight = tensors_of(source)[mask], tensors_of(source)[orig]
        odd = {
            "2": value * 2,
            "NaN": value * torch.nan,
            "infinity": value / 0,
            "-1": -value,
            "0.5": value * 0.5,
            "small numbers": value * 1e-30,
        }
        others = {
            **{f"{mask} that holds {text}": {mask: other} for text, other in odd.items()},
            f"{mask} of another shape": {mask: value[..., :-1]},
            f"{mask} with a dimension more": {mask: value[None]},
            f"{mask} without elements": {mask: value[:0]},
            f"{mask} of unsigned integers": {mask: value.to(torch.uint16)},
            f"{mask} of float8": {mask: value.to(torch.float8_e4m3fn)},
            f"{orig} of another shape": {orig: weight.flatten()[:-1]},
            f"{orig} of integers": {orig: weight.to(torch.int32)},
            f"{orig} without {mask}": {mask: None},
        }
        for text, changes in others.items():
            tensors = changed(source, changes)
            yield damaged(text, tensors)
            if "linear.weight" in text:
                yield f"{text}, of torch", file(TORCH, saved(tensors))


def bitmasks() -> Iterator[Damage]:
    source, odd = "bitmask/model.safetensors", "bitmask_bfloat16.safetensors"
    prefix = "model.layers.0.mlp.gate_proj."
    parts = {
        role: tensors_of(source)[prefix + role]
        for role in ("compressed", "bitmask", "row_offsets", "shape")
    }
    yield from parts_damaged(source, prefix, parts)
    offsets, values = parts["row_offsets"], parts["compressed"]
    for text, changes in {
        "row_offsets that begin later": {"row_offsets": offsets + 1},
        "row_offsets backwards": {"row_offsets": offsets.flip(0)},
        "row_offsets below zero": {"row_offsets": -offsets - 1},
        "row_offsets far away": {"row_offsets": offsets + 2**40},
        "row_offsets cut": {"row_offsets": offsets[:-1]},
        "row_offsets of which one is another": {"row_offsets": with_bit(offsets, 5, 0)},
        "row_offsets of int32": {"row_offsets": offsets.to(torch.int32)},
        "values cut": {"compressed": values[:-1]},
        "values of which there are more": {"compressed": torch.cat([values, values[:3]])},
        "no values": {"compressed": values[:0]},
        "values in rows": {"compressed": values[: len(values) // 2 * 2].view(2, -1)},
        "values of integers": {"compressed": values.to(torch.int16)},
        "a bitmask of zeros": {"bitmask": torch.zeros_like(parts["bitmask"])},
        "a bitmask of ones": {"bitmask": torch.full_like(parts["bitmask"], 255)},
        "a bitmask backwards": {"bitmask": parts["bitmask"].flip(0)},
    }.items():
        yield damaged(text, changed(source, {prefix + role: x for role, x in changes.items()}))
    flips = random.Random(6)
    for _ in range(15):
        place, bit = flips.randrange(parts["bitmask"].numel()), flips.randrange(8)
        change = {f"{prefix}bitmask": with_bit(parts["bitmask"], place, bit)}
        yield damaged(f"bit {bit} of byte {place} of a bitmask", changed(source, change))
    bits = tensors_of(odd)["first.bitmask"]
    for bit in (5, 6, 7):  # of 13 columns
        change = {"first.bitmask": with_bit(bits, 1, bit)}
        yield damaged(f"bit {bit} behind the columns of a bitmask", changed(odd, change))
    weight = {f"{prefix}weight": torch.ones(24, 16, dtype=torch.float16)}
    yield damaged("a weight beside its bitmask", changed(source, weight))
    other = tensors_of(source)[f"{prefix.replace('gate', 'down')}bitmask"]
    yield damaged("a bitmask of another weight", changed(source, {f"{prefix}bitmask": other}))


def bitmasks_24() -> Iterator[Damage]:
    source, prefix = "bitmask_24/model.safetensors", "model.layers.0.mlp.gate_proj."
    parts = {role: tensors_of(source)[prefix + role] for role in ("compressed", "bitmask", "shape")}
    yield from parts_damaged(source, prefix, parts)
    bits, values = parts["bitmask"], parts["compressed"]
    rolled = bits.clone()
    rolled[0, 0], rolled[0, 1] = 0b00111101, 0b00110001  # 5 and 3 bits
    for text, changes in {
        "2:4 values in one row": {"compressed": values.flatten()},
        "2:4 values transposed": {"compressed": values.mT},
        "2:4 values cut": {"compressed": values[:, :-1]},
        "2:4 bits not of each 4": {"bitmask": rolled},
        "2:4 bits of all": {"bitmask": torch.full_like(bits, 255)},
        "2:4 bits of none": {"bitmask": torch.zeros_like(bits)},
        "2:4 with an odd number of columns": {
            "shape": torch.tensor([[24], [15]]), "compressed": values[:, :-1]
        },
        "2:4 of three dimensions": {"shape": torch.tensor([[24], [4], [4]])},
        "2:4 of two elements": {
            "shape": torch.tensor([[1], [2]]), "compressed": values[:1, :1], "bitmask": bits[:1, :1]
        },
    }.items():  # fmt: skip
        yield damaged(text, changed(source, {prefix + role: x for role, x in changes.items()}))
    flips = random.Random(7)
    for _ in range(10):
        place, bit = flips.randrange(bits.numel()), flips.randrange(8)
        change = {f"{prefix}bitmask": with_bit(bits, place, bit)}
        yield damaged(f"bit {bit} of byte {place} of 2:4", changed(source, change))


def parts_damaged(source: str, prefix: str, parts: Tensors) -> Iterator[Damage]:
    """What is wrong with parts of either format in the same way."""
    kind = source.partition("/")[0]
    for role in parts:
        if role != "row_offsets":  # without them it is of the other format
            yield damaged(f"{kind} without {role}", changed(source, {prefix + role: None}))
        text = f"{kind} with {role} of float32"
        if role != "compressed":
            yield damaged(text, changed(source, {prefix + role: parts[role].float()}))
        for text, other in {
            "one row less": parts[role][:-1],
            "no rows": parts[role][:0],
            "a dimension more": parts[role][None],
            "no dimension": parts[role].flatten()[0],
        }.items():
            change = {prefix + role: other}
            yield damaged(f"{kind} with {role} of {text}", changed(source, change))
    yield damaged(f"{kind} without row_offsets and values", changed(source, {
        prefix + "row_offsets": None, prefix + "compressed": None
    }))  # fmt: skip
    shape = parts["shape"]
    sizes = shape.flatten().tolist()
    for other in (
        sizes[::-1], [sizes[0] * 2, sizes[1]], [sizes[0], sizes[1] * 2], [sizes[0], sizes[1] - 8],
        [sizes[0] + 1, sizes[1]], [0, 0], [-sizes[0], sizes[1]], [-sizes[0], -sizes[1]],
        [2**62, 2**62], [2**63 - 1, 1], [-(2**63), 1], [sizes[0] * sizes[1]], [*sizes, 1],
        [1, *sizes], [1] * 9, [sizes[0], 2**40],
    ):  # fmt: skip
        value = torch.tensor(other).view(-1, *shape.shape[1:])
        change = {f"{prefix}shape": value}
        yield damaged(f"{kind} of the shape {other}", changed(source, change))


def matrices() -> Iterator[Damage]:
    """Of kernlib's own, which are bytes."""
    weight = pruned("up_proj.weight", (64, 64))
    flips = random.Random(8)
    for format, values in (("bitmap", None), ("bitmap", "int8"), ("u4", None), ("macko", None)):
        data = packed(kl.sparse.compress(weight, format, values=values))
        bytes_of = bytes(data.tolist())
        kind = values or format

        def other(tensor: torch.Tensor) -> Tensors:
            return {"up_proj.weight_packed": tensor, "up_proj.bias": torch.zeros(64)}

        for end in (0, 1, 7, 8, 15, 16, 40, 128, len(data) // 2, len(data) - 64):
            yield damaged(f"{kind} cut to {end} bytes", other(data[:end]))
        for text, tensor in {
            "other first bytes": data.flip(0),
            "zeros": data * 0,
            "int8": data.view(torch.int8),
            "int32": data.view(torch.int32),
            "rows": data.view(-1, 64),
            "no dimension": data[0],
        }.items():
            yield damaged(f"{kind} of {text}", other(tensor))
        for old, new in (
            (b'"version"', b'"Version"'),
            (b'"format"', b'"forma_"'),
            (b"float16", b"float61"),
            (b"[64, 64]", b"[99, 64]"),
            (b"[64, 64]", b"[-4, 64]"),
            (b"[64, 64]", b"[99e9,1]"),
            (b'"shape"', b'"Shape"'),
            (b'"tensors"', b'"tensor_"'),
            (b'{"dtype"', b'["dtype"'),
            (MAGIC, b"kernlib\x09"),
        ):
            assert old in bytes_of
            tensor = torch.tensor(list(bytes_of.replace(old, new, 1)), dtype=torch.uint8)
            yield damaged(f"{kind} with {new} for {old}", other(tensor))
        for _ in range(5):
            place, bit = flips.randrange(len(MAGIC), len(MAGIC) + 8), flips.randrange(8)
            yield damaged(f"{kind}, bit {bit} of byte {place}", other(with_bit(data, place, bit)))


def quantised() -> Iterator[Damage]:
    """Names of other libraries, without a config that says so."""
    ones, codes = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.uint8)
    for name, parts in {
        "GPTQ": {"qweight": codes.int(), "qzeros": codes.int(), "g_idx": codes[0].int()},
        "AWQ": {"qweight": codes.int(), "qzeros": codes.int(), "scales": ones},
        "4 bits of bitsandbytes": {
            "weight": codes, "weight.absmax": ones, "weight.quant_map": ones,
            "weight.quant_state.bitsandbytes__nf4": codes,
        },
        "8 bits of bitsandbytes": {"weight": codes.to(torch.int8), "SCB": ones},
        "float8 with a scale": {"weight": ones.to(torch.float8_e4m3fn), "weight_scale": ones},
        "float8 with an inverse scale": {
            "weight": ones.to(torch.float8_e4m3fn), "weight_scale_inv": ones
        },
        "marlin-24": {"weight_packed": codes.int(), "scale_packed": ones, "meta": codes.short()},
        "int32 codes": {"weight_packed": codes.int(), "weight_scale": ones},
        "HQQ": {"W_q": codes, "meta": ones},
        "AQLM": {"codes": codes.to(torch.int8), "codebooks": ones},
        "MXFP4": {"down_proj_blocks": codes, "down_proj_scales": codes},
        "quanto": {f"weight._{part}": x for part, x in (("data", codes), ("scale", ones))},
    }.items():  # fmt: skip
        tensors = {f"layer.{part}": x.clone() for part, x in parts.items()}
        yield damaged(f"quantised: {name}", tensors)

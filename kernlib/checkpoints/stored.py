"""Weights as a checkpoint stores them: :func:`weights_of` puts together the tensors that are one.

- "dense": X itself, with its zeros: what SparseGPT, Wanda and magnitude pruning save. Biases and
  all else are dense too.
- "masked": X_orig and X_mask, whose product X is. ``torch.nn.utils.prune`` keeps them.
- "bitmask": compressed, bitmask, row_offsets and shape in place of weight, or behind it in files of
  versions before 0.9: sparse-bitmask of compressed-tensors, which its versions up to 0.14 write.
- "24-bitmask": compressed, bitmask and shape: sparse-24-bitmask of its versions 0.9 to 0.14.
- "packed": X_packed, a matrix that kernlib has compressed.

Checkpoints of quantised weights are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from kernlib.checkpoints.files import Checkpoint, CheckpointError, Entry, fault
from kernlib.descriptors.base import shown
from kernlib.families.sparse.layout import DTYPES
from kernlib.families.sparse.packed import header_of, unpacked

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PACKED = "weight_packed"  # of kernlib one of bytes, of compressed-tensors one of codes
PARTS = ("compressed", "bitmask", "row_offsets", "shape")  # of compressed-tensors
MOST_DIMENSIONS = 8  # of a shape that is read before it is compared with others
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SPARSE_FORMATS = (None, "dense", "sparse-bitmask", "sparse-24-bitmask")
METHODS = ("compressed-tensors", "sparseml", "kernlib")  # of a config; the second by its old name
# Last words of a tensor's name, and the library that quantises so.
QUANTISERS = {
    **{"qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "W_q": "HQQ"},
    **dict.fromkeys(("SCB", "absmax", "quant_map"), "bitsandbytes"),
    **{"scale_packed": "compressed-tensors (marlin-24)", "_data": "quanto"},
}
SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "weight_scales")


class StoredWeight(NamedTuple):
    """One tensor of a model, of whichever tensors a checkpoint stores it as.

    - ``name``: in the model, such as "model.layers.0.mlp.up_proj.weight".
    - ``kind``: "dense", "masked", "bitmask", "24-bitmask" or "packed".
    - ``parts``: the stored tensors: "values" of a dense one, "orig" and "mask", "packed", or those
      that compressed-tensors names.
    - ``shape``, ``dtype``: of the tensor that :meth:`load` gives.
    """

    name: str
    kind: str
    parts: dict[str, Entry]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(
        self, checkpoint: Checkpoint, device: torch.device | str | int = "cpu"
    ) -> torch.Tensor:
        """The tensor, dense, on ``device``, where its parts are read to and decoded. A dense one on
        the CPU is that of :meth:`Checkpoint.read`, not to be written to. Raises CheckpointError for
        parts that do not fit each other; waits for the device to compare them."""
        parts = {role: checkpoint.read(entry.name, device) for role, entry in self.parts.items()}
        return _DECODERS[self.kind](self, **parts)

    def fault(self, role: str, text: str) -> CheckpointError:
        """The error of a part."""
        return fault(self.parts[role].file, text, self.parts[role].name)


def weights_of(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Every tensor of the model in ``checkpoint`` by its name, in the order of the files.

    ``X_orig`` and ``X_mask`` are of ``torch.nn.utils.prune`` if there is no ``X``; else all three
    stay as they are. So does an ``X_orig`` without a mask, as of ``spectral_norm``, unless others
    have one. Tensors of ``torch.nn.utils.parametrize`` stay as they are.

    Raises CheckpointError for quantised weights, by tensors or by ``config.json``, and for parts
    whose shapes and dtypes do not fit each other. Of the files it reads the tensors that hold
    shapes, and headers of packed matrices.
    """
    entries = checkpoint.entries
    _check_config(checkpoint)
    _check_unquantised(entries)
    owner: dict[str, StoredWeight] = {}  # of an entry
    for part in (*_masked_in(entries), *_bitmasks_in(checkpoint), *_packed_in(checkpoint)):
        owner.update({entry.name: part for entry in part.parts.values()})
    weights: dict[str, StoredWeight] = {}
    for name, entry in entries.items():
        dense = StoredWeight(name, "dense", {"values": entry}, entry.shape, entry.dtype)
        weight = owner.get(name, dense)
        if weights.setdefault(weight.name, weight) is not weight:
            other = next(iter(weights[weight.name].parts.values())).name
            raise fault(
                entry.file, f"stores {shown(weight.name)}, which {shown(other)} stores too", name
            )
    return weights


def _masked_in(entries: Mapping[str, Entry]) -> Iterator[StoredWeight]:
    names = [name.removesuffix("_orig") for name in entries if name.endswith("_orig")]
    names = [name for name in names if name not in entries]
    pruned = [name for name in names if f"{name}_mask" in entries]
    for name in names if pruned else []:
        orig, mask = entries[f"{name}_orig"], entries.get(f"{name}_mask")
        if mask is None:
            if f"{name}_u" in entries:  # of spectral_norm
                continue
            text = f"has no {name}_mask beside it, which other weights of this checkpoint have"
            raise fault(orig.file, f"{text}: save the whole state_dict()", orig.name)
        weight = StoredWeight(name, "masked", {"orig": orig, "mask": mask}, orig.shape, orig.dtype)
        if mask.shape != orig.shape:
            text = f"must have the shape {orig.shape} of {orig.name}, and has {mask.shape}"
            raise weight.fault("mask", text)
        _check_dtype(weight, "orig", FLOATS)
        _check_dtype(weight, "mask", (*FLOATS, *INTEGERS))
        yield weight


def _bitmasks_in(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    places: dict[str, dict[str, Entry]] = {}
    for name, entry in checkpoint.entries.items():
        last = name.rpartition(".")[2]
        if last in PARTS:
            places.setdefault(name.removesuffix(last), {})[last] = entry
    places = {  # the others are parameters that a model calls so
        prefix: parts
        for prefix, parts in places.items()
        if len(parts) > 1 and parts.keys() & {"compressed", "bitmask"}
    }
    # Versions before 0.9 put parts behind the whole name of any tensor, such as X.weight.bitmask.
    is_old = any(f".{prefix}".endswith(".weight.") for prefix in places)
    for prefix, parts in places.items():
        for role in ("compressed", "bitmask", "shape"):
            if role not in parts:
                part = next(iter(parts.values()))
                raise fault(part.file, f"has no {prefix}{role} beside it", part.name)
        kind = "bitmask" if "row_offsets" in parts else "24-bitmask"
        dtype = parts["compressed"].dtype
        name = prefix[:-1] if is_old else f"{prefix}weight"
        weight = StoredWeight(name, kind, parts, (), dtype)
        if not dtype.is_floating_point:
            raise weight.fault("compressed", f"must hold floating-point values, and is {dtype}")
        _check_dtype(weight, "bitmask", (torch.uint8,))
        weight = weight._replace(shape=_shape_in(weight, checkpoint))
        _check_parts(weight)
        yield weight


def _shape_in(weight: StoredWeight, checkpoint: Checkpoint) -> tuple[int, ...]:
    """What the part "shape" says."""
    entry = weight.parts["shape"]
    _check_dtype(weight, "shape", (torch.int64,))
    sizes = entry.nbytes // 8  # (dimensions,), or (dimensions, 1) of 2:4 sparsity
    if entry.shape not in ((sizes,), (sizes, 1)) or not 1 <= sizes <= MOST_DIMENSIONS:
        text = f"must hold the sizes of a weight, and has the shape {entry.shape} itself"
        raise weight.fault("shape", text)
    shape = tuple(checkpoint.read(entry.name).flatten().tolist())
    if min(shape) < 0:
        raise weight.fault("shape", f"must hold the sizes of a weight, and holds {shape}")
    return shape


def _check_parts(weight: StoredWeight) -> None:
    """Raises CheckpointError unless the parts have the shapes that the weight's asks for."""
    *outer, columns = weight.shape
    shapes = {"bitmask": (*outer, -(-columns // 8))}
    if weight.kind == "bitmask":
        _check_dtype(weight, "row_offsets", (torch.int64,))
        shapes["row_offsets"] = tuple(outer)
        if len(weight.parts["compressed"].shape) != 1:
            text = f"must be (values,), and has the shape {weight.parts['compressed'].shape}"
            raise weight.fault("compressed", text)
    else:
        if len(outer) != 1 or columns % 2 or outer[0] * columns % 4:
            text = f"holds {weight.shape}, which has no rows in which 2 of each 4 could be stored"
            raise weight.fault("shape", text)
        shapes["compressed"] = (*outer, columns // 2)
    for role, shape in shapes.items():
        if weight.parts[role].shape != shape:
            text = f"must have the shape {shape} for a weight {weight.shape}, and has"
            raise weight.fault(role, f"{text} {weight.parts[role].shape}")


def _packed_in(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    for name, entry in checkpoint.entries.items():
        if name.rpartition(".")[2] == PACKED:
            try:
                header = header_of(checkpoint.read(name))
            except CheckpointError:
                raise
            except ValueError as error:
                raise fault(entry.file, f"is no matrix of kernlib: {error}", name) from error
            shape, dtype = tuple(header["shape"]), DTYPES[header["dtype"]]
            parts = {"packed": entry}
            yield StoredWeight(name.removesuffix("_packed"), "packed", parts, shape, dtype)


def _check_dtype(weight: StoredWeight, role: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if weight.parts[role].dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        text = f"must be {names}, and is {weight.parts[role].dtype}".replace("torch.", "")
        raise weight.fault(role, text)


# What is refused.


def _check_config(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a config.json that says that weights are quantised."""
    file = checkpoint.folder / "config.json"
    config = checkpoint.config or {}
    _check_sparsity(file, config.get("sparsity_config"))
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fault(file, f"{key} must be a JSON object, and is a {type(value).__name__}")
        _check_sparsity(file, value.get("sparsity_config"))
        method, format = value.get("quant_method"), value.get("format")
        if method is None and value.get("sparsity_config"):
            method = METHODS[0]
        named = method if isinstance(method, str) else "a method that it does not name"
        if method not in METHODS:
            raise refused(file, f"{named} ({key})")
        if method != "kernlib" and format not in SPARSE_FORMATS:
            raise refused(file, f"{method} as {shown(format)} ({key})")


def _check_sparsity(file: Path, value: object) -> None:
    format = value.get("format") if isinstance(value, dict) else value
    if format not in SPARSE_FORMATS:
        names = ", ".join(name for name in SPARSE_FORMATS if name)
        text = f"sparsity_config has the format {shown(format)}, of which none is read but {names}"
        raise fault(file, text)


def _check_unquantised(entries: Mapping[str, Entry]) -> None:
    """Raises CheckpointError for tensors that hold codes of weights."""
    for name, entry in entries.items():
        prefix, dot, last = name.rpartition(".")
        quantiser = QUANTISERS.get(last)
        if last == "qweight" and f"{prefix}{dot}g_idx" in entries:
            quantiser = "GPTQ"
        elif "quant_state" in name.split("."):
            quantiser = "bitsandbytes"
        elif last == PACKED and (entry.dtype != torch.uint8 or len(entry.shape) != 1):
            marlin = f"{prefix}{dot}scale_packed" in entries
            quantiser = f"compressed-tensors ({'marlin-24' if marlin else 'pack-quantized'})"
        elif last == "codebooks" and f"{prefix}{dot}codes" in entries:
            quantiser = "AQLM"
        elif name.endswith("_blocks") and entry.dtype == torch.uint8:
            quantiser = "MXFP4" if f"{name.removesuffix('blocks')}scales" in entries else None
        elif last in ("weight", "compressed") and entry.dtype.itemsize == 1:
            scales = [scale for scale in SCALES if f"{prefix}{dot}{scale}" in entries]
            kind = str(entry.dtype).removeprefix("torch.")
            quantiser = f"a scheme of {kind} with {scales[0]}" if scales else None
        if quantiser is not None:
            raise refused(entry.file, quantiser, name)


def refused(file: Path, quantiser: str, tensor: str | None = None) -> CheckpointError:
    """The error of quantised weights."""
    return fault(
        file,
        f"holds values quantised by {quantiser}, which are not read. Pass the pruned checkpoint of "
        "16 or 32 bits that it was made from; values='int4' then stores its values in 4 bits",
        tensor,
    )


# From parts to the tensor.


def _dense(weight: StoredWeight, values: torch.Tensor) -> torch.Tensor:
    return values


def _masked(weight: StoredWeight, orig: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As torch.nn.utils.prune computes it, with the sign of zeros, and NaN where it is of 0 inf."""
    if not ((mask == 0) | (mask == 1)).all():
        raise weight.fault("mask", "must hold 0 and 1 alone: it is damaged, or no mask")
    return orig * mask.to(orig.dtype)


def _bitmask(
    weight: StoredWeight,
    compressed: torch.Tensor,
    bitmask: torch.Tensor,
    row_offsets: torch.Tensor,
    shape: torch.Tensor,
) -> torch.Tensor:
    bits = _bits(weight, bitmask)
    counts = bits.sum(-1, dtype=torch.int64)
    _check_count(weight, int(counts.sum()))
    # Those of more dimensions begin anew in each but the first, and nothing reads them.
    if not (counts.cumsum(0) - counts).equal(row_offsets):
        raise weight.fault("row_offsets", "does not fit the bits of its bitmask: it is damaged")
    return _spread(weight, bits, compressed)


def _bitmask_24(
    weight: StoredWeight, compressed: torch.Tensor, bitmask: torch.Tensor, shape: torch.Tensor
) -> torch.Tensor:
    bits = _bits(weight, bitmask)
    _check_count(weight, int(bits.sum(dtype=torch.int64)))
    if not (bits.reshape(-1, 4).sum(-1, dtype=torch.uint8) == 2).all():
        raise weight.fault("bitmask", "must have 2 bits of each 4: it is damaged")
    return _spread(weight, bits, compressed.flatten())


def _packed(weight: StoredWeight, packed: torch.Tensor) -> torch.Tensor:
    try:
        return unpacked(packed).to_dense()
    except ValueError as error:
        raise weight.fault("packed", f"is damaged: {error}") from error


_DECODERS = {
    "dense": _dense,
    "masked": _masked,
    "bitmask": _bitmask,
    "24-bitmask": _bitmask_24,
    "packed": _packed,
}


def _bits(weight: StoredWeight, bitmask: torch.Tensor) -> torch.Tensor:
    """A bool for each element, from bits of which the lowest of a byte is the first."""
    columns = weight.shape[-1]
    places = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    bits = (bitmask.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2).view(torch.bool)
    if bits[..., columns:].any():
        raise weight.fault("bitmask", f"has bits behind its {columns} columns: it is damaged")
    return bits[..., :columns]


def _check_count(weight: StoredWeight, bits: int) -> None:
    values = weight.parts["compressed"].nbytes // weight.dtype.itemsize
    if bits != values:
        text = f"has {bits} bits for {values} values of {weight.parts['compressed'].name}"
        raise weight.fault("bitmask", f"{text}: one of them is damaged")


def _spread(weight: StoredWeight, bits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in order at the set bits, as many as these; as integers, for all dtypes."""
    dense = torch.zeros(weight.shape, dtype=weight.dtype, device=values.device)
    integer = _OF_SIZE[weight.dtype.itemsize]
    dense.view(integer).masked_scatter_(bits, values.view(integer))
    return dense

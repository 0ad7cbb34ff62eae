"""Checkpoints that are damaged, cut or of another kind, each by a name: :func:`damages`.

Each is to raise CheckpointError when it is opened or its weights are loaded, and no other error;
those whose name begins with :data:`READABLE` have other values alone, which nobody can see. All of
them are the same in every run.
"""

from __future__ import annotations

import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import torch

FILES = Path(__file__).parent / "files"
READABLE = "values of a dense tensor"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\n"
SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = "model.safetensors.index.json"

Damage = tuple[str, Callable[[Path], None]]  # a name, and what writes it into a folder


def damages() -> Iterator[Damage]:
    """All of them: a name, and a function that writes the checkpoint into an empty folder."""
    from tests.checkpoints.stored_damage import stored_damages

    for group in (
        cut_files, foreign_files, damaged_headers, headers, flipped_values, shards, indices,
        archives, objects, configs, stored_damages,
    ):  # fmt: skip
        yield from group()


@cache
def content(name: str) -> bytes:
    return (FILES / name).read_bytes()


def file(name: str, data: bytes) -> Callable[[Path], None]:
    """What writes one file."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def files(contents: dict[str, bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, data in contents.items():
            (folder / name).write_bytes(data)

    return write


def folder_of(name: str) -> dict[str, bytes]:
    """The contents of a folder of files."""
    return {path.name: content(f"{name}/{path.name}") for path in sorted((FILES / name).iterdir())}


def safetensors(header: object, data: bytes = b"") -> bytes:
    """A file of a header, which may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def saved(value: object, **options) -> bytes:
    """A file of torch.save."""
    stream = BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def cut_files() -> Iterator[Damage]:
    cuts = random.Random(1)
    for source, target in (
        ("single/model.safetensors", SAFE),
        ("bitmask/model.safetensors", SAFE),
        ("torch_single/pytorch_model.bin", TORCH),
        ("prune_old.pth", TORCH),
    ):
        data = content(source)
        ends = {0, 1, 7, 8, 9, 64, len(data) // 2, len(data) - 2, len(data) - 1}
        for end in sorted(ends | {cuts.randrange(len(data)) for _ in range(14)}):
            yield f"{source} cut to {end} bytes", file(target, data[:end])


def foreign_files() -> Iterator[Damage]:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a/b.txt", "text")
    noise = random.Random(2).randbytes(3000)
    contents = {
        "a PNG image": b"\x89PNG\r\n\x1a\n" + noise,
        "a JPEG image": b"\xff\xd8\xff\xe0" + noise,
        "a zip archive": archive.getvalue(),
        "the start of a zip archive": b"PK\x03\x04" + noise,
        "gzip": b"\x1f\x8b\x08\x00" + noise,
        "text": b"The model is at another place.\n" * 20,
        "a page of the web": b"<!DOCTYPE html><html><body>Not Found</body></html>",
        "JSON": b'{"error": "Entry not found"}',
        "a pointer of Git LFS": LFS + b"size 4976698672\n",
        "nothing": b"",
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "noise": noise,
        "GGUF": b"GGUF\x03\x00\x00\x00" + noise,
        "a program": b"\x7fELF\x02\x01\x01" + noise,
        "an array of numpy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}" + noise,
        "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
        "one byte": b"\x80",
        "HDF5": b"\x89HDF\r\n\x1a\n" + noise,
    }
    for name, data in contents.items():
        for target in (SAFE, TORCH):
            yield f"{name} as {target}", file(target, data)
    yield "a file of torch as safetensors", file(SAFE, content("prune.pt"))
    yield "an old file of torch as safetensors", file(SAFE, content("prune_old.pth"))
    yield "a file of safetensors as torch's", file(TORCH, content("prune.safetensors"))
    yield "no file", files({})
    yield "a file of another name", file("weights.safetensors", content("prune.safetensors"))
    yield "a config alone", file("config.json", content("single/config.json"))
    yield "a folder in place of a file", lambda folder: (folder / SAFE).mkdir()


def damaged_headers() -> Iterator[Damage]:
    """Bits flipped in structure, numbers, dtypes and names of fields, not in names of tensors."""
    data = content("single/model.safetensors")
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].decode()
    places = [
        start + shift
        for word in ('"dtype"', '"shape"', '"data_offsets"', ':{"', "]}", '"F16"', "[", "],")
        for start in range(len(header))
        if header.startswith(word, start)
        for shift in range(len(word))
    ]
    places += [i for i, x in enumerate(header) if x.isdigit() and header[i - 1] in "[,0123456789"]
    flips = random.Random(3)
    for place in sorted(flips.sample(sorted(set(places)), 70)):
        bit = flips.randrange(8)
        yield f"bit {bit} of byte {place} of a header", file(SAFE, flipped(data, 8 + place, bit))
    for length_of in (0, 1, 2, length - 1, length + 1, len(data), 1 << 31, (1 << 63) - 1, -1):
        prefix = struct.pack("<q", length_of)
        yield f"a header of {length_of} bytes", file(SAFE, prefix + data[8:])


def headers() -> Iterator[Damage]:
    """Headers that are JSON, and say what cannot be."""

    def tensor(dtype="F32", shape=(2,), offsets=(0, 8), **more):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}

    data = bytes(8)
    cases = {
        "an unknown dtype": {"a": tensor("Q4")},
        "no dtype": {"a": tensor(None)},
        "a dtype that is a number": {"a": tensor(32)},
        "a dtype that torch lacks": {"a": tensor("F6_E2M3", (4,), (0, 3))},
        "pairs of 4 bits that are none": {"a": tensor("F4", (2, 1, 1), (0, 1))},
        "offsets beyond the file": {"a": tensor(shape=(4,), offsets=(0, 16))},
        "offsets that begin beyond the file": {"a": tensor(offsets=(800, 808))},
        "offsets backwards": {"a": tensor(offsets=(8, 0))},
        "offsets below zero": {"a": tensor(offsets=(-8, 0))},
        "offsets of fractions": {"a": tensor(offsets=(0.5, 8.5))},
        "offsets as text": {"a": tensor(offsets=("0", "8"))},
        "one offset": {"a": tensor(offsets=(0,))},
        "three offsets": {"a": tensor(offsets=(0, 4, 8))},
        "offsets of 2^64": {"a": tensor(offsets=(0, 2**64))},
        "a hole at the start": {"a": tensor(shape=(1,), offsets=(4, 8))},
        "a hole at the end": {"a": tensor(shape=(1,), offsets=(0, 4))},
        "a hole in the middle": {
            "a": tensor("U8", (2,), (0, 2)), "b": tensor("U8", (2,), (6, 8)),
        },
        "two tensors at one place": {"a": tensor(), "b": tensor()},
        "tensors that overlap": {"a": tensor(), "b": tensor(shape=(1,), offsets=(4, 8))},
        "a shape too large": {"a": tensor(shape=(3,))},
        "a shape too small": {"a": tensor(shape=(1,))},
        "a shape below zero": {"a": tensor(shape=(-2,))},
        "a shape of fractions": {"a": tensor(shape=(2.0,))},
        "a shape of 2^80 elements": {"a": tensor(shape=(2**40, 2**40))},
        "a shape that is a number": {"a": {**tensor(), "shape": 2}},
        "a size that torch cannot count": {"a": tensor("U8", (0, 2**63), (0, 0))},
        "a tensor that is a list": {"a": [1, 2]},
        "a tensor that is none": {"a": None},
        "a list": [tensor()],
        "a text": "tensors",
        "a number": 3,
        "metadata of numbers": {"__metadata__": {"n": 3}, "a": tensor()},
        "metadata that is a list": {"__metadata__": [], "a": tensor()},
        "brackets without end": b"[" * 5000,
        "no JSON": b"{'a': 1}",
        "bytes that are no UTF-8": b'{"\xff\xfe": 1}',
    }  # fmt: skip
    for name, header in cases.items():
        beyond = b"" if "torch cannot" in name else data
        beyond = data[: {"a dtype that torch lacks": 3, "pairs of 4 bits that are none": 1}.get(
            name, len(beyond)
        )]  # fmt: skip
        yield f"a header with {name}", file(SAFE, safetensors(header, beyond))
    yield "a header without tensors", file(SAFE, safetensors({}))
    yield "a header with metadata alone", file(SAFE, safetensors({"__metadata__": {"a": "b"}}))
    for field in ("dtype", "shape", "data_offsets"):
        less = {name: value for name, value in tensor().items() if name != field}
        yield f"a header without {field}", file(SAFE, safetensors({"a": less}, data))
    tail = content("single/model.safetensors") + b"\0"
    yield "a byte behind the last tensor", file(SAFE, tail)


def flipped_values() -> Iterator[Damage]:
    data = content("single/model.safetensors")
    (length,) = struct.unpack("<Q", data[:8])
    flips = random.Random(4)
    for place in sorted(flips.sample(range(8 + length, len(data)), 15)):
        yield f"{READABLE}, byte {place}", file(SAFE, flipped(data, place, flips.randrange(8)))


def shards() -> Iterator[Damage]:
    parts = folder_of("sharded")
    names = [name for name in parts if name.endswith(".safetensors")]
    for name in names:
        yield f"without {name}", files({k: v for k, v in parts.items() if k != name})
        for end in (0, 8, 100, len(parts[name]) // 2, len(parts[name]) - 1):
            yield f"{name} cut to {end} bytes", files({**parts, name: parts[name][:end]})
        yield f"{name} is a pointer of Git LFS", files({**parts, name: LFS})
        for other in names:
            text = f"{name} holds what {other} does"
            if other > name:
                swap = {name: parts[other], other: parts[name]}
                yield f"{name} and {other} swapped", files({**parts, **swap})
            if other != name:
                yield text, files({**parts, name: parts[other]})
    for name, foreign in (("torch's", content("prune.pt")), ("another's", content("prune.pt")[:9])):
        yield f"a shard that is {name}", files({**parts, names[1]: foreign})
    torchs = folder_of("torch_sharded")
    names = [name for name in torchs if name.endswith(".bin")]
    for name in names:
        yield f"without {name}", files({k: v for k, v in torchs.items() if k != name})
        yield f"{name} cut", files({**torchs, name: torchs[name][:-40]})
    swap = {names[0]: torchs[names[1]], names[1]: torchs[names[0]]}
    yield "shards of torch swapped", files({**torchs, **swap})
    more = torch.load(BytesIO(torchs[names[0]]), weights_only=True)
    more |= torch.load(BytesIO(torchs[names[1]]), weights_only=True)
    yield "a tensor in two shards of torch", files({**torchs, names[0]: saved(more)})


def indices() -> Iterator[Damage]:
    parts = folder_of("sharded")
    index = json.loads(parts[INDEX])
    places = index["weight_map"]
    tensor, shard = next(iter(places.items()))
    others = [name for name in parts if name.endswith(".safetensors") and name != shard]

    def other(**changes) -> Callable[[Path], None]:
        return files({**parts, INDEX: json.dumps({**index, **changes}).encode()})

    for value in (None, [], {}, "a", 3, [[tensor, shard]]):
        yield f"an index whose weight_map is {value!r}"[:60], other(weight_map=value)
    without = {name: value for name, value in index.items() if name != "weight_map"}
    yield "an index without weight_map", files({**parts, INDEX: json.dumps(without).encode()})
    for value in (
        None, 3, [], {}, "", ".", "/", "missing.safetensors", "../model.safetensors",
        "/etc/hostname", "/etc/hostname.safetensors", "a/../../b.safetensors", "config.json", INDEX,
        "sub/model.safetensors", "a\0b.safetensors", "x" * 5000 + ".safetensors", "\ud800.bin",
        *others,
    ):  # fmt: skip
        name = f"an index that names {value!r}"[:60]
        yield name, other(weight_map={**places, tensor: value})
    for name in ("", "model.layers.9.mlp.up_proj.weight", tensor + "x"):
        yield f"an index with the tensor {name!r}", other(weight_map={**places, name: shard})
    for end in (0, 1, 10, 200, len(parts[INDEX]) - 2):
        yield f"an index cut to {end} bytes", files({**parts, INDEX: parts[INDEX][:end]})
    for name, data in {
        "a list": b"[]",
        "text": b"none",
        "a pointer of Git LFS": LFS,
        "no UTF-8": b"\xff\xfe\xfd",
        "a deep list": b"[" * 100000,
    }.items():
        yield f"an index that is {name}", files({**parts, INDEX: data})


def archives() -> Iterator[Damage]:
    """Archives of torch.save, some of whose members are other ones."""
    data = content("torch_single/pytorch_model.bin")
    with zipfile.ZipFile(BytesIO(data)) as opened:
        members = {item.filename: opened.read(item) for item in opened.infolist()}
    pickle = next(name for name in members if name.endswith("data.pkl"))
    storage = next(name for name in members if name.endswith("data/3"))

    def archive(changes: dict[str, bytes | None]) -> Callable[[Path], None]:
        stream = BytesIO()
        with zipfile.ZipFile(stream, "w") as written:
            for name, value in {**members, **changes}.items():
                if value is not None:
                    written.writestr(zipfile.ZipInfo(name), value)
        return file(TORCH, stream.getvalue())

    yield "an archive without its pickle", archive({pickle: None})
    yield "an archive without a storage", archive({storage: None})
    yield "an archive with a storage cut", archive({storage: members[storage][:10]})
    yield "an archive with an empty storage", archive({storage: b""})
    text = members[pickle]
    for end in (0, 1, 2, 20, len(text) // 2, len(text) - 1):
        yield f"an archive whose pickle is cut to {end} bytes", archive({pickle: text[:end]})
    for name, change in {
        "is noise": random.Random(5).randbytes(500),
        "is empty text": b"\x80\x02X\x00\x00\x00\x00q\x00.",
        "has another storage class": text.replace(b"HalfStorage", b"LongStorage"),
        "has a storage class that torch lacks": text.replace(b"HalfStorage", b"HulfStorage"),
        "has a function of another module": text.replace(b"torch._utils", b"torch._other"),
        "calls a program": text.replace(b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem"),
        "has larger shapes": text.replace(b"K\x18", b"K\x78"),
        "has larger strides": text.replace(b"K\x10K\x01", b"K\x7fK\x01"),
        "has an unknown opcode": text.replace(b"}", b"\xfe", 1),
    }.items():
        assert change != text
        yield f"an archive whose pickle {name}", archive({pickle: change})


def objects() -> Iterator[Damage]:
    """Files of torch.save that hold no dict of plain tensors."""
    ones = torch.ones(4, 4)
    values = {
        "a module": torch.nn.Linear(2, 2),
        "a module under a name": {"model": torch.nn.Linear(2, 2)},
        "a function": {"a": ones, "f": print},
        "a tensor": ones,
        "a list of tensors": [ones, ones],
        "numbers": {"epoch": 3, "rate": 0.1},
        "an empty dict": {},
        "None": None,
        "text": "weights",
        "dicts of dicts": {"layer": {"weight": ones}},
        "an empty model": {"model": {}, "epoch": 3},
        "tensors under numbers": {0: ones, 1: ones},
        "a tensor on meta": {"a": torch.empty(3, device="meta")},
        "a sparse tensor": {"a": ones.to_sparse()},
    }
    for name, value in values.items():
        yield f"a file of torch with {name}", file(TORCH, saved(value))


def configs() -> Iterator[Damage]:
    model = {SAFE: content("prune.safetensors")}
    for name, data in {
        "cut": content("single/config.json")[:200],
        "empty": b"",
        "a list": b"[]",
        "a text": b'"llama"',
        "a pointer of Git LFS": LFS,
        "no UTF-8": b"\xff\xfe\xfd",
        "NUL bytes": bytes(50),
    }.items():
        yield f"a config that is {name}", files({**model, "config.json": data})
    for value in (
        *({"quant_method": name} for name in ("gptq", "awq", "bitsandbytes", "fp8", "hqq")),
        *({"quant_method": name} for name in ("mxfp4", 3, [], {"a": 1}, "")),
        {"load_in_4bit": True}, {}, [], "gptq", 4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-other"}},
        {"quant_method": "compressed-tensors", "sparsity_config": "sparse-bitmask-2"},
    ):  # fmt: skip
        data = json.dumps({"quantization_config": value}).encode()
        yield f"a config of {value!r}", files({**model, "config.json": data})

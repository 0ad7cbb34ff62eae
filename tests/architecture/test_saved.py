"""What versions have saved loads ever after, and computes the same: descriptors, layouts and
compressed matrices as pickles and states, layers as pickles and state dicts, stores and bundles of
kernels. ``samples`` has a file a version. What is new is added to the newest, and nothing that a
file holds is written anew:

    python -m tests.architecture.test_saved
"""

from __future__ import annotations

import io
import lzma
import os
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import kernlib as kl
from kernlib.blocksparse import Layout
from kernlib.cli import main
from kernlib.compat import torch_blocksparse
from kernlib.nn.compat import LinearBsl
from kernlib.sparse import SparseMatrix, compress
from tests.cli.cases import fresh

SAMPLES = Path(__file__).resolve().parent / "samples"
VERSIONS = ("0.1.0", "867fd83", "2282acb")  # a release, and revisions between releases
MASK = [[1, 0, 1], [0, 1, 0]]
PATTERNS = [(1, 4, 6, 2), (2, 3, 4, 1)]
CUSTOM = kl.Custom("exp(-v * rate) + offset", ("rate", "offset"))
DESCRIPTORS: dict[str, Callable] = {
    "gaussian": lambda: kl.gaussian(symmetric=True),
    "p": lambda: kl.p_distance(),
    "every epilogue": lambda: kl.l2_distance(
        epilogue=(kl.Matern(2.5), kl.Scale(), kl.Silu(), kl.Tanh(), CUSTOM)
    ),
    "stages": lambda: kl.Pairwise(inner=kl.Power(), outer=kl.Root(), precision="tf32"),
    "categories": lambda: kl.matern52(categories=2),
    "polynomial": lambda: kl.polynomial(4),
    "rational": lambda: kl.rational_quadratic(),
    "factor": lambda: kl.KroneckerSparse(1, 2, 3, 4, batch_last=True, epilogue=kl.Bias()),
    "chain": lambda: kl.KroneckerSparseChain(
        (kl.KroneckerSparse(1, 2, 3, 4), kl.KroneckerSparse(1, 5, 2, 4))
    ),
    "product": lambda: kl.KroneckerProduct(
        ((2, 3), (4, 5)), side="left", precision="tf32", epilogue=(kl.Gelu(), kl.Add())
    ),
    "sparse": lambda: kl.SparseMatmul((kl.Bias(), kl.LeakyRelu())),
    "dsd": lambda: kl.BlockSparseMatmul("dsd", transpose_b=True, epilogue=(kl.Gate(), kl.Add())),
    "scaled": lambda: kl.BlockSparseScaledMatmul("dds", transpose_b=True, out_dtype="float16"),
    "softmax": lambda: kl.BlockSparseSoftmax(causal=True, key_padding_mask="mul", rpe=True),
    "attention": lambda: kl.BlockSparseAttention(
        score="v * slope", mask="col <= row", captured={"slope": ("head",)}, dropout=True
    ),
}
LAYOUTS: dict[str, Callable[[], Layout]] = {
    "plain": lambda: Layout(MASK, 16),
    "heads": lambda: Layout([MASK, [[0, 0, 0], [1, 1, 1]]], (16, 32), 8),
}
FORMATS = ("bitmap", "u8", "u4", "u2", "macko", "dense")


def sparse_linear(format: str) -> nn.Module:
    linear = nn.Linear(24, 16)
    linear.weight.data = values(16, 24)
    return kl.nn.SparseLinear.from_linear(linear, format=format, density=0.3)


def attention(**options) -> nn.Module:
    return kl.nn.BlockSparseMultiheadAttention(16, 2, Layout([[1, 0], [1, 1]], 16), **options)


# Layers, and the shape of an input; attention takes three.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "KSLinear": (lambda: kl.nn.KSLinear(PATTERNS, activation="gelu"), (3, 12)),
    "KSLinear, bs_last": (lambda: kl.nn.KSLinear(PATTERNS, bs_last=True, bias=False), (12, 3)),
    "KSLinear, einsum": (lambda: kl.nn.KSLinear(PATTERNS, algo="einsum"), (3, 12)),
    "KroneckerLinear": (lambda: kl.nn.KroneckerLinear((3, 4), (2, 5), activation="relu"), (3, 12)),
    **{f"SparseLinear, {name}": (partial(sparse_linear, name), (2, 24)) for name in FORMATS},
    "BlockSparseLinear": (
        lambda: kl.nn.BlockSparseLinear(48, 32, Layout(MASK, 16, 4), activation="silu"), (2, 48)
    ),
    "BlockSparseConv2d": (
        lambda: kl.nn.BlockSparseConv2d(16, 16, 3, layout=16, density=0.5), (1, 16, 4, 4)
    ),
    "BlockSparseMultiheadAttention": (attention, (32, 1, 16)),
    "BlockSparseMultiheadAttention, batch_first": (
        lambda: attention(batch_first=True, bias=False), (1, 32, 16)
    ),
    "LinearBsl": (lambda: LinearBsl(12, 4), (12, 3)),
    "torch_blocksparse.Linear": (
        lambda: torch_blocksparse.Linear(48, 32, 16, torch.tensor([[MASK[0], MASK[1]]]).mT),
        (2, 48),
    ),
}  # fmt: skip


def written(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data: bytes) -> object:
    return torch.load(io.BytesIO(data), weights_only=True)


def values(*shape: int) -> torch.Tensor:
    """The same in each version."""
    return (torch.arange(torch.Size(shape).numel()) % 7 / 4 - 0.75).view(shape)


def called(layer: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    x = values(*shape)
    with torch.no_grad():
        if isinstance(layer, kl.nn.BlockSparseMultiheadAttention):
            return layer(x, x, x)[0]
        return layer(x)


def matrix(format: str) -> SparseMatrix:
    dense = values(20, 48)
    return compress(torch.where(dense > 0.3, dense, 0), format)


def entries() -> dict[str, Callable[[], dict]]:
    """What is saved of each thing."""

    def layer(name: str) -> dict:
        make, shape = LAYERS[name]
        built = make()
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.copy_(values(*parameter.shape))
        saved = {"pickle": pickle.dumps(built, 4), "state": written(built.state_dict())}
        return saved | {"result": written(called(built, shape))}

    def descriptor(name: str) -> dict:
        return {"pickle": pickle.dumps(DESCRIPTORS[name](), 4), "text": DESCRIPTORS[name]().text}

    def stateful(built: Layout | SparseMatrix) -> dict:
        header, tensors = built.state()
        return {"pickle": pickle.dumps(built, 4), "header": header, "state": written(tensors)}

    return {
        **{f"descriptor {name}": partial(descriptor, name) for name in DESCRIPTORS},
        **{f"layout {name}": partial(lambda n: stateful(LAYOUTS[n]()), name) for name in LAYOUTS},
        **{f"matrix {name}": partial(lambda n: stateful(matrix(n)), name) for name in FORMATS},
        **{f"layer {name}": partial(layer, name) for name in LAYERS},
    }


@cache
def saved(version: str) -> dict[str, dict]:
    return pickle.loads(lzma.decompress((SAMPLES / f"{version}.xz").read_bytes()))


def entry(version: str, kind: str, name: str) -> dict:
    """What a version has saved; a version from before there was such a thing skips the test."""
    if f"{kind} {name}" not in saved(version):
        pytest.skip(f"{version} had no {kind} {name}")
    return saved(version)[f"{kind} {name}"]


@pytest.mark.few(1000)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_descriptor_loads(name, version):
    held, descriptor = entry(version, "descriptor", name), DESCRIPTORS[name]()
    loaded = pickle.loads(held["pickle"])
    assert loaded == descriptor and hash(loaded) == hash(descriptor)
    assert held["text"] == loaded.text == descriptor.text


@pytest.mark.few(1000)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_loads(name, version):
    held, layout = entry(version, "layout", name), LAYOUTS[name]()
    for loaded in (
        pickle.loads(held["pickle"]),
        Layout.from_state(held["header"], read(held["state"])),
    ):
        assert loaded.text == layout.text
        assert all(map(torch.equal, loaded.tensors, layout.tensors))


@pytest.mark.few(1000)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_compressed_matrix_loads(format, version):
    held, w = entry(version, "matrix", format), matrix(format)
    x = values(3, 48)
    for loaded in (
        pickle.loads(held["pickle"]),
        SparseMatrix.from_state(held["header"], read(held["state"])),
    ):
        assert torch.equal(loaded.to_dense(), w.to_dense())
        assert torch.equal(kl.sparse.matmul(loaded, x), kl.sparse.matmul(w, x))


@pytest.mark.few(1000)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_loads_and_computes_the_same(name, version):
    held, (make, shape) = entry(version, "layer", name), LAYERS[name]
    filled, state = make(), read(held["state"])
    if version == VERSIONS[-1]:
        assert [*filled.state_dict()] == [*state]
    filled.load_state_dict(state)
    for layer in (pickle.loads(held["pickle"]), filled):
        torch.testing.assert_close(called(layer, shape), read(held["result"]))


def files(version: str, kind: str, folder: Path) -> Path:
    """Its store or its bundle, as files of a folder. Zeros at the end of a file are not saved."""
    for name, (size, data) in saved(version)["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.truncate(path, size)
    return folder / kind


@pytest.fixture
def anew():
    """Settings, and the stores and bundles that they name, are read anew behind a test."""
    yield
    fresh()


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_a_store_is_read_and_filled(version, tmp_path, monkeypatch, anew):
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(files(version, "cache", tmp_path)))
    fresh()
    run = CliRunner().invoke(main, ["cache", "list"])
    assert run.exit_code == 0 and "l1_distance" in run.output
    points = [torch.empty(8, 4, device="meta")] * 2
    kl.compile(kl.squared_distance(), specs=points, archs=("sm_80",), progress=False)
    run = CliRunner().invoke(main, ["cache", "list"])
    assert "l1_distance" in run.output and "squared" in run.output
    assert CliRunner().invoke(main, ["cache", "verify"]).exit_code == 0


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_a_bundle_is_read(version, tmp_path, monkeypatch, anew):
    bundle = files(version, "bundle", tmp_path)
    monkeypatch.setenv("KERNLIB_CACHE_DIR", f"{tmp_path / 'empty'}:{bundle}")
    fresh()
    run = CliRunner().invoke(main, ["cache", "list"])
    assert run.exit_code == 0 and "l1_distance" in run.output


def test_all_is_saved():
    assert saved(VERSIONS[-1]).keys() == entries().keys()


def write() -> None:
    path = SAMPLES / f"{VERSIONS[-1]}.xz"
    before = saved(VERSIONS[-1]) if path.exists() else {}
    whole = {name: before.get(name) or save() for name, save in entries().items()}
    path.write_bytes(lzma.compress(pickle.dumps(whole, 4), preset=9))


if __name__ == "__main__":
    write()

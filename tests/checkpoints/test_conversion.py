"""Conversions of checkpoints: what the result holds, what goes on, and what is refused."""

from __future__ import annotations

import json
import os

import pytest
import torch

import kernlib as kl
from kernlib import sparse
from kernlib.checkpoints import Checkpoint, CheckpointError, convert, plan, to_dense
from kernlib.checkpoints import target as module
from kernlib.checkpoints.stored import weights_of
from kernlib.checkpoints.writer import Shard
from kernlib.nn import sparsify
from tests.checkpoints.damage import FILES, READABLE, damages

safetensors = pytest.importorskip("safetensors.torch")

SIZES = {"q_proj": (64, 48), "k_proj": (40, 48), "down_proj": (48, 96)}
HALF = {"density": 0.5, "format": "bitmap"}
STATE, INDEX = "kernlib-convert.json", "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
LAYERS = [f"model.layers.{block}.{name}" for block in range(2) for name in sorted(SIZES)]


def state(dtype=torch.float16, density=1.0):
    """A model of two blocks, an embedding, norms and a head."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        values = torch.randn(*shape, generator=generator)
        return values.masked_fill(torch.rand(*shape, generator=generator) >= density, 0).to(dtype)

    tensors = {"model.embed_tokens.weight": random(50, 48)}
    for block in range(2):
        for name, shape in SIZES.items():
            tensors[f"model.layers.{block}.{name}.weight"] = random(*shape)
        tensors[f"model.layers.{block}.q_proj.bias"] = random(64)
        tensors[f"model.layers.{block}.norm.weight"] = random(48)
        tensors[f"model.layers.{block}.steps"] = torch.arange(3)
    return {**tensors, "lm_head.weight": random(50, 48)}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two files, with a config and a tokenizer."""
    tensors, source = state(), tmp_path / "source"
    source.mkdir()
    names = sorted(tensors)
    places = {}
    for file, some in zip(SHARDS, (names[:9], names[9:]), strict=True):
        safetensors.save_file({n: tensors[n] for n in some}, source / file, {"format": "pt"})
        places.update(dict.fromkeys(some, file))
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (source / "config.json").write_text(json.dumps({"model_type": "other", "hidden_size": 48}))
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.bin").write_bytes(b"\1" * 8)  # no file of the index, and none to copy
    return source


def tensors_of(path):
    with Checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint.entries}


def weight_of(layer, tensors):
    """The weight of a layer in the tensors of a result."""
    linear = kl.nn.SparseLinear(*layer.shape[::-1], bias=False, dtype=layer.dtype)
    linear.load_state_dict({"weight_packed": tensors[f"{layer.name}.weight_packed"]})
    return linear.to_dense()


def names_in(path):
    return sorted(file.name for file in path.iterdir())


def assert_same(tensors, others):
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_layers_are_packed_and_all_else_stays(folder, tmp_path):
    layers = convert(folder, tmp_path / "out", **HALF)
    before, after = state(), tensors_of(tmp_path / "out")
    assert sorted(layer.name for layer in layers) == LAYERS
    for layer in layers:
        weight = before.pop(f"{layer.name}.weight")
        pruned = sparse.magnitude(weight, 0.5)
        matrix = sparse.compress(pruned, "bitmap")
        assert torch.equal(weight_of(layer, after), pruned)
        del after[f"{layer.name}.weight_packed"]
        facts = layer.shape, layer.dtype, layer.density, layer.format, layer.nbytes
        shape = tuple(weight.shape)
        assert facts == (shape, weight.dtype, matrix.density, matrix.format, matrix.nbytes)
        assert layer.dense_bytes == 2 * weight.numel() and layer.us > 0 and layer.dense_us > 0
    assert_same(before, after)


def test_the_folder_is_what_transformers_reads(folder, tmp_path):
    out = tmp_path / "out"
    layers = convert(folder, out, **HALF, fuse=False)
    assert names_in(out) == sorted([*SHARDS, INDEX, "config.json", "tokenizer.json"])
    config = json.loads((out / "config.json").read_text())
    entry = config.pop("quantization_config")
    assert config == {"model_type": "other", "hidden_size": 48}
    modules = [layer.name for layer in layers]
    assert entry == {"quant_method": "kernlib", "version": 1, "modules": modules, "fuse": False}
    index, sizes = json.loads((out / INDEX).read_text()), 0
    for name in SHARDS:
        tensors = safetensors.load_file(out / name)
        assert {index["weight_map"][key] for key in tensors} == {name}
        sizes += sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == sizes


def test_tensors_lie_where_they_can_be_used(folder, tmp_path):
    convert(folder, tmp_path / "out", **HALF)
    with Checkpoint(tmp_path / "out") as checkpoint:
        for name in checkpoint.entries:
            data = checkpoint.read(name)
            unit = 64 if name.endswith("_packed") else data.element_size()
            assert data.data_ptr() % unit == 0, name


def test_a_model_takes_the_tensors(tmp_path, seed):
    def made():
        return torch.nn.ModuleDict({"blocks": torch.nn.Sequential(torch.nn.Linear(48, 64))})

    model, other = made(), made()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out", density=0.25, format="u8")
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    for one, density in ((model, 0.25), (other, 0.5)):
        sparsify(one, density=density)
    other.load_state_dict(tensors_of(tmp_path / "out"))
    x = torch.randn(3, 48)
    assert torch.equal(other["blocks"](x), model["blocks"](x))


@pytest.mark.parametrize("name", ["prune.pt", "prune.safetensors", "bitmask", "bitmask_24"])
def test_other_formats_become_dense_ones(name, tmp_path):
    with Checkpoint(FILES / name) as checkpoint:
        weights = {n: w.load(checkpoint).clone() for n, w in weights_of(checkpoint).items()}
    out = tmp_path / "dense"
    to_dense(FILES / name, out)
    assert_same(tensors_of(out), weights)
    if (FILES / name / "config.json").exists():
        config = json.loads((out / "config.json").read_text())
        assert not {"quantization_config", "sparsity_config", "compression_config"} & set(config)


def test_there_and_back(folder, tmp_path):
    layers = convert(folder, tmp_path / "out", **HALF)
    to_dense(tmp_path / "out", tmp_path / "dense")
    expected = state()
    for layer in layers:
        name = f"{layer.name}.weight"
        expected[name] = sparse.magnitude(expected[name], 0.5)
    assert_same(tensors_of(tmp_path / "dense"), expected)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config == {"model_type": "other", "hidden_size": 48}
    convert(
        tmp_path / "dense", tmp_path / "again", format="bitmap"
    )  # its zeros are those of the first time
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "out"))


def test_options_reach_the_layers(folder, tmp_path):
    some = {"density": 0.3, "per": "row", "format": "bitmap", "match": r"0\.q_proj"}
    (layer,) = convert(folder, tmp_path / "a", **some)
    assert (layer.name, layer.format) == ("model.layers.0.q_proj", "bitmap")
    weight = state()[f"{layer.name}.weight"]
    pruned = sparse.magnitude(weight, 0.3, "row")
    assert torch.equal(weight_of(layer, tensors_of(tmp_path / "a")), pruned)
    small = convert(folder, tmp_path / "b", density=0.5, values="int8")
    assert {layer.format for layer in small} == {"bitmap-int8"}


def test_a_second_conversion_leaves_packed_layers_as_they_are(folder, tmp_path):
    convert(folder, tmp_path / "a", density=0.5, values="int8")
    convert(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "c", format="bitmap", match="k_proj")
    first, second, third = (tensors_of(tmp_path / name) for name in "abc")
    assert_same(first, second)
    assert first.keys() == third.keys()
    changed = {name for name in first if not torch.equal(first[name], third[name])}
    assert changed == {f"model.layers.{block}.k_proj.weight_packed" for block in range(2)}


def test_files_of_one_name_in_two_folders(tmp_path):
    tensors, source = state(), tmp_path / "source"
    places = {}
    for part, names in (("a", sorted(tensors)[:9]), ("b", sorted(tensors)[9:])):
        (source / part).mkdir(parents=True)
        safetensors.save_file({n: tensors[n] for n in names}, source / part / "m.safetensors")
        places.update(dict.fromkeys(names, f"{part}/m.safetensors"))
    (source / INDEX).write_text(json.dumps({"weight_map": places}))
    convert(source, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors)
    assert names_in(tmp_path / "out") == ["m-2.safetensors", "m.safetensors", INDEX]


def test_what_is_computed_when_it_is_read_is_written_as_it_is(tmp_path):
    values = torch.randn(4, 4, dtype=torch.complex64).conj().imag  # with a sign beside its memory
    assert values.is_neg()
    torch.save({"a": values}, tmp_path / "model.pt")
    to_dense(tmp_path / "model.pt", tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), {"a": values.resolve_neg()})


def test_layers_that_nobody_has_pruned_stay_dense(folder, tmp_path):
    assert convert(folder, tmp_path / "out") == plan(folder) == []
    assert_same(tensors_of(tmp_path / "out"), state())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "other", "hidden_size": 48}


def test_weights_with_zeros_need_no_density(tmp_path):
    file = tmp_path / "pruned.safetensors"
    safetensors.save_file(state(density=0.4), file)
    layers = convert(file, tmp_path / "out", format="bitmap")
    assert len(layers) == len(LAYERS) and all(0.3 < layer.density < 0.5 for layer in layers)
    assert names_in(tmp_path / "out") == [INDEX, file.name]


def test_a_plan_says_what_will_be(folder, tmp_path):
    expected = plan(folder, **HALF)
    layers = {layer.name: layer for layer in convert(folder, tmp_path / "out", **HALF)}
    assert {layer.name for layer in expected} == layers.keys()
    for guess in expected:
        layer = layers[guess.name]
        assert guess.shape == layer.shape and abs(guess.density - layer.density) < 0.05
        assert abs(guess.nbytes - layer.nbytes) < 0.2 * layer.nbytes
    assert names_in(tmp_path) == ["out", "source"]


# Interruptions.


class Stop(Exception):
    pass


def interrupted(folder, out, monkeypatch, at, **options):
    """Convert until the tensor number ``at`` is to be written."""
    add, left = Shard.add, [at]

    def stopping(self, name, tensor):
        left[0] -= 1
        if left[0] < 0:
            raise Stop
        add(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "add", stopping)
        with pytest.raises(Stop):
            convert(folder, out, **options)


def test_an_interrupted_conversion_goes_on(folder, tmp_path, monkeypatch):
    full, out = tmp_path / "full", tmp_path / "out"
    layers = convert(folder, full, **HALF)
    interrupted(folder, out, monkeypatch, 4, **HALF)
    assert names_in(out) == [STATE]  # no half of a shard, under any name
    interrupted(folder, out, monkeypatch, 11, **HALF)
    assert names_in(out) == sorted([STATE, SHARDS[0]])
    time = (out / SHARDS[0]).stat().st_mtime_ns
    assert convert(folder, out, **HALF) == layers
    assert (out / SHARDS[0]).stat().st_mtime_ns == time
    assert names_in(out) == names_in(full)
    for name in names_in(full):
        assert (out / name).read_bytes() == (full / name).read_bytes(), name


def test_half_of_a_shard_that_a_killed_process_leaves_is_written_anew(
    folder, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    interrupted(folder, out, monkeypatch, 11, **HALF)
    (out / f"{SHARDS[1]}.part").write_bytes(b"half")
    convert(folder, out, **HALF)
    assert names_in(out) == sorted([*SHARDS, INDEX, "config.json", "tokenizer.json"])


def test_config_comes_last(folder, tmp_path, monkeypatch):
    """A folder that has one can be loaded."""
    write = module.write_text

    def stopping(path, text):
        if path.name == "config.json":
            raise Stop
        write(path, text)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_text", stopping)
        with pytest.raises(Stop):
            convert(folder, out, **HALF)
    assert "config.json" not in names_in(out) and STATE in names_in(out)
    convert(folder, out, **HALF)
    assert "config.json" in names_in(out) and STATE not in names_in(out)


def other_time(source, out):
    os.utime(source / SHARDS[0], (1, 1))


def damaged(source, out):
    (out / STATE).write_text("{")


def removed(source, out):
    (out / STATE).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source, out: {"density": 0.4}, "other files or with other arguments"),
        (other_time, "other files or with other arguments"),
        (damaged, "damaged"),
        (removed, "not empty"),
    ],
    ids=["arguments", "files", "damage", "no list"],
)
def test_what_does_not_go_on(folder, tmp_path, monkeypatch, change, message):
    out = tmp_path / "out"
    interrupted(folder, out, monkeypatch, 11, **HALF)
    options = {**HALF, **(change(folder, out) or {})}
    before = names_in(out)
    with pytest.raises((FileExistsError, CheckpointError), match=message):
        convert(folder, out, **options)
    assert names_in(out) == before


def test_an_out_that_holds_something_is_left_alone(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = names_in(folder)
    for out in (folder, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="out"):
            convert(folder, out, **HALF)
    assert (tmp_path / "file").read_text() == "mine" and names_in(folder) == before


def test_one_process_at_a_time(folder, tmp_path, monkeypatch):
    add, out, refused = Shard.add, tmp_path / "out", []

    def adding(self, name, tensor):
        if not refused:
            with pytest.raises(FileExistsError, match="another process converts") as caught:
                convert(folder, out, **HALF)
            refused.append(caught)
        add(self, name, tensor)

    monkeypatch.setattr(Shard, "add", adding)
    convert(folder, out, **HALF)
    assert refused and names_in(out) == sorted([*SHARDS, INDEX, "config.json", "tokenizer.json"])


def test_a_full_disk_leaves_no_half_of_a_shard(folder, tmp_path, monkeypatch):
    def full(self, name, tensor):
        raise OSError(28, "No space left on device", str(self.path))

    monkeypatch.setattr(Shard, "add", full)
    with pytest.raises(OSError, match="No space left"):
        convert(folder, tmp_path / "out", **HALF)
    assert names_in(tmp_path / "out") == [STATE]


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 1.5}, "density must be from 0 to 1, got 1.5"),
        ({"density": "half"}, "density must be a number"),
        ({"per": "layer"}, "per must be one of matrix, row"),
        ({"format": "csr"}, "format must be 'auto' or one of"),
        ({"values": "int3"}, "values must be None or one of"),
        ({"values": "int8", "format": "u4"}, "values='int8' are for the format 'bitmap' alone"),
        ({"columns": 0}, "columns must be a positive int"),
        ({"match": "["}, r"match '\[' is no regular expression"),
        ({"match": len}, "match must be None or a regular expression"),
        ({"match": "nothing"}, "has 6 linear layers .* of which match takes none"),
        ({"fuse": 1}, "fuse must be a bool"),
        ({"sparsity": 0.5}, "sparsity"),
        ({"device": "cuda"}, "device is cuda, and torch sees no GPU"),
    ],
    ids=str,
)
def test_arguments_are_checked_before_anything_is_written(
    folder, tmp_path, monkeypatch, options, message
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises((TypeError, ValueError), match=message):
        convert(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_values_that_cannot_be_represented_name_file_and_tensor(tmp_path):
    tensors = state(density=0.4)
    tensors["model.layers.1.q_proj.weight"][3, 4] = torch.nan
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors.*layers.1.q_proj.weight"):
        convert(tmp_path / "model.safetensors", tmp_path / "out", values="int8")
    assert names_in(tmp_path / "out") == [STATE]


def test_damage_leaves_nothing_behind(tmp_path):
    """Of each of 300 and more: one clear error, and no file of the result under its name."""
    count = 0
    for name, write in damages():
        source, out = tmp_path / f"{count}", tmp_path / f"out{count}"
        source.mkdir()
        write(source)
        try:
            to_dense(source, out)
            assert name.startswith(READABLE), name
        except CheckpointError as error:
            assert str(source) in str(error), name
            left = names_in(out) if out.exists() else []
            assert not left or left in ([STATE], [STATE, *left[1:]]), name
            for file in left:  # files of which all is right
                assert file == STATE or Checkpoint(out / file), name
        count += 1
    assert count >= 300

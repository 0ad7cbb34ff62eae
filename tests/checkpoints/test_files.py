"""`Checkpoint`: files that their own libraries have written are read bit for bit, and what is no
checkpoint is said."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from kernlib.checkpoints.files import Checkpoint, CheckpointError
from tests.checkpoints.damage import FILES, LFS, READABLE, content, damages
from tests.checkpoints.values import DENSE, PRUNED, filled, model_values

pytest.importorskip("safetensors", reason="comes with kernlib[test]")

ALIKE = ("single", "sharded", "torch_single", "torch_sharded")  # of one model


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, and of one dtype."""
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.view(torch.int16).equal(b.view(torch.int16))
    )


def refused(path, *words: str) -> None:
    """Opening it raises what names the file and says why."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ALIKE)
def test_what_transformers_has_saved_is_read(name):
    expected = model_values()
    with Checkpoint(FILES / name) as checkpoint:
        assert checkpoint.entries.keys() == expected.keys()
        assert len(checkpoint) == len(PRUNED) + len(DENSE)
        for key, value in expected.items():
            entry = checkpoint.entries[key]
            assert (entry.name, entry.dtype, entry.shape) == (key, value.dtype, value.shape)
            assert entry.nbytes == value.nbytes and entry.file in checkpoint.files
            assert equal(checkpoint.read(key), value)
        assert checkpoint.config["vocab_size"] == 20
        assert checkpoint.path == checkpoint.folder == FILES / name


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ALIKE)
def test_files_are_in_order(name):
    checkpoint = Checkpoint(FILES / name)
    endings = (".safetensors", ".bin")
    files = sorted(path for path in (FILES / name).iterdir() if path.suffix in endings)
    assert checkpoint.files == tuple(files)
    order = [entry.file for entry in checkpoint.entries.values()]
    assert order == sorted(order)
    is_torch = name.startswith("torch")
    assert checkpoint.metadata(files[0]) == ({} if is_torch else {"format": "pt"})
    assert checkpoint.metadata(str(files[-1])) == checkpoint.metadata(files[0])


def test_tensors_of_a_file_are_in_order_of_their_places(tmp_path):
    import safetensors.torch

    tensors = {name: torch.zeros(2, dtype=dtype) for name, dtype in
               (("a", torch.uint8), ("b", torch.float64), ("c", torch.float16))}  # fmt: skip
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    text = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    expected = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert list(Checkpoint(tmp_path / "x.safetensors").entries) == expected == ["b", "c", "a"]


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ["prune.pt", "prune_old.pth", "prune_nested.bin"])
def test_files_of_torch_are_read(name):
    safe, torchs = Checkpoint(FILES / "prune.safetensors"), Checkpoint(FILES / name)
    assert torchs.files == (FILES / name,) and torchs.folder == FILES and torchs.config is None
    assert safe.entries.keys() == torchs.entries.keys()
    for key in safe.entries:
        assert equal(safe.read(key), torchs.read(key))


def test_tensors_are_mapped():
    """Pages of a file come when they are used; what has been read stays when it is closed."""
    for name in ("single/model.safetensors", "torch_single/pytorch_model.bin"):
        with Checkpoint(FILES / name) as checkpoint:
            first = checkpoint.read("lm_head.weight")
            assert first.data_ptr() == checkpoint.read("lm_head.weight").data_ptr()
        assert equal(first, filled("lm_head.weight", (20, 16)))


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ALIKE)
def test_a_closed_checkpoint_says_so(name):
    checkpoint = Checkpoint(FILES / name)
    checkpoint.close()
    checkpoint.close()
    assert "lm_head.weight" in checkpoint and "lm_head" not in checkpoint and 3 not in checkpoint
    for call in (
        lambda: checkpoint.read("lm_head.weight"),
        lambda: checkpoint.metadata(checkpoint.files[0]),
    ):
        with pytest.raises(CheckpointError, match="is closed"):
            call()


def test_names_and_devices_that_are_none():
    checkpoint = Checkpoint(FILES / "single")
    with pytest.raises(CheckpointError, match=r"single, tensor 'lm_head': has no such tensor"):
        checkpoint.read("lm_head")
    with pytest.raises(CheckpointError, match="has no file other"):
        checkpoint.metadata("other.safetensors")
    with pytest.raises(ValueError, match="device must be"):
        checkpoint.read("lm_head.weight", "nowhere")
    with pytest.raises(TypeError, match="device must be"):
        checkpoint.read("lm_head.weight", torch.float16)


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ALIKE)
def test_other_devices_and_defaults(name):
    with torch.device("meta"):
        checkpoint = Checkpoint(FILES / name)
        value = checkpoint.read("model.norm.weight")
    assert value.device.type == "cpu" and equal(value, filled("model.norm.weight", (16,)))
    assert checkpoint.read("model.norm.weight", "meta").device.type == "meta"


def test_safetensors_are_preferred_and_a_single_file_to_shards(tmp_path):
    """As transformers does."""
    for name in ("torch_sharded", "torch_single", "sharded", "single"):
        shutil.copytree(FILES / name, tmp_path, dirs_exist_ok=True)
        checkpoint = Checkpoint(tmp_path)
        assert len(checkpoint) == len(model_values())
        suffix = ".bin" if name.startswith("torch") else ".safetensors"
        assert {file.suffix for file in checkpoint.files} == {suffix}
        assert len(checkpoint.files) == (1 if "single" in name else 4)


def test_links_to_other_folders(tmp_path):
    """As the cache of a hub has them: names of a snapshot that link to contents elsewhere."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted((FILES / "sharded").iterdir())):
        shutil.copy(path, tmp_path / "blobs" / str(number))
        os.symlink(f"../blobs/{number}", tmp_path / "snapshot" / path.name)
    assert len(Checkpoint(tmp_path / "snapshot")) == len(model_values())
    assert len(Checkpoint(tmp_path / "snapshot" / "model-00001-of-00004.safetensors")) == 3


def test_shards_in_a_folder_below(tmp_path):
    shutil.copytree(FILES / "sharded", tmp_path / "sub")
    index = json.loads(content("sharded/model.safetensors.index.json"))
    index["weight_map"] = {name: f"sub/{file}" for name, file in index["weight_map"].items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(Checkpoint(tmp_path)) == len(model_values())


def test_what_a_shard_holds_beyond_the_index_is_read(tmp_path):
    """As transformers does."""
    shutil.copytree(FILES / "sharded", tmp_path, dirs_exist_ok=True)
    index = json.loads(content("sharded/model.safetensors.index.json"))
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.norm.weight" in Checkpoint(tmp_path)


def test_an_archive_that_was_compressed_anew(tmp_path):
    """Mapped it would be read as its compressed bytes."""
    source = FILES / "torch_single" / "pytorch_model.bin"
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    checkpoint = Checkpoint(tmp_path / "x.pt")
    assert all(equal(checkpoint.read(name), x) for name, x in model_values().items())


def test_what_torch_may_save(tmp_path):
    """Views, tensors that share memory, parameters, scalars, and what is no tensor beside them."""
    base = torch.arange(12.0).view(3, 4)
    values = {
        "transposed": base.mT,
        "part": base[1, 1:3],
        "parameter": torch.nn.Parameter(base),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    torch.save({**values, "epoch": 3, "None": None}, tmp_path / "x.pth")
    checkpoint = Checkpoint(tmp_path / "x.pth")
    assert list(checkpoint.entries) == list(values)
    for name, value in values.items():
        assert checkpoint.read(name).equal(value) and not checkpoint.read(name).requires_grad
        assert checkpoint.entries[name].shape == tuple(value.shape)


def test_dtypes_of_safetensors(tmp_path):
    import safetensors.torch

    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    )  # fmt: skip
    tensors = {
        str(dtype): torch.ones(2, 3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        for dtype in dtypes
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    for name, value in tensors.items():
        entry, found = checkpoint.entries[name], checkpoint.read(name)
        assert (entry.dtype, entry.shape) == (found.dtype, found.shape) == (value.dtype, (2, 3))
        assert entry.nbytes == value.nbytes
        assert found.view(torch.uint8).equal(value.view(torch.uint8))


def test_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        Checkpoint(FILES / "single")
    assert len(Checkpoint(FILES / "torch_single")) == len(model_values())


def test_what_is_refused_names_the_file_and_a_way(tmp_path):
    refused(tmp_path / "none", f"{tmp_path / 'none'}: there is no such file or folder")
    refused(tmp_path, f"{tmp_path}: holds no checkpoint", "model.safetensors.index.json")
    (tmp_path / "other.safetensors").write_bytes(content("prune.safetensors"))
    refused(tmp_path, "passed itself", str(tmp_path / "other.safetensors"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "model.gguf", "must end in .safetensors, .bin, .pt or .pth")
    refused(FILES / "sharded/model.safetensors.index.json", "pass its folder")
    (tmp_path / "x.pt").write_bytes(LFS)
    refused(tmp_path / "x.pt", "x.pt: is a pointer of Git LFS", "git lfs pull")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "holds Python objects", "state_dict()")
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "holds no tensors", "'state_dict' or 'model'")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "x.pt, tensor 'a'", "sparse_coo")


def test_the_error_survives_pickling():
    error = CheckpointError("a: b")
    assert str(pickle.loads(pickle.dumps(error))) == "a: b"


def test_opening_what_is_damaged_raises_no_other_error(tmp_path):
    """Headers, indices, archives, configs and foreign files. What can be opened has one of its
    weights damaged, as test_stored.py has it."""
    count = 0
    for number, (name, write) in enumerate(damages()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        try:
            with Checkpoint(folder) as checkpoint:
                assert checkpoint.entries, name
        except CheckpointError as error:
            assert str(folder) in str(error), name
            assert not name.startswith(READABLE), name
            assert len(str(error)) < 2000, name
            count += 1
    assert count > 300


def test_damage_has_names_and_is_the_same_each_time(tmp_path):
    first, second = list(damages()), list(damages())
    names = [name for name, _ in first]
    assert len(set(names)) == len(names) and names == [name for name, _ in second]
    for place, (_, write) in enumerate((first[40], second[40], first[-1], second[-1])):
        (tmp_path / str(place)).mkdir()
        write(tmp_path / str(place))
    texts = [sorted(p.read_bytes() for p in Path(tmp_path / x).iterdir()) for x in "0123"]
    assert texts[0] == texts[1] and texts[2] == texts[3]

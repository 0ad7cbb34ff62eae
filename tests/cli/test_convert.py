"""`kernlib convert`: what it makes, what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from kernlib.checkpoints import Checkpoint

pytest.importorskip("safetensors", reason="comes with kernlib[test]")

OPTIONS = ("--density", "0.5", "--format", "bitmap")


@pytest.fixture
def source(tmp_path):
    generator = torch.Generator().manual_seed(0)
    names = ("blocks.0.up", "blocks.0.down", "head")
    tensors = {f"{n}.weight": torch.randn(64, 64, generator=generator).half() for n in names}
    torch.save(tensors, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_checkpoint_and_a_table(run, source, tmp_path):
    result = run("convert", source, tmp_path / "out", *OPTIONS)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "blocks.0." in line]
    assert len(rows) == 2 and all("64 x 64" in r and "0.500" in r and "bitmap" in r for r in rows)
    assert "2 layers are compressed from 16.0 KB" in result.stdout
    assert str(tmp_path / "out") in result.stdout
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert set(checkpoint.entries) == {
            "blocks.0.up.weight_packed", "blocks.0.down.weight_packed", "head.weight"
        }  # fmt: skip
    result = run("convert", tmp_path / "out", tmp_path / "dense", "--to-dense")
    assert result.exit_code == 0 and "A dense checkpoint is in" in result.stdout
    with Checkpoint(tmp_path / "dense") as checkpoint:
        weight = checkpoint.read("blocks.0.up.weight")
        assert weight.shape == (64, 64) and int(weight.count_nonzero()) == 2048


def test_json(run, source, tmp_path):
    result = run("convert", source, tmp_path / "out", *OPTIONS, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["dense_bytes"] == 2 * 2 * 64 * 64
    assert facts["nbytes"] == sum(layer["nbytes"] for layer in facts["layers"])
    assert {layer["name"] for layer in facts["layers"]} == {"blocks.0.up", "blocks.0.down"}
    assert facts["layers"][0]["dtype"] == "float16" and facts["layers"][0]["shape"] == [64, 64]


def test_a_dry_run_writes_nothing(run, source, tmp_path):
    for arguments in ((source,), (source, tmp_path / "out")):
        result = run("convert", *arguments, *OPTIONS, "--dry-run")
        assert result.exit_code == 0, result.output
        assert "2 layers would be compressed" in result.stdout and "ms a token" in result.stdout
    assert [file.name for file in tmp_path.iterdir() if file.name != "cache"] == ["model.pt"]


def test_it_goes_on_where_it_was(run, source, tmp_path, monkeypatch):
    from kernlib.checkpoints.writer import Shard

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "close", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run("convert", source, tmp_path / "out", *OPTIONS).exit_code != 0
    result = run("convert", source, tmp_path / "out", "--density", "0.4")
    assert result.exit_code == 1 and "with other arguments" in result.stderr
    assert run("convert", source, tmp_path / "out", *OPTIONS).exit_code == 0
    result = run("convert", source, tmp_path / "out", *OPTIONS)
    assert result.exit_code == 1 and "is not empty" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing argument 'OUT'"),
        (("out", "--to-dense", "--density", "0.5"), 2, "--to-dense goes with --json alone"),
        (("out", "--to-dense", "--dry-run"), 2, "--to-dense goes with --json alone"),
        (("out", "--to-dense", "--device", "cuda"), 2, "--to-dense goes with --json alone"),
        (("out", "--density", "2"), 1, "density must be from 0 to 1, got 2"),
        (("out", "--format", "csr"), 1, "format must be 'auto' or one of"),
        (("out", "--match", "nothing"), 1, "has 2 linear layers"),
        (("out", "--device", "tpu"), 1, "tpu"),
        (("out", "--per", "layer"), 2, "'layer' is not one of"),
    ],
    ids=str,
)
def test_what_is_refused(run, source, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    result = run("convert", source, *arguments)
    assert result.exit_code == code and message in result.stderr
    assert not (tmp_path / "out").exists() and "Traceback" not in result.output


def test_a_checkpoint_that_is_none(run, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    for path in (tmp_path / "model.safetensors", tmp_path / "none"):
        result = run("convert", path, tmp_path / "out", *OPTIONS)
        assert result.exit_code == 1 and str(path) in result.stderr
        assert result.stderr.startswith("Error: ") and len(result.stderr.splitlines()) < 4

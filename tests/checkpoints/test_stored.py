"""`weights_of`: weights in each format that is read, and those of others, which are refused."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

import kernlib as kl
from kernlib.checkpoints.files import Checkpoint, CheckpointError
from kernlib.checkpoints.stored import weights_of
from tests.checkpoints.damage import FILES, READABLE, content, damages
from tests.checkpoints.test_files import ALIKE, equal
from tests.checkpoints.values import DENSE, ODD, PRUNED, filled, model_values, pruned, pruned_24

library = pytest.importorskip("safetensors.torch", reason="comes with kernlib[test]")


def loaded(path) -> dict[str, torch.Tensor]:
    """All weights, whose tensors are as they say."""
    result = {}
    with Checkpoint(path) as checkpoint:
        for name, weight in weights_of(checkpoint).items():
            value = result[name] = weight.load(checkpoint)
            assert (weight.name, weight.shape) == (name, tuple(value.shape))
            assert weight.dtype == value.dtype
    return result


def kinds(path) -> dict[str, str]:
    return {name: weight.kind for name, weight in weights_of(Checkpoint(path)).items()}


def save(path, tensors, config=None):
    library.save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", ALIKE)
def test_dense_weights(name):
    assert same(loaded(FILES / name), model_values())
    assert set(kinds(FILES / name).values()) == {"dense"}


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    "name, kind, prune", [("bitmask", "bitmask", pruned), ("bitmask_24", "24-bitmask", pruned_24)]
)
def test_models_of_compressed_tensors(name, kind, prune):
    assert same(loaded(FILES / name), model_values(prune))
    expected = dict.fromkeys(PRUNED, kind) | dict.fromkeys(DENSE, "dense")
    assert kinds(FILES / name) == expected


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    "name, dtype",
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("former", torch.float16)],
)
def test_bitmasks_of_odd_shapes(name, dtype):
    """Empty rows, columns that fill no byte, vectors, four dimensions, no elements; "former" has
    the names of versions before 0.9."""
    path = FILES / f"bitmask_{name}.safetensors"
    assert same(loaded(path), {key: pruned(key, shape, dtype) for key, shape in ODD.items()})
    assert set(kinds(path).values()) == {"bitmask"}


def test_the_former_names_of_biases(tmp_path):
    """The first versions compressed all tensors."""
    tensors = library.load(content("bitmask_former.safetensors"))
    tensors = {name.replace("third.weight", "first.bias"): x for name, x in tensors.items()}
    values = loaded(save(tmp_path / "x.safetensors", tensors))
    assert equal(values["first.bias"], pruned("third.weight", (7,)))
    assert "first.weight" in values and "third.weight" not in values


def test_two_of_four_in_bfloat16():
    values = loaded(FILES / "bitmask_24_bfloat16.safetensors")
    assert same(values, {"first.weight": pruned_24("first.weight", (2, 6), torch.bfloat16)})


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    "name", ["prune.pt", "prune_old.pth", "prune_nested.bin", "prune.safetensors"]
)
def test_masks_of_torch(name):
    shapes = {"linear.weight": (6, 10), "linear.bias": (6,), "convolution.weight": (4, 3, 2, 2)}
    values = loaded(FILES / name)
    for key, shape in shapes.items():
        mask = (pruned(key, shape) != 0).to(torch.bfloat16)
        assert equal(values[key], filled(key, shape, torch.bfloat16) * mask)
    masked = {key for key, kind in kinds(FILES / name).items() if kind == "masked"}
    assert masked == set(shapes)
    # Of spectral_norm, whose original has no mask.
    others = {"convolution.bias", *(f"dense.{x}" for x in ("bias", "weight_orig", "weight_u"))}
    assert values.keys() == masked | others | {"dense.weight_v"}


@pytest.mark.few(1000)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int64])
def test_masks_of_other_dtypes(dtype, tmp_path):
    orig = filled("a", (3, 5)).half()
    orig[0, 0], orig[0, 1] = torch.inf, -1.0
    mask = (pruned("a", (3, 5)) != 0).to(dtype)
    mask[0, :2] = 0
    path = save(tmp_path / "x.safetensors", {"a_orig": orig, "a_mask": mask})
    result = loaded(path)["a"]
    assert equal(result.nan_to_num(7.0), (orig * mask.half()).nan_to_num(7.0))
    assert result[0, 0].isnan() and result[0, 1] == 0 and math.copysign(1, result[0, 1]) == -1


def test_names_that_look_like_masks(tmp_path):
    """Beside a weight of the same name they are a model's own; without any mask, too."""
    values = {name: filled(name, (4, 4)) for name in ("w", "w_orig", "w_mask")}
    assert same(loaded(save(tmp_path / "x.safetensors", values)), values)
    values = {"w_orig": values["w_orig"], "attention_mask": values["w_mask"]}
    assert same(loaded(save(tmp_path / "x.safetensors", values)), values)
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3).half())
    values = linear.state_dict()
    assert same(loaded(save(tmp_path / "x.safetensors", values)), values)


def test_names_that_look_like_bitmasks(tmp_path):
    values = {name: filled(name, (4,)) for name in ("a.shape", "b.compressed", "c.row_offsets")}
    values["c.shape"] = filled("c", (2, 2))
    assert same(loaded(save(tmp_path / "x.safetensors", values)), values)


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    "format, values", [("bitmap", None), ("u8", None), ("macko", None), ("bitmap", "int4")]
)
def test_matrices_of_kernlib(format, values, tmp_path):
    weight = pruned("up_proj.weight", (64, 96))
    matrix = kl.sparse.compress(weight, format, values=values)
    layer = kl.nn.SparseLinear.from_matrix(matrix, bias=filled("bias", (64,)))
    path = save(
        tmp_path / "x.safetensors",
        {f"up_proj.{name}": x for name, x in layer.state_dict().items()},
        {"quantization_config": {"quant_method": "kernlib"}},
    )
    found = loaded(path)
    assert same(found, {"up_proj.weight": matrix.to_dense(), "up_proj.bias": filled("bias", (64,))})
    assert values or equal(found["up_proj.weight"], weight)
    assert kinds(path) == {"up_proj.weight": "packed", "up_proj.bias": "dense"}


def test_configs_that_do_not_matter(tmp_path):
    """Where a config says which format is stored, tensors say the same."""
    sparsity = json.loads(content("bitmask/config.json"))["quantization_config"]
    for config in (
        {"compression_config": sparsity},
        {"compression_config": {**sparsity, "quant_method": "sparseml"}},
        {"sparsity_config": sparsity["sparsity_config"]},
        {"quantization_config": {"sparsity_config": sparsity["sparsity_config"]}},
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "dense"}},
        {"quantization_config": None},
        {},
    ):
        shutil.copy(FILES / "bitmask" / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert same(loaded(tmp_path), model_values())


def test_order_is_that_of_the_files():
    """A weight has the place of the first of its parts."""
    checkpoint = Checkpoint(FILES / "bitmask")
    firsts = [next(iter(x.parts.values())).name for x in weights_of(checkpoint).values()]
    assert firsts == [name for name in checkpoint.entries if name in set(firsts)]


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    "name, quantiser",
    [
        ("gptq", "GPTQ"),
        ("awq", "AWQ"),
        ("pack_quantized", "pack-quantized"),
        ("int_quantized", "int8"),
        ("float_quantized", "float8_e4m3fn"),
        ("float_quantized_sparse", "float8_e4m3fn"),
    ],
)
def test_quantised_weights_are_refused(name, quantiser, tmp_path):
    """By the config, which names the method, and without one by the tensors."""
    with pytest.raises(CheckpointError, match=r"config\.json: holds values quantised by") as caught:
        weights_of(Checkpoint(FILES / name))
    assert "values='int4'" in str(caught.value)
    shutil.copy(FILES / name / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors, tensor '.*up_proj") as caught:
        weights_of(Checkpoint(tmp_path))
    assert quantiser in str(caught.value)


def test_float8_without_scales_is_dense(tmp_path):
    """A cast, of which every value is one."""
    value = filled("a", (4, 4)).to(torch.float8_e4m3fn)
    found = loaded(save(tmp_path / "x.safetensors", {"a.weight": value}))["a.weight"]
    assert found.dtype == value.dtype and found.view(torch.uint8).equal(value.view(torch.uint8))


def test_loading_what_is_damaged_raises_no_other_error(tmp_path):
    """Each one, but for values of dense tensors, which may be any."""
    count = 0
    for number, (name, write) in enumerate(damages()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        try:
            values = loaded(folder)
        except CheckpointError as error:
            assert str(folder) in str(error), name
            assert not name.startswith(READABLE), name
        else:
            assert values and name.startswith(READABLE), name
        count += 1
    assert count > 700

"""Writes the files of ``tests/checkpoints/files``, each by the library whose format it has.

By hand, where torch==2.13.0, safetensors==0.8.0, transformers==4.57.6, accelerate==1.15.0 and
compressed-tensors==0.14.0.1 are installed, the last version of it that writes sparse formats:

    python -m tests.checkpoints.write_files

and then, where compressed-tensors==0.8.1 and transformers==4.57.6 are, whose names are others,

    python -m tests.checkpoints.write_files former

Those of GPTQ and AWQ are written here, as zeros with the names, dtypes and shapes of GPTQModel
7.7.0 and AutoAWQ 0.2.9: the former requires a newer torch, the latter Triton.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch.nn.utils import prune

from tests.checkpoints.values import (
    HIDDEN,
    INNER,
    ODD,
    VOCABULARY,
    filled,
    model_values,
    pruned,
    pruned_24,
)

FILES = Path(__file__).parent / "files"
HALF = torch.float16


def model_of(values: dict[str, torch.Tensor]):
    """A model of one layer of transformers that holds ``values``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).half()
    model.load_state_dict(values)
    return model


def write_transformers() -> None:
    """Shards and their index, of both kinds of files, and each as one file."""
    model = model_of(model_values())
    for name, safe, size in (
        ("sharded", True, "2KB"),
        ("single", True, "1GB"),
        ("torch_sharded", False, "2KB"),
        ("torch_single", False, "1GB"),
    ):
        model.save_pretrained(FILES / name, safe_serialization=safe, max_shard_size=size)


def pruned_by_torch() -> dict[str, torch.Tensor]:
    """The state_dict of layers of which weights and a bias have masks, and one has none."""
    torch.manual_seed(0)  # of spectral_norm's vectors
    layers = torch.nn.ModuleDict(
        {
            "linear": torch.nn.Linear(10, 6),
            "convolution": torch.nn.Conv2d(3, 4, 2),
            "dense": torch.nn.utils.spectral_norm(torch.nn.Linear(4, 3)),
        }
    ).bfloat16()
    for name, parameter in layers.named_parameters():
        parameter.data = filled(name, tuple(parameter.shape), torch.bfloat16)
    for name in ("linear.weight", "linear.bias", "convolution.weight"):
        layer, _, parameter = name.rpartition(".")
        mask = pruned(name, tuple(layers.get_parameter(name).shape)) != 0
        prune.custom_from_mask(layers[layer], parameter, mask)
    return layers.state_dict()


def write_torch() -> None:
    """The same tensors in files of torch of both its formats, nested in a training program's, and
    of safetensors."""
    state = pruned_by_torch()
    torch.save(state, FILES / "prune.pt")
    torch.save(state, FILES / "prune_old.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "rate": 0.1, "state_dict": state}, FILES / "prune_nested.bin")
    safetensors.torch.save_file(state, FILES / "prune.safetensors", {"format": "pt"})


def write_compressed_tensors() -> None:
    """Models, whose linear layers are compressed, and single weights of odd shapes."""
    from compressed_tensors import BitmaskConfig, ModelCompressor
    from compressed_tensors.compressors import Sparse24BitMaskCompressor
    from compressed_tensors.config import Sparse24BitMaskConfig

    bitmask = BitmaskConfig(targets=["Linear"], ignore=["lm_head"], global_sparsity=0.66)
    halves = Sparse24BitMaskConfig(targets=["Linear"], ignore=["lm_head"], global_sparsity=0.5)
    for name, values, config in (
        ("bitmask", model_values(), bitmask),
        ("bitmask_24", model_values(pruned_24), halves),
    ):
        model = model_of(values)
        compressor = ModelCompressor(sparsity_config=config)
        state = compressor.compress(model)
        model.save_pretrained(FILES / name, state_dict=state)
        compressor.update_config(FILES / name)
    for dtype in (torch.float32, torch.bfloat16):
        write_bitmask(f"bitmask_{dtype}".replace("torch.", ""), dtype)
    values = {"first.weight": pruned_24("first.weight", (2, 6), torch.bfloat16)}
    state = Sparse24BitMaskCompressor(config=halves).compress(values)
    safetensors.torch.save_file(state, FILES / "bitmask_24_bfloat16.safetensors")


def write_bitmask(name: str, dtype: torch.dtype) -> None:
    """Weights of odd shapes in the format sparse-bitmask."""
    from compressed_tensors import BitmaskConfig
    from compressed_tensors.compressors import BitmaskCompressor

    values = {name: pruned(name, shape, dtype) for name, shape in ODD.items()}
    state = BitmaskCompressor(config=BitmaskConfig()).compress(values)
    safetensors.torch.save_file(state, FILES / f"{name}.safetensors")


def write_quantised_by_compressed_tensors() -> None:
    """Refused: a layer in some of its quantised formats, and one that is sparse besides."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.config import Sparse24BitMaskConfig
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    halves = Sparse24BitMaskConfig(targets=["Linear"], global_sparsity=0.5)
    for preset, format, sparsity in (
        ("W4A16", "pack-quantized", None),
        ("W8A8", "int-quantized", None),
        ("FP8_DYNAMIC", "float-quantized", None),
        ("FP8_DYNAMIC", "float-quantized", halves),
    ):
        layers = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(128, 8, bias=False).half()})
        layers["up_proj"].weight.data = pruned_24("up_proj.weight", (8, 128))
        scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=format)
        apply_quantization_config(layers, config)
        for name, parameter in layers.named_parameters():
            if name.endswith("_scale"):
                parameter.data.fill_(0.25)
        compressor = ModelCompressor(sparsity_config=sparsity, quantization_config=config)
        folder = FILES / f"{format.replace('-', '_')}{'_sparse' if sparsity else ''}"
        folder.mkdir()
        state = compressor.compress(layers)
        safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text("{}")
        compressor.update_config(folder)


def write_quantised() -> None:
    """Refused: GPTQ and AWQ of 4 bits in groups of 32, of a layer of 64 by 32 features."""
    names = {"qzeros": (torch.int32, (2, 4)), "scales": (HALF, (2, 32))}
    gptq = {**names, "qweight": (torch.int32, (8, 32)), "g_idx": (torch.int32, (64,))}
    awq = {**names, "qweight": (torch.int32, (64, 4))}
    for method, parts in (("gptq", gptq), ("awq", awq)):
        folder = FILES / method
        folder.mkdir()
        state = {
            f"model.layers.0.mlp.up_proj.{name}": torch.zeros(shape, dtype=dtype)
            for name, (dtype, shape) in parts.items()
        }
        safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
        config = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_all() -> None:
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    write_transformers()
    write_torch()
    write_compressed_tensors()
    write_quantised_by_compressed_tensors()
    write_quantised()
    for path in FILES.rglob("generation_config.json"):
        path.unlink()


if __name__ == "__main__":
    if sys.argv[1:] == ["former"]:
        write_bitmask("bitmask_former", torch.float16)
    else:
        write_all()

"""What transformers is refused of damaged folders, and how kernlib registers with it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

import kernlib as kl
from kernlib.errors import KernlibWarning
from kernlib.nn.sparse_holding import PACKED

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
ours = pytest.importorskip("kernlib.compat.transformers")
from tests.compat.transformers_cases import (  # noqa: E402
    MATCHES,
    ROOT,
    bert,
    config_of,
    copied,
    edit,
    gpt2,
    layers_of,
    llama,
    loaded,
    logits,
    mixtral,
    rewrite,
    run,
    save_llama,
    since_5,
    sparse,
    tied,
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return save_llama(tmp_path_factory)


@pytest.fixture
def saved(first, tmp_path):
    return copied(first, tmp_path)


# What is wrong.

WRONG = {
    "version 2": ({"version": 2}, "has version 2, and this kernlib reads version 1"),
    "no version": ({"version": None}, "has no 'version'"),
    "a text as version": ({"version": "1"}, "has version '1'"),
    "no modules": ({"modules": None}, "has no 'modules'"),
    "a text as modules": ({"modules": "lm_head"}, "a list of whole names"),
    "numbers as modules": ({"modules": [3]}, "a list of whole names"),
    "a name twice": ({"modules": ["lm_head", "lm_head"]}, "names 'lm_head' twice"),
    "fuse as number": ({"fuse": 1}, "must have a bool for fuse"),
    "another entry": ({"bits": 4}, "has 'bits', which version 1 does not"),
    "no layer": ({"modules": ["model.layers.7.mlp.up_proj"]}, "'model.layers.7.mlp.up_proj' in"),
    "no name": ({"modules": ["up_proj"]}, "has no such layer: names are whole ones, such as 'mo"),
    "no linear layer": ({"modules": ["model.layers.0.mlp"]}, "LlamaMLP: only nn.Linear and"),
    "no dense one": ({"modules": ["lm_head", "model.embed_tokens"]}, "Embedding: only nn.Linear"),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_refused_by_name(saved, case):
    changes, match = WRONG[case]
    edit(saved[1], **changes)
    with pytest.raises(ValueError, match=match):
        transformers.AutoModelForCausalLM.from_pretrained(saved[1])


KEY = f"lm_head.{PACKED}"


def _short(tensors):
    tensors[KEY] = tensors[KEY][: tensors[KEY].numel() // 2].clone()


FILES = {
    "lacking": (lambda t: t.pop(KEY), f"whose compressed weights the files .* '{KEY}'"),
    "dense": (
        lambda t: t.update({"lm_head.weight": t.pop(KEY)}),
        f"the files .* lack: '{KEY}'. They hold 1 of them dense, such as 'lm_head.weight': take",
    ),
    "renamed": (lambda t: t.update({f"head.{PACKED}": t.pop(KEY)}), f"lack: '{KEY}'"),
    "floats": (lambda t: t.update({KEY: t[KEY].float()}), f"{KEY} must be a vector of uint8"),
    "matrix": (lambda t: t.update({KEY: t[KEY][None]}), f"{KEY} must be a vector of uint8"),
    "another": (
        lambda t: t.update({KEY: t[f"model.layers.0.mlp.up_proj.{PACKED}"].clone()}),
        rf"{KEY} is a matrix of shape \(128, 64\), and the layer has \(96, 64\)",
    ),
    "damaged": (lambda t: t.update({KEY: torch.zeros_like(t[KEY])}), f"{KEY}: these bytes do not"),
    "short": (_short, "must lie in its"),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", FILES)
def test_wrong_weights_are_refused_by_name(saved, case):
    change, match = FILES[case]
    rewrite(saved[1], change)
    with pytest.raises(ValueError, match=match):
        transformers.AutoModelForCausalLM.from_pretrained(saved[1])


@pytest.mark.parametrize("shards", ["30KB", "1GB"])
@pytest.mark.parametrize("make", [llama, tied, gpt2, mixtral, bert])
def test_a_dense_model_of_the_config_of_a_compressed_one_is_loaded(make, shards, tmp_path):
    """``sparsify`` writes its layers into the config, of which others may be made."""
    kind = "AutoModelForMaskedLM" if make is bert else "AutoModelForCausalLM"
    model = sparse(make)
    dense = type(model)(model.config).eval()
    dense.save_pretrained(tmp_path / "dense", max_shard_size=shards)
    assert config_of(tmp_path / "dense")["quantization_config"]["modules"] == [*layers_of(model)]
    with pytest.warns(KernlibWarning, match=r"config\.json names .* is loaded dense"):
        again = loaded(tmp_path / "dense", kind)
    assert not layers_of(again) and torch.equal(logits(again), logits(dense))
    assert not hasattr(again.config, "quantization_config") and not again.is_quantized
    again.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in config_of(tmp_path / "again")
    assert {*safetensors.load_file(tmp_path / "again/model.safetensors")} == {
        key for file in (tmp_path / "dense").glob("*.safetensors")
        for key in safetensors.load_file(file)
    }  # fmt: skip
    assert torch.equal(logits(loaded(tmp_path / "again", kind)), logits(dense))
    kl.nn.sparsify(again, match=MATCHES[make], density=0.4)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again", kind)), logits(again))


def test_the_base_of_a_dense_model_of_such_a_config_is_loaded(tmp_path):
    model = sparse(match="proj")
    dense = type(model)(model.config).eval()
    dense.save_pretrained(tmp_path)
    with pytest.warns(KernlibWarning, match="is loaded dense"):
        base = transformers.AutoModel.from_pretrained(tmp_path)
    assert not layers_of(base)
    for one, other in zip(base.parameters(), dense.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_shard_that_lacks_a_weight(tmp_path):
    sparse().save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    rewrite(tmp_path, lambda tensors: tensors.pop(KEY), index["weight_map"][KEY])
    with pytest.raises(ValueError, match=f"names 1 layers .* '{KEY}'. Copy the missing files"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@since_5
def test_pickled_weights_that_lack_one(saved):
    _, folder = saved
    tensors = safetensors.load_file(folder / "model.safetensors")
    tensors.pop(KEY)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"the files .* lack: '{KEY}'"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)


def test_a_tied_head_is_refused(tmp_path):
    model = sparse(tied)
    model.save_pretrained(tmp_path)
    edit(tmp_path, modules=[*layers_of(model), "lm_head"])
    with pytest.raises(ValueError, match=r"weight is tied to model\.embed_tokens\.weight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_dense_folder_is_not_compressed_while_it_is_read(tmp_path):
    llama().save_pretrained(tmp_path)
    config = ours.KernlibConfig(["lm_head"])
    with pytest.raises(ValueError, match=r"compress the model by kernlib\.nn\.sparsify"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_configurations():
    config = ours.KernlibConfig(["a", "b"], fuse=False)
    assert ours.KernlibConfig.from_dict(config.to_dict()) == config == copy.deepcopy(config)
    assert ours.KernlibConfig(["a"]) != config and dict(config) == config.to_dict()
    assert json.loads(config.to_json_string()) == config.to_dict()
    other, rest = ours.KernlibConfig.from_dict(config.to_dict(), return_unused_kwargs=True, x=3)
    assert other == config and rest == {"x": 3}
    with pytest.raises(ValueError, match="has quant_method 'gptq', which must be 'kernlib'"):
        ours.KernlibConfig([], quant_method="gptq")
    with pytest.raises(TypeError):
        ours.KernlibConfig()


# Registration.

LOADS = """
import sys
{imports}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
import torch
print(type(model.lm_head).__name__, model(torch.arange(3, 11)[None]).logits.double().sum().item())
"""
IMPORTS = {
    "kernlib first": "import kernlib\nassert 'transformers' not in sys.modules\n"
    "assert 'torch' not in sys.modules\nimport transformers",
    "transformers first": "import transformers, transformers.quantizers.auto, kernlib",
    "between": "import transformers, kernlib",
    "twice": "import kernlib, importlib, transformers\nimportlib.reload(kernlib)\n"
    "importlib.reload(kernlib.hooks)",
    "by its own name": "import kernlib.compat.transformers, transformers",
    "anew": "import kernlib\n"
    "for name in [n for n in sys.modules if n.startswith('kernlib')]: del sys.modules[name]\n"
    "import kernlib, transformers",
    "threads": "import threading, kernlib, importlib\n"
    "names = ['transformers.quantizers.auto', 'kernlib.compat.transformers'] * 3\n"
    "threads = [threading.Thread(target=importlib.import_module, args=(n,)) for n in names]\n"
    "[t.start() for t in threads], [t.join() for t in threads]\nimport transformers",
    "asked for": "import kernlib, importlib.util\n"
    "importlib.util.find_spec('transformers.quantizers.auto')\nimport transformers",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("order", IMPORTS)
def test_importing_kernlib_suffices(saved, order):
    model, folder = saved
    kind, total = run(LOADS.format(imports=IMPORTS[order]), folder).split()
    assert kind == "SparseLinear" and float(total) == pytest.approx(
        logits(model).double().sum().item(), rel=1e-4, abs=1e-4
    )


def test_two_processes_load_one_folder(saved):
    _, folder = saved
    program = LOADS.format(imports="import kernlib, transformers")
    command = [sys.executable, "-c", program, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    first, second = [process.communicate()[0] for process in both]
    assert first == second and first.startswith("SparseLinear")


def test_the_finder_goes_and_the_module_keeps_its_loader():
    program = """
import sys, kernlib
waiting = [f for f in sys.meta_path if type(f).__module__ == "kernlib.hooks"]
import transformers.quantizers.auto as auto
print(len(waiting), waiting[0] in sys.meta_path)
print(type(auto.__loader__).__name__, type(auto.__spec__.loader).__name__)
"""
    assert run(program).split() == ["1", "False", "SourceFileLoader", "SourceFileLoader"]


@pytest.mark.parametrize("missing", ["transformers", "transformers.quantizers"])
def test_without_transformers_it_says_what_to_install(missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
import kernlib, torch
from kernlib.compat import transformers as ours
layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
kernlib.nn.sparsify(layer, density=0.5)
for call in (ours.register, lambda: ours.attach(layer), lambda: ours.KernlibConfig(["a"])):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    lines = run(program).splitlines()
    assert len(lines) == 3 and all("pip install 'transformers>=" in line for line in lines)


def test_registering_again_changes_nothing():
    auto = transformers.quantizers.auto
    kl.compat.transformers.register()
    assert auto.AUTO_QUANTIZER_MAPPING["kernlib"] is ours.KernlibQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["kernlib"] is ours.KernlibConfig

"""Which tensors of a checkpoint are weights of linear layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module

import torch

from kernlib.checkpoints.files import Checkpoint, fault
from kernlib.checkpoints.stored import StoredWeight
from kernlib.families.sparse.layout import DTYPES
from kernlib.nn.linears import is_conv1d, linears, weight_parameter

WEIGHT = ".weight"
# Models of transformers whose linear layers are Conv1D, which hold their weights transposed.
TRANSPOSED = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp")
NO_LINEAR = re.compile(r"embed|norm|(^|\.)(wte|wpe|ln_\w+|lm_head|shared)(\.|$)", re.IGNORECASE)
IN_BLOCK = re.compile(r"\.\d+\.")


def linear_layers(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> dict[str, bool]:
    """The linear layers whose weights a checkpoint has, by the names of their modules, and whether
    each weight is stored transposed, (in_features, out_features).

    With transformers, and a config.json that names a model of it, they are those of this model,
    without the head and without weights that two modules share. Otherwise each matrix called
    ``NAME.weight`` of a numbered block is taken for one, unless its name says that it embeds or
    normalises.
    """
    names = {
        name.removesuffix(WEIGHT)
        for name, weight in weights.items()
        if name.endswith(WEIGHT) and len(weight.shape) == 2 and weight.dtype in DTYPES.values()
    }
    model = _model_of(checkpoint)
    if model is None:
        _check_layout(checkpoint)
        in_blocks = (n for n in names if IN_BLOCK.search(f".{n}.") and not NO_LINEAR.search(n))
        return {name: False for name in weights_order(weights, in_blocks)}
    layers = _layers_of(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored = {}
    for name in names:
        # A checkpoint of the model without its head has names without the prefix.
        for place in (name, prefix + name, name.removeprefix(prefix)):
            if place in layers:
                stored[name] = layers[place]
                break
    return {name: stored[name] for name in weights_order(weights, stored)}


def weights_order(weights: Mapping[str, StoredWeight], names) -> list[str]:
    """Names of modules in the order of their weights."""
    some = set(names)
    return [n.removesuffix(WEIGHT) for n in weights if n.removesuffix(WEIGHT) in some]


def _layers_of(model: torch.nn.Module) -> dict[str, bool]:
    """Linear layers of a model whose weights are their own, but for its head."""
    head = model.get_output_embeddings()
    every = [(name, layer) for _, _, name, layer in linears(model)]
    users: dict[int, int] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return {
        name: is_conv1d(type(layer))
        for name, layer in every
        if layer is not head and users[id(weight_parameter(layer))] == 1
    }


def _model_of(checkpoint: Checkpoint) -> torch.nn.Module | None:
    """The model of a config.json on meta; None without one, without transformers, or where it has
    no such model."""
    config = checkpoint.config or {}
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or "auto_map" in config:
        return None
    try:
        transformers = import_module("transformers")
    except ImportError:
        return None
    kind = getattr(transformers, str(architectures[0]), None)
    if kind is None or not hasattr(kind, "config_class"):
        return None
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    try:
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(plain))
    except Exception as error:  # of the model's own code
        text = f"transformers cannot make the {architectures[0]} that it describes: {error}"
        raise fault(checkpoint.folder / "config.json", text) from error


def _check_layout(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a model whose layers' layout only transformers knows."""
    if (checkpoint.config or {}).get("model_type") in TRANSPOSED:
        raise fault(
            checkpoint.folder / "config.json",
            "linear layers of this model hold their weights transposed, which transformers says of "
            "each: pip install transformers",
        )

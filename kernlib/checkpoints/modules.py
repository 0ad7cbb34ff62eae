"""Which tensors of a checkpoint are weights of linear layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import torch

from kernlib.checkpoints.files import Checkpoint, fault
from kernlib.checkpoints.renaming import renamed
from kernlib.checkpoints.stored import StoredWeight
from kernlib.errors import warn
from kernlib.families.sparse.layout import DTYPES
from kernlib.nn.linears import (
    holders_of,
    is_conv1d,
    linears,
    note_of_derived,
    weight_parameter,
)

WEIGHT = ".weight"
# Models of transformers whose linear layers are Conv1D, which hold their weights transposed.
TRANSPOSED = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp")
NO_LINEAR = re.compile(r"embed|norm|(^|\.)(wte|wpe|ln_\w+|lm_head|shared)(\.|$)", re.IGNORECASE)
IN_BLOCK = re.compile(r"\.\d+\.")


class Linear(NamedTuple):
    """A linear layer: whether its weight is stored transposed, (in_features, out_features), where
    it is stored dense; and whether it is the head of its model."""

    is_transposed: bool = False
    is_head: bool = False


def linear_layers(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> dict[str, Linear]:
    """The linear layers whose weights a checkpoint has, by the names of their modules there.

    With transformers, and a config.json that names a model of it, they are those of this model
    whose weights no other module shares. Otherwise each matrix called ``NAME.weight`` of a numbered
    block is taken for one, unless its name says that it embeds or normalises. Warns with a
    :class:`kernlib.KernlibWarning` of linear layers of the model that the checkpoint has under no
    name that is known.
    """
    names = [
        name.removesuffix(WEIGHT)
        for name, weight in weights.items()
        if name.endswith(WEIGHT) and len(weight.shape) == 2 and weight.dtype in DTYPES.values()
    ]
    model = _model_of(checkpoint)
    if model is None:
        _check_layout(checkpoint)
        return {n: Linear() for n in names if IN_BLOCK.search(f".{n}.") and not NO_LINEAR.search(n)}
    layers = _layers_of(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored, places = {}, set()
    for name in names:
        # A checkpoint of the model without its head has names without the prefix.
        ways = (
            name,
            prefix + name,
            name.removeprefix(prefix),
            renamed(model, name + WEIGHT).removesuffix(WEIGHT),
        )
        place = next((way for way in ways if way in layers), None)
        if place is not None:
            stored[name] = layers[place]
            places.add(place)
    lacking = [name for name in layers if name not in places and not layers[name].is_head]
    if stored and lacking:
        warn(
            f"{len(lacking)} of {len(layers)} linear layers of {type(model).__name__} have no "
            f"weight in {checkpoint.path} under their names ({lacking[0]!r}, ...): they stay as "
            "they are stored"
        )
    return stored


def note_of(checkpoint: Checkpoint) -> str:
    """:func:`note_of_derived` of the model of a checkpoint, if there is one."""
    model = _model_of(checkpoint)
    return "" if model is None else note_of_derived(model, None)


def _layers_of(model: torch.nn.Module) -> dict[str, Linear]:
    """Linear layers of a model whose weights are their own."""
    head, holders = model.get_output_embeddings(), holders_of(model)
    return {
        name: Linear(is_conv1d(type(layer)), layer is head)
        for _, _, name, layer in linears(model)
        if holders[id(weight_parameter(layer))] == 1
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
    try:
        kind = getattr(transformers, str(architectures[0]), None)
    except ImportError:  # of the modules that this model needs
        return None
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

"""What :mod:`kernlib.compat.transformers` does to the layers of a model: empty ones before weights
are read, fused ones after, and dense ones again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from kernlib.checkpoints.renaming import renamed
from kernlib.errors import warn
from kernlib.families.sparse.packed import LONGEST_HEAD, header_of
from kernlib.nn.fused_linear import FusedLinear, Joint
from kernlib.nn.fusing import fuse_groups, groups_of
from kernlib.nn.linears import as_linear, class_name, is_conv1d, is_linear, without_fused_path
from kernlib.nn.sparse_holding import PACKED
from kernlib.nn.sparse_linear import SparseLinear

# Before weights are read.


def emptied(model: Any, names: Sequence[str], files: Sequence[str] | None) -> dict[str, int]:
    """Swap layers of a model on meta for empty ones, and return the names that they have in it, and
    how many bytes their weights are in the files, 0 if the files do not say. Raises ValueError.
    Warns of files with dense weights of all layers, as of a model that was made of the config of a
    compressed one, and swaps none."""
    _refuse_tensor_parallelism(model)
    places = _places(model, names)
    stored = _stored(files)
    if stored is not None and len(stored.packed) < len(places):
        lacking = [name for name in names if f"{name}.{PACKED}" not in stored.packed]
        dense = _dense(model, places, stored.dense)
        if not stored.packed and len(dense) == len(places):
            warn(
                f"config.json names {len(places)} compressed layers, such as {names[0]!r}, whose "
                f"weights the files hold as dense ones: {type(model).__name__} is loaded dense, "
                "and save_pretrained writes a config.json without them. It may have been made of "
                "the config of a model that kernlib.nn.sparsify has compressed"
            )
            return {}
        raise _missing(lacking or [*names], dense)
    new: dict[nn.Module, SparseLinear] = {}
    for name, place in places.items():
        layer = model.get_submodule(place)
        if layer not in new:
            new[layer] = _empty(model, place, layer)
            entry = None if stored is None else stored.packed.get(f"{name}.{PACKED}")
            if entry is not None:
                _size(new[layer], name, *entry)
            # Models draw weights of their parts that are not marked as there.
            stand_in = torch.empty(new[layer]._sizes, dtype=new[layer]._dtype, device="meta")
            stand_in._is_hf_initialized = True
            new[layer]._stand_in = stand_in
        prefix, _, child = place.rpartition(".")
        model.get_submodule(prefix)._modules[child] = new[layer]
    without_fused_path(model, SparseLinear)
    _watch_missing(model, [*places.values()])
    return {place: model.get_submodule(place)._carrier.numel() for place in places.values()}


def _places(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Where the layers of these names are in a model: there, or, in a model with or without a head,
    behind the name of its base or without that, or where transformers has moved what the files of
    former versions name. Raises ValueError for a name of no layer that can be swapped."""
    modules = dict(model.named_modules(remove_duplicate=False))
    base = f"{model.base_model_prefix}."
    is_other = type(model).__name__ not in (getattr(model.config, "architectures", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    places = {}
    for name in names:
        ways = (name, name.removeprefix(base), base + name)
        place = next((way for way in ways if way in modules), None)
        if place is None:
            moved = renamed(model, f"{name}.{PACKED}").removesuffix(f".{PACKED}")
            place = moved if moved in modules else None
        if place is None:
            if is_other and not name.startswith(base):
                continue  # the head of another model of the same base
            raise ValueError(
                f"quantization_config names {name!r} in its modules, and {type(model).__name__} "
                f"has no such layer: names are whole ones, such as {_some(modules)!r}"
            )
        layer = modules[place]
        if not is_linear(layer) and not isinstance(layer, SparseLinear):
            raise ValueError(
                f"quantization_config names {name!r} in its modules, a {class_name(layer)}: only "
                "nn.Linear and transformers' Conv1D have compressed weights. Leave it out"
            )
        weight = f"{place}.weight"
        sharing = {**{b: a for a, b in tied.items()}, **tied}.get(weight)
        if sharing is not None:
            raise ValueError(
                f"quantization_config names {name!r} in its modules, whose weight is tied to "
                f"{sharing}: leave it out, or say tie_word_embeddings=false in config.json"
            )
        places[name] = place
    return places


def _some(modules: dict[str, nn.Module]) -> str:
    return next((name for name, layer in modules.items() if is_linear(layer)), "lm_head")


class Stored(NamedTuple):
    """Weights in files by their names there: dtype, shape and the first bytes of packed ones, and
    which dense ones there are."""

    packed: dict[str, tuple]
    dense: set[str]


def _stored(files: Sequence[str] | None) -> Stored | None:
    """The weights in safetensors files. None for others, which only reading them would tell."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    stored = Stored({}, set())
    safe_open = import_module("safetensors").safe_open
    for file in files:
        # Models are made inside of torch.device("meta"), which safetensors' slices follow, too.
        with torch.device("cpu"), safe_open(file, framework="pt", device="cpu") as opened:
            for key in [*opened.keys()]:
                if key.endswith(f".{PACKED}"):
                    part = opened.get_slice(key)
                    shape = tuple(part.get_shape())
                    head = part[:LONGEST_HEAD] if len(shape) == 1 else None
                    stored.packed[key] = part.get_dtype(), shape, head
                elif key.endswith(".weight"):
                    stored.dense.add(key)
    return stored


def _dense(model: Any, places: dict[str, str], stored: set[str]) -> dict[str, str]:
    """The names of the dense weights in files of layers that have some there, by the layers' names
    in the configuration. Files name layers as places are, or in the ways of former versions."""
    base = f"{model.base_model_prefix}."
    former = {renamed(model, key): key for key in stored} if places else {}
    weights = {}
    for name, place in places.items():
        ways = (name, place, place.removeprefix(base), base + place)
        keys = [f"{way}.weight" for way in ways]
        key = next((key for key in keys if key in stored), None) or former.get(keys[1])
        if key is not None:
            weights[name] = key
    return weights


def _size(layer: SparseLinear, name: str, dtype: str, shape: tuple, head: Any) -> None:
    """Give the buffer of an empty layer the size of what will fill it, of which transformers
    computes where to put layers, and look at its header. Raises ValueError."""
    key = f"{name}.{PACKED}"
    if dtype != "U8" or len(shape) != 1:
        raise ValueError(f"{key} must be a vector of uint8 (U8), got {dtype} of shape {shape}")
    try:
        shape_stored = tuple(header_of(head)["shape"])
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if shape_stored != layer._sizes:
        raise ValueError(
            f"{key} is a matrix of shape {shape_stored}, and the layer has {layer._sizes}"
        )
    layer._carrier.resize_(shape)


def _empty(model: Any, name: str, layer: nn.Module) -> SparseLinear:
    """An empty layer in the place of a linear one, that itself if it is one."""
    if isinstance(layer, SparseLinear):
        return layer
    linear = as_linear(layer)
    dtype = _dtype(model, f"{name}.weight", linear.weight.dtype)
    rows, cols = linear.weight.shape
    try:
        new = SparseLinear(cols, rows, False, None, dtype, linear.weight.device)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    new.bias = linear.bias
    return new.train(layer.training)


def _dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which transformers keeps a parameter, by its name, of a model in a ``dtype``:
    some stay in float32."""
    plan = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    for key, other in plan.items():
        if re.search(key.replace("*", ".*"), name):
            return other
    return dtype


def _watch_missing(model: Any, places: list[str]) -> None:
    """Raise ValueError for weights that no file has, of those that cannot be told before all files
    are read, when transformers is about to draw the missing ones."""
    for method in ("_move_missing_keys_from_meta_to_device", "_move_missing_keys_from_meta_to_cpu"):
        move = getattr(model, method, None)
        if move is None:
            continue

        def checked(missing: Any, *args: Any, method=method, move=move, **kwargs: Any) -> Any:
            model.__dict__.pop(method)
            lacking = [name for name in places if f"{name}.{PACKED}" in missing]
            if lacking:
                raise _missing(lacking)
            return move(missing, *args, **kwargs)

        model.__dict__[method] = checked


def _refuse_tensor_parallelism(model: Any) -> None:
    distributed = getattr(model.config, "distributed_config", None)
    if (getattr(distributed, "tp_size", None) or 1) > 1:
        raise ValueError(
            "layers of kernlib are not sharded by tensor parallelism: leave out tp_plan and "
            "tp_size, as with device_map='auto', which places whole layers"
        )


# After weights are read.


def finished(model: Any, places: dict[str, int], fuse: bool) -> None:
    """See that each layer has its weight, and fuse groups. Raises ValueError for one without."""
    layers = {name: model.get_submodule(name) for name in places}
    lacking = []
    for name, layer in layers.items():
        layer._stand_in = None
        layer._adopt()
        hooks = _offloading(layer)
        if hooks:
            # Compressed weights are buffers, which accelerate would leave on the device otherwise.
            for hook in hooks:
                hook.offload_buffers = True
            layer._lend(places[name])
        elif layer._lacks_matrix():
            lacking.append(name)
    if lacking:
        raise _missing(lacking)
    if fuse:
        # A hook is the layer's, and a fused one would not have it.
        stay = {n for n, x in layers.items() if hasattr(x, "_hf_hook") or type(x) is FusedLinear}
        groups = [group for group in groups_of(model, None) if not stay & {*group.names}]
        swapped = {name: layers.pop(name) for name in [*layers]}
        layer = None  # and with it a matrix that is joined below
        fuse_groups(model, groups, swapped, "auto", 1, False, is_sole=True)


def _offloading(layer: nn.Module) -> list[Any]:
    """Hooks of accelerate that bring the tensors of a layer for each call and take them away."""
    hook = getattr(layer, "_hf_hook", None)
    return [part for part in getattr(hook, "hooks", (hook,)) if getattr(part, "offload", False)]


def _missing(names: Sequence[str], dense: Mapping[str, str] | None = None) -> ValueError:
    """The error for layers without compressed weights. ``dense`` are the names of those with dense
    weights in the files."""
    some = ", ".join(repr(f"{name}.{PACKED}") for name in names[:3])
    some += ", ..." if len(names) > 3 else ""
    stored = [dense[name] for name in names if name in dense] if dense else []
    advice = (
        f"They hold {len(stored)} of them dense, such as {stored[0]!r}: take these layers out of "
        "modules in config.json"
        if stored
        else "Copy the missing files, or take layers that are stored as dense ones out of modules "
        "in config.json"
    )
    return ValueError(
        f"quantization_config names {len(names)} layers in its modules whose compressed weights "
        f"the files of the model lack: {some}. {advice}"
    )


# Before a model is saved, and dense again.


def described(model: nn.Module) -> tuple[list[str], bool]:
    """Names of the compressed layers of a model, and whether some are fused. Raises ValueError for
    layers that such a list does not describe."""
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SparseLinear) and not isinstance(layer, Joint)
    }
    for name, layer in layers.items():
        if layer.activation:
            raise ValueError(
                f"{name} computes an activation, which config.json of transformers does not say: "
                "make the layer without, and apply the activation in the model"
            )
    return [*layers], any(isinstance(layer, FusedLinear) for layer in layers.values())


def restored(model: Any, dtype: torch.dtype | None) -> Any:
    """The model with dense layers in the place of compressed ones, each of the class that the model
    makes there."""
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    new: dict[nn.Module, nn.Module] = {}
    for name in described(model)[0]:
        layer = model.get_submodule(name)
        if layer not in new:
            dense = layer.to_linear().to(dtype)
            if is_conv1d(type(skeleton.get_submodule(name))):
                dense = _as_conv1d(dense)
            new[layer] = dense
        prefix, _, child = name.rpartition(".")
        model.get_submodule(prefix)._modules[child] = new[layer]
    return model


def _as_conv1d(linear: nn.Linear) -> nn.Module:
    rows, cols = linear.weight.shape
    with torch.device("meta"):
        layer = import_module("transformers.pytorch_utils").Conv1D(rows, cols)
    layer.weight = nn.Parameter(linear.weight.detach().t().contiguous())
    layer.bias = linear.bias
    return layer.train(linear.training)

"""Where the layers of a model are that others may take the place of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from kernlib.descriptors.base import shown
from kernlib.errors import warn


def linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Linear]]:
    """Every place of an nn.Linear: its parent, its name there, its whole name, the layer."""
    for prefix, parent in module.named_modules():
        for child, layer in parent._modules.items():
            if type(layer) is nn.Linear:
                yield parent, child, f"{prefix}.{child}" if prefix else child, layer


def renew(layer: nn.Linear) -> None:
    """Compute anew what hooks of torch's pruning, weight_norm and spectral_norm make of parameters,
    as the next call would in evaluation: what a layer holds is of its last call, whatever has been
    loaded, trained, cast or moved since."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            weight = hook.compute_weight(layer, do_power_iteration=False)
            setattr(layer, hook.name, weight)
        elif isinstance(hook, (BasePruningMethod, WeightNorm)):
            hook(layer, ())


def without_fused_path(model: nn.Module, kind: type[nn.Module]) -> None:
    """Have torch's encoders call layers of a ``kind`` in evaluation too. Without gradients they
    multiply by ``linear1.weight`` and ``linear2.weight`` themselves, as matrices, unless told that
    the activation is another one; and nest padded inputs for that."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            if any(isinstance(layer, kind) for layer in (part.linear1, part.linear2)):
                part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder) and any(
            isinstance(layer, kind) for layer in part.modules()
        ):
            part.use_nested_tensor = False


def warn_of_nothing(task: str, module: nn.Module, chosen: str, given: object) -> None:
    """Warns that ``task`` swaps no layer of a model, which the argument ``chosen`` chooses from."""
    names = [f"{name!r}" for _, _, name, _ in linears(module)]
    if not names:
        derived = [type(m).__name__ for m in module.modules() if isinstance(m, nn.Linear)]
        which = f", only what derives from it: {derived[0]}" if derived else ""
        warn(f"{task} swaps nothing: {type(module).__name__} has no nn.Linear in it{which}")
        return
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    warn(
        f"{task} swaps nothing: {chosen}={shown(given)} takes none of the {len(names)} nn.Linear "
        f"of {type(module).__name__} ({some})"
    )

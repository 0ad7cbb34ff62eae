"""Random writes to parameters and buffers of layers that hold indices, by torch's own utilities."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from random import Random

import torch
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from kernlib.nn import BlockSparseConv2d, BlockSparseLinear, SparseLinear
from kernlib.sparse import magnitude
from tests.families.sparse.cases import FORMATS

KINDS = ("linear", "conv", *FORMATS)
DENSITY = {"u8": 0.08, "u2": 0.6, "dense": 1.0}  # of the weight of a format


def layer(kind: str, device: str = "cpu", seed: int = 0) -> nn.Module:
    """A layer of a kind: of one seed its indices are the same."""
    torch.manual_seed(seed)
    if kind == "linear":
        return BlockSparseLinear(96, 64, (16, 32), density=0.5, capacity=8, device=device)
    if kind == "conv":
        return BlockSparseConv2d(16, 32, 3, layout=16, density=0.5, device=device)
    dense = nn.Linear(300, 70)
    magnitude(dense.weight.detach(), DENSITY.get(kind, 0.3), inplace=True)
    return SparseLinear.from_linear(dense.to(device), format=kind)


def empty(kind: str, device: str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """A layer that has the sizes of :func:`layer` alone."""
    if kind in ("linear", "conv"):
        return layer(kind, device)
    return SparseLinear(300, 70, device=device, dtype=dtype)


def inputs(kind: str, device: str = "cpu") -> torch.Tensor:
    shape = {"linear": (5, 96), "conv": (2, 16, 5, 5)}.get(kind, (5, 300))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)


def former_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict of a layer as version 0.1 saved it: indices by their names, and a header."""
    is_matrix = isinstance(module, SparseLinear)
    header, tensors = (module.matrix if is_matrix else module.layout).state()
    text = json.dumps(header, sort_keys=True).encode()
    prefix = "weight_" if is_matrix else "layout_"
    return {
        **{name: p.detach() for name, p in module.named_parameters()},
        **{prefix + name: t for name, t in tensors.items()},
        "_extra_state": torch.tensor(list(text), dtype=torch.uint8),
    }


def _noise(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape).to(t)


WRITES = {
    "zero": lambda t: t.zero_(),
    "one": lambda t: nn.init.ones_(t),
    "normal": lambda t: nn.init.normal_(t),
    "uniform": lambda t: nn.init.uniform_(t, -2, 2),
    "nan": lambda t: t.fill_(float("nan")),
    "add": lambda t: t.add_(1),
    "double": lambda t: torch._foreach_mul_([t], 2.0),
    "lerp": lambda t: torch._foreach_lerp_([t], [_noise(t)], 0.1),
    "copy": lambda t: t.copy_(_noise(t)),
    "shuffle": lambda t: t.copy_(t.flatten()[torch.randperm(t.numel()).to(t.device)].view_as(t)),
    "data": lambda t: t.data.mul_(3),
    "other data": lambda t: setattr(t, "data", _noise(t)),
    "half": lambda t: setattr(t, "data", t.half().to(t.dtype)),
    "flip": lambda t: t.view(torch.int32).bitwise_not_(),
}
REFUSED = ("the buffers of this SparseLinear", "the weight of this BlockSparse")
AVERAGES = {
    "equal": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "foreach ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.99)},
    "foreach": {"multi_avg_fn": get_swa_multi_avg_fn()},
}


def written(kind: str, random: Random, device: str) -> tuple[nn.Module, nn.Module, str]:
    """A layer after random writes, another of the same parameters and the indices that there were
    before, and what was done."""
    module = layer(kind, device)
    like = copy.deepcopy(module)
    what = random.choice(["write", "write", "average", "cast"])
    with torch.no_grad():
        if what == "write":
            what = random.choice([*WRITES])
            held = [module.buffers(), module.parameters()]
            # A state of a compressed layer has the numbers of its weight, which are written then.
            held += [] if kind in FORMATS else [module.state_dict().values()]
            tensors = [t for t in random.choice(held) if t.numel()]
            for t in random.sample(tensors, random.randint(0, len(tensors))):
                with suppress(NotImplementedError, RuntimeError):  # what no whole number takes
                    WRITES[what](t)
        elif what == "average":
            what = random.choice([*AVERAGES])
            average = AveragedModel(module, use_buffers=random.random() < 0.8, **AVERAGES[what])
            for _ in range(random.randint(1, 4)):
                for p in module.parameters():
                    p.add_(torch.randn_like(p))
                average.update_parameters(module)
            module = average.module
        else:
            module.half().float() if random.random() < 0.5 else module.type(torch.float32)
            if kind in FORMATS:
                like.half().float()
        for p, now in zip(like.parameters(), module.parameters(), strict=True):
            p.copy_(now)
    return module, like, what


def faults(count: int, device: str) -> list[str]:
    """What of so many random writes is neither refused in words nor right."""
    failures = []
    for seed in range(count):
        random = Random(seed)
        kind = KINDS[seed % len(KINDS)]
        torch.manual_seed(seed)
        module, like, what = written(kind, random, device)
        x = inputs(kind, device)
        with torch.set_grad_enabled(random.random() < 0.5):
            wanted = like(x)
            try:
                y = module(x)
                if module.to_dense().shape != like.to_dense().shape:
                    failures.append(f"{seed}: {kind}, {what}: shapes")
            except (RuntimeError, TypeError, ValueError) as error:
                if not str(error).startswith(
                    ("the buffers of this", "the weight of this", "these")
                ):
                    failures.append(f"{seed}: {kind}, {what}: {error}")
                continue
        if not torch.allclose(y, wanted, 1e-3, 1e-3, equal_nan=True):
            failures.append(f"{seed}: {kind}, {what}: off by {float((y - wanted).abs().max())}")
    return failures

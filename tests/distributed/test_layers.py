"""Layers under DistributedDataParallel and FSDP2: gradients are the means of all processes'."""

from __future__ import annotations

import tempfile
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kernlib as kl

ROWS, FEATURES = 16, 16


class Attention(nn.Module):
    """Attention of rows to rows, whose length is a block's."""

    def __init__(self):
        super().__init__()
        layout = kl.blocksparse.sliding_window(ROWS, 16, 16)
        self.attention = kl.nn.BlockSparseMultiheadAttention(FEATURES, 2, layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def layer(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "KSLinear":
        return kl.nn.KSLinear([(2, 4, 8, 1), (1, 16, 8, 1)])
    if name == "KroneckerLinear":
        return kl.nn.KroneckerLinear((4, 4), (4, 4))
    if name == "BlockSparseLinear":
        return kl.nn.BlockSparseLinear(FEATURES, FEATURES, 16, density=1.0)
    if name == "BlockSparseMultiheadAttention":
        return Attention()
    linear = nn.Linear(FEATURES, FEATURES)
    if name.startswith("SparseLinear"):  # beside one that is trained
        pruned = nn.Linear(FEATURES, FEATURES, bias=name == "SparseLinear")
        sparse = kl.nn.SparseLinear.from_linear(pruned, density=0.5)
        return nn.Sequential(linear, sparse)
    return linear


LAYERS = (
    "KSLinear", "KroneckerLinear", "BlockSparseLinear", "BlockSparseMultiheadAttention",
    "SparseLinear", "SparseLinear without bias",
)  # fmt: skip


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn((dist.get_world_size(), ROWS, FEATURES), generator=generator)


def wanted(name: str) -> dict[str, torch.Tensor]:
    """Mean gradients over all processes, by one model that sees every batch."""
    model = layer(name)
    losses = [model(x).square().mean() for x in batch()]
    (sum(losses) / len(losses)).backward()
    return {key: p.grad for key, p in model.named_parameters()}


def worst(name: str, grads: dict[str, torch.Tensor]) -> float:
    return max(float((grads[key] - grad).abs().max()) for key, grad in wanted(name).items())


def sharded(model: nn.Module, **options) -> nn.Module:
    """A model by FSDP2, each layer of a Sequential by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model if isinstance(model, nn.Sequential) else ():
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@cache
def summed() -> float:
    """What fully_shard makes of the mean of gradients: torch 2.8 adds them up over gloo, and leaves
    the division to NCCL."""
    model = sharded(nn.Linear(1, 1, bias=False))
    model(torch.ones(1, 1)).sum().backward()
    return float(model.weight.grad.full_tensor())


def by_ddp(name: str):
    model = nn.parallel.DistributedDataParallel(layer(name))
    model(batch()[dist.get_rank()]).square().mean().backward()
    return worst(name, {key: p.grad for key, p in model.module.named_parameters()})


def by_fsdp(name: str, compiled: str | None = None, dtype: torch.dtype | None = None):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    model = sharded(nn.Sequential(layer(name)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = model if compiled is None else torch.compile(model, backend=compiled)
    call(batch()[dist.get_rank()]).square().mean().backward()
    grads = {key[2:]: p.grad.full_tensor() / summed() for key, p in model.named_parameters()}
    optimizer.step()
    return worst(name, grads)


def check(pool, function, *arguments, tolerance: float = 1e-5) -> None:
    for answer in pool.run(function, *arguments):
        if isinstance(answer, Exception):
            raise answer
        assert answer <= tolerance


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", [by_ddp, by_fsdp])
def test_gradients_are_the_means_of_all(pool, way, name):
    check(pool, way, name)


@pytest.mark.parametrize("name", LAYERS)
def test_fsdp_computes_in_bfloat16_and_adds_in_float32(pool, name):
    check(pool, by_fsdp, name, None, torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_by_fsdp_is_traced(pool, name):
    check(pool, by_fsdp, name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_model_by_fsdp_is_compiled(pool, name):
    check(pool, by_fsdp, name, "inductor")


def saved(name: str, folder: str):
    """A state of FSDP's shards, saved by torch.distributed.checkpoint and read into a model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, x = sharded(layer(name)), batch()[0]
    before = model(x).detach()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    other = layer(name)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other = sharded(other)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    return float((other(x) - before).abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_states_of_shards_come_back(pool, name):
    with tempfile.TemporaryDirectory() as folder:
        check(pool, saved, name, folder, tolerance=0)


def from_meta(name: str):
    """A model that is made on meta and filled by a state once it is sharded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    alone, x = layer(name), batch()[0]
    with torch.device("meta"):
        model = layer(name) if "Sparse" not in name else empty(name)
    sharded(model).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, alone.state_dict(), options=options)
    return float((model(x) - alone(x)).abs().max())


def empty(name: str) -> nn.Module:
    if name.startswith("SparseLinear"):
        sparse = kl.nn.SparseLinear(FEATURES, FEATURES, name == "SparseLinear")
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), sparse)
    return layer(name)


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_from_meta_is_filled_by_a_state(pool, name):
    check(pool, from_meta, name, tolerance=0)


def drawn(name: str):
    """Whether new values of a sharded model from meta are finite and of the size of others."""
    with torch.device("meta"):
        model = layer(name)
    sharded(model).to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    y = model(batch()[0]).detach()
    return float(y.isnan().sum()) + float(y.std() > 10)


@pytest.mark.parametrize("name", LAYERS[:3])
def test_a_model_from_meta_draws_its_parameters(pool, name):
    check(pool, drawn, name, tolerance=0)

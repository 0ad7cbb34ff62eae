"""Layers under DistributedDataParallel and FSDP2: gradients are the means of all processes'."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import kernlib as kl

ROWS, FEATURES = 6, 16


def layer(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    if name == "KSLinear":
        return kl.nn.KSLinear([(2, 4, 8, 1), (1, 16, 8, 1)])
    if name == "KroneckerLinear":
        return kl.nn.KroneckerLinear((4, 4), (4, 4))
    if name == "BlockSparseLinear":
        return kl.nn.BlockSparseLinear(FEATURES, FEATURES, 16, density=1.0)
    return torch.nn.Linear(FEATURES, FEATURES)


LAYERS = ("KSLinear", "KroneckerLinear", "BlockSparseLinear")


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


def by_ddp(name: str):
    model = torch.nn.parallel.DistributedDataParallel(layer(name))
    model(batch()[dist.get_rank()]).square().mean().backward()
    return worst(name, {key: p.grad for key, p in model.module.named_parameters()})


def by_fsdp(name: str):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(layer(name))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()[dist.get_rank()]).square().mean().backward()
    grads = {key[2:]: p.grad.full_tensor() for key, p in model.named_parameters()}
    optimizer.step()
    return worst(name, grads)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", [by_ddp, by_fsdp])
def test_gradients_are_the_means_of_all(pool, way, name):
    for answer in pool.run(way, name):
        if isinstance(answer, Exception):
            raise answer
        assert answer < 1e-5


def saved(name: str, folder: str):
    """A state of FSDP's shards, saved by torch.distributed.checkpoint and read into a model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, x = fully_shard(layer(name), mesh=mesh), batch()[0]
    before = model(x).detach()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    other = layer(name)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other = fully_shard(other, mesh=mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    return float((other(x) - before).abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_states_of_shards_come_back(pool, name):
    with tempfile.TemporaryDirectory() as folder:
        for answer in pool.run(saved, name, folder):
            if isinstance(answer, Exception):
                raise answer
            assert answer == 0

"""Layers whose features are dealt out to processes compute what the layer of one process does."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kernlib as kl

FEATURES = 96
# Chains that end, or begin, with one block, and with several.
CHAINS = {
    "one block": [(1, 32, 24, 4), (1, 24, 32, 4)],
    "blocks to one": [(3, 16, 32, 1), (1, 24, 12, 4)],
    "one to blocks": [(1, 12, 24, 4), (3, 32, 16, 1)],
    "blocks": [(6, 8, 16, 1), (3, 32, 16, 1)],
}


def layer(name: str, activation: str | None = None, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    options = {"bias": bias, "activation": activation}
    if name in CHAINS:
        return kl.nn.KSLinear(CHAINS[name], dtype=torch.float64, **options)
    if name == "KroneckerLinear":
        return kl.nn.KroneckerLinear((12, 8), (6, 16), dtype=torch.float64, **options)
    if name == "BlockSparseLinear":
        options |= {"density": 0.4, "dtype": torch.float64, "capacity": 20}
        return kl.nn.BlockSparseLinear(FEATURES, FEATURES, 16, **options)
    linear = nn.Linear(FEATURES, FEATURES, bias)
    if name == "nn.Linear":
        return linear
    format = name.partition(" ")[2]
    if format.startswith("bitmap-"):
        options = {"values": format.partition("-")[2]}
    else:
        options = {"format": format}
    return kl.nn.SparseLinear.from_linear(linear, density=0.3, activation=activation, **options)


LAYERS = (
    *CHAINS, "KroneckerLinear", "BlockSparseLinear", "nn.Linear", "SparseLinear bitmap",
    "SparseLinear u4", "SparseLinear macko", "SparseLinear dense", "SparseLinear bitmap-int8",
)  # fmt: skip


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def split(model: nn.Module, **styles) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, mesh(), styles)


def batch(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(4)
    x = torch.randn((2, 6, FEATURES), generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def own(t: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return t.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def worst(pairs) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def gradients(ours: nn.Module, alone: nn.Module, columns: bool):
    """Pairs of gradients, which are laid out as their parameters are."""
    for (key, p), (_, q) in zip(ours.named_parameters(), alone.named_parameters(), strict=True):
        if p.dim() == 3:  # the stored blocks of a part
            grad = ours.layout.to_dense(p.grad.to_local())
            yield grad, own(alone.layout.to_dense(q.grad), 0 if columns else 1)
        else:
            assert isinstance(ours, nn.Linear) or p.grad.placements == p.placements, key
            yield p.grad.full_tensor(), q.grad


def parts(name: str, activation: str | None, bias: bool, way: str):
    """How far results and gradients are from those of one process."""
    columns = way.startswith("columns")
    alone, ours = layer(name, activation, bias), nn.Sequential(layer(name, activation, bias))
    kinds = {"rows": {}, "columns": {}, "rows to rows": {}, "columns of all": {}}
    from torch.distributed.tensor import Replicate, Shard

    kinds["rows to rows"] = {"output_layouts": Shard(1)}
    kinds["columns of all"] = {"input_layouts": Shard(1), "output_layouts": Replicate()}
    kind = kl.distributed.ColwiseParallel if columns else kl.distributed.RowwiseParallel
    if dist.get_rank():  # values are those of process 0
        with torch.no_grad():
            for p in ours.parameters():
                p.zero_()
    split(ours, **{"0": kind(**kinds[way])})
    x = batch(next(alone.parameters()).dtype).requires_grad_()
    y = alone(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    dim = {"rows": -1, "columns": None, "rows to rows": -1, "columns of all": 1}[way]
    ends = {"rows": None, "columns": -1, "rows to rows": 1, "columns of all": None}[way]
    mine = (x.detach().clone() if dim is None else own(x, dim)).requires_grad_()
    z = ours(mine)
    (z * (weights if ends is None else own(weights, ends))).sum().backward()
    yield z, y if ends is None else own(y, ends)
    yield mine.grad, x.grad if dim is None else own(x.grad, dim)
    yield from gradients(ours[0], alone, columns)


def furthest(*arguments) -> float:
    return worst(parts(*arguments))


def check(pool, function, *arguments, tolerance: float = 2e-5) -> None:
    for answer in pool.run(function, *arguments):
        if isinstance(answer, Exception):
            raise answer
        assert answer <= tolerance


@pytest.mark.few(8)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("way", ["rows", "columns", "rows to rows", "columns of all"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_part_computes_what_one_process_does(pool, name, way, activation, bias):
    if name == "nn.Linear" and activation:
        pytest.skip("it has none")
    if name.endswith("int8") and way.startswith("rows"):
        pytest.skip("scales are for more columns than a part has")
    if name.startswith("SparseLinear") and not bias:
        pytest.skip("it has no parameter then")
    check(pool, furthest, name, activation, bias, way)


def network(names: tuple[str, ...]) -> nn.Module:
    first, last = map(layer, names)
    return nn.Sequential(OrderedDict(up=first, act=nn.GELU(), down=last))


def plan() -> dict:
    return {"up": kl.distributed.ColwiseParallel(), "down": kl.distributed.RowwiseParallel()}


def trained(names: tuple[str, ...]) -> float:
    """How far a network is from that of one process after a step with clipped gradients."""
    alone, ours = network(names), network(names)
    split(ours, **plan())
    x = batch(next(alone.parameters()).dtype)
    for model in (alone, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return worst([(ours(x), alone(x))])


NETWORKS = (
    ("SparseLinear bitmap", "SparseLinear u4"),
    ("BlockSparseLinear", "BlockSparseLinear"),
    ("nn.Linear", "SparseLinear macko"),
)


@pytest.mark.parametrize("names", NETWORKS, ids="-".join)
def test_a_network_of_columns_and_rows_trains_as_one_process_does(pool, names):
    check(pool, trained, names, tolerance=1e-3)


def saved(names: tuple[str, ...], folder: str):
    """States of parts come back in other models, by both of torch's ways."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = split(network(names), **plan())
    x = batch(next(model.parameters()).dtype)
    before = model(x)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    for is_plain in (True, False):
        other = split(network(names), **plan())
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        state = other.state_dict() if is_plain else get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        if is_plain:
            other.load_state_dict(state)
        else:
            set_model_state_dict(other, state)
        yield other(x), before


def furthest_saved(*arguments) -> float:
    return worst(saved(*arguments))


@pytest.mark.parametrize("names", [*NETWORKS[:2], ("one block", "KroneckerLinear")], ids="-".join)
def test_states_of_parts_come_back(pool, names):
    with tempfile.TemporaryDirectory() as folder:
        check(pool, furthest_saved, names, folder, tolerance=0)


def reshaped(folder: str) -> float:
    """A state that parts have saved, in the layers of one process, and the other way round."""
    import torch.distributed.checkpoint as dcp

    names = "one block", "KroneckerLinear"
    model, alone = split(network(names), **plan()), network(names)
    with torch.no_grad():
        for p in (*model.parameters(), *alone.parameters()):
            p.mul_(2)
    x, state = batch(torch.float64), alone.state_dict()
    wanted = alone(x)
    for source, target in ((model, alone), (alone, model)):
        dcp.save(source.state_dict(), checkpoint_id=folder)
        with torch.no_grad():
            for p in target.parameters():
                p.zero_()
        state = target.state_dict()
        dcp.load(state, checkpoint_id=folder)
        target.load_state_dict(state)
    return worst([(alone(x), wanted), (model(x), wanted)])


def test_states_of_factors_fit_any_number_of_processes(pool):
    with tempfile.TemporaryDirectory() as folder:
        check(pool, reshaped, folder, tolerance=1e-12)


def refused(case: str) -> str:
    colwise, rowwise = kl.distributed.ColwiseParallel, kl.distributed.RowwiseParallel
    rank = dist.get_rank()
    model = {
        "sizes": lambda: kl.nn.SparseLinear(96, 80),
        "factors": lambda: kl.nn.KroneckerLinear((4, 3), (8, 3)),
        "pattern": lambda: kl.nn.KSLinear([(1, 24, 24, 4), (2, 8, 48, 1)]),
        "batch last": lambda: kl.nn.KSLinear([(3, 4, 4, 1)], bs_last=True),
        "kind": lambda: nn.Sequential(nn.LayerNorm(4)),
        "twice": lambda: layer("SparseLinear u4"),
        "other matrices": lambda: layer("SparseLinear u4" if rank else "SparseLinear macko"),
        "codes": lambda: layer("SparseLinear bitmap-int8"),
        "other blocks": lambda: layer("BlockSparseLinear"),
    }[case]()
    if case == "other blocks" and rank:
        model.update_(model.layout.mask().flip(0))
    if case == "twice":
        split(nn.Sequential(model), **{"0": rowwise()})
    kind = TypeError if case == "kind" else ValueError
    style = rowwise() if case == "codes" else colwise()
    with pytest.raises(kind) as caught:
        split(nn.Sequential(model), **{"0": style})
    return str(caught.value)


ERRORS = {
    "sizes": "SparseLinear of 96 features to 80 cannot be dealt out to 3 processes: out_features "
    "must be a multiple of 3, got 80",
    "factors": "out_sizes[0] of out_sizes = (8, 3) must be a multiple of 3, got 8",
    "pattern": "factors[1] has pattern (2, 8, 48, 1), and that takes an a divisible by 3",
    "batch last": "bs_last=False",
    "kind": "must be one of BlockSparseLinear, KroneckerLinear, KSLinear, SparseLinear",
    "twice": "dealt out or sharded already",
    "other matrices": "layer differs: SparseLinear(",
    "codes": "parts of 32 columns would share",
    "other blocks": "which blocks are stored",
}


@pytest.mark.few(len(ERRORS))
@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_dealt_out_is_an_error_in_all_processes(pool, case):
    for answer in pool.run(refused, case):
        if isinstance(answer, BaseException):
            raise answer
        assert ERRORS[case] in answer


def stopped() -> bool:
    """A call that is interrupted leaves the layer, also to its state."""
    model = nn.Sequential(layer("one block"))
    split(model, **{"0": kl.distributed.ColwiseParallel()})

    def stop(*_):
        raise KeyboardInterrupt

    hook = model[0].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(batch(torch.float64))
    hook.remove()
    return all(isinstance(t, dist.tensor.DTensor) for t in model.state_dict().values())


def test_an_interrupted_call_leaves_the_layer(pool):
    assert pool.run(stopped) == [True] * 3


def of_threads() -> str:
    model = nn.Sequential(layer("one block"))
    split(model, **{"0": kl.distributed.ColwiseParallel()})
    errors = []

    def call(*_):
        try:
            model(batch(torch.float64))
        except RuntimeError as error:
            errors.append(str(error))

    def beside(*_):
        hook.remove()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    hook = model[0].register_forward_pre_hook(beside)
    model(batch(torch.float64))
    return errors[0]


def test_a_layer_is_in_one_call_at_a_time(pool):
    for answer in pool.run(of_threads):
        assert "in a call of another thread" in answer

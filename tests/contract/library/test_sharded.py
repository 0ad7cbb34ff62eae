"""DTensors: values and gradients of plain tensors, and no process computes more than it must."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.multiprocessing import spawn

import kernlib as kl
from kernlib import blocksparse, linalg, sparse
from kernlib.nn import BlockSparseLinear, KroneckerLinear, KSLinear, SparseLinear
from kernlib.sharding import LEAST_TORCH

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < LEAST_TORCH,
    reason="operators take no DTensors of this torch",
)

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
LAYOUT, HEADS = blocksparse.causal(32, 16), blocksparse.dense(32, 32, 16, heads=2)
BATCHES = blocksparse.dense(32, 32, 16, heads=6)
W, KERNEL, WIDTH = sparse.compress(torch.eye(32), "u4"), kl.gaussian(), {"bandwidth": 2.0}
BLOCKS, TURNED = (3, 16, 16), kl.KroneckerSparse(2, 4, 4, 4, batch_last=True)


def product(side):
    return lambda x, *factors: kl.kron_matmul(x, factors, side=side)


# A call; of each tensor the shape and the placement; and the placement of the result.
CASES = {
    "pairwise": (lambda a, b: kl.run_kernel(KERNEL, a, b, **WIDTH),
                 ((7, 5), ROWS), ((6, 5), WHOLE), ROWS),
    "columns": (kl.cdist, ((7, 5), WHOLE), ((5, 5), ROWS), COLUMNS),
    "a bandwidth": (lambda a, b, c: kl.run_kernel(KERNEL, a, b, bandwidth=c.exp().sum()),
                    ((7, 5), ROWS), ((6, 5), WHOLE), ((2,), WHOLE), ROWS),
    "regularization": (lambda a, b: kl.run_kernel(KERNEL, a, b, regularization=1.0, **WIDTH),
                       ((7, 5), ROWS), ((7, 5), WHOLE), WHOLE),
    "kernel_matmul": (lambda a, b, v: kl.kernel_matmul(KERNEL, a, b, v, **WIDTH),
                      ((7, 5), ROWS), ((6, 5), WHOLE), ((6, 2), WHOLE), ROWS),
    "kernel_topk": (lambda a, b: kl.kernel_topk(KERNEL, a, b, 2, **WIDTH)[0],
                    ((7, 5), ROWS), ((6, 5), WHOLE), ROWS),
    "Kronecker-sparse": (lambda x, w: kl.run_kernel(kl.KroneckerSparse(2, 4, 4, 4), x, w),
                         ((3, 5, 32), COLUMNS), ((2, 4, 4, 4), WHOLE), COLUMNS),
    "batch last": (lambda x, w: kl.run_kernel(TURNED, x, w),
                   ((32, 5), COLUMNS), ((2, 4, 4, 4), WHOLE), COLUMNS),
    "features": (lambda x, w: kl.run_kernel(TURNED, x, w),
                 ((32, 5), ROWS), ((2, 4, 4, 4), WHOLE), WHOLE),
    "Kronecker product": (product("right"), ((5, 8), ROWS), ((2, 3), WHOLE), ((4, 4), WHOLE), ROWS),
    "on the left": (product("left"), ((8, 5), COLUMNS), ((2, 2), WHOLE), ((4, 4), WHOLE),
                    COLUMNS),
    "sparse": (lambda x: sparse.matmul(W, x), ((3, 5, 32), COLUMNS), COLUMNS),
    "sdd": (lambda a, b: blocksparse.sdd(a, b, LAYOUT), ((32, 5), COLUMNS), ((5, 32), ROWS),
            Partial()),
    "dsd": (lambda s, b: blocksparse.dsd(s, b, LAYOUT), (BLOCKS, WHOLE), ((32, 5), COLUMNS),
            COLUMNS),
    "dds": (lambda a, s: blocksparse.dds(a, s, LAYOUT, transpose_b=True),
            ((5, 32), ROWS), (BLOCKS, WHOLE), ROWS),
    "softmax": (lambda x: blocksparse.softmax(x, LAYOUT), (BLOCKS, ROWS), WHOLE),
    "attention": (lambda q, k, v: blocksparse.attention(q, k, v, HEADS),
                  *[((3, 2, 32, 8), placement) for placement in (ROWS, WHOLE, ROWS)], ROWS),
    "a layout for each batch": (
        lambda q, k, v: blocksparse.attention(q, k, v, BATCHES),
        *[((3, 2, 32, 8), ROWS)] * 3, WHOLE,
    ),
    "dropout": (lambda q, k, v: blocksparse.attention(q, k, v, HEADS, dropout_p=0.5, seed=1),
                *[((3, 2, 32, 8), ROWS)] * 3, WHOLE),
}  # fmt: skip
GATHERED = ("dropout", "a layout for each batch")  # which takes another process
LAYERS = {
    "KSLinear": lambda: KSLinear([(2, 4, 4, 4), (2, 4, 4, 4)]),
    "KroneckerLinear": lambda: KroneckerLinear((4, 8), (4, 8)),
    "SparseLinear": lambda: SparseLinear.from_linear(nn.Linear(32, 32), "u4"),
    "BlockSparseLinear": lambda: BlockSparseLinear(32, 32, LAYOUT),
}


def made(case) -> tuple:
    """The call, its plain tensors, their placements and the result's."""
    call, *sides, wanted = CASES[case]
    numbers = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=numbers) for shape, _ in sides]
    return call, tensors, [placement for _, placement in sides], wanted


@pytest.fixture
def mesh():
    """Of two processes, of which this is one and the other does not exist."""
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.few(99)
@pytest.mark.parametrize("case", [name for name in CASES if name not in GATHERED])
def test_a_process_computes_its_part_of_the_result(case, mesh):
    call, tensors, placements, wanted = made(case)
    sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)]
    found, plain = call(*sharded), call(*tensors)
    assert isinstance(found, DTensor) and found.placements == (wanted,)
    assert found.shape == plain.shape and found.stride() == plain.contiguous().stride()
    if wanted in (ROWS, COLUMNS):
        part = distribute_tensor(plain, mesh, [wanted]).to_local()
        torch.testing.assert_close(found.to_local(), part)


def test_a_plain_tensor_beside_distributed_ones_is_refused_by_name(mesh):
    x = torch.randn(4, 3)
    a = distribute_tensor(x, mesh, [WHOLE])
    with pytest.raises(TypeError, match=r"^b is a plain tensor beside DTensors: .*distribute_mod"):
        kl.cdist(a, x)
    with pytest.raises(TypeError, match=r"^out takes no DTensors: leave it out"):
        kl.cdist(a, a, out=distribute_tensor(torch.empty(4, 4), mesh, [ROWS]))


SQUARE = torch.eye(4)
REFUSED = {
    "eigh": linalg.eigh,
    "solve_lu": lambda a: linalg.solve_lu(a, SQUARE),
    "conjugate_gradient": lambda b: linalg.conjugate_gradient(SQUARE.matmul, b),
    "kron_logdet": lambda a: linalg.kron_logdet([a]),
    "nystrom": lambda x: linalg.nystrom(KERNEL, x, 2, regularization=1.0, **WIDTH),
    "agop": lambda x: kl.agop(KERNEL, x, SQUARE, SQUARE, **WIDTH),
    "cdist_grad": lambda a: kl.cdist_grad(a, SQUARE, SQUARE, SQUARE),
    "cdist_grad_expadd": lambda a: kl.cdist_grad_expadd(a, SQUARE, SQUARE, SQUARE, scale=-1.0),
    "compress": sparse.compress,
    "magnitude": lambda weight: sparse.magnitude(weight, 0.5),
}


@pytest.mark.few(99)
@pytest.mark.parametrize("call", REFUSED)
def test_what_is_no_operator_says_how_it_is_called(call, mesh):
    with pytest.raises(TypeError, match=r"is a DTensor, .*\.full_tensor\(\), or .*local_map"):
        REFUSED[call](distribute_tensor(SQUARE, mesh, [ROWS]))


def work(rank: int, folder: str) -> None:
    """One of two processes: values and gradients, of layers too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for case in CASES:
        call, tensors, placements, _ = made(case)
        plain = [t.clone().requires_grad_() for t in tensors]
        sharded = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(tensors, placements, strict=True)
        ]
        result, found = call(*plain), call(*sharded)
        torch.testing.assert_close(found.full_tensor(), result, msg=case)
        result.square().sum().backward()
        found.redistribute(mesh, [WHOLE]).square().sum().backward()
        for one, other in zip(sharded, plain, strict=True):
            assert (one.grad is None) == (other.grad is None), case
            if one.grad is not None:
                torch.testing.assert_close(
                    one.grad.full_tensor(), other.grad, msg=case, rtol=1e-4, atol=1e-4
                )
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer, x = nn.Sequential(make()), torch.randn(8, 32)
        layer(x).square().mean().backward()
        wanted = [parameter.grad.clone() for parameter in layer.parameters()]
        result = layer(x).detach()
        layer.zero_grad()
        distribute_module(layer, mesh)
        found = layer(distribute_tensor(x, mesh, [ROWS]))
        assert found.placements == (ROWS,), name
        torch.testing.assert_close(found.full_tensor().detach(), result, msg=name)
        found.square().mean().backward()
        for parameter, right in zip(layer.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), right, msg=name)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may still run, and abort a process that ends in order


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")
def test_values_and_gradients_are_those_of_plain_tensors(tmp_path):
    spawn(work, (str(tmp_path),), nprocs=2)

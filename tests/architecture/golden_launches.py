"""Plans of calls on a GPU that exists only by name: kernels, grids and parameter blocks, but for
addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.kronecker_sparse import operation
from kernlib.jit import tuning
from kernlib.runtime import devices, tensor_map
from kernlib.runtime.plan import Plan
from tests.architecture import golden_blocks, golden_kronecker
from tests.support import fakes
from tests.support.fakes import OnGpu, OnSecondGpu


def install(monkeypatch) -> list[str]:
    """Put the GPU in place; the list is of the plans to come."""
    fakes.install(monkeypatch)
    monkeypatch.setattr(tuning, "choice", lambda *_: None)
    monkeypatch.setattr(devices, "raw_empty", None)
    monkeypatch.setattr(tensor_map.Encoder, "__init__", lambda self, *_: None)
    monkeypatch.setattr(tensor_map.Encoder, "__call__", lambda self, address: None)
    for name in ("empty", "zeros", "ones", "full", "empty_strided", "tensor", "arange"):
        monkeypatch.setattr(torch, name, _on_host(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "to", _moved(torch.Tensor.to))
    found: list[str] = []
    original = Plan.__init__

    def made(self, kernel, device, grid, pointers, numbers, fixed, maps=(), overlaps=False):
        shape = (grid, kernel.spec.threads, kernel.spec.shared_bytes, pointers, numbers)
        digest = hashlib.sha256(kernel.spec.canonical())
        digest.update(repr((shape, fixed, maps, overlaps)).encode())
        found.append(f"{kernel.spec.description} {grid[0]}x{grid[1]} {digest.hexdigest()[:16]}")
        original(self, kernel, device, grid, pointers, numbers, fixed, maps, overlaps)

    monkeypatch.setattr(Plan, "__init__", made)
    return found


def _on_host(function: Callable) -> Callable:
    """``function`` of torch, whose tensors on a GPU are in host memory."""

    def call(*arguments, device=None, **options):
        if device is None or torch.device(device).type != "cuda":
            return function(*arguments, device=device, **options)
        return function(*arguments, **options).as_subclass(OnGpu)

    return call


def _moved(to: Callable) -> Callable:
    def call(self, *arguments, **options):
        given = [a for a in arguments if not _is_gpu(a)]
        device = options.pop("device", None)
        gpu = len(given) < len(arguments) or _is_gpu(device)
        if device is not None and not gpu:
            options["device"] = device
        moved = to(self, *given, **options) if given or options else self
        return moved.as_subclass(OnGpu) if gpu else moved

    return call


def _is_gpu(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def normal(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype).as_subclass(OnGpu)  # whose values nobody reads


def compressed(dense: torch.Tensor, format: str) -> kl.sparse.SparseMatrix:
    matrix = kl.sparse.compress(dense, format=format)
    there = tuple(t.as_subclass(OnGpu) for t in matrix.operands)
    return kl.sparse.SparseMatrix.from_layout(matrix.layout, there)


def calls() -> dict[str, Callable]:
    return {**pairwise_calls(), **kronecker_sparse_calls(), **sparse_calls()}


def pairwise_calls() -> dict[str, Callable]:
    a, b = normal(1000, 64), normal(800, 64)
    big, half = normal(30000, 200), normal(1000, 64, dtype=torch.float16)
    v, width = normal(800, 3), normal(1)
    few = normal(500, 40), normal(20, 500), normal(3, 500), normal(20, 40)
    many = normal(1000, 2000), normal(768, 1000), normal(16, 1000), normal(768, 2000)
    return {
        "l1": lambda: kl.run_kernel(kl.l1_distance(), a, b),
        "l1 into": lambda: kl.run_kernel(kl.l1_distance(), a, b, out=normal(800, 1000).T),
        "batch": lambda: kl.run_kernel(kl.l2_distance(), a.view(10, 100, 64), b),
        "float64": lambda: kl.cdist(a.double(), b.double(), p=3),
        "gaussian": lambda: kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0),
        "gaussian of a tensor": lambda: kl.run_kernel(kl.gaussian(), a, b, bandwidth=width),
        "gaussian half": lambda: kl.run_kernel(kl.gaussian(), half, half, bandwidth=2.0),
        "p": lambda: kl.cdist(a, b, p=1.7),
        "products": lambda: kl.cdist(big, big),
        "matmul": lambda: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0),
        "matmul of products": lambda: kl.kernel_matmul(kl.cauchy(), big, big, big, bandwidth=2.0),
        "sum of few": lambda: kl.kernel_sum(kl.laplace_l1(), a[:, :3], b[:, :3], bandwidth=2.0),
        "logsumexp": lambda: kl.kernel_logsumexp(kl.dot_product(), a, b),
        **{
            f"sum of {k} features, {p}": lambda k=k, p=p: kl.kernel_sum(
                kl.p_distance(), big[:9000, :k], big[:800, :k], p=p
            )
            for k, p in ((3, 1.0), (16, 1.7), (40, 1.0), (130, 2.5))
        },
        **{
            f"matmul by {c}": lambda c=c: kl.kernel_matmul(
                kl.laplace_l1(), a, b, normal(800, c), bandwidth=2.0
            )
            for c in (1, 8, 17)
        },
        "min of half": lambda: kl.kernel_min(kl.l1_distance(), half, half),
        "argmin": lambda: kl.kernel_argmin(kl.l1_distance(), a, b),
        "gradient, 1": lambda: kl.cdist_grad(*few, p=1),
        "gradient, 1.5": lambda: kl.cdist_grad(*few, p=1.5),
        "gradient of many, 1": lambda: kl.cdist_grad(*many, p=1),
        "gradient of many, 1.5": lambda: kl.cdist_grad(*many, p=1.5),
        "expadd": lambda: kl.cdist_expadd(a, b, p=1.3, lengthscale=2.0),
    }


def kronecker_sparse_calls() -> dict[str, Callable]:
    made = {}
    for pattern in ((2, 48, 192, 1), (1, 64, 64, 8), (4, 16, 16, 4)):
        for batch_last in (False, True):
            for dtype in (torch.float32, torch.float16):
                factor = kl.KroneckerSparse(*pattern, batch_last=batch_last)
                weight = normal(*factor.weight_shape, dtype=dtype)
                shape = (256, factor.in_features)
                x = normal(*(shape[::-1] if batch_last else shape), dtype=dtype)
                name = f"Kronecker-sparse {pattern} {batch_last} {dtype}"
                made[name] = lambda f=factor, x=x, w=weight: kl.run_kernel(f, x, w)
                made[f"{name}, backward"] = partial(_factor_backward, factor, x, weight)
    return made


def sparse_calls() -> dict[str, Callable]:
    made = {}
    dense = torch.zeros(512, 1024).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    for format in ("bitmap", "u8", "u4", "u2", "macko", "dense"):
        for dtype in (torch.float16, torch.bfloat16):
            matrix = compressed(dense.to(dtype), format)
            for columns in (1, 4, 16, 40):
                x = normal(columns, 1024, dtype=dtype)
                name = f"sparse {format} {dtype} {columns}"
                made[name] = lambda m=matrix, x=x: kl.sparse.matmul(m, x)
    return made


def rare_calls() -> dict[str, Callable]:
    """Of sizes that take kernels which those above do not."""
    a, b, big = normal(5000, 64), normal(4000, 64), normal(30000, 200)
    double, half = (x.double() for x in (a, b)), (x.half() for x in (a, b))
    gaussian = partial(kl.kernel_matmul, kl.gaussian(), bandwidth=2.0)
    calls = {
        "matmul of float64": partial(gaussian, *double, normal(4000, 3, dtype=torch.float64)),
        "matmul by 8 of many": partial(gaussian, a, b, normal(4000, 8)),
        "matmul by 32 of many": partial(gaussian, a, b, normal(4000, 32)),
        "matmul by 16 of many halves": partial(gaussian, *half, normal(4000, 16).half()),
        "sum of many": lambda: kl.kernel_sum(kl.gaussian(), big, big, bandwidth=2.0),
        "logsumexp of many": lambda: kl.kernel_logsumexp(kl.dot_product(), big, big),
    }
    gradient = torch.ops.kernlib.kronecker_sparse_weight_gradient
    for dtype, pattern in product(
        (torch.float32, torch.float16), ((1, 64, 64, 8), (1, 256, 256, 8))
    ):
        factor = kl.KroneckerSparse(*pattern)
        w = normal(*factor.weight_shape, dtype=dtype)
        x, grad = (normal(8192, factor.in_features, dtype=dtype) for _ in range(2))
        name = f"Kronecker-sparse {pattern} {dtype} of many"
        calls[name] = partial(kl.run_kernel, factor, x, w)
        there = (t.as_subclass(OnSecondGpu) for t in (x, w))
        calls[f"{name} on sm_86"] = partial(kl.run_kernel, factor, *there)
        calls[f"{name}, by the weight"] = partial(gradient, grad, x, [*pattern], False, None, False)
    few = torch.zeros(8, 60000).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    uneven = few.clone()
    uneven[1:, 100:] = 0
    for format, dense in (("bitmap", few), ("u8", few), ("macko", uneven)):
        matrix, x = compressed(dense.half(), format), normal(8, 60000, dtype=torch.float16)
        calls[f"sparse {format} of few rows"] = partial(kl.sparse.matmul, matrix, x)
    return calls


def tuned() -> dict[str, list[str]]:
    """Of calls that can be tuned a digest of the bytes under which a choice is kept, and the
    choices, as they are kept."""
    made = {}
    a, b = normal(30000, 200), normal(1000, 200)
    half = a.half().as_subclass(OnGpu)
    calls = {
        "l1": (kl.l1_distance(), a, b),
        "l2": (kl.l2_distance(), a, a),
        "l2 half": (kl.l2_distance(), half, half),
        "l2 of a view": (kl.l2_distance(), a.T[:, :200], b),
    }
    for pattern, dtype in product(((2, 48, 192, 1), (1, 64, 64, 8)), (torch.float32, half.dtype)):
        for batch_last in (False, True):
            factor = kl.KroneckerSparse(*pattern, batch_last=batch_last)
            shape = (2048, factor.in_features)
            x = normal(*(shape[::-1] if batch_last else shape), dtype=dtype)
            weight = normal(*factor.weight_shape, dtype=dtype)
            calls[f"Kronecker-sparse {pattern} {batch_last} {dtype}"] = (factor, x, weight)
    matrix = compressed(torch.eye(512, 1024).half(), "u8")
    calls["sparse u8"] = kl.SparseMatmul(), matrix, normal(4, 1024, dtype=half.dtype)
    calls |= golden_blocks.tunable() | golden_kronecker.tunable()
    for name, (descriptor, *tensors) in calls.items():
        found = ahead.candidates(descriptor, *tensors)
        digest = hashlib.sha256(found.signature).hexdigest()[:16]
        kept = [" ".join(f"{k}={v}" for k, v in each.choice.items()) for each in found.kernels]
        made[name] = [digest, *kept]
    return made


def _factor_backward(factor, x, weight) -> None:
    shape = x.shape[0 if not factor.batch_last else 1], factor.out_features
    grad = normal(*(shape[::-1] if factor.batch_last else shape), dtype=x.dtype)
    operation.product(grad, weight.transpose(1, 2), None, factor.batch_last, None, False)
    operation.weight_gradient(grad, x, factor.pattern, factor.batch_last, None, False)

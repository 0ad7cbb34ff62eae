"""Calls whose gradient is recorded and calls made by operators of torch.library, as torch.compile
and torch.export make them: which operators and kernels run, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
from kernlib import blocksparse, sparse
from kernlib.runtime.plan import Plan
from tests.architecture import golden_blocks, golden_launches
from tests.support import fakes

HALF, SINGLE, BYTE = torch.float16, torch.float32, torch.float8_e4m3fn


class Runs(list):
    """Launches as lines, and of which tensors these say where a kernel has them."""

    tensors: tuple[torch.Tensor, ...] = ()

    def place(self, address: int) -> str:
        """The number of the tensor at an address, and how many bytes behind its first, ``-`` for
        memory of others, whose addresses differ from run to run."""
        for index, t in enumerate(self.tensors):
            offset = address - t.data_ptr()
            if 0 <= offset < max(1, t.numel() * t.element_size()):
                return f"{index}+{offset}" if offset else str(index)
        return "-" if address else "none"


def install(monkeypatch) -> Runs:
    """Put the GPU in place; the list is of the launches to come."""
    plans, runs = golden_launches.install(monkeypatch), Runs()
    lines: dict[int, tuple[Plan, str]] = {}  # a plan that lives keeps its number
    initialize, start = Plan.__init__, Plan.start

    def noted_plan(self, *arguments, **options):
        initialize(self, *arguments, **options)
        lines[id(self)] = self, plans[-1]

    def noted_launch(self, stream, pointers, numbers=None):
        words, _, digest = lines[id(self)][1].rpartition(" ")
        if numbers is not None:  # each a value and an address
            pairs = zip(numbers[::2], map(bool, numbers[1::2]), strict=True)
            digest = hashlib.sha256(f"{digest} {[*pairs]}".encode()).hexdigest()[:16]
        places = f" of {' '.join(map(runs.place, pointers))}" if runs.tensors else ""
        runs.append(f"{words} {digest}{places}")
        start(self, stream, pointers, numbers)

    monkeypatch.setattr(Plan, "__init__", noted_plan)
    monkeypatch.setattr(Plan, "start", noted_launch)
    return runs


def everywhere(monkeypatch, index: int = 0) -> None:
    """All tensors on a GPU but those on meta: a pass by autograd makes some of its own, of no class
    that a test has. What kernels would have written is 0."""
    places = {False: torch.device("cuda", index), True: torch.device("meta")}
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).zero_())
    monkeypatch.setattr(torch.Tensor, "device", property(lambda self: places[self.is_meta]))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: -1 if self.is_meta else index)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)


class Recorded(TorchDispatchMode):
    """What makes each call one by an operator, of which it notes the name."""

    def __init__(self, runs: list):
        super().__init__()
        self.runs = runs

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function)
        if name.startswith("kernlib."):
            self.runs.append(name.removesuffix(".default"))
        return function(*arguments, **(options or {}))


class Case(NamedTuple):
    """A function of tensors, and how many of these, from the first on, require a gradient, None
    for all."""

    call: Callable
    tensors: tuple[torch.Tensor, ...]
    count: int | None = None


def tensor(*shape: int, dtype=SINGLE) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


def passes(case: Case, runs: Runs) -> list[str]:
    """What a call runs with a gradient, and what that, eager and by operators; and the call by
    operators without a gradient. The result's gradient is the last of the tensors."""
    runs.clear()
    runs.tensors = case.tensors
    count = len(case.tensors) if case.count is None else case.count
    for words, mode in (("eager", nullcontext()), ("recorded", Recorded(runs))) if count else ():
        leaves = [t.detach().requires_grad_(i < count) for i, t in enumerate(case.tensors)]
        fakes.forget()
        with mode:
            runs.append(f"-- {words}")
            y = case.call(*leaves).as_subclass(torch.Tensor)
            grad = tensor(*y.shape, dtype=y.dtype)
            runs.tensors = *case.tensors, grad
            runs.append(f"-- {words}, backward")
            torch.autograd.grad(y, leaves[:count], grad)
    fakes.forget()
    with Recorded(runs):
        runs.append("-- recorded, without a gradient")
        case.call(*(t.detach() for t in case.tensors))
    return [*runs]


def cases() -> dict[str, Case]:
    return {**pairwise(), **factors(), **kronecker(), **matrices(), **blocks()}


def pairwise() -> dict[str, Case]:
    a, b, v = tensor(100, 64), tensor(80, 64), tensor(80, 3)
    few, width = (tensor(2, 50, 3), tensor(40, 3)), tensor(1)
    wide = {"bandwidth": 2.0}
    symmetric = kl.gaussian(symmetric=True)
    cases = {
        "l1": Case(lambda a, b: kl.run_kernel(kl.l1_distance(), a, b), (a, b)),
        "p": Case(lambda a, b: kl.cdist(a, b, p=1.7), (a, b)),
        "p of a tensor": Case(lambda a, b, p: kl.cdist(a, b, p=p), (a, b, tensor(1) + 1)),
        "gaussian": Case(lambda a, b: kl.run_kernel(kl.gaussian(), a, b, **wide), (a, b)),
        "gaussian of one": Case(lambda b, a: kl.run_kernel(kl.gaussian(), a, b, **wide), (b, a), 1),
        "gaussian symmetric": Case(lambda a: kl.run_kernel(symmetric, a, **wide), (a,)),
        "bandwidth": Case(
            lambda a, b, w: kl.run_kernel(kl.gaussian(), a, b, bandwidth=w), (*few, width)
        ),
        "polynomial half": Case(
            lambda a, b: kl.run_kernel(kl.polynomial(2), a, b, gamma=0.1, offset=1.0),
            (a.half(), b.half()),
        ),
        "into": Case(
            lambda a, b: kl.run_kernel(kl.gaussian(), a, b, **wide, out=tensor(100, 80)), (a, b), 0
        ),
        "categories": Case(_of_categories, (a, b, tensor(3, 3))),
    }
    for reduction, descriptor, given in (
        ("matmul", kl.gaussian(), (a, b, v)),
        ("matmul", kl.laplace_l1(), (a, b, v)),
        ("sum", kl.laplace_l2(), (a, b)),
        ("logsumexp", kl.gaussian(), (a, b)),
    ):
        function = partial(getattr(kl, f"kernel_{reduction}"), descriptor, **wide)
        cases[f"{reduction} of {descriptor.describe()}"] = Case(function, given)
    cases["min"] = Case(lambda a, b: kl.kernel_min(kl.l2_distance(), a, b)[0], (a, b))
    cases["topk"] = Case(lambda a, b: kl.kernel_topk(kl.l2_distance(), a, b, 3)[0], (a, b))
    cases["matmul by blocks"] = Case(
        lambda a, b, v: kl.kernel_matmul(kl.p_distance(), a, b, v, p=1.7), (*few, tensor(40, 2))
    )
    return cases


def _of_categories(a, b, table):
    codes = [torch.arange(len(t))[:, None] % 3 for t in (a, b)]
    gaussian = kl.gaussian(categories=1)
    return kl.run_kernel(
        gaussian, a, b, a_codes=codes[0], b_codes=codes[1], tables=[table], bandwidth=2.0
    )


def factors() -> dict[str, Case]:
    cases = {}
    for pattern, last, dtype in (
        ((2, 48, 192, 1), False, SINGLE),
        ((1, 64, 64, 8), False, HALF),
        ((4, 16, 16, 4), True, SINGLE),
    ):
        factor = kl.KroneckerSparse(*pattern, batch_last=last)
        weight = tensor(*factor.weight_shape, dtype=dtype)
        x = tensor(*(256, factor.in_features)[:: -1 if last else 1], dtype=dtype)
        cases[f"Kronecker-sparse {pattern}"] = Case(partial(kl.run_kernel, factor), (x, weight))
    first = kl.KroneckerSparse(2, 24, 24, 1, epilogue=(kl.Bias("first"), kl.Gelu()))
    chain = kl.KroneckerSparseChain((first, kl.KroneckerSparse(1, 24, 24, 2)))
    weights = [tensor(*one.weight_shape) for one in chain.factors]
    cases["Kronecker-sparse chain"] = Case(
        lambda x, w, v, bias: kl.run_kernel(chain, x, w, v, first=bias),
        (tensor(64, 48), *weights, tensor(48)),
    )
    cases["Kronecker-sparse chain, as it is compiled"] = Case(
        lambda x, *weights: torch.ops.kernlib.kronecker_sparse_chain_product(
            x, weights, None, False, None, False
        )[-1],
        (tensor(64, 48), *weights),
    )
    cases["Kronecker-sparse, by the weight"] = Case(
        lambda weight, x: kl.run_kernel(chain.factors[1], x, weight),
        (weights[1], tensor(64, 48)),
        1,
    )
    return cases


def kronecker() -> dict[str, Case]:
    cases = {}
    for sizes, rows, dtype, side in (
        (((16, 16),) * 3, 100, SINGLE, "right"),
        (((5, 3), (7, 11)), 100, HALF, "right"),
        (((64, 64),) * 2, 10, HALF, "left"),
        (((16, 16),) * 4, 10, SINGLE, "right"),
    ):
        x = tensor(rows, kl.KroneckerProduct(sizes).in_features, dtype=dtype)
        x = x if side == "right" else x.T.contiguous()
        given = [tensor(*size, dtype=dtype) for size in sizes]
        call = partial(_kron_matmul, side=side)
        cases[f"kronecker {sizes} {side}"] = Case(call, (x, *given))
    cases["kronecker, by x"] = Case(_kron_matmul, (x, *given), 1)
    epilogue = kl.KroneckerProduct(((16, 16),) * 2, epilogue=(kl.Bias(), kl.Relu()))
    cases["kronecker biased"] = Case(
        lambda x, f, g, bias: kl.run_kernel(epilogue, x, f, g, bias=bias),
        (tensor(20, 256), *given[:2], tensor(256)),
    )
    cases["kronecker added"] = Case(
        lambda x, f, g, y: kl.kron_matmul(x, [f, g], alpha=0.5, beta=2.0, y=y),
        (tensor(20, 256), *given[:2], tensor(20, 256)),
    )
    return cases


def _kron_matmul(x, *factors, side="right"):
    return kl.kron_matmul(x, factors, side=side)


def matrices() -> dict[str, Case]:
    dense = torch.zeros(512, 1024).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    cases, x, bias = {}, tensor(3, 1024, dtype=HALF), tensor(512, dtype=HALF)
    multiply = torch.ops.kernlib.sparse_matmul_product
    for format in ("bitmap", "u8"):
        w = golden_launches.compressed(dense.half(), format)
        turned = golden_launches.compressed(dense.T.contiguous().half(), format)
        given = [*w.listed], [*turned.listed], w.form, turned.form
        cases[f"sparse {format}, by the transpose"] = Case(
            lambda x, bias, given=given: multiply(x, *given, bias, False, False), (x, bias)
        )
    w, x = golden_launches.compressed(dense.half(), "bitmap"), tensor(40, 1024, dtype=HALF)
    biased = kl.SparseMatmul((kl.Bias(), kl.Relu()))
    cases["sparse"] = Case(partial(sparse.matmul, w), (x,))
    cases["sparse biased"] = Case(lambda x, bias: kl.run_kernel(biased, w, x, bias=bias), (x, bias))
    return cases


def blocks() -> dict[str, Case]:
    cases, s = {}, golden_blocks.layout(64, (8, 8))
    for mode, dtype in (("sdd", SINGLE), ("dsd", HALF), ("dds", SINGLE)):
        operands = golden_blocks.operands(mode, s, 2048, dtype=dtype)
        operands = tuple(tensor(*t.shape, dtype=dtype) for t in operands)
        cases[mode] = Case(lambda a, b, mode=mode: getattr(blocksparse, mode)(a, b, s), operands)
    biased = {"transpose_b": True, "epilogue": (kl.Bias(), kl.Gelu())}
    cases["dds biased"] = Case(
        lambda a, b, bias: blocksparse.dds(a, b, s, bias=bias, **biased),
        (tensor(16, 512), tensor(s.capacity, 64, 64), tensor(512)),
    )
    values = tensor(s.capacity, 64, 64)
    cases["softmax"] = Case(
        lambda x, rpe, mask: blocksparse.softmax(x, s, 0.5, rpe=rpe, key_padding_mask=mask),
        (values, tensor(512, 512), tensor(512)),
    )
    cases["scaled"] = Case(
        lambda a, b, *scales: blocksparse.scaled_dds(a, b, s, *scales, transpose_b=True),
        (tensor(64, 512).to(BYTE), values.to(BYTE), tensor(1)[0], tensor(s.capacity)),
        0,
    )
    of_mask = torch.ops.kernlib.blocksparse_layout
    cases["layout"] = Case(lambda mask: of_mask(mask, 64, 64, 9)[0], (tensor(4, 4) > 0,), 0)
    q = tuple(tensor(1, 2, 512, 64, dtype=HALF) for _ in range(3))
    cases["attention"] = Case(lambda q, k, v: blocksparse.attention(q, k, v, s), q)
    cases["attention scored"] = Case(
        lambda q, k, v, slope: blocksparse.attention(
            q, k, v, s, score="v * slope", slope=slope, axes={"slope": "head"}, causal=True
        ),
        (*q, tensor(2)),
    )
    return cases


def on_second_gpu() -> dict[str, Case]:
    """Of sm_86."""
    s = golden_blocks.layout(64, (8, 8), kind=fakes.OnSecondGpu)
    q = tuple(tensor(1, 2, 512, 64, dtype=HALF) for _ in range(3))
    return {
        "attention on sm_86": Case(lambda q, k, v: blocksparse.attention(q, k, v, s), q),
        "dsd on sm_86": Case(
            lambda a, b: blocksparse.dsd(a, b, s), (tensor(s.capacity, 64, 64), tensor(512, 128))
        ),
        "matmul on sm_86": Case(
            lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0),
            (tensor(100, 64), tensor(80, 64), tensor(80, 3)),
        ),
    }

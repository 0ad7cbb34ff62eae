"""Kernel systems whose points and targets are spread over processes, by preconditioned conjugate
gradients with one sum over the processes an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib
from kernlib.descriptors.base import render
from kernlib.distributed.checkpoints import Checkpoint
from kernlib.distributed.communicator import Processes, as_communicator
from kernlib.distributed.rows import rows_texts, said
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.linalg.dense import eigh
from kernlib.linalg.iterative import CGResult
from kernlib.linalg.nystrom import NystromPreconditioner, checked_rank, gram, shifted_root
from kernlib.linalg.nystrom import preconditioner as of_columns
from kernlib.linalg.systems import Request, default_rank, shifted, widened
from kernlib.run import run_kernel
from kernlib.runtime.precision import without_autocast

_PROGRESS = 0.5  # of a residual, which another start must reach


class System(NamedTuple):
    """What a process holds of ``(K + mu I) w = y``: all points, and its rows of the rest."""

    communicator: Processes
    descriptor: Pairwise
    x: torch.Tensor  # this process's points
    points: torch.Tensor  # those of all processes
    sizes: tuple[int, ...]  # points of each process
    mu: float | torch.Tensor  # one number, or one for each point of this process
    hyperparameters: dict

    @property
    def first(self) -> int:
        """The place of this process's first point among all."""
        return sum(self.sizes[: self.communicator.rank])

    def product(self, v: torch.Tensor) -> torch.Tensor:
        """This process's rows of ``(K + mu I) v``."""
        every = self.communicator.gather(v, self.sizes)
        k, values = self.descriptor, self.hyperparameters
        product = kernlib.kernel_matmul(k, self.x, self.points, every, **values)
        return shifted(product, v, self.mu)

    def norm(self, v: torch.Tensor) -> torch.Tensor:
        """The norm of each column over all processes, in float64."""
        return self.communicator.total(v.double().square().sum(0)).sqrt()


def preconditioner(system: System, rank: int, mean: float, seed: int):
    """This process's rows of what :func:`kernlib.linalg.nystrom` returns for all points, of as many
    of them as ``rank``, which ``seed`` draws."""
    count = sum(system.sizes)
    chosen = _order(count, seed)[:rank].to(system.x.device)
    marks, values = system.points[chosen], system.hyperparameters
    columns = run_kernel(system.descriptor, system.x, marks, **values)
    block = run_kernel(system.descriptor, marks, marks, **values).double()
    total = system.communicator.total
    squares = total(torch.linalg.matrix_norm(columns.double()).square()[None])
    shift, root = shifted_root(block, columns, float(squares.sqrt()))
    here = chosen - system.first
    squares, turn, _ = eigh(total(gram(columns, here, shift, root)), overwrite_a=True)
    return of_columns(columns, here, shift, root, squares, turn, mean)


def _order(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")


class _State(NamedTuple):
    x: torch.Tensor
    r: torch.Tensor  # b - A x, by recurrence
    p: torch.Tensor  # direction
    active: torch.Tensor  # columns that go on


class _Sums(NamedTuple):
    """Of each column, over all processes, in float64."""

    rr: torch.Tensor
    pq: torch.Tensor
    rq: torch.Tensor
    qq: torch.Tensor
    ur: torch.Tensor  # U^T r (rank, C)
    uq: torch.Tensor


class Solver:
    """Conjugate gradients of a system and its preconditioner, U and weights.

    An iteration takes one sum over the processes, of the products of r, p and q = A p and of U^T r
    and U^T q. These give the next residual's norm and what the preconditioner makes of it without
    another sum: ``r' = r - alpha q``. All of them are of r itself again in the next iteration, so
    that nothing drifts.
    """

    def __init__(self, system: System, basis: NystromPreconditioner | None):
        self.system = system
        self.vectors = system.x.new_zeros((len(system.x), 0)) if basis is None else basis.vectors
        weights = system.x.new_zeros(0) if basis is None else basis.weights
        self.weights = weights.double()[:, None]

    def run(
        self, b: torch.Tensor, tol: float, max_iter: int, check_every: int, checkpoint: Checkpoint
    ) -> CGResult:
        """The solution for this process's rows b (N_r, C), and the true residual of each column."""
        norm = self.system.norm
        scale = norm(b)
        scale = torch.where(scale > 0, scale, 1).to(b.dtype)
        b = b / scale
        limit = tol * norm(b)
        best, target = torch.full_like(limit, torch.inf), limit
        state, done = self._start(torch.zeros_like(b), b, limit), 0
        saved = checkpoint.load(self._saved(state, target, best, done))
        if saved is not None:
            x, active, target, best, iterations = saved
            # Directions were those of another preconditioner, as its points are drawn anew.
            r = b - self.system.product(x)
            state, done = self._start(x, r, limit, active > 0), int(iterations)
        while done < max_iter:
            count = min(check_every, max_iter - done)
            for _ in range(count):
                state = self._step(state, target)
            done += count
            if not bool(state.active.any()):
                r = b - self.system.product(state.x)
                residual = norm(r)
                again = (residual > limit) & (residual < _PROGRESS * best)
                if not bool(again.any()):
                    break
                best = torch.minimum(best, residual)
                target = torch.where(again, target / 2, target)
                state = self._start(state.x, r, limit, again)
            checkpoint.save(self._saved(state, target, best, done))
        residual = norm(b - self.system.product(state.x)) / torch.where(norm(b) > 0, norm(b), 1)
        x = (state.x * scale).masked_fill(residual.isnan(), torch.nan)
        return CGResult(x, residual, done)

    @staticmethod
    def _saved(state: _State, target, best, done: int) -> list[torch.Tensor]:
        """What a checkpoint holds."""
        return [state.x, state.active.double(), target, best, target.new_tensor(done)]

    def _start(self, x, r, limit, columns=None) -> _State:
        active = self.system.norm(r) > limit  # not of a NaN
        if columns is not None:
            active &= columns
        ur = self.system.communicator.total((self.vectors.mT @ r).double())
        z = r + self._from_basis(ur, r.dtype)
        return _State(x, r, torch.where(active, z, 0), active)

    def _from_basis(self, ur: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.vectors @ (self.weights * ur).to(dtype)

    def _sums(self, r: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> _Sums:
        pairs = (r, r), (p, q), (r, q), (q, q)
        products = [torch.sum(u * v, 0, dtype=torch.float64) for u, v in pairs]
        basis = [(self.vectors.mT @ t).double() for t in (r, q)]
        rows = torch.cat([torch.stack(products), *basis])
        total = self.system.communicator.total(rows)
        rank = self.vectors.shape[1]
        return _Sums(*total[:4], total[4 : 4 + rank], total[4 + rank :])

    def _step(self, state: _State, limit: torch.Tensor) -> _State:
        x, r, p, active = state
        q = self.system.product(p)
        sums = self._sums(r, p, q)
        weights = self.weights
        rz = sums.rr + (weights * sums.ur.square()).sum(0)
        active = active & (sums.rr.sqrt() > limit) & (rz > 0)
        active = active & (sums.pq > 0) & (sums.pq < torch.inf)
        alpha = torch.where(active, rz / sums.pq, 0)
        ur = sums.ur - alpha * sums.uq
        rr = sums.rr - 2 * alpha * sums.rq + alpha.square() * sums.qq
        following = rr.clamp_min(0) + (weights * ur.square()).sum(0)
        active = active & (following > 0) & (following < torch.inf)
        step = alpha.to(x.dtype)
        x = torch.where(step != 0, x + step * p, x)
        r = torch.where(step != 0, r - step * q, r)
        beta = (following / rz).to(x.dtype)
        z = r + self._from_basis(ur, r.dtype)
        return _State(x, r, torch.where(active, z + beta * p, 0), active)


def solve(group, checked: Callable[[], Request], checkpoint: str | None):
    """What a process asks for, and its rows of the solution, whose arguments ``checked`` checks."""
    communicator, requests = as_communicator(group), []

    def texts() -> dict[str, str]:
        requests.append(checked())
        return _texts(communicator, requests[0], checkpoint)

    every = communicator.agree("solve_kernel", texts, lambda: _sizes(requests[0]))
    request, sizes = requests[0], tuple(rows for rows, _ in every)
    descriptor, x, y, mu, mean, rank, limits, _, hyperparameters = request
    count = sum(sizes)
    rank = checked_rank(default_rank(count) if rank is None else rank, count, least=0)
    with torch.no_grad(), without_autocast(x.device):
        if isinstance(mu, torch.Tensor):
            mean = float(communicator.total(mu.double().sum())) / count
        points = communicator.gather(x, sizes)
        system = System(communicator, descriptor, x, points, sizes, mu, hyperparameters)
        basis = preconditioner(system, rank, mean, seed=every[0][1]) if rank else None
        state = Checkpoint(checkpoint, communicator)
        result = Solver(system, basis).run(y, *limits, state)
        if x.dtype is torch.float64:
            return request, result
        wide = system._replace(
            x=x.double(), points=points.double(), hyperparameters=widened(hyperparameters)
        )
        norm = wide.norm(y)
        remainder = wide.norm(y.double() - wide.product(result.x.double()))
        return request, result._replace(residual=remainder / torch.where(norm > 0, norm, 1))


def _sizes(request: Request) -> tuple[int, int]:
    """The points of this process, and a seed, of which that of the first process counts."""
    generator = request.generator
    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, dtype=torch.int64, device=device))
    return request.x.shape[0], seed


def _texts(communicator: Processes, request: Request, checkpoint) -> dict[str, str]:
    """What all processes must agree on."""
    x, y, mu = request.x, request.y, request.mu
    communicator.check_device("x", x)
    return {
        "descriptor": render(request.descriptor),
        "checkpoint": str(checkpoint),
        "rank": str(request.rank),
        "tol, max_iter, check_every": str(request.limits),
        "regularization": "one for each point" if isinstance(mu, torch.Tensor) else str(mu),
        **rows_texts("x", x),
        **rows_texts("y", y),
        **{name: said(value) for name, value in sorted(request.hyperparameters.items())},
    }

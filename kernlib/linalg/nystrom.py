"""A Nyström preconditioner: the large eigenvalues of a kernel matrix, from some of its columns."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import as_int, refuse_descriptor, shown
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions.arguments import refuse_own_names
from kernlib.linalg import native
from kernlib.linalg.checks import DTYPES, cholesky_info, refuse_meta, refuse_not_finite
from kernlib.linalg.dense import eigh
from kernlib.run import run_kernel
from kernlib.runtime.numbers import host_value
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import (
    check_dense,
    check_layout,
    refuse_distributed,
    refuse_gradients,
)

# Rows that are widened to float64 at once: 2^22 numbers, 32 MiB, whatever the rank.
_CHUNK = 1 << 22
# The shift, relative to K's norm: its rounding errors, and in float64 more, as eigenvectors lose
# orthogonality by 2^-53 / shift (1e-6 here). Then ten times that, and so on.
_LEAST_SHIFT, _SHIFTS = 1e-10, 8


class NystromPreconditioner(NamedTuple):
    """``v -> P^-1 v`` for v (N,) or (N, C), as :func:`nystrom` describes it.

    - ``vectors``: U (N, rank), of x's dtype; columns without an eigenvalue are 0.
    - ``eigenvalues``: of the approximation, ascending, float64 (rank,).
    - ``weights``: (rank,), ``(least + regularization) / (eigenvalue + regularization) - 1``.

    A call raises ValueError for a v of another shape, TypeError for one of another dtype or device.

    Example:
        >>> x = torch.rand(50, 2)
        >>> p = kl.linalg.nystrom(kl.gaussian(), x, 10, regularization=0.1, bandwidth=1.0)
        >>> p(torch.ones(50)).shape, p.eigenvalues.shape
        (torch.Size([50]), torch.Size([10]))
    """

    vectors: torch.Tensor  # U (N, rank); zero where there was no eigenvalue
    eigenvalues: torch.Tensor  # of the approximation, ascending, float64 (rank,)
    weights: torch.Tensor  # (rank,): (least + regularization) / (eigenvalue + regularization) - 1

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """``P^-1 v`` of v (N,) or (N, C), in v's shape, dtype and device. Errors are those of the
        class."""
        self._check(v)
        weights = self.weights if v.dim() == 1 else self.weights[:, None]
        with without_autocast(v.device):
            return v + self.vectors @ (weights * (self.vectors.mT @ v))

    def _check(self, v) -> None:
        check_dense(("v",), v=v)
        basis = self.vectors
        if v.dim() not in (1, 2) or v.shape[0] != basis.shape[0]:
            size = basis.shape[0]
            raise ValueError(f"v must be ({size},) or ({size}, C), got shape {tuple(v.shape)}")
        if (v.dtype, v.device) != (basis.dtype, basis.device):
            raise TypeError(
                f"v must be {basis.dtype} on {basis.device} as x was, got {v.dtype} on {v.device}"
            )


@eager_only
def nystrom(
    descriptor: Pairwise,
    x: torch.Tensor,
    rank: int,
    *,
    regularization: float,
    generator: torch.Generator | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> NystromPreconditioner:
    """A preconditioner of ``K(x, x) + regularization I`` from ``rank`` random columns of K.

    With U the eigenvectors of the Nyström approximation ``K(x, s) K(s, s)^-1 K(s, x)``, s being
    ``rank`` points of x chosen uniformly, and e its eigenvalues, the least of them e_min:

        P^-1 v = (e_min + reg) U (diag(e) + reg)^-1 U^T v + (v - U U^T v)

    so that eigenvalues above e_min come near ``e_min + reg``, and the others stay. Memory is N *
    rank numbers, and N * rank^2 operations in float64 build it. That waits for the device.

    - ``descriptor``: a positive semidefinite kernel, and ``hyperparameters`` its arguments for
      :func:`kernlib.run_kernel`, such as ``bandwidth``.
    - ``x``: the points (N, D), float32 or float64.
    - ``rank``: how many of them are drawn, 1 to N; ``generator`` draws them, without it torch's
      own.
    - ``regularization``: a number greater than 0.
    - ``debug``: True writes the call's events to stderr.

    The method is that of Frangella, Tropp and Udell, "Randomized Nyström Preconditioning" (2021),
    with uniform columns for the random test matrix.

    Raises ValueError for shapes and numbers out of range, TypeError for other descriptors, dtypes
    and hyperparameters, RuntimeError for tensors that require a gradient while gradients are
    recorded, torch.linalg.LinAlgError for a kernel that is not positive semidefinite or has a NaN.

    Example:
        >>> x = torch.rand(200, 2, dtype=torch.float64)
        >>> p = kl.linalg.nystrom(kl.gaussian(), x, 50, regularization=1e-3, bandwidth=0.3)
        >>> k = kl.run_kernel(kl.gaussian(), x, x, bandwidth=0.3) + 1e-3 * torch.eye(200).double()
        >>> solve = kl.linalg.conjugate_gradient  # without a preconditioner: 110 iterations
        >>> solve(lambda v: k @ v, x[:, 0], preconditioner=p).iterations
        10
    """
    mu = check_points(descriptor, x, regularization)
    refuse_own_names("nystrom", descriptor, ("rank", "generator"))
    hyperparameters = checked_rest("nystrom", generator, {"x": x}, hyperparameters)
    count = x.shape[0]
    rank = checked_rank(rank, count, least=1)
    with torch.no_grad():
        chosen = _landmarks(x, rank, generator)
        plain = dataclasses.replace(descriptor, symmetric=False)
        columns = run_kernel(plain, x, x[chosen], **hyperparameters)
        check_one_matrix(columns)
        norm = float(torch.linalg.matrix_norm(columns))
        shift, root = shifted_root(columns[chosen].double(), columns, norm)
        squares, turn, _ = eigh(gram(columns, chosen, shift, root), overwrite_a=True)
        return preconditioner(columns, chosen, shift, root, squares, turn, mu)


def check_points(descriptor, x: torch.Tensor, regularization) -> float:
    """The regularization as a number. Raises ValueError and TypeError that name the argument."""
    if not isinstance(descriptor, Pairwise):
        refuse_descriptor("Pairwise kernel such as gaussian()", descriptor)
    if descriptor.categories:
        raise ValueError(
            f"{descriptor.describe()} has categories, which kernel systems do not take: give "
            "kernlib.linalg.conjugate_gradient a function of kernlib.kernel_matmul"
        )
    check_dense(("x",), x=x)
    refuse_distributed(x=x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float32 or float64, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must be (N, D), got shape {tuple(x.shape)}")
    mu = host_value("regularization", regularization, 0)
    if mu is None:
        raise TypeError("regularization must be a number here, got a tensor")
    if not 0 < mu < float("inf"):
        raise ValueError(f"regularization must be greater than 0 and finite, got {mu}")
    refuse_meta("x", x)
    refuse_not_finite("x", x)
    return mu


def check_one_matrix(k: torch.Tensor) -> None:
    """Raises ValueError for values of a kernel that are several matrices."""
    if k.dim() != 2:
        raise ValueError(f"feature_map must give one matrix here, got shape {tuple(k.shape)} for K")


def checked_rank(rank, count: int, least: int) -> int:
    """Raises TypeError and ValueError for what is no number of points."""
    rank = as_int("rank", rank)
    if not least <= rank <= count:
        raise ValueError(f"rank must be {least} to {count}, the points of x, got {shown(rank)}")
    return rank


_SPELT = {  # other libraries' names of a solver's arguments
    **dict.fromkeys(("maxiter", "max_iters", "n_iter"), "max_iter"),
    **dict.fromkeys(("rtol", "tolerance"), "tol"),
}
OF_FEATURES = ("feature_map", "lengthscale")  # hyperparameters that hold a value for each


def checked_rest(task: str, generator, tensors: dict, hyperparameters: dict) -> dict:
    """The hyperparameters, those of one number without dimensions. Raises TypeError, ValueError and
    RuntimeError for what ``task`` does not take of a call's other arguments."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {shown(generator)}")
    single = {}
    for name, value in hyperparameters.items():
        if name in ("out", "accumulate"):
            raise TypeError(f"{name} is no argument of {task}")
        if name in _SPELT:
            raise TypeError(f"{name} is no argument of {task}; did you mean {_SPELT[name]}?")
        if name in OF_FEATURES or not isinstance(value, torch.Tensor):
            continue
        check_layout(name, value)
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be one number here, of shape () or (1,), got {tuple(value.shape)}"
            )
        single[name] = value.reshape(())
    refuse_gradients(task, **tensors, **hyperparameters)
    return hyperparameters | single


def _landmarks(x: torch.Tensor, rank: int, generator: torch.Generator | None) -> torch.Tensor:
    """Indices of points, none twice."""
    where = x.device if generator is None else generator.device
    order = torch.randperm(x.shape[0], generator=generator, dtype=torch.int64, device=where)
    return order[:rank].to(x.device)


def shifted_root(
    block: torch.Tensor, columns: torch.Tensor, norm: float
) -> tuple[float, torch.Tensor]:
    """A shift of the size of K's rounding errors, and the Cholesky factor of ``block`` with it.
    ``norm`` is that of all columns, of which these are some rows."""
    native.load(block.device)
    eye = torch.eye(block.shape[0], dtype=block.dtype, device=block.device)
    block = (block + block.mT) / 2
    least = max(torch.finfo(columns.dtype).eps, _LEAST_SHIFT)
    shift = least * norm
    for _ in range(_SHIFTS):
        root, info = torch.linalg.cholesky_ex(block + shift * eye)
        if not cholesky_info(info, root):
            return shift, root
        shift *= 10
    if not columns.isfinite().all():
        raise torch.linalg.LinAlgError(
            "nystrom: the kernel matrix holds NaN or infinities, though x has none: see its "
            "hyperparameters, and whether the squares of x overflow"
        )
    raise torch.linalg.LinAlgError(
        f"nystrom: the kernel is not positive semidefinite, not even with {shift / 10:.1e} added "
        "to its diagonal"
    )


def _factor_rows(columns: torch.Tensor, chosen: torch.Tensor, shift: float, root: torch.Tensor):
    """Slices of rows, and those rows of ``B = (K(x, s) + shift I(x, s)) root^-T`` in float64: B B^T
    is the approximation of K, shifted. B itself before its Gram matrix, or errors grow as its
    square."""
    count, rank = columns.shape
    step = max(_CHUNK // rank, 1)
    order = torch.arange(rank, dtype=torch.int64, device=columns.device)
    for first in range(0, count, step):
        rows = columns[first : first + step].to(torch.float64, copy=True)
        row = chosen - first
        inside = (row >= 0) & (row < rows.shape[0])
        # By torch.where, of numbers alone, it would have torch's default dtype.
        added = inside.to(rows.dtype) * shift
        rows.index_put_((torch.where(inside, row, 0), order), added, accumulate=True)
        rows = torch.linalg.solve_triangular(root.mT, rows, upper=True, left=False)
        yield slice(first, first + step), rows


def gram(columns, chosen, shift: float, root: torch.Tensor) -> torch.Tensor:
    """``B^T B``."""
    rank = columns.shape[1]
    gram = torch.zeros((rank, rank), dtype=torch.float64, device=columns.device)
    for _, rows in _factor_rows(columns, chosen, shift, root):
        gram.addmm_(rows.mT, rows)
    return gram


def preconditioner(
    columns, chosen, shift: float, root, squares, turn, mu: float
) -> NystromPreconditioner:
    """Of the eigenvalues ``squares`` of ``B^T B`` and their eigenvectors ``turn``: U is
    ``B turn / sqrt(squares)``."""
    mask = squares > 2 * shift  # below, rounding errors have as much to say
    eigenvalues = torch.where(mask, squares - shift, 0)
    least = torch.where(mask, eigenvalues, torch.inf).min()
    weights = torch.where(mask, (least + mu) / (eigenvalues + mu) - 1, 0)
    mixing = turn * torch.where(mask, squares.clamp_min(shift).rsqrt(), 0)
    vectors = torch.empty_like(columns)
    for where, rows in _factor_rows(columns, chosen, shift, root):
        vectors[where] = (rows @ mixing).to(columns.dtype)
    return NystromPreconditioner(vectors, eigenvalues, weights.to(columns.dtype))

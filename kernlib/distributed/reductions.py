"""Reductions of a kernel matrix whose rows, points and summands are spread over processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import kernlib
from kernlib.descriptors.base import render, shown
from kernlib.distributed import ring as ring_of
from kernlib.distributed import sharded, symmetric
from kernlib.distributed.communicator import Processes, as_communicator
from kernlib.distributed.rows import (
    Replica,
    gathered,
    replicated,
    rows_key,
    rows_texts,
    said,
    value_key,
)
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime.tensors import check_dense

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group

OF_FEATURES = ("feature_map", "lengthscale")  # hyperparameters that hold a value for each
_OF_DEVICE = 0.25  # of a device's memory: more points and summands go round in a ring


def kernel_matmul(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | Replica | None,
    v: torch.Tensor | Replica,
    *,
    group: Group = None,
    ring: bool | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """This process's rows of ``K(a, b) v``: ``out[m,c] = sum_n K[m,n] v[n,c]`` of its own rows m
    of ``a`` and of the rows n of ``b`` and ``v`` in all processes.

    - ``a`` (M_r, K), ``b`` (N_r, K), ``v`` (N_r,) or (N_r, C): the rows of this process, of any
      number, also none. ``b`` and ``v`` may be what :func:`replicate` returned, which saves to
      gather them, and ``b`` None with a ``symmetric`` descriptor, which stands for ``a``. DTensors
      that are sharded along rows, or replicated, are taken as well; then the result is one.
    - ``group``: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, a :class:`Communicator`, or
      None for all processes, or for the mesh of DTensors.
    - ``ring``: True passes blocks of b and v from process to process in place of gathering them:
      memory is then that of two blocks. None does so where all rows would take more than a quarter
      of a GPU's memory.
    - ``row_offset``, ``col_offset``, ``hyperparameters``, ``feature_map`` among these: as those of
      :func:`kernlib.kernel_matmul`; offsets are those of the first row of the first process.
      Tensors of hyperparameters hold one number, or those of features, equal in all processes.

    Differentiable as :func:`kernlib.kernel_matmul` is; gradients by b and v are summed up over
    processes, by rank, so that bits repeat, and each process has those of its own rows. Gradients
    by hyperparameters are the sums of all processes', the same in each. Gradients of gradients
    need rows in every process, and there are none of a ring. Of points with themselves, where ``b``
    is the very tensor ``a``, or None, a backward pass does half the work. A group of one process
    computes the very bits of :func:`kernlib.kernel_matmul`.

    Raises what that raises; ValueError, in all processes and before a kernel runs, that names the
    rank and what differs; DistributedError where a process does not take part within the timeout.

    Example:
        >>> out = kl.distributed.kernel_matmul(  # doctest: +SKIP
        ...     kl.gaussian(), x, x, y, bandwidth=0.5)
    """
    names = {"row_offset": row_offset, "col_offset": col_offset, **hyperparameters}
    return _reduce("kernel_matmul", descriptor, a, b, v, group, ring, names)


def kernel_sum(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | Replica | None = None,
    *,
    group: Group = None,
    ring: bool | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """This process's rows of ``out[m] = sum_n K[m,n]``, (M_r,).

    ``descriptor``, ``a``, ``b``, ``group``, ``ring``, ``row_offset``, ``col_offset`` and
    ``hyperparameters`` are those of :func:`kernel_matmul`, as are gradients. Raises what that
    raises.

    Example:
        >>> out = kl.distributed.kernel_sum(kl.gaussian(), x, x, bandwidth=0.5)  # doctest: +SKIP
    """
    names = {"row_offset": row_offset, "col_offset": col_offset, **hyperparameters}
    return _reduce("kernel_sum", descriptor, a, b, None, group, ring, names)


def kernel_logsumexp(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | Replica | None = None,
    *,
    group: Group = None,
    ring: bool | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    **hyperparameters: float | torch.Tensor,
) -> torch.Tensor:
    """This process's rows of ``out[m] = log sum_n exp(K[m,n])``, (M_r,).

    ``descriptor``, ``a``, ``b``, ``group``, ``ring``, ``row_offset``, ``col_offset`` and
    ``hyperparameters`` are those of :func:`kernel_matmul`, as are gradients. Raises what that
    raises.

    Example:
        >>> out = kl.distributed.kernel_logsumexp(kl.l2_distance(), x, y)  # doctest: +SKIP
    """
    for name in ("row_potential", "col_potential"):
        if name in hyperparameters:
            raise TypeError(
                f"kernlib.distributed.kernel_logsumexp takes no {name} yet; "
                "kernlib.kernel_logsumexp of gathered points does"
            )
    names = {"row_offset": row_offset, "col_offset": col_offset, **hyperparameters}
    return _reduce("kernel_logsumexp", descriptor, a, b, None, group, ring, names)


def kernel_min(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | Replica | None = None,
    *,
    group: Group = None,
    ring: bool | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    **hyperparameters: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest entry of each row of K of this process, and its column, counted from the first
    row of b of the first process: both (M_r,).

    ``descriptor``, ``a``, ``b``, ``group``, ``ring``, ``row_offset``, ``col_offset`` and
    ``hyperparameters`` are those of :func:`kernel_matmul`, as are gradients. Raises what that
    raises, and RuntimeError where gradients of a ring are asked for.

    Example:
        >>> near, where = kl.distributed.kernel_min(kl.l2_distance(), x, y)  # doctest: +SKIP
    """
    names = {"row_offset": row_offset, "col_offset": col_offset, **hyperparameters}
    return _reduce("kernel_min", descriptor, a, b, None, group, ring, names)


def kernel_topk(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | Replica | None = None,
    k: int = 1,
    largest: bool = False,
    *,
    group: Group = None,
    ring: bool | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    **hyperparameters: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` smallest, or ``largest``, entries of each row of K of this process in order, and
    their columns, counted from the first row of b of the first process: both (M_r, k).

    ``descriptor``, ``a``, ``b``, ``group``, ``ring``, ``row_offset``, ``col_offset`` and
    ``hyperparameters`` are those of :func:`kernel_matmul`, as are gradients. Raises what that
    raises, and RuntimeError where gradients of a ring are asked for.

    Example:
        >>> near, where = kl.distributed.kernel_topk(kl.l2_distance(), x, y, 5)  # doctest: +SKIP
    """
    names = {"row_offset": row_offset, "col_offset": col_offset, **hyperparameters}
    return _reduce("kernel_topk", descriptor, a, b, None, group, ring, names, (k, largest))


class Call(NamedTuple):
    """A call of this process: its rows, and who has others."""

    task: str
    descriptor: Pairwise
    a: torch.Tensor
    b: torch.Tensor | Replica | None
    v: torch.Tensor | Replica | None
    names: dict[str, Any]  # offsets and hyperparameters
    more: tuple  # k and largest

    @property
    def function(self) -> Callable:
        return getattr(kernlib, self.task)

    def local(self, descriptor, a, b, v, names: dict):
        """The call of kernlib of these tensors, in this process."""
        tensors = (a, b) if v is None else (a, b, v)
        return self.function(descriptor, *tensors, *self.more, **names)


def _reduce(
    task: str, descriptor, a, b, v, group, ring, names: dict, more: tuple = ()
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if sharded.is_distributed(a):
        rows, mesh = a.shape[0], a.device_mesh
        tensors = sharded.locals_of(a, b, v)
        result = _reduce(task, descriptor, *tensors, group or mesh, ring, names, more)
        return sharded.distributed(result, mesh, rows)
    communicator = as_communicator(group)
    call = Call(task, descriptor, a, b, v, names, more)
    sizes = communicator.agree(
        task,
        lambda: _texts(call, communicator, ring),
        lambda: _sizes(call, communicator, ring),
        lambda: _key(call, ring),
    )
    if communicator.size == 1:
        b, v = (t.tensor if isinstance(t, Replica) else t for t in (b, v))
        return call.local(descriptor, a, b, v, names)
    first = sum(rows for rows, _, _ in sizes[: communicator.rank])
    names = {
        name: replicated(value, communicator) if isinstance(value, torch.Tensor) else value
        for name, value in names.items()
    } | {"row_offset": names["row_offset"] + first}
    if b is None:
        b, descriptor = a, dataclasses.replace(descriptor, symmetric=False)
    rows = tuple(n for _, n, _ in sizes)
    if any(in_ring for _, _, in_ring in sizes):
        return ring_of.reduce(call._replace(descriptor=descriptor, b=b), communicator, rows, names)
    if b is a and _is_symmetric(call):
        return _self_product(call, descriptor, communicator, rows, names)
    b, v = _all_rows(communicator, rows, b, v)
    return call.local(descriptor, a, b, v, names)


def _is_symmetric(call: Call) -> bool:
    """Whether a product of points with themselves is of a symmetric matrix."""
    names = call.names
    is_product = call.task in ("kernel_matmul", "kernel_sum")
    if not is_product or call.descriptor.signed or isinstance(call.v, Replica):
        return False
    return "regularization" not in names or names["row_offset"] == names["col_offset"]


def _self_product(
    call: Call, descriptor, communicator: Processes, rows: tuple[int, ...], names: dict
) -> torch.Tensor:
    v = call.a.new_ones((len(call.a), 1)) if call.v is None else call.v
    columns = v[:, None] if v.dim() == 1 else v
    result = symmetric.product(descriptor, call.a, columns, communicator, rows, names)
    return result[:, 0] if call.v is None or v.dim() == 1 else result


def _all_rows(communicator: Processes, rows: tuple[int, ...], *tensors) -> tuple:
    """The rows of all processes of each tensor; a replica has them."""
    parts = [t for t in tensors if isinstance(t, torch.Tensor)]
    every = iter(gathered(communicator, rows, *parts) if parts else ())
    return tuple(
        next(every) if isinstance(t, torch.Tensor) else None if t is None else t.tensor
        for t in tensors
    )


def _sizes(call: Call, communicator: Processes, ring: bool | None) -> tuple[int, int, int]:
    """The rows of this process, of a and of b, and whether it asks for a ring. Raises for rows that
    do not fit."""
    _check_rows(communicator, ring, call.a, call.b, call.v)
    of_b = call.a if call.b is None else call.b
    rows = of_b.sizes[communicator.rank] if isinstance(of_b, Replica) else of_b.shape[0]
    return call.a.shape[0], rows, _wants_ring(ring, communicator, call.a, call.b, call.v)


def _key(call: Call, ring: bool | None) -> tuple:
    """What the checks and the texts of a call depend on, rows apart. Raises TypeError if that is
    nothing plain."""
    _, descriptor, a, b, v, names, more = call
    parts: list = [descriptor, repr((more, ring)), b is a, v is a, rows_key(a)]
    for t in (b, v):
        if isinstance(t, Replica):
            parts.append(t.sizes)
            t = t.tensor
        parts.append(t if t is None else rows_key(t))
    parts += [(name, *value_key(value)) for name, value in names.items()]
    return tuple(parts)


def _texts(call: Call, communicator: Processes, ring: bool | None) -> dict[str, str]:
    """What all processes must agree on. Raises what a call of no rows raises."""
    task, descriptor, a, b, v, names, more = call
    if getattr(descriptor, "package", ""):
        raise TypeError(
            f"descriptor must be a Pairwise kernel such as gaussian(), got {descriptor.describe()}:"
            f" a formula's tensors have rows of their own; gather those of its columns, as by "
            f"torch.distributed.all_gather, and call kernlib.{task} in each process"
        )
    if ring not in (None, True, False):
        raise TypeError(f"ring must be True, False or None, got {shown(ring)}")
    of_b, of_v = (t.tensor if isinstance(t, Replica) else t for t in (b, v))
    check_dense(("a",), a=a, b=of_b, v=of_v)
    for name, t in (("a", a), ("b", of_b), ("v", of_v)):
        if t is not None:
            communicator.check_device(name, t)
    if a.dim() != 2 or (of_b is not None and of_b.dim() != 2):
        shapes = [tuple(t.shape) for t in (a, of_b) if t is not None]
        raise ValueError(f"a and b must be (rows, features), got shapes {shapes}")
    for name, value in names.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1 and name not in OF_FEATURES:
            raise ValueError(
                f"{name} must be one number for all rows here, got shape {tuple(value.shape)}"
            )
    # Of no rows: it raises for all else that no process could compute. A process may have fewer
    # points than k.
    checked = call._replace(task="kernel_sum", more=()) if more or task == "kernel_min" else call
    with torch.no_grad():
        none = (None if t is None else t[:0] for t in (of_b, of_v))
        checked.local(descriptor, a[:0], *none, names)
    texts = {"descriptor": render(descriptor), "k, largest": str(more)}
    texts |= {"features": str(a.shape[1]), "dtype": str(a.dtype), "device type": a.device.type}
    for name, t in (("b", b), ("v", v)):
        texts[name] = "rows" if isinstance(t, torch.Tensor) else type(t).__name__
        if t is a:
            texts[name] = "a itself"  # whose gradients go another way
        if t is not None:
            of_t = t.tensor if isinstance(t, Replica) else t
            texts |= rows_texts(name, of_t)
            if isinstance(t, Replica):
                texts[f"rows of {name}"] = str(t.sizes)
    if b is None:
        texts |= rows_texts("a", a)
    for name, value in sorted(names.items()):
        texts[name] = said(value)
    texts["ring"] = str(ring)
    return texts


def _check_rows(communicator: Processes, ring: bool | None, a, b, v) -> None:
    """Raises ValueError for a b and a v of different rows in this process, and for replicas of
    another group or in a ring."""
    b = a if b is None else b
    for name, t in (("b", b), ("v", v)):
        if not isinstance(t, Replica):
            continue
        if len(t.sizes) != communicator.size:
            raise ValueError(
                f"{name} is a replica of {len(t.sizes)} processes in a group of {communicator.size}"
            )
        if ring:
            raise ValueError(f"ring=True passes rows on, and {name} is a replica, which has all")
    if v is None:
        return
    rows = (t.sizes[communicator.rank] if isinstance(t, Replica) else len(t) for t in (b, v))
    of_b, of_v = rows
    if of_b != of_v:
        raise ValueError(f"v must have the rows of b, {of_b}, got {of_v}")


def _wants_ring(ring: bool | None, communicator: Processes, a, b, v) -> int:
    if ring is not None or communicator.size == 1:
        return int(bool(ring) and communicator.size > 1)
    if not a.is_cuda or any(isinstance(t, Replica) for t in (b, v)):
        return 0
    tensors = [t for t in (a if b is None else b, v) if isinstance(t, torch.Tensor)]
    bytes_here = sum(t.numel() * t.element_size() for t in tensors)
    return int(bytes_here * communicator.size > _OF_DEVICE * _memory(a.device))


@lru_cache
def _memory(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory

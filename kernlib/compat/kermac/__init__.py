"""kermac's names, signatures and result ranks over kernlib's kernels:
``import kernlib.compat.kermac as kermac``.

Arguments and results are kermac's: a result without a given ``out`` has a batch dimension, of 1
where no argument has one; ``try_to_align`` is accepted and ignored, as kernels find out the
alignment themselves. What differs is what kermac gets wrong, and what it refuses:

- descriptors are immutable, and ``skip_epilogue`` leaves other calls alone;
- hyperparameters are real numbers or tensors of shape () or (L,), of any stride;
- ``regularization_offset_x`` counts columns and ``_y`` rows, whatever the layout of ``out``;
- the regularization is added to the diagonal, whose entry need not be 1;
- ``epsilon`` is 1e-5 by default, as in kermac, and absolute: where data or bandwidths are as
  small, pass ``epsilon=0.0``. It applies to the magnitude, so that negative dot products stay;
- equal coordinates add nothing to gradients, and a NaN reaches them;
- ``tensor_stats`` tells the alignment of row-major tensors too, and looks at the batch stride;
- float64, float16 and bfloat16, CPU tensors, arbitrary strides and empty tensors are taken;
- gradients of the kernel matrices are recorded by autograd, or the call refuses.

What stays though it may surprise: ``lengthscale`` stands for ``scale = 1 / lengthscale^p``, a sum
that grows, and a ``scale`` that is given too takes its place. :func:`kernlib.cdist_expadd` has the
sum that decays. ``Symmetry`` is a name alone, and no call takes it.

Example:
    >>> import kernlib.compat.kermac as kermac
    >>> a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> kermac.cdist(a, b), kermac.run_kernel(kermac.laplace_l1, a, b, bandwidth=7.0)
    (tensor([[[5.]]]), tensor([[[0.3679]]]))
"""

from __future__ import annotations

import torch

from kernlib.compat.kermac import linalg
from kernlib.compat.kermac._descriptors import (
    Inner,
    InnerOperator,
    Kernel,
    KernelDescriptor,
    KernelType,
    Op,
    Outer,
    PowerType,
    Symmetry,
    kernel_descriptor_l1_norm,
    kernel_descriptor_l2_norm,
    kernel_descriptor_laplace_l1,
    kernel_descriptor_laplace_l2,
    kernel_descriptor_mma,
    kernel_descriptor_p_norm,
    l1_norm,
    l2_norm,
    laplace_l1,
    laplace_l2,
    mma,
    p_norm,
)
from kernlib.compat.kermac._tools import (
    Alignment,
    CudaTimer,
    Majorness,
    TensorStats,
    ceil_div,
    pre_compile_descriptors,
    tensor_stats,
)
from kernlib.compat.kermac.linalg import FillMode, eigh, solve_cholesky, solve_lu
from kernlib.descriptors.base import as_int, check_flag, shown
from kernlib.families.pairwise import descriptor as named
from kernlib.families.pairwise.checks import MAX_OFFSET, check_has_sums
from kernlib.families.pairwise.functions import expadd
from kernlib.families.pairwise.gradients import points
from kernlib.run import run_kernel as _run_kernel
from kernlib.runtime.numbers import host_value
from kernlib.runtime.tensors import refuse_any_overlap

__all__ = [
    "Alignment",
    "CudaTimer",
    "FillMode",
    "Inner",
    "InnerOperator",
    "Kernel",
    "KernelDescriptor",
    "KernelType",
    "Majorness",
    "Op",
    "Outer",
    "PowerType",
    "Symmetry",
    "TensorStats",
    "cdist",
    "cdist_expadd",
    "cdist_grad",
    "cdist_grad_expadd",
    "ceil_div",
    "eigh",
    "kernel_descriptor_l1_norm",
    "kernel_descriptor_l2_norm",
    "kernel_descriptor_laplace_l1",
    "kernel_descriptor_laplace_l2",
    "kernel_descriptor_mma",
    "kernel_descriptor_p_norm",
    "l1_norm",
    "l2_norm",
    "laplace_l1",
    "laplace_l2",
    "linalg",
    "mma",
    "p_norm",
    "pre_compile_descriptors",
    "run_kernel",
    "solve_cholesky",
    "solve_lu",
    "tensor_stats",
]

EPSILON = 1e-5

# Kept, as each takes 14 us to make.
_L1, _L2, _NORM = named.l1_distance(), named.l2_distance(), named.p_distance()
_SQUARES, _POWERS = named.squared_distance(), named.power_sum()


def run_kernel(
    kernel_descriptor: KernelDescriptor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor | None = None,
    inner_p: float | torch.Tensor | None = None,
    outer_p: float | torch.Tensor | None = None,
    bandwidth: float | torch.Tensor | None = None,
    epsilon: float | None = None,
    regularization: float | torch.Tensor | None = None,
    regularization_offset_x: int = 0,
    regularization_offset_y: int = 0,
    try_to_align: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """``out[l,m,n] = kernel(outer(sum_k inner(op(b[l,n,k], a[l,m,k]))))``.

    - ``kernel_descriptor``: a :class:`KernelDescriptor`, such as :data:`laplace_l2`.
    - ``a`` (M, K) or (L, M, K), ``b`` (N, K) or (L, N, K); ``out`` (M, N) or (L, M, N) is written
      in place and returned, without it the result is (L, M, N), L 1 for matrices.
    - ``p`` only where both stages are POW: ``inner_p = p, outer_p = 1 / p``; else ``inner_p`` and
      ``outer_p``, each exactly where its stage is POW.
    - ``bandwidth`` exactly where there is a kernel; ``epsilon`` (1e-5) and ``regularization`` only
      there: values smaller than epsilon in magnitude count as 0, and where
      ``m + regularization_offset_y == n + regularization_offset_x`` the regularization is added.
    - ``try_to_align``: nothing. ``debug``: True writes the call's events to stderr.

    Raises TypeError for what is no descriptor, ValueError for other combinations of arguments, and
    what :func:`kernlib.run_kernel` raises.
    """
    if not isinstance(kernel_descriptor, KernelDescriptor):
        raise TypeError(
            f"kernel_descriptor must be a KernelDescriptor, got {shown(kernel_descriptor)}"
        )
    exponents = {"p": p, "inner_p": inner_p, "outer_p": outer_p}
    of_kernel = {"bandwidth": bandwidth, "epsilon": epsilon, "regularization": regularization}
    _check_combination(kernel_descriptor, exponents, of_kernel)
    check_flag("try_to_align", try_to_align)
    if kernel_descriptor.kernel_type is not KernelType.NONE and epsilon is None:
        of_kernel["epsilon"] = EPSILON
    arguments = {name: x for name, x in (exponents | of_kernel).items() if x is not None}
    return _with_batch(
        _run_kernel(
            kernel_descriptor.pairwise,
            _as_batch(a, out, arguments),
            b,
            out=out,
            row_offset=_offset("regularization_offset_y", regularization_offset_y),
            col_offset=_offset("regularization_offset_x", regularization_offset_x),
            debug=debug,
            **arguments,
        ),
        out,
        3,
    )


def _check_combination(descriptor: KernelDescriptor, exponents: dict, of_kernel: dict) -> None:
    """What kernlib would take or name otherwise. Raises ValueError."""
    powers = descriptor.inner_power, descriptor.outer_power
    if exponents["p"] is not None and powers != (PowerType.POW, PowerType.POW):
        raise ValueError(
            f"p needs PowerType.POW for inner_power and outer_power, got {powers[0]}, {powers[1]}"
        )
    if descriptor.kernel_type is KernelType.NONE:
        for name, value in of_kernel.items():
            if value is not None:
                raise ValueError(f"{name} needs a kernel, and the descriptor has KernelType.NONE")


def _offset(name: str, value) -> int:
    if isinstance(value, torch.SymInt):
        return value
    offset = as_int(name, value)
    if abs(offset) > MAX_OFFSET:
        raise ValueError(f"{name} must be at most 2**61 in magnitude, got {shown(offset)}")
    return offset


def _with_batch(result: torch.Tensor, out: torch.Tensor | None, dimensions: int) -> torch.Tensor:
    """A result of kermac's rank, unless it was given."""
    return result if out is not None or result.dim() == dimensions else result[None]


def _as_batch(a: torch.Tensor, out: torch.Tensor | None, hyperparameters: dict) -> torch.Tensor:
    """``a`` with a batch dimension where hyperparameters have one: in kermac no value is meant for
    a feature, of which kernlib would warn if there are as many."""
    if out is None and isinstance(a, torch.Tensor) and a.dim() == 2:
        for value in hyperparameters.values():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                return a[None]
    return a


def cdist(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    skip_epilogue: bool = False,
    try_to_align: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """p-norm distances (L, M, N) of the rows of ``a`` (M, K) or (L, M, K) and ``b`` (N, K) or
    (L, N, K); with ``skip_epilogue`` the sums ``sum_k |a - b|^p`` without the root, for every p.
    ``out`` (M, N) or (L, M, N) is written in place and returned; ``p`` is a number or a tensor of
    shape () or (L,); ``try_to_align`` is ignored; ``debug=True`` writes the call's events to
    stderr.

    Raises ValueError for ``p=inf`` without root, which has no sums, and what
    :func:`kernlib.run_kernel` raises.
    """
    value = host_value("p", p)
    check_flag("skip_epilogue", skip_epilogue)
    check_flag("try_to_align", try_to_align)
    if skip_epilogue:
        check_has_sums(p, "skip_epilogue")
    if value == 1:
        descriptor = _L1
    elif value == 2:
        descriptor = _SQUARES if skip_epilogue else _L2
    else:
        descriptor = _POWERS if skip_epilogue else _NORM
    exponent = {} if value in (1, 2) else {"p": p}
    a = _as_batch(a, out, exponent)
    return _with_batch(_run_kernel(descriptor, a, b, out=out, debug=debug, **exponent), out, 3)


def cdist_grad(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    eps: float = 1e-8,
    debug: bool = False,
) -> torch.Tensor:
    """``out[l,o,n,m] = sum_k c[o,k] a[k,m] sign(d[n,m] - b[n,k]) |d[n,m] - b[n,k]|^(p-1)``.

    ``a`` (K, M), ``b`` (N, K), ``c`` (O, K), ``d`` (N, M), ``out`` (O, N, M), each with an optional
    batch in front; without ``out`` the result is (L, O, N, M). ``p`` is 0 or greater, ``eps`` the
    smallest ``|v|`` that counts where p < 1; ``debug=True`` writes the call's events to stderr. See
    :func:`kernlib.cdist_grad`.

    Raises ValueError for shapes that do not fit and numbers out of range, TypeError for other
    dtypes, RuntimeError for inputs that require a gradient while gradients are recorded.
    """
    grad = points.cdist_grad(a, b, c, d, out=out, p=p, eps=eps, debug=debug)
    return _with_batch(grad, out, 4)


def cdist_expadd(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    lengthscale: float | torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    try_to_align: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """``sum_k exp(scale * |a_k - b_k|^p)`` (L, M, N) of the rows of ``a`` (M, K) or (L, M, K) and
    ``b`` (N, K) or (L, N, K).

    - ``out`` (M, N) or (L, M, N) is written in place and returned.
    - ``p``, ``lengthscale``, ``scale``: numbers or tensors of shape () or (L,). ``scale`` is
      1 / lengthscale^p, if it is not given; usually it is negative.
    - ``try_to_align``: nothing. ``debug``: True writes the call's events to stderr.

    Raises ValueError if neither ``scale`` nor ``lengthscale`` is given, and what
    :func:`kernlib.cdist_expadd` raises, whose ``lengthscale`` has the other sign.
    """
    check_flag("try_to_align", try_to_align)
    refuse_any_overlap(out, lengthscale=lengthscale)
    arguments = {"p": p, "scale": _scale(p, lengthscale, scale, "a", a), "debug": debug}
    return _with_batch(expadd.cdist_expadd(a, b, out=out, **arguments), out, 3)


def cdist_grad_expadd(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    q: float | torch.Tensor = 1.0,
    c0: float | torch.Tensor = 0.0,
    lengthscale: float | torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    eps: float = 1e-8,
    s_km: torch.Tensor | None = None,
    try_to_align: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """The gradient of ``sum_k c[o,k] a[k,m] (c0 + S[k,m])^q`` by the query points ``d``,
    (L, O, N, M), with the sums S of :func:`cdist_expadd`.

    - ``a`` (K, M), ``b`` (N, K), ``c`` (O, K), ``d`` (N, M), each with an optional batch in front;
      ``out`` (O, N, M), with a batch or not, is written in place and returned.
    - ``s_km`` (K, M) may take the place of S.
    - ``p``, ``q``, ``c0``: numbers or tensors of shape () or (L,); ``scale`` and ``lengthscale`` as
      in :func:`cdist_expadd`; ``eps`` the smallest ``|v|`` that counts where p < 1.
    - ``try_to_align``: nothing. ``debug``: True writes the call's events to stderr.

    Raises ValueError if neither ``scale`` nor ``lengthscale`` is given, and what
    :func:`kernlib.cdist_grad_expadd` raises.
    """
    check_flag("try_to_align", try_to_align)
    refuse_any_overlap(out, lengthscale=lengthscale)
    numbers = {"p": p, "q": q, "c0": c0, "scale": _scale(p, lengthscale, scale, "d", d)}
    rest = {"out": out, "eps": eps, "s_km": s_km, "debug": debug}
    grad = expadd.cdist_grad_expadd(a, b, c, d, **numbers, **rest)
    return _with_batch(grad, out, 4)


def _scale(p, lengthscale, scale, name: str, like: torch.Tensor) -> float | torch.Tensor:
    """Raises ValueError where neither is given, and for host values that would not do."""
    if scale is not None:
        return scale
    if lengthscale is None:
        raise ValueError("give scale or lengthscale, got neither")
    return -expadd.scale_of(p, lengthscale, None, like, name)

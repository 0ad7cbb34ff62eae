"""Gradients of pairwise sums with respect to points, summed over the other points with weights."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from kernlib import events
from kernlib.descriptors.base import check_flag
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.gradients import arguments
from kernlib.families.pairwise.gradients.arguments import Kind, Operands
from kernlib.families.pairwise.gradients.primitive import execute, key_of

_PLAIN = Kind("difference", stages.Power(), False, True)


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

    The gradient of ``1/p sum_k c[o,k] a[k,m] |d[:,m] - b[:,k]|_p^p`` with respect to the queries
    ``d``, of the kermac project.

    - ``a`` (K, M) weights of the pairs of a training point k and a query m, ``b`` (N, K) and ``d``
      (N, M) points, feature first, ``c`` (O, K) coefficients; each with an optional batch L in
      front, 1 of which broadcasts. Any strides; float32, float64, float16 or bfloat16, summed in
      float64 for float64 and float32 for the others.
    - ``out`` (O, N, M) or (L, O, N, M), any strides; without it a new tensor, 4-D when something
      has a batch.
    - ``p`` is 0 or greater, and finite: a real number, or a tensor of shape () or (L,) that stays
      on the device and is not looked at. For p < 1 differences other than 0 count as ``eps`` at
      least. A NaN reaches every sum that it is part of.
    - ``debug=True`` writes a line to stderr for each event.
    - Equal coordinates add exactly 0, but in large calls on a GPU with the number 2 for p: those
      are matrix products of columns without their mean, of an error of about 2^-22 of
      ``sum_k |c a| (|d| + |b|)``, where equal coordinates cancel to that and no further. p as a
      tensor is always computed by differences.

    Raises ValueError and TypeError that name the argument, RuntimeError for inputs that require a
    gradient while gradients are recorded.

    Example:
        >>> a, c, b = torch.ones(1, 1), torch.ones(1, 1), torch.zeros(2, 1)
        >>> kl.cdist_grad(a, b, c, d=torch.tensor([[3.0], [-2.0]]), p=3.0)  # sign(v) v^2
        tensor([[[ 9.], [-4.]]])
    """
    if is_dynamo_compiling():
        from kernlib.eager import eagerly

        return eagerly(cdist_grad, a, b, c, d, out, p, eps, debug)
    if debug is not False:
        check_flag("debug", debug)
        with events.on_stderr():
            return cdist_grad(a, b, c, d, out, p, eps)
    values = {"p": p, "eps": arguments.check_eps(eps)}
    return _run(_PLAIN, Operands(d, b, a, c), out, False, values)


def pair_gradient(
    operator: str,
    inner: object,
    x: torch.Tensor,
    z: torch.Tensor,
    weights: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    *,
    p: float | torch.Tensor | None = None,
    inner_scale: float | torch.Tensor | None = None,
    first: bool = True,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    eps: float = 0.0,
) -> torch.Tensor:
    """``out[l,(o,)q,k] (+)= sum_t [c[l,o,t]] W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``.

    ``x`` (Q, K), ``z`` (T, K), ``weights`` (Q, T) and ``coefficients`` (O, T), each with a batch in
    front or not, give (Q, K) or (O, Q, K), with a batch in front when something has one. Strides,
    dtypes, batches and ``out`` as in :func:`cdist_grad`. ``op`` is ``z - x`` where x is the
    ``first`` operand of ``"difference"``, else ``x - z``. ``inner`` is Identity, Abs, Square, Sqrt,
    Power, which needs ``p``, or ExpPower, which needs ``p`` and ``inner_scale``: numbers or tensors
    of shape () or (L,). The derivative at equal coordinates is exactly 0, for p = 0 everywhere, but
    in large calls with Square, or Power and the number 2, as :func:`cdist_grad` says. ``eps`` is
    the smallest ``|v|`` that counts where p < 1, 0 for the smallest normal number.

    Raises ValueError and TypeError that name the argument, RuntimeError as :func:`cdist_grad` does.
    """
    kind = Kind(operator, inner, bool(first), False)
    values = {}
    if p is not None:
        values["p"] = p
    if inner_scale is not None:
        values["inner_scale"] = inner_scale
    if eps:
        values["eps"] = arguments.check_eps(eps)
    return _run(kind, Operands(x, z, weights, coefficients), out, accumulate, values)


def _run(kind: Kind, operands: Operands, out, accumulate: bool, values: dict) -> torch.Tensor:
    if torch.is_grad_enabled() and True in [
        getattr(value, "requires_grad", False) is True  # no Proxy is
        for value in (*operands, out, *values.values())
    ]:
        key_of(kind, operands, out, accumulate, values)  # raises what is wrong with them first
        arguments.refuse_gradients(kind, operands, out, values)
    return execute(kind, operands, out, accumulate, values)

"""Distances, kernels, their gradients and reductions."""

from __future__ import annotations

import math

import torch

import kernlib as kl
from tests.contract import plain
from tests.contract.cases import Context, Entry

M, N, K = 5, 4, 3
OPTIONS = {
    "descriptor": "descriptor", "bandwidth": "number", "p": "number", "debug": "flag",
    "accumulate": "flag", "epsilon": "number", "regularization": "number", "row_offset": "int",
    "col_offset": "int", "root": "flag", "compute_mode": "text", "eps": "number", "q": "number",
    "c0": "number", "scale": "number", "lengthscale": "number", "diagonal": "flag",
    "centred": "flag", "k": "int", "largest": "flag", "threshold": "number",
}  # fmt: skip
# Of what another descriptor takes, too.
NAMES = ("operator", "inner_p", "symmetric", "w", "weight", "weights", "x", "bandwidth", "epsilon",
         "regularization", "p", "batches")  # fmt: skip


def points(c: Context, *names: str) -> dict:
    """Points of a dtype, batched or not."""
    dtype, batch = c.float_type(), c.random.choice([(), (), (2,), (1,)])
    rows = dict(zip(names, (M, N), strict=False))
    return {n: c.randn(*(batch if c.random.random() < 0.7 else ()), m, K, dtype=dtype)
            for n, m in rows.items()}  # fmt: skip


def _descriptor(c: Context) -> dict:
    kinds = (
        {"descriptor": kl.gaussian(), "bandwidth": 2.0},
        {"descriptor": kl.laplace_l1(), "bandwidth": 3.0, "regularization": 0.5, "row_offset": 1},
        {"descriptor": kl.gaussian(), "bandwidth": 2.0, "epsilon": 0.5},
        {"descriptor": kl.l1_distance()},
        {"descriptor": kl.l2_distance()},
        {"descriptor": kl.p_distance(), "p": 1.5},
    )
    return dict(c.random.choice(kinds))


def _with_categories(c: Context, given: dict, values: dict) -> tuple[dict, dict]:
    """The same of points with categories, of some calls whose descriptor takes them here."""
    known = given["descriptor"] in (kl.gaussian(), kl.laplace_l1())
    if not known or c.random.random() < 0.6:
        return given, values
    made = {}
    for name, rows in (("a_codes", M), ("b_codes", N)):
        kind = c.random.choice([torch.int64, torch.int32, torch.uint8])
        made[name] = (c.randn(rows, 2).abs() * 2).clamp(max=2).to(kind)
    made["tables"] = c.randn(2, 3, 3, dtype=given["a"].dtype).abs()
    return given | {"descriptor": given["descriptor"].replace(categories=2)}, values | made


def _shape(given: dict, *rest: int) -> tuple[int, ...]:
    """Of a result of all given tensors."""
    batches = [t.shape[0] for t in given.values() if isinstance(t, torch.Tensor) and t.dim() == 3]
    return (max(batches), *rest) if batches else rest


def run_kernel(c: Context) -> dict:
    values = _descriptor(c)
    given = {"descriptor": values.pop("descriptor"), **points(c, "a", "b")}
    given, values = _with_categories(c, given, values)
    if c.random.random() < 0.4:
        shape = c.random.choice([(K,), (K, 2)])
        values["feature_map"] = c.randn(*shape, dtype=given["a"].dtype)
    elif c.random.random() < 0.3:
        values["lengthscale"] = c.randn(K, dtype=given["a"].dtype).abs() + 0.5
    if c.random.random() < 0.5:
        values["out"] = torch.zeros(_shape(given, M, N), dtype=given["a"].dtype, device=c.device)
        if c.random.random() < 0.5:
            values["accumulate"] = c.random.random() < 0.5
    if c.random.random() < 0.2:
        values["debug"] = False
    return given | values


def wanted_matrix(descriptor, a, b=None, out=None, accumulate=False, debug=False, **values):
    plain.flag(debug)
    return plain.written(plain.matrix(descriptor, a, b, **values), a, out, accumulate)


def cdist(c: Context) -> dict:
    given = points(c, "x1", "x2")
    given |= {"p": c.random.choice([2.0, 1, 1.5, 0, math.inf]),
              "compute_mode": "use_mm_for_euclid_dist_if_necessary"}  # fmt: skip
    if c.random.random() < 0.4:
        given["root"] = given["p"] == math.inf or c.random.random() < 0.5
    if c.random.random() < 0.5:
        given["out"] = torch.zeros(_shape(given, M, N), dtype=given["x1"].dtype, device=c.device)
    return given


def wanted_distance(x1, x2, p=2.0, compute_mode=None, root=True, out=None, debug=False):
    plain.flag(root, debug)
    modes = (None, "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")
    if compute_mode not in (*modes, "use_mm_for_euclid_dist_if_necessary"):
        raise ValueError("mode")
    p = plain.number(p, least=0, most=math.inf)
    plain.same_kind(x1, x2)
    a, b = plain.wide(x1), plain.wide(x2)
    if a.shape[-1] != b.shape[-1] or min(a.dim(), b.dim()) < 2:
        raise ValueError("shapes")
    if isinstance(p, torch.Tensor):
        finite = not p.isinf().any() if p.device.type == "cpu" else True
    else:
        finite = p != math.inf
    if not (root or finite):
        raise ValueError("no sums")
    d = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    return plain.written(plain.power(d, p, root), x1, out)


def pairs(c: Context) -> dict:
    dtype = c.random.choice((torch.float32, torch.float64))
    batch = c.random.choice([(), (2,)])
    shapes = {"a": (N, M), "b": (K, N), "c": (2, N), "d": (K, M)}
    return {n: c.randn(*batch, *shape, dtype=dtype) for n, shape in shapes.items()}


def cdist_grad(c: Context) -> dict:
    given = pairs(c) | {"p": c.random.choice([2.0, 1.5, 3])}
    if c.random.random() < 0.5:
        shape = (*given["a"].shape[:-2], 2, K, M)
        given["out"] = torch.zeros(shape, dtype=given["a"].dtype, device=c.device)
    if c.random.random() < 0.3:
        given["eps"] = 1e-8
    return given


def wanted_gradient(a, b, c, d, out=None, p=2.0, eps=1e-8, debug=False):
    plain.flag(debug)
    if isinstance(eps, torch.Tensor):
        raise TypeError("eps")
    eps = plain.number(eps, least=0)
    p = plain.number(p, least=0, most=1e308)
    each = p[..., None] if isinstance(p, torch.Tensor) and p.dim() else p

    def slope(v):
        small = torch.as_tensor(each) < 1
        size = torch.where(small & (v != 0), v.abs().clamp(min=eps), v.abs())
        return torch.where(v == 0, 0.0, v.sign() * size ** (each - 1))

    found = plain.pair_gradient(a, b, c, d, slope, (p,))
    return plain.written(found, d, out)


def _scale(p, lengthscale, scale):
    if (lengthscale is None) == (scale is None):
        raise ValueError("one of both")
    p = plain.number(p, least=0, most=1e308)
    if scale is not None:
        found = plain.number(scale)
        return p, found if isinstance(found, torch.Tensor) else max(found, -1e300)
    length = plain.number(lengthscale, above=0)
    try:
        found = -(length**-p)
    except OverflowError:
        found = -1e300
    return p, found.clamp(min=-1e300) if isinstance(found, torch.Tensor) else max(found, -1e300)


def cdist_expadd(c: Context) -> dict:
    given = points(c, "a", "b") | {"p": c.random.choice([2.0, 1.5])}
    given[c.random.choice(["lengthscale", "scale"])] = c.random.choice([1.5, 0.5])
    if c.random.random() < 0.4:
        given["out"] = torch.zeros(_shape(given, M, N), dtype=given["a"].dtype, device=c.device)
    return given


def wanted_expadd(a, b, out=None, p=2.0, lengthscale=None, scale=None, debug=False):
    plain.flag(debug)
    p, scale = _scale(p, lengthscale, scale)
    plain.same_kind(a, b)
    x, y = plain.wide(a), plain.wide(b)
    if x.shape[-1] != y.shape[-1] or x.dim() not in (2, 3) or y.dim() not in (2, 3):
        raise ValueError("shapes")
    d = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    p, scale = (x[..., None] if isinstance(x, torch.Tensor) and x.dim() else x for x in (p, scale))
    return plain.written(torch.exp(scale * d**p).sum(-1), a, out)


def cdist_grad_expadd(c: Context) -> dict:
    given = pairs(c) | {"p": 2.0, "q": c.random.choice([1.0, 2.0]), "c0": 0.5}
    given[c.random.choice(["lengthscale", "scale"])] = 1.5
    if given.get("scale"):
        given["scale"] = -0.5
    return given


def agop(c: Context) -> dict:
    values = {"descriptor": kl.gaussian()}
    values |= points(c, "x", "z")
    values["coefficients"] = c.randn(2, N, dtype=values["x"].dtype)
    values["bandwidth"] = 2.0
    if c.random.random() < 0.5:
        values |= {"diagonal": c.random.random() < 0.5, "centred": c.random.random() < 0.5}
    return values


def wanted_agop(descriptor, x, z, coefficients, diagonal=False, centred=False, out=None, **values):
    plain.flag(diagonal, centred)
    if out is not None:
        raise ValueError("cases give none")
    plain.same_kind(x, z, coefficients)
    q, zz, c = plain.wide(x), plain.wide(z), plain.wide(coefficients)
    if descriptor != kl.gaussian():
        raise TypeError("no known descriptor")
    width = plain.number(values.pop("bandwidth"), above=0)
    if values or c.dim() not in (1, 2, 3) or q.dim() not in (2, 3) or zz.dim() not in (2, 3):
        raise ValueError("arguments")
    batched = q.dim() == 3 or zz.dim() == 3 or c.dim() == 3
    batched = batched or (isinstance(width, torch.Tensor) and width.numel() != 1)
    c = c[None] if c.dim() == 1 else c
    if 0 in (q.shape[-2], c.shape[-2]):
        raise ValueError("no queries")
    d = q.unsqueeze(-2) - zz.unsqueeze(-3)
    if c.shape[-1] != zz.shape[-2]:
        raise ValueError("coefficients")
    k = torch.exp(-d.square().sum(-1) / (2 * width * width))
    w = (-k / (width * width)).unsqueeze(-1) * d  # (l, q, t, k)
    lead = torch.broadcast_shapes(w.shape[:-3], c.shape[:-2])
    g = torch.einsum("...ot,...qtk->...oqk", c.expand(*lead, *c.shape[-2:]),
                     w.expand(*lead, *w.shape[-3:]))  # fmt: skip
    if centred:
        g = g - g.mean(-2, keepdim=True)
    flat = g.flatten(-3, -2)
    found = flat.mT @ flat / flat.shape[-2]
    found = found.diagonal(0, -2, -1) if diagonal else found
    dims = 1 if diagonal else 2
    return found[None] if batched and found.dim() == dims else found


def reduction(c: Context) -> dict:
    values = _descriptor(c)
    given = {"descriptor": values.pop("descriptor"), **points(c, "a", "b")}
    given, values = _with_categories(c, given, values)
    return given | values


def kernel_matmul(c: Context) -> dict:
    given = reduction(c)
    rest = {k: given.pop(k) for k in [*given][3:]}
    shape = c.random.choice([(N,), (N, 2)])
    given["v"] = c.randn(*shape, dtype=given["a"].dtype)
    if c.random.random() < 0.4 and given["a"].dim() == given["b"].dim() == 2:
        given["out"] = torch.zeros((M, *shape[1:]), dtype=given["a"].dtype, device=c.device)
    return given | rest


def kernel_topk(c: Context) -> dict:
    given = reduction(c)
    rest = {k: given.pop(k) for k in [*given][3:]}
    return given | {"k": 2, "largest": c.random.random() < 0.5} | rest


def _whole(descriptor, a, b, values):
    symmetric = isinstance(descriptor, kl.Pairwise) and descriptor.symmetric
    return plain.matrix(descriptor, a, None if symmetric and b is a else b, **values)


def _as_formula(c: Context, *more: str) -> dict:
    """A call of a descriptor that goes as a formula, of points without a batch."""
    dtype = c.float_type()
    descriptor, width = c.random.choice(
        [(kl.gaussian(), 2.0), (kl.laplace_l1(), 3.0), (kl.l1_distance(), None)]
    )
    given = {"descriptor": descriptor, "a": c.randn(M, K, dtype=dtype)}
    given["b"] = c.randn(N, K, dtype=dtype)
    if "v" in more:
        given["v"] = c.randn(*c.random.choice([(N,), (N, 2)]), dtype=dtype)
    given |= {"threshold": 0.5} if "threshold" in more else {}
    return given | ({} if width is None else {"bandwidth": width})


def weighted(c: Context) -> dict:
    return _as_formula(c, "v")


def below(c: Context) -> dict:
    return _as_formula(c, "threshold")


def _splits(c: Context, count: int) -> torch.Tensor:
    """Splits of so many points, of three batches."""
    places = sorted(c.random.randrange(count + 1) for _ in range(2))
    return torch.tensor([0, *places, count], device=c.device)


def ranges(c: Context) -> dict:
    pairs = kl.Pairs.from_splits(_splits(c, M), _splits(c, N))
    return {"rows": pairs.rows, "cols": pairs.cols}


def from_splits(c: Context) -> dict:
    return {"row_splits": _splits(c, M), "col_splits": _splits(c, N)}


def from_batch(c: Context) -> dict:
    sizes = {"row_batch": M, "col_batch": N}
    return {name: (c.randn(n).abs() * 2).long().sort().values for name, n in sizes.items()}


def from_blocks(c: Context) -> dict:
    return {"mask": c.randn(3, 3) > 0, **from_splits(c)}


def wanted_softmax(descriptor, a, b, v, **values):
    weights = _whole(descriptor, a, b, values).softmax(-1)
    plain.same_kind(a, v)
    v = plain.wide(v)
    return (weights @ v[:, None])[..., 0] if v.dim() == 1 else weights @ v


def wanted_mean(descriptor, a, b, v=None, **values):
    matrix = _whole(descriptor, a, b, values)
    if v is None:
        return matrix.mean(-1)
    plain.same_kind(a, v)
    v = plain.wide(v)
    return ((matrix @ v[:, None])[..., 0] if v.dim() == 1 else matrix @ v) / matrix.shape[-1]


def wanted_below(descriptor, a, b, threshold, **values):
    plain.number(threshold)
    _whole(descriptor, a, b, values)
    return None  # a value beside the threshold may be either


def wanted_sum(descriptor, a, b=None, **values):
    return _whole(descriptor, a, b, values).sum(-1)


def wanted_logsumexp(descriptor, a, b=None, **values):
    return _whole(descriptor, a, b, values).logsumexp(-1)


def wanted_min(descriptor, a, b=None, **values):
    return _whole(descriptor, a, b, values).amin(-1)


def wanted_argmin(descriptor, a, b=None, **values):
    return _whole(descriptor, a, b, values).argmin(-1) if _tied else None


_tied = False  # equal entries, of half types above all: places differ where values do not


def wanted_topk(descriptor, a, b=None, k=1, largest=False, **values):
    plain.flag(largest)
    matrix = _whole(descriptor, a, b, values)
    found = matrix.topk(plain.integer(k, 1), -1, largest).values
    return None if matrix.isnan().any() else found


def wanted_matmul(descriptor, a, b, v, out=None, **values):
    matrix = _whole(descriptor, a, b, values)
    plain.same_kind(a, v)
    v = plain.wide(v)
    if v.dim() == 1:
        found = (matrix @ v[:, None])[..., 0]
    else:
        if v.dim() not in (2, 3):
            raise ValueError("v")
        found = matrix @ v
    return plain.written(found, a, out)


def entry(name, call, arguments, positional, wanted, weight=2, more=()) -> tuple[str, Entry]:
    return name, Entry(call, arguments, positional, OPTIONS, wanted, (*NAMES, *more), weight)


ENTRIES = dict(
    (
        entry("kernlib.run_kernel", kl.run_kernel, run_kernel, 3, wanted_matrix, 8),
        entry("kernlib.cdist", kl.cdist, cdist, 2, wanted_distance, 6),
        entry("kernlib.cdist_grad", kl.cdist_grad, cdist_grad, 4, wanted_gradient, 4),
        entry("kernlib.cdist_expadd", kl.cdist_expadd, cdist_expadd, 2, wanted_expadd, 3),
        entry("kernlib.cdist_grad_expadd", kl.cdist_grad_expadd, cdist_grad_expadd, 4, None, 3),
        # Of a tensor with a dispatcher of its own, which b of run_kernel is, z is called so.
        entry("kernlib.agop", kl.agop, agop, 4, wanted_agop, 3, ("b",)),
        entry("kernlib.kernel_matmul", kl.kernel_matmul, kernel_matmul, 4, wanted_matmul, 4),
        entry("kernlib.kernel_sum", kl.kernel_sum, reduction, 3, wanted_sum, 2),
        entry("kernlib.kernel_logsumexp", kl.kernel_logsumexp, reduction, 3, wanted_logsumexp, 2),
        entry("kernlib.kernel_min", kl.kernel_min, reduction, 3, wanted_min, 2),
        entry("kernlib.kernel_argmin", kl.kernel_argmin, reduction, 3, wanted_argmin, 1),
        entry("kernlib.kernel_topk", kl.kernel_topk, kernel_topk, 5, wanted_topk, 2),
        entry(
            "kernlib.kernel_softmax_matmul",
            kl.kernel_softmax_matmul,
            weighted,
            4,
            wanted_softmax,
            1,
        ),
        entry("kernlib.kernel_mean", kl.kernel_mean, weighted, 4, wanted_mean, 1),
        entry("kernlib.kernel_count", kl.kernel_count, below, 3, wanted_below, 1),
        entry("kernlib.Pairs", kl.Pairs, ranges, 2, None, 1),
        entry("kernlib.Pairs.from_splits", kl.Pairs.from_splits, from_splits, 2, None, 1),
        entry("kernlib.Pairs.from_batch", kl.Pairs.from_batch, from_batch, 2, None, 1),
        entry("kernlib.Pairs.from_blocks", kl.Pairs.from_blocks, from_blocks, 3, None, 1),
        entry("kernlib.kernel_neighbors", kl.kernel_neighbors, below, 3, wanted_below, 1),
    )
)

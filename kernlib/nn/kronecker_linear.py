"""A linear layer whose matrix is a Kronecker product of small ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib import run
from kernlib.descriptors.base import check_flag, shown
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.errors import deprecated
from kernlib.families.kronecker_product import reference
from kernlib.families.kronecker_product.descriptor import MOST, KroneckerProduct
from kernlib.hints.calls import hinted
from kernlib.nn import traced
from kernlib.nn.activations import as_activation
from kernlib.nn.computed_weight import ComputesWeight, KroneckerWeight, computed
from kernlib.nn.kronecker_sparse import DTYPES, checked_device, checked_dtype, weights_of
from kernlib.nn.linears import checked_linear, dense_linear
from kernlib.nn.traced import factors_of, parameters_of, represented
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense

# Alternating least squares end when a sweep adds less than this part to the norm of the product,
# or after so many sweeps. Random matrices have no structure to find and take most: about 50 for
# three factors of sizes 2 to 5, several hundred for three (8, 8).
GAIN = 1e-13
SWEEPS = 2000


@hinted
class KroneckerLinear(ComputesWeight, nn.Module):
    """``activation(x (F1 ⊗ ... ⊗ FN) + bias)``, in place of ``nn.Linear``.

    ``F_i`` is a trainable matrix (in_sizes[i], out_sizes[i]), so that N of them hold
    ``sum in_i out_i`` numbers instead of ``prod in_i out_i``. See
    :class:`kernlib.KroneckerProduct`, by which it is computed in one call with bias and activation.

    - ``in_sizes``, ``out_sizes``: as many ints of each as there are factors; their products are
      ``in_features`` and ``out_features``.
    - ``bias``: whether there is one, uniform in ``±1/sqrt(in_features)``.
    - ``device``, ``dtype``: as those of ``nn.Linear``; float16, bfloat16, float32 or float64.
    - ``activation``: ``"relu"``, ``"gelu"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``,
      ``"leaky_relu"``, or epilogues without arguments such as ``kernlib.Gelu("tanh")``.
    - ``precision``: of float32, as in :class:`kernlib.KroneckerProduct`.

    x is (..., in_features), the result (..., out_features), of any number of dimensions.
    ``factors`` holds one parameter a factor, ``bias`` is (out_features,). Outputs of a new layer
    have the variance that those of a new ``nn.Linear`` of these features have. Kronecker products
    as layers are those of Zhou, Wu, Wu and Zhou, "Exploiting Local Structures with the Kronecker
    Layer in Convolutional Networks" (2015).

    Raises ValueError for sizes below 1, none, or not as many on both sides, and for an unknown
    activation; TypeError for what is no list of ints, no dtype of these and no bool.

    Example:
        >>> layer = kl.nn.KroneckerLinear([4, 3], [2, 5])
        >>> layer(torch.randn(7, 12)).shape, layer.weight.shape, [f.shape for f in layer.factors]
        (torch.Size([7, 10]), torch.Size([10, 12]), [torch.Size([4, 2]), torch.Size([3, 5])])
        >>> layer.in_sizes, layer.in_features, layer.out_sizes, layer.out_features, layer.precision
        ((4, 3), 12, (2, 5), 10, None)
        >>> layer.reset_parameters()
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | Epilogue | None = None,
        precision: str | None = None,
    ):
        super().__init__()
        check_flag("bias", bias)
        self._shapes = _as_shapes(in_sizes, out_sizes)
        self._activation, self._precision = as_activation(activation), precision
        # Built here, as Dynamo cannot.
        self._plain, self._biased = self._describe(()), self._describe((Bias(),))
        self._names = tuple(str(index) for index in range(len(self._shapes)))
        empty = partial(torch.empty, dtype=checked_dtype(dtype), device=checked_device(device))
        self.factors = nn.ParameterList(nn.Parameter(empty(shape)) for shape in self._shapes)
        self.register_parameter("bias", nn.Parameter(empty(self.out_features)) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        *,
        activation: str | Epilogue | None = None,
        precision: str | None = None,
    ) -> KroneckerLinear:
        """The layer whose matrix is nearest to that of ``linear`` in the Frobenius norm, with its
        bias, dtype, device and mode. All factors have one norm.

        Of two factors it is the nearest one there is, by one singular value decomposition: Van Loan
        and Pitsianis, "Approximation with Kronecker Products" (1993). Of more that is repeated on
        what remains, then improved by alternating least squares until nothing changes; a nearer
        product may exist. Computed in float64: ``in_features * out_features`` numbers, of which the
        decomposition takes a matrix of ``in_1 out_1`` rows.

        - ``linear``: an ``nn.Linear`` of prod in_sizes features to prod out_sizes. Of a weight on
          "meta" it is a layer there, which a state fills.
        - ``in_sizes``, ``out_sizes``, ``activation``, ``precision``: as those of the layer.

        Raises TypeError for what is no ``nn.Linear`` of a known dtype, ValueError for one without
        values or with some that are not finite, and for sizes that are not those of its features.

        Example:
            >>> linear = kl.nn.KroneckerLinear([4, 3], [2, 5]).to_linear()
            >>> layer = kl.nn.KroneckerLinear.from_linear(linear, [4, 3], [2, 5], activation="relu")
            >>> torch.allclose(layer.to_dense(), linear.weight, atol=1e-6), layer.activation
            (True, (Relu(),))
        """
        linear = _checked(linear)
        weight = linear.weight
        layer = cls(
            in_sizes,
            out_sizes,
            linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            activation=activation,
            precision=precision,
        )
        if tuple(weight.shape) != (layer.out_features, layer.in_features):
            raise ValueError(
                f"the weight of linear has shape {tuple(weight.shape)}, sizes {layer.in_sizes} and "
                f"{layer.out_sizes} make one of {(layer.out_features, layer.in_features)}"
            )
        with torch.no_grad():
            if not weight.is_meta:
                nearest = nearest_kronecker(weight.T, layer.in_sizes, layer.out_sizes)
                for factor, value in zip(layer.factors, nearest, strict=True):
                    factor.copy_(value)
            if linear.bias is not None:
                layer.bias.copy_(linear.bias)
                layer.bias.requires_grad_(linear.bias.requires_grad)
        layer.factors.requires_grad_(weight.requires_grad)
        return layer.train(linear.training)

    @classmethod
    def from_dense(cls, *values: Any, **named: Any) -> KroneckerLinear:
        """:meth:`from_linear`, as it was called before: ``values`` and ``named`` are its arguments,
        and errors are its own. Warns with a DeprecationWarning.

        Example:
            >>> kl.nn.KroneckerLinear.from_dense(torch.nn.Linear(6, 4), [2, 3], [2, 2]).out_features
            4
        """
        deprecated("KroneckerLinear.from_dense() is from_linear()")
        return cls.from_linear(*values, **named)

    in_sizes = property(lambda self: tuple(s[0] for s in self._shapes), doc="Rows of each factor.")
    out_sizes = property(
        lambda self: tuple(s[1] for s in self._shapes), doc="Columns of each factor."
    )
    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")
    precision = property(lambda self: self._precision, doc="Of float32 in the kernel.")
    in_features = property(lambda self: self._plain.in_features, doc="Features of the input.")
    out_features = property(lambda self: self._plain.out_features, doc="Features of the output.")

    @property
    def weight(self) -> torch.Tensor:
        """:meth:`to_dense`, for code that asks an ``nn.Linear`` for its weight: no parameter, and
        RuntimeError for a write to it, which the layer would not see."""
        return computed(self.to_dense(), KroneckerWeight)

    def reset_parameters(self) -> None:
        """Draw factors and bias anew."""
        # nn.Linear draws its weight from ±1/sqrt(in_features) (kaiming_uniform_ with a = sqrt(5)),
        # of variance 1 / (3 in_features). An entry of the product is one of each of N independent
        # factors, of mean 0, so its variance is the product of theirs, and two entries of a column
        # are uncorrelated as some factor gives them different entries: outputs have the variance
        # of nn.Linear's if the factors' multiply to 1 / (3 in_features). With 3^(-1/N) / in_i they
        # do, and uniform numbers of ±b have the variance b^2 / 3.
        share = 3 ** (1 - 1 / len(self._shapes))
        for factor, (size, _) in zip(self.factors, self._shapes, strict=True):
            bound = math.sqrt(share / size)
            nn.init.uniform_(factor, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        if type(input) is not torch.Tensor and (result := traced.called(self, input)) is not None:
            return result
        check_dense(("input",), input=input)
        # Dynamo cannot ask a tensor for that, and hands no such tensor to a program that records.
        if not is_dynamo_compiling() and torch.is_grad_enabled() and input.is_inference():
            input = input.clone()  # it may be kept for a gradient
        if is_dynamo_compiling():
            return self._traced(input)
        bias = self.bias
        if bias is None:
            return run_kernel(self._plain, input, *weights_of(self, self._names))
        return run_kernel(self._biased, input, *weights_of(self, self._names), bias=bias)

    def _traced(self, input: torch.Tensor) -> torch.Tensor:
        """The layer in a program that holds for other sizes too."""
        factors, (bias,) = factors_of(self, self._names), parameters_of(self, ("bias",))
        operators = run.kronecker_product_operators
        if bias is None:
            return operators.run_fitted(self._plain, input, *factors)
        return operators.run_fitted(self._biased, input, *factors, bias=bias)

    def to_dense(self) -> torch.Tensor:
        """W (out_features, in_features) of the factors as they are, differentiable; activation and
        bias are not in it."""
        return reduce(reference.kron, [factor.mT for factor in weights_of(self, self._names)])

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` of the same matrix and bias, which are copied; the activation is not in
        it."""
        return dense_linear(self, self.to_dense())

    __repr__ = represented

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"in_sizes={self.in_sizes}", f"out_sizes={self.out_sizes}"]
        parts += [f"bias={self.bias is not None}"]
        parts += [f"activation={epilogue}" for epilogue in self.activation]
        parts += [] if self.precision is None else [f"precision={self.precision!r}"]
        return ", ".join(parts)

    def _describe(self, bias: tuple[Epilogue, ...]) -> KroneckerProduct:
        epilogue = (*bias, *self._activation)
        return KroneckerProduct(self._shapes, epilogue=epilogue, precision=self._precision)


def nearest_kronecker(
    matrix: torch.Tensor, row_sizes: Sequence[int], column_sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Float64 factors (row_sizes[i], column_sizes[i]) whose Kronecker product is nearest to
    ``matrix`` (prod rows, prod columns), all of one norm; see :meth:`KroneckerLinear.from_linear`.

    Entry ((i1, ..., iN), (j1, ..., jN)) of the product is ``prod_k F_k[ik, jk]``: with one
    dimension for each pair (ik, jk) the matrix is a tensor, and the product one of rank 1.
    """
    count = len(row_sizes)
    order = [place for pair in range(count) for place in (pair, count + pair)]
    pairs = [rows * columns for rows, columns in zip(row_sizes, column_sizes, strict=True)]
    tensor = matrix.double().reshape(*row_sizes, *column_sizes).permute(order).reshape(pairs)
    vectors, norm = _nearest_rank_1(tensor)
    # For a matrix of zeros, or nearly so, only the first factor is 0: the others pass gradients.
    scales = [norm ** (1 / count)] * count if norm else [0.0] + [1.0] * (count - 1)
    shapes = zip(row_sizes, column_sizes, strict=True)
    return [
        (scale * vector).reshape(shape)
        for scale, vector, shape in zip(scales, vectors, shapes, strict=True)
    ]


def _nearest_rank_1(tensor: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """Unit vectors, one a dimension, and the norm of their outer product."""
    vectors, rest = [], tensor
    while len(vectors) < tensor.dim() - 1:
        left, values, right = torch.linalg.svd(rest.flatten(1), full_matrices=False)
        vectors.append(left[:, 0])
        rest = (values[0] * right[0]).reshape(rest.shape[1:])
    norm = float(rest.norm())
    if norm == 0:
        return [*vectors, _unit(tensor, tensor.dim() - 1)], norm
    vectors.append(rest / norm)
    for _ in range(SWEEPS if tensor.dim() > 2 else 0):
        before = norm
        for place in range(tensor.dim()):
            best = _contracted(tensor, vectors, place)
            norm = float(best.norm())
            vectors[place] = best / norm
        if norm <= before * (1 + GAIN):
            break
    return vectors, norm


def _contracted(tensor: torch.Tensor, vectors: list[torch.Tensor], place: int) -> torch.Tensor:
    """Sums over every dimension but one, with the weights of that dimension's vector: the best
    vector of the kept one, the others as they are."""
    for vector in reversed(vectors[place + 1 :]):
        tensor = tensor @ vector
    for vector in vectors[:place]:
        tensor = torch.tensordot(vector, tensor, 1)
    return tensor


def _unit(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    unit = tensor.new_zeros(tensor.shape[dimension])
    unit[0] = 1
    return unit


def _as_shapes(in_sizes, out_sizes) -> tuple[tuple[int, int], ...]:
    """(in, out) of each factor. Raises ValueError and TypeError."""
    pair = [_as_sizes("in_sizes", in_sizes), _as_sizes("out_sizes", out_sizes)]
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"in_sizes and out_sizes must have one size a factor each, got {len(pair[0])} and "
            f"{len(pair[1])}"
        )
    return tuple(zip(*pair, strict=True))


def _as_sizes(name: str, sizes) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"{name} must be a list of ints, one a factor, got {shown(sizes)}")
    if not len(sizes):
        raise ValueError(f"{name} must hold at least one size, got none")
    try:
        result = tuple(operator.index(size) for size in sizes)
    except (TypeError, RuntimeError):  # the latter of tensors of a rare kind
        result = None
    if result is None or any(isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name} must be a list of ints, one a factor, got {shown(sizes)}")
    if min(result) < 1:
        raise ValueError(f"{name} must hold sizes of 1 or more, got {shown(sizes)}")
    if math.prod(result) >= MOST:
        raise ValueError(f"{name} must multiply to below 2**60, got {shown(sizes)}")
    return result


def _checked(linear) -> nn.Linear:
    """The nn.Linear with a weight of finite values, or on meta. Raises ValueError and TypeError."""
    linear = checked_linear(linear, DTYPES)
    if not linear.weight.is_meta and not bool(linear.weight.isfinite().all()):
        raise ValueError("the weight of linear must be finite, got NaN or infinity in it")
    return linear

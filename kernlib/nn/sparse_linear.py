"""A linear layer whose constant weight is compressed."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import check_flag, shown, whole
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.errors import warn
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.formats.registry import with_values
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.hints.calls import former, hinted
from kernlib.nn import traced
from kernlib.nn.activations import as_activation
from kernlib.nn.computed_weight import CompressedWeight, ComputesWeight, computed
from kernlib.nn.kronecker_sparse_algorithms import autocasts
from kernlib.nn.linears import class_name, dense_linear
from kernlib.nn.sparse_holding import MatrixModule
from kernlib.nn.sparse_weights import (
    check_bias,
    check_linear,
    checked_dtype,
    is_silently_dense,
    matrix_of,
)
from kernlib.nn.traced import parameters_of, represented
from kernlib.run import run_kernel
from kernlib.runtime.tensors import as_device

_HALVES = (torch.float16, torch.bfloat16)
MOST_FEATURES = 2**61 - 1  # of which torch can count the bytes


@hinted
class SparseLinear(ComputesWeight, MatrixModule):
    """``activation(x W^T + bias)`` with a compressed, constant ``W`` (out_features, in_features),
    in place of ``nn.Linear``.

    Made by :meth:`from_linear` or :meth:`from_matrix`. ``SparseLinear(...)`` itself makes an empty
    layer, on any device or "meta", which cannot compute until ``load_state_dict`` has filled it.

    - ``in_features``, ``out_features``, ``bias``, ``dtype``, ``device``: as those of ``nn.Linear``;
      float16, bfloat16 or float32.
    - ``activation``: ``"relu"``, ``"gelu"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``,
      ``"leaky_relu"``, or epilogues without arguments such as ``kernlib.Gelu("tanh")``, in the same
      kernel.

    x is (..., in_features). Gradients reach x and the bias, a parameter; the weight has none. Its
    tensors are neither parameters nor buffers, so that nothing averages or broadcasts them:
    ``.to(device)`` moves them, ``.half()``, ``.bfloat16()`` and ``.float()`` round the values and
    compress them anew. ``state_dict`` holds tensors alone, a versioned header among them, and loads
    into a layer of another format and number of entries. The compressed layer of a language model
    is MACKO-SpMV's use of such matrices.

    Raises TypeError for another dtype, a ``bias`` that is no bool and what is no activation,
    ValueError for other sizes, what is no device and an activation that takes arguments.

    Example:
        >>> layer = kl.nn.SparseLinear.from_linear(torch.nn.Linear(64, 32), density=0.5)
        >>> layer(torch.randn(7, 64)).shape, layer.weight.shape, layer.matrix.nnz
        (torch.Size([7, 32]), torch.Size([32, 64]), 1024)
        >>> layer.in_features, layer.out_features, layer.activation
        (64, 32, ())
        >>> layer.freeze().nbytes < 32 * 64 * 4, layer.thaw() is layer
        (True, True)
    """

    # In the place of the weight while a model is filled, whose code looks at weights before it.
    _stand_in: torch.Tensor | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | Epilogue | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ):
        dtype = checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
        sizes = {"out_features": out_features, "in_features": in_features}
        shape = tuple(_checked_size(name, size) for name, size in sizes.items())
        check_flag("bias", bias)
        device = torch.empty(0, dtype=dtype, device=_checked_device(device)).device
        steps = as_activation(activation)
        super().__init__(shape, dtype, device)
        self._activation = steps
        # Built here, as Dynamo cannot.
        self._plain = SparseMatmul(epilogue=self._activation)
        self._biased = SparseMatmul(epilogue=(Bias(), *self._activation))
        zeros = torch.zeros(shape[0], dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

    @classmethod
    @former("format", "density", "per", "activation", "columns")
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: str = "auto",
        density: float | None = None,
        per: str = "matrix",
        activation: str | Epilogue | None = None,
        columns: int = 1,
        values: str | None = None,
    ) -> SparseLinear:
        """The layer with the weight of ``linear``, compressed where it lies; the bias is the same
        parameter.

        - ``linear``: an ``nn.Linear``, which keeps its weight.
        - ``format``, ``columns``, ``values``: as of :func:`kernlib.sparse.compress`.
          ``activation``: as of the class.
        - ``density``: None compresses the weight as it is; a number keeps that part of the entries,
          those of largest magnitude, counted ``per`` "matrix" or "row": see
          :func:`kernlib.sparse.magnitude`.

        Warns with a :class:`kernlib.KernlibWarning` of a weight that is kept dense because nobody
        has pruned it: constant all the same, and no smaller.

        Of a weight on "meta" it is an empty layer of its sizes and dtype, whatever ``format`` and
        ``density`` say: those of the state that it is filled with count.

        Raises TypeError for what is no ``nn.Linear`` and for float64, ValueError for one without
        values, and as ``compress`` and ``magnitude`` do.

        Example:
            >>> linear = torch.nn.Linear(4, 1, bias=False)
            >>> linear.weight.data = torch.tensor([[1.0, -4.0, 3.0, 2.0]])
            >>> kl.nn.SparseLinear.from_linear(linear, density=0.5).to_dense()
            tensor([[ 0., -4.,  3.,  0.]])
        """
        format = with_values(format, values)
        linear = check_linear(linear, density)
        matrix = matrix_of(linear, format, density, per, columns)
        if is_silently_dense(matrix, density, format):
            warn(
                "SparseLinear.from_linear leaves the weight dense, which has too few zeros to "
                "compress, and makes it a constant without a gradient. density=0.5 prunes it; "
                "format='dense' says that this is meant"
            )
        return cls._of(linear, matrix, activation)

    @classmethod
    def _of(cls, linear: nn.Linear, matrix: SparseMatrix | None, activation=None) -> SparseLinear:
        """The layer of a matrix with bias and mode of a linear one, empty if there is no matrix."""
        if matrix is not None:
            return cls.from_matrix(matrix, linear.bias, activation).train(linear.training)
        weight = linear.weight
        rows, cols = weight.shape
        layer = cls(cols, rows, False, activation, weight.dtype, weight.device)
        layer.bias = linear.bias
        return layer.train(linear.training)

    @classmethod
    def from_matrix(
        cls,
        matrix: SparseMatrix,
        bias: torch.Tensor | None = None,
        activation: str | Epilogue | None = None,
    ) -> SparseLinear:
        """The layer of a compressed ``matrix`` (out_features, in_features), whose tensors it
        shares, and of a ``bias`` (out_features,), which is kept as it is if it is a parameter.
        ``activation`` is as that of the class.

        Raises TypeError for what is no SparseMatrix, ValueError and TypeError for a bias that is no
        tensor (out_features,) of the matrix's dtype and device.

        Example:
            >>> matrix = kl.sparse.compress(torch.eye(4))
            >>> layer = kl.nn.SparseLinear.from_matrix(matrix, activation="relu")
            >>> layer.to_linear()(torch.ones(4)), layer(torch.tensor([1.0, -1.0, 2.0, -2.0]))
            (tensor([1., 1., 1., 1.], ...), tensor([1., 0., 2., 0.]))
        """
        if not isinstance(matrix, SparseMatrix):
            raise TypeError(f"matrix must be a SparseMatrix, got {class_name(matrix)}")
        check_bias(bias, matrix)
        rows, cols = matrix.shape
        layer = cls(cols, rows, False, activation, matrix.dtype, matrix.device)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = bias.detach()
            bias = nn.Parameter(bias.clone() if bias.is_inference() else bias)
        layer.bias = bias
        layer._hold(matrix)
        return layer

    in_features = property(lambda self: self._sizes[1], doc="Features of the input.")
    out_features = property(lambda self: self._sizes[0], doc="Features of the output.")
    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")

    @property
    def matrix(self) -> SparseMatrix:
        """The weight. Raises RuntimeError for a layer that is still empty, and for one whose
        tensors or buffers were overwritten with something else."""
        return self._weight()

    @property
    def weight(self) -> torch.Tensor:
        """:meth:`to_dense`, for code that asks an ``nn.Linear`` for its weight: no parameter, and
        RuntimeError for a write to it, which the layer would not see."""
        if self._stand_in is not None:
            return self._stand_in
        return computed(self.to_dense(), CompressedWeight)

    def to_dense(self) -> torch.Tensor:
        """W (out_features, in_features), a new tensor; activation and bias are not in it."""
        return self.matrix.to_dense()

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` of the same matrix and bias, which are copied; the activation is not in
        it."""
        return dense_linear(self, self.to_dense())

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed weight; 0 of an empty layer."""
        return 0 if self._matrix is None else self._matrix.nbytes

    def freeze(self) -> SparseLinear:
        """Promise that nobody writes the weight, as :meth:`SparseMatrix.freeze` of :attr:`matrix`
        does, and return the layer. Training or not, no layer does so by itself: torch does not
        count every write. Moving, casting and loading make another matrix, which is not frozen."""
        self.matrix.freeze()
        return self

    def thaw(self) -> SparseLinear:
        """Take :meth:`freeze` back and return the layer."""
        self.matrix.thaw()
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features). A half-precision input of a float32 layer, as
        mixed precision of FSDP2 casts it, is computed in float32, and the result cast back."""
        if type(input) is not torch.Tensor and (result := traced.called(self, input)) is not None:
            return result
        if is_dynamo_compiling():
            (bias,) = parameters_of(self, ("bias",))
        else:
            try:
                bias = self._parameters["bias"]
            except KeyError:  # parametrized
                bias = self.bias
        return self._product(self._weight(), input, bias)

    def _product(
        self, matrix: SparseMatrix, input: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        is_narrow = matrix._dtype is torch.float32 and getattr(input, "dtype", None) in _HALVES
        if is_narrow and not autocasts(input.device):
            return self._widened(matrix, input, bias)
        if bias is None:
            return run_kernel(self._plain, matrix, input)
        return run_kernel(self._biased, matrix, input, bias=bias)

    def _widened(self, matrix: SparseMatrix, input: torch.Tensor, bias) -> torch.Tensor:
        if bias is None:
            return run_kernel(self._plain, matrix, input.float()).to(input.dtype)
        y = run_kernel(self._biased, matrix, input.float(), bias=bias.float())
        return y.to(input.dtype)

    __repr__ = represented

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.bias is not None}"]
        if self._matrix is None:
            parts += [f"dtype={self._dtype}", "empty"]
        else:
            matrix = self._matrix
            parts += [f"format={matrix.format!r}", f"dtype={matrix.dtype}"]
            parts += [f"density={matrix.density:.3g}"] if matrix.device.type != "meta" else []
            parts += [f"bytes={matrix.nbytes}"]
        return ", ".join([*parts, *(f"activation={epilogue}" for epilogue in self.activation)])


def _checked_size(name: str, size) -> int:
    number = whole(size)
    if number is None or not 0 <= number <= MOST_FEATURES:
        raise ValueError(f"{name} must be an int of at least 0 and below 2^61, got {shown(size)}")
    return number


def _checked_device(device) -> torch.device | None:
    if device is None:
        return None
    device = as_device(device)
    try:
        return torch.empty(0, dtype=torch.uint8, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"device must be one that is there, got {device}: {error}") from None

"""A linear layer whose matrix is a product of Kronecker-sparse factors."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib import run
from kernlib.descriptors.base import check_flag, shown
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.errors import CompileError, UnsupportedError
from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.descriptor import MOST, KroneckerSparse, KroneckerSparseChain
from kernlib.hints.calls import hinted
from kernlib.nn import traced
from kernlib.nn.activations import activate, as_activation, as_steps
from kernlib.nn.computed_weight import ChainWeight, ComputesWeight, computed
from kernlib.nn.derived import Kept, derived
from kernlib.nn.kronecker_sparse_algorithms import (
    ALGORITHMS,
    STORAGE,
    Pattern,
    autocasts,
    nearest_factor,
)
from kernlib.nn.linears import checked_linear, dense_linear
from kernlib.nn.traced import factors_of, parameters_of, represented
from kernlib.run import run_kernel
from kernlib.runtime.tensors import as_device, check_dense, refuse_other

if TYPE_CHECKING:
    from kernlib.nn.chains import Estimate

ALGOS = ("auto", "kernel", *ALGORITHMS)
INITS = ("linear", "ksmm")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REFUSALS = 1024  # that "auto" remembers; past that it asks for the kernel again


@hinted
class KSLinear(ComputesWeight, nn.Module):
    """``activation(x K^T + bias)`` with ``K = K_last @ ... @ K_0``, in place of ``nn.Linear``.

    Factor ``K_t`` has the pattern (a, b, c, d) and the support ``I_a ⊗ 1_{b×c} ⊗ I_d``, a part
    ``1/(a d)`` of its ``a*b*d`` rows by ``a*c*d`` columns: see :class:`kernlib.KroneckerSparse`.

    - ``patterns``: tuples (a, b, c, d), the factor that meets the input first.
    - ``weights``: one tensor (a, b, c, d) a factor, copied; without them uniform, see ``init``.
    - ``bias``: whether there is one, uniform in ``±1/sqrt(in_features)``.
    - ``algo``: how it is computed, also later, by ``layer.algo = ...``: ``"kernel"`` (one pass with
      bias and activation, on CPU tensors in PyTorch), ``"einsum"``, ``"bmm"``, ``"dense"``,
      ``"sparse"`` (CSR) or ``"bsr"``, all with the same parameters, values and gradients.
      ``"auto"`` is the kernel on CUDA, and the einsum elsewhere and, with a warning, for inputs of
      a shape for which the GPU has no kernel or none can be built.
    - ``dtype``, ``device``: as those of ``nn.Linear``; without them those of ``weights``. float16,
      bfloat16, float32 or float64.
    - ``bs_last=False``: input (..., in_features), output (..., out_features), any number of
      dimensions; ``bs_last=True``: (in_features, ...) and (out_features, ...).
    - ``activation``: ``"relu"``, ``"gelu"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``,
      ``"leaky_relu"``, or epilogues without arguments such as ``kernlib.Gelu("tanh")``.
    - ``precision``: of float32 in the kernel, as in :class:`kernlib.KroneckerSparse`. At
      ``"fp32"`` infinities, and numbers of 3.402e38 or more, give NaN there, not in the einsum.
    - ``init``: how :meth:`reset_parameters` draws the factors. ``"linear"``: of N factors each
      uniform in ``±sqrt(3^(1 - 1/N) / c)``, so that outputs have the variance of a new
      ``nn.Linear``'s. ``"ksmm"``: in ``±1/sqrt(c)``, as the KSMM project does, by which each factor
      divides the variance by 3.

    ``factors`` holds one parameter (a, b, c, d) a factor, ``bias`` is (out_features,): one
    ``state_dict`` for every algorithm and layout. What dense, sparse and bsr derive of factors that
    require no gradient is kept on a CPU, where each call compares the factors with a copy;
    elsewhere :meth:`freeze` asks for it, and for what bmm derives. Layer, names and argument order
    are those of the KSMM project, up to ``bs_last``. Of what KSMM has behind it ``vsize`` is gone,
    and ``more`` is a device alone: give all that follows by name.

    Raises ValueError for factors that do not fit together, weights of another shape and an unknown
    ``algo``, ``init`` or activation, TypeError for what is no pattern, weight, dtype or bool.

    Example:
        >>> layer = kl.nn.KSLinear([(2, 4, 3, 2), (1, 5, 8, 2)]).freeze()
        >>> layer(torch.randn(7, 12)).shape, layer.weight.shape, layer.num_mat
        (torch.Size([7, 10]), torch.Size([10, 12]), 2)
        >>> layer.in_size, layer.out_size, layer.algo, layer.init, layer.bs_last, layer.precision
        (12, 10, 'auto', 'linear', False, None)
        >>> layer.thaw().reset_parameters()  # which writes the factors
    """

    bias: torch.Tensor | None
    _init, _frozen = "linear", False  # of pickles that have neither

    def __init__(
        self,
        patterns: Sequence[Pattern],
        weights: Sequence[torch.Tensor] | None = None,
        bias: bool = True,
        algo: str = "auto",
        dtype: torch.dtype | None = None,
        bs_last: bool = False,
        *more: torch.device | str,
        device: torch.device | str | int | None = None,
        activation: str | Epilogue | None = None,
        precision: str | None = None,
        init: str = "linear",
    ):
        super().__init__()
        check_flag("bias", bias)
        check_flag("bs_last", bs_last)
        if not isinstance(init, str) or init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {shown(init)}")
        self._init = init
        device = checked_device(_by_position(more, device))
        self._patterns = _as_patterns(patterns)
        self._bs_last, self._precision = bs_last, precision
        self._activation = as_activation(activation)
        self._steps = as_steps(self._activation)
        self._descriptors = {has_bias: self._describe(has_bias) for has_bias in (False, True)}
        self._names = tuple(str(index) for index in range(self.num_mat))
        self.algo = algo

        weights = None if weights is None else _checked_weights(weights, self.patterns)
        if weights is not None:
            dtype = _shared(weights, "dtype") if dtype is None else dtype
            device = _shared(weights, "device") if device is None else device
        dtype = checked_dtype(dtype)
        empty = partial(torch.empty, dtype=dtype, device=device)
        self.factors = nn.ParameterList(nn.Parameter(empty(shape)) for shape in self.patterns)
        self.register_parameter("bias", nn.Parameter(empty(self.out_size)) if bias else None)
        self.reset_parameters()
        if weights is not None:
            with torch.no_grad():
                for factor, weight in zip(self.factors, weights, strict=True):
                    if weight.is_meta and not factor.is_meta:
                        raise ValueError(f"weights must have values on {factor.device}, got meta")
                    factor.copy_(weight)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        patterns: Sequence[Pattern],
        *,
        approximate: bool = True,
        algo: str = "auto",
        activation: str | Epilogue | None = None,
        precision: str | None = None,
        init: str = "linear",
    ) -> KSLinear:
        """The layer of one factor whose matrix is, of those with its support, the nearest to that
        of ``linear`` in the Frobenius norm: the weight itself for (1, out, in, 1). The bias, dtype,
        device, mode and what requires a gradient are those of ``linear``, and ``patterns``,
        ``algo``, ``activation``, ``precision`` and ``init`` those of the layer.
        ``approximate=False`` draws the factors, of which there may then be several. Of a weight on
        "meta" it is a layer there, which a state fills.

        Raises TypeError for what is no ``nn.Linear`` of a known dtype, ValueError for one without
        values, for patterns of other sizes, and for several with ``approximate``.

        Example:
            >>> lin = torch.nn.Linear(12, 8)
            >>> layer = kl.nn.KSLinear.from_linear(lin, [(1, 8, 12, 1)], activation="relu")
            >>> layer.patterns, layer.activation, torch.equal(layer.to_linear().weight, lin.weight)
            (((1, 8, 12, 1),), (Relu(),), True)
        """
        check_flag("approximate", approximate)
        linear = checked_linear(linear, DTYPES)
        weight, bias = linear.weight, linear.bias
        layer = cls(
            patterns, None, bias is not None, algo, weight.dtype, device=weight.device,
            activation=activation, precision=precision, init=init,
        )  # fmt: skip
        if (layer.in_size, layer.out_size) != (linear.in_features, linear.out_features):
            raise ValueError(
                f"linear takes {linear.in_features} features to {linear.out_features}, its "
                f"patterns {list(layer.patterns)} take {layer.in_size} to {layer.out_size}"
            )
        if approximate and layer.num_mat != 1:
            raise ValueError(
                "approximate=True takes one factor from a weight, and patterns has "
                f"{layer.num_mat}: use approximate=False or a chain of one"
            )
        with torch.no_grad():
            if approximate:
                layer.factors[0].copy_(nearest_factor(weight, layer.patterns[0]))
            if bias is not None:
                layer.bias.copy_(bias)
                layer.bias.requires_grad_(bias.requires_grad)
        layer.factors.requires_grad_(weight.requires_grad)
        return layer.train(linear.training)

    patterns = property(lambda self: self._patterns, doc="Patterns, the first factor first.")
    bs_last = property(lambda self: self._bs_last, doc="Whether the batch comes last.")
    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")
    precision = property(lambda self: self._precision, doc="Of float32 in the kernel.")
    init = property(lambda self: self._init, doc="How the factors are drawn.")

    @property
    def in_size(self) -> int:
        """Features of the input."""
        return self._descriptors[False].in_features

    @property
    def out_size(self) -> int:
        """Features of the output."""
        return self._descriptors[False].out_features

    in_features, out_features = in_size, out_size

    @property
    def num_mat(self) -> int:
        """How many factors there are."""
        return len(self._patterns)

    @property
    def algo(self) -> str:
        """How the layer is computed, as it was asked for."""
        return self._algo

    @algo.setter
    def algo(self, algo: str) -> None:
        if not isinstance(algo, str) or algo not in ALGOS:
            raise ValueError(f"algo must be one of {', '.join(ALGOS)}, got {shown(algo)}")
        self._algo = algo
        self._forget()

    @property
    def weight(self) -> torch.Tensor:
        """:meth:`to_dense`, for code that asks an ``nn.Linear`` for its weight: no parameter, and
        RuntimeError for a write to it, which the layer would not see."""
        return computed(self.to_dense(), ChainWeight)

    def freeze(self) -> KSLinear:
        """Promise that nobody writes the factors, and return the layer. What dense, sparse, bsr and
        bmm derive of factors that require and hold no gradient is then kept between calls, on a GPU
        too. Writes that torch counts, ``load_state_dict``, moves, and training by calls of this
        layer are seen all the same. Others make results wrong, such as those by
        ``factor.data.mul_()``, NumPy, DLPack, a storage, a collective, a fused optimizer of
        compiled code or the replay of a graph: call ``freeze()`` again after them. Copies and
        pickles are not frozen."""
        self._frozen = True
        self._kept = {}
        return self

    def thaw(self) -> KSLinear:
        """Take :meth:`freeze` back and return the layer."""
        self._frozen = False
        self._kept = {}
        return self

    def train(self, mode: bool = True) -> KSLinear:
        """As of every module. What is kept of factors is let go, as training may write them."""
        self._kept = {}
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> KSLinear:
        """As of every module. What is kept of the factors is let go, as by :meth:`train`."""
        self._kept = {}
        return super().requires_grad_(requires_grad)

    def estimate(self, rows: int) -> Estimate:
        """Microseconds that an H200 takes for the layer and for the dense one of its sizes, for
        ``rows`` rows of input: of the forward pass by the kernel in the dtype of the factors,
        without what the host takes. How near it is to measurements is in :mod:`kernlib.nn.chains`.
        Raises ValueError for rows below 1 and TypeError for float64, of which nothing was measured.

        Example:
            >>> kl.nn.KSLinear([(8, 96, 96, 1)]).estimate(25088).speedup > 1
            True
        """
        from kernlib.nn.chains import as_count, estimate_of, kind_of

        rows = as_count("rows", rows)
        kind = kind_of(weights_of(self, self._names)[0].dtype, self.precision)
        sizes = self.in_size, self.out_size
        return estimate_of(self.patterns, sizes, rows, kind, self.bs_last)

    def reset_parameters(self) -> None:
        """Draw factors and bias anew, as ``init`` says."""
        # An output of a factor is a sum of c inputs, each times a number of its own of ±b, whose
        # variance is b^2 / 3: c b^2 / 3 times the mean square of its inputs. nn.Linear's is 1/3 of
        # that (±1/sqrt(in_features)), and with N factors of c b^2 / 3 = 3^(-1/N) so is the chain's.
        share = 3 ** (1 - 1 / self.num_mat) if self._init == "linear" else 1.0
        for factor, (_, _, c, _) in zip(self.factors, self.patterns, strict=True):
            bound = math.sqrt(share / c)
            nn.init.uniform_(factor, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_size)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), or with the batch last."""
        if type(input) is not torch.Tensor and (result := traced.called(self, input)) is not None:
            return result
        return self._computed(self._layer, input)

    def forward_bs_first(self, output: torch.Tensor) -> torch.Tensor:
        """The product (..., in_features) to (..., out_features) without bias and activation."""
        return self._computed(partial(self._product, batch_last=False), output)

    def forward_bs_last(self, output: torch.Tensor) -> torch.Tensor:
        """The product (in_features, ...) to (out_features, ...) without bias and activation."""
        return self._computed(partial(self._product, batch_last=True), output)

    def pre_process(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input as a matrix: (batch, in_features) or (in_features, batch)."""
        self._check_input(tensor, self.bs_last, weights_of(self, self._names)[0])
        first = tensor.shape[0]
        return tensor.reshape(first, -1) if self.bs_last else tensor.reshape(-1, tensor.shape[-1])

    def post_process(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Bias, activation and the batch of the input ``tensor`` for a product ``output``.

        Example:
            >>> layer, x = kl.nn.KSLinear([(2, 4, 3, 2)]), torch.randn(5, 12)
            >>> y = layer.post_process(x, layer.forward_bs_first(layer.pre_process(x)))
            >>> k, z = layer.get_dense_product(), layer.forward_bs_last(x.T)
            >>> torch.equal(y, layer(x)), torch.allclose(k @ x.T, z, atol=1e-6)
            (True, True)
        """
        self._check_input(tensor, self.bs_last, weights_of(self, self._names)[0])
        size = self.out_size * (tensor.numel() // self.in_size)
        check_dense(("output",), output=output)
        if output.numel() != size:
            got = tuple(output.shape)
            raise ValueError(f"output must be the product of the input, {size} values, got {got}")
        if output.dim() == 0 or output.shape[0 if self.bs_last else -1] != self.out_size:
            shape = f"({self.out_size}, ...)" if self.bs_last else f"(..., {self.out_size})"
            raise ValueError(f"output must have shape {shape}, got {tuple(output.shape)}")
        if output.device != tensor.device or output.dtype not in DTYPES:
            kind = f"{output.dtype} on {output.device}"
            raise ValueError(f"output must be of floats on {tensor.device}, got {kind}")
        output = self._finish(output, self.bs_last)
        if self.bs_last:
            return output.reshape(self.out_size, *tensor.shape[1:])
        return output.reshape(*tensor.shape[:-1], self.out_size)

    def get_dense_product(self) -> torch.Tensor:
        """The matrix (out_features, in_features) of the factors as they are, differentiable."""
        product = None
        for pattern, weight in zip(self.patterns, weights_of(self, self._names), strict=True):
            if product is None:
                product = reference.dense(pattern, weight)
            else:
                product = reference.multiply(pattern, product, weight, batch_last=True)
        return product

    to_dense = get_dense_product

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` with copies of matrix and bias, without activation, its batch first."""
        return dense_linear(self, self.to_dense())

    __repr__ = represented

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_size}", f"out_features={self.out_size}"]
        parts += [f"patterns={list(self.patterns)}", f"algo={self.algo!r}"]
        parts += [f"bias={self.bias is not None}"]
        parts += ["bs_last=True"] if self.bs_last else []
        parts += [f"init={self._init!r}"] if self._init != "linear" else []
        parts += [f"activation={epilogue}" for epilogue in self.activation]
        return ", ".join(parts)

    # The algorithms.

    def _computed(self, compute: Callable, x: torch.Tensor) -> torch.Tensor:
        """``compute(x, algo)`` with the algorithm that was asked for, or that "auto" stands for."""
        algo, is_tensor = self._algo, isinstance(x, torch.Tensor)
        # Dynamo cannot ask a tensor for that, and hands no such tensor to a program that records.
        may_keep = is_tensor and torch.is_grad_enabled() and not is_dynamo_compiling()
        if may_keep and not nn.parameter.is_lazy(x) and x.is_inference():
            x = x.clone()  # for a gradient
        if algo != "auto":
            return compute(x, algo)
        if not is_tensor or x.device.type != "cuda":
            return compute(x, "einsum")
        if torch.compiler.is_compiling():
            return compute(x, "kernel")
        without = self._without_kernel
        if not without or not is_among(without, x):
            try:
                return compute(x, "kernel")
            except (UnsupportedError, CompileError) as error:
                if len(without) >= REFUSALS:
                    without.clear()
                without.add((x.device, x.dtype, x.shape))
                warnings.warn(f"KSLinear takes the einsum on {x.device}: {error}", stacklevel=4)
        return compute(x, "einsum")

    def _layer(self, x: torch.Tensor, algo: str) -> torch.Tensor:
        if algo != "kernel":
            return self._finish(self._product(x, algo, self.bs_last), self.bs_last)
        if is_dynamo_compiling():
            return self._traced_layer(x)
        try:
            bias = self._parameters["bias"]  # in 0.1 us, by its name in 0.6
        except KeyError:  # parametrized
            bias = self.bias
        if bias is None:
            return run_kernel(self._descriptors[False], x, *weights_of(self, self._names))
        return run_kernel(self._descriptors[True], x, *weights_of(self, self._names), bias=bias)

    def _traced_layer(self, x: torch.Tensor) -> torch.Tensor:
        """The layer by the kernel's operator in a program that holds for other patterns too."""
        factors, (bias,) = factors_of(self, self._names), parameters_of(self, ("bias",))
        operands = {} if bias is None else {"bias": bias}
        descriptor = self._descriptors[bias is not None]
        return run.kronecker_sparse_operators.run_fitted(descriptor, x, *factors, **operands)

    def _product(self, x: torch.Tensor, algo: str, batch_last: bool) -> torch.Tensor:
        """The factors alone, one after the other."""
        if is_dynamo_compiling():
            weights = factors_of(self, self._names)
            patterns = [tuple(weight.shape) for weight in weights]
        else:
            weights, patterns = weights_of(self, self._names), self.patterns
        self._check_input(x, batch_last, weights[0])
        for index, (pattern, weight) in enumerate(zip(patterns, weights, strict=True)):
            if weight.device != weights[0].device:
                raise ValueError(
                    f"factors[{index}] must be on {weights[0].device} as factors[0] is, got "
                    f"{weight.device}"
                )
            if algo == "kernel":
                x = run_kernel(_factor(pattern, batch_last, self.precision), x, weight)
            elif algo == "einsum" or (algo == "bmm" and not self._frozen):
                # What bmm stores is one copy, made as fast as it would be compared.
                x = ALGORITHMS[algo](x, weight, pattern, batch_last)
            else:
                stored = derived(self._kept, index, algo, STORAGE[algo], weight, self._frozen)
                x = ALGORITHMS[algo](x, weight, pattern, batch_last, stored)
        return x.contiguous()  # an einsum need not be

    def _finish(self, product: torch.Tensor, batch_last: bool) -> torch.Tensor:
        bias = parameters_of(self, ("bias",))[0] if is_dynamo_compiling() else self.bias
        if bias is not None:
            bias = bias.to(product.dtype)  # autocast may have narrowed these
            product = product + (bias.view(-1, *[1] * (product.dim() - 1)) if batch_last else bias)
        return activate(self._steps, product)

    def _check_input(self, x: torch.Tensor, batch_last: bool, weight: torch.Tensor) -> None:
        check_dense(("input",), input=x)
        if is_dynamo_compiling():  # where a number of the layer's would be a constant
            size = weight.shape[0] * weight.shape[2] * weight.shape[3]
        else:
            size = self.in_size
        if x.dim() == 0 or x.shape[0 if batch_last else -1] != size:
            shape = f"({size}, ...)" if batch_last else f"(..., {size})"
            raise ValueError(f"input must have shape {shape}, got {tuple(x.shape)}")
        if x.get_device() != weight.get_device() or x.is_meta != weight.is_meta:
            raise ValueError(
                f"input must be on {weight.device} as the layer's factors are, got {x.device}"
            )
        if x.dtype != weight.dtype and not autocasts(x.device):
            raise TypeError(
                f"input must be {weight.dtype} as the layer's factors are, got {x.dtype}"
            )

    def _describe(self, bias: bool) -> KroneckerSparse | KroneckerSparseChain:
        """The whole layer as one descriptor, with or without a bias."""
        end = (*([Bias()] if bias else []), *self.activation)
        factors = [
            KroneckerSparse(
                *pattern,
                batch_last=self.bs_last,
                epilogue=end if index == self.num_mat - 1 else (),
                precision=self.precision,
            )
            for index, pattern in enumerate(self.patterns)
        ]
        return factors[0] if len(factors) == 1 else KroneckerSparseChain(tuple(factors))

    # What a layer holds besides its parameters, and what is saved of it.

    def _forget(self) -> None:
        self._kept: dict[int, Kept] = {}
        # With the shape: which kernel a call needs, and whether one launch holds it, depends on it.
        self._without_kernel: set[tuple[torch.device, torch.dtype, torch.Size]] = set()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_kept": {}, "_without_kernel": set(), "_frozen": False}

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        flatten_bias(state_dict, prefix, self.out_size)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def is_among(refused: set, x: torch.Tensor) -> bool:
    """Whether the kernel was refused for an input like this one."""
    try:
        return (x.device, x.dtype, x.shape) in refused
    except TypeError:  # of sizes that are symbols, which have no hash
        return False


@lru_cache(maxsize=256)
def _factor(pattern: Pattern, batch_last: bool, precision: str | None) -> KroneckerSparse:
    return KroneckerSparse(*pattern, batch_last=batch_last, precision=precision)


def flatten_bias(state_dict: dict, prefix: str, size: int) -> None:
    """Make a bias (size, 1), as KSMM's batch-last layers have it, one of (size,)."""
    bias = state_dict.get(f"{prefix}bias")
    if isinstance(bias, torch.Tensor) and bias.shape == (size, 1):
        state_dict[f"{prefix}bias"] = bias.flatten()


def _as_patterns(patterns) -> tuple[Pattern, ...]:
    if not isinstance(patterns, Sequence) or isinstance(patterns, str) or not len(patterns):
        raise TypeError(f"patterns must be a list of tuples (a, b, c, d), got {shown(patterns)}")
    checked = []
    for index, pattern in enumerate(patterns):
        try:
            sizes = tuple(operator.index(size) for size in pattern)
        except (TypeError, RuntimeError):  # the latter of tensors of a rare kind
            sizes = ()
        if len(sizes) != 4 or any(isinstance(size, bool) for size in pattern):
            raise TypeError(
                f"patterns[{index}] must be four ints (a, b, c, d), got {shown(pattern)}"
            )
        if min(sizes) < 1:
            raise ValueError(f"patterns[{index}] must have sizes of 1 or more, got {shown(sizes)}")
        if math.prod(sizes) >= MOST:
            raise ValueError(f"patterns[{index}] must hold below 2**60 numbers, got {shown(sizes)}")
        checked.append(sizes)
    return tuple(checked)


def _checked_weights(weights, patterns: tuple[Pattern, ...]) -> list[torch.Tensor]:
    if isinstance(weights, (str, torch.Tensor)) or not isinstance(weights, Iterable):
        raise TypeError(f"weights must be a list of tensors, one a pattern, got {shown(weights)}")
    weights = list(weights)
    if len(weights) != len(patterns):
        raise ValueError(
            f"weights must hold one tensor for each of {len(patterns)} patterns, got {len(weights)}"
        )
    for index, (weight, pattern) in enumerate(zip(weights, patterns, strict=True)):
        if not isinstance(weight, torch.Tensor):
            refuse_other(f"weights[{index}]", weight, "a tensor of floats")
        if not weight.is_floating_point():
            raise TypeError(f"weights[{index}] must be a tensor of floats, got {weight.dtype}")
        check_dense((), **{f"weights[{index}]": weight})
        if tuple(weight.shape) != pattern:
            raise ValueError(
                f"weights[{index}] must have the shape {pattern} of its pattern, got "
                f"{tuple(weight.shape)}"
            )
    return weights


def _by_position(more: tuple, device):
    """The device, which some versions of KSMM have behind ``bs_last`` and others behind ``vsize``.
    Raises TypeError for what else stands there."""
    if not more:
        return device
    if len(more) > 1 or device is not None or not isinstance(more[0], (str, torch.device)):
        raise TypeError(
            f"KSLinear takes device, activation and precision by name, got {shown(more)} behind "
            "bs_last; KSMM's vsize is gone: kernels choose the width of their loads themselves, so "
            "leave it out"
        )
    return more[0]


def weights_of(layer: nn.Module, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Its ``factors``, without the 1 us each that a ParameterList takes to find them; ``names`` are
    their places in it."""
    factors = layer._modules["factors"]
    parameters = factors._parameters
    try:
        return [parameters[name] for name in names]
    except KeyError:  # parametrized
        return list(factors)


def checked_device(device: object) -> torch.device | None:
    """Raises TypeError and ValueError for what names no device."""
    return None if device is None else as_device(device)


def _shared(weights: list[torch.Tensor], name: str):
    """The dtype or device of all weights. Raises ValueError where they differ."""
    values = [getattr(weight, name) for weight in weights]
    if len(set(values)) > 1:
        raise ValueError(f"weights have several {name}s, {values}; give the {name} of the layer")
    return values[0]


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        names = ", ".join(str(kind) for kind in DTYPES)
        raise TypeError(f"dtype must be one of {names}, got {shown(dtype)}")
    return dtype

"""A linear layer whose constant weight is compressed."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import index
from typing import SupportsIndex

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.calls import hinted
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.errors import warn
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.layout import format_of, parse_layout
from kernlib.families.sparse.matrix import SparseMatrix, compressed
from kernlib.nn.activations import as_activation
from kernlib.nn.computed_weight import CompressedWeight, ComputesWeight, computed
from kernlib.nn.sparse_weights import (
    check_bias,
    checked_dtype,
    counted,
    is_silently_dense,
    matrix_of,
)
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense, check_flag, stand_ins

_PREFIX = "weight_"  # of the buffers, which are named as the format's tensors
_EXTRA = "_extra_state"
MOST_FEATURES = 2**61 - 1  # of which torch can count the bytes


@hinted
class SparseLinear(ComputesWeight, nn.Module):
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
    tensors are buffers: ``.to(device)`` moves them, ``.half()``, ``.bfloat16()`` and ``.float()``
    round the values and compress them anew. ``state_dict`` holds tensors alone, a versioned header
    among them, and loads into a layer of another format and number of entries.

    Raises TypeError for another dtype, a ``bias`` that is no bool and what is no activation,
    ValueError for other sizes, what is no device and an activation that takes arguments. The
    compressed layer of a language model is MACKO-SpMV's use of such matrices.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | Epilogue | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ):
        super().__init__()
        dtype = checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
        sizes = {"out_features": out_features, "in_features": in_features}
        self._sizes = tuple(_checked_size(name, size) for name, size in sizes.items())
        check_flag("bias", bias)
        device = _checked_device(device)
        self._activation = as_activation(activation)
        # Built here, as Dynamo cannot.
        self._plain = SparseMatmul(epilogue=self._activation)
        self._biased = SparseMatmul(epilogue=(Bias(), *self._activation))
        # Moves and casts with the layer, and so says where and what an empty one is.
        like = torch.empty(0, dtype=dtype, device=device)
        self.register_buffer("_like", like, persistent=False)
        zeros = torch.zeros(self._sizes[0], dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))
        self._names: tuple[str, ...] = ()
        self._matrix: SparseMatrix | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: str = "auto",
        density: float | None = None,
        per: str = "matrix",
        activation: str | Epilogue | None = None,
        columns: int = 1,
    ) -> SparseLinear:
        """The layer with the weight of ``linear``, compressed where it lies; the bias is the same
        parameter.

        - ``format``, ``columns``: as of :func:`kernlib.sparse.compress`.
        - ``density``: None compresses the weight as it is; a number keeps that part of the entries,
          those of largest magnitude, counted ``per`` "matrix" or "row": see
          :func:`kernlib.sparse.magnitude`. ``linear`` keeps its weight.

        Warns with a :class:`kernlib.KernlibWarning` of a weight that is kept dense because nobody
        has pruned it: constant all the same, and no smaller.

        Raises TypeError for what is no ``nn.Linear`` and for float64, ValueError for one without
        values, such as on "meta", and as ``compress`` and ``magnitude`` do.
        """
        matrix = matrix_of(linear, format, density, per, columns)
        if is_silently_dense(matrix, density, format):
            warn(
                "SparseLinear.from_linear leaves the weight dense, which has too few zeros to "
                "compress, and makes it a constant without a gradient. density=0.5 prunes it; "
                "format='dense' says that this is meant"
            )
        return cls.from_matrix(matrix, linear.bias, activation).train(linear.training)

    @classmethod
    def from_matrix(
        cls,
        matrix: SparseMatrix,
        bias: torch.Tensor | None = None,
        activation: str | Epilogue | None = None,
    ) -> SparseLinear:
        """The layer of a compressed matrix (out_features, in_features), whose tensors it shares. A
        ``bias`` that is a parameter is kept as it is. Raises TypeError and ValueError for a bias
        that is no tensor (out_features,) of the matrix's dtype and device."""
        if not isinstance(matrix, SparseMatrix):
            raise TypeError(f"matrix must be a SparseMatrix, got {type(matrix).__name__}")
        check_bias(bias, matrix)
        rows, cols = matrix.shape
        made = cls(cols, rows, False, activation, matrix.dtype, matrix.device)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias.detach())
        made.bias = bias
        made._hold(matrix)
        return made

    in_features = property(lambda self: self._sizes[1], doc="Features of the input.")
    out_features = property(lambda self: self._sizes[0], doc="Features of the output.")
    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")

    @property
    def matrix(self) -> SparseMatrix:
        """The weight. Raises RuntimeError for a layer that is still empty."""
        held = self._matrix
        if held is None:
            raise RuntimeError("this SparseLinear is empty: load a state_dict into it")
        return held

    @property
    def weight(self) -> torch.Tensor:
        """:meth:`to_dense`, for code that asks an ``nn.Linear`` for its weight: no parameter, and
        RuntimeError for a write to it, which the layer would not see."""
        return computed(self.to_dense(), CompressedWeight)

    def to_dense(self) -> torch.Tensor:
        """W (out_features, in_features), a new tensor; activation and bias are not in it."""
        return self.matrix.to_dense()

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
        """(..., in_features) to (..., out_features)."""
        try:
            bias = self._parameters["bias"]
        except KeyError:  # parametrized
            bias = self.bias
        if bias is None:
            return run_kernel(self._plain, self._weight(), input)
        return run_kernel(self._biased, self._weight(), input, bias=bias)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.bias is not None}"]
        if self._matrix is None:
            parts += [f"dtype={self._like.dtype}", "empty"]
        else:
            held = self._matrix
            parts += [f"format={held.format!r}", f"dtype={held.dtype}"]
            parts += [f"density={held.density:.3g}"] if held.device.type != "meta" else []
            parts += [f"bytes={held.nbytes}"]
        return ", ".join([*parts, *(f"activation={epilogue}" for epilogue in self.activation)])

    # The matrix, and the buffers that are its tensors.

    def _let_go(self) -> None:
        """Become empty."""
        for name in self._names:
            del self._buffers[name]
        self._names, self._matrix = (), None

    def _hold(self, matrix: SparseMatrix) -> None:
        """Take a matrix, and make its tensors the buffers."""
        self._let_go()
        for name, tensor in matrix.tensors.items():
            self.register_buffer(_PREFIX + name, tensor)
        self._names = tuple(_PREFIX + name for name in matrix.tensors)
        self._matrix = matrix

    def _weight(self) -> SparseMatrix:
        """The matrix of the buffers as they are now: functional_call, among others, puts other
        tensors there. Raises ValueError, TypeError where they are none of the kind held."""
        held, buffers = self.matrix, self._buffers
        operands = held.operands
        for name, operand in zip(self._names, operands, strict=True):
            if buffers[name] is not operand:
                return _of_others(held, {name: buffers[name] for name in self._names})
        return held

    def _apply(self, fn: Callable, recurse: bool = True):
        held = self._matrix
        if held is not None and _makes_anew(fn, self._like):
            self._let_go()
            held = None
        if held is not None:
            dtype = fn(self._like).dtype
            if dtype != held.dtype:
                self._hold(_rounded(held, dtype))
        super()._apply(fn, recurse)
        if held is not None:
            pairs = zip(self._names, self._matrix.operands, strict=True)
            # Module.type casts whole numbers too, which are none to round.
            tensors = [_of_dtype(self._buffers[name], own) for name, own in pairs]
            self._hold(_with_tensors(self._matrix, tensors))
        return self

    # Saving, and what is saved.

    def get_extra_state(self) -> torch.Tensor:
        """Everything but the tensors, as the bytes of a JSON text in a tensor: formats of files
        that hold tensors alone, such as safetensors, take it."""
        header = None if self._matrix is None else self._matrix.state()[0]
        text = json.dumps(header, sort_keys=True).encode()
        return torch.tensor(list(text), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Nothing: the matrix was made of it together with its tensors."""

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        headed = prefix + _EXTRA in state_dict
        if headed:
            # An empty layer on meta takes what is loaded, as every module does with assign=True.
            assigned = local_metadata.get("assign_to_params_buffers", False) or self._like.is_meta
            local_metadata = {**local_metadata, "assign_to_params_buffers": assigned}
            try:
                loaded = self._loaded(state_dict, prefix, assigned)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'SparseLinear'}: {error}")
                return
            self._like = torch.empty(0, dtype=loaded.dtype, device=loaded.device)
            self._hold(loaded)
        # Which are loaded already, or cannot be, as nothing says what they are.
        kept = {name: self._buffers.pop(name) for name in self._names}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._buffers.update(kept)
        known = [prefix + name for name in kept]
        if headed:
            unexpected_keys[:] = [key for key in unexpected_keys if key not in known]
        else:
            missing_keys += [key for key in known if key not in state_dict]
            dense = prefix + "weight"
            unexpected_keys[:] = [_DenseKey(k) if k == dense else k for k in unexpected_keys]

    def _loaded(self, state_dict: dict, prefix: str, assigned: bool) -> SparseMatrix:
        """The matrix in a state_dict, itself or in memory, dtype and place of the layer. Raises
        TypeError and ValueError."""
        header = _header(state_dict[prefix + _EXTRA])
        start = prefix + _PREFIX
        tensors = {k[len(start) :]: v for k, v in state_dict.items() if k.startswith(start)}
        found = SparseMatrix.from_state(header, tensors)
        if found.shape != self._sizes:
            raise ValueError(
                f"the matrix loaded has shape {found.shape}, that of the layer has {self._sizes}"
            )
        if assigned:
            return found
        if found.dtype != self._like.dtype:
            found = _rounded(found, self._like.dtype)
        return _with_tensors(found, [t.to(self._like.device, copy=True) for t in found.operands])

    def __getstate__(self) -> dict:
        """Without the matrix, whose tensors the buffers are."""
        held = self._matrix
        kept = None if held is None else (held.layout, held.known_nnz())
        return {**self.__dict__, "_matrix": kept}

    def __setstate__(self, state: dict) -> None:
        kept = state["_matrix"]
        # Buffers in a dictionary of its own: copy.copy() of a module shares its, which stay there.
        own = {"_matrix": None, "_buffers": dict(state["_buffers"])}
        super().__setstate__({**state, **own})
        if kept is not None:
            layout, nnz = kept
            tensors = {n.removeprefix(_PREFIX): self._buffers[n] for n in self._names}
            self._hold(counted(_restored(layout, tensors), nnz))


class _DenseKey(str):
    """The key of an uncompressed weight, which says so in torch's error, and in what it returns
    without one is the key alone: a module is not told which of the two there will be."""

    def __format__(self, spec: str) -> str:
        return (
            f"{self!s} (of an nn.Linear, not compressed: load it into one, and make the layer of "
            "that by SparseLinear.from_linear)"
        )


def _checked_size(name: str, size) -> int:
    known = isinstance(size, SupportsIndex) and not isinstance(size, (bool, torch.Tensor))
    if not known or not 0 <= index(size) <= MOST_FEATURES:
        raise ValueError(f"{name} must be an int of at least 0 and below 2^61, got {size!r}")
    return index(size)


def _checked_device(device) -> torch.device | None:
    if device is not None and type(device) not in (torch.device, str, int):
        raise ValueError(
            f"device must be a torch.device, str or int that names one, got {device!r}"
        )
    try:
        return None if device is None else torch.empty(0, dtype=torch.uint8, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"device must be a torch.device, str or int that names one, got {device!r}: {error}"
        ) from None


def _of_dtype(made: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """What a function made of a matrix's own tensor, in its dtype."""
    return made if made.dtype == own.dtype else own.to(made.device)


def _makes_anew(fn: Callable, like: torch.Tensor) -> bool:
    """Whether a function for ``Module._apply`` answers tensors without the values of those given,
    as ``to_empty`` does: no matrix to multiply with."""
    if getattr(fn, "__qualname__", "").startswith("Module.to_empty"):
        return True
    return like.is_meta and not fn(like).is_meta


def _header(state) -> dict:
    """The header in an extra state. Raises ValueError."""
    try:
        header = json.loads(bytes(state.tolist()).decode())
    except (AttributeError, RuntimeError, TypeError, ValueError):  # RecursionError is the second
        raise ValueError("its extra state is no header of a SparseLinear") from None
    if not isinstance(header, dict):
        raise ValueError("what is loaded was saved of an empty SparseLinear")
    return header


def _restored(layout: str, tensors: dict[str, torch.Tensor]) -> SparseMatrix:
    """The matrix of a pickled layer, whose tensors are looked at as those of a state are, but where
    they have no values. Raises ValueError."""
    from kernlib.families.sparse.state import loaded  # which only loading needs

    format, *kind, facts = parse_layout(layout)
    if not stand_ins(*tensors.values()) and not any(t.is_meta for t in tensors.values()):
        tensors = loaded(format, *kind, facts, tensors)
    return SparseMatrix.from_layout(layout, tuple(tensors[n] for n in format_of(format).TENSORS))


def _rounded(matrix: SparseMatrix, dtype: torch.dtype) -> SparseMatrix:
    """The matrix in another dtype: in its format, or in the best one where that cannot hold it."""
    dtype = checked_dtype(dtype)
    if matrix.device.type == "meta":
        raise TypeError(
            f"a SparseLinear on meta has no values to turn from {matrix.dtype} into {dtype}"
        )
    dense = matrix.to_dense().to(dtype)
    fits = format_of(matrix.format).nbytes(dense) is not None
    return compressed(dense, matrix.format if fits else "auto")


def _of_others(held: SparseMatrix, tensors: dict[str, torch.Tensor]) -> SparseMatrix:
    """The matrix of other tensors than those held, by the names of the buffers."""
    if not is_dynamo_compiling():  # there the operator checks them when it runs
        check_dense(tuple(tensors), **tensors)
        tensors = {name: _untracked(name, tensor) for name, tensor in tensors.items()}
        if not stand_ins(*tensors.values()):
            from kernlib.families.sparse.fitted import fitted

            return fitted(held.layout, tuple(tensors.values()))
    return SparseMatrix.from_layout(held.layout, tuple(tensors.values()))


def _untracked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor inside transforms of torch.func without those that compute gradients, to which the
    matrix is a constant. Raises RuntimeError for one that is mapped over."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        raise RuntimeError(f"torch.vmap maps the input of a SparseLinear, not its {name}")
    return tensor


def _with_tensors(matrix: SparseMatrix, tensors: list[torch.Tensor]) -> SparseMatrix:
    """The same matrix in other memory."""
    return counted(SparseMatrix.from_layout(matrix.layout, tuple(tensors)), matrix.known_nnz())

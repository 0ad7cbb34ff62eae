"""A linear layer whose constant weight is compressed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.calls import hinted
from kernlib.descriptors.base import shown, whole
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.errors import warn
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.layout import untransformed
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.moved import check_written, refuse_capture
from kernlib.nn import inputs, json_bytes
from kernlib.nn.activations import as_activation
from kernlib.nn.computed_weight import CompressedWeight, ComputesWeight, computed
from kernlib.nn.indexed import (
    DIGITS,
    MARK,
    IndexedModule,
    fingerprint,
    is_captured,
    is_close,
    plain,
    versions_of,
)
from kernlib.nn.sparse_weights import (
    check_bias,
    checked_dtype,
    counted,
    is_silently_dense,
    matrix_of,
    of_others,
    restored,
    rounded,
)
from kernlib.nn.traced import parameters_of
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_flag, stand_ins

_PREFIX = "weight_"  # of the tensors' names, which else are those of the format
_EXTRA = "_extra_state"
MOST_FEATURES = 2**61 - 1  # of which torch can count the bytes


@hinted
class SparseLinear(ComputesWeight, IndexedModule):
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
    into a layer of another format and number of entries.

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
        self._matrix: SparseMatrix | None = None
        self._digits = torch.zeros(DIGITS, dtype=torch.float32, device=like.device)  # of the mark
        self._written: int | None = None  # how often torch has counted a write to the matrix
        self._set_mark(self._digits.clone())

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
        """The weight. Raises RuntimeError for a layer that is still empty, and for one whose
        tensors or buffers were written with what is no weight of it."""
        return self._weight()

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
        if type(input) is not torch.Tensor and (result := inputs.called(self, input)) is not None:
            return result
        if is_dynamo_compiling():
            (bias,) = parameters_of(self, ("bias",))
        else:
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

    # The matrix, whose tensors are the indices of the module.

    def _let_go(self) -> None:
        """Become empty."""
        self._drop_indices()
        self._matrix = self._written = None

    def _hold(self, matrix: SparseMatrix, digits: torch.Tensor | None = None) -> None:
        """Take a matrix, whose fingerprint is computed unless it is known."""
        self._matrix = matrix
        self._put_indices([_PREFIX + name for name in matrix.tensors], matrix.operands)
        self._written = versions_of(matrix.operands)
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            self._digits = fingerprint(matrix.operands) if digits is None else digits
            self._set_mark(self._digits.clone())

    def _weight(self) -> SparseMatrix:
        """The matrix of the tensors that are there now: functional_call, among others, puts others
        there. Raises ValueError, TypeError where they are none of the kind held, RuntimeError where
        the buffers are those of another matrix."""
        held = self._matrix
        if held is None:
            raise RuntimeError("this SparseLinear is empty: load a state_dict into it")
        compiling, writes = is_dynamo_compiling(), 0
        counted = self._written is not None and not compiling
        for name, operand in zip(self._indices, held.operands, strict=True):
            if getattr(self, name) is not operand:
                return of_others(held, {name: getattr(self, name) for name in self._indices})
            if counted:
                writes += operand._version
        if compiling:
            return held
        if counted and writes != self._written:
            self._look_at_writes(held, writes)
        return held if self._is_unwritten() else self._of_mark(held)

    def _look_at_writes(self, held: SparseMatrix, writes: int) -> None:
        """Look at tensors that torch has counted a write to. Raises ValueError for what is no
        matrix any more."""
        if held.device.type == "meta" or stand_ins(*held.operands):
            return
        refuse_capture(held.operands)
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            digits = fingerprint(held.operands)
            if not torch.equal(digits, self._digits):
                check_written(held)
                self._digits = digits
                self._set_mark(digits.clone())
        self._written = writes

    def _of_mark(self, held: SparseMatrix) -> SparseMatrix:
        """The matrix, where the mark was written, moved, or is another layer's."""
        given = self._buffers[MARK]
        mark, _ = plain(given)
        if mark.is_meta or stand_ins(mark, *held.operands) or is_captured(mark):
            return held
        own = given is self._seen[0]
        known = None if own else self._known_other((given,))
        if known is not None and known.device == mark.device:
            return known
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            found = held
            if held.device.type != "meta":
                digits = self._digits.to(mark.device)
                # Of layers that torch.vmap maps over, all must have this matrix.
                if not is_close(mark, digits.expand_as(mark) if mark.dim() == 2 else digits):
                    raise RuntimeError(
                        "the buffers of this SparseLinear were written, averaged with those of a "
                        "layer of another weight, or broadcast from one. Its own weight is "
                        "constant: load a state_dict into each layer that is to have the other"
                    )
                found = held.to(mark.device)
                if own and found is not held:  # its mark is there already
                    self._matrix, self._digits = found, digits
                    names = [_PREFIX + name for name in found.tensors]
                    self._put_indices(names, found.operands)
                    self._written = versions_of(found.operands)
        if own:
            self._note_mark()
            self._settled = True
        else:
            self._note_other((given,), found)
        return found

    def _apply(self, fn: Callable, recurse: bool = True):
        held = self._matrix
        if held is not None and _makes_anew(fn, self._like):
            self._let_go()
            held = None
        if held is not None:
            dtype = fn(self._like).dtype
            if dtype != held.dtype:
                held = rounded(held, dtype)
                self._hold(held)
        self._apply_apart(fn, recurse)
        place, mark = self._like.device, self._buffers[MARK]
        if held is None:
            self._digits = torch.zeros(DIGITS, dtype=torch.float32, device=place)
            self._set_mark(self._digits.clone())
        elif place != held.device:
            with torch.inference_mode(False), torch.no_grad():
                self._hold(held.to(place), self._digits.to(place))
                if not mark.is_meta:  # which may have been written since it was looked at
                    self._take_mark(mark.to(place))
        return self

    # Saving, and what is saved.

    def get_extra_state(self) -> torch.Tensor:
        """Everything but the tensors, as the bytes of a JSON text in a tensor: formats of files
        that hold tensors alone, such as safetensors, take it."""
        header = None if self._matrix is None else self._weight().state()[0]
        return json_bytes.written(header)

    def _saved_indices(self) -> dict[str, torch.Tensor]:
        held = self._matrix
        if held is None or held.device.type == "meta":  # where they are buffers
            return {}
        tensors = (t.detach() for t in self._weight().operands)
        return dict(zip(self._indices, tensors, strict=True))

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
        self._load_apart(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        known = [prefix + name for name in self._indices]
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
            found = rounded(found, self._like.dtype)
        return _with_tensors(found, [t.to(self._like.device, copy=True) for t in found.operands])

    def __getstate__(self) -> dict:
        """Without the matrix, whose tensors are attributes or, on meta, buffers."""
        held = self._matrix
        kept = None if held is None else (held.layout, held.known_nnz())
        return {**self.__dict__, "_matrix": kept, "_seen": None, "_other": None}

    def __setstate__(self, state: dict) -> None:
        """Raises ValueError for tensors that are no matrix."""
        kept, digits = state["_matrix"], state.get("_digits")
        # Buffers in a dictionary of its own: copy.copy() of a module shares its, which stay there.
        buffers = dict(state["_buffers"])
        # Pickles of version 0.1 hold the tensors as buffers, and no mark.
        names = state.get("_indices", state.get("_names", ()))
        tensors = {n: buffers.pop(n) for n in names if n in buffers}
        state = {**state, "_indices": (), "_written": None, "_settled": False, "_buffers": buffers}
        tensors.update((n, state.pop(n)) for n in names if n in state)
        state.pop("_names", None)
        mark = buffers.pop(MARK, None)
        nn.Module.__setstate__(self, {**state, "_matrix": None})
        if kept is None:
            self._digits = torch.zeros(DIGITS, dtype=torch.float32, device=self._like.device)
            self._set_mark(self._digits.clone())
        else:
            layout, nnz = kept
            named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
            self._hold(counted(restored(layout, named), nnz), digits)
        if mark is not None:
            self._take_mark(mark)


class _DenseKey(str):
    """The key of an uncompressed weight, which says so in torch's error, and in what it returns
    without one is the key alone: a module is not told which of the two there will be."""

    def __format__(self, spec: str) -> str:
        return (
            f"{self!s} (of an nn.Linear, not compressed: load it into one, and make the layer of "
            "that by SparseLinear.from_linear)"
        )


def _checked_size(name: str, size) -> int:
    number = whole(size)
    if number is None or not 0 <= number <= MOST_FEATURES:
        raise ValueError(f"{name} must be an int of at least 0 and below 2^61, got {shown(size)}")
    return number


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


def _makes_anew(fn: Callable, like: torch.Tensor) -> bool:
    """Whether a function for ``Module._apply`` answers tensors without the values of those given,
    as ``to_empty`` does: no matrix to multiply with."""
    if getattr(fn, "__qualname__", "").startswith("Module.to_empty"):
        return True
    return like.is_meta and not fn(like).is_meta


def _header(state) -> dict:
    """The header in an extra state. Raises ValueError."""
    try:
        header = json_bytes.parsed(state)
    except ValueError:
        raise ValueError("its extra state is no header of a SparseLinear") from None
    if not isinstance(header, dict):
        raise ValueError("what is loaded was saved of an empty SparseLinear")
    return header


def _with_tensors(matrix: SparseMatrix, tensors: list[torch.Tensor]) -> SparseMatrix:
    """The same matrix in other memory."""
    return counted(SparseMatrix.from_layout(matrix.layout, tuple(tensors)), matrix.known_nnz())

"""How :class:`kernlib.nn.SparseLinear` holds its matrix: its tensors are the indices of
:mod:`kernlib.nn.indexed`. A state_dict holds one tensor with all of them. In its place the layer
has a buffer without elements, for loaders to fill."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.families.sparse.layout import untransformed
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import (
    check_written,
    memory_of,
    refuse_capture,
    tensors_in,
)
from kernlib.nn.indexed import (
    DIGITS,
    EXTRA,
    MARK,
    IndexedModule,
    UnknownIndices,
    fingerprint,
    former_header,
    is_captured,
    is_close,
    plain,
    versions_of,
)
from kernlib.nn.sparse_weights import counted, of_others, restored, rounded
from kernlib.nn.unsized import Unsized, is_unfilled
from kernlib.runtime.tensors import stand_ins

PREFIX = "weight_"  # of the tensors' names, which are the format's otherwise
PACKED = "weight_packed"  # what a state_dict holds
# An attribute of the buffer of this name, if a layer has put it there and no loader. Compiled calls
# test it rather than the tensor's identity, whose guard would be Python code.
CARRIER = "_kernlib_carrier"


class MatrixModule(IndexedModule):
    """A layer with a compressed matrix that moves with it and is saved with it."""

    persistent = False
    carriers = (MARK, PACKED)
    # Whether a tensor of the matrix may be another now. Compiled calls compare them only then, as
    # each that they look at has guards of its own.
    _is_exchanged = False
    # Whether hooks put the weight there for a call at a time and take it away after it, so that the
    # layer must not make it its own.
    _is_lent = False

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._sizes, self._dtype = shape, dtype
        self._become_empty(device)

    def _become_empty(self, place: torch.device) -> None:
        """Hold no matrix, at a place where one is to be loaded to."""
        self._drop_indices()
        self._matrix: SparseMatrix | None = None
        self._place = place
        self._data: torch.Tensor | None = None  # all of the matrix as it is saved, if it lies so
        self._written: int | None = None  # how often torch has counted a write to the matrix
        # The mark is not filled: on meta it would have to be.
        there = torch.device("cpu") if place.type == "meta" else place
        self._digits = torch.zeros(DIGITS, dtype=torch.float32, device=there)  # of the mark
        self._set_mark(self._digits.clone())
        self._put_carrier()

    def _lend(self, size: int) -> None:
        """Hold a matrix in calls alone. For each call hooks put one of so many packed bytes, or of
        any size if 0, in the place of the buffer, which is on meta between calls."""
        self._become_empty(torch.device("meta"))
        self._carrier.resize_((size,))
        self._is_lent, self._other = True, None

    def _put_indices(self, *args) -> None:
        super()._put_indices(*args)
        self._is_exchanged = False

    def _put_carrier(self) -> None:
        """Register the buffer that loaders fill or replace: of any size while the matrix is
        unknown."""
        matrix = self._matrix
        if matrix is None or matrix.device.type == "meta":
            self._carrier = Unsized.on(self._place if matrix is None else matrix.device)
        else:
            # Of floats: torch's averages of buffers divide in place, which whole numbers refuse.
            self._carrier = torch.empty(0, dtype=torch.float32, device=matrix.device)
        self._register_carrier()

    def _register_carrier(self) -> None:
        setattr(self._carrier, CARRIER, True)
        self.register_buffer(PACKED, self._carrier)

    def _hold(
        self,
        matrix: SparseMatrix,
        digits: torch.Tensor | None = None,
        data: torch.Tensor | None = None,
    ) -> None:
        """Take a matrix, whose fingerprint is computed unless it is known, and the packed ``data``
        that its tensors are views of, if they are."""
        self._matrix, self._data = matrix, data
        self._put_indices([PREFIX + name for name in matrix.tensors], matrix.operands)
        self._written = versions_of(matrix.operands)
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            self._digits = fingerprint(matrix.operands) if digits is None else digits
            self._set_mark(self._digits.clone())
            self._put_carrier()

    # The matrix that the layer has now.

    def _weight(self) -> SparseMatrix:
        """The matrix of the tensors that the layer has now: functional_call, among others, may have
        put others there. Raises ValueError and TypeError for tensors of another kind, RuntimeError
        for the buffers of another matrix."""
        compiling, writes = is_dynamo_compiling(), 0
        there = self._buffers[PACKED]
        is_filled = not hasattr(there, CARRIER) if compiling else there is not self._carrier
        if is_filled and not compiling:
            other = self._of_carrier()
            if other is not None:
                return other
        matrix = self._matrix
        if is_filled and compiling and matrix is not None:
            raise RuntimeError(
                f"{PACKED} of this SparseLinear is another tensor than its own, which compiled "
                "calls do not read: load_state_dict makes it the layer's"
            )
        if matrix is None:
            raise UnknownIndices(
                "this SparseLinear is empty: load a state_dict into it; one that has been filled "
                "by name must be called once before it is compiled"
            )
        if compiling and not self._is_exchanged:
            return matrix
        is_counted = self._written is not None and not compiling
        for name, operand in zip(self._indices, matrix.operands, strict=True):
            if getattr(self, name) is not operand:
                return of_others(matrix, {name: getattr(self, name) for name in self._indices})
            if is_counted:
                writes += operand._version
        if compiling:
            return matrix
        if is_counted and writes != self._written:
            self._look_at_writes(matrix, writes)
        return matrix if self._is_unwritten() else self._of_mark(matrix)

    def _of_carrier(self) -> SparseMatrix | None:
        """The matrix that a loader or functional_call has put there. A layer without a matrix keeps
        it. None for a tensor without elements, or without values."""
        data = self._buffers[PACKED]
        if data.numel() == 0 or data.is_meta or stand_ins(data):
            return None
        is_own = self._lacks_matrix() and not self._is_lent
        noted = None if is_own else self._noted_other((data,))
        if noted is None:
            refuse_capture((data,))
            with torch.inference_mode(False), torch.no_grad(), untransformed():
                noted, lying = self._unpacked(data, self._dtype)
            if is_own:
                self._hold(noted, None, lying)
            elif not self._is_lent:  # it would keep the memory
                self._note_other((data,), noted)
        return noted

    def _lacks_matrix(self) -> bool:
        """Whether the layer has no values yet, so that it keeps the matrix of a loader."""
        matrix = self._matrix
        return matrix is None or matrix.device.type == "meta"

    def _unpacked(
        self, data: torch.Tensor, dtype: torch.dtype | None
    ) -> tuple[SparseMatrix, torch.Tensor | None]:
        """The matrix in a packed tensor, in a dtype or as it is, and the tensor if the matrix lies
        in it. Raises ValueError."""
        from kernlib.families.sparse.packed import unpacked  # only loading needs it

        data = data.as_subclass(torch.Tensor)
        matrix = self._checked(unpacked(data))
        if dtype not in (None, matrix.dtype):
            return rounded(matrix, dtype), None
        return matrix, data if lies_in(matrix, data) else None

    def _checked(self, matrix: SparseMatrix) -> SparseMatrix:
        """Raises ValueError for a matrix of another shape than the layer's."""
        if matrix.shape != self._sizes:
            raise ValueError(
                f"the matrix loaded has shape {matrix.shape}, that of the layer has {self._sizes}"
            )
        return matrix

    def _look_at_writes(self, matrix: SparseMatrix, writes: int) -> None:
        """Look at tensors that torch has counted a write to. Raises ValueError for what is no
        matrix any more."""
        if matrix.device.type == "meta" or stand_ins(*matrix.operands):
            return
        refuse_capture(matrix.operands)
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            digits = fingerprint(matrix.operands)
            if not torch.equal(digits, self._digits):
                check_written(matrix)
                self._digits, self._data = digits, None
                self._set_mark(digits.clone())
        self._written = writes

    def _of_mark(self, held: SparseMatrix) -> SparseMatrix:
        """The matrix, where the mark was written, moved, or is another layer's."""
        buffer = self._buffers[MARK]
        mark, _ = plain(buffer)
        if mark.is_meta or stand_ins(mark, *held.operands) or is_captured(mark):
            return held
        is_own = buffer is self._seen[0]
        noted = None if is_own else self._noted_other((buffer,))
        if noted is not None and noted.device == mark.device:
            return noted
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            matrix = held
            if held.device.type != "meta":
                digits = self._digits.to(mark.device)
                # Of layers that torch.vmap maps over, all must have this matrix.
                if not is_close(mark, digits.expand_as(mark) if mark.dim() == 2 else digits):
                    raise RuntimeError(
                        "the buffers of this SparseLinear were written, averaged with those of a "
                        "layer of another weight, or broadcast from one. Its own weight is "
                        "constant: load a state_dict into each layer that is to have the other"
                    )
                matrix = held.to(mark.device)
                if is_own and matrix is not held:  # its mark is there already
                    self._matrix, self._digits, self._data = matrix, digits, None
                    names = [PREFIX + name for name in matrix.tensors]
                    self._put_indices(names, matrix.operands)
                    self._written = versions_of(matrix.operands)
        if is_own:
            self._note_mark()
            self._settled = True
        else:
            self._note_other((buffer,), matrix)
        return matrix

    # Moving.

    def _apply(self, fn: Callable, recurse: bool = True):
        self._adopt()
        matrix = self._matrix
        before = torch.empty(
            0, dtype=self._dtype, device=self._place if matrix is None else matrix.device
        )
        after = fn(before)
        if matrix is not None and _makes_anew(fn, before, after):
            matrix = None
        if matrix is not None and after.dtype != matrix.dtype:
            matrix = rounded(matrix, after.dtype)
            self._hold(matrix)
        self._dtype = after.dtype
        self._apply_apart(fn, recurse)
        place, mark = after.device, self._buffers[MARK]
        if matrix is None:
            self._become_empty(place)
        elif place != matrix.device:
            with torch.inference_mode(False), torch.no_grad():
                self._hold(matrix.to(place), self._digits.to(place))
                if not mark.is_meta:  # which may have been written since it was looked at
                    self._take_mark(mark.to(place))
        return self

    def _adopt(self) -> None:
        """Keep the tensors that a loader has put there. Raises ValueError for what is no matrix."""
        if self._buffers[PACKED] is self._carrier:
            return
        matrix = self._of_carrier()
        if matrix is not None and matrix is not self._matrix:
            self._hold(matrix)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__.get("_indices", ()):  # as functional_call does
            self._is_exchanged = True
        if name == MARK and isinstance(value, torch.Tensor):
            # No file has it, so a loader that puts one there, such as transformers, has made it up.
            place = self._buffers[MARK].device if value.is_meta else value.device
            value = self._digits.clone().to(place)
        super().__setattr__(name, value)
        is_filled = name == PACKED and isinstance(value, torch.Tensor)
        if is_filled and value is not self._carrier and not is_dynamo_compiling():
            self._of_carrier()

    # Saving and loading.

    def _saved_carriers(self) -> dict[str, torch.Tensor]:
        try:
            matrix = self._weight()
        except UnknownIndices:
            return {PACKED: Unsized.on(self._place)}  # one of its own, as it may be filled
        if matrix.device.type == "meta" or stand_ins(*matrix.operands):
            return {PACKED: Unsized.on(matrix.device)}
        if matrix is self._matrix and self._data is not None and lies_in(matrix, self._data):
            return {PACKED: self._data.detach()}
        from kernlib.families.sparse.packed import packed  # only this needs it

        with torch.inference_mode(False), torch.no_grad(), untransformed():
            return {PACKED: packed(matrix)}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        self._read_share(state_dict, prefix)
        is_saved = prefix + PACKED in state_dict or prefix + EXTRA in state_dict
        if is_saved:
            place = self._place if self._matrix is None else self._matrix.device
            # An empty layer on meta takes what is loaded, as every module does with assign=True.
            assigned = local_metadata.get("assign_to_params_buffers", False) or place.type == "meta"
            local_metadata = {**local_metadata, "assign_to_params_buffers": assigned}
            try:
                self._load_matrix(state_dict, prefix, place, assigned)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'SparseLinear'}: {error}")
                return
        self._load_apart(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if is_saved:
            keys = {prefix + name for name in (PACKED, EXTRA)}
            if prefix + PACKED not in state_dict:
                keys |= {prefix + name for name in self._indices}
            unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        else:
            missing_keys.append(prefix + PACKED + self._share)
            dense = prefix + "weight"
            unexpected_keys[:] = [_DenseKey(k) if k == dense else k for k in unexpected_keys]

    def _load_matrix(
        self, state_dict: dict, prefix: str, place: torch.device, assigned: bool
    ) -> None:
        """Take the matrix in a state_dict, itself or in memory, dtype and place of the layer.
        Raises TypeError and ValueError."""
        dtype = None if assigned else self._dtype
        if prefix + PACKED in state_dict:
            data = state_dict[prefix + PACKED]
            if is_unfilled(data):
                raise ValueError("what is loaded was saved of an empty SparseLinear")
            from kernlib.families.sparse.packed import check_bytes

            check_bytes(data)
            data = data.detach() if assigned else data.detach().to(place, copy=True)
            matrix, data = self._unpacked(data, dtype)
        else:
            matrix, data = self._of_former(state_dict, prefix), None
            if dtype not in (None, matrix.dtype):
                matrix = rounded(matrix, dtype)
            if not assigned:
                matrix = _with_tensors(matrix, [t.to(place, copy=True) for t in matrix.operands])
        self._dtype = matrix.dtype
        self._hold(matrix, None, data)

    def _of_former(self, state_dict: dict, prefix: str) -> SparseMatrix:
        """The matrix in a state_dict of version 0.1: a header, and tensors by their names."""
        header = former_header(state_dict[prefix + EXTRA], "matrix")
        start = prefix + PREFIX
        tensors = {k[len(start) :]: v for k, v in state_dict.items() if k.startswith(start)}
        return self._checked(SparseMatrix.from_state(header, tensors))

    def __getstate__(self) -> dict:
        """Without the matrix, whose tensors are attributes."""
        self._adopt()
        matrix = self._matrix
        described = None if matrix is None else (matrix.layout, matrix.known_nnz())
        gone = {"_seen": None, "_other": None, "_carrier": None, "_data": None}
        state = {**self.__dict__, "_matrix": described, **gone}
        memory = None if matrix is None or self._is_exchanged else memory_of(matrix)
        if memory is not None:  # torch would save it for each tensor that lies in it, or refuse to
            state = {n: value for n, value in state.items() if n not in self._indices}
            state["_joined"] = memory
        return state

    def __setstate__(self, state: dict) -> None:
        """Raises ValueError for tensors that are no matrix."""
        described, digits = state["_matrix"], state.get("_digits")
        # Buffers in a dictionary of its own: copy.copy() of a module shares its, which stay there.
        buffers = dict(state["_buffers"])
        # Pickles of version 0.1 hold the tensors as buffers, another that says dtype and place, and
        # no mark.
        like, _ = buffers.pop("_like", None), buffers.pop(PACKED, None)
        names = state.get("_indices", state.get("_names", ()))
        tensors = {n: buffers.pop(n) for n in names if n in buffers}
        state = {**state, "_indices": (), "_written": None, "_settled": False, "_buffers": buffers}
        tensors.update((n, state.pop(n)) for n in names if n in state)
        memory = state.pop("_joined", None)
        if memory is not None:
            tensors = dict(zip(names, tensors_in(described[0], memory), strict=True))
        state.pop("_names", None)
        mark = buffers.pop(MARK, None)
        nn.Module.__setstate__(self, {**state, "_matrix": None})
        if like is not None:
            self._dtype, self._place = like.dtype, like.device
        if described is None:
            self._become_empty(self._place)
        else:
            layout, nnz = described
            named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
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


def lies_in(matrix: SparseMatrix, data: torch.Tensor) -> bool:
    """Whether the tensors of a matrix are views of one tensor."""
    memory = data.untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() == memory for t in matrix.operands)


def _makes_anew(fn: Callable, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a function for ``Module._apply`` answers tensors without the values of those given,
    as ``to_empty`` does: no matrix to multiply with."""
    if getattr(fn, "__qualname__", "").startswith("Module.to_empty"):
        return True
    return before.is_meta and not after.is_meta


def _with_tensors(matrix: SparseMatrix, tensors: list[torch.Tensor]) -> SparseMatrix:
    """The same matrix in other memory."""
    return counted(SparseMatrix.from_layout(matrix.layout, tuple(tensors)), matrix.known_nnz())

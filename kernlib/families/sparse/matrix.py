"""Compressed matrices: :class:`SparseMatrix`, which holds plain tensors, and what makes them of
checked arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import check_flag
from kernlib.families.sparse.formats import encoding
from kernlib.families.sparse.layout import (
    DTYPES,
    format_of,
    formats,
    layout_text,
    parse_layout,
    untransformed,
    version_of,
)
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.families.sparse.tensors import (
    TURNED,
    Memory,
    State,
    check_place,
    checked_header,
    freeze,
    joined_of,
    loaded,
    mark,
    memory_of,
    placed,
    settle,
    state_of,
    tensors_in,
    thaw,
)
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.tensors import as_backend_device, stand_ins

if TYPE_CHECKING:
    from kernlib.families.sparse.formats.entries import Entries, Triplets

UNPRUNED = 0.9  # a density above what pruning leaves; from 0.93 on no format saves memory
LAID_OUT_BYTES = 256 << 20  # of a dense matrix that is made on the way to a compressed one
SPARSE_LAYOUTS = (
    torch.sparse_csr, torch.sparse_csc, torch.sparse_coo, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip


class SparseMatrix:
    """A matrix W (R, C) in one of the formats "bitmap", "u8", "u4", "u2", "macko" and "dense", or
    with values in fewer bits in "bitmap-int8", "bitmap-fp8" or "bitmap-int4", made by
    :func:`kernlib.sparse.compress`. It does not change, except that :meth:`transpose` keeps what
    it has made. If its tensors are written all the same, products see that. The transpose and
    ``nnz`` are made again after writes that torch counts. Code that writes by other means than
    torch's operations must call ``torch.autograd.graph.increment_version``.

    ``kernlib.run_kernel(SparseMatmul(), w, x)`` and :func:`kernlib.sparse.matmul` multiply with it.
    Copies, pickles and ``torch.save`` hold its tensors without the transpose; :meth:`state` gives
    plain values and tensors to save, :meth:`from_state` checks what was loaded.

    Example:
        >>> w = kl.sparse.compress(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]), "bitmap")
        >>> w.shape, w.dtype, w.device, w.nnz, w.known_nnz(), w.density, w.convert("u8").format
        ((2, 3), torch.float32, device(type='cpu'), 3, 3, 0.5, 'u8')
        >>> w.transpose().to_dense(), w.transpose() is w.known_transpose()
        (tensor([[0., 1.], [2., 0.], [0., 3.]]), True)
        >>> w = w.cuda() if torch.cuda.is_available() else w.to(w.cpu().device)
    """

    __slots__ = (
        "__weakref__", "_addresses", "_back", "_counted", "_device", "_dtype", "_facts", "_form",
        "_format", "_frozen", "_key", "_layout", "_listed", "_nnz", "_operands", "_shape",
        "_transposed", "_turned",
    )  # fmt: skip
    requires_grad = False  # as tensors say; a matrix is a constant

    def __init__(
        self,
        format: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        nnz: int | None = None,
    ):
        """Unchecked, from what a format's ``encode`` returns: ``format``, ``shape`` (R, C),
        ``dtype``, ``tensors`` and ``facts`` by name, ``nnz`` if known;
        :func:`kernlib.sparse.compress` is for users. Raises ValueError for an unknown format,
        KeyError for a missing tensor."""
        codec = format_of(format)
        operands = tuple(placed(tensors[name]) for name in codec.TENSORS)
        if hasattr(codec, "together") and not stand_ins(*operands) and not operands[0].is_meta:
            operands = codec.together(operands, facts, shape)
        _fill(self, layout_text(format, shape, dtype, facts), operands, nnz)
        mark(self)

    @classmethod
    def from_state(
        cls, header: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> SparseMatrix:
        """The matrix whose :meth:`state` is ``header`` and ``tensors``, on the device of these. It
        shares them, but copies those of "u8", "u4" and "u2" into one tensor unless they lie in one.

        Waits for the device: the tensors are checked, so that no product can read beyond their
        memory, whatever bytes they hold. Raises ValueError that names what is missing, unknown or
        wrong, such as another version; TypeError for what is no dict or tensor.

        Example:
            >>> w = kl.sparse.compress(torch.eye(64), "u8")
            >>> header, tensors = w.state()
            >>> header["version"] == w.version, header["facts"] == w.facts, list(w.tensors)
            (True, True, ['data', 'offsets', 'rows'])
            >>> kl.sparse.SparseMatrix.from_state(header, tensors).to_dense().equal(torch.eye(64))
            True
        """
        fields = checked_header(header)
        parts = fields["format"], fields["shape"], DTYPES[fields["dtype"]]
        tensors = loaded(*parts, fields["facts"], tensors)
        return cls(*parts, tensors, fields["facts"], fields["nnz"])

    @classmethod
    def from_layout(cls, layout: str, operands: tuple[torch.Tensor, ...]) -> SparseMatrix:
        """The matrix of a :attr:`layout` and its tensors ``operands``, in order, without checks: in
        2 us. Raises ValueError for a text that is no layout.

        Example:
            >>> w = kl.sparse.compress(torch.eye(64), "u8")
            >>> w.layout, w.form, len(w.operands), len(w.listed), w.nbytes
            ('u8 64x64 float32 parts=1 width=64', 'u8 float32 parts width joined', 3, 2, ...)
            >>> same = kl.sparse.SparseMatrix.from_layout(w.layout, w.operands)
        """
        matrix = cls.__new__(cls)
        _fill(matrix, layout, tuple(operands), None)
        return matrix

    @property
    def format(self) -> str:
        """ "bitmap", "u8", "u4", "u2", "macko", "dense", "bitmap-int8", "bitmap-fp8" or
        "bitmap-int4"."""
        return self._format

    @property
    def shape(self) -> tuple[int, int]:
        """``(R, C)``: output features and input features."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype: float16, bfloat16 or float32."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device

    @property
    def version(self) -> int:
        """The version of what :meth:`state` returns."""
        return version_of(self._format)

    @property
    def layout(self) -> str:
        """Format, shape, dtype and facts as one text: with :attr:`operands` the whole matrix."""
        return self._layout

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the format's order."""
        return self._operands

    @property
    def form(self) -> str:
        """The text for operators of torch.library: the parts of the layout that are no numbers, or
        all of it for a matrix made of foreign tensors."""
        return self._form

    @property
    def listed(self) -> tuple[torch.Tensor, ...]:
        """The tensors that operators take: the :attr:`operands`, or one tensor that holds them, and
        an empty one whose shape says the numbers of the layout, unless :attr:`form` has them."""
        return self._listed

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""
        names = format_of(self._format).TENSORS
        return MappingProxyType(dict(zip(names, self._operands, strict=True)))

    @property
    def facts(self) -> Mapping[str, int]:
        """Numbers that the format knows of the matrix without asking the device."""
        return MappingProxyType(self._facts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self._operands)

    @property
    def nnz(self) -> int:
        """How many entries are not zero, or in fewer bits were not before that. Counted when it is
        first asked for, and again after a write, which waits for the device."""
        count = self.known_nnz()
        if count is None:
            if is_quantised(self):
                count = format_of(self._format).stored(self.tensors)
            elif _is_laid_out(self):
                count = encoding.entries_in(dense_of(self))
            else:
                count = sum(part.bits.numel() for part in _entries(self))
            _count(self, count)
        return count

    def known_nnz(self) -> int | None:
        """``nnz`` if it is known without counting, else None: after a write that torch counts, and
        for tensors of inference mode, to which torch does not count writes."""
        if self._nnz is None or self._device.type == "meta":
            return self._nnz
        state = state_of(self)
        return self._nnz if state is not None and state == self._counted else None

    @property
    def density(self) -> float:
        """The part of all entries that is not zero, 0 of an empty matrix."""
        total = self._shape[0] * self._shape[1]
        return self.nnz / total if total else 0.0

    def to_dense(self) -> torch.Tensor:
        """W (R, C), contiguous, with the bits that were compressed. There are three exceptions: the
        sign of zeros, which only the format "dense" keeps, NaNs in "macko", which has a single one,
        and values in fewer bits, each a code times its scale. Does not wait for the device."""
        if is_dynamo_compiling():
            from kernlib import run

            return run.sparse_operators.dense([*self.listed], self.form)
        if self._device.type == "meta" and not on_gpu(self._device):
            return torch.empty(self._shape, dtype=self._dtype, device="meta")
        self._check_place()
        with untransformed():
            format = format_of(self._format)
            return format.decode(self.tensors, self._facts, self._shape, self._dtype)

    def _write_to(self, dense: torch.Tensor) -> None:
        """Write W into ``dense``, contiguous: in the formats of slices without a copy of W."""
        format = format_of(self._format)
        if not hasattr(format, "decode_to"):
            dense.copy_(self.to_dense())
            return
        self._check_place()
        format.decode_to(dense, self.tensors, self._facts)

    def _check_place(self) -> None:
        if self._device.type == "cuda" and not stand_ins(*self._operands):
            check_place(self, [t.data_ptr() for t in self._operands])

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> SparseMatrix:
        """The matrix on a ``device``: itself if it is there, else a copy, ``non_blocking`` or not.
        Raises TypeError for what is no device, such as a dtype, ValueError for another device."""
        device = as_backend_device(device, "; for another dtype compress to_dense().to(dtype)")
        check_flag("non_blocking", non_blocking)
        if torch.empty(0, dtype=torch.uint8, device=device).device == self._device:
            return self
        moved = self._copies(lambda t: t.to(device, non_blocking=non_blocking))
        copy = SparseMatrix.from_layout(self._layout, moved)
        mark(copy)
        _count(copy, self.known_nnz())
        turned = self.known_transpose() if device.type == "meta" else None
        if turned is not None:  # as kernels of gradients that are listed ahead read it
            turned = SparseMatrix.from_layout(
                turned._layout, tuple(t.to("meta") for t in turned._operands)
            )
            _pair(copy, turned, (state_of(copy), state_of(turned)))
        return copy

    def cuda(self, device: torch.device | int | None = None) -> SparseMatrix:
        """:meth:`to` a CUDA ``device``, the current one by default. Raises what that does."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self) -> SparseMatrix:
        """:meth:`to` the CPU."""
        return self.to("cpu")

    def convert(self, format: str, columns: int = 1) -> SparseMatrix:
        """The same matrix in another format, or with "auto" in the one that is fastest for so many
        vectors (``columns``). Itself if it is in that format. Of values in fewer bits it is the
        matrix that :meth:`to_dense` gives. Raises ValueError for a format that cannot hold it."""
        encoding.check_columns(columns)
        formats().check_format(format)
        if format == self._format:
            return self
        if not _is_laid_out(self):
            entries = by_entries(self, False)
            if format == "auto":
                format = formats().auto_entries(entries, columns)
            return self if format == self._format else of_entries(entries, format, columns)
        dense = dense_of(self)
        if format == "auto":
            format = formats().auto(dense, columns)
        return self if format == self._format else compressed(dense, format)

    def transpose(self) -> SparseMatrix:
        """The transpose (C, R), compressed in the same format if that can hold it. Of values in
        fewer bits it is that of :meth:`to_dense`, in the format "bitmap", since its rows would have
        other scales. Gradients with respect to x multiply by it. It is made once, on the matrix's
        device, for which the caller waits, and kept until torch counts a write to one of the two.
        For tensors of inference mode it is not kept."""
        turned = self.known_transpose()
        if turned is None:
            turned = _turned(self)
            settle(self)
            states = state_of(self), state_of(turned)
            if None not in states:
                _pair(self, turned, states)
        return turned

    def known_transpose(self) -> SparseMatrix | None:
        """The transpose if it is known, and neither matrix has been written since: what
        :meth:`transpose` has made, or the matrix that this one was made from. Else None."""
        other = self._transposed
        if other is None and self._back is not None:
            other = self._back()
        if other is None or is_dynamo_compiling():  # there the operator compares when it runs
            return other
        return other if self._turned == (state_of(self), state_of(other)) else None

    def freeze(self) -> SparseMatrix:
        """Promise that no tensor of the matrix will be written from now on, by anything, and return
        the matrix. Products with it on a GPU may then begin before the previous launch has ended.

        Waits for the device, so that earlier writes of the matrix have ended. After a write that
        torch counts the next product raises RuntimeError. A write that torch does not count
        (through ``.data``, DLPack, a storage, a collective, another kernel or the replay of a
        graph) makes products wrong. :meth:`thaw` takes the promise back. Copies are not frozen.
        Raises CaptureError while a CUDA graph is captured.

        Example:
            >>> w = kl.sparse.compress(torch.eye(64), "u8").freeze()
            >>> w.frozen, w.thaw().frozen
            (True, False)
        """
        freeze(self)
        return self

    def thaw(self) -> SparseMatrix:
        """Take the promise of :meth:`freeze` back, and return the matrix. Products that are
        launched from now on wait for the previous launch, and the matrix may be written. CUDA
        graphs captured before still rely on the promise: capture them again."""
        thaw(self)
        return self

    @property
    def frozen(self) -> bool:
        """Whether :meth:`freeze` has been called, and :meth:`thaw` not since."""
        return self._frozen is not None

    def state(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """A header of plain values, and the tensors by name: what :meth:`from_state` takes. Copies
        of those that are views of one storage, such as those of "u8", "u4" and "u2": torch would
        save it for each, or refuse to. Waits for the device if ``nnz`` has not been counted."""
        copy = torch.Tensor.detach if memory_of(self) is None else torch.clone
        return self._header(), {name: copy(tensor) for name, tensor in self.tensors.items()}

    def _header(self) -> dict:
        return {
            "format": self._format,
            "version": self.version,
            "shape": list(self._shape),
            "dtype": KERNEL_TYPES[self._dtype],
            "nnz": self.nnz,
            "facts": dict(self._facts),
        }

    def __repr__(self) -> str:
        counted = [] if self.known_nnz() is None else [f"density={self.density:.3g}"]
        parts = [str(self._shape), f"format={self._format!r}", f"dtype={self._dtype}", *counted]
        parts += [f"nbytes={self.nbytes}", f"device='{self._device}'"]
        return f"SparseMatrix({', '.join(parts)})"

    def __setattr__(self, name: str, value) -> None:
        raise AttributeError(f"a SparseMatrix does not change: {name} cannot be set; make another")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a SparseMatrix does not change: {name} cannot be deleted")

    def __copy__(self) -> SparseMatrix:
        return self

    def __deepcopy__(self, memo: dict) -> SparseMatrix:
        copies = self._copies(torch.clone)
        copy = SparseMatrix.from_layout(self._layout, copies)
        mark(copy)
        _count(copy, self.known_nnz())
        memo[id(self)] = copy
        return copy

    def _copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors, in one tensor if these are."""
        joined = joined_of(self)
        if joined is None:
            return tuple(map(copy, self._operands))
        return format_of(self._format).split(copy(joined), self._facts, self._shape)

    def __reduce__(self):
        memory = memory_of(self)
        if memory is None:
            return _unpickled, self.state()
        # No copies, which would be gone before another process maps their memory.
        return _unpickled, (self._header(), memory)


def _fill(made: SparseMatrix, layout: str, operands: tuple, nnz: int | None) -> None:
    """Set the fields of a new matrix, whose own ``__setattr__`` refuses that."""
    put = object.__setattr__
    format, shape, dtype, facts = parse_layout(layout)
    put(made, "_layout", layout)
    put(made, "_form", layout)
    put(made, "_listed", operands)
    put(made, "_format", format)
    put(made, "_shape", shape)
    put(made, "_dtype", dtype)
    put(made, "_facts", facts)
    put(made, "_operands", operands)
    put(made, "_device", operands[0].device)
    put(made, "_key", (layout, operands[0].get_device()))
    put(made, "_addresses", None)  # of the tensors when they were last checked
    put(made, "_frozen", None)  # the state at freeze(); None for a matrix that is not frozen
    put(made, "_transposed", None)  # the transpose that was made of this
    put(made, "_back", None)  # a weak reference to the matrix that this is the transpose of
    put(made, "_turned", None)  # the states of this and its transpose when that was made
    put(made, "_nnz", None)
    put(made, "_counted", None)  # the state in which _nnz was counted
    if nnz is not None:
        _count(made, nnz)


def _count(w: SparseMatrix, nnz: int | None) -> None:
    """Note the number of entries of a matrix in its present state; None if it is not known."""
    object.__setattr__(w, "_counted", state_of(w))
    object.__setattr__(w, "_nnz", nnz)


def _pair(w: SparseMatrix, turned: SparseMatrix, states: tuple[State, State]) -> None:
    """Note that two matrices, in these states, are each other's transpose."""
    put = object.__setattr__
    put(turned, "_turned", states[::-1])
    put(turned, "_back", weakref.ref(w))
    put(w, "_turned", states)
    put(w, "_transposed", turned)
    for matrix, pair in ((turned, states), (w, states[::-1])):
        for t in (matrix._operands[0], matrix._listed[0]):  # for programs that hold these alone
            setattr(t, TURNED, pair)


def _is_small(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether a matrix may be laid out densely on the way to something else."""
    return shape[0] * shape[1] * dtype.itemsize <= LAID_OUT_BYTES


def is_quantised(w: SparseMatrix) -> bool:
    """Whether the values of a matrix have fewer bits than its dtype."""
    return w._format in QUANTISED


def _is_laid_out(w: SparseMatrix) -> bool:
    """Whether a matrix is laid out densely, or may be on the way to something else."""
    return w._format == "dense" or _is_small(w._shape, w._dtype)


def dense_of(w: SparseMatrix) -> torch.Tensor:
    """The matrix laid out densely, to be read only: in the dense format it is the stored tensor."""
    if w._format == "dense":
        return w._operands[0]
    if 0 in w._shape:
        return w._operands[0].new_empty(w._shape, dtype=w._dtype)
    return w.to_dense()


def _entries(w: SparseMatrix) -> Iterator[Triplets]:
    """The nonzero entries, some at a time."""
    if w._device.type == "cuda":
        check_place(w, [t.data_ptr() for t in w._operands])
    format = format_of(w._format)
    tensors = dict(zip(format.TENSORS, w._operands, strict=True))
    with untransformed():
        yield from format.read_entries(tensors, w._facts, w._shape, w._dtype)


def rounded(w: SparseMatrix, dtype: torch.dtype) -> SparseMatrix:
    """A matrix in another dtype: in its format, or in the best one where that cannot hold it. Codes
    and scales of fewer bits say the same values in every dtype."""
    format = format_of(w.format)
    if is_quantised(w):
        tensors = {name: t.clone() for name, t in w.tensors.items()}
        return SparseMatrix(w.format, w.shape, dtype, tensors, w.facts, w.nnz)
    if not _is_laid_out(w):
        entries = by_entries(w, False).to(dtype)
        fits = format.measure_entries(entries) is not None
        return of_entries(entries, w.format if fits else "auto", 1)
    dense = dense_of(w).to(dtype)
    return compressed(dense, w.format if format.nbytes(dense) is not None else "auto")


def by_entries(w: SparseMatrix, turned: bool) -> Entries:
    """The entries of a matrix, or of its transpose, by rows."""
    from kernlib.families.sparse.formats.entries import Triplets, of_triplets

    parts, shape = _entries(w), w._shape
    if turned:
        parts, shape = (Triplets(c, r, bits) for r, c, bits in parts), shape[::-1]
    return of_triplets(parts, shape, torch.empty(0, dtype=w._dtype, device=w._device))


def _turned(w: SparseMatrix) -> SparseMatrix:
    format = "bitmap" if is_quantised(w) else w.format
    if not _is_laid_out(w):
        entries = by_entries(w, True)
        fits = format_of(format).measure_entries(entries) is not None
        return of_entries(entries, format if fits else "auto", 1)
    dense = dense_of(w).t()
    fits = format_of(format).nbytes(dense) is not None
    matrix = compressed(dense, format if fits else "auto")
    if not is_quantised(w):  # some of these may be 0 now
        _count(matrix, w.known_nnz())
    return matrix


def _unpickled(header: dict, tensors: dict | torch.Tensor | Memory) -> SparseMatrix:
    if isinstance(tensors, (torch.Tensor, tuple)):  # in which they lie
        fields = checked_header(header)
        kind = fields["format"], fields["shape"], DTYPES[fields["dtype"]]
        operands = tensors_in(layout_text(*kind, fields["facts"]), tensors)
        tensors = dict(zip(format_of(fields["format"]).TENSORS, operands, strict=True))
    return SparseMatrix.from_state(header, tensors)


torch.serialization.add_safe_globals([_unpickled])  # checks all arguments


def is_unpruned(w: SparseMatrix) -> bool:
    """Whether a matrix is kept dense because it has too few zeros, and not only for speed."""
    return w.format == "dense" and w.density > UNPRUNED


def compressed(dense: torch.Tensor, format: str = "auto", columns: int = 1) -> SparseMatrix:
    """:func:`kernlib.sparse.compress` without its warning."""
    if isinstance(dense, torch.Tensor) and dense.layout in SPARSE_LAYOUTS:
        from kernlib.families.sparse.formats import torch_layouts  # only sparse layouts need it

        return of_entries(torch_layouts.of_tensor(dense), format, columns)
    dense = _matrix(dense)
    encoding.check_columns(columns)
    formats().check_format(format)
    if format == "auto":
        format = formats().auto(dense, columns)
    tensors, facts = formats().encode(format, dense, columns)
    return SparseMatrix(format, tuple(dense.shape), dense.dtype, tensors, facts)


def of_entries(entries: Entries, format: str, columns: int) -> SparseMatrix:
    """:func:`compressed` of a matrix by its entries, which have been checked. Small ones are laid
    out densely on a GPU, for the kernels there."""
    encoding.check_columns(columns)
    formats().check_format(format)
    if entries.device.type == "cuda" and _is_small(entries.shape, entries.dtype):
        values = format_of("dense").encode_entries(entries)[0]["values"]
        matrix = compressed(values, format, columns)
        _count(matrix, entries.nnz)
        return matrix
    if format == "auto":
        format = formats().auto_entries(entries, columns)
    tensors, facts = formats().encode(format, entries, columns)
    return SparseMatrix(format, entries.shape, entries.dtype, tensors, facts, entries.nnz)


def _matrix(dense: torch.Tensor) -> torch.Tensor:
    """A dense matrix whose memory holds its values. Raises ValueError and TypeError."""
    dense = encoding.matrix(dense)
    if stand_ins(dense) or torch._C._functorch.is_functorch_wrapped_tensor(dense):
        raise ValueError(
            "dense has no values here to compress (a fake tensor, or one inside a transform of "
            "torch.func): compress outside"
        )
    return dense

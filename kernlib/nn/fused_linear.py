"""Layers that read one x as one product: q, k and v, or gate and up, of a transformer.

Each layer of a group stays a module of its own, where it was and under its name. The rows of all
are one compressed matrix, which the group holds once. Whichever layer is called first computes the
product of all rows; the others take their rows of it.

It must be certain that a layer may take the rows that another one has computed, as foreign code
calls them. The layers know only what torch tells of a tensor:

- An eager product is kept until each layer has taken its rows, or another group is called, in the
  same thread. Rows are taken for the same tensor object x alone, if torch has counted no write to
  x, the matrix and the biases since, if x lies where it lay, and in the same grad mode, stream and
  capture of a CUDA graph. Any other call computes the product anew, all rows of it, and is right.
  x is held weakly.
- In a compiled program nothing is kept. Each layer asks for the whole product, and while Dynamo
  records the program, a request for a product that is in the graph already becomes that product:
  see :mod:`kernlib.nn.merging`.

So a group whose layers get different x, as in cross-attention, is right and takes longer. Only
writes that torch does not count (through ``.data``, by other libraries' kernels) between the calls
of a group's layers go unseen, as with a matrix: increment x's version. To tensors of inference mode
torch counts no write at all, so these share in modules of transformers alone, whose forward does
not write x."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.families.sparse.formats.registry import format_of
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_quantised
from kernlib.families.sparse.stacks import rows_of, stack
from kernlib.nn import traced
from kernlib.nn.indexed import UnknownIndices, version_of
from kernlib.nn.sparse_holding import CARRIER, PACKED
from kernlib.nn.sparse_linear import SparseLinear
from kernlib.nn.sparse_weights import counted
from kernlib.nn.traced import parameters_of
from kernlib.runtime.autograd import is_watched
from kernlib.runtime.tensors import stand_ins

_JOINING = threading.RLock()
_last = threading.local()  # .product: the _Product whose rows not every layer has taken


class Joint(SparseLinear):
    """The rows of a group, without a bias. Its layers save and load their rows themselves."""

    is_plain = False  # whether no layer of the group had a bias when it was made

    def product(
        self, matrix: SparseMatrix, x: torch.Tensor, biases: list[torch.Tensor]
    ) -> torch.Tensor:
        """All rows, (..., in_features) to (..., rows of all layers)."""
        return self._product(matrix, x, torch.cat(biases) if biases else None)

    def _apply(self, fn, recurse: bool = True):
        # Without a matrix it has neither dtype nor device. It takes the layers' once they have
        # rows.
        return self if self._matrix is None else super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        pass

    def _load_from_state_dict(self, *args) -> None:
        pass


class Group:
    """Layers that read one x, in order, and their matrix.

    ``is_trusted``: whether x may be a tensor of inference mode, to which torch counts no writes,
    because the code that calls the layers is known not to write it.
    """

    def __init__(self, layers: Sequence[FusedLinear], joint: Joint, is_trusted: bool):
        self.layers = tuple(layers)
        self.joint = joint
        self.is_trusted = is_trusted

    def settle(self, format: str = "auto", columns: int = 1, is_sole: bool = False) -> None:
        """Make one matrix of the rows that the layers have, if all have some, of one dtype and on
        one device: in a ``format``, with "auto" in that of the layers if it is one. ``is_sole``:
        the layers' matrices are not needed elsewhere, and are freed before their rows are
        compressed anew. If that fails, the layers are empty."""
        with _JOINING:
            for layer in self.layers:
                layer._adopt()
            if all(layer._is_joined for layer in self.layers):
                return
            matrices = [layer._rows() for layer in self.layers]
            joined = _joined(matrices, format, columns, self._empty if is_sole else None)
            if joined is None:
                return
            self.joint._dtype = joined.dtype
            self.joint._hold(joined)
            self.joint.is_plain = all(_bias_of(layer) is None for layer in self.layers)
            for layer in self.layers:
                layer._dtype, layer._is_joined = joined.dtype, True
                layer._become_empty(joined.device)

    def _empty(self, device: torch.device) -> None:
        for layer in self.layers:
            layer._become_empty(device)


def _joined(
    matrices: list[SparseMatrix | None],
    format: str,
    columns: int,
    empty: Callable[[torch.device], None] | None,
) -> SparseMatrix | None:
    """The matrices one below the other, None where one matrix cannot hold them. ``empty`` frees the
    layers' matrices once they are not needed, and the list's with them."""
    present = [m for m in matrices if m is not None]
    kinds = {(m.dtype, m.device) for m in present}
    if len(present) < len(matrices) or len(kinds) > 1 or present[0].device.type == "meta":
        return None
    if stand_ins(*(t for m in present for t in m.operands)):
        return None
    formats = {m.format for m in present}
    if format == "auto" and len(formats) == 1 and columns == 1:
        format = formats.pop()
    with torch.inference_mode(False), torch.no_grad():
        if format in ("auto", present[0].format) and (joint := stack(present)) is not None:
            return joint
        rows = [m.shape[0] for m in present]
        dense = torch.empty(
            (sum(rows), present[0].shape[1]), dtype=present[0].dtype, device=present[0].device
        )
        for part, m in zip(dense.split(rows), present, strict=True):
            m._write_to(part)
        if format != "auto" and format_of(format).nbytes(dense) is None:
            format = "auto"
        counts = [None if is_quantised(m) else m.known_nnz() for m in present]
        nnz = None if None in counts else sum(n for n in counts if n is not None)
        if empty is not None:
            del m
            matrices.clear()
            present.clear()
            empty(dense.device)
        return counted(compressed(dense, format, columns), nnz)


class FusedLinear(SparseLinear):
    """A :class:`SparseLinear` whose weight is some rows of the matrix of a group: the result is a
    view of the group's product, its last dimension apart from others' by the rows of all. Made by
    ``sparsify(model, fuse=...)``.

    ``matrix`` is compressed anew at each access, and so is what ``state_dict`` holds, under the
    names of a SparseLinear's. ``freeze`` and ``thaw`` are those of the group. Loading rows into one
    layer makes another matrix of the group in its next eager call.
    """

    joint: Joint
    _group: Group
    _first = 0
    _is_joined = False  # whether the weight is rows of the group's matrix, and not the layer's own

    # What it holds.

    def _hold(self, *args, **named) -> None:
        super()._hold(*args, **named)
        self._is_joined = False

    def _lacks_matrix(self) -> bool:
        if not self._is_joined:
            return super()._lacks_matrix()
        matrix = self.joint._matrix
        return matrix is None or matrix.device.type == "meta"

    def _put_carrier(self) -> None:
        super()._put_carrier()
        if self._is_joined and not self._lacks_matrix():  # so that its own size is not unknown
            self._carrier = torch.empty(0, dtype=torch.float32, device=self._place)
            self._register_carrier()

    def _is_filled(self) -> bool:
        """Whether a loader, or functional_call, has put another weight there."""
        there = self._buffers[PACKED]
        if is_dynamo_compiling():
            return not hasattr(there, CARRIER) and there.numel() > 0
        return there is not self._carrier and there.numel() > 0

    def _rows(self) -> SparseMatrix | None:
        """The layer's rows as a matrix, None if there are none with values."""
        if not self._is_joined:
            return self._matrix
        matrix = self.joint._matrix
        if matrix is None or matrix.device.type == "meta" or stand_ins(*matrix.operands):
            return None
        with torch.inference_mode(False), torch.no_grad():
            some = rows_of(matrix, self._first, self.out_features)
            if some is not None:
                return some
            rows = self._dense_rows().contiguous()
            fits = format_of(matrix.format).nbytes(rows) is not None
            return compressed(rows, matrix.format if fits else "auto")

    def _dense_rows(self) -> torch.Tensor:
        return self.joint.to_dense()[self._first : self._first + self.out_features]

    def _weight(self) -> SparseMatrix:
        if not self._is_joined or self._is_filled():
            return super()._weight()
        self.joint._weight()  # raises for one that was written, or is empty
        rows = self._rows()
        if rows is None:
            raise UnknownIndices("this FusedLinear has no values: load a state_dict into its model")
        return rows

    def to_dense(self) -> torch.Tensor:
        if not self._is_joined or self._is_filled():
            return super().to_dense()
        return self._dense_rows().clone()

    @property
    def nbytes(self) -> int:
        """Bytes of the group's matrix, the part that the rows are of all rows."""
        if not self._is_joined:
            return super().nbytes
        return self.joint.nbytes * self.out_features // max(1, self.joint.out_features)

    def freeze(self) -> FusedLinear:
        """:meth:`SparseLinear.freeze` of the matrix of the group."""
        if self._is_joined:
            self.joint.freeze()
        else:
            super().freeze()
        return self

    def thaw(self) -> FusedLinear:
        """Take :meth:`freeze` back and return the layer."""
        if self._is_joined:
            self.joint.thaw()
        else:
            super().thaw()
        return self

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        if not any(layer._is_joined for layer in self._group.layers):
            self._group.settle()

    # What it computes.

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of :class:`SparseLinear`."""
        compiling = is_dynamo_compiling()
        if not self._is_joined and not compiling:
            self._group.settle()
        if not self._is_joined or self._is_filled():
            return super().forward(input)
        if type(input) is not torch.Tensor and (result := traced.called(self, input)) is not None:
            return result
        if not compiling:
            return self._shared(input, self._biases(False))
        from kernlib.nn.merging import merged  # this loads Dynamo

        # Each read of a layer's bias costs guards: none is read if no layer had one.
        joint, (bias,) = self.joint, parameters_of(self, ("bias",))
        biases = [] if joint.is_plain and bias is None else self._biases(True)
        return self._part(merged(joint.product(joint._weight(), input, biases)))

    def _part(self, y: torch.Tensor) -> torch.Tensor:
        """The layer's rows of the group's product."""
        return y[..., self._first : self._first + self._sizes[0]]

    def _biases(self, compiling: bool) -> list[torch.Tensor]:
        """The biases of all layers, zeros for a layer without one; none if no layer has one."""
        # A replica of a layer, as nn.DataParallel makes, does not belong to the group.
        layers = [self if x._first == self._first else x for x in self._group.layers]
        if compiling:
            biases = [parameters_of(layer, ("bias",))[0] for layer in layers]
        else:
            biases = [_bias_of(layer) for layer in layers]
        if all(bias is None for bias in biases):
            return []
        return [_vector(layer, b) for layer, b in zip(layers, biases, strict=True)]

    def _shared(self, x: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
        """The layer's rows of the product, which another layer of the group may have computed."""
        last, _last.product = getattr(_last, "product", None), None
        matrix = self.joint._weight()
        state, tensors = self._state(x, matrix, biases), (x, *biases)
        if state is None:
            return self._part(self.joint.product(matrix, x, biases))
        if last is None or not last.is_for(self, tensors, state):
            y = self.joint.product(matrix, x, biases)
            waiting = {layer._first for layer in self._group.layers if layer._is_joined}
            last = _Product(tensors, self._group, state, y, waiting)
        last.waiting.discard(self._first)
        if last.waiting:
            _last.product = last
        return self._part(last.y) if last.parts is None else last.parts[self._first]

    def _state(self, x: torch.Tensor, matrix: SparseMatrix, biases: list) -> tuple | None:
        """All that the product depends on besides x and the group. None where torch does not tell,
        or a tracer or transform must see each call."""
        if type(x) not in _PLAIN or is_watched(x):
            return None
        if x.dtype != matrix.dtype or x.device != matrix.device:
            return None
        # Writes to the matrix have been counted a moment ago, when it was asked for.
        versions = [version_of(x), self.joint._written, *map(version_of, biases)]
        if None in versions and not self._is_trusted():
            return None
        grads = [t.requires_grad for t in (x, *biases)]
        return (
            *versions, *grads, *(t.data_ptr() for t in (x, *biases)), x.shape, x.stride(), matrix,
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _place_of(x),
        )  # fmt: skip

    def _is_trusted(self) -> bool:
        """Whether nothing writes x between the calls of the group's layers, counted or not."""
        return self._group.is_trusted and not any(
            layer._forward_hooks or layer._forward_pre_hooks for layer in self._group.layers
        )

    def extra_repr(self) -> str:
        if not self._is_joined:
            return super().extra_repr()
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        return ", ".join([*parts, f"bias={self.bias is not None}", f"first_row={self._first}"])


_PLAIN = (torch.Tensor, nn.Parameter)


def _bias_of(layer: FusedLinear) -> torch.Tensor | None:
    try:
        return layer._parameters["bias"]
    except KeyError:  # parametrized
        return layer.bias


def _vector(layer: FusedLinear, bias: torch.Tensor | None) -> torch.Tensor:
    """The bias of a layer. Raises ValueError for one that would be that of other rows."""
    if bias is None:
        return torch.zeros(layer.out_features, dtype=layer._dtype, device=layer._place)
    if bias.dim() != 1 or bias.shape[0] != layer.out_features:
        rows = (layer.out_features,)
        raise ValueError(f"bias must have shape {rows}, got {tuple(bias.shape)}")
    return bias


class _Product:
    """The product of a group, and which layers have not taken their rows."""

    def __init__(self, tensors: tuple, group: Group, state: tuple, y: torch.Tensor, waiting: set):
        x, *self.biases = tensors
        self.x = weakref.ref(x)
        self.group, self.state, self.y, self.waiting = group, state, y, waiting
        self.parts = _split(y, group) if y.requires_grad else None
        if self.parts is not None:
            # A gradient may free the graph: layers that are called later compute another product.
            y.grad_fn.register_prehook(lambda _: waiting.clear())

    def is_for(self, layer: FusedLinear, tensors: tuple, state: tuple) -> bool:
        return (
            self.group is layer._group
            and layer._first in self.waiting
            and all(map(is_, (self.x(), *self.biases), tensors))
            and self.state == state
        )


def _split(y: torch.Tensor, group: Group) -> dict[int, torch.Tensor]:
    """The rows of each layer, by its first one. The gradient of all is put together once, where
    that of each slice would be written into zeros of the size of y and added. A layer's result may
    be written in place, which the views of ``split`` refuse. Those of ``unsafe_split`` do not; it
    is safe here as they are apart in memory and nothing keeps y for its gradient."""
    sizes = [layer._sizes[0] for layer in group.layers]
    parts = torch.unsafe_split_with_sizes(y, sizes, -1)
    return {layer._first: part for layer, part in zip(group.layers, parts, strict=True)}


def _place_of(x: torch.Tensor) -> tuple:
    """The stream on which a product of x would run, and the capture that it would be part of."""
    if not x.is_cuda:
        return ()
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    if not torch.cuda.is_current_stream_capturing():
        return (stream,)
    from cuda.bindings import driver

    return stream, int(driver.cuStreamGetCaptureInfo(driver.CUstream(stream))[2])


def fused(
    layers: Sequence[SparseLinear], format: str, columns: int, is_trusted: bool, is_sole: bool
) -> list[FusedLinear]:
    """The layers as a group, which shares their biases and has a matrix of its own if they have
    matrices. ``is_sole``: neither these nor the layers are needed elsewhere; the layers are empty
    then."""
    dtype, device = layers[0]._dtype, layers[0]._place
    rows, cols = sum(layer.out_features for layer in layers), layers[0].in_features
    joint = Joint(cols, rows, False, None, dtype, device)
    members, first = [], 0
    for layer in layers:
        member = FusedLinear(cols, layer.out_features, False, None, dtype, device)
        member.bias, member.joint, member._first = layer.bias, joint, first
        if layer._matrix is not None:
            member._hold(layer._matrix)
            if is_sole:
                layer._become_empty(layer._matrix.device)
        members.append(member.train(layer.training))
        first += layer.out_features
    group = Group(members, joint, is_trusted)
    for member in members:
        member._group = group
    group.settle(format, columns, is_sole)
    return members

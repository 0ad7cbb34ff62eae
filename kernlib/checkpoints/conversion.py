"""Conversion of checkpoints to ones with compressed linear layers, and back to dense ones.

A conversion goes file by file and layer by layer, so that it holds one layer in memory beside what
is mapped. Each file of the result is written under another name and gets its own when it is whole;
a list of those that are done lets an interrupted conversion go on.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch

from kernlib import progress as display
from kernlib.checkpoints.estimate import Layer, estimated, layer_of
from kernlib.checkpoints.files import Checkpoint, fault
from kernlib.checkpoints.modules import Linear, linear_layers, note_of
from kernlib.checkpoints.options import Options
from kernlib.checkpoints.stored import StoredWeight, weights_of
from kernlib.checkpoints.target import VERSION, Target
from kernlib.checkpoints.workers import Worker
from kernlib.checkpoints.writer import KINDS, Shard
from kernlib.families.sparse.formats.encoding import entries_in
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_unpruned
from kernlib.families.sparse.packed import packed, unpacked
from kernlib.families.sparse.prune import magnitude, prune_together
from kernlib.hints.calls import hinted
from kernlib.nn.sparse_weights import counted
from kernlib.runtime.tensors import as_device

METHOD, CONFIG = "kernlib", "quantization_config"
WRITES = 2  # compressed weights of a GPU that wait to be written


class Work(NamedTuple):
    """A conversion: the checkpoint, the weights of each of its files, the linear layers among them
    by their modules' names, and what is to be done. Weights that lie in several files are of the
    first one."""

    checkpoint: Checkpoint
    files: dict[Path, list[StoredWeight]]
    layers: dict[str, Linear]
    options: Options

    def module_of(self, weight: StoredWeight) -> str | None:
        """The name of the layer to compress that a weight is of, if it is: of the head only where
        ``match`` takes it."""
        name = weight.name.removesuffix(".weight")
        layer = self.layers.get(name) if weight.name.endswith(".weight") else None
        if layer is None or (layer.is_head and self.options.match is None):
            return None
        return name if self.options.takes(name) else None

    def stays(self, weight: StoredWeight) -> bool:
        """Whether a weight is packed already, and stays so: nothing else is asked for, or not of
        it."""
        plain = self.options._replace(match=None, fuse=True) == Options()
        return weight.kind == "packed" and (plain or self.module_of(weight) is None)

    def load(self, weight: StoredWeight, device: torch.device) -> torch.Tensor:
        """The weight (out_features, in_features) of a layer to compress, on a device; of others
        what a dense file has, on the CPU."""
        layer = self.layers.get(weight.name.removesuffix(".weight"), Linear())
        is_turned = layer.is_transposed and weight.kind != "packed"  # packed ones lie as layers do
        if self.module_of(weight) is None:
            dense = weight.load(self.checkpoint)
            return dense.t() if layer.is_transposed and not is_turned else dense
        dense = weight.load(self.checkpoint, device)
        return dense.t() if is_turned else dense


@hinted
def plan(
    source: str | Path,
    *,
    density: float | None = None,
    per: str = "matrix",
    format: str = "auto",
    columns: int = 1,
    values: str | None = None,
    match: str | re.Pattern[str] | None = None,
    progress: bool | None = None,
) -> list[Layer]:
    """The layers that :func:`convert` would compress, estimated by some rows of each. Nothing is
    written.

    - ``source``, ``density``, ``per``, ``format``, ``columns``, ``values``, ``match``,
      ``progress``: those of convert.

    Raises what convert raises of the checkpoint and the arguments.

    Example:
        >>> for layer in kl.checkpoints.plan("llama", density=0.5):  # doctest: +SKIP
        ...     print(layer.name, layer.format, layer.nbytes, layer.us)
    """
    checked = Options.checked(
        density=density, per=per, format=format, columns=columns, values=values, match=match
    )
    with Checkpoint(source) as checkpoint:
        work = _work(checkpoint, checked)
        some = [w for weights in work.files.values() for w in weights if work.module_of(w)]
        layers = []
        with display.shown(progress, "reading", len(some)) as bar:
            for weight in some:
                module = weight.name.removesuffix(".weight")
                dense = work.load(weight, torch.device("cpu"))
                layers.append(
                    bar.count(weight.name, lambda m=module, d=dense: estimated(m, d, checked))
                )
        return [layer for layer in layers if layer.format != "dense" or format == "dense"]


@hinted
def convert(
    source: str | Path,
    out: str | Path,
    *,
    density: float | None = None,
    per: str = "matrix",
    format: str = "auto",
    columns: int = 1,
    values: str | None = None,
    match: str | re.Pattern[str] | None = None,
    fuse: bool = True,
    device: torch.device | str | int = "cpu",
    progress: bool | None = None,
) -> list[Layer]:
    """A checkpoint with compressed linear layers in the folder ``out``, and the layers that are.

    - ``source``: a folder or file that :class:`kernlib.checkpoints.Checkpoint` reads: dense weights
      with zeros, masks of ``torch.nn.utils.prune``, bitmask files of compressed-tensors.
    - ``out``: a folder that is empty or does not exist. If it holds an interrupted conversion of
      the same files with the same arguments, this goes on there.
    - ``device``: where weights are compressed: "cuda" is fast, the result the same but for the
      choice of formats, which goes by the GPU's rates.
    - ``progress``: None shows a bar on a terminal, True everywhere, False nowhere.
    - ``density``, ``per``: None compresses weights as they are, a number prunes each by
      :func:`kernlib.sparse.magnitude` first.
    - ``format``, ``columns``, ``values``: as of :func:`kernlib.sparse.compress`.
    - ``match``: which layers, a regular expression found in their names; None takes all but the
      head. Layers are ``nn.Linear`` and ``Conv1D`` of the model that config.json names, if
      transformers is there; else matrices ``NAME.weight`` of numbered blocks. Layers that are
      packed already stay so, unless ``density``, ``format``, ``columns`` or ``values`` is passed.
    - ``fuse``: whether from_pretrained fuses layers that read the same x.

    A compressed layer is a tensor ``NAME.weight_packed`` in place of ``NAME.weight``. Layers with
    too few zeros stay dense. ``config.json`` gets a ``quantization_config``, by which transformers
    loads the result once kernlib is imported; a dict of the tensors loads into a model after
    :func:`kernlib.nn.sparsify`. Files of the tokenizer are copied. In memory is one layer at a
    time, beside what is mapped.

    Raises CheckpointError, a ValueError, that names file and tensor for a checkpoint that is
    missing, damaged, quantised or of another format; FileExistsError for an ``out`` that holds
    something else; ValueError and TypeError for arguments.

    Example:
        >>> layers = kl.checkpoints.convert("llama", "llama-half", density=0.5)  # doctest: +SKIP
    """
    checked = Options.checked(
        density=density, per=per, format=format, columns=columns, values=values, match=match,
        fuse=fuse,
    )  # fmt: skip
    device = as_device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, and torch sees no GPU here: device='cpu' does")
    with Checkpoint(source) as checkpoint:
        work = _work(checkpoint, checked)
        if not any(work.module_of(w) for weights in work.files.values() for w in weights):
            raise fault(checkpoint.path, _no_layers(work))
        with Target(Path(out), work.checkpoint, work.files, checked.text()) as target:
            target.write_all(progress, lambda *job: _compress(work, device, *job))
            layers = target.layers()
            target.end(_with_layers(checkpoint.config, [layer.name for layer in layers], checked))
            return layers


@hinted
def to_dense(source: str | Path, out: str | Path, *, progress: bool | None = None) -> None:
    """A dense checkpoint in the folder ``out`` of one that :func:`convert` made, or of any that
    :class:`kernlib.checkpoints.Checkpoint` reads: masks are applied, and bitmasks laid out.
    ``source``, ``out`` and ``progress`` are those of convert, and so is what this raises.

    Example:
        >>> kl.checkpoints.to_dense("llama-half", "llama-dense")  # doctest: +SKIP
    """
    with Checkpoint(source) as checkpoint:
        work = _work(checkpoint, Options())
        work = work._replace(options=Options(match=re.compile("$^")))  # no layer is compressed
        with Target(Path(out), work.checkpoint, work.files, json.dumps("dense")) as target:
            target.write_all(progress, lambda *job: _lay_out(work, *job))
            config = dict(checkpoint.config or {})
            for key in ("quantization_config", "compression_config", "sparsity_config"):
                config.pop(key, None)
            target.end(config or None)


def _work(checkpoint: Checkpoint, options: Options) -> Work:
    """Raises CheckpointError for tensors that files of safetensors do not hold."""
    weights = weights_of(checkpoint)
    files: dict[Path, list[StoredWeight]] = {}
    for weight in weights.values():
        file = next(iter(weight.parts.values())).file
        if weight.dtype not in KINDS:
            raise fault(file, f"files of safetensors hold no {weight.dtype}", weight.name)
        files.setdefault(file, []).append(weight)
    return Work(checkpoint, files, linear_layers(checkpoint, weights), options)


def _no_layers(work: Work) -> str:
    some = ", ".join(list(work.layers)[:3])
    if work.layers:
        return (
            f"has {len(work.layers)} linear layers ({some}, ...), of which match takes none; "
            f"without match they are all but the head{note_of(work.checkpoint)}"
        )
    count = sum(map(len, work.files.values()))
    return (
        f"has no linear layers that could be compressed among its {count} tensors: those are taken "
        "that are nn.Linear itself or Conv1D in the model that config.json names, and without "
        "transformers or such a model matrices NAME.weight of numbered blocks"
        f"{note_of(work.checkpoint)}"
    )


def _compress(
    work: Work, device: torch.device, weights: list[StoredWeight], shard: Shard, bar
) -> list[Layer]:
    """Write the weights of a file, compressed if they are of layers, and return these."""
    layers: list[Layer] = []

    def tensor_of(weight: StoredWeight, dense: torch.Tensor | None) -> tuple[str, torch.Tensor]:
        """The name and the tensor to write of a weight, which has been loaded unless it stays."""
        module = work.module_of(weight)
        if module is None and dense is not None:
            return weight.name, dense
        if dense is None:
            module = weight.name.removesuffix(".weight")
            data = work.checkpoint.read(weight.parts["packed"].name)
            matrix = unpacked(data)
        else:
            dense, matrix = _compressed(work, weight, dense)
            if matrix is None:
                return weight.name, dense.t() if work.layers[module].is_transposed else dense
            data = packed(matrix)
        facts = matrix.density, matrix.format, matrix.nbytes
        layers.append(layer_of(module, matrix.shape, matrix.dtype, *facts))
        return f"{module}.weight_packed", data

    def load(weight: StoredWeight) -> torch.Tensor | None:
        return None if work.stays(weight) else work.load(weight, device)

    ordered = sorted(weights, key=lambda weight: _rank(work, weight))
    if device.type != "cuda":
        for weight in ordered:
            bar.count(weight.name, lambda w=weight: shard.add(*tensor_of(w, load(w))))
        return layers
    # While the GPU compresses one weight, the next one is read and the two before are written.
    with Worker(device) as reader, Worker(device) as writer:
        ahead, writes = reader.submit(load, ordered[0]), deque()
        for weight, following in zip(ordered, [*ordered[1:], None], strict=True):
            dense = ahead.result()
            if dense is not None and dense.is_cuda:  # in memory of the reader's stream
                dense.record_stream(torch.cuda.current_stream(dense.device))
            if following is not None:
                ahead = reader.submit(load, following)
            result = bar.count(weight.name, lambda w=weight, d=dense: tensor_of(w, d))
            if len(writes) == WRITES:
                writes.popleft().result()
            writes.append(writer.submit(shard.add, *result))
        for write in writes:
            write.result()
    return layers


def _compressed(
    work: Work, weight: StoredWeight, dense: torch.Tensor
) -> tuple[torch.Tensor, SparseMatrix | None]:
    """The weight of a layer, pruned, and compressed; None where that is not faster."""
    options = work.options
    if options.density is not None and options.per == "matrix" and dense.is_cuda:
        # In fewer passes than magnitude, which never waits for the device. Nobody else has this
        # tensor, where one on the CPU is mapped from the file.
        prune_together([dense], round(float(options.density) * dense.numel()))
    elif options.density is not None:
        dense = magnitude(dense, options.density, options.per)
    try:
        matrix = compressed(dense, options.format, options.columns)
        matrix = counted(matrix, entries_in(dense))
    except ValueError as error:
        file = next(iter(weight.parts.values())).file
        raise fault(file, str(error), weight.name) from error
    is_dense = matrix.format == "dense" and options.format != "dense"
    is_kept = is_dense or (options.density is None and is_unpruned(matrix))
    return dense, None if is_kept else matrix


def _rank(work: Work, weight: StoredWeight) -> tuple[bool, int]:
    """The order in a file: layers first, whose packed tensors are of whole 64 bytes, then others by
    the bytes of their numbers. So all of them lie where they can be used as they lie."""
    is_packed = work.module_of(weight) is not None or work.stays(weight)
    return not is_packed, -weight.dtype.itemsize


def _lay_out(work: Work, weights: list[StoredWeight], shard: Shard, bar) -> list[Layer]:
    """Write the weights of a file as dense tensors: no layer is compressed."""
    for weight in sorted(weights, key=lambda weight: -weight.dtype.itemsize):
        bar.count(
            weight.name, lambda w=weight: shard.add(w.name, work.load(w, torch.device("cpu")))
        )
    return []


def _with_layers(config: dict | None, modules: list[str], options: Options) -> dict | None:
    """config.json of a result with these layers."""
    if config is None:
        return None
    rest = {k: v for k, v in config.items() if k not in ("compression_config", CONFIG)}
    if not modules:
        return rest
    entry = {"quant_method": METHOD, "version": VERSION, "modules": modules, "fuse": options.fuse}
    return {**rest, CONFIG: entry}

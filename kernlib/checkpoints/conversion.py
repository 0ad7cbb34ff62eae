"""Checkpoints with compressed linear layers, made of those that people have, and dense ones again.

A conversion goes file by file and layer by layer, so that it holds one layer in memory beside what
is mapped. Each file of the result is written under another name and gets its own when it is whole;
a list of those that are done lets an interrupted conversion go on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from kernlib import progress as display
from kernlib.calls import hinted
from kernlib.checkpoints.estimate import Layer, estimated, layer_of
from kernlib.checkpoints.files import Checkpoint, CheckpointError, fault
from kernlib.checkpoints.modules import linear_layers
from kernlib.checkpoints.options import Options
from kernlib.checkpoints.stored import StoredWeight, weights_of
from kernlib.checkpoints.writer import Shard, write_text
from kernlib.families.sparse.formats.encoding import entries_in
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_unpruned
from kernlib.families.sparse.packed import packed
from kernlib.families.sparse.prune import magnitude
from kernlib.nn.sparse_weights import counted
from kernlib.runtime.tensors import as_device

VERSION = 1  # of the entry in config.json
METHOD = "kernlib"
STATE = "kernlib-convert.json"  # in a folder whose conversion has not ended
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}  # which transformers asks for
# What a folder holds besides weights that the result needs too: the tokenizer and the like.
ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".spm")
LARGEST = 1 << 26  # bytes of such a file


class Work(NamedTuple):
    """A conversion: the checkpoint, its weights in the order of the files, and which of them are
    linear layers, by their modules' names, transposed or not."""

    checkpoint: Checkpoint
    weights: dict[str, StoredWeight]
    layers: dict[str, bool]
    options: Options

    def files(self) -> dict[Path, list[StoredWeight]]:
        """The weights of each file; those that lie in several are of the first one."""
        by_file: dict[Path, list[StoredWeight]] = {}
        for weight in self.weights.values():
            by_file.setdefault(next(iter(weight.parts.values())).file, []).append(weight)
        return by_file

    def module_of(self, weight: StoredWeight) -> str | None:
        """The name of the layer to compress that a weight is of, if it is."""
        name = weight.name.removesuffix(".weight")
        is_layer = weight.name.endswith(".weight") and name in self.layers
        return name if is_layer and self.options.takes(name) else None

    def load(self, weight: StoredWeight, device: torch.device) -> torch.Tensor:
        """The weight (out_features, in_features) of a layer to compress, on a device; of others
        what the file has, on the CPU."""
        module = self.module_of(weight)
        if module is None:
            return weight.load(self.checkpoint)
        dense = weight.load(self.checkpoint, device)
        return dense.t() if self.layers[module] else dense


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
        some = [weight for weight in work.weights.values() if work.module_of(weight)]
        with display.shown(progress, "reading", len(some)) as bar:
            return [
                bar.count(
                    weight.name,
                    lambda weight=weight: estimated(
                        work.module_of(weight), work.load(weight, torch.device("cpu")), checked
                    ),
                )
                for weight in some
            ]


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
      transformers is there; else matrices ``NAME.weight`` of numbered blocks.
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
    with Checkpoint(source) as checkpoint:
        work = _work(checkpoint, checked)
        if not any(map(work.module_of, work.weights.values())):
            raise fault(checkpoint.path, _no_layers(work))
        target = _Target(Path(out), work, checked.text())
        total = sum(len(weights) for weights in work.files().values())
        with display.shown(progress, "converting", total) as bar:
            for file, weights in work.files().items():
                target.write(file, lambda shard, w=weights: _compress(work, w, shard, device, bar))
        layers = target.layers()
        target.close(_config_of(checkpoint.config, [layer.name for layer in layers], checked))
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
        target = _Target(Path(out), work, json.dumps("dense"))
        total = sum(len(weights) for weights in work.files().values())
        with display.shown(progress, "converting", total) as bar:
            for file, weights in work.files().items():
                target.write(file, lambda shard, w=weights: _lay_out(work, w, shard, bar))
        config = dict(checkpoint.config or {})
        for key in ("quantization_config", "compression_config", "sparsity_config"):
            config.pop(key, None)
        target.close(config or None)


def _work(checkpoint: Checkpoint, options: Options) -> Work:
    weights = weights_of(checkpoint)
    return Work(checkpoint, weights, linear_layers(checkpoint, weights), options)


def _no_layers(work: Work) -> str:
    some = ", ".join(list(work.layers)[:3]) or "none"
    if work.layers:
        return f"match takes none of its {len(work.layers)} linear layers ({some}, ...)"
    return (
        f"has no linear layers that could be compressed among its {len(work.weights)} tensors: "
        "those of numbered blocks are, and with a config.json all of its model"
    )


def _compress(work: Work, weights: list[StoredWeight], shard: Shard, device, bar) -> list[Layer]:
    """Write the weights of a file, compressed if they are of layers."""
    layers: list[Layer] = []

    def made(weight: StoredWeight, dense: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What is to be written of a weight, and its name."""
        module = work.module_of(weight)
        if module is None:
            return weight.name, dense
        dense, matrix = _compressed(work, weight, dense)
        if matrix is None:
            return weight.name, dense.t() if work.layers[module] else dense
        facts = matrix.density, matrix.format, matrix.nbytes
        layers.append(layer_of(module, matrix.shape, matrix.dtype, *facts))
        return f"{module}.weight_packed", packed(matrix)

    def load(weight: StoredWeight) -> torch.Tensor:
        return work.load(weight, device)

    ordered = [*_ordered(work, weights)]
    if device.type != "cuda":
        for weight in ordered:
            bar.count(weight.name, lambda w=weight: shard.add(*made(w, load(w))))
        return layers
    # While the GPU compresses one weight, the next one is read and the one before is written.
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        ahead = [reader.submit(load, weight) for weight in ordered[:1]]
        written = writer.submit(int)
        for number, weight in enumerate(ordered):
            dense = ahead.pop().result()
            ahead += [reader.submit(load, weight) for weight in ordered[number + 1 :][:1]]
            result = bar.count(weight.name, lambda w=weight, d=dense: made(w, d))
            written.result()
            written = writer.submit(shard.add, *result)
        written.result()
    return layers


def _compressed(
    work: Work, weight: StoredWeight, dense: torch.Tensor
) -> tuple[torch.Tensor, SparseMatrix | None]:
    """The weight of a layer, pruned, and compressed; None where that is not faster."""
    options = work.options
    if options.density is not None:
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


def _ordered(work: Work, weights: list[StoredWeight]) -> Iterator[StoredWeight]:
    """Layers first, whose packed tensors are of whole 64 bytes, then others by the bytes of their
    numbers: so that all of them lie where they can be used as they lie."""

    def rank(weight: StoredWeight) -> tuple[bool, int]:
        return work.module_of(weight) is None, -weight.dtype.itemsize

    yield from sorted(weights, key=rank)


def _lay_out(work: Work, weights: list[StoredWeight], shard: Shard, bar) -> list[Layer]:
    """Write the weights of a file as dense tensors."""

    def write(weight: StoredWeight) -> None:
        dense = weight.load(work.checkpoint)
        name = weight.name.removesuffix(".weight")
        if weight.kind == "packed" and work.layers.get(name, False):
            dense = dense.t()
        shard.add(weight.name, dense)

    for weight in sorted(weights, key=lambda weight: -weight.dtype.itemsize):
        bar.count(weight.name, lambda weight=weight: write(weight))
    return []


def _config_of(config: dict | None, modules: list[str], options: Options) -> dict | None:
    """config.json of the result."""
    if config is None:
        return None
    entry = {"quant_method": METHOD, "version": VERSION, "modules": modules, "fuse": options.fuse}
    others = {k: v for k, v in config.items() if k != "compression_config"}
    return {**others, "quantization_config": entry}


class _Target:
    """The folder of a result, and which files of it are done."""

    def __init__(self, folder: Path, work: Work, text: str):
        self._folder, self._work = folder, work
        self._plan = {"version": VERSION, "options": text, "source": _identity(work.checkpoint)}
        self._done: dict[str, list] = {}
        self._sizes: dict[str, int] = {}
        if folder.exists():
            self._go_on()
        folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def _go_on(self) -> None:
        """Take what an interrupted conversion has done. Raises FileExistsError for another folder,
        and for a file."""
        if not self._folder.is_dir():
            raise FileExistsError(f"out {self._folder} is a file: pass a folder")
        state = self._folder / STATE
        if not state.exists():
            if any(self._folder.iterdir()):
                raise FileExistsError(
                    f"out {self._folder} is not empty, and holds no interrupted conversion: pass "
                    "an empty folder, or one that does not exist"
                )
            return
        try:
            saved = json.loads(state.read_text(encoding="utf-8"))
            plan, done = saved["plan"], dict(saved["done"])
        except (ValueError, KeyError, TypeError):
            raise fault(state, "is damaged: remove the folder, and convert anew") from None
        if plan != self._plan:
            raise FileExistsError(
                f"out {self._folder} holds an interrupted conversion of other files or with other "
                "arguments: repeat that, or pass another folder"
            )
        # A machine that lost power may have kept a name without all of its file.
        self._done = {n: part for n, part in done.items() if _size_of(self._folder / n) == part[0]}

    def _save(self) -> None:
        text = json.dumps({"plan": self._plan, "done": self._done})
        write_text(self._folder / STATE, text)

    def write(self, file: Path, write) -> None:
        """Have ``write(shard)`` write the file of the result that a file of the source becomes,
        unless that is done."""
        name = f"{_stem_of(file)}.safetensors"
        if name in self._done:
            return
        weights = self._work.files()[file]
        names = [n for w in weights for n in (w.name, f"{w.name}_packed")]
        dims = max(len(weight.shape) for weight in weights)
        shard = Shard(self._folder / name, names, max(1, dims), METADATA)
        try:
            layers = write(shard)
            shard.close()
        except BaseException:
            shard.drop()
            raise
        rows = [
            [*layer._replace(dtype=str(layer.dtype).removeprefix("torch."))] for layer in layers
        ]
        self._done[name] = [_size_of(self._folder / name), rows]
        self._save()

    def layers(self) -> list[Layer]:
        """Those of all files, in order."""
        rows = [row for name in sorted(self._done) for row in self._done[name][1]]
        layers = (Layer(*row) for row in rows)
        return [
            layer._replace(shape=tuple(layer.shape), dtype=getattr(torch, layer.dtype))
            for layer in layers
        ]

    def close(self, config: dict | None) -> None:
        """Write the index and config.json, copy what else the model needs, and end it."""
        if len(self._done) > 1 or not (self._folder / "model.safetensors").exists():
            self._write_index()
        source = self._work.checkpoint
        for file in sorted(source.folder.iterdir()) if source.path == source.folder else ():
            if _is_needed(file):
                shutil.copyfile(file, self._folder / file.name)
        if config is not None:
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            write_text(self._folder / "config.json", text)
        (self._folder / STATE).unlink()

    def _write_index(self) -> None:
        places, total = {}, 0
        for name in sorted(self._done):
            with Checkpoint(self._folder / name) as shard:
                places.update(dict.fromkeys(shard.entries, name))
                total += sum(entry.nbytes for entry in shard.entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(self._folder / INDEX, json.dumps(index, indent=2) + "\n")


def _identity(checkpoint: Checkpoint) -> list:
    """What tells the files of a source from others: names, sizes and times."""
    stats = ((file, file.stat()) for file in checkpoint.files)
    return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _size_of(file: Path) -> int:
    """Bytes of a file, -1 without one."""
    return file.stat().st_size if file.exists() else -1


def _stem_of(file: Path) -> str:
    """The name of the result's file: that of the source's, in transformers' words for it."""
    stem = file.name[: -len(file.suffix)]
    return re.sub(r"^pytorch_model", "model", stem)


def _is_needed(file: Path) -> bool:
    """Whether a file beside the weights belongs to a model."""
    if not file.is_file() or file.name.startswith(".") or file.name.endswith(".index.json"):
        return False
    if file.name in ("config.json", STATE):
        return False
    return file.suffix in ENDINGS and file.stat().st_size <= LARGEST


__all__ = ["CheckpointError", "Layer", "convert", "plan", "to_dense"]

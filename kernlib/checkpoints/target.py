"""The folder of a converted checkpoint: its finished files, and its files besides weights."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kernlib import progress as display
from kernlib.checkpoints.estimate import Layer
from kernlib.checkpoints.files import Checkpoint, fault
from kernlib.checkpoints.stored import StoredWeight
from kernlib.checkpoints.writer import PART, Shard, write_text

VERSION = 1  # of the list of what is done, and of the entry in config.json
STATE = "kernlib-convert.json"  # the list, in a folder whose conversion has not ended
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}  # transformers asks for it
# What a folder holds besides weights that the result needs too: the tokenizer and the like.
ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".spm")
LARGEST = 1 << 26  # bytes of such a file


class Target:
    """The folder of a result, for one process at a time, in a ``with`` block.

    ``files`` are the source's with the weights of each, ``text`` says what is done to them: an
    interrupted conversion goes on if both are the same. Raises FileExistsError for a folder that
    holds something else, or that another process converts to.
    """

    def __init__(
        self,
        folder: Path,
        source: Checkpoint,
        files: Mapping[Path, list[StoredWeight]],
        text: str,
    ):
        self._folder, self._source, self._files = folder, source, files
        self._names = _names_of(list(files))
        self._plan = {"version": VERSION, "options": text, "source": _identity(source)}
        self._done: dict[str, list] = {}  # bytes and layers of each file, by its name
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"out {folder} is a file: pass a folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._go_on()
            self._save()
        except BlockingIOError:
            os.close(self._lock)
            raise FileExistsError(
                f"another process converts to out {folder}: wait for it"
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _go_on(self) -> None:
        """Take what an interrupted conversion has done."""
        state = self._folder / STATE
        if not state.exists():
            if {file.name for file in self._folder.iterdir()} - {STATE + PART}:
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

    def write_all(
        self, progress: bool | None, write: Callable[[list[StoredWeight], Shard, object], list]
    ) -> None:
        """Write the files that are not done: ``write(weights, shard, bar)`` what a file of the
        source becomes, and answers the layers that it has compressed."""
        pending = {file: name for file, name in self._names.items() if name not in self._done}
        total = sum(len(self._files[file]) for file in pending)
        with display.shown(progress, "converting", total) as bar:
            for file, name in pending.items():
                weights = self._files[file]
                # The longer of the two names that a weight may get.
                names = [f"{weight.name}_packed" for weight in weights]
                dims = max(1, *(len(weight.shape) for weight in weights))
                shard = Shard(self._folder / name, names, dims, METADATA)
                try:
                    layers = write(weights, shard, bar)
                    shard.close()
                except BaseException:
                    shard.drop()
                    raise
                self._done[name] = [_size_of(self._folder / name), [*map(_row_of, layers)]]
                self._save()

    def layers(self) -> list[Layer]:
        """The layers of all files, in order."""
        rows = [row for name in sorted(self._done) for row in self._done[name][1]]
        layers = (Layer(*row) for row in rows)
        return [
            layer._replace(shape=tuple(layer.shape), dtype=getattr(torch, layer.dtype))
            for layer in layers
        ]

    def end(self, config: dict | None) -> None:
        """Write the index and config.json, copy what else the model needs, and end it."""
        if len(self._done) > 1 or not (self._folder / "model.safetensors").exists():
            self._write_index()
        source = self._source
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


def _row_of(layer: Layer) -> list:
    """A layer as the list has it."""
    return [*layer._replace(dtype=str(layer.dtype).removeprefix("torch."))]


def _names_of(files: list[Path]) -> dict[Path, str]:
    """The names of the result's files: those of the source's, in transformers' words for them, with
    numbers where two from different folders have one."""
    names: dict[Path, str] = {}
    for file in files:
        stem = re.sub(r"^pytorch_model", "model", file.name[: -len(file.suffix)])
        name, number = f"{stem}.safetensors", 2
        while name in names.values():
            name, number = f"{stem}-{number}.safetensors", number + 1
        names[file] = name
    return names


def _identity(checkpoint: Checkpoint) -> list:
    """The identity of a source's files: names, sizes and times."""
    stats = ((file, file.stat()) for file in checkpoint.files)
    return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _size_of(file: Path) -> int:
    """Bytes of a file, -1 without one."""
    return file.stat().st_size if file.exists() else -1


def _is_needed(file: Path) -> bool:
    """Whether a file beside the weights belongs to a model."""
    if not file.is_file() or file.name.startswith(".") or file.name.endswith(".index.json"):
        return False
    if file.name in ("config.json", STATE):
        return False
    return file.suffix in ENDINGS and file.stat().st_size <= LARGEST

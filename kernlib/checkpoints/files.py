"""Files of a checkpoint: which tensors are where, read one at a time.

:class:`Checkpoint` opens a folder as transformers writes it, or one file of safetensors or of
``torch.save``. Opening reads headers alone, so that what is damaged, cut or of another kind is said
before anything is computed. Headers of safetensors are read by that library, files of torch by
``torch.load(weights_only=True)``, which runs no code of theirs.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from operator import gt
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from kernlib.descriptors.base import shown
from kernlib.runtime.tensors import as_device

# In the order in which transformers looks for them.
SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_SHARDED = "pytorch_model.bin", "pytorch_model.bin.index.json"
TORCH_ENDINGS = (".bin", ".pt", ".pth")
NESTED = ("state_dict", "model")  # where training programs put a model's tensors
LFS_POINTER = b"version https://git-lfs"
ZIP = b"PK\x03\x04"
BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began before torch 1.6
LARGEST = 2**63 - 1  # size of a dimension

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2},
}


class CheckpointError(ValueError):
    """A file that is missing, damaged or of another format. The message names file and tensor, and
    says what would do."""


def fault(file: Path, text: str, tensor: str | None = None) -> CheckpointError:
    """The error of a file, or of a tensor in it."""
    place = f"{file}" if tensor is None else f"{file}, tensor {shown(tensor)}"
    return CheckpointError(f"{place}: {text}")


class Entry(NamedTuple):
    """A tensor of a file, as the file's header has it."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a checkpoint by name, of which :meth:`read` reads one.

    ``path`` is a folder or a file. Of a folder the first of these is read, as transformers does:
    ``model.safetensors``, the shards that ``model.safetensors.index.json`` lists,
    ``pytorch_model.bin``, those of ``pytorch_model.bin.index.json``. A file ends in
    ``.safetensors``, or in ``.bin``, ``.pt`` or ``.pth`` if ``torch.save`` wrote it: a dict of
    tensors, or one with such a dict under "state_dict" or "model".

    - ``path``: as passed; ``folder``: of the files.
    - ``files``: in order of their names.
    - ``entries``: an :class:`Entry` for each tensor by its name, in order of files, then of their
      places in it.
    - ``config``: what ``config.json`` beside the files holds, None without one.

    Raises CheckpointError for what is missing, damaged or of another format, which names the file
    and, where there is one, the tensor; ImportError without the library safetensors if a file is of
    that.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(4, 2).state_dict(), f"{folder}/linear.pt")
        ...     checkpoint = kl.checkpoints.Checkpoint(f"{folder}/linear.pt")
        ...     weight, says = checkpoint.read("weight"), checkpoint.metadata(checkpoint.files[0])
        ...     checkpoint.close()
        >>> list(checkpoint.entries), weight.shape, says
        (['weight', 'bias'], torch.Size([2, 4]), {})
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        listed: dict[Path, set[str]] = {}  # file to the tensors that an index has in it
        if self.path.is_dir():
            self.folder = self.path
            listed = _files_of(self.path)
        elif self.path.is_file():
            self.folder = self.path.parent
            listed = {self.path: set()}
        else:
            raise fault(self.path, "there is no such file or folder")
        self.config = _config_of(self.folder)
        self.files = tuple(sorted(listed))
        self.entries: dict[str, Entry] = {}
        self._readers: dict[Path, _Safetensors | _TorchFile] = {}
        self._closed = False
        for file in self.files:
            self._readers[file] = reader = _reader_of(file)
            _add(self.entries, reader.entries())
            for name in sorted(listed[file] - reader.entries().keys()):
                text = "is not in this file, in which the index of the folder has it: the file is"
                raise fault(file, f"{text} of another checkpoint or of another version", name)
        if not self.entries:
            raise fault(self.path, "holds no tensors")

    def read(self, name: str, device: torch.device | str | int = "cpu") -> torch.Tensor:
        """The tensor ``name`` on ``device``, in the dtype of the file.

        On the CPU it is memory-mapped where the file permits: its pages are read when they are
        used, and another :meth:`read` shares its memory, so do not write to it. Raises
        CheckpointError for a name that no file has, for a damaged tensor and once closed.
        """
        device = as_device(device)
        self._check_open()
        if name not in self.entries:
            raise fault(self.path, f"has no such tensor among its {len(self)}", name)
        return self._readers[self.entries[name].file].read(name, device)

    def metadata(self, file: str | Path) -> dict[str, str]:
        """What the header of one of ``files`` says besides its tensors; {} of a file of torch."""
        if Path(file) not in self._readers:
            raise fault(self.path, f"has no file {file}: pass one of its .files")
        self._check_open()
        return self._readers[Path(file)].metadata()

    def close(self) -> None:
        """Let go of the files. Tensors that have been read stay usable."""
        self._closed = True
        for reader in self._readers.values():
            reader.close()

    def _check_open(self) -> None:
        if self._closed:
            raise fault(self.path, "is closed: read before close(), or inside of the with block")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}: {len(self)} tensors in {len(self.files)} files)"


class _Safetensors:
    """A file of safetensors, whose library checks that tensors fill the file without holes."""

    def __init__(self, file: Path):
        self.file = file
        self._handles: dict[str, object] = {}
        handle = self._handle("cpu")
        self._entries = {name: self._entry(handle, name) for name in handle.offset_keys()}

    def _handle(self, device: str):
        if device not in self._handles:
            library = safetensors_library()
            try:
                opened = library.safe_open(str(self.file), framework="pt", device=device)
            except (library.SafetensorError, OSError) as error:
                text = f"its header cannot be read ({_short(error)}): the file is cut, damaged or"
                raise fault(self.file, f"{text} no safetensors file; fetch it again") from error
            self._handles[device] = opened
        return self._handles[device]

    def _entry(self, handle, name: str) -> Entry:
        part = handle.get_slice(name)
        kind, shape = part.get_dtype(), tuple(part.get_shape())
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise fault(self.file, f"has the dtype {kind}, which torch does not have", name)
        if any(size > LARGEST for size in shape):
            raise fault(self.file, f"has the shape {shape}, too large for torch", name)
        if dtype == torch.float4_e2m1fn_x2:  # torch counts pairs
            if not shape or shape[-1] % 2:
                text = f"has the shape {shape}, in which torch has no pairs of 4-bit values"
                raise fault(self.file, text, name)
            shape = (*shape[:-1], shape[-1] // 2)
        return Entry(name, self.file, dtype, shape)

    def entries(self) -> dict[str, Entry]:
        return self._entries

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        direct = device.type == "cuda"
        handle = self._handle(str(device) if direct else "cpu")
        try:
            tensor = handle.get_tensor(name)
        except (safetensors_library().SafetensorError, TypeError) as error:
            raise fault(self.file, f"cannot be read ({_short(error)})", name) from error
        return tensor if direct else tensor.to(device)

    def metadata(self) -> dict[str, str]:
        return dict(self._handle("cpu").metadata() or {})

    def close(self) -> None:
        self._handles.clear()


class _TorchFile:
    """A file of torch.save, whose pickle is read whole and whose tensors are mapped."""

    def __init__(self, file: Path):
        self.file = file
        self._tensors = dict(self._checked(_tensors_in(file, _loaded(file))))
        if _start_of(file).startswith(ZIP):
            _check_records(file, self._tensors.values())

    def _checked(self, tensors: Mapping[str, object]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise fault(
                    self.file, f"has a tensor under {shown(name)}, where a name must be a str"
                )
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise fault(self.file, f"is a {type(tensor).__name__}, no plain tensor", name)
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
                kind = tensor.dtype if tensor.is_quantized else tensor.layout
                raise fault(self.file, f"must be a dense tensor, and is one of {kind}", name)
            if tensor.device.type != "cpu":
                raise fault(self.file, "was saved on meta, without its values", name)
            if _end(tensor) > tensor.untyped_storage().nbytes():
                raise fault(self.file, "goes beyond its data: the file is cut or damaged", name)
            yield name, tensor.detach()

    def entries(self) -> dict[str, Entry]:
        return {
            name: Entry(name, self.file, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        return self._tensors[name].to(device)

    def metadata(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self._tensors.clear()


def safetensors_library():
    """The library, imported when it is first used. Raises ImportError that says how to install it,
    also for a version before 0.6, which does not say in which order tensors lie."""
    text = "reading .safetensors files needs the library safetensors, 0.6 or later"
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(f"{text}: pip install safetensors") from error
    if not hasattr(safetensors.safe_open, "offset_keys"):
        present = f"this is {safetensors.__version__}"
        raise ImportError(f"{text}, and {present}: pip install --upgrade safetensors")
    return safetensors


def _reader_of(file: Path) -> _Safetensors | _TorchFile:
    _check_content(file)
    if file.suffix == ".safetensors":
        return _Safetensors(file)
    if file.suffix in TORCH_ENDINGS:
        return _TorchFile(file)
    if file.name.endswith(".index.json"):
        raise fault(file, "is the index of a checkpoint: pass its folder")
    raise fault(file, "must end in .safetensors, .bin, .pt or .pth")


def _files_of(folder: Path) -> dict[Path, set[str]]:
    """The files of a folder, each with the tensors that an index has in it."""
    for single, sharded in ((SINGLE, SHARDED), (TORCH_SINGLE, TORCH_SHARDED)):
        if (folder / single).is_file():
            return {folder / single: set()}
        if (folder / sharded).is_file():
            return _shards_of(folder / sharded)
    text = f"holds no checkpoint: neither {SINGLE} nor {SHARDED}, {TORCH_SINGLE}, {TORCH_SHARDED}"
    endings = (".safetensors", *TORCH_ENDINGS)
    files = sorted(path.name for path in folder.iterdir() if path.suffix in endings)
    if files:
        text += f". A file of another name is passed itself, such as {folder / files[0]}"
    raise fault(folder, text)


def _shards_of(index: Path) -> dict[Path, set[str]]:
    places = _json_of(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise fault(index, "has no weight_map, which says for each tensor the file that holds it")
    shards: dict[Path, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str):
            raise fault(
                index, f"weight_map has {shown(name)} where the name of a file is due", tensor
            )
        inner = PurePosixPath(name)
        if inner.is_absolute() or ".." in inner.parts:
            raise fault(index, f"names the file {shown(name)}, which is not in its folder", tensor)
        if inner.suffix not in (".safetensors", *TORCH_ENDINGS):
            raise fault(index, f"names the file {shown(name)}, which is no file of tensors", tensor)
        shards.setdefault(index.parent / name, set()).add(tensor)
    for file, tensors in shards.items():
        if not _is_file(file):
            text = f"names the file {shown(file.name)}, which is missing: fetch it"
            raise fault(index, text, min(tensors))
    return shards


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of a name that is too long
        return False


def _config_of(folder: Path) -> dict | None:
    file = folder / "config.json"
    return _json_of(file) if file.is_file() else None


def _json_of(file: Path) -> dict:
    _check_content(file)
    try:
        value = json.loads(file.read_bytes())
    except (RecursionError, ValueError) as error:
        raise fault(file, f"is no JSON ({_short(error)})") from error
    if not isinstance(value, dict):
        raise fault(file, f"must hold a JSON object, and holds a {type(value).__name__}")
    return value


def _check_content(file: Path) -> None:
    """Raises CheckpointError for a file that cannot be read, is empty or stands for another."""
    start = _start_of(file)
    if not start:
        raise fault(file, "is empty: its download or copy was cut; fetch it again")
    if start.startswith(LFS_POINTER):
        text = "is a pointer of Git LFS, not the file: `git lfs pull` in its repository fetches it"
        raise fault(file, text)


def _start_of(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(64)
    except OSError as error:
        raise fault(file, f"cannot be read ({_short(error)})") from error


def _add(entries: dict[str, Entry], more: Mapping[str, Entry]) -> None:
    for name, entry in more.items():
        if name in entries:
            other = entries[name].file.name
            raise fault(entry.file, f"is in {other} too, and one of them must hold it", name)
        entries[name] = entry


def _loaded(file: Path) -> object:
    """What torch.save wrote, its tensors mapped where they lie in the file as they are."""
    start = _start_of(file)
    if not start.startswith((ZIP, BEFORE_ZIP)):
        raise fault(file, "is no file of torch.save: it begins with other bytes")
    try:
        mapped = start.startswith(ZIP) and _is_uncompressed(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of damaged pickles it may be any
        if "Unsupported global" in str(error) or "TorchScript" in str(error):
            text = "holds Python objects, and only tensors are read: save the model's state_dict()"
        else:
            text = f"torch cannot read it ({_short(error)}): the file is cut or damaged"
        raise fault(file, text) from error


def _is_uncompressed(file: Path) -> bool:
    """Mapped, tensors of an archive that was compressed anew would be its compressed bytes."""
    with zipfile.ZipFile(file) as archive:
        return all(item.compress_type == zipfile.ZIP_STORED for item in archive.infolist())


def _check_records(file: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Raises CheckpointError if storages are larger than their records in the archive: torch maps
    as many bytes as the pickle says, even those of the next record. torch does not say which record
    a storage has, so sizes are compared in order."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    with zipfile.ZipFile(file) as archive:
        items = [item for item in archive.infolist() if "/data/" in item.filename]
    records = sorted((item.file_size for item in items), reverse=True)
    sizes = sorted(filter(None, storages.values()), reverse=True)
    if len(sizes) > len(records) or any(map(gt, sizes, records)):
        raise fault(file, "holds less data than its tensors have: it is damaged")


def _tensors_in(file: Path, value: object) -> dict:
    if not isinstance(value, dict):
        text = f"must hold a dict of tensors, and holds a {type(value).__name__}"
        raise fault(file, f"{text}: save the model's state_dict()")
    for state in (*(value.get(name) for name in NESTED), value):
        tensors = dict(state) if isinstance(state, dict) else {}
        tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        if tensors:
            return tensors
    names = " or ".join(map(repr, NESTED))
    raise fault(file, f"holds no tensors, neither itself nor under {names}")


def _end(tensor: torch.Tensor) -> int:
    """The bytes of storage that a tensor reaches."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.itemsize


def _short(error: BaseException) -> str:
    """The line with the fault in another library's message, which may go on for pages."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    lines = text.splitlines() or [type(error).__name__]
    return lines[0][:200]

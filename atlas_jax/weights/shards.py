"""Directories of safetensors files: what is in them without reading it, tensors as memory-mapped views, and writing.

Files come from strangers. The safetensors library checks every header (sizes, offsets, overlaps) before a byte is
looked at, nothing is ever unpickled, and a shard's name can't lead out of the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from atlas_jax.files import written_whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}


class WeightError(ValueError):
    """Files or tensors that do not make the model of the config; the message names them and the way out."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies. `offset` is in bytes from the start of the file `shard`."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor that is to be written and not made before: `data()` is an array of its bytes, in row-major order."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], np.ndarray]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype, data: Callable[[], np.ndarray]) -> Deferred:
        """The tensor of NumPy's `dtype` that `data` makes."""
        if dtype not in _CODES:
            raise WeightError(f"{dtype} can't be written; known are {', '.join(map(str, _CODES))}")
        return cls(_CODES[dtype], shape, math.prod(shape) * dtype.itemsize, data)


class Shards(Mapping[str, np.ndarray]):
    """The tensors of a directory by name, as read-only views of memory-mapped files; nothing is read until used.

    Opening checks everything that can be known without the data. Raises `WeightError` naming the file or tensor.

    Attributes:
      entries: dtype, shape and place of every tensor, in the order of the files.
      files: the shards' names, in order.
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.indexed = (self.directory / INDEX).is_file()
        listed = _read_index(self.directory) if self.indexed else None
        self.files = tuple(sorted(set(listed.values()))) if listed is not None else (SINGLE,)
        self.entries: dict[str, Entry] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for shard in self.files:
            for name, entry in _read_header(self.directory, shard, listed is not None).items():
                if name in self.entries:
                    raise WeightError(
                        f"{name!r} is in both {self.entries[name].shard} and {shard} of {self.directory}; delete one"
                    )
                self.entries[name] = entry
        if listed is not None:
            _check_index(listed, self.entries, self.directory)
        _check_strays(self.directory, self.files)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise WeightError(f"{name!r} has the dtype {entry.dtype}; known are {', '.join(_DTYPES)}")
        if not entry.nbytes:
            return np.empty(entry.shape, _DTYPES[entry.dtype])
        if entry.shard not in self._maps:
            with open(self.directory / entry.shard, "rb") as file:
                self._maps[entry.shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(self._maps[entry.shard], np.uint8, entry.nbytes, entry.offset)
        return flat.view(_DTYPES[entry.dtype]).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Let go of the pages that reading `name` brought in, or the whole file would end up in resident memory."""
        entry = self.entries[name]
        if entry.shard in self._maps and hasattr(mmap, "MADV_DONTNEED"):
            start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = entry.offset + entry.nbytes - start
            self._maps[entry.shard].madvise(mmap.MADV_DONTNEED, start, length)

    def deferred(self, name: str) -> Deferred:
        """The tensor as it is, whatever its dtype; its bytes are read anew and leave no mapped pages behind."""
        entry = self.entries[name]
        read = lambda: np.fromfile(self.directory / entry.shard, np.uint8, entry.nbytes, offset=entry.offset)
        return Deferred(entry.dtype, entry.shape, entry.nbytes, read)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `WeightError` naming the file for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise WeightError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def _read_index(directory: Path) -> dict[str, str]:
    listed = read_json(directory / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise WeightError(f"{directory / INDEX} has no weight_map from tensor names to shards")
    for name, shard in listed.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise WeightError(f"{INDEX} maps {name!r} to {shard!r}; only .safetensors files are read")
        if Path(shard).name != shard or "\\" in shard:
            raise WeightError(f"{INDEX} maps {name!r} to {shard!r}, which leads out of the directory; refused")
    return listed


def _read_header(directory: Path, shard: str, indexed: bool) -> dict[str, Entry]:
    file = directory / shard
    if not file.is_file():
        if indexed:
            raise WeightError(f"the shard {shard} that {INDEX} lists is not in {directory}; fetch it again")
        kinds = {path.suffix for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf")}
        hint = f" ({', '.join(sorted(kinds))} files are never read: they can run code)" if kinds else ""
        raise WeightError(f"no {SINGLE} or {INDEX} in {directory}{hint}")
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library has now checked header, offsets and size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None
    header.pop("__metadata__", None)
    entries = {
        name: Entry(shard, at["dtype"], tuple(at["shape"]), 8 + length + start, stop - start)
        for name, at in header.items()
        for start, stop in [at["data_offsets"]]
    }
    return dict(sorted(entries.items(), key=lambda item: item[1].offset))


def _check_index(listed: Mapping[str, str], entries: Mapping[str, Entry], directory: Path) -> None:
    at = f"{directory / INDEX} disagrees with the shards"
    if unlisted := sorted(set(entries) - set(listed)):
        raise WeightError(f"{at}: it does not list {shorten(unlisted)}, of {entries[unlisted[0]].shard}")
    if absent := sorted(set(listed) - set(entries)):
        raise WeightError(f"{at}: {shorten(absent)} should be in {listed[absent[0]]} and is in none")
    if moved := sorted(name for name, entry in entries.items() if listed[name] != entry.shard):
        raise WeightError(f"{at}: {moved[0]!r} is in {entries[moved[0]].shard}, not in {listed[moved[0]]}")


def _check_strays(directory: Path, files: Sequence[str]) -> None:
    if strays := sorted(p.name for p in directory.glob("model*.safetensors") if p.name not in files):
        raise WeightError(
            f"{directory} also holds {shorten(strays)}, left by another save or lacking an index; delete what does "
            f"not belong to {INDEX if INDEX not in files and len(files) > 1 else files[0]}"
        )


def shorten(names: Sequence[str], most: int = 5) -> str:
    """Up to `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def write_shard(file: Path, tensors: Mapping[str, np.ndarray | Deferred]) -> None:
    """Write one safetensors file; readers see the whole of it or none. Its mode is a new file's, as the umask says.

    Tensor by tensor: one that is deferred is in memory only while it is written. (The library's writer takes all of
    them at once, and a second copy.) Wider dtypes come first, so that every tensor is aligned.
    """

    def deferred(tensor: np.ndarray | Deferred) -> Deferred:
        return tensor if isinstance(tensor, Deferred) else Deferred.of(tensor.shape, tensor.dtype, lambda: tensor)

    width = lambda tensor: tensor.nbytes // max(1, math.prod(tensor.shape))
    wanted = sorted(((name, deferred(x)) for name, x in tensors.items()), key=lambda item: -width(item[1]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in wanted:
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (end, end := end + tensor.nbytes)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(file) as part, part.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in wanted:
            out.write(np.ascontiguousarray(tensor.data()).reshape(-1).view(np.uint8).data)


def index_json(shards: Mapping[str, Mapping[str, int]]) -> str:
    """The index of `{shard: {tensor: bytes}}`."""
    total = sum(sum(sizes.values()) for sizes in shards.values())
    weight_map = {name: shard for shard, sizes in shards.items() for name in sizes}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` when the block ends well, and is gone when it does not.

    Raises `WeightError` where `target` exists and is not an empty directory.
    """
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise WeightError(f"{target} exists; name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as private:
        part = Path(private) / "new"  # a folder like any other: the temporary one is for its owner alone
        part.mkdir()
        yield part
        part.replace(target)

"""Reads another library's checkpoint as nested plain values with lazy tensors: safetensors, files of
torch.save, folders of `torch.distributed.checkpoint`.

Never follows a name out of the source's folder, and never imports or calls a name from a pickle: placeholders
and inert records replace its classes. Values with a placeholder are reported as unreadable; the rest is read.
Owns the checks that torch omits: each record of an archive must be uncompressed and match its checksum, and
the pieces of a DCP tensor must cover it.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import stat
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashckpt.errors import DamagedError, OptionError, StateError
from flashckpt.format.checked_json import unique
from flashckpt.format.layout import DTYPES, MAX_DIMENSIONS
from flashckpt.format.typed import MAX_DEPTH, check_roundtrip, children, decode
from flashckpt.options import user_path
from flashckpt.restore.step_tensors import TensorSlice, overlapping
from flashckpt.state.tensors import DTYPE_NAMES, check, is_wrapper, strides
from flashckpt.state.values import CONTAINERS, join, rebuild

_MOST_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a source. `read`: returns it on the CPU, with `dtype` (torch's name) and `shape`. `stride`:
    see `Leaf`."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor] = field(repr=False)
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for a value that cannot be read exactly, or only with code of the source."""

    why: str


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint. `tree`: SourceTensors, Unreadables and plain values by key. `kind`: name of the
    format."""

    path: str
    kind: str
    tree: dict[Any, Any]


def open_source(path: str | os.PathLike[str]) -> Source:
    """Read the structure of a checkpoint: a DCP folder, a folder or file of safetensors, or a file written by
    torch.save.

    Raises OptionError for anything else, and DamagedError, which names the file, for a truncated, damaged or
    hostile source.
    """
    path = user_path(path)
    if os.path.isdir(path):
        return _open_folder(path)
    if not os.path.exists(path):
        raise OptionError(f"{path} does not exist. Nothing was written. Name an existing file or folder.")
    if path.endswith((".safetensors", ".safetensors.index.json")):
        return Source(path, "safetensors", read_safetensors(path))
    return Source(path, "torch", read_torch(path))


def _open_folder(path: str) -> Source:
    names = sorted(os.listdir(path))
    if ".metadata" in names:
        return Source(path, "dcp", read_dcp(path))
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    found = found or [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return open_source(os.path.join(path, found[0]))
    if found:
        raise OptionError(
            f"{path} has {len(found)} safetensors files and no index. Nothing was written. Name one of "
            f"them: {', '.join(found[:5])}."
        )
    raise OptionError(
        f"{path} has neither .metadata (DCP) nor safetensors files. Nothing was written. Name a checkpoint: "
        "a file of torch.save or safetensors, or DCP's folder of one step."
    )


def file_in(folder: str, name: object) -> str:
    """The path of a file that a record in this folder names. Raises DamagedError for a name that leads out of
    the folder, for a missing file, and for anything that is not a file."""
    is_name = isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
    if not is_name or "\0" in str(name) or "\\" in str(name):
        raise damaged(folder, f"it names the file {str(name)[:200]!r}, which is not in its folder")
    path = os.path.join(folder, str(name))
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    if not is_file:
        raise damaged(path, "it is not a file")
    return path


def damaged(path: str, why: str) -> DamagedError:
    return DamagedError(
        f"{path} cannot be imported: {why}. Nothing was written. Compare it with a copy, or import an older "
        "checkpoint.",
        path=path,
    )


def check_size(path: str, value: Any, record: type | None = None) -> None:
    """Raise DamagedError for a value that takes too long to walk. A few lists, each contained twice in the
    next, have exponentially many parts. With `record`, walk the attributes of its instances too, and raise
    for too deep nesting."""
    todo, count = [(value, 0)], 0
    while todo:
        each, depth = todo.pop()
        if isinstance(each, dict):
            parts = [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            parts = list(each)
        elif record is not None and isinstance(each, record):
            parts = list(vars(each).values())
        else:
            continue
        count += len(parts)
        if count > _MOST_VALUES:
            raise damaged(path, f"it holds more than {_MOST_VALUES:,} values")
        if depth < MAX_DEPTH:
            todo += [(part, depth + 1) for part in parts]
        elif record is not None:
            raise damaged(path, f"it nests deeper than {MAX_DEPTH} levels")


# Finding and leaving out


def readable(value: Any, name: str, unreadable: list[str]) -> Any:
    """Return a nested value without the dictionary keys whose values contain an Unreadable; the Unreadable if
    it is not below a dictionary key. unreadable: gets the path of each one with its reason."""
    if type(value) is Unreadable:
        unreadable.append(f"{name} {value.why}")
    if type(value) not in CONTAINERS:
        return value
    pairs = [(key, readable(item, join(name, key), unreadable)) for key, item in children(value)]
    if isinstance(value, dict):
        return rebuild(value, [(key, item) for key, item in pairs if type(item) is not Unreadable])
    left_out = next((item for _, item in pairs if type(item) is Unreadable), None)
    return rebuild(value, pairs) if left_out is None else left_out


def lookup(tree: Any, key: str) -> Any:
    """Return the value of a key. `model.encoder` means, in this order, the key of that name, the value of
    `encoder` in `model`, or all values whose names begin with `model.encoder.`, by the rest of their names.
    An empty key means the whole tree. Raises KeyError if nothing matches."""
    if not key:
        return tree
    if not isinstance(tree, dict):
        raise KeyError(key)
    if key in tree:
        return tree[key]
    below = {
        name[len(key) + 1 :]: value
        for name, value in tree.items()
        if isinstance(name, str) and name.startswith(f"{key}.")
    }
    if below:
        return below
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:count])
        if head in tree:
            return lookup(tree[head], ".".join(parts[count:]))
    raise KeyError(key)


# Safetensors: a file, or several with an index. The format has no checksums, so a flipped byte goes unnoticed


_MAX_INDEX_BYTES = 1 << 30
_STORED = {stored: name for name, (_, stored) in DTYPES.items() if stored is not None}


def read_safetensors(path: str) -> dict[Any, Any]:
    """Read the tensors of a file, or of all files in an index, by name. Raises DamagedError, which names the
    file."""
    if not path.endswith(".index.json"):
        return _tensors(path)
    folder = os.path.dirname(path)
    file_of = _weight_map(path)
    files = {name: _tensors(file_in(folder, name)) for name in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in files[file]:
            raise damaged(os.path.join(folder, file), f"it lacks {name[:200]!r}, which the index lists in it")
    for file, tensors in files.items():
        if others := [name for name in tensors if file_of.get(name) != file]:
            raise damaged(path, f"it does not name {others[0][:200]!r}, which {file} holds")
    return {name: files[file][name] for name, file in file_of.items()}


def _weight_map(path: str) -> dict[str, str]:
    if os.path.getsize(path) > _MAX_INDEX_BYTES:
        raise damaged(path, "it is too long for an index")
    try:
        with open(path, "rb") as file:
            index = json.loads(file.read(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({str(error)[:200]})") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise damaged(path, "it has no weight_map")
    for name, file_name in file_of.items():
        if not isinstance(file_name, str):
            raise damaged(path, f"it lists no file for {name[:200]!r}")
    return file_of


def _tensors(path: str) -> dict[Any, Any]:
    try:
        file: Any = safe_open(path, framework="pt")  # checks that tensors fill the file without holes
        metadata: dict[str, Any] = file.metadata() or {}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        stored = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise damaged(path, str(error)[:300]) from error
    if metadata.get("flashckpt.dtypes", "{}") != "{}":
        raise OptionError(
            f"{path} is an export with tensors of dtypes that safetensors lacks, which it has as bytes. "
            "Nothing was written. Copy the run that it is of with `flashckpt copy`, or export the others."
        )
    found = {}
    for name, (stored_dtype, shape) in stored.items():
        if stored_dtype not in _STORED or len(shape) > MAX_DIMENSIONS:
            raise damaged(path, f"{name[:200]!r} is a {stored_dtype[:40]} of {len(shape)} dimensions")
        found[name] = SourceTensor(_STORED[stored_dtype], shape, partial(file.get_tensor, name))
    # `save_model` of safetensors writes ties into its metadata, as name -> name.
    for name, first in {**metadata, **_aliases(metadata)}.items():
        if name not in found and isinstance(first, str) and first in found:
            found[name] = found[first]
    return found


def _aliases(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the ties in the metadata that `flashckpt export` writes."""
    try:
        found = json.loads(metadata["flashckpt.aliases"])
    except (KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# Pickles: files of torch.save, and folders of torch.distributed.checkpoint


_PIECE_BYTES = 1 << 20
_Global = Callable[..., Any] | tuple[Callable[..., Any], str]
# A file that names one of these is hostile and refused as a whole. torch itself refuses the first four.
_HOSTILE_MODULES = (
    "os", "posix", "nt", "sys", "subprocess", "io", "importlib", "runpy", "pty", "socket", "shutil",
)  # fmt: skip
_HOSTILE_BUILTINS = (
    "eval", "exec", "compile", "open", "getattr", "setattr", "delattr", "__import__", "globals",
)  # fmt: skip


class _Placeholder:
    """Replacement for a class: accepts all arguments and state from a pickle, and ignores them."""

    name = "numpy.ndarray"

    def __new__(cls, *args: object, **kwargs: object) -> _Placeholder:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def read_torch(path: str) -> dict[Any, Any]:
    """Read a file into a dict of mapped tensors. Raises DamagedError, which names the file, if it is damaged,
    hostile or not a dictionary."""
    with open(path, "rb") as file:
        found = load_safely(file, path, mapped=path)
    tree = plain(found, "")
    if not isinstance(tree, dict):
        why = tree.why if isinstance(tree, Unreadable) else f"it holds a {type(found).__name__}"
        raise damaged(path, f"{why}, and only a dictionary has names for its parts")
    return tree


def _check_archive(file: BinaryIO, path: str) -> None:
    """Raise DamagedError for a file that is not an archive, and if a record does not match its checksum or is
    compressed: torch never compresses records, and a compressed one may have any size."""
    if not zipfile.is_zipfile(file):
        raise damaged(path, "it is no archive, as torch.save writes them since torch 1.6")
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                    raise damaged(path, f"its record {record.filename[:200]!r} is compressed")
                with archive.open(record) as data:
                    while data.read(_PIECE_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise damaged(path, str(error)[:300]) from error


def load_safely(file: BinaryIO, path: str, mapped: str | None = None) -> Any:
    """Load with `torch.load(weights_only=True)`, with placeholders for classes that it refuses. `mapped`: the
    file's path, to get tensors that are views of the file."""
    _check_archive(file, path)
    file.seek(0)
    try:
        with torch.serialization.safe_globals(_numpy_placeholders()):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            for name in sorted(names):
                module, _, rest = name.partition(".")
                if module in _HOSTILE_MODULES or (module == "builtins" and rest in _HOSTILE_BUILTINS):
                    raise damaged(path, f"its pickle names {name[:200]}, which no checkpoint needs")
            file.seek(0)
            placeholders: list[_Global] = [
                (type("_Unread", (_Placeholder,), {"name": name}), name) for name in names
            ]
            with torch.serialization.safe_globals(placeholders):
                found = torch.load(
                    mapped or file, weights_only=True, map_location="cpu", mmap=True if mapped else None
                )
    except pickle.UnpicklingError as error:
        # Without torch's advice to allow the classes in the file.
        reason = (str(error).partition("WeightsUnpickler error:")[2] or str(error)).strip()
        reason = reason.partition("\n")[0].partition(" was not an allowed")[0][:300]
        raise damaged(path, reason or type(error).__name__) from error
    except (
        EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
        UnicodeDecodeError, OverflowError, MemoryError, ImportError,
    ) as error:  # fmt: skip
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {str(error)[:300]})") from error
    check_size(path, found)
    return found


class _NumpyType(_Placeholder):
    """Placeholder for numpy.dtype. NumPy trusts a pickle's description of a dtype and of an array's memory,
    so a file could make it read any address. Here NumPy gets only a checked name, a shape and bytes."""

    name, text = "numpy.dtype", ""

    def __init__(self, name: object, *_: object) -> None:
        self._name = name

    def __setstate__(self, state: Any) -> None:
        # A dtype with fields, a subarray or a unit of time has more state.
        if len(state) == 8 and state[2:5] == (None, None, None):
            self.text = f"{state[1]}{self._name}"


class _NumpyValue:
    """Placeholder for an array or a scalar of NumPy."""

    plain: object = None

    def made(self) -> Any:
        """Return the value. Raises DamagedError if it has no exact encoding."""
        if self.plain is None:
            raise DamagedError("It has fields, objects or units of time.")
        return decode(self.plain)


class _NumpyScalar(_NumpyValue):
    def __init__(self, kind: object, data: object = None) -> None:
        if isinstance(kind, _NumpyType) and type(data) is bytes:
            self.plain = {"!numpy.scalar": [kind.text, data]}


class _NumpyArray(_NumpyValue):
    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, data = state
        if isinstance(kind, _NumpyType) and type(data) is bytes:
            self.plain = {"!numpy.array": [kind.text, list(shape), data, bool(is_fortran)]}


def _no_bytes() -> bytes:
    """Replacement for `bytes`, which a pickle calls to make empty bytes."""
    return b""


def _numpy_placeholders() -> list[_Global]:
    """Replacements for the names that a NumPy array or scalar needs, in NumPy 1 and 2."""
    found: list[_Global] = [(_NumpyType, "numpy.dtype"), (_Placeholder, "numpy.ndarray")]
    found += [(_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        found += [(_NumpyArray, f"{module}._reconstruct"), (_NumpyScalar, f"{module}.scalar")]
    return found


# Conversion of torch's result


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Convert a nested value: tensors to SourceTensor, values without an exact encoding to Unreadable."""
    if isinstance(value, Tensor):
        return tensor_of(value, name)
    if isinstance(value, _NumpyValue):
        try:
            return value.made()
        except DamagedError:
            return Unreadable("is a NumPy value that has no exact encoding")
    if isinstance(value, _Placeholder):
        return Unreadable(f"is a {type(value).name}, which cannot be read without its code")
    if isinstance(value, type) and issubclass(value, _Placeholder):
        return Unreadable(f"is {value.name}, which cannot be read without its code")
    if depth > MAX_DEPTH:
        return Unreadable(f"nests deeper than {MAX_DEPTH} levels, or contains itself")
    if type(value) in CONTAINERS:
        return rebuild(value, [(k, plain(item, join(name, k), depth + 1)) for k, item in children(value)])
    try:
        check_roundtrip(value, name)
    except StateError as error:
        return Unreadable(f"is a {type(value).__name__}, which has no exact encoding ({error})")
    return value


def tensor_of(tensor: Tensor, name: str) -> SourceTensor | Unreadable:
    detached = tensor.detach()
    try:
        check(detached, name)
    except StateError as error:
        return Unreadable(str(error).removeprefix(name).strip())
    if is_wrapper(detached) or type(detached) not in (Tensor, torch.nn.Parameter):
        return Unreadable(f"is a {type(detached).__name__}, and only plain tensors can be imported")
    stride = strides(detached)
    if stride is not None and any(size == 0 for size in stride):
        stride = None
    return SourceTensor(DTYPE_NAMES[detached.dtype], tuple(detached.shape), lambda: detached, stride)


# Folders of torch.distributed.checkpoint


_MAX_METADATA_BYTES = 1 << 30
_MAX_ELEMENTS = 1 << 48
_PACKAGE = "torch.distributed.checkpoint"


class _Record:
    """Inert replacement for an instance of one of DCP's classes: holds its attributes, runs no code."""

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any) -> _Record:
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state if isinstance(state, tuple) else ()


_RECORDS: dict[tuple[str, str], type[_Record]] = {
    (f"{_PACKAGE}.{module}", name): type(name, (_Record,), {})
    for module, names in {
        "metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        "filesystem": ("_StorageInfo",),
    }.items()
    for name in names
}  # fmt: skip
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def _allowed() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {**_RECORDS, ("torch", "Size"): torch.Size}
    table[("torch.serialization", "_get_layout")] = _Record
    table[("collections", "OrderedDict")] = dict
    for module in ("pathlib", "pathlib._local"):
        table.update({(module, name): _Record for name in _PATHS})
    dtypes = (each for each in vars(torch).values() if isinstance(each, torch.dtype))
    table.update({("torch", str(each).removeprefix("torch.")): each for each in dtypes})
    return table


class _Metadata(pickle.Unpickler):
    """An unpickler of `.metadata` that finds only names in `_allowed`."""

    _table = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module[:100]}.{name[:100]}, which no checkpoint needs"
            ) from None


@dataclass(frozen=True, slots=True)
class _Item:
    """Position of a value or of a tensor's piece in a file. `at`: first index of the piece in the tensor."""

    path: str
    offset: int
    length: int
    at: tuple[int, ...] | None

    def load(self) -> Any:
        """Raises DamagedError, also if the file ends before."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if len(data) < self.length:
            raise damaged(self.path, f"it ends {self.length - len(data)} bytes too early")
        return load_safely(io.BytesIO(data), self.path)


def read_dcp(folder: str) -> dict[Any, Any]:
    """Read a folder into nested dicts as they were saved. Raises DamagedError, which names the file, for a
    damaged or hostile file."""
    path = file_in(folder, ".metadata")
    metadata: Any = _read_metadata(path)
    try:
        items = _items(folder, metadata.storage_data)
        found = {}
        for name, record in metadata.state_dict_metadata.items():
            if not isinstance(name, str):
                raise ValueError(f"an item has the name {str(name)[:80]!r}")
            found[name] = _value(path, name, record, items.get(name, []))
        return _nested(found, getattr(metadata, "planner_data", None))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise damaged(path, f"it does not have the form that DCP writes ({str(error)[:300]})") from error


def _read_metadata(path: str) -> _Record:
    if os.path.getsize(path) > _MAX_METADATA_BYTES:
        raise damaged(path, "it is too long")
    try:
        with open(path, "rb") as file:
            found = _Metadata(file).load()
    except DamagedError:
        raise
    except Exception as error:  # a truncated or damaged pickle may raise any error
        why = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise damaged(path, why[:300]) from error
    if not isinstance(found, _RECORDS[f"{_PACKAGE}.metadata", "Metadata"]):
        raise damaged(path, f"it holds a {type(found).__name__} instead of DCP's Metadata")
    check_size(path, found, _Record)
    return found


def _items(folder: str, stored: Mapping[Any, Any]) -> dict[str, list[_Item | str]]:
    """The pieces of each name. The reason replaces a piece that cannot be read."""
    found: dict[str, list[_Item | str]] = {}
    files: dict[str, tuple[str, int]] = {}
    for index, info in stored.items():
        pieces = found.setdefault(index.fqn, [])
        if getattr(info, "transform_descriptors", None):
            pieces.append(f"is stored in the unknown form {str(info.transform_descriptors)[:80]}")
            continue
        name, offset, length = info.relative_path, info.offset, info.length
        if name not in files:
            path = file_in(folder, name)
            files[name] = path, os.path.getsize(path)
        path, num_bytes = files[name]
        if not all(type(n) is int and n >= 0 for n in (offset, length)) or offset + length > num_bytes:
            raise damaged(path, f"it is shorter than {offset + length}, where {index.fqn[:200]!r} should end")
        at = getattr(index, "offset", None)
        pieces.append(_Item(path, offset, length, None if at is None else tuple(at)))
    return found


def _value(path: str, name: str, record: Any, pieces: list[_Item | str]) -> Any:
    if not pieces:
        raise damaged(path, f"it has no position for {name[:200]!r}")
    items = [each for each in pieces if isinstance(each, _Item)]
    if len(items) < len(pieces):
        return Unreadable(next(each for each in pieces if isinstance(each, str)))
    if not isinstance(record, _RECORDS[f"{_PACKAGE}.metadata", "TensorStorageMetadata"]):
        return plain(items[0].load(), name)
    dtype, shape = record.properties.args[0], tuple(record.size)  # type: ignore[attr-defined]
    if dtype not in DTYPE_NAMES:
        return Unreadable(f"has the dtype {dtype}")
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in record.chunks}  # type: ignore[attr-defined]
    starts = [item.at if item.at is not None else (0,) * len(shape) for item in items]
    slices = [TensorSlice(start, sizes[start]) for start in starts]
    _check_covered(path, name, shape, slices)
    placed = list(zip(slices, items, strict=True))
    return SourceTensor(DTYPE_NAMES[dtype], shape, lambda: _gathered(name, dtype, shape, placed))


def _check_covered(path: str, name: str, shape: tuple[int, ...], pieces: list[TensorSlice]) -> None:
    """Raise DamagedError unless the pieces cover the tensor with each element once."""
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise damaged(path, f"{name[:200]!r} has the shape {shape}")
    for piece in pieces:
        if len(piece.start) != len(shape) or len(piece.shape) != len(shape):
            raise damaged(path, f"a piece of {name[:200]!r} has another number of dimensions")
        rows = zip(piece.start, piece.shape, shape, strict=True)
        if not all(min(start, n) >= 0 and start + n <= whole for start, n, whole in rows):
            raise damaged(path, f"a piece of {name[:200]!r} is outside of the tensor")
    full = [piece for piece in pieces if piece.num_elements]
    is_covered = sum(piece.num_elements for piece in full) == math.prod(shape)
    if not is_covered or len(set(full)) != len(full) or overlapping(full) is not None:
        raise damaged(path, f"the pieces of {name[:200]!r} do not cover the tensor")


def _gathered(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], placed: list[tuple[TensorSlice, _Item]]
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for place, item in placed:
        piece = item.load()
        if not isinstance(piece, Tensor) or tuple(piece.shape) != place.shape or piece.dtype != dtype:
            raise damaged(item.path, f"a piece of {name[:200]!r} differs from its description in .metadata")
        target = whole
        for dimension, (start, count) in enumerate(zip(place.start, place.shape, strict=True)):
            target = target.narrow(dimension, start, count)
        target.copy_(piece.detach())
    return whole


def _nested(found: dict[str, Any], paths: Any) -> dict[Any, Any]:
    """Nest the items by the key paths that DCP's planner has flattened; without paths, keep their names."""
    if not isinstance(paths, dict) or not paths:
        return dict(found)
    root = _Level()
    for name, value in found.items():
        keys = paths.get(name, (name,))
        if not isinstance(keys, tuple) or not keys or not all(type(key) in (str, int) for key in keys):
            raise ValueError(f"{name[:200]!r} has no path")
        inner = root
        for key in keys[:-1]:
            inner = inner.setdefault(key, _Level())
            if type(inner) is not _Level:
                raise ValueError(f"{name[:200]!r} is inside of a value")
        if keys[-1] in inner:
            raise ValueError(f"{name[:200]!r} is repeated")
        inner[keys[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


class _Level(dict[Any, Any]):
    """A dict that `_nested` made for a level of paths, as opposed to a dict in the checkpoint."""


def _with_lists(value: Any) -> Any:
    """Turn levels with integer keys into lists. Only lists have integer keys: a planner turns all other keys
    into text."""
    if type(value) is not _Level:
        return value
    made = {key: _with_lists(item) for key, item in value.items()}
    if not all(type(key) is int for key in made):
        return made
    if sorted(made) != list(range(len(made))):
        raise ValueError("a list has gaps")
    return [made[place] for place in range(len(made))]

"""A folder that `torch.distributed.checkpoint` wrote.

Its `.metadata` is a pickle. It is read with a fixed list of classes, for which inert records stand in: no
name of the file is imported or called. Each item of a `.distcp` file is read as torch_file.py reads a file.
Owns the checks that the records of one tensor make it up, and that no record leads out of the folder.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashckpt.errors import DamagedError
from flashckpt.importing.source import SourceTensor, Unreadable, damaged, file_in, read_at
from flashckpt.importing.torch_file import load_item, plain
from flashckpt.state.tensors import DTYPE_NAMES

_MAX_METADATA_BYTES = 1 << 30
_MAX_ELEMENTS = 1 << 48
_PACKAGE = "torch.distributed.checkpoint"


class _Record:
    """An instance of one of DCP's classes: its attributes, and nothing of its code."""

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


def _path(*parts: object) -> str:
    return "/".join(map(str, parts))


def _layout(name: object) -> str:
    return str(name)


def _known() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {**_RECORDS, ("torch", "Size"): torch.Size}
    table[("torch.serialization", "_get_layout")] = _layout
    table[("collections", "OrderedDict")] = dict
    for module in ("pathlib", "pathlib._local"):
        table.update({(module, name): _path for name in _PATHS})
    dtypes = (each for each in vars(torch).values() if isinstance(each, torch.dtype))
    table.update({("torch", str(each).removeprefix("torch.")): each for each in dtypes})
    return table


class _Metadata(pickle.Unpickler):
    """An unpickler of `.metadata`, which finds nothing but `_known`."""

    _table = _known()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module[:100]}.{name[:100]}, which no checkpoint needs"
            ) from None


@dataclass(frozen=True, slots=True)
class _Item:
    """Where a piece of the checkpoint stands, and of a tensor at which offsets."""

    path: str
    offset: int
    length: int
    at: tuple[int, ...] | None

    def load(self) -> Any:
        return load_item(read_at(self.path, self.offset, self.length), self.path)


def read_dcp(folder: str) -> dict[Any, Any]:
    """The content of a folder by its keys, nested as it was saved. DamagedError, which names the file, where
    it is damaged or hostile."""
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
    except Exception as error:  # a pickle that is cut short or damaged raises anything
        why = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise damaged(path, why[:300]) from error
    if not isinstance(found, _RECORDS[f"{_PACKAGE}.metadata", "Metadata"]):
        raise damaged(path, f"it holds a {type(found).__name__} in the place of DCP's Metadata")
    return found


def _items(folder: str, stored: Mapping[Any, Any]) -> dict[str, list[_Item | str]]:
    """The pieces of each name; the reason in the place of one that cannot be read."""
    found: dict[str, list[_Item | str]] = {}
    files: dict[str, tuple[str, int]] = {}
    for index, info in stored.items():
        pieces = found.setdefault(index.fqn, [])
        if getattr(info, "transform_descriptors", None):
            pieces.append(f"is stored in the form {str(info.transform_descriptors)[:80]}, which is not known")
            continue
        name, offset, length = info.relative_path, info.offset, info.length
        if name not in files:
            path = file_in(folder, name)
            files[name] = path, os.path.getsize(path)
        path, num_bytes = files[name]
        if not all(type(n) is int and n >= 0 for n in (offset, length)) or offset + length > num_bytes:
            raise damaged(path, f"{index.fqn[:200]!r} is to end at {offset + length}, behind its end")
        at = getattr(index, "offset", None)
        pieces.append(_Item(path, offset, length, None if at is None else tuple(at)))
    return found


def _value(path: str, name: str, record: Any, pieces: list[_Item | str]) -> Any:
    if not pieces:
        raise damaged(path, f"it does not say where {name[:200]!r} is")
    items = [each for each in pieces if isinstance(each, _Item)]
    if len(items) < len(pieces):
        return Unreadable(next(each for each in pieces if isinstance(each, str)))
    if not isinstance(record, _RECORDS[f"{_PACKAGE}.metadata", "TensorStorageMetadata"]):
        return plain(items[0].load(), name)
    dtype, shape = record.properties.args[0], tuple(record.size)  # type: ignore[attr-defined]
    if dtype not in DTYPE_NAMES:
        return Unreadable(f"has the dtype {dtype}")
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in record.chunks}  # type: ignore[attr-defined]
    boxes = [(item.at if item.at is not None else (0,) * len(shape), item) for item in items]
    placed = [(at, sizes[at], item) for at, item in boxes]
    _check_boxes(path, name, shape, [(at, size) for at, size, _ in placed])
    return SourceTensor(DTYPE_NAMES[dtype], shape, lambda: _gathered(name, dtype, shape, placed))


def _check_boxes(
    path: str, name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """DamagedError unless the boxes make up the tensor, each element once."""
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise damaged(path, f"{name[:200]!r} has the shape {shape}")
    for at, size in boxes:
        if len(at) != len(shape) or len(size) != len(shape):
            raise damaged(path, f"a piece of {name[:200]!r} has another number of dimensions")
        if not all(min(a, n) >= 0 and a + n <= whole for a, n, whole in zip(at, size, shape, strict=True)):
            raise damaged(path, f"a piece of {name[:200]!r} does not lie in it")
    full = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(size) for _, size in full) != math.prod(shape) or _overlap(full):
        raise damaged(path, f"the pieces of {name[:200]!r} do not make it up")


def _overlap(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes have an element in common. Sorted, a box is compared with those before its end."""
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for at, size in sorted(boxes):
        if at:
            open_ = [(a, n) for a, n in open_ if a[0] + n[0] > at[0]]
        for a, n in open_:
            if all(x < y + m and y < x + k for x, k, y, m in zip(at, size, a, n, strict=True)):
                return True
        open_.append((at, size))
    return False


def _gathered(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    placed: list[tuple[tuple[int, ...], tuple[int, ...], _Item]],
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for at, size, item in placed:
        piece = item.load()
        if not isinstance(piece, Tensor) or tuple(piece.shape) != size or piece.dtype != dtype:
            raise damaged(item.path, f"a piece of {name[:200]!r} is not what .metadata says")
        target = whole
        for dimension, (start, count) in enumerate(zip(at, size, strict=True)):
            target = target.narrow(dimension, start, count)
        target.copy_(piece.detach())
    return whole


def _nested(found: dict[str, Any], paths: Any) -> dict[Any, Any]:
    """The items by the paths of keys that DCP's planner has flattened; by their names where it has not."""
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
                raise ValueError(f"{name[:200]!r} stands inside of a value")
        if keys[-1] in inner:
            raise ValueError(f"{name[:200]!r} stands twice")
        inner[keys[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


class _Level(dict[Any, Any]):
    """A level of the paths, and no value of the checkpoint."""


def _with_lists(value: Any) -> Any:
    """A level whose keys are places in a list as that list: a planner makes texts of all other keys."""
    if type(value) is not _Level:
        return value
    made = {key: _with_lists(item) for key, item in value.items()}
    if not all(type(key) is int for key in made):
        return made
    if sorted(made) != list(range(len(made))):
        raise ValueError("a list has gaps")
    return [made[place] for place in range(len(made))]

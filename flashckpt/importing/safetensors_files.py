"""Safetensors: one file, or several with an index. Reads the header with every bound checked; the bytes of a
tensor only when they are asked for. The format has no checksums: a flipped byte of a tensor is not found.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from flashckpt.format.layout import DTYPES, MAX_DIMENSIONS, MAX_LEAF_BYTES
from flashckpt.importing.source import SourceTensor, damaged, file_in, read_at
from flashckpt.state.tensors import TORCH_DTYPES

_MAX_HEADER_BYTES = 100_000_000  # that of the safetensors package
_MAX_INDEX_BYTES = 1 << 30
_METADATA = "__metadata__"
_STORED = {stored: name for name, (_, stored) in DTYPES.items() if stored is not None}


def read_safetensors(path: str) -> dict[Any, Any]:
    """The tensors of a file, or of all files that an index names, by name. Raises DamagedError, which names
    the file."""
    if not path.endswith(".index.json"):
        return _tensors(path)
    folder = os.path.dirname(path)
    where = _weight_map(path)
    files = {name: _tensors(file_in(folder, name)) for name in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise damaged(os.path.join(folder, file), f"it lacks {name[:200]!r}, which the index puts there")
    for file, tensors in files.items():
        if others := [name for name in tensors if where.get(name) != file]:
            raise damaged(path, f"it does not name {others[0][:200]!r}, which {file} holds")
    return {name: files[file][name] for name, file in where.items()}


def _weight_map(path: str) -> dict[str, str]:
    if os.path.getsize(path) > _MAX_INDEX_BYTES:
        raise damaged(path, "it is too long for an index")
    with open(path, "rb") as file:
        index = _parsed(path, file.read())
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise damaged(path, "it has no weight_map")
    for name, file_name in where.items():
        if not isinstance(file_name, str):
            raise damaged(path, f"it puts {name[:200]!r} in no file")
    return where


def _parsed(path: str, data: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header or index is no JSON ({str(error)[:200]})") from error
    if not isinstance(found, dict):
        raise damaged(path, "its header or index is no JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _tensors(path: str) -> dict[Any, Any]:
    num_bytes = os.path.getsize(path)
    length = int.from_bytes(read_at(path, 0, 8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise damaged(path, f"its header has {length} bytes, and the file has {num_bytes}")
    header = _parsed(path, read_at(path, 8, length))
    metadata = header.pop(_METADATA, None) or {}
    rows = {name: _row(path, name, row) for name, row in header.items()}
    at = 0
    for name, (_, _, start, end) in sorted(rows.items(), key=lambda row: row[1][2:]):
        if start != at:
            raise damaged(path, f"{name[:200]!r} does not begin where the tensor before it ends")
        at = end
    if 8 + length + at != num_bytes:
        raise damaged(path, f"it has {num_bytes} bytes, and its header describes {8 + length + at}")
    odd, aliases = _json_of(metadata, "flashckpt.dtypes"), _json_of(metadata, "flashckpt.aliases")
    found = {}
    for name, (dtype, shape, start, _) in rows.items():
        dtype, shape = _recorded(path, name, odd, dtype, shape)
        found[name] = _tensor(path, dtype, shape, 8 + length + start)
    # `save_model` of safetensors has ties in its metadata, as name -> name.
    names = {**(metadata if isinstance(metadata, dict) else {}), **aliases}
    found.update(
        {
            name: found[first]
            for name, first in names.items()
            if name not in found and isinstance(first, str) and first in found
        }
    )
    return found


def _row(path: str, name: str, row: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first byte and end."""
    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        raise damaged(path, f"its header says nothing of {name[:200]!r}")
    dtype = _STORED.get(row["dtype"])
    if dtype is None:
        raise damaged(path, f"{name[:200]!r} has the dtype {row['dtype'][:40]!r}, which is not known")
    shape, offsets = _sizes(row.get("shape")), _sizes(row.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise damaged(path, f"{name[:200]!r} has no shape or no place")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype][0]:
        raise damaged(path, f"{name[:200]!r} has another length than its shape")
    return dtype, shape, offsets[0], offsets[1]


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n <= MAX_LEAF_BYTES for n in value) else None


def _json_of(metadata: Any, key: str) -> dict[str, Any]:
    """What `flashckpt export` adds: ties, and dtypes that safetensors does not have."""
    try:
        found = json.loads(metadata[key])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _recorded(
    path: str, name: str, odd: dict[str, Any], dtype: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    row = odd.get(name)
    if row is None:
        return dtype, shape
    try:
        there, sizes = str(row["dtype"]), tuple(row["shape"])
        is_so = math.prod(sizes) * DTYPES[there][0] == math.prod(shape)
    except (KeyError, TypeError):
        is_so = False
    if not is_so or there not in TORCH_DTYPES or not all(type(n) is int and n >= 0 for n in sizes):
        raise damaged(path, f"its metadata does not fit {name[:200]!r}")
    return there, sizes


def _tensor(path: str, dtype: str, shape: tuple[int, ...], offset: int) -> SourceTensor:
    num_bytes = math.prod(shape) * DTYPES[dtype][0]

    def read() -> Tensor:
        if not num_bytes:
            return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
        data = read_at(path, offset, num_bytes)
        return torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[dtype]).view(shape)

    return SourceTensor(dtype, shape, read)

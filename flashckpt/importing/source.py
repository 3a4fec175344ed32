"""What is read of a checkpoint of another library: nested plain values, in which tensors are still in their
files.

Owns the forms of a source, the choice of its reader, and which names a file may have. Never follows a name
out of the source's folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.typed import children
from flashckpt.state.values import CONTAINERS, join, rebuild


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a source: `read` gives it on the CPU, with `dtype` (torch's name) and `shape`. `stride` as
    in a leaf's record."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor] = field(repr=False)
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in the place of what cannot be read without code of the source's, or not exactly."""

    why: str


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint. `tree` holds SourceTensors, Unreadables and plain values by their keys; `kind` names its
    format."""

    path: str
    kind: str
    tree: dict[Any, Any]


def open_source(path: str | os.PathLike[str]) -> Source:
    """Read the structure of a checkpoint: a DCP folder, a folder or file of safetensors, or a file that
    torch.save wrote.

    Raises OptionError for anything else, and DamagedError, which names the file, for a source that is cut
    short, damaged or hostile.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return _open_folder(path)
    if not os.path.exists(path):
        raise OptionError(f"{path} is not there. Nothing was written. Name a file or a folder that is there.")
    if path.endswith((".safetensors", ".safetensors.index.json")):
        from flashckpt.importing.safetensors_files import read_safetensors

        return Source(path, "safetensors", read_safetensors(path))
    from flashckpt.importing.torch_file import read_torch

    return Source(path, "torch", read_torch(path))


def _open_folder(path: str) -> Source:
    names = sorted(os.listdir(path))
    if ".metadata" in names:
        from flashckpt.importing.dcp_folder import read_dcp

        return Source(path, "dcp", read_dcp(path))
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    found = found or [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return open_source(os.path.join(path, found[0]))
    if found:
        raise OptionError(
            f"{path} holds {len(found)} safetensors files and no index. Nothing was written. Name one of "
            f"them: {', '.join(found[:5])}."
        )
    raise OptionError(
        f"{path} has neither .metadata (DCP) nor safetensors files. Nothing was written. Name the folder or "
        "the file of a checkpoint: of torch.save the file, of DCP the folder of one step."
    )


def file_in(folder: str, name: object) -> str:
    """The path of a file that a record in this folder names. DamagedError for a name that leads out of the
    folder, and for anything but a file."""
    plain = isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
    if not plain or "\0" in str(name) or "\\" in str(name):
        raise damaged(folder, f"it names the file {str(name)[:200]!r}, which is not in its folder")
    path = os.path.join(folder, str(name))
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    if not is_file:
        raise damaged(path, "it is no file")
    return path


def damaged(path: str, why: str) -> DamagedError:
    return DamagedError(
        f"{path} cannot be imported: {why}. Nothing was written. Compare it with a copy, or import an older "
        "checkpoint.",
        path=path,
    )


def read_at(path: str, offset: int, num_bytes: int) -> bytearray:
    """Bytes of a file. DamagedError where it ends before."""
    data, done = bytearray(num_bytes), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while done < num_bytes:
            count = file.readinto(memoryview(data)[done:])
            if not count:
                raise damaged(path, f"it ends {num_bytes - done} bytes too early")
            done += count
    return data


# Finding and leaving out


def items(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in a nested value, with its path: everything that is no container."""
    if type(value) not in CONTAINERS:
        yield name, value
        return
    for key, item in children(value):
        yield from items(item, join(name, key))


def without_unreadable(value: Any) -> Any:
    """A nested value without the keys of dictionaries under which something cannot be read; Unreadable where
    there is no such key."""
    if type(value) not in CONTAINERS:
        return value
    pairs = [(key, without_unreadable(item)) for key, item in children(value)]
    if isinstance(value, dict):
        return rebuild(value, [(key, item) for key, item in pairs if type(item) is not Unreadable])
    left_out = next((item for _, item in pairs if type(item) is Unreadable), None)
    return rebuild(value, pairs) if left_out is None else left_out


def lookup(tree: Any, key: str) -> Any:
    """Return the value of a key. `model.encoder` means, in this order, the key of that name, the value of
    `encoder` in `model`, or all values whose names begin with `model.encoder.`, by the rest of their names.
    An empty key means the whole tree. Raises KeyError where nothing matches."""
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

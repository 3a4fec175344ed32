"""A file that torch.save wrote, read with `weights_only=True`.

Classes that torch does not allow are replaced by placeholders: no name of the file is imported or called.
What a placeholder stands in is named as unreadable; the rest of the file is read. Owns the check of the
archive, which torch does not do: each record is stored as it is and has its checksum.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import MAX_DEPTH, check_roundtrip, children, decode
from flashckpt.importing.source import SourceTensor, Unreadable, damaged
from flashckpt.state.tensors import DTYPE_NAMES, check, is_wrapper, strides
from flashckpt.state.values import CONTAINERS, join, rebuild

_PIECE_BYTES = 1 << 20
_Global = Callable[..., Any] | tuple[Callable[..., Any], str]
# A file that names one of these is hostile, and refused as a whole. torch refuses the first four itself.
_HOSTILE_MODULES = (
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "io",
    "importlib",
    "runpy",
    "pty",
    "socket",
    "shutil",
)
_HOSTILE_BUILTINS = (
    "eval",
    "exec",
    "compile",
    "open",
    "getattr",
    "setattr",
    "delattr",
    "__import__",
    "globals",
)


class _Placeholder:
    """Takes whatever a pickle gives to the class that it stands for, and does nothing with it."""

    name = "numpy.ndarray"

    def __new__(cls, *args: object, **kwargs: object) -> _Placeholder:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def read_torch(path: str) -> dict[Any, Any]:
    """The content of a file by its keys. Tensors are mapped from an archive, and in memory of an older
    file. DamagedError, which names the file, where it is damaged, hostile or no dictionary."""
    with open(path, "rb") as file:
        is_archive = check_archive(file, path)
        file.seek(0)
        found = load_safely(file, path, is_archive=is_archive, mapped=path if is_archive else None)
    tree = plain(found, "")
    if not isinstance(tree, dict):
        what = tree.why if isinstance(tree, Unreadable) else f"it holds a {type(found).__name__}"
        raise damaged(path, f"{what}, and only a dictionary has names for its parts")
    return tree


def check_archive(file: BinaryIO, path: str) -> bool:
    """Whether the file is an archive. DamagedError where a record is compressed (torch stores them as they
    are; one that is compressed may be of any size) or does not have its checksum."""
    if not zipfile.is_zipfile(file):
        return False
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
    return True


def load_safely(file: BinaryIO, path: str, *, is_archive: bool, mapped: str | None = None) -> Any:
    """What `torch.load(weights_only=True)` gives, with placeholders for classes that it refuses. `mapped`:
    the file's path, where tensors are to be views of the file."""
    try:
        with torch.serialization.safe_globals(_numpy_stand_ins()):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_archive else []
            _check_not_hostile(path, names)
            file.seek(0)
            placeholders: list[_Global] = [
                (type("_Unread", (_Placeholder,), {"name": name}), name) for name in names
            ]
            with torch.serialization.safe_globals(placeholders):
                return torch.load(
                    mapped or file, weights_only=True, map_location="cpu", mmap=True if mapped else None
                )
    except pickle.UnpicklingError as error:
        raise damaged(path, _first_sentence(error)) from error
    except (
        EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
        UnicodeDecodeError, OverflowError, MemoryError, ImportError,
    ) as error:  # fmt: skip
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {str(error)[:300]})") from error


def _check_not_hostile(path: str, names: list[str]) -> None:
    for name in sorted(names):
        module, _, rest = name.partition(".")
        if module in _HOSTILE_MODULES or (module == "builtins" and rest in _HOSTILE_BUILTINS):
            raise damaged(path, f"its pickle names {name[:200]}, which no checkpoint needs")


def _first_sentence(error: Exception) -> str:
    """Of torch's advice, which recommends to allow what the file names, only the reason."""
    text = str(error)
    reason = (text.partition("WeightsUnpickler error:")[2] or text).strip()
    return reason.partition("\n")[0].partition(" was not an allowed")[0][:300] or type(error).__name__


class _NumpyType(_Placeholder):
    """Stands for numpy.dtype. NumPy believes what a pickle says of a dtype and of an array's memory: a file
    could make it follow any address. So NumPy sees no more than a checked name, a shape and bytes."""

    name, text = "numpy.dtype", ""

    def __init__(self, name: object, *_: object) -> None:
        self._name = name

    def __setstate__(self, state: Any) -> None:
        # Of fields, a subarray or a unit of time there would be more.
        if len(state) == 8 and state[2:5] == (None, None, None):
            self.text = f"{state[1]}{self._name}"


class _NumpyValue:
    """Stands for an array or a number of NumPy."""

    plain: object = None

    def made(self) -> Any:
        """Return the value. Raises DamagedError where it has no exact encoding."""
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
    """Stands for `bytes`, which a pickle calls for the empty ones."""
    return b""


def _numpy_stand_ins() -> list[_Global]:
    """For what a NumPy array or number needs, under the names of NumPy 1 and 2."""
    found: list[_Global] = [(_NumpyType, "numpy.dtype"), (_Placeholder, "numpy.ndarray")]
    found += [(_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        found += [(_NumpyArray, f"{module}._reconstruct"), (_NumpyScalar, f"{module}.scalar")]
    return found


# From what torch gives


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """A nested value with a SourceTensor for each tensor and an Unreadable for what has no exact encoding."""
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
    held = tensor.detach()
    try:
        check(held, name)
    except StateError as error:
        return Unreadable(str(error).removeprefix(name).strip())
    if is_wrapper(held) or type(held) not in (Tensor, torch.nn.Parameter):
        return Unreadable(f"is a {type(held).__name__}, and only plain tensors can be imported")
    stride = strides(held)
    if stride is not None and any(size == 0 for size in stride):
        stride = None
    return SourceTensor(DTYPE_NAMES[held.dtype], tuple(held.shape), lambda: held, stride)


def load_item(data: bytes | bytearray, path: str) -> Any:
    """One value that torch.save wrote into a larger file, with placeholders."""
    file = io.BytesIO(data)
    is_archive = check_archive(file, path)
    file.seek(0)
    return load_safely(file, path, is_archive=is_archive)

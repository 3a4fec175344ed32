"""A DCP checkpoint on storage: safetensors files of ranks, and `metadata.json`, which names them.

Owns the names, the commit and what is believed of a file. Each save writes files of new names; replacing
`metadata.json` commits them at once. Until then a reader finds the save before, whole. Every byte is
covered: the metadata by its checksum, tensors and values by their digests in it. Holds no pickle and reads
none.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.errors import DamagedError, NoSuchStepError, PersistError
from flashckpt.format.checked_json import Fields, dump, parse
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.restore.snapshot import leaf_view
from flashckpt.state.tensors import TORCH_DTYPES, bits
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

METADATA = "metadata.json"
MAX_METADATA_BYTES = 1 << 30
_FILE = re.compile(r"rank-\d{5,7}-[0-9a-f]{16}\.safetensors")
# A store's own temporary file of a commit that was killed.
_TEMPORARY = r"\.metadata\.json\.[0-9a-f]{16}\.tmp"
_LEFT = re.compile(f"{_FILE.pattern}|{_TEMPORARY}")
_MAX_BYTES = 1 << 60
_PIECE_BYTES = 16 << 20

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a tensor's chunk or of a value are: in a file of `file_bytes`, from `start` on."""

    file: str
    file_bytes: int
    start: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its dtype by torch's name, its shape, and its chunks by their first index and shape."""

    dtype: str
    shape: Index
    chunks: Mapping[tuple[Index, Index], Place]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of `metadata.json`: tensors and values by name, their paths in the nested state_dict."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]

    @property
    def files(self) -> dict[str, int]:
        """The files that it needs, with their lengths in bytes."""
        places = [place for each in self.tensors.values() for place in each.chunks.values()]
        return {place.file: place.file_bytes for place in (*places, *self.values.values())}


def files_in(store: Store) -> set[str]:
    """The files that saves have left here, `metadata.json` aside."""
    return {entry.name for entry in store.list("", _LEFT)}


def write_file(
    store: Store, rank: int, leaves: Sequence[Leaf], tensors: Iterator[Tensor]
) -> dict[str, Place]:
    """Write a rank's new file, durably. `tensors` gives the leaves' tensors one by one, in their order,
    wherever they are. Returns the place of each leaf by its name. After an error there is no such file."""
    file = f"rank-{rank:05d}-{secrets.token_hex(8)}.safetensors"
    layout = Layout.ordered(leaves)
    digests: list[int] = []

    def pieces() -> Iterator[Any]:
        yield layout.header
        for leaf in layout.leaves:
            raw = _raw(next(tensors), leaf)
            digests.append(_native.digest(_native.address_of(raw), len(raw)) if len(raw) else 0)
            for start in range(0, len(raw), _PIECE_BYTES):
                yield raw[start : start + _PIECE_BYTES]

    store.write_parts(file, pieces(), layout.num_bytes)
    return {
        leaf.name: Place(file, layout.num_bytes, layout.data_start + leaf.offset, leaf.num_bytes, digest)
        for leaf, digest in zip(layout.leaves, digests, strict=True)
    }


def _raw(tensor: Tensor, leaf: Leaf) -> memoryview:
    """The tensor's bytes, row-major, in host memory."""
    if tensor.dtype != TORCH_DTYPES[leaf.dtype] or tuple(tensor.shape) != leaf.shape:
        raise PersistError(
            f"{leaf.name} is a {tensor.dtype} of {list(tensor.shape)}, and was planned as a {leaf.dtype} "
            f"of {list(leaf.shape)}: it changed while it was saved. The checkpoint before stays as it was. "
            "Save again, and let nothing change the state_dict until the save is done."
        )
    host = bits(tensor.detach().cpu().contiguous()).contiguous().reshape(-1)
    return memoryview(host.view(torch.uint8).numpy())  # type: ignore[arg-type]


def commit(store: Store, saved: Saved, leftovers: Iterable[str]) -> None:
    """Make this the checkpoint of the folder, and remove the files of earlier saves: those in `leftovers`,
    which were there before this save began. Raises PersistError where a file that a rank wrote is not
    there."""
    entries = {entry.name: entry.num_bytes for entry in store.list("", _FILE)}
    missing = sorted(file for file, size in saved.files.items() if entries.get(file) != size)
    if missing:
        raise PersistError(
            f"{store.url}: {missing[0]} and {len(missing) - 1} other files that ranks wrote are not in the "
            "coordinator's folder. Nothing was committed; the checkpoint before stays as it was. Use a "
            "folder or URL that all ranks share, and save to it by one job at a time.",
            path=store.url,
        )
    data = dump(_plain(saved))
    if len(data) > MAX_METADATA_BYTES:
        raise PersistError(
            f"{store.url}: the metadata takes {len(data):,} bytes, where {MAX_METADATA_BYTES:,} can be "
            "read. Nothing was committed; the checkpoint before stays as it was. Save fewer and larger "
            "tensors.",
            path=store.url,
        )
    store.replace(METADATA, data)
    # Between the check and the replacement a save of another job can remove these files as those of an
    # earlier save: it was there before they were committed.
    remaining = files_in(store)
    if lost := sorted(saved.files.keys() - remaining):
        raise PersistError(
            f"{store.url}: another save to this folder removed {lost[0]} and {len(lost) - 1} other files of "
            "this one while both committed. The folder has no whole checkpoint now, and a load refuses it. "
            "Save again, by one job and one save at a time.",
            path=store.url,
        )
    try:
        store.remove_files(sorted(set(leftovers) - saved.files.keys()))
    except OSError as error:  # the save is done; the next one removes them
        log.warning("%s: files of earlier saves could not be removed: %s", store.url, error)


def _plain(saved: Saved) -> dict[str, Any]:
    files = sorted(saved.files.items())
    number = {file: index for index, (file, _) in enumerate(files)}

    def row(place: Place) -> list[int]:
        return [number[place.file], place.start, place.num_bytes, place.digest]

    tensors = [
        [
            name,
            each.dtype,
            list(each.shape),
            [[list(start), list(shape), *row(place)] for (start, shape), place in each.chunks.items()],
        ]
        for name, each in saved.tensors.items()
    ]
    return {
        "kind": "dcp",
        "files": [list(file) for file in files],
        "tensors": tensors,
        "values": [[name, *row(place)] for name, place in saved.values.items()],
        "paths": [[name, list(path)] for name, path in saved.paths.items()],
    }


def read(store: Store) -> Saved:
    """The folder's checkpoint. Raises DamagedError for metadata that cannot have been written,
    NoSuchStepError where no save was completed."""
    try:
        data = store.read(METADATA, MAX_METADATA_BYTES)
    except FileNotFoundError as error:
        raise NoSuchStepError(
            f"{store.url} has no {METADATA}: no save to it was completed. Nothing was loaded. Load another "
            "checkpoint.",
            path=store.url,
        ) from error
    what = f"{store.url}/{METADATA}"
    obj, version = parse(data, what=what, max_bytes=MAX_METADATA_BYTES)
    fields = Fields(obj, what, version)
    fields.text("kind", pattern=re.compile("dcp"))
    files = [
        (row.text("file", pattern=_FILE), row.integer("bytes", high=_MAX_BYTES))
        for row in fields.rows("files", "file", "bytes")
    ]
    tensors, values = {}, {}
    for row in fields.rows("tensors", "name", "dtype", "shape", "chunks"):
        tensors[row.text("name", max_chars=_MAX_BYTES)] = _tensor(row, files)
    for row in fields.rows("values", "name", *_PLACE):
        values[row.text("name", max_chars=_MAX_BYTES)] = _place(row, files)
    paths = {}
    for row in fields.rows("paths", "name", "path"):
        path = row.items("path")
        if not path or not all(type(part) in (str, int) for part in path):
            row.refuse("a path has a part that is neither text nor a number")
        paths[row.text("name", max_chars=_MAX_BYTES)] = tuple(path)
    return Saved(tensors, values, paths)


_PLACE = ("file", "start", "bytes", "digest")


def _tensor(row: Fields, files: Sequence[tuple[str, int]]) -> StoredTensor:
    dtype, shape = row.text("dtype"), _sizes(row, "shape")
    if dtype not in TORCH_DTYPES:
        row.refuse(f"this torch has no dtype {dtype[:40]!r}")
    chunks = {}
    for each in row.rows("chunks", "at", "shape", *_PLACE):
        at, sizes, place = _sizes(each, "at"), _sizes(each, "shape"), _place(each, files)
        if len(at) != len(shape) or len(sizes) != len(shape):
            each.refuse("a chunk has another number of dimensions than its tensor")
        num_bytes = DTYPES[dtype][0]
        for start, size, most in zip(at, sizes, shape, strict=True):
            num_bytes *= size
            if start + size > most:
                each.refuse("a chunk lies outside of its tensor")
        if num_bytes != place.num_bytes:
            each.refuse("a chunk has another number of bytes than its shape")
        chunks[at, sizes] = place
    return StoredTensor(dtype, shape, chunks)


def _sizes(row: Fields, key: str) -> Index:
    sizes = row.items(key, 64)
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        row.refuse(f"{key!r} is not a list of sizes")
    return tuple(sizes)


def _place(row: Fields, files: Sequence[tuple[str, int]]) -> Place:
    file, file_bytes = files[row.integer("file", high=len(files) - 1)]
    start, num_bytes = row.integer("start", high=_MAX_BYTES), row.integer("bytes", high=_MAX_BYTES)
    if start + num_bytes > file_bytes:
        row.refuse("a place lies behind the end of its file")
    return Place(file, file_bytes, start, num_bytes, row.integer("digest", high=2**64 - 1))


class Images:
    """The files of a checkpoint as memory, each opened once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views: dict[str, memoryview] = {}
        self._verified: set[Place] = set()

    def data(self, place: Place) -> memoryview:
        """The bytes at a place, verified. Raises DamagedError."""
        try:
            if place.file not in self._views:
                self._views[place.file] = self._store.view(place.file, place.file_bytes)
        except FileNotFoundError as error:
            raise DamagedError(
                f"{self._store.url}/{place.file} is not there. Nothing was loaded. A newer save may have "
                "replaced it while it was read: load again. Otherwise load another checkpoint.",
                path=self._store.url,
            ) from error
        except DamagedError as error:
            raise self._damaged(place, str(error)) from error
        data = self._views[place.file][place.start : place.start + place.num_bytes]
        if place not in self._verified and place.num_bytes:
            if _native.digest(_native.address_of(data), len(data)) != place.digest:
                raise self._damaged(place, f"bytes from {place.start} on are not those that were written")
            self._verified.add(place)
        return data

    def tensor(self, place: Place, dtype: str, shape: Index) -> Tensor:
        """A chunk, verified: a view of the file."""
        return leaf_view(self.data(place), Leaf(name="chunk", dtype=dtype, shape=shape), 0)

    def _damaged(self, place: Place, why: str) -> DamagedError:
        return DamagedError(
            f"{self._store.url}/{place.file} is damaged: {why}. Nothing was loaded. Load another "
            "checkpoint, or bring this file back from a backup.",
            path=self._store.url,
        )

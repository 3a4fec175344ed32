"""The StorageWriter, and the folder that it writes: safetensors files of ranks, and `metadata.json`, which
names them.

On each save DCP calls, in this order: `reset` (only with a checkpoint_id), `set_up_storage_writer`,
`prepare_local_plan`, `prepare_global_plan` (coordinator), `write_data`, `finish` (coordinator). Each save
writes files with new names, and commits them by replacing `metadata.json`. Until then a reader finds the
complete previous save. Every byte is covered: the metadata by its checksum, tensors and values by their
digests in it. Neither writes nor reads pickle.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import mmap
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, frombuffer, uint8
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnyPlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashckpt import _native
from flashckpt.commit.view import check_writable, has_run
from flashckpt.dcp.planners import SavePlanner, Stager
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError, PersistError
from flashckpt.format.checked_json import Fields, dump, parse
from flashckpt.format.layout import DTYPES, PAGE, RESERVED, Layout, Leaf, image_order
from flashckpt.restore.snapshot import leaf_view
from flashckpt.state.tensors import DTYPE_NAMES, TORCH_DTYPES, bits
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.read_plan import cut, each_piece

log = logging.getLogger(__name__)


class _Save(threading.local):
    """State of one save. torch runs each save in one thread, and an async_save in a new one."""

    given: str | None = None  # the folder, until the save begins
    path: str | None = None
    is_coordinator = True
    leftovers: frozenset[str] = frozenset()


class Writer(StorageWriter, Stager):
    """Writes a checkpoint to a folder or URL: typed JSON and safetensors. For `save` and `async_save` of
    torch.distributed.checkpoint, with `planner=flashckpt.dcp.SavePlanner()`.

    A save to a folder with a checkpoint replaces it atomically; until then the old checkpoint stays loadable.
    Concurrent saves may share a Writer if each has its own folder. Raises OptionError for another planner and
    for use_collectives=False, PersistError if files cannot be committed.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else os.fspath(path)
        self._own = _Save()

    def __getstate__(self) -> dict[str, str | None]:  # sent to a process that saves
        return {"path": self._own.given or self._given}

    def __setstate__(self, state: dict[str, str | None]) -> None:
        self._given, self._own = state["path"], _Save()

    @property
    def path(self) -> str | None:
        """The folder of this thread's save."""
        return self._own.given or self._own.path or self._given

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            # Also set the default: a thread that does not call `reset` saves to the newest folder.
            self._given = self._own.given = os.fspath(checkpoint_id)

    # DCP passes rank= and use_collectives= only if a parameter is named `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                "use_collectives=False: each rank would commit alone, and a job killed in between would mix "
                "ranks of two checkpoints. Nothing was written. Leave use_collectives out, or call "
                "flashckpt.dcp.save, which needs no plan from other ranks."
            )
        # From here the save keeps its folder, even if the Writer gets another one.
        self._own.path, self._own.given = self._own.given or self._given, None
        if self.path is None:
            raise OptionError(
                "flashckpt.dcp.Writer has no folder. Nothing was written. Give it one: Writer(path), or "
                "checkpoint_id=."
            )
        self._own.is_coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store = open_store(self._folder)
        check_writable(store)
        if has_run(store):
            raise OptionError(
                f"{store.url} is a run, and readers would prefer a checkpoint of Writer there to the run. "
                "Nothing was written. Name another folder, or add a step to the run: "
                "flashckpt.dcp.save(…, checkpoint_id=…)."
            )
        # All ranks wait for this plan, so no existing file belongs to this save.
        self._own.leftovers = frozenset(files_in(store))
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: AnyPlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, SavePlanner):
            raise OptionError(
                f"flashckpt.dcp.Writer got a {type(planner).__name__}, which pickles every value that is "
                "not a tensor. Nothing was written; an existing checkpoint is unchanged. Pass "
                "planner=flashckpt.dcp.SavePlanner()."
            )
        results: list[WriteResult] = []
        if plan.items or self._own.is_coordinator:
            # A shard without elements may have the first index of another shard.
            items = [
                item
                for item in plan.items
                if item.type != WriteItemType.SHARD or item.tensor_data.chunk.sizes.numel()  # type: ignore[union-attr]
            ]
            rows = sorted((_row(item, planner) for item in items), key=lambda row: image_order(row[0]))

            def tensors() -> Iterator[Tensor]:
                for _, item, data in rows:
                    yield planner.resolve_data(item) if data is None else data  # type: ignore[misc]

            leaves = [leaf for leaf, _, _ in rows]
            places = write_file(open_store(self._folder), plan.storage_data, leaves, tensors())
            results = [WriteResult(item.index, leaf.num_bytes, places[leaf.name]) for leaf, item, _ in rows]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        commit(open_store(self._folder), _saved(metadata, results), self._own.leftovers)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    @property
    def _folder(self) -> str:
        assert self.path is not None, "set_up_storage_writer was not called"
        return self.path


def _row(item: WriteItem, planner: SavePlanner) -> tuple[Leaf, WriteItem, Tensor | None]:
    """The leaf of an item in the rank's file, the item, and its bytes if it is a value. Tensors are fetched
    when they are written, since all of them may not fit into host memory."""
    fqn, offset = item.index.fqn, item.index.offset
    if item.type == WriteItemType.BYTE_IO:
        encoded = planner.resolve_data(item)
        assert isinstance(encoded, io.BytesIO)
        data = frombuffer(bytearray(encoded.getbuffer()), dtype=uint8)
        return Leaf(name=fqn, dtype="uint8", shape=tuple(data.shape)), item, data
    assert item.tensor_data is not None
    # A shard's name has its first index, since a file may have several shards of one tensor.
    is_shard = item.type == WriteItemType.SHARD and offset is not None
    if is_shard and offset is not None:
        name = f"{fqn}@{','.join(map(str, offset))}"
    else:  # avoid the names of shards
        name = f"{fqn}@" if "@" in fqn or fqn == RESERVED else fqn
    dtype = DTYPE_NAMES[item.tensor_data.properties.dtype]
    return Leaf(name=name, dtype=dtype, shape=tuple(item.tensor_data.chunk.sizes)), item, None


def _saved(metadata: Metadata, results: list[list[WriteResult]]) -> Saved:
    places: dict[MetadataIndex, Place] = {each.index: each.storage_data for rank in results for each in rank}
    tensors, values = {}, {}
    try:
        for fqn, each in metadata.state_dict_metadata.items():
            if isinstance(each, BytesStorageMetadata):
                values[fqn] = places[MetadataIndex(fqn)]
                continue
            chunks = {
                (tuple(chunk.offsets), tuple(chunk.sizes)): places[MetadataIndex(fqn, chunk.offsets)]
                for chunk in each.chunks
                if chunk.sizes.numel()
            }
            # torch checks overlaps, but coverage only for several ranks.
            if sum(math.prod(sizes) for _, sizes in chunks) != each.size.numel():
                raise PersistError(
                    f"{fqn} is incomplete: its chunks do not cover its shape {list(each.size)}. Nothing was "
                    "committed; the previous checkpoint is unchanged. Save on all ranks that hold a part "
                    "of it together: without no_dist, and with a process_group that includes them."
                )
            tensors[fqn] = StoredTensor(DTYPE_NAMES[each.properties.dtype], tuple(each.size), chunks)
    except KeyError as error:
        raise PersistError(
            f"no rank wrote {error.args[0]}, which is in the plan. Nothing was committed; the previous "
            "checkpoint is unchanged. Save again."
        ) from error
    paths = {fqn: tuple(path) for fqn, path in (metadata.planner_data or {}).items()}
    return Saved(tensors, values, paths)


# The folder that a Writer writes


METADATA = "metadata.json"
MAX_METADATA_BYTES = 1 << 30
_FILE = re.compile(r"rank-\d{5,7}-[0-9a-f]{16}\.safetensors")
# A store's temporary file from a commit that was killed.
_TEMPORARY = rf"\.({_FILE.pattern}|metadata\.json)\.[0-9a-f]{{16}}\.tmp"
_LEFT = re.compile(f"{_FILE.pattern}|{_TEMPORARY}")
_MAX_BYTES = 1 << 60
_PIECE_BYTES = 16 << 20
_AT_ONCE = 8

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a tensor's chunk or of a value: in a file of `file_bytes`, from `start`."""

    file: str
    file_bytes: int
    start: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor. `dtype`: torch's name. `chunks`: by first index and shape."""

    dtype: str
    shape: Index
    chunks: Mapping[tuple[Index, Index], Place]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of `metadata.json`: tensors and values by name, and their paths in the nested
    state_dict."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]

    @property
    def files(self) -> dict[str, int]:
        """The files of the save, with their lengths in bytes."""
        places = [place for each in self.tensors.values() for place in each.chunks.values()]
        return {place.file: place.file_bytes for place in (*places, *self.values.values())}


def files_in(store: Store) -> set[str]:
    """All files of saves in the folder, except `metadata.json`."""
    return {entry.name for entry in store.list("") if _LEFT.fullmatch(entry.name)}


def write_file(
    store: Store, rank: int, leaves: Sequence[Leaf], tensors: Iterator[Tensor]
) -> dict[str, Place]:
    """Write a rank's new file, durably. `tensors`: the leaves' tensors in order, on any device. Return the
    place of each leaf by name. After an error no such file exists."""
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
            f"of {list(leaf.shape)}: it changed during the save. The previous checkpoint is unchanged. "
            "Save again, and do not change the state_dict until the save is done."
        )
    host = bits(tensor.detach().cpu().contiguous()).contiguous().reshape(-1)
    return memoryview(host.view(torch.uint8).numpy())  # type: ignore[arg-type]


def commit(store: Store, saved: Saved, leftovers: Iterable[str]) -> None:
    """Commit a save, and remove files of earlier saves: `leftovers`, the files that existed before this save
    began. Raises PersistError if a file that a rank wrote is missing."""
    entries = {entry.name: entry.num_bytes for entry in store.list("")}
    missing = sorted(file for file, size in saved.files.items() if entries.get(file) != size)
    if missing:
        raise PersistError(
            f"{store.url}: {missing[0]} and {len(missing) - 1} other files that ranks wrote are not in the "
            "coordinator's folder. Nothing was committed; the previous checkpoint is unchanged. Use a "
            "folder or URL that all ranks share, and save to it by one job at a time.",
            path=store.url,
        )
    data = dump(_plain(saved))
    if len(data) > MAX_METADATA_BYTES:
        raise PersistError(
            f"{store.url}: the metadata takes {len(data):,} bytes, and at most {MAX_METADATA_BYTES:,} can "
            "be read. Nothing was committed; the previous checkpoint is unchanged. Save fewer and larger "
            "tensors.",
            path=store.url,
        )
    store.replace(METADATA, data)
    # Between check and replacement, another job's save can remove these files as those of an earlier save,
    # because they existed before that save began.
    lost = sorted(saved.files.keys() - files_in(store))
    if store.read(METADATA, MAX_METADATA_BYTES) != data:
        return  # A newer save has replaced this save, and its files may be among the leftovers.
    if lost:
        raise PersistError(
            f"{store.url}: another save to this folder removed {lost[0]} and {len(lost) - 1} other files of "
            "this save while both committed. The folder has no complete checkpoint now, and a load refuses "
            "it. Save again, by one job and one save at a time.",
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


def read_metadata(store: Store) -> Saved:
    """Read the folder's metadata. Raises DamagedError if it is invalid, NoSuchStepError if no save was
    completed."""
    try:
        data = store.read(METADATA, MAX_METADATA_BYTES)
    except FileNotFoundError as error:
        raise NoSuchStepError(
            f"{store.url} has no {METADATA}: no save to it was completed. Nothing was loaded. Load another "
            "checkpoint.",
            path=store.url,
        ) from error
    what = f"{store.url}/{METADATA}"
    fields = Fields(parse(data, what=what, max_bytes=MAX_METADATA_BYTES), what)
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
        row.refuse(f"torch has no dtype {dtype[:40]!r}")
    chunks = {}
    for each in row.rows("chunks", "at", "shape", *_PLACE):
        at, sizes, place = _sizes(each, "at"), _sizes(each, "shape"), _place(each, files)
        if len(at) != len(shape) or len(sizes) != len(shape):
            each.refuse("a chunk has another number of dimensions than its tensor")
        num_bytes = DTYPES[dtype][0]
        for start, size, most in zip(at, sizes, shape, strict=True):
            num_bytes *= size
            if start + size > most:
                each.refuse("a chunk is outside of its tensor")
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
        row.refuse("a place is past the end of its file")
    return Place(file, file_bytes, start, num_bytes, row.integer("digest", high=2**64 - 1))


class Images:
    """The files of a checkpoint in memory, each opened once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views: dict[str, memoryview] = {}
        self._verified: set[Place] = set()

    def data(self, place: Place) -> memoryview:
        """Return the verified bytes at a place. Raises DamagedError."""
        try:
            if place.file not in self._views:
                self._views[place.file] = self._view(place.file, place.file_bytes)
        except FileNotFoundError as error:
            raise DamagedError(
                f"{self._store.url}/{place.file} does not exist. Nothing was loaded. A newer save may have "
                "replaced it during the load: load again. Otherwise load another checkpoint.",
                path=self._store.url,
            ) from error
        except DamagedError as error:
            raise self._damaged(place, str(error)) from error
        data = self._views[place.file][place.start : place.start + place.num_bytes]
        if place not in self._verified and place.num_bytes:
            if _native.digest(_native.address_of(data), len(data)) != place.digest:
                raise self._damaged(place, f"bytes from {place.start} differ from those that were written")
            self._verified.add(place)
        return data

    def _view(self, file: str, num_bytes: int) -> memoryview:
        """Return a whole file as memory that a caller may change: mapped if it is local, else read."""
        if (descriptor := self._store.descriptor(file, num_bytes)) is not None:
            try:
                how = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
                return memoryview(mmap.mmap(descriptor, num_bytes, **how))
            finally:
                os.close(descriptor)
        memory = memoryview(_native.Mapping(-(-num_bytes // PAGE) * PAGE))[:num_bytes]

        def read(start: int, stop: int) -> None:
            memory[start:stop] = self._store.read_bytes(file, start, stop - start)

        each_piece(file, cut(num_bytes, _PIECE_BYTES), _AT_ONCE, read)
        return memory

    def tensor(self, place: Place, dtype: str, shape: Index) -> Tensor:
        """Return a verified chunk as a view of the file."""
        return leaf_view(self.data(place), Leaf(name="chunk", dtype=dtype, shape=shape), 0)

    def _damaged(self, place: Place, why: str) -> DamagedError:
        return DamagedError(
            f"{self._store.url}/{place.file} is damaged: {why}. Nothing was loaded. Load another "
            "checkpoint, or restore this file from a backup.",
            path=self._store.url,
        )

"""The StorageWriter, and the folder that it writes: safetensors files of ranks, and `metadata.json`, which
names them.

On each save DCP calls, in this order: `reset` (only with a checkpoint_id), `set_up_storage_writer`,
`prepare_local_plan`, `prepare_global_plan` (coordinator), `write_data`, `finish` (coordinator). Each save
writes files with new names, and commits them by replacing `metadata.json`. Until then a reader finds the
complete previous save. Files and metadata are those of a step of a run (`Part`), without its folders: each
file counts as a rank. Neither writes nor reads pickle.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnyPlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashckpt.commit.steps import StepParts, StepRecord
from flashckpt.commit.view import check_writable, has_run
from flashckpt.commit.written import write_image
from flashckpt.dcp.planners import SavePlanner, Stager
from flashckpt.errors import DamagedError, MismatchError, NoSuchStepError, OptionError, PersistError
from flashckpt.format.catalogue import Folder
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import RESERVED, Box, Layout, Leaf
from flashckpt.format.manifest import SHARD, Manifest, shard_name
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import Part, RankRecord
from flashckpt.restore.step_reading import host_bytes
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.state.tensors import DTYPE_NAMES, TORCH_DTYPES, bits
from flashckpt.store import open_store
from flashckpt.store.base import Store

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
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: AnyPlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, SavePlanner):
            raise OptionError(
                f"flashckpt.dcp.Writer got a {type(planner).__name__}, which pickles every value that is "
                "not a tensor. Nothing was written; an existing checkpoint is unchanged. Pass "
                "planner=flashckpt.dcp.SavePlanner()."
            )
        results: list[WriteResult] = []
        for number, items in enumerate(_files_of(plan)):
            if items or (self._own.is_coordinator and not number):
                record = _write(open_store(self._folder), plan.storage_data, items, planner)
                results.append(WriteResult(MetadataIndex(""), 0, record))
                results += [WriteResult(item.index, 0, None) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        records = [each.storage_data for rank in results for each in rank if each.storage_data is not None]
        paths = [[fqn, list(path)] for fqn, path in (metadata.planner_data or {}).items()]
        part = Part(
            id=SnapshotId(AttemptName(1, secrets.token_hex(4)), 0),
            step=0,
            world=len(records),
            node=0,
            ranks=tuple(replace(each, rank=rank) for rank, each in enumerate(records)),
            environment={"paths": paths},
        )
        store = open_store(self._folder)
        _check_covered(record_of(store, part), metadata)
        commit(store, part, self._own.leftovers)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    @property
    def _folder(self) -> str:
        assert self.path is not None, "set_up_storage_writer was not called"
        return self.path


def _files_of(plan: SavePlan) -> list[list[WriteItem]]:
    """Return the items of each file of this rank, at least of one: a file has one slice of a tensor."""
    files: list[dict[str, WriteItem]] = [{}]
    for item in plan.items:
        if item.type == WriteItemType.SHARD:
            data = item.tensor_data
            assert data is not None
            # A slice without elements may have the first index of another one.
            if data.size.numel() and not data.chunk.sizes.numel():
                continue
        file = next((each for each in files if item.index.fqn not in each), None)
        if file is None:
            files.append(file := {})
        file[item.index.fqn] = item
    return [list(each.values()) for each in files]


def _write(store: Store, rank: int, items: Sequence[WriteItem], planner: SavePlanner) -> RankRecord:
    """Write a file of tensors, and return its record, with the values that are not tensors. Fetches one
    tensor at a time, since all of them may not fit into host memory."""
    tensors, values = dict[str, WriteItem](), dict[str, Any]()
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            encoded = planner.resolve_data(item)
            assert isinstance(encoded, io.BytesIO)
            wrapped = b'{"value":%b}' % encoded.getvalue()
            values[item.index.fqn] = strict_loads(wrapped, what=item.index.fqn)["value"]
        else:
            tensors[leaf_name(item.index.fqn)] = item
    layout = Layout.of(_leaf(name, item) for name, item in tensors.items())

    def leaves() -> Iterator[memoryview]:
        for leaf in layout.leaves:
            tensor = planner.resolve_data(tensors[leaf.name])
            assert isinstance(tensor, Tensor)
            held = _host(tensor, leaf)
            yield host_bytes(held)

    written = write_image(store, shard_name(rank, secrets.token_hex(8)), layout, leaves())
    return RankRecord(rank=rank, shard=written, values=values)


def _leaf(name: str, item: WriteItem) -> Leaf:
    assert item.tensor_data is not None
    data = item.tensor_data
    shape, whole = tuple(data.chunk.sizes), tuple(data.size)
    box = Box(shape=whole, start=tuple(data.chunk.offsets)) if shape != whole else None
    return Leaf(name=name, dtype=DTYPE_NAMES[data.properties.dtype], shape=shape, box=box)


def _host(tensor: Tensor, leaf: Leaf) -> Tensor:
    """The tensor's bits, row-major, in host memory."""
    if tensor.dtype != TORCH_DTYPES[leaf.dtype] or tuple(tensor.shape) != leaf.shape:
        raise PersistError(
            f"{leaf.name} is a {tensor.dtype} of {list(tensor.shape)}, and was planned as a {leaf.dtype} "
            f"of {list(leaf.shape)}: it changed during the save. The previous checkpoint is unchanged. "
            "Save again, and do not change the state_dict until the save is done."
        )
    return bits(tensor.detach().cpu().contiguous()).contiguous()


def _check_covered(record: StepRecord, metadata: Metadata) -> None:
    """Raise PersistError unless the record has all tensors, complete, and all values."""
    values = {name for part in record.parts for rank in part.ranks for name in rank.values}
    try:
        tensors = {fqn_of(leaf.name) for leaf in WholeTensors(record).leaves}
    except MismatchError as error:
        [(name, *_)] = error.differences
        raise PersistError(
            f"{name} is incomplete: its chunks do not cover its shape. Nothing was committed; the previous "
            "checkpoint is unchanged. Save on all ranks that hold a part of it together: without no_dist, "
            "and with a process_group that includes them."
        ) from error
    for fqn, each in metadata.state_dict_metadata.items():
        if fqn not in (values if isinstance(each, BytesStorageMetadata) else tensors):
            raise PersistError(
                f"no rank wrote {fqn}, which is in the plan. Nothing was committed; the previous "
                "checkpoint is unchanged. Save again."
            )


# The folder that a Writer writes


METADATA = "metadata.json"
# A store's temporary file from a commit that was killed.
_TEMPORARY = rf"\.({SHARD.pattern}|metadata\.json)\.[0-9a-f]{{16}}\.tmp"
_LEFT = re.compile(f"{SHARD.pattern}|{_TEMPORARY}")
_ESCAPE = "@"


def leaf_name(fqn: str) -> str:
    """Return the name of an item's leaf: one name is reserved in safetensors files."""
    return f"{_ESCAPE}{fqn}" if fqn.startswith(_ESCAPE) or fqn in ("", RESERVED) else fqn


def fqn_of(name: str) -> str:
    """Return the name of a leaf's item."""
    return name.removeprefix(_ESCAPE)


def files_in(store: Store) -> set[str]:
    """All files of saves in the folder, except `metadata.json`."""
    return {entry.name for entry in store.list("") if _LEFT.fullmatch(entry.name)}


def commit(store: Store, part: Part, leftovers: Iterable[str]) -> None:
    """Commit a save, and remove files of earlier saves: `leftovers`, the files that existed before this save
    began. Raises PersistError if a file that a rank wrote is missing."""
    files = {each.shard.file: each.shard.num_bytes for each in part.ranks}
    entries = {entry.name: entry.num_bytes for entry in store.list("")}
    missing = sorted(file for file, size in files.items() if entries.get(file) != size)
    if missing:
        raise PersistError(
            f"{store.url}: {missing[0]} and {len(missing) - 1} other files that ranks wrote are not in the "
            "coordinator's folder. Nothing was committed; the previous checkpoint is unchanged. Use a "
            "folder or URL that all ranks share, and save to it by one job at a time.",
            path=store.url,
        )
    try:
        data = part.to_bytes()
        Part.from_bytes(data, METADATA)
    except (ValueError, DamagedError) as error:
        raise PersistError(
            f"{store.url}: the metadata could not be read back ({error}). Nothing was committed; the "
            "previous checkpoint is unchanged. Save fewer and larger tensors, under shorter names.",
            path=store.url,
        ) from error
    store.replace(METADATA, data)
    # Between check and replacement, another job's save can remove these files as those of an earlier save,
    # because they existed before that save began.
    lost = sorted(files.keys() - files_in(store))
    if store.read(METADATA, Part.MAX_BYTES) != data:
        return  # A newer save has replaced this save, and its files may be among the leftovers.
    if lost:
        raise PersistError(
            f"{store.url}: another save to this folder removed {lost[0]} and {len(lost) - 1} other files of "
            "this save while both committed. The folder has no complete checkpoint now, and a load refuses "
            "it. Save again, by one job and one save at a time.",
            path=store.url,
        )
    try:
        store.remove_files(sorted(set(leftovers) - files.keys()))
    except OSError as error:  # the save is done; the next one removes them
        log.warning("%s: files of earlier saves could not be removed: %s", store.url, error)


def read_record(store: Store) -> StepRecord:
    """Read the folder's metadata. Raises DamagedError if it is invalid, NoSuchStepError if no save was
    completed."""
    try:
        data = store.read(METADATA, Part.MAX_BYTES)
    except FileNotFoundError as error:
        raise NoSuchStepError(
            f"{store.url} has no {METADATA}: no save to it was completed. Nothing was loaded. Load another "
            "checkpoint.",
            path=store.url,
        ) from error
    what = f"{store.url}/{METADATA}"
    part = Part.from_bytes(data, what)
    if [each.rank for each in part.ranks] != list(range(part.world)):
        raise DamagedError(f"{what} is damaged: it lacks files. Nothing was loaded.", path=what)
    return record_of(store, part)


def record_of(store: Store, part: Part) -> StepRecord:
    """Return the record of a save as that of a step whose files are in the store's own folder."""
    folder = Folder(part.id.attempt, part.id)
    return StepRecord(
        name=CommitName(part.step, part.id.attempt, part.id.boundary),
        manifest=Manifest(folder=folder, step=part.step, world=part.world, parts=(), shards=()),
        places={each.shard.file: each.shard.file for each in part.ranks},
        # A record of a rank is found by its part.
        parts=StepParts.of(replace(part, node=each.rank, ranks=(each,)) for each in part.ranks),
        store=store,
    )

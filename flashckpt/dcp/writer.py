"""The StorageWriter: what DCP calls, in this order, on each save: `reset` (only with a checkpoint_id),
`set_up_storage_writer`, `prepare_local_plan`, `prepare_global_plan` (coordinator), `write_data`, `finish`
(coordinator)."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Size, Tensor, frombuffer, uint8
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnyPlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashckpt.dcp.folder import Place, Saved, StoredTensor, commit, files_in, write_file
from flashckpt.dcp.planners import SavePlanner
from flashckpt.dcp.stager import Stager
from flashckpt.errors import OptionError, PersistError
from flashckpt.format.layout import RESERVED, Leaf, image_order
from flashckpt.format.names import RUN
from flashckpt.state.tensors import DTYPE_NAMES
from flashckpt.store import open_store


class _Save(threading.local):
    """What belongs to one save. torch makes each in one thread, and an async_save in a new one."""

    path: str | None = None
    is_coordinator = True
    leftovers: frozenset[str] = frozenset()


class Writer(StorageWriter, Stager):
    """Writes a checkpoint to a folder or URL: typed JSON and safetensors. For `save` and `async_save` of
    torch.distributed.checkpoint, with `planner=flashckpt.dcp.SavePlanner()`.

    A save to a folder that has a checkpoint replaces it in one step; until then that one stays loadable.
    Several saves may use one Writer at a time, each to a folder of its own. Raises OptionError for another
    planner and for use_collectives=False, PersistError where files cannot be committed.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else os.fspath(path)
        self._own = _Save()

    def __getstate__(self) -> dict[str, str | None]:  # to a process that saves
        return {"path": self.path}

    def __setstate__(self, state: dict[str, str | None]) -> None:
        self._given, self._own = state["path"], _Save()

    @property
    def path(self) -> str | None:
        """The folder of the save that this thread makes."""
        return self._own.path or self._given

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            # Also for a thread in which it is not called: that saves to the newest folder.
            self._given = self._own.path = os.fspath(checkpoint_id)

    # DCP passes rank= and use_collectives= to a parameter of the name `kwargs` alone.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                "use_collectives=False: each rank would commit alone, and a job that is killed meanwhile "
                "would leave ranks of two checkpoints in one. Nothing was written. Leave use_collectives "
                "out, or call flashckpt.dcp.save, which needs no plan from other ranks."
            )
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
        if store.exists(RUN):
            raise OptionError(
                f"{store.url} is a run, and a reader would take what Writer puts there for it. Nothing was "
                "written. Name another folder, or add a step to the run: flashckpt.dcp.save(…, "
                "checkpoint_id=…)."
            )
        # All ranks wait for this plan: no file that is there now is one of this save.
        self._own.leftovers = frozenset(files_in(store))
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: AnyPlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, SavePlanner):
            raise OptionError(
                f"flashckpt.dcp.Writer got a {type(planner).__name__}, which pickles every value that is "
                "no tensor. Nothing was written; a checkpoint that was there stays. Pass "
                "planner=flashckpt.dcp.SavePlanner()."
            )
        results: list[WriteResult] = []
        if plan.items or self._own.is_coordinator:
            items = [item for item in plan.items if not _is_empty_shard(item)]
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


def _is_empty_shard(item: WriteItem) -> bool:
    """Whether it has no elements. Its first index may be that of a shard that has some."""
    return item.type == WriteItemType.SHARD and not item.tensor_data.chunk.sizes.numel()  # type: ignore[union-attr]


def _row(item: WriteItem, planner: SavePlanner) -> tuple[Leaf, WriteItem, Tensor | None]:
    """The leaf of an item in the rank's file, and its bytes where it is a value. A tensor is fetched when it
    is written: all of them at once may not fit into host memory."""
    fqn, offset = item.index.fqn, item.index.offset
    if item.type == WriteItemType.BYTE_IO:
        encoded = planner.resolve_data(item)
        assert isinstance(encoded, io.BytesIO)
        data = frombuffer(bytearray(encoded.getbuffer()), dtype=uint8)
        return Leaf(name=fqn, dtype="uint8", shape=tuple(data.shape)), item, data
    assert item.tensor_data is not None
    # The name of a shard is its tensor's, with its first index: several of one tensor may be in a file.
    is_shard = item.type == WriteItemType.SHARD and offset is not None
    if is_shard and offset is not None:
        name = f"{fqn}@{','.join(map(str, offset))}"
    else:  # no other item may have the name of a shard
        name = f"{fqn}@" if "@" in fqn or fqn == RESERVED else fqn
    dtype = DTYPE_NAMES[item.tensor_data.properties.dtype]
    return Leaf(name=name, dtype=dtype, shape=tuple(item.tensor_data.chunk.sizes)), item, None


def _check_whole(fqn: str, shape: Size, chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """torch checks that chunks do not overlap, and that they are all of the tensor only for several ranks."""
    if sum(math.prod(sizes) for _, sizes in chunks) != shape.numel():
        raise PersistError(
            f"{fqn} was given in part: its chunks are not all of its {list(shape)}. Nothing was committed; "
            "the checkpoint before stays as it was. Save on all ranks that hold a part of it, together: "
            "without no_dist, and with a process_group that has them."
        )


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
            _check_whole(fqn, each.size, chunks)
            tensors[fqn] = StoredTensor(DTYPE_NAMES[each.properties.dtype], tuple(each.size), chunks)
    except KeyError as error:
        raise PersistError(
            f"no rank wrote {error.args[0]}, which is in the plan. Nothing was committed; the checkpoint "
            "before stays as it was. Save again."
        ) from error
    paths = {fqn: tuple(path) for fqn, path in (metadata.planner_data or {}).items()}
    return Saved(tensors, values, paths)

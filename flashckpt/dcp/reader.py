"""The StorageReader: a folder that a Writer wrote, or any run of this library.

Owns what of them is which, and that nothing of a rank's state changes before all that it reads is verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flashckpt.dcp import folder
from flashckpt.dcp.folder import Images
from flashckpt.dcp.planners import LoadPlanner
from flashckpt.dcp.step_items import StepItems
from flashckpt.errors import FlashckptError, OptionError, RunError
from flashckpt.format.typed import decode_json
from flashckpt.restore.step_leaves import BoxRegion
from flashckpt.state.tensors import TORCH_DTYPES, fill
from flashckpt.store import open_store
from flashckpt.store.base import Store


class Source(Protocol):
    """An open checkpoint. `identity`: equal on all ranks that read the same one."""

    identity: str

    def metadata(self) -> Metadata: ...

    def pieces(self, items: list[ReadItem]) -> Iterator[Tensor]:
        """The tensors that items ask for, in their order. What the first one needs, and all others, is
        verified before it is given. Raises DamagedError."""

    def value(self, fqn: str) -> Any:
        """A value that is no tensor, verified. Raises DamagedError."""


class Reader(StorageReader):
    """Reads what a Writer wrote, and every run of this library: its names are those that state_dict() has,
    below the names that the run's script gave (model.…, optimizer.…). For `load` of
    torch.distributed.checkpoint, with `planner=flashckpt.dcp.LoadPlanner()`.

    step: of a run, which of its steps; None takes the newest. Raises DamagedError before anything is loaded
    on this rank, NoSuchStepError, RunError, OptionError.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, step: int | None = None) -> None:
        self.path, self.step = None if path is None else os.fspath(path), step
        self._source: Source | None = None
        self.refusal: FlashckptError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    # No parameter may be called `kwargs`: DCP would then ask for a metadata file of each rank.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        if self.path is None:
            raise OptionError(
                "flashckpt.dcp.Reader has no folder. Nothing was loaded. Give it one: Reader(path)."
            )
        try:
            self._source = _source(open_store(self.path), self.step)
        except FlashckptError as error:
            self.refusal = error  # torch hands on its text alone
            raise
        return replace(self._source.metadata(), storage_meta=StorageMeta(checkpoint_id=self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_: Any) -> None:
        """`read_metadata` has opened what is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise RunError(
                f"{self.path}: ranks found different checkpoints ({', '.join(found[:3])}): a save was "
                "committed while they began to read. Nothing was loaded. Load again, or name the step of "
                "a run: Reader(path, step=…).",
                path=self.path,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: AnyPlanner) -> Future[None]:
        source = self._opened
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if values and not isinstance(planner, LoadPlanner):
            raise OptionError(
                f"flashckpt.dcp.Reader got a {type(planner).__name__}, which unpickles every value that is "
                "no tensor. Nothing was loaded. Pass planner=flashckpt.dcp.LoadPlanner()."
            )
        found = [source.value(item.storage_index.fqn) for item in values]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        for item, piece in zip(tensors, source.pieces(tensors), strict=True):
            target = planner.resolve_tensor(item).detach()
            if target.dtype == piece.dtype:
                fill(target, piece)
            else:
                target.copy_(piece)
            planner.commit_tensor(item, target)
        for item, value in zip(values, found, strict=True):
            planner.load_value(item, value)  # type: ignore[attr-defined]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    @property
    def _opened(self) -> Source:
        assert self._source is not None, "read_metadata was not called"
        return self._source


def _source(store: Store, step: int | None) -> Source:
    if step is None and store.exists(folder.METADATA):
        return _Folder(store)
    if store.exists(".metadata"):
        raise RunError(
            f"{store.url} is a checkpoint of torch's own FileSystemWriter, with pickles in it. Nothing was "
            "loaded. Load it with torch's FileSystemReader, or convert it: `flashckpt import`.",
            path=store.url,
        )
    if step is None and folder.files_in(store):
        folder.read(store)  # which says that no save was completed
    return _Step(StepItems(store, step))


class _Folder:
    """What a Writer wrote."""

    def __init__(self, store: Store) -> None:
        self._saved, self._images = folder.read(store), Images(store)
        self.identity = min(self._saved.files, default="")

    def metadata(self) -> Metadata:
        tensors = {
            fqn: _tensor(each.dtype, each.shape, list(each.chunks))
            for fqn, each in self._saved.tensors.items()
        }
        values = dict.fromkeys(self._saved.values, BytesStorageMetadata())
        return Metadata(state_dict_metadata={**tensors, **values}, planner_data=dict(self._saved.paths))

    def pieces(self, items: list[ReadItem]) -> Iterator[Tensor]:
        chunks = [self._chunk(item) for item in items]  # all verified before the first is used
        for item, chunk in zip(items, chunks, strict=True):
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            yield chunk

    def _chunk(self, item: ReadItem) -> Tensor:
        each, at = self._saved.tensors[item.storage_index.fqn], tuple(item.storage_index.offset or ())
        needed = [a + n for a, n in zip(item.storage_offsets, item.lengths, strict=True)]
        for (start, shape), place in each.chunks.items():
            if start == at and all(size >= most for size, most in zip(shape, needed, strict=True)):
                return self._images.tensor(place, each.dtype, shape)
        raise KeyError(item.storage_index)

    def value(self, fqn: str) -> Any:
        return decode_json(self._images.data(self._saved.values[fqn]))


class _Step:
    """A committed step of a run."""

    def __init__(self, items: StepItems) -> None:
        self._items, self.identity = items, items.identity

    def metadata(self) -> Metadata:
        tensors: Mapping[str, Any] = {
            fqn: _tensor(leaf.dtype, leaf.shape, [((0,) * len(leaf.shape), leaf.shape)])
            for fqn, leaf in self._items.tensors.items()
        }
        values = dict.fromkeys(self._items.values, BytesStorageMetadata())
        return Metadata(state_dict_metadata={**tensors, **values}, planner_data=self._items.paths)

    def pieces(self, items: list[ReadItem]) -> Iterator[Tensor]:
        yield from self._items.read(
            [
                (item.storage_index.fqn, BoxRegion(tuple(item.storage_offsets), tuple(item.lengths)))
                for item in items
            ]
        )

    def value(self, fqn: str) -> Any:
        return self._items.value(fqn)


def _tensor(dtype: str, shape: tuple[int, ...], chunks: list[Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[dtype]),
        size=Size(shape),
        chunks=[ChunkStorageMetadata(offsets=Size(at), sizes=Size(sizes)) for at, sizes in chunks],
    )

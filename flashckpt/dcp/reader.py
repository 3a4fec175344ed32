"""The StorageReader for a folder that a Writer wrote, or for any run of this library.

Owns how these are distinguished. Verifies all that a rank reads before it changes the rank's state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
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

from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import StepRecord
from flashckpt.dcp.planners import LoadPlanner
from flashckpt.dcp.writer import METADATA, files_in, fqn_of, read_record
from flashckpt.errors import DamagedError, FlashckptError, OptionError, RunError
from flashckpt.format.layout import Leaf
from flashckpt.format.typed import LeafRef, children, decode
from flashckpt.restore.merged_state import SavedRank
from flashckpt.restore.step_reading import read_leaves
from flashckpt.restore.step_tensors import TensorSlice, transient_names
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.state.leaves import is_stored, leaf_names, value_of
from flashckpt.state.optimizers import state_name
from flashckpt.state.tensors import TORCH_DTYPES, fill
from flashckpt.state.values import join, rebuild, references
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.read_plan import MissingShardError


class Reader(StorageReader):
    """Reads checkpoints of a Writer, and runs. Names in a run are those of state_dict(), below the names that
    the training script gave (model.…, optimizer.…). For `load` of torch.distributed.checkpoint, with
    `planner=flashckpt.dcp.LoadPlanner()`.

    step: number of a run's step; None takes the newest. Raises DamagedError before anything is loaded on this
    rank, NoSuchStepError, RunError, OptionError.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, step: int | None = None) -> None:
        self.path, self.step = None if path is None else os.fspath(path), step
        self._source: _Checkpoint | None = None
        self.refusal: FlashckptError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    # No parameter may be named `kwargs`: DCP would then ask for a metadata file of each rank.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        if self.path is None:
            raise OptionError(
                "flashckpt.dcp.Reader has no folder. Nothing was loaded. Give it one: Reader(path)."
            )
        try:
            self._source = _source(open_store(self.path), self.step)
        except FlashckptError as error:
            self.refusal = error  # torch passes on only its text
            raise
        return replace(self._source.metadata(), storage_meta=StorageMeta(checkpoint_id=self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise RunError(
                f"{self.path}: ranks found different checkpoints ({', '.join(found[:3])}), because a save "
                "was committed while they started to read. Nothing was loaded. Load again, or name the step "
                "of a run: Reader(path, step=…).",
                path=self.path,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: AnyPlanner) -> Future[None]:
        source = self._opened
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if values and not isinstance(planner, LoadPlanner):
            raise OptionError(
                f"flashckpt.dcp.Reader got a {type(planner).__name__}, which unpickles every value that is "
                "not a tensor. Nothing was loaded. Pass planner=flashckpt.dcp.LoadPlanner()."
            )
        found = source.values([item.storage_index.fqn for item in values])
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
    def _opened(self) -> _Checkpoint:
        assert self._source is not None, "read_metadata was not called"
        return self._source


def _source(store: Store, step: int | None) -> _Checkpoint:
    """Open a checkpoint. step: None takes the newest. Raises NoSuchStepError, RunError, DamagedError,
    MismatchError."""
    try:
        return _checkpoint_in(store, step)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
        raise DamagedError(
            f"The records of {store.url} do not have the form they were written in ({error!r}). Nothing was "
            "loaded. Load another checkpoint.",
            path=store.url,
        ) from error


def _checkpoint_in(store: Store, step: int | None) -> _Checkpoint:
    if step is None and store.exists(METADATA):
        return _WriterFolder(read_record(store))
    if store.exists(".metadata"):
        raise RunError(
            f"{store.url} is a checkpoint of torch's FileSystemWriter and contains pickles. Nothing was "
            "loaded. Load it with torch's FileSystemReader, or convert it: `flashckpt import`.",
            path=store.url,
        )
    if step is None and files_in(store):
        read_record(store)  # raises the error that no save was completed
    return _Step(resolve(store, step))


Path = tuple[str | int, ...]


class _Checkpoint:
    """An open checkpoint as the items of a state_dict. `tensors`: by name. `paths`: position of each in the
    nested state_dict. `identity`: equal on all ranks that read the same checkpoint. `_values`: what is not a
    tensor, each with its place, the prefix of the names of its leaves.

    Tensors are assembled from all ranks; where ranks differ, rank 0's are taken.
    """

    def __init__(self, record: StepRecord) -> None:
        self.identity = str(record.name)
        self._record, self._whole = record, WholeTensors(record)
        self._leaves = {name: leaf for leaf in self._whole.leaves for name in (leaf.name, *leaf.aliases)}
        self.tensors: dict[str, Leaf] = {}
        self._values: dict[str, tuple[Any, str]] = {}
        self.paths: dict[str, Path] = {}

    def metadata(self) -> Metadata:
        tensors: Mapping[str, Any] = {
            fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=TORCH_DTYPES[leaf.dtype]),
                size=Size(leaf.shape),
                chunks=[ChunkStorageMetadata(offsets=Size([0] * len(leaf.shape)), sizes=Size(leaf.shape))],
            )
            for fqn, leaf in self.tensors.items()
        }
        values = dict.fromkeys(self._values, BytesStorageMetadata())
        return Metadata(state_dict_metadata={**tensors, **values}, planner_data=self.paths)

    def pieces(self, items: list[ReadItem]) -> Iterator[Tensor]:
        """Yield the tensors of the items, in order. Verifies all of them before it yields the first. Raises
        DamagedError, OutOfSpaceError."""
        wanted = []
        for number, item in enumerate(items):
            region = TensorSlice(tuple(item.storage_offsets), tuple(item.lengths))
            wanted.append(self._whole.slice(self.tensors[item.storage_index.fqn], region, str(number)))
        try:
            yield from read_leaves(wanted, self._record, torch.get_num_threads()).values()
        except MissingShardError as error:
            raise DamagedError(
                f"{error} Nothing was loaded. A newer save, or the run's job, may have removed it during the "
                "load: load again.",
                step=self._record.step,
                path=self._record.store.url,
            ) from error

    def values(self, names: Sequence[str]) -> list[Any]:
        """Return values that are not tensors, verified; tensors inside of them are on the CPU."""
        return [self._made(*self._values[name]) for name in names]

    def _made(self, value: Any, name: str) -> Any:
        if type(value) is LeafRef:
            leaf = self._leaves[name]
            tensor = read_leaves([(leaf, self._whole.parts(leaf))], self._record, 1)[leaf.name]
            return value_of(value.about, tensor) if is_stored(value) else tensor
        items = list(children(value))
        made = [(key, self._made(item, join(name, key))) for key, item in items]
        return (
            value if all(a is b for (_, a), (_, b) in zip(items, made, strict=True)) else rebuild(value, made)
        )


class _WriterFolder(_Checkpoint):
    """A checkpoint that a Writer wrote."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        for name, path in record.parts[0].environment["paths"]:
            self.paths[name] = _checked_path(path)
        for rank in (rank for part in record.parts for rank in part.ranks):
            self._values |= {name: (decode(value), "") for name, value in rank.values.items()}
        self.tensors = {fqn_of(leaf.name): leaf for leaf in self._whole.leaves}


def _checked_path(path: Any) -> Path:
    if not path or not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
        raise ValueError("a path has a part that is neither text nor a number")
    return tuple(path)


# Steps of a run


PART = "state_dict"
"""The name of the one part of a run that `flashckpt.dcp.save` makes."""


class _Step(_Checkpoint):
    """A committed step of a run.

    Names are those of each part's `state_dict()` below the part's name; for an optimizer those of torch's
    `get_optimizer_state_dict`, by the names of parameters. Items of a run that `flashckpt.dcp.save` made have
    no part's name.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        extras: dict[str, dict[str, Any]] = {}
        for number in range(record.world):
            self._add_rank(SavedRank(number, record.rank(number).values), extras)
        left_out = transient_names(record)
        for name, extra in extras.items():
            self._add_module(name, extra, left_out)

    def _add_rank(self, rank: SavedRank, extras: dict[str, dict[str, Any]]) -> None:
        """Add the items that no earlier rank has; of modules, only to `extras`: the extra state of each."""
        for name, entry in rank.entries.items():
            if entry["kind"] == "module":
                extra = extras.setdefault(name, {})
                for place, value in entry.get("extra", {}).items():
                    extra.setdefault(join(place, "_extra_state"), value)
            elif entry["kind"] == "optimizer":
                self._add_optimizer(name, entry, rank)
            else:
                path: Path = () if name == PART and len(rank.entries) == 1 else (name,)
                self._add(path, name, entry["state"])

    def _add_module(self, name: str, extra: dict[str, Any], left_out: frozenset[str]) -> None:
        for place, value in extra.items():
            self._add((name, place[len(name) + 1 :]), place, value)
            left_out |= {leaf for at, ref in references(value, place) for leaf in leaf_names(at, ref)}
        for leaf in self._leaves:
            if leaf.startswith(f"{name}.") and leaf not in left_out:
                self._add_tensor((name, leaf[len(name) + 1 :]), leaf)

    def _add_optimizer(self, name: str, entry: Mapping[str, Any], rank: SavedRank) -> None:
        short = _torch_names(name, entry["params"], rank.entries)
        for (optimizer, full), state in rank.states.items():
            if optimizer == name:
                self._add((name, "state", short[full]), state_name(name, full), state)
        for number, (options, names) in enumerate(zip(entry["groups"], entry["params"], strict=True)):
            path: Path = (name, "param_groups", number)
            for key, option in options.items():
                self._add((*path, key), f"{name}.groups.{number}.{key}", option)
            self._add((*path, "params"), "", [short[full] for full in names])

    def _add(self, path: Path, name: str, value: Any) -> None:
        """Add a value as torch flattens it: dicts by key, and lists if an item is a tensor or has items
        itself."""
        if type(value) is LeafRef and not is_stored(value):
            if name in self._leaves:  # torch has no item for a tensor subclass of several leaves
                self._add_tensor(path, name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._add((*path, str(key)), join(name, key), item)
        elif _is_open(value):
            for index, item in enumerate(value):
                self._add((*path, index), join(name, index), item)
        else:
            self._values.setdefault(self._named(path), (value, name))

    def _add_tensor(self, path: Path, leaf_name: str) -> None:
        self.tensors.setdefault(self._named(path), self._leaves[leaf_name])

    def _named(self, path: Path) -> str:
        fqn = ".".join(map(str, path))
        self.paths.setdefault(fqn, path)
        return fqn


def _torch_names(optimizer: str, groups: Sequence[Sequence[str]], parts: Iterable[str]) -> dict[str, str]:
    """Return full names of an optimizer's parameters (`groups`) -> their names in torch's
    `get_optimizer_state_dict`: those in the module, if one module owns all of them. parts: the names of the
    parts of the state."""
    parts = list(parts)
    owner = {
        full: next((part for part in parts if full.startswith(f"{part}.")), "")
        for group in groups
        for full in group
    }
    owners = {each for each in owner.values() if each not in ("", optimizer)}
    names: dict[str, str] = {}
    for number, group in enumerate(groups):
        for index, full in enumerate(group):
            if owner[full] in ("", optimizer):
                names[full] = f"group{number}[{index}]"
            else:
                names[full] = full if len(owners) > 1 else full[len(owner[full]) + 1 :]
    return names


def _is_open(value: Any) -> bool:
    """Whether torch flattens a list."""
    return type(value) is list and any(
        (type(item) is LeafRef and not is_stored(item)) or isinstance(item, Mapping) or _is_open(item)
        for item in value
    )

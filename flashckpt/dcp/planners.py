"""Planners that keep pickle out of a DCP checkpoint: values that are not tensors become typed JSON.

Owns which values may be saved, and checks every tensor and value before any rank writes. Plans are torch's.
Also converts tensors that hold slices of a larger tensor, described by four attributes (torch 2.15:
`CheckpointableTensor`), to a form that the planners of every supported torch understand: torch before 2.15
would keep one rank's slices and drop those of all other ranks.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager

from flashckpt.errors import MismatchError, StateError
from flashckpt.format.typed import checked, decode_json
from flashckpt.state import values as _registers  # noqa: F401  # registers the types of torch and NumPy
from flashckpt.state.tensors import PLAIN, check, is_sharded, refuse

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_slices(value: object) -> bool:
    """Whether a value is a tensor with the attributes of slices."""
    return isinstance(value, Tensor) and all(hasattr(value, name) for name in ATTRIBUTES)


def slices_in(value: Any, name: str = "") -> str | None:
    """Return the name of the first tensor with slices in nested dicts and lists, or None."""
    if has_slices(value):
        return name
    pairs = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    found = (slices_in(item, f"{name}.{key}" if name else str(key)) for key, item in pairs)
    return next((each for each in found if each is not None), None)


def copy_attributes(source: Tensor, target: Tensor) -> Tensor:
    """Copy the attributes of slices from `source` to its copy `target`."""
    for name in ATTRIBUTES:
        setattr(target, name, getattr(source, name))
    return target


def sliced(value: Any, name: str) -> Any:
    """Return a tensor with slices as `Slices`, which shares its memory; return other values unchanged. Raises
    StateError for attributes that contradict each other or the tensor."""
    if not has_slices(value) or isinstance(value, Slices):
        return value
    _check(value, name)
    made: Any = value.detach().as_subclass(Slices)
    made.whole = torch.Size(value.global_shape)
    made.chunks = [
        (torch.Size(whole), tuple(map(slice, here, map(sum, zip(here, size, strict=True)))), torch.Size(size))
        for whole, here, size in zip(
            value.global_offsets, value.local_offsets, value.local_sizes, strict=True
        )
        # Drop empty slices: one may start at the index of another slice. Keep those of an empty tensor.
        if math.prod(size) or not made.whole.numel()
    ]
    return made


class Slices(Tensor):
    """Slices of a larger tensor, with DCP's methods for shards. `whole`: shape of the larger tensor.
    `chunks`: for each slice the first index in the larger tensor, the place in this tensor, and the shape."""

    whole: torch.Size
    chunks: list[tuple[torch.Size, tuple[slice, ...], torch.Size]]

    def size(self, dim: int | None = None) -> Any:
        """The size of the larger tensor, which DCP compares with the checkpoint's."""
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets, _, sizes in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, place, _ in self.chunks:
            if offsets == index.offset:
                return self.as_subclass(Tensor)[place]
        raise ValueError(f"{index.fqn} has no slice at {index.offset}")


def _check(value: Any, name: str) -> None:
    lists = [value.global_offsets, value.local_offsets, value.local_sizes]
    fits = len({len(each) for each in lists}) == 1 and all(
        len(whole) == len(here) == len(size) == value.dim() == len(value.global_shape)
        and all(0 <= a <= a + n <= most for a, n, most in zip(whole, size, value.global_shape, strict=True))
        and all(0 <= a <= a + n <= most for a, n, most in zip(here, size, value.shape, strict=True))
        for whole, here, size in zip(*lists, strict=False)
    )
    if not fits:
        raise StateError(
            f"{name} has global_shape, global_offsets, local_offsets and local_sizes that contradict each "
            "other or its own shape. Nothing was saved or loaded. Give each slice an offset and a size "
            "inside both.",
            location=name,
        )


# Planners


_SHOWN = 5


class SavePlanner(DefaultSavePlanner):
    """Like torch's DefaultSavePlanner, with its options. Raises StateError, on all ranks and before anything
    is written, for values that typed JSON cannot hold and tensors that have more than their bytes."""

    _encoded: dict[str, bytes]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {fqn: sliced(value, fqn) for fqn, value in self.state_dict.items()}

    def create_local_plan(self) -> SavePlan:
        self._encoded = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, Tensor):
                check_tensor(value, fqn)
            else:
                self._encoded[fqn] = checked(value, fqn).data
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._encoded[write_item.index.fqn])
        return object


class LoadPlanner(DefaultLoadPlanner):
    """Like torch's DefaultLoadPlanner, with its options. Raises MismatchError, before anything is loaded, for
    names that the checkpoint lacks and tensors of another shape."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        others = list(_others(state_dict))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # While searching for meta tensors, torch replaces values of unknown types by None: restore them.
        for path, value in others:
            _container(state_dict, path)[path[-1]] = value
        self.state_dict = {fqn: sliced(value, fqn) for fqn, value in self.state_dict.items()}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        rows = []
        for fqn, value in self.state_dict.items():
            found = self.metadata.state_dict_metadata.get(fqn)
            here = f"a tensor of {list(value.size())}" if isinstance(value, Tensor) else type(value).__name__
            if found is None:
                rows += [] if self.allow_partial_load else [(fqn, "missing", here)]
            elif isinstance(found, TensorStorageMetadata) and (
                not isinstance(value, Tensor) or value.size() != found.size
            ):
                rows.append((fqn, f"a tensor of {list(found.size)}", here))
        if rows:
            shown = "; ".join(
                f"{name}: {there} in the checkpoint, {here} here" for name, there, here in rows[:_SHOWN]
            )
            raise MismatchError(
                f"The checkpoint does not match the state_dict: {len(rows)} differences ({shown}). Nothing "
                "was loaded. Give the state_dict the checkpoint's names and shapes, or use "
                "LoadPlanner(allow_partial_load=True) to leave missing names unchanged.",
                differences=tuple(rows),
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.load_value(read_item, decode_json(value.getbuffer()))

    def load_value(self, read_item: ReadItem, value: object) -> None:
        """Set a value that is not a tensor."""
        fqn = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            self.state_dict[fqn] = value
            return
        path = self.mappings[fqn]
        container = _container(self.original_state_dict, path)
        container[_key(container, path[-1])] = value


def _others(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield values in nested dicts and lists, with their paths, except tensors, numbers and text."""
    if isinstance(value, dict) or type(value) is list:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _others(item, (*path, key))
    elif not isinstance(value, (Tensor, int, float, str, bytes, type(None))):
        yield path, value


def _container(state_dict: Any, path: Sequence[Any]) -> Any:
    """Return the container of the item at a path."""
    for part in path[:-1]:
        state_dict = state_dict[_key(state_dict, part)]
    return state_dict


def _key(container: Any, part: Any) -> Any:
    """Find the key for a part of a flattened name: DCP turns keys that are numbers into text."""
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise StateError unless bytes, dtype and shape describe this rank's part of the tensor completely."""
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            check_tensor(shard.tensor, name)
        return
    here: Any = tensor
    if is_sharded(tensor):
        here = here.to_local()
    elif isinstance(tensor, Slices):
        here = tensor.as_subclass(Tensor)
    if type(here) not in PLAIN:
        refuse(
            name,
            f"is a {type(here).__name__}, which has more than one tensor's bytes",
            "Save its plain tensors.",
        )
    check(here, name)


# Staging for an asynchronous save, inside the call, so that the call raises errors. Never returns a future:
# torch reports a staging future that failed early as done.


class Stager(AsyncStager):
    """For `torch.distributed.checkpoint.async_save(async_stager=…)`; a Writer is also a Stager. `stage`
    returns a copy in host memory that shares nothing with the state_dict. Raises StateError for values that
    cannot be saved."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any, **_: Any) -> Any:
        return {key: _staged(value, str(key)) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Do nothing: staging is complete when `stage` returns."""

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _staged(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        check_tensor(sliced(value, name), name)
        if hasattr(value, "local_shards"):  # a ShardedTensor, whose `to` copies only to another device
            return copy.deepcopy(value).cpu()
        copied = value.detach().to("cpu", copy=True)
        return copy_attributes(value, copied) if has_slices(value) else copied
    if isinstance(value, Mapping):
        return {key: _staged(item, f"{name}.{key}") for key, item in value.items()}
    if type(value) is list:
        return [_staged(item, f"{name}.{index}") for index, item in enumerate(value)]
    return checked(value, name).value

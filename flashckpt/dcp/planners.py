"""Planners that keep pickle out of a DCP checkpoint: values that are not tensors become typed JSON.

Owns which values may be saved, and checks every tensor and value before any rank writes. Plans are torch's.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager

from flashckpt.errors import MismatchError, StateError
from flashckpt.format.typed import checked, decode_json
from flashckpt.state import values as _registers  # noqa: F401  # registers the types of torch and NumPy
from flashckpt.state.tensors import PLAIN, check, is_sharded, refuse

_SLICES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_SHOWN = 5


def refuse_slices(value: Any, name: str = "") -> None:
    """Raise StateError if nested dicts and lists have a tensor that describes itself as slices of a larger
    one: planners of torch before 2.15 would keep one rank's slices and drop those of all other ranks."""
    if isinstance(value, Tensor) and all(hasattr(value, each) for each in _SLICES):
        raise StateError(
            f"{name} has slices of a larger tensor (CheckpointableTensor), which flashckpt.dcp does not "
            "support. Nothing was saved or loaded. Give DTensors or plain tensors.",
            location=name,
        )
    pairs = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, list) else pairs:
        refuse_slices(item, f"{name}.{key}" if name else str(key))


class SavePlanner(DefaultSavePlanner):
    """Like torch's DefaultSavePlanner, with its options. Raises StateError, on all ranks and before anything
    is written, for values that typed JSON cannot hold and tensors that have more than their bytes."""

    _encoded: dict[str, bytes]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        refuse_slices(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

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
        refuse_slices(state_dict)
        others = list(_others(state_dict))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # While searching for meta tensors, torch replaces values of unknown types by None: restore them.
        for path, value in others:
            _container(state_dict, path)[path[-1]] = value

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
        refuse_slices(state_dict)
        return {key: _staged(value, str(key)) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Do nothing: staging is complete when `stage` returns."""

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _staged(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        check_tensor(value, name)
        if hasattr(value, "local_shards"):  # a ShardedTensor, whose `to` copies only to another device
            return copy.deepcopy(value).cpu()
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _staged(item, f"{name}.{key}") for key, item in value.items()}
    if type(value) is list:
        return [_staged(item, f"{name}.{index}") for index, item in enumerate(value)]
    return checked(value, name).value

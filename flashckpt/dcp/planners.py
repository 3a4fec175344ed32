"""The planners that keep pickle out of a DCP checkpoint: what is no tensor is typed JSON.

Owns what may be saved: every tensor and value is checked before any rank writes. Plans are torch's own.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from flashckpt.dcp.slices import Slices, sliced
from flashckpt.errors import MismatchError
from flashckpt.format.typed import checked, decode_json
from flashckpt.state import values as _  # noqa: F401  # registers the types of torch and NumPy
from flashckpt.state.tensors import PLAIN, check, is_sharded, refuse

_SHOWN = 5


class SavePlanner(DefaultSavePlanner):
    """Plans as torch's DefaultSavePlanner does, with its options. Raises StateError, on all ranks and before
    anything is written, for a value that typed JSON cannot hold and a tensor that has more than its bytes."""

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
    """Plans as torch's DefaultLoadPlanner does, with its options. Raises MismatchError, before anything is
    loaded, for names that the checkpoint lacks and tensors of another shape."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        others = list(_others(state_dict))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # torch looks for meta tensors in it, and puts None in the place of what it does not know.
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
                f"The checkpoint does not have what the state_dict asks for: {len(rows)} differences "
                f"({shown}). Nothing was loaded. Give the state_dict the checkpoint's names and shapes, or "
                "LoadPlanner(allow_partial_load=True) to leave missing names as they are.",
                differences=tuple(rows),
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.load_value(read_item, decode_json(value.getbuffer()))

    def load_value(self, read_item: ReadItem, value: object) -> None:
        """Put a value that is no tensor in its place."""
        fqn = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            self.state_dict[fqn] = value
            return
        path = self.mappings[fqn]
        container = _container(self.original_state_dict, path)
        container[_key(container, path[-1])] = value


def _others(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What nested dicts and lists hold beside tensors, numbers and text, by path."""
    if isinstance(value, dict) or type(value) is list:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _others(item, (*path, key))
    elif not isinstance(value, (Tensor, int, float, str, bytes, type(None))):
        yield path, value


def _container(state_dict: Any, path: Sequence[Any]) -> Any:
    """What holds the item at a path."""
    for part in path[:-1]:
        state_dict = state_dict[_key(state_dict, part)]
    return state_dict


def _key(container: Any, part: Any) -> Any:
    """The key of which a flattened name has the text: DCP turns keys that are numbers into text."""
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise StateError unless the memory of this rank's part of the tensor holds all there is to it."""
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

"""Tensors that are slices of a larger tensor by four attributes (torch 2.15: `CheckpointableTensor`), in the
form that the planners of every supported torch understand.

Without this, a torch before 2.15 takes such a tensor for a replica: it keeps one rank's slices and drops
those of all other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from flashckpt.errors import StateError

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_slices(value: object) -> bool:
    """Whether a tensor says by its attributes that it is slices of a larger one."""
    return isinstance(value, Tensor) and all(hasattr(value, name) for name in ATTRIBUTES)


def slices_in(value: Any, name: str = "") -> str | None:
    """Return the name of the first such tensor in nested dicts and lists, or None."""
    if has_slices(value):
        return name
    pairs = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    found = (slices_in(item, f"{name}.{key}" if name else str(key)) for key, item in pairs)
    return next((each for each in found if each is not None), None)


def copy_attributes(source: Tensor, target: Tensor) -> Tensor:
    """Give `target`, a copy of `source`, the same attributes."""
    for name in ATTRIBUTES:
        setattr(target, name, getattr(source, name))
    return target


def sliced(value: Any, name: str) -> Any:
    """The tensor, sharing its memory, with the methods by which DCP asks for shards; any other value as it
    is. Raises StateError for attributes that contradict each other or the tensor."""
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
        # An empty slice may begin where another one begins. Of a tensor without elements there is no other.
        if math.prod(size) or not made.whole.numel()
    ]
    return made


class Slices(Tensor):
    """Slices of a larger tensor. `whole`: its shape. `chunks`: first index in it, place in this tensor,
    shape."""

    whole: torch.Size
    chunks: list[tuple[torch.Size, tuple[slice, ...], torch.Size]]

    def size(self, dim: int | None = None) -> Any:
        """That of the larger tensor, which DCP compares with the checkpoint's."""
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
            f"{name} has global_shape, global_offsets, local_offsets and local_sizes that do not fit each "
            "other or its own shape. Nothing was saved or loaded. Give each slice an offset and a size "
            "inside both.",
            location=name,
        )

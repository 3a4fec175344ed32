"""The plan: which leaves a snapshot holds, where each lies now and where it goes in the image.

Owns the layout, strong references to the tensors (so their storages outlive a copy) and the arrays of
addresses that native code reads. Decides nothing about ways, copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.division import SharedLeaves, Sharing
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.format.metadata import ReplicaSet, geometry, plan_bytes, replicas_bytes
from flashckpt.format.replicas import ranks_of
from flashckpt.memory.control_page import SlotSize

if TYPE_CHECKING:
    from flashckpt.state.tree import Walk
from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.tensors import DTYPE_NAMES, has_memory, leaf_of, same_memory, strides

Addresses = NDArray[np.uint64]
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
# In the place of a constant that counts no more.
_NOTHING = LiveLeaf("", torch.empty(0, device="cpu"), "other", None, None, None)


def local(tensor: Tensor) -> Tensor:
    """The tensor whose bytes are this rank's: a DTensor's own data_ptr is 0, its local tensor's is not."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory is its image: row-major, and no operation pending on its bits."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@dataclass(frozen=True, slots=True)
class ConstantsRegion:
    """A sealed region: its name and nonce, the leaves in it, and their digests in the same order. Not made
    yet, it has no name."""

    name: str
    nonce: int
    layout: Layout = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    def by_name(self) -> dict[str, tuple[Leaf, int]]:
        pairs = zip(self.layout.leaves, self.digests, strict=True)
        return {leaf.name: (leaf, digest) for leaf, digest in pairs}


class Plan:
    """Leaves of one walk, in the order of the digest table: ordinary ones in image order, then those of the
    `region` to which snapshots leave their constants. Every array has one entry a leaf; offsets are in bytes
    from the first byte of the image that has it, and addresses are those of the live tensors. Leaves from
    `first_left` on are digested and not copied: other ranks of the node have their bytes, or the region.

    `used` names the leaves that are left to the region. Others of it are `outdated`: they have an entry with
    the region's digest, and no tensor. `only` names what of a walk is planned, None for all. `sharing` says
    which leaves other ranks hold too, and which of these write them; `constants`
    has what was found to be constant, and whether it still is."""

    def __init__(
        self,
        walk: Walk,
        region: ConstantsRegion | None = None,
        used: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        sharing: Sharing | None = None,
        constants: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        lives = [live for live in walk.leaves if only is None or live.name in only]
        by_name = {live.name: live for live in lives}
        ordinary = [
            leaf_of(e.name, local(e.tensor), tuple(e.aliases), e.box) for e in lives if e.name not in used
        ]
        plain = {e.name for e in lives if is_plain(local(e.tensor))} if sharing is not None else ()
        sets = sharing.sets(lives, ordinary, constants, plain) if sharing is not None else []
        mine = (None, sharing.rank if sharing is not None else None)
        elsewhere = {name for each in sets for name, by in each.writers.items() if by not in mine}
        left = {name for each in sets for name, by in each.holders.items() if by not in mine}
        assert left <= elsewhere, "what a rank writes must stand in its own slot"
        shard = Layout.of(each for each in ordinary if each.name not in elsewhere)
        self.image = SlotImage(
            shard,
            region.layout if region is not None else None,
            _layout(each for each in ordinary if each.name in elsewhere - left),
            _layout(each for each in ordinary if each.name in left),
        )
        self.region = region
        self.leaves = self.image.leaves
        self.outdated = self.image.outdated
        self.first_left, self.first_constant = self.image.first_left, self.image.first_constant
        self.constants_bytes = self.image.constants_bytes
        self.json = plan_bytes(self.image.shard)
        self.constants_json = plan_bytes(self.image.constants) if self.image.constants is not None else b""
        self.replicas_json = self._said_of_replicas(sets)
        nonce = b"" if region is None else region.nonce.to_bytes(8, "little")
        self.plan_id = _native.xxh3_64(self.json + self.constants_json + self.replicas_json + nonce)
        self.lives = [
            _NOTHING if index in self.outdated else by_name[leaf.name]
            for index, leaf in enumerate(self.leaves)
        ]
        self.tensors = [local(live.tensor) for live in self.lives]
        sizes = (0 if i in self.outdated else leaf.num_bytes for i, leaf in enumerate(self.leaves))
        self.sizes: Addresses = np.fromiter(sizes, dtype=np.uint64, count=len(self.leaves))
        self.offsets: Addresses = np.array(self.image.starts(), dtype=np.uint64)
        self.odd = frozenset(i for i, tensor in enumerate(self.tensors) if not is_plain(tensor))
        self._devices = [tensor.device for tensor in self.tensors]
        self._ties = [(live, tied) for live in self.lives for tied in live.tied]
        self._dynamic = [
            i for i, live in enumerate(self.lives) if live.container is None and i not in self.outdated
        ]
        self.addresses: Addresses = np.zeros(len(self.lives), dtype=np.uint64)
        self._standing = _native.Standing(walk.guards, walk.anchors)
        self._watch: _native.Watch | None = None
        self._arm()

    def _said_of_replicas(self, sets: Sequence[SharedLeaves]) -> bytes:
        index = {leaf.name: i for i, leaf in enumerate(self.leaves) if i not in self.outdated}
        rows = []
        for each in sets:
            names = sorted(each.writers, key=index.__getitem__)
            columns = [tuple(of[name] for name in names) for of in (each.writers, each.holders)]
            rows.append(ReplicaSet(ranks_of(each.ranks), tuple(index[name] for name in names), *columns))
        return replicas_bytes(self.image.kept, self.image.left, rows)

    def metadata_sizes(self, values_bytes: int) -> tuple[int, int, int, int, int]:
        """Of the parts of a slot's metadata, as `format.metadata` takes them."""
        constants, replicas = len(self.constants_json), len(self.replicas_json)
        return len(self.json), len(self.leaves), values_bytes, constants, replicas

    @property
    def gradient_bytes(self) -> int:
        """Of the leaves, those that are gradients."""
        pairs = zip(self.lives, self.sizes.tolist(), strict=True)
        return sum(size for live, size in pairs if live.kind == "gradient")

    def room(self, values_bytes: int) -> SlotSize:
        """What a slot has to have room for."""
        return SlotSize(geometry(*self.metadata_sizes(values_bytes)).num_bytes, self.image.num_bytes)

    def update(self) -> list[int] | None:
        """Compare the live state with the plan; take over new memory of the same leaves. Which gradients are
        leaves is not asked: the values, which come first, read that, and walk anew where it has changed.

        Returns the indexes of leaves that lie elsewhere now; None where the walk must be made again.
        """
        if not self._standing.stands():
            return None
        assert self._watch is not None
        changed = self._watch.changed(self._watched_addresses.data)
        indexes = sorted({self._watched[i] for i in changed})
        if not all(self._patch(index) for index in indexes):
            return None
        if indexes:
            self._arm()
        fresh = self._fresh()
        return None if fresh is None or not self._ties_hold() else indexes + fresh

    def _ties_hold(self) -> bool:
        """Whether what is stored once is still one: another object in one of its places, or other memory
        under one of its objects, has undone the tie."""
        return all(tied is live.tensor or same_memory(live.tensor, tied) for live, tied in self._ties)

    def _fresh(self) -> list[int] | None:
        """Take over the tensors that their owner makes anew each time, or hands out again after it has moved
        them; None where they are others."""
        moved = []
        for index in self._dynamic:
            tensor = local(self.lives[index].tensor)
            if not self._fits(index, tensor):
                return None
            if tensor is self.tensors[index] and tensor.data_ptr() == int(self.addresses[index]):
                continue
            self.tensors[index] = tensor
            self.addresses[index] = tensor.data_ptr()
            moved.append(index)
        return moved

    def release(self) -> None:
        if self._watch is not None:
            self._watch.release()
            self._watch = None

    def _fits(self, index: int, tensor: Tensor) -> bool:
        """Whether a tensor can be read as the plan has it. Compared with the plan, not with the tensor it was
        made from: changes in place (resize_, t_, .data=, .cuda()) keep the object, a storage's all else."""
        leaf = self.leaves[index]
        return (
            tensor.shape == leaf.shape
            and DTYPE_NAMES.get(tensor.dtype) == leaf.dtype
            and tensor.device == self._devices[index]
            and strides(tensor) == leaf.stride
            and is_plain(tensor) == (index not in self.odd)
            and has_memory(tensor)
        )

    def _patch(self, index: int) -> bool:
        live = self.lives[index]
        try:
            found = _item(live.container, live.key)
        except (KeyError, IndexError, AttributeError):
            return False
        if not isinstance(found, Tensor) or not self._fits(index, local(found)):
            return False
        if live.kind == "parameter" and found is not live.tensor and not isinstance(live.container, Tensor):
            return False  # another parameter: its gradient, and whether an optimizer has it, are others
        live.tensor = found
        self.tensors[index] = local(found)
        return True

    def _arm(self) -> None:
        """Read every address once and watch every tensor that has a place of its own in the state. Of a
        tensor with an inner one (a DTensor's local tensor) both are watched."""
        self.release()
        items: list[tuple[Any, Any]] = []
        tensors: list[Tensor] = []
        self._watched: list[int] = []
        for index, live in enumerate(self.lives):
            tensor = self.tensors[index]
            self.addresses[index] = tensor.data_ptr()
            if live.container is None:
                continue
            items.append((live.container, live.key))
            tensors.append(live.tensor)
            self._watched.append(index)
            if tensor is not live.tensor:
                items.append((live.tensor, "_local_tensor"))
                tensors.append(tensor)
                self._watched.append(index)
        self._watched_addresses: Addresses = np.zeros(len(items), dtype=np.uint64)
        self._watch = _native.Watch(items, tensors)


def _layout(leaves: Iterable[Leaf]) -> Layout | None:
    found = tuple(leaves)
    return Layout.of(found) if found else None


def _item(container: Any, key: Any) -> Any:
    by_name = isinstance(key, str) and not isinstance(container, dict)
    return getattr(container, key) if by_name else container[key]

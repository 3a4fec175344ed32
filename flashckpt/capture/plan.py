"""The plan of a snapshot: its leaves, their current addresses, and their places in the image.

Owns the layout, strong references to the tensors (so that their storages outlive a copy) and the arrays of
addresses that native code reads. Never chooses ways and never copies.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashckpt import _native
from flashckpt.format.layout import EVERY, NO_LEAVES, Layout, Leaf, SlotImage, ranks_of
from flashckpt.format.metadata import ReplicaSet, geometry, plan_bytes
from flashckpt.memory.region import SlotSize
from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.tensors import DTYPE_NAMES, has_memory, leaf_of, same_memory, strides

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf
    from flashckpt.state.tree import Walk

log = logging.getLogger(__name__)


Addresses = NDArray[np.uint64]
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
# The placeholder for an outdated constant.
_OUTDATED = LiveLeaf("", torch.empty(0, device="cpu"), "other", None, None, None)


def local(tensor: Tensor) -> Tensor:
    """Return the tensor with this rank's data: the local tensor of a DTensor, whose own data_ptr is 0."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory can be copied as it is: row-major, without a lazy conj or neg."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@dataclass(frozen=True, slots=True)
class ConstantsRegion:
    """A region of constants: its name ("" for a planned one) and nonce, its leaves, and their digests in the
    same order."""

    name: str
    nonce: int
    layout: Layout = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    def by_name(self) -> dict[str, tuple[Leaf, int]]:
        pairs = zip(self.layout.leaves, self.digests, strict=True)
        return {leaf.name: (leaf, digest) for leaf, digest in pairs}


class Plan:
    """The leaves of one walk, in the order of the digest table: ordinary leaves in image order, then those of
    the constants region. Each array has one entry for each leaf; offsets are in bytes from the start of the
    leaf's image, and addresses are those of the live tensors. Leaves from `first_left` on are digested and
    not
    copied: other ranks of the node hold their bytes, or the region does.

    region: the region that holds the constants.
    used: the names of the leaves that the region holds for this plan. Its other leaves are `outdated`: their
        entries have the region's digest and no tensor.
    only: the names of the leaves to plan; None for all.
    sharing: the leaves that other ranks hold too, and their writers.
    group: returns the group of a tensor, for the order of the image (`Layout.of`).
    constants: name -> whether the leaf is still constant, of all leaves that ever were.
    """

    def __init__(
        self,
        walk: Walk,
        region: ConstantsRegion | None = None,
        used: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        sharing: Sharing | None = None,
        group: Callable[[Tensor], int] = lambda tensor: 0,
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
        left = {name for each in sets for name, by in each.owners.items() if by not in mine}
        assert left <= elsewhere, "a rank's own slot must hold all leaves that it writes"
        groups = {e.name: group(local(e.tensor)) for e in lives}
        shard = Layout.of((each for each in ordinary if each.name not in elsewhere), groups)
        self.image = SlotImage(
            shard,
            region.layout if region is not None else NO_LEAVES,
            _layout((each for each in ordinary if each.name in elsewhere - left), groups),
            _layout((each for each in ordinary if each.name in left), groups),
        )
        self.region = region
        self.leaves = self.image.leaves
        self.outdated = self.image.outdated
        self.first_left, self.first_constant = self.image.first_left, self.image.first_constant
        self.json = plan_bytes(self.image, self._replica_sets(sets))
        nonce = b"" if region is None else region.nonce.to_bytes(8, "little")
        self.plan_id = _native.xxh3_64(self.json + nonce)
        self.lives = [
            _OUTDATED if index in self.outdated else by_name[leaf.name]
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
        self._watch_tensors()

    def _replica_sets(self, sets: Sequence[SharedLeaves]) -> list[ReplicaSet]:
        index = {leaf.name: i for i, leaf in enumerate(self.leaves) if i not in self.outdated}
        rows = []
        for each in sets:
            names = sorted(each.writers, key=index.__getitem__)
            columns = [tuple(of[name] for name in names) for of in (each.writers, each.owners)]
            rows.append(ReplicaSet(ranks_of(each.ranks), tuple(index[name] for name in names), *columns))
        return rows

    def metadata_sizes(self, values_bytes: int) -> tuple[int, int, int]:
        """Return the sizes of a slot's metadata parts, for `format.metadata.geometry`."""
        return len(self.json), len(self.leaves), values_bytes

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the leaves that are gradients."""
        pairs = zip(self.lives, self.sizes.tolist(), strict=True)
        return sum(size for live, size in pairs if live.kind == "gradient")

    def slot_size(self, values_bytes: int) -> SlotSize:
        """Return the size that a slot needs."""
        return SlotSize(geometry(*self.metadata_sizes(values_bytes)).num_bytes, self.image.num_bytes)

    def update(self) -> list[int] | None:
        """Compare the live state with the plan, and patch the plan if leaves have new memory. Does not check
        which gradients are leaves: the values, which are read before, do so and walk again after a change.

        Returns the indexes of leaves with new addresses; None if the state must be walked again.
        """
        if not self._standing.stands():
            return None
        assert self._watch is not None
        changed = self._watch.changed(self._watched_addresses.data)
        indexes = sorted({self._watched[i] for i in changed})
        if not all(self._patch(index) for index in indexes):
            return None
        if indexes:
            self._watch_tensors()
        dynamic = self._update_dynamic()
        # A new object in one place of a tied tensor, or new memory of one of its objects, ends the tie.
        ties_hold = all(tied is live.tensor or same_memory(live.tensor, tied) for live, tied in self._ties)
        return None if dynamic is None or not ties_hold else indexes + dynamic

    def _update_dynamic(self) -> list[int] | None:
        """Update the tensors that their owner creates at each access or has moved; return their indexes, or
        None if one does not fit."""
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
        """Whether a tensor can be read as planned. Compares with the plan, not with the former tensor:
        in-place changes (resize_, t_, .data=, .cuda()) keep the object, and a resized storage changes nothing
        else."""
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
            return False  # a new parameter has another gradient, and perhaps no optimizer
        live.tensor = found
        self.tensors[index] = local(found)
        return True

    def _watch_tensors(self) -> None:
        """Read each address once, and watch each tensor that has a container. Of a DTensor, watch the local
        tensor, too."""
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


def _layout(leaves: Iterable[Leaf], groups: Mapping[str, int]) -> Layout:
    found = tuple(leaves)
    return Layout.of(found, groups) if found else NO_LEAVES


def _item(container: Any, key: Any) -> Any:
    by_name = isinstance(key, str) and not isinstance(container, dict)
    return getattr(container, key) if by_name else container[key]


# Each rank writes its own file in any case; to divide less than a chunk saves nothing.
LEAST_BYTES = 4 << 20


class ReplicaAssignment(NamedTuple):
    """writers: leaf name -> the rank that writes it. holders: leaf name -> the rank of this node that holds
    it in memory."""

    writers: Mapping[str, int]
    owners: Mapping[str, int]


def divide(
    sizes: Mapping[str, int],
    members: Collection[int],
    node: Collection[int],
    least_bytes: int = LEAST_BYTES,
) -> ReplicaAssignment:
    """Assign leaves that all `members` hold, by their sizes in bytes. node: the ranks of one node, with at
    least one member. On its own node, the writer of a leaf also holds it."""
    ranks = sorted(members)
    count = min(len(ranks), max(1, sum(sizes.values()) // max(1, least_bytes)))
    # Spread over all ranks, so that not only the first nodes write.
    chosen = [ranks[place * len(ranks) // count] for place in range(count)]
    writers = _balanced(sizes, dict.fromkeys(chosen, 0))
    here = sorted(set(ranks) & set(node))
    owners = {name: rank for name, rank in writers.items() if rank in here}
    loads = dict.fromkeys(here, 0)
    for name, rank in owners.items():
        loads[rank] += sizes[name]
    others = {name: num_bytes for name, num_bytes in sizes.items() if name not in owners}
    return ReplicaAssignment(writers, {**owners, **_balanced(others, loads)})


def _balanced(sizes: Mapping[str, int], loads: Mapping[int, int]) -> dict[str, int]:
    """Assign each leaf to the rank with the least bytes, the largest leaf first (LPT scheduling)."""
    heap = sorted((num_bytes, rank) for rank, num_bytes in loads.items())
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + sizes[name], rank))
        found[name] = rank
    return found


class SharedLeaves(NamedTuple):
    """The leaves that all `ranks` hold. writers: leaf name -> the rank that writes it; None if each rank
    does. holders: leaf name -> the rank of this node that holds its bytes in its slot; None if each rank
    does."""

    ranks: tuple[int, ...]
    writers: Mapping[str, int | None]
    owners: Mapping[str, int | None]


class Sharing:
    """The treatment of leaves that other ranks hold too.

    rank: this rank.
    is_divided: one rank writes each leaf, and all readers must be able to reach its files. Otherwise each
        rank writes all leaves.
    node: the ranks of this node. They divide the leaves that all of them hold in memory, too, unless
        `holds_whole`.
    by_rank: the names of leaves that have diverged; EVERY for all.
    """

    def __init__(
        self,
        rank: int,
        *,
        is_divided: bool,
        least_bytes: int = LEAST_BYTES,
        node: Collection[int] = (),
    ) -> None:
        self.rank, self.is_divided, self._least_bytes = rank, is_divided, least_bytes
        self._node = frozenset(node) | {rank}
        self.holds_whole = len(self._node) == 1 or not is_divided
        self.by_rank: frozenset[str] = frozenset()

    def keep_by_rank(self, names: Iterable[str]) -> None:
        """Let each rank write its own copy of these leaves from the next capture on, because they differ. Any
        thread."""
        fresh = frozenset(names) - self.by_rank
        if fresh:
            self.by_rank |= fresh
            log.warning("%d leaves differ among ranks: each rank keeps its own from now on", len(fresh))

    def hold_whole(self) -> None:
        """Let each rank of this node hold its own copy of all leaves from the next capture on, because the
        ranks' assignments or leaves differ. Any thread."""
        if not self.holds_whole:
            self.holds_whole = True
            log.warning(
                "leaves that should be equal on the ranks of this node differ, or their assignment does: a "
                "snapshot is incomplete, and from now on each rank keeps its own copy of all leaves in memory"
            )

    @property
    def conditions(self) -> tuple[frozenset[str], bool]:
        """The facts on which a plan depends."""
        return self.by_rank, self.holds_whole

    def sets(
        self,
        lives: Sequence[LiveLeaf],
        copied: Sequence[Leaf],
        constants: Mapping[str, bool],
        plain: Collection[str],
    ) -> list[SharedLeaves]:
        """Return the shared leaves of a plan, by the ranks that hold them.

        copied: the leaves in a slot.
        constants: name -> whether it is still constant. Each rank writes its own constants, because some
            ranks may have no region for them and all must compute the same assignment. Former constants,
            which a rank without a region does not notice, are divided separately, and only in storage.
        plain: the names of leaves that are digested in place. Each slot holds the others.
        """
        names: dict[tuple[int, ...], list[str]] = {}
        for live in lives:
            is_equal = self.by_rank.isdisjoint((EVERY, live.name))
            if is_equal and self.rank in live.replicas and len(live.replicas) > 1:
                names.setdefault(live.replicas, []).append(live.name)
        sizes = {leaf.name: leaf.num_bytes for leaf in copied}
        always = {name: size for name, size in sizes.items() if name not in constants}
        since = {name: size for name, size in sizes.items() if not constants.get(name, True)}
        return [self._shared(ranks, names[ranks], always, since, plain) for ranks in sorted(names)]

    def _shared(
        self,
        ranks: tuple[int, ...],
        names: Sequence[str],
        always: Mapping[str, int],
        since: Mapping[str, int],
        plain: Collection[str],
    ) -> SharedLeaves:
        """Assign the leaves of one set of ranks. always, since: the sizes of the leaves that were never
        constant and of former constants; each group is divided separately."""
        writers: dict[str, int | None] = dict.fromkeys(names)
        owners = writers.copy()
        for sizes in (since, always) if self.is_divided else ():
            here = {name: sizes[name] for name in names if name in sizes}
            division = divide(here, ranks, self._node, self._least_bytes)
            writers |= division.writers
            if sizes is always and self._divides_memory(ranks, here):
                owners |= {name: rank for name, rank in division.owners.items() if name in plain}
        return SharedLeaves(ranks, writers, owners)

    def _divides_memory(self, ranks: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        # Only if all ranks of the node are in the set, so that a single number compares all of them.
        is_worth_it = sum(sizes.values()) >= 2 * self._least_bytes
        return is_worth_it and not self.holds_whole and self._node <= set(ranks)

"""Snapshots that survived on this node: in slots in memory, where they are verified and used in place, and in
the node's cache, from which they are copied into memory of this process.

Leaves that a rank left to others of its node are read in their slots, and count only with the digest of the
rank's own table. The slots of others are not pinned here: only a trainer of its own rank writes a slot, and
none does before all ranks have restored their state. A slot that is written all the same is found by the
digests of the live state.

A file of the cache is read with `preadv`, never through a mapping: a failing disk raises an error, not
SIGBUS. The reads are buffered, because the ranks of a node read parts of each other's files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from flashckpt.capture.devices import digest_tensors
from flashckpt.commit.choice import Place
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import CommitName
from flashckpt.format.typed import decode_json
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word
from flashckpt.restore.snapshot import Snapshot, leaf_view
from flashckpt.restore.step_reading import check_memory
from flashckpt.threads import results

TIERS = {Place.MEMORY: "memory", Place.CACHE: "cache", Place.HOME: "local", Place.MIRROR: "remote"}

_CHUNK_BYTES = 8 << 20
_MOST_THREADS = 8


@dataclass
class Held:
    """A slot of this rank, mapped by this process or cached, and the owner index of this process in it.

    sealed: the snapshot in it. pinned: its state word while this process has it pinned. constants: the local
    copies of its constants region. others: by rank, the slots of other ranks of this node with the same
    boundary. Of each the copy on the side of the slot itself, memory or cache, comes first: so damage of one
    side leaves the other one usable. region: the one of `constants` that was loaded.
    """

    slot: Slot
    owner: int
    sealed: Sealed
    pinned: Word | None = None
    constants: Sequence[Slot] = ()
    others: Mapping[int, Sequence[Slot]] = field(default_factory=dict)
    region: Slot | None = None

    @property
    def place(self) -> Place:
        return Place.CACHE if self.slot.is_cached else Place.MEMORY

    @property
    def name(self) -> CommitName:
        """The name of its checkpoint, whether it is committed or not. Sorts snapshots, newest last."""
        return CommitName(self.sealed.step, self.sealed.attempt, self.sealed.boundary)

    @property
    def step(self) -> int:
        return self.name.step

    def lacks(self) -> tuple[int, ...]:
        """Return the ranks to which leaves were left and whose slots are not here. Raises DamagedError."""
        owners = {owner for _, owner in self.slot.metadata(self.sealed).divided()}
        return tuple(sorted(owners - {self.slot.rank} - self.others.keys()))

    def close(self) -> None:
        self.unpin()
        for each in (self.slot, *(slot for slots in self.others.values() for slot in slots)):
            each.close()

    def unpin(self) -> None:
        """Return the slot to the keeper and the ring."""
        if self.pinned is not None:
            self.slot.unpin(self.pinned)
            self.pinned = None

    @property
    def _is_still(self) -> bool:
        word = self.slot.state()
        is_sealed = word.state in (SlotState.SEALED, SlotState.PINNED)
        return is_sealed and word.generation == self.sealed.generation


def load(held: Held, threads: int) -> Snapshot:
    """Return the snapshot in a slot, verified. It stays pinned until `Held.unpin`.

    Raises DamagedError if its bytes are not the sealed ones; the slot is unpinned then.
    """
    held.pinned = held.slot.pin(held.owner, held.slot.state())
    # A keeper that persists or audits this snapshot has it pinned and only reads, so this process may too.
    # Only a trainer of this rank, which is this process, overwrites a slot.
    if held.pinned is None and not held._is_still:
        raise DamagedError(
            f"The slot {held.slot.name} no longer holds the snapshot of step {held.step}. It is passed over.",
            step=held.step,
        )
    try:
        return _audited(held, threads)
    except BaseException:
        held.unpin()
        raise


def _audited(held: Held, threads: int) -> Snapshot:
    metadata = held.slot.metadata(held.sealed)
    ranges = [SlotRange(held.slot, 0, metadata.image.num_bytes)]
    if metadata.image.constants.leaves:
        held.region = next((each for each in held.constants if not each.not_held(metadata)), None)
        if held.region is None:
            raise DamagedError(
                f"The constants of the snapshot of step {held.step} in {held.slot.name} are not on this "
                "node. It is passed over.",
                step=held.step,
            )
        ranges.append(SlotRange(held.region, 0, metadata.image.constants.num_bytes))
    own = len(ranges)
    fetched = fetch(ranges + _left_to_others(held, metadata), held.step, threads)
    layout, images, left = metadata.image, fetched[:own], fetched[own:]
    rows = list[tuple[Leaf, torch.Tensor]]()
    for index, (leaf, start) in enumerate(zip(layout.leaves, layout.starts(), strict=True)):
        if layout.first_left <= index < layout.first_constant:
            view, first = left[index - layout.first_left]
        else:
            view, first = images[index >= layout.first_constant]
            first += start
        rows.append((leaf, leaf_view(view, leaf, first)))
    digests = digest_tensors([tensor for _, tensor in rows], threads)
    pairs = zip(rows, digests, metadata.digests, strict=True)
    changed = [leaf.name for (leaf, _), digest, expected in pairs if digest != expected]
    if changed or not held._is_still:
        where = "the cache" if held.slot.is_cached else "memory"
        raise DamagedError(
            f"{len(changed)} leaves of the snapshot of step {held.step} in {where} are not what was captured "
            f"({', '.join(changed[:5])}). It is passed over and never persisted.",
            step=held.step,
        )
    outdated, constants = layout.outdated, layout.constants
    found = [(index, *row) for index, row in enumerate(rows) if index not in outdated]
    return Snapshot(
        step=held.step,
        attempt=held.name.attempt,
        boundary=held.sealed.boundary,
        tier=TIERS[held.place],
        leaves={leaf.name: leaf for _, leaf, _ in found},
        digests={leaf.name: metadata.digests[index] for index, leaf, _ in found},
        values=decode_json(metadata.values),
        tensors={leaf.name: tensor for _, leaf, tensor in found},
        constants=frozenset(leaf.name for index, leaf, _ in found if index >= layout.first_constant),
        region=(constants, tuple(metadata.constants_digests)) if constants.leaves else None,
    )


def _left_to_others(held: Held, metadata: Metadata) -> list[SlotRange]:
    """Return the range of each leaf that was left to another rank, unverified. Raises DamagedError if some
    are not there."""
    if not metadata.image.left.leaves:
        return []
    owners, first = dict(metadata.divided()), metadata.image.first_left
    wanted: dict[int, list[tuple[object, int]]] = {}
    for index, leaf in enumerate(metadata.image.left.leaves, first):
        wanted.setdefault(owners[index], []).append((leaf.content, metadata.digests[index]))
    chosen = {rank: _slot_of_owner(held, rank, leaves) for rank, leaves in wanted.items()}
    found = []
    for index, leaf in enumerate(metadata.image.left.leaves, first):
        slot, starts = chosen[owners[index]]
        found.append(SlotRange(slot, starts[leaf.content, metadata.digests[index]], leaf.num_bytes))
    return found


_Starts = dict[tuple[object, int], int]


def _slot_of_owner(held: Held, rank: int, wanted: Sequence[tuple[object, int]]) -> tuple[Slot, _Starts]:
    """Return a slot of another rank whose metadata has all these leaves, and where they begin in its
    image."""
    for slot in held.others.get(rank, ()):
        starts = _starts(slot, held)
        if starts.keys() >= set(wanted):
            return slot, starts
    raise DamagedError(
        f"Rank {rank} holds leaves of the snapshot of step {held.step} for all ranks of its node, and its "
        "slot does not have them. It is passed over.",
        step=held.step,
    )


def _starts(slot: Slot, held: Held) -> _Starts:
    """Return where leaves begin in the image of another rank's slot, by content and digest; {} if it has
    another boundary."""
    try:
        sealed = slot.sealed()
        if sealed is None or sealed.id != held.sealed.id:
            return {}
        metadata = slot.metadata(sealed)
    except DamagedError:
        return {}
    rows = zip(metadata.image.own, metadata.digests, metadata.image.starts(), strict=False)
    return {(leaf.content, digest): start for leaf, digest, start in rows}


# ---- bytes of slots, in memory and in files


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Bytes of a slot's image."""

    slot: Slot
    start: int
    num_bytes: int


def fetch(ranges: Sequence[SlotRange], step: int, threads: int) -> list[tuple[memoryview, int]]:
    """Return the buffer and the first byte of each range; those of cached slots are read into new memory.
    Raises OutOfSpaceError; DamagedError if a file is truncated or its disk fails."""
    cached = [each for each in ranges if each.slot.is_cached]
    check_memory(sum(each.num_bytes for each in cached), f"The cached copy of step {step}")
    views = [np.empty(each.num_bytes, np.uint8).data for each in cached]
    chunks = [(n, at) for n, each in enumerate(cached) for at in range(0, each.num_bytes, _CHUNK_BYTES)]

    def read(number: int, at: int) -> None:
        each, view = cached[number], views[number][at : at + _CHUNK_BYTES]
        offset = each.slot.image_offset + each.start + at
        while view:
            num_bytes = os.preadv(each.slot.image_descriptor, [view], offset)
            if not num_bytes:
                raise OSError(errno.EIO, f"{each.slot.name} is truncated")
            view, offset = view[num_bytes:], offset + num_bytes

    try:
        at_once = max(1, min(threads, _MOST_THREADS))
        for _ in results("cache", (partial(read, *each) for each in chunks), at_once):
            pass
    except OSError as error:
        if error.errno is None:
            raise  # the handler of a signal, as a TimeoutError: a disk gives a number
        raise DamagedError(
            f"The cached copy of step {step} cannot be read: {error}. It is passed over.", step=step
        ) from error
    filled = iter(views)
    return [
        (next(filled), 0) if each.slot.is_cached else (each.slot.image_view, each.start) for each in ranges
    ]

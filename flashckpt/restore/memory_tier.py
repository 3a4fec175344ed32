"""Snapshots that survived in this node's slots: pinned, audited, given as they stand.

What a rank has left to others of its node is read where it stands in their slots, and counts only with the
digest of the rank's own table. None of these slots is pinned from here: only a trainer of its own rank writes
a slot, and none does before all ranks have filled their state. What would be written all the same is found by
the digests that are taken of the live state then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashckpt.errors import DamagedError
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.format.typed import decode_json
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word
from flashckpt.restore.filling import audit
from flashckpt.restore.snapshot import Snapshot


@dataclass
class Held:
    """A slot of this rank, mapped by this process, and the owner index that this process has in it.

    `sealed` is the snapshot in it, `pinned` the word while it is ours, `constants` the region that the
    snapshot names, mapped, where it names one that is here; `others`, by rank, are the slots of other ranks
    of this node that have the same boundary, mapped.
    """

    slot: Slot
    owner: int
    sealed: Sealed | None = None
    pinned: Word | None = None
    constants: Slot | None = None
    others: Mapping[int, Slot] = field(default_factory=dict)

    @property
    def step(self) -> int:
        assert self.sealed is not None
        return self.sealed.step

    @property
    def age(self) -> tuple[int, int, int]:
        """Sorts snapshots of one rank, newest last."""
        assert self.sealed is not None
        return self.sealed.age

    @property
    def attempt(self) -> AttemptName:
        assert self.sealed is not None
        record = self.sealed.record
        return AttemptName(record.attempt_number, f"{record.attempt_nonce:08x}")

    def lacks(self) -> tuple[int, ...]:
        """The ranks to which leaves of the snapshot were left and whose slots are not here. Raises
        DamagedError."""
        assert self.sealed is not None
        holders = {holder for _, holder in self.slot.metadata(self.sealed).divided()}
        return tuple(sorted(holders - {self.slot.rank} - self.others.keys()))

    def close(self) -> None:
        self.unpin()
        for each in (self.slot, *self.others.values()):
            each.close()

    def unpin(self) -> None:
        """Let the keeper and the ring have the slot again."""
        if self.pinned is not None:
            self.slot.unpin(self.pinned)
            self.pinned = None


def load(held: Held, threads: int) -> Snapshot:
    """The snapshot in a slot, verified. It stays pinned until `Held.unpin`.

    Raises DamagedError where its bytes are not those that were sealed; the slot is then let go.
    """
    assert held.sealed is not None
    held.pinned = held.slot.pin(held.owner, held.slot.state())
    # A keeper that is persisting or auditing this very snapshot has it pinned, and only reads: so may we.
    # Nobody but a trainer of this rank, which is this process, overwrites a slot.
    if held.pinned is None and not _is_still(held):
        raise DamagedError(
            f"The slot {held.slot.name} no longer holds the snapshot of step {held.step}. It is passed over.",
            step=held.step,
        )
    try:
        return _audited(held, threads)
    except BaseException:
        held.unpin()
        raise


def _is_still(held: Held) -> bool:
    assert held.sealed is not None
    word = held.slot.state()
    return word.state in (SlotState.SEALED, SlotState.PINNED) and word.generation == held.sealed.generation


def _audited(held: Held, threads: int) -> Snapshot:
    assert held.sealed is not None
    metadata = held.slot.metadata(held.sealed)
    region = held.constants if metadata.constants is not None else None
    if metadata.constants is not None and (region is None or region.not_held(metadata)):
        raise DamagedError(
            f"The constants of the snapshot of step {held.step} in {held.slot.name} are not in this node's "
            "memory. It is passed over.",
            step=held.step,
        )
    snapshot = Snapshot(
        step=held.step,
        attempt=held.attempt,
        boundary=held.sealed.boundary,
        tier="memory",
        layout=metadata.image,
        digests=metadata.digests,
        values=decode_json(metadata.values),
        image=held.slot.image_view,
        constants_image=region.image_view if region is not None else None,
        left=_left(held, metadata),
    )
    changed = audit(snapshot, threads)
    if changed or not _is_still(held):
        raise DamagedError(
            f"{len(changed)} leaves of the snapshot of step {held.step} in memory are not what was captured "
            f"({', '.join(changed[:5])}). It is passed over and never persisted.",
            step=held.step,
        )
    return snapshot


def _left(held: Held, metadata: Metadata) -> list[tuple[memoryview, int]]:
    """Where each leaf stands that was left to another rank: in which image, and at which byte of it. Whether
    these are the bytes of the boundary is for the audit to say. Raises DamagedError where some are not
    there."""
    if metadata.left is None:
        return []
    # Each of these has a holder, or the metadata would not have been read.
    holders, first = dict(metadata.divided()), metadata.image.first_left
    places = {rank: _places(slot, held) for rank, slot in held.others.items()}
    found = []
    for index, leaf in enumerate(metadata.left.leaves, first):
        rank, wanted = holders[index], (leaf.content, metadata.digests[index])
        start = places.get(rank, {}).get(wanted)
        if start is None:
            raise DamagedError(
                f"Rank {rank} holds {leaf.name} of the snapshot of step {held.step} for all ranks of its "
                "node, and its slot does not have it. It is passed over.",
                step=held.step,
            )
        found.append((held.others[rank].image_view, start))
    return found


def _places(slot: Slot, held: Held) -> dict[tuple[object, int], int]:
    """Where leaves stand in the image of another rank's slot, by content and digest. Nothing where it does
    not say that it has them, of this boundary."""
    assert held.sealed is not None
    try:
        sealed = slot.sealed()
        if sealed is None or sealed.content != held.sealed.content:
            return {}
        metadata = slot.metadata(sealed)
    except DamagedError:
        return {}
    rows = zip(metadata.image.own, metadata.digests, metadata.image.starts(), strict=False)
    return {(leaf.content, digest): start for leaf, digest, start in rows}

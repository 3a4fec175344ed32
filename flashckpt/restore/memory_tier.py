"""Snapshots that survived in this node's slots: pinned, audited, given as they stand."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import DamagedError
from flashckpt.format.names import AttemptName
from flashckpt.format.typed import decode_json
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word
from flashckpt.restore.filling import audit
from flashckpt.restore.snapshot import Snapshot


@dataclass
class Held:
    """A slot of this rank, mapped by this process, and the owner index that this process has in it.

    `sealed` is the snapshot in it, `pinned` the word while it is ours, `constants` the region that the
    snapshot names, mapped, where it names one that is here.
    """

    slot: Slot
    owner: int
    sealed: Sealed | None = None
    pinned: Word | None = None
    constants: Slot | None = None

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
    )
    changed = audit(snapshot, threads)
    if changed or not _is_still(held):
        raise DamagedError(
            f"{len(changed)} leaves of the snapshot of step {held.step} in memory are not what was captured "
            f"({', '.join(changed[:5])}). It is passed over and never persisted.",
            step=held.step,
        )
    return snapshot

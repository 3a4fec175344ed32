"""What the queue asks of the slots that this process holds. Owns the Protocols; who holds the memory has
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from flashckpt.format.names import AttemptName
from flashckpt.memory.page import State, Word
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import Keep


class HeldSlot(Protocol):
    """A slot. `retired`: no trainer uses it any more."""

    retired: bool

    @property
    def slot(self) -> Slot: ...

    def word(self) -> Word | None:
        """None for a word that is none, until it is mended."""

    def state(self) -> State | None: ...

    def sealed(self) -> Sealed | None:
        """What is sealed in it and not damaged."""


class HeldSlots(Protocol):
    def slots(self) -> Sequence[HeldSlot]:
        """The slots: not what several of them share."""

    def shared_by(self, held: Any) -> Slot | None:
        """The region of constants that the snapshot in a slot names, where it is here."""

    def own_index(self, held: Any) -> int:
        """This process's index in the slot's owner table."""

    def other_keepers(self) -> Mapping[str, bool]:
        """Nonces of the other keepers that have a lock here, and whether each still lives."""

    def forget_keeper(self, nonce: str) -> None:
        """Remove the lock of a keeper that is dead."""

    def lend(self, slots: Iterable[Slot]) -> None:
        """Another thread looks at these: none is unmapped under it before `given_back`."""

    def given_back(self) -> None: ...


class Known(Protocol):
    """What a trainer has said of itself. `ranks` are those of its attempt on this node."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def world(self) -> int: ...
    @property
    def attempt(self) -> AttemptName | None: ...
    @property
    def keep(self) -> Keep | None: ...
    @property
    def environment(self) -> Mapping[str, Any]: ...

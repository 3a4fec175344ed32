"""The descriptors of regions that a trainer holds for a keeper to come, which may find no name of theirs.

Owns the descriptors. What a region is, and when it is let go, others say.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from flashckpt.keeper.grants import SlotGrant
from flashckpt.keeper.protocol import MAX_DESCRIPTORS, close_all
from flashckpt.memory import forks
from flashckpt.memory.region import MEMFD


class Possession:
    """`released` names what was let go: a keeper that finds it by name has to be told."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.held: dict[str, int] = {}
        self._lent: set[str] = set()
        self._lock = threading.Lock()
        forks.hold(self)

    def forked(self) -> None:
        for descriptor in self.held.values():
            forks.close(descriptor)
        self.held, self._lent, self._lock = {}, set(), threading.Lock()

    def lend(self, grants: Sequence[SlotGrant]) -> None:
        """Regions to be looked at: memfds are held until slots to be written are granted."""
        with self._lock:
            self._hold([grant for grant in grants if grant.kind == MEMFD], lent=True)
            self._taken_back(grants)

    def keep(self, grants: Sequence[SlotGrant]) -> None:
        """Regions that this trainer uses."""
        with self._lock:
            self._hold(grants, lent=False)
            self._taken_back(grants)

    def end_loans(self) -> None:
        """Slots to be written were granted: what was only looked at is not."""
        with self._lock:
            close_all([self.held.pop(name) for name in self._lent if name in self.held])
            self._lent.clear()

    def release(self, names: Sequence[str]) -> None:
        with self._lock:
            close_all([self.held.pop(name) for name in names if name in self.held])
            self.released = [*self.released, *names][-MAX_DESCRIPTORS:]

    def nameless(self) -> list[int]:
        """Memfds, and regions that somebody has taken the name from: nobody else finds them. Descriptors of
        the caller's own, since those here may be let go at any time."""
        with self._lock:
            return [os.dup(each) for each in self.held.values() if not os.fstat(each).st_nlink]

    def close(self) -> None:
        with self._lock:
            # Forgotten first: a child that is forked in between must not close what has the numbers next.
            held, self.held = self.held, {}
            close_all(list(held.values()))

    def _hold(self, grants: Sequence[SlotGrant], *, lent: bool) -> None:
        for grant in grants:
            if grant.name not in self.held:
                self.held[grant.name] = os.dup(grant.descriptor)
                self._lent |= {grant.name} if lent else set()
        if not lent:
            self._lent -= {grant.name for grant in grants}

    def _taken_back(self, grants: Sequence[SlotGrant]) -> None:
        names = {grant.name for grant in grants}
        self.released = [name for name in self.released if name not in names]

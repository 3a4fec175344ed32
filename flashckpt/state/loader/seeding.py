"""Whether a loader's own generators go on from one phase to the next, or are seeded anew by the program.

A generator that goes on is put back when a run is taken up between two epochs; one that the program has
just seeded for the epoch must be left alone. Owns the evidence; never touches a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.events import log

Marks = dict[str, str]


def marks_of(states: Mapping[str, Any]) -> Marks:
    """A short mark for each generator's state, by path."""
    return {
        path: hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()
        for path, state in states.items()
    }


@dataclass
class Seeding:
    """first: the generators' marks when the run began its first phase. goes_on: whether each was, at the
    newest beginning, as the phase before had left it; absent while only one beginning was seen."""

    first: Marks = field(default_factory=dict)
    goes_on: dict[str, bool] = field(default_factory=dict)

    def see(self, left: Marks | None, now: Marks) -> None:
        """A phase begins: how the one before left the generators (None: not known), and how they are."""
        if not self.first:
            self.first = dict(now)
        if left is not None:
            self.goes_on.update((path, left[path] == mark) for path, mark in now.items() if path in left)

    def left_alone(self, now: Marks) -> frozenset[str]:
        """Those not to be put back, where a run is taken up with generators that stand at `now`.

        After a single epoch there is no evidence but how the program begins: the same as at its first start
        means that it seeds them once, and anything else that it has seeded them for this epoch.
        """
        guessed = [p for p, mark in now.items() if p not in self.goes_on and self.first.get(p) != mark]
        if guessed:
            log.info(
                "The loader's generators %s do not begin as at the start of the run: taken as seeded for "
                "this epoch by the program, and left alone. If they are seeded at random, give them a seed.",
                guessed,
            )
        self.goes_on.update(dict.fromkeys(guessed, False))
        return frozenset(path for path in now if not self.goes_on.get(path, True))

    def plain(self) -> dict[str, Any]:
        return {"first": dict(self.first), "goes_on": dict(self.goes_on)}

    @classmethod
    def read(cls, saved: Any) -> Seeding:
        """Raises ValueError for anything but what `plain` gives."""
        if not isinstance(saved, dict) or saved.keys() != {"first", "goes_on"}:
            raise ValueError("its seeding cannot be read")
        first, goes_on = saved["first"], saved["goes_on"]
        if not isinstance(first, dict) or not isinstance(goes_on, dict):
            raise ValueError("its seeding cannot be read")
        if not all(type(value) is bool for value in goes_on.values()):
            raise ValueError("its seeding cannot be read")
        return cls(dict(first), dict(goes_on))

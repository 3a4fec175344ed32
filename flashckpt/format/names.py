"""Names and paths of a run's files. Owns how they are built and parsed; opens no file.

Every name that is read from a file is parsed here, so that no name can lead out of its folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ASSETS = "assets.json"
EVENTS = "events"
ALIVE = "alive"
DATA = "data"

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**9 - 1
MAX_RANK = 10**6
MAX_BOUNDARY = 2**34 - 1

ATTEMPT = re.compile(r"([0-9]{6,9})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """Number and nonce of an attempt. The nonce makes it unique: a number can recur on a blank disk."""

    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> AttemptName | None:
        """Parse a name; return None for other texts."""
        match = ATTEMPT.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match[1]), match[2])
        return name if str(name) == text and name.number > 0 else None


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """Identifies a snapshot: the attempt that captured it, and the index of the boundary in that attempt."""

    attempt: AttemptName
    boundary: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.boundary}"


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    """A checkpoint as commands print it: step, attempt and boundary. Ordered by step, then attempt, then
    boundary."""

    step: int
    attempt: AttemptName
    boundary: int

    def __str__(self) -> str:
        return f"{self.step}@{self.attempt}:{self.boundary}"

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.attempt, self.boundary)


def alive_path(attempt: AttemptName) -> str:
    return f"{ALIVE}/{attempt}"


def parse_at(text: str) -> AttemptName | SnapshotId | None:
    """Parse the text after STEP@ in the shell: ATTEMPT, or ATTEMPT:BOUNDARY. Return None for other texts."""
    attempt, colon, boundary = text.partition(":")
    name = AttemptName.parse(attempt)
    if name is None or not colon:
        return name
    is_number = boundary.isascii() and boundary.isdigit() and len(boundary) <= 11
    return SnapshotId(name, int(boundary)) if is_number and int(boundary) <= MAX_BOUNDARY else None

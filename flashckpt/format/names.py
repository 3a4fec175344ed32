"""Names and paths of a run's files. Owns how they are built and parsed; opens no file.

Every name that is read from a file is parsed here, so that no name can lead out of its folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN = "run.json"
ASSETS = "assets.json"
ATTEMPTS = "attempts"
EVENTS = "events"
COMMITS = "commits"
DATA = "data"
FROZEN_FOLDER = "frozen"

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**9 - 1
MAX_RANK = 10**6
MAX_BOUNDARY = 2**34 - 1

SHARD = re.compile(r"shard-[0-9]{5,7}-([0-9a-f]{4,32})\.safetensors")
WRITER_CHARS = 8
PART = re.compile(r"part-([0-9]{5,7})\.json")
CLAIM = re.compile(r"([0-9]{6,9})\.json")
ATTEMPT = re.compile(r"([0-9]{6,9})-([0-9a-f]{8})")
BOUNDARY = re.compile(r"[0-9]{10,11}")
FROZEN = re.compile(r"([0-9]{6,9}-[0-9a-f]{8})-[0-9]{5,7}-([0-9a-f]{4,32})\.safetensors")
FROZEN_TOMBSTONE = re.compile(rf"({FROZEN.pattern})\.tombstone-([0-9a-f]{{8}})")
_COMMIT = re.compile(
    r"([0-9]{12})-([0-9]{6,9}-[0-9a-f]{8})-([0-9]{10,11})\.(json|quarantine-[0-9a-f]{8}\.json)"
)
_TOMBSTONE = re.compile(r"([0-9]{6,9}-[0-9a-f]{8})-([0-9]{10,11})\.tombstone")


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

    @property
    def data_folder(self) -> str:
        """The folder of its parts and shards."""
        return f"{DATA}/{self.attempt}/{self.boundary:010d}"

    @property
    def tombstone_path(self) -> str:
        """The name that exists while the snapshot's files are being deleted."""
        return f"{COMMITS}/{self.attempt}-{self.boundary:010d}.tombstone"

    @classmethod
    def of_tombstone(cls, file: str) -> SnapshotId | None:
        """The snapshot whose tombstone has this name in commits/, or None."""
        match = _TOMBSTONE.fullmatch(file)
        return _snapshot_id(match[1], match[2]) if match else None

    @classmethod
    def of_folders(cls, attempt: str, boundary: str) -> SnapshotId | None:
        """The snapshot whose data folder is data/ATTEMPT/BOUNDARY, or None."""
        return _snapshot_id(attempt, boundary) if BOUNDARY.fullmatch(boundary) else None


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    """The name of a commit record. Ordered by step, then attempt, then boundary."""

    step: int
    attempt: AttemptName
    boundary: int

    def __str__(self) -> str:
        return f"{self.step}@{self.attempt}:{self.boundary}"

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.attempt, self.boundary)

    @property
    def stem(self) -> str:
        if not (0 <= self.step <= MAX_STEP and 0 <= self.boundary <= MAX_BOUNDARY):
            raise ValueError(f"step {self.step} or boundary {self.boundary} is out of range")
        return f"{self.step:012d}-{self.attempt}-{self.boundary:010d}"

    @property
    def path(self) -> str:
        return f"{COMMITS}/{self.stem}.json"

    def quarantine_path(self, nonce: str) -> str:
        return f"{COMMITS}/{self.stem}.quarantine-{nonce}.json"

    @classmethod
    def parse(cls, file: str) -> tuple[CommitName, bool] | None:
        """Parse a file name in commits/. Return the commit, and True for its record or False for a
        quarantine. Return None for other names."""
        match = _COMMIT.fullmatch(file)
        found = _snapshot_id(match[2], match[3]) if match else None
        if match is None or found is None:
            return None
        return cls(int(match[1]), found.attempt, found.boundary), match[4] == "json"


def claim_number(file: str) -> int | None:
    """Parse a claim's file name into its number; return None for other names."""
    match = CLAIM.fullmatch(file)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == file and int(match[1]) else None


def claim_path(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def attempt_folder(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}"


def start_path(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}/start.json"


def alive_path(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}/alive"


def part_name(keeper: int) -> str:
    return f"part-{keeper:05d}.json"


def part_keeper(file: str) -> int:
    """The keeper of a part (its lowest rank), from the part's file name."""
    match = PART.fullmatch(file)
    assert match is not None, file
    return int(match[1])


def shard_writer(file: str) -> str | None:
    """The nonce of the keeper that wrote a shard, from the shard's file name. None for other files."""
    match = SHARD.fullmatch(file)
    return match[1][:WRITER_CHARS] if match is not None else None


def shard_name(rank: int, nonce: str) -> str:
    """A shard's file name. `nonce` begins with its keeper's, so two keepers never write one file."""
    name = f"shard-{rank:05d}-{nonce}.safetensors"
    assert SHARD.fullmatch(name), name
    return name


def _snapshot_id(attempt: str, boundary: str) -> SnapshotId | None:
    name, number = AttemptName.parse(attempt), int(boundary)
    is_spelled = f"{number:010d}" == boundary and number <= MAX_BOUNDARY
    return SnapshotId(name, number) if name is not None and is_spelled else None


def parse_at(text: str) -> AttemptName | SnapshotId | None:
    """Parse the text after STEP@ in the shell: ATTEMPT, or ATTEMPT:BOUNDARY. Return None for other texts."""
    attempt, colon, boundary = text.partition(":")
    name = AttemptName.parse(attempt)
    if name is None or not colon:
        return name
    is_number = boundary.isascii() and boundary.isdigit() and len(boundary) <= 11
    return SnapshotId(name, int(boundary)) if is_number and int(boundary) <= MAX_BOUNDARY else None


def frozen_name(attempt: AttemptName, rank: int, nonce: str) -> str:
    """The file name of an instance of frozen leaves. The nonce makes it unique: no name is written twice."""
    name = f"{attempt}-{rank:05d}-{nonce}.safetensors"
    assert FROZEN.fullmatch(name), name
    return name


def frozen_path(file: str) -> str:
    return f"{FROZEN_FOLDER}/{file}"


def frozen_writer(file: str) -> tuple[AttemptName, str] | None:
    """The attempt that wrote a frozen instance, and its keeper's nonce. None for other names."""
    match = FROZEN.fullmatch(file)
    name = AttemptName.parse(match[1]) if match else None
    return (name, match[2][:WRITER_CHARS]) if match and name else None


def frozen_tombstone_path(file: str, nonce: str) -> str:
    """The path of a tombstone of a frozen instance. Each deletion makes and removes its own tombstone."""
    return f"{FROZEN_FOLDER}/{file}.tombstone-{nonce}"

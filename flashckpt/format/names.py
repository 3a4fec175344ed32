"""The names and places of a run's files, as text. Owns their spelling in both directions; opens nothing.

Every name that is read from a file goes through here, so none can lead out of its folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN = "run.json"
ASSETS = "assets.json"
ATTEMPTS = "attempts"
STEPS = "steps"
EVENTS = "events"
MANIFEST = "manifest.json"

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**9 - 1
MAX_RANK = 10**6
MAX_BOUNDARY = 2**34 - 1

SHARD = re.compile(r"shard-[0-9]{5,7}-([0-9a-f]{4,32})\.safetensors")
WRITER_CHARS = 8
CONSTANTS = re.compile(r"constants-[0-9]{5,7}-[0-9]{1,9}\.safetensors")
# As a part names one: its own attempt's by its name alone, that of an older attempt with that before it.
NAMED_CONSTANTS = re.compile(rf"(?:([0-9]{{6,9}}-[0-9a-f]{{8}})/)?{CONSTANTS.pattern}")
# Before "constants-" in the order of names: a listing that goes by it shows no file of which it has passed
# over the record.
BURIED = re.compile(r"buried-[0-9a-f]{8}\.json")
PART = re.compile(r"part-([0-9]{5,7})\.json")
MARK = re.compile(r"mark-[0-9a-f]{8}\.json")
CLAIM = re.compile(r"([0-9]{6,9})\.json")
STEP = re.compile(r"[0-9]{12}")
ATTEMPT = re.compile(r"([0-9]{6,9})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """Number and nonce together: a number alone can come again on a blank disk."""

    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> AttemptName | None:
        """The attempt that `text` spells, or None where it spells none."""
        match = ATTEMPT.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match[1]), match[2])
        return name if str(name) == text and name.number > 0 else None


def claim_number(file: str) -> int | None:
    """The number that a claim's file name spells, or None."""
    match = CLAIM.fullmatch(file)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == file and int(match[1]) else None


def step_number(folder: str) -> int | None:
    """The step that a folder's name spells, or None."""
    return int(folder) if STEP.fullmatch(folder) else None


def claim_path(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def attempt_folder(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}"


def start_path(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}/start.json"


def alive_path(attempt: AttemptName) -> str:
    return f"{ATTEMPTS}/{attempt}/alive"


def step_folder(step: int) -> str:
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is outside 0 … {MAX_STEP}")
    return f"{STEPS}/{step:012d}"


def step_attempt_folder(step: int, attempt: AttemptName) -> str:
    """Where one attempt keeps what it has of one step."""
    return f"{step_folder(step)}/{attempt}"


def manifest_path(step: int, attempt: AttemptName) -> str:
    return f"{step_attempt_folder(step, attempt)}/{MANIFEST}"


def part_name(keeper: int) -> str:
    return f"part-{keeper:05d}.json"


def part_keeper(file: str) -> int:
    """The keeper of a part, the lowest of its ranks, by its name."""
    match = PART.fullmatch(file)
    assert match is not None, file
    return int(match[1])


def shard_writer(file: str) -> str | None:
    """The nonce of the keeper that wrote a shard: the first characters of its own. None for another file."""
    match = SHARD.fullmatch(file)
    return match[1][:WRITER_CHARS] if match is not None else None


def shard_name(rank: int, nonce: str) -> str:
    """A shard's file name. `nonce` is its keeper's: two keepers never write one file."""
    name = f"shard-{rank:05d}-{nonce}.safetensors"
    assert SHARD.fullmatch(name), name
    return name


def constants_name(rank: int, count: int) -> str:
    """The file name of the `count`-th constants shard that a rank wrote in one attempt."""
    return f"constants-{rank:05d}-{count}.safetensors"


def is_of_older(constants: str) -> bool:
    """Whether a part names a constants shard so that is not of its own attempt."""
    return "/" in constants


def owner_of(attempt: AttemptName, constants: str) -> tuple[AttemptName, str]:
    """The attempt in whose folder the constants shard stands that a part of `attempt` names so, and its file
    name there. ValueError for one of the same or a newer attempt, and for what is no such name."""
    match = NAMED_CONSTANTS.fullmatch(constants)
    owner = attempt if match is None or match[1] is None else AttemptName.parse(match[1])
    if match is None or owner is None or (is_of_older(constants) and owner.number >= attempt.number):
        raise ValueError(f"{constants[:80]!r} names no constants shard of {attempt} or an older attempt")
    return owner, constants.rpartition("/")[2]


def as_named_by(attempt: AttemptName, owner: AttemptName, file: str) -> str:
    """How a part of `attempt` names a constants shard in the folder of `owner`."""
    return file if owner == attempt else f"{owner}/{file}"


def constants_path(attempt: AttemptName, constants: str) -> str:
    """Where the constants shard stands that a part of `attempt` names so."""
    return f"{ATTEMPTS}/{constants}" if is_of_older(constants) else f"{attempt_folder(attempt)}/{constants}"


def buried_path(attempt: AttemptName, nonce: str) -> str:
    return f"{attempt_folder(attempt)}/buried-{nonce}.json"

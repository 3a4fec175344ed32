"""The catalogue: the whole state of a run, as one numbered JSON file. Owns its types and its encoding, and
the names in data/. Decides nothing; see flashckpt/catalogue/.

    catalogue/000000042-RUN_ID                                 version 42
    data/000003-7fa3c1d2/000003-7fa3c1d2.BOUNDARY/             the attempt that wrote it, and the snapshot
        rank-00000-NONCE.safetensors  frozen-00000-NONCE.safetensors
        node-00000-NONCE.json                                  what one node wrote: see format/manifest.py
        manifest-NONCE.json                                    the files of a checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from flashckpt.format.checked_json import MAX_INTEGER, Fields, JsonRecord
from flashckpt.format.names import DATA, MAX_RANK, MAX_STEP, AttemptName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.printable import escaped

CATALOGUE = "catalogue"
MAX_VERSION = 10**9 - 1
FROZEN_PREFIX = "frozen-"
"""Files with leaves that never change begin with it. Later checkpoints share them."""

RUN_ID = re.compile(r"[0-9a-f]{16}")
NONCE = re.compile(r"[0-9a-f]{4,32}")
CHECKSUM = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"([0-9]{9})(?:-([0-9a-f]{16}))?")
_SNAPSHOT = re.compile(r"([0-9]{6,9}-[0-9a-f]{8})\.([0-9]{20})")

NO_ATTEMPT = AttemptName(0, "")
"""The writer and the attempt of a run that has none yet. Older than every other. Written as an empty text."""


def version_path(number: int, run_id: str) -> str:
    """The path of a version. Raises ValueError beyond MAX_VERSION.

    Version 1 is named without the run: of several processes that begin a run here, one can create it. The
    others are named with it, so that no process takes versions of another run, which came into its place, for
    its own.
    """
    if not 0 < number <= MAX_VERSION:
        raise ValueError(f"version {number} is out of range")
    return f"{CATALOGUE}/{number:09d}" + (f"-{run_id}" if number > 1 else "")


def parse_version(name: str) -> tuple[int, str] | None:
    """The number and the run of a version, from its name in catalogue/. The run is "" for version 1. None for
    other names."""
    match = _VERSION.fullmatch(name)
    if match is None or (int(match[1]) == 1) != (match[2] is None):
        return None
    return int(match[1]), match[2] or ""


@dataclass(frozen=True, slots=True, order=True)
class Folder:
    """The folder of a snapshot. `writer`: the attempt that wrote its files; `id.attempt`: the one that
    captured the state. They differ for a snapshot that was resumed from memory, and on a mirror."""

    writer: AttemptName
    id: SnapshotId

    @property
    def path(self) -> str:
        return f"{DATA}/{self.writer}/{self.name}"

    @property
    def name(self) -> str:
        return f"{self.id.attempt}.{self.id.boundary:020d}"

    @classmethod
    def parse(cls, writer: AttemptName, name: str) -> Folder | None:
        """The folder with this name below the one of `writer`. None for other names."""
        match = _SNAPSHOT.fullmatch(name)
        attempt = AttemptName.parse(match[1]) if match else None
        if match is None or attempt is None or int(match[2]) > MAX_INTEGER:
            return None
        return cls(writer, SnapshotId(attempt, int(match[2])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed snapshot. `manifest`: the nonce in the name of its manifest. `num_bytes`: of all its files.
    `bases`: the folders, its own included, that hold its frozen files."""

    id: SnapshotId
    step: int
    writer: AttemptName
    manifest: str
    num_bytes: int = 0
    bases: frozenset[Folder] = frozenset()

    @property
    def folder(self) -> Folder:
        return Folder(self.writer, self.id)

    @property
    def manifest_path(self) -> str:
        return f"{self.folder.path}/{manifest_name(self.manifest)}"


def manifest_name(nonce: str) -> str:
    return f"manifest-{nonce}.json"


Lineage = tuple[SnapshotId, ...]
"""The last snapshot of each ancestor of an attempt that belongs to the attempt's history, newest first. The
first one is the parent: the snapshot that the attempt resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue(JsonRecord):
    """One version of the state of a run.

    run_id: empty before version 1. writer: who alone may commit; at a home the current attempt, at a mirror
    the session that copies. attempt: the current attempt. ended: it has ended in order. failed_starts: how
    many attempts in a row before it resumed from the same parent, and died without a checkpoint.
    committed: the newest snapshot that `writer` has committed; it commits in ascending order.
    checkpoints: in the order in which they were added. lineages: of the current attempt, and of others that
    have a checkpoint. foreign: writers that this run's catalogue did not know when a new writer found
    their files, because it was restored from a backup; their files stay. damaged: checkpoints that failed two
    verifications, each with the host and the reason; retention and `ls` read it.

    Of the current attempt: its number of ranks, the process that began it (None: no trainer did), the step
    number of its parent, and the URL of the mirror if the attempt read its parent there.
    """

    KIND = "catalogue"
    MAX_BYTES = 64 << 20

    run_id: str = ""
    version: int = 0
    writer: AttemptName = NO_ATTEMPT
    attempt: AttemptName = NO_ATTEMPT
    ended: bool = True
    failed_starts: int = 0
    committed: SnapshotId | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    lineages: tuple[tuple[AttemptName, Lineage], ...] = ()
    foreign: frozenset[AttemptName] = frozenset()
    damaged: tuple[tuple[SnapshotId, str], ...] = field(default=(), repr=False)
    world: int = 1
    owner: Owner | None = field(default=None, repr=False)
    parent_step: int = 0
    parent_url: str = ""

    @property
    def path(self) -> str:
        return version_path(self.version, self.run_id)

    def has(self, id: SnapshotId) -> bool:
        return any(each.id == id for each in self.checkpoints)

    @property
    def damaged_ids(self) -> frozenset[SnapshotId]:
        return frozenset(id for id, _ in self.damaged)

    def to_dict(self) -> dict[str, Any]:
        names, folders = _Numbers[AttemptName](), _Numbers[Folder]()
        checkpoints = [
            [
                *_id_row(each.id, names),
                each.step,
                names[each.writer],
                each.manifest,
                each.num_bytes,
                [folders[base] for base in sorted(each.bases)],
            ]
            for each in self.checkpoints
        ]
        lineages = [
            [names[attempt], [_id_row(id, names) for id in lineage]] for attempt, lineage in self.lineages
        ]
        return {
            "run_id": self.run_id,
            "version": self.version,
            "writer": _text_of(self.writer),
            "attempt": _text_of(self.attempt),
            "world": self.world,
            "owner": None if self.owner is None else self.owner.to_dict(),
            "parent_step": self.parent_step,
            "parent_url": self.parent_url,
            "ended": self.ended,
            "failed_starts": self.failed_starts,
            "committed": None if self.committed is None else _id_row(self.committed, names),
            "checkpoints": checkpoints,
            "lineages": lineages,
            "foreign": [str(each) for each in sorted(self.foreign)],
            "damaged": [[_id_row(id, names), why] for id, why in self.damaged],
            # Behind the others, since these make the numbers.
            "bases": [[names[each.writer], *_id_row(each.id, names)] for each in folders],
            "attempts": [str(each) for each in names],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Catalogue:
        names = tuple(_attempt(fields, each) for each in fields.items("attempts"))
        bases = tuple(Folder(*_folder(fields, row, names)) for row in _rows(fields, "bases", 3))
        checkpoints = tuple(_checkpoint(fields, row, names, bases) for row in _rows(fields, "checkpoints", 7))
        lineages = []
        for number, rows in _rows(fields, "lineages", 2):
            if type(rows) is not list:
                fields.refuse("a lineage is not a list")
            attempt, lineage = _item(fields, names, number), tuple(_id(fields, row, names) for row in rows)
            check_lineage(fields, attempt, lineage)
            lineages.append((attempt, lineage))
        catalogue = cls(
            run_id=fields.text("run_id", pattern=RUN_ID),
            version=fields.integer("version", 1, MAX_VERSION),
            writer=_attempt_or_none(fields, "writer"),
            attempt=_attempt_or_none(fields, "attempt"),
            world=fields.integer("world", 1, MAX_RANK),
            owner=Owner.of(fields.within("owner")) if fields.has("owner") else None,
            parent_step=fields.integer("parent_step", 0, MAX_STEP),
            parent_url=fields.text("parent_url"),
            ended=fields.flag("ended"),
            failed_starts=fields.integer("failed_starts"),
            committed=_id(fields, fields.items("committed"), names) if fields.has("committed") else None,
            checkpoints=checkpoints,
            lineages=tuple(lineages),
            foreign=frozenset(_attempt(fields, each) for each in fields.items("foreign")),
            damaged=tuple(
                (_id(fields, row, names), _reason(fields, why)) for row, why in _rows(fields, "damaged", 2)
            ),
        )
        ids = {each.id for each in checkpoints}
        if len(ids) != len(checkpoints) or not ids.issuperset(id for id, _ in catalogue.damaged):
            fields.refuse("a checkpoint is listed twice, or a damaged one is not listed")
        known = dict(lineages)
        has_begun = catalogue.attempt != NO_ATTEMPT
        if len(known) != len(lineages) or (has_begun and catalogue.attempt not in known):
            fields.refuse("the lineage of an attempt is there twice, or that of the current one is missing")
        return catalogue


EMPTY = Catalogue()
"""A run that does not exist yet."""


_T = TypeVar("_T")


class _Numbers(dict[_T, int]):
    """A number for each value, in the order in which they were asked for."""

    def __missing__(self, value: _T) -> int:
        self[value] = number = len(self)
        return number


def _id_row(id: SnapshotId, names: Mapping[AttemptName, int]) -> list[int]:
    return [names[id.attempt], id.boundary]


def lineage_rows(lineage: Lineage) -> list[list[Any]]:
    """A lineage as JSON."""
    return [[str(each.attempt), each.boundary] for each in lineage]


def check_lineage(fields: Fields, attempt: AttemptName, lineage: Lineage) -> None:
    """DamagedError unless each ancestor is older than the one before."""
    attempts = [attempt, *(each.attempt for each in lineage)]
    if any(newer <= older for newer, older in pairwise(attempts)):
        fields.refuse("a lineage is out of order")


# A catalogue may have ten thousand checkpoints, so that a row costs a few microseconds and no `Fields`.


def _rows(fields: Fields, key: str, length: int) -> list[list[Any]]:
    rows = fields.items(key)
    if any(type(row) is not list or len(row) != length for row in rows):
        fields.refuse(f"a row of {key!r} does not have {length} items")
    return rows


def _item(fields: Fields, items: tuple[Any, ...], number: Any) -> Any:
    if type(number) is not int or not 0 <= number < len(items):
        fields.refuse("a row names an attempt or a base that is not there")
    return items[number]


def _id(fields: Fields, row: Any, names: tuple[AttemptName, ...]) -> SnapshotId:
    if type(row) is not list or len(row) != 2 or not is_count(row[1], MAX_INTEGER):
        fields.refuse("a row does not name a snapshot")
    return SnapshotId(_item(fields, names, row[0]), row[1])


def _folder(fields: Fields, row: list[Any], names: tuple[AttemptName, ...]) -> tuple[AttemptName, SnapshotId]:
    return _item(fields, names, row[0]), _id(fields, row[1:], names)


def _attempt(fields: Fields, text: Any) -> AttemptName:
    name = AttemptName.parse(text) if isinstance(text, str) else None
    if name is None:
        fields.refuse("a text is not the name of an attempt")
    return name


def _text_of(attempt: AttemptName) -> str:
    return "" if attempt == NO_ATTEMPT else str(attempt)


def _attempt_or_none(fields: Fields, key: str) -> AttemptName:
    text = fields.text(key)
    return _attempt(fields, text) if text else NO_ATTEMPT


def _reason(fields: Fields, text: Any) -> str:
    if not isinstance(text, str) or len(text) > 4096:
        fields.refuse("the reason of a damage is not a text of at most 4096 characters")
    return escaped(text)


def _checkpoint(
    fields: Fields, row: list[Any], names: tuple[AttemptName, ...], bases: tuple[Folder, ...]
) -> Checkpoint:
    attempt, boundary, step, writer, manifest, num_bytes, numbers = row
    if type(numbers) is not list or not isinstance(manifest, str) or not NONCE.fullmatch(manifest):
        fields.refuse("a checkpoint names no manifest, or no bases")
    if not (is_count(step, MAX_STEP) and is_count(num_bytes, MAX_INTEGER)):
        fields.refuse("a step or a length is not a whole number in its range")
    return Checkpoint(
        id=_id(fields, [attempt, boundary], names),
        step=step,
        writer=_item(fields, names, writer),
        manifest=manifest,
        num_bytes=num_bytes,
        bases=frozenset(_item(fields, bases, number) for number in numbers),
    )


def is_count(value: Any, high: int) -> bool:
    return type(value) is int and 0 <= value <= high


def folders_of(writer: AttemptName, names: Iterable[str]) -> list[Folder]:
    """The folders of snapshots among names below a writer's folder, oldest first."""
    return sorted(each for name in names if (each := Folder.parse(writer, name)) is not None)

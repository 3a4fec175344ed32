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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from flashckpt.format.checked_json import JsonRecord
from flashckpt.format.forms import (
    ATTEMPT,
    FLAG,
    ID,
    MAX_INTEGER,
    Form,
    a_set,
    fields,
    integer,
    items,
    named,
    optional,
    pair,
    row,
    text,
)
from flashckpt.format.names import DATA, MAX_RANK, MAX_STEP, AttemptName, SnapshotId
from flashckpt.format.owner import OWNER, Owner
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

    def __str__(self) -> str:
        return f"{self.writer}/{self.name}"

    @property
    def path(self) -> str:
        return f"{DATA}/{self}"

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


def _folder_of(text: str) -> Folder | None:
    writer, _, name = text.partition("/")
    attempt = AttemptName.parse(writer)
    return None if attempt is None else Folder.parse(attempt, name)


FOLDER: Form[Folder] = named(_folder_of, "a folder of a snapshot")


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


CHECKPOINT: Form[Checkpoint] = row(
    Checkpoint,
    id=ID,
    step=integer(0, MAX_STEP),
    writer=ATTEMPT,
    manifest=text(NONCE),
    num_bytes=integer(),
    bases=a_set(FOLDER),
)
_WRITER: Form[AttemptName] = Form(
    lambda name: "" if name == NO_ATTEMPT else str(name),
    lambda found: NO_ATTEMPT if found == "" else ATTEMPT.load(found),
)

_REASON: Form[str] = Form(str, lambda found: escaped(text().load(found)))

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
    FORMS = fields(
        run_id=text(RUN_ID),
        version=integer(1, MAX_VERSION),
        writer=_WRITER,
        attempt=_WRITER,
        world=integer(1, MAX_RANK),
        owner=optional(OWNER),
        parent_step=integer(0, MAX_STEP),
        parent_url=text(),
        ended=FLAG,
        failed_starts=integer(),
        committed=optional(ID),
        checkpoints=items(CHECKPOINT),
        lineages=items(pair(ATTEMPT, items(ID))),
        foreign=a_set(ATTEMPT),
        damaged=items(pair(ID, _REASON)),
    )

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

    def check(self) -> None:
        ids = {each.id for each in self.checkpoints}
        if len(ids) != len(self.checkpoints) or not ids.issuperset(self.damaged_ids):
            raise ValueError("a checkpoint is listed twice, or a damaged one is not listed")
        known = dict(self.lineages)
        if len(known) != len(self.lineages) or self.attempt not in {NO_ATTEMPT, *known}:
            raise ValueError("the lineage of an attempt is there twice, or the current one is missing")
        for attempt, lineage in self.lineages:
            check_lineage(attempt, lineage)


EMPTY = Catalogue()
"""A run that does not exist yet."""


def check_lineage(attempt: AttemptName, lineage: Lineage) -> None:
    """ValueError unless each ancestor is older than the one before."""
    attempts = [attempt, *(each.attempt for each in lineage)]
    if any(newer <= older for newer, older in pairwise(attempts)):
        raise ValueError("a lineage is out of order")


def folders_of(writer: AttemptName, names: Iterable[str]) -> list[Folder]:
    """The folders of snapshots among names below a writer's folder, oldest first."""
    return sorted(each for name in names if (each := Folder.parse(writer, name)) is not None)

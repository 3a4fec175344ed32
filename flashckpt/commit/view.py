"""A run as one version of its catalogue shows it: its checkpoints, its newest attempt, their history.

A View is immutable and answers without requests. A checkpoint that is listed need not be whole: `is_whole` in
steps.py looks at its files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from flashckpt.catalogue.changes import (
    bases,
    files_without_catalogue,
    is_newer,
    parent_of,
    visible,
)
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Steps, Stores
from flashckpt.errors import NoSuchStepError, UnusableRunError
from flashckpt.format.catalogue import (
    CATALOGUE,
    EMPTY,
    NO_ATTEMPT,
    Catalogue,
    Checkpoint,
    Folder,
    folders_of,
)
from flashckpt.format.names import DATA, AttemptName, CommitName, SnapshotId
from flashckpt.store.base import Store, read_only

HOME = Home()
_Result = TypeVar("_Result")


def ask(store: Store, steps: Steps[_Result]) -> _Result:
    """Carry out a process of flashckpt/catalogue/ in the store of a run."""
    return Stores({HOME.store: store}).run(steps)


@dataclass(frozen=True)
class View:
    """One version of a run's catalogue, and the store that it was read from."""

    catalogue: Catalogue
    store: Store = field(repr=False, compare=False)

    @classmethod
    def of(cls, store: Store, known: Catalogue = EMPTY) -> View:
        """Read the newest version; EMPTY if the store has none. `known`: a version that the caller has, which
        is not read again. RunError if another run, or an older catalogue, has replaced it; DamagedError."""
        return cls(ask(store, HOME.newest(known)), store)

    def after(self, steps: Steps[Catalogue]) -> View:
        """The view that a process of flashckpt/catalogue/ makes of this one."""
        return View(ask(self.store, steps), self.store)

    @property
    def run_id(self) -> str:
        return self.catalogue.run_id

    @property
    def attempt(self) -> AttemptName | None:
        """The newest attempt that has begun."""
        return None if self.catalogue.attempt == NO_ATTEMPT else self.catalogue.attempt

    @property
    def parent(self) -> SnapshotId | None:
        """The snapshot that the newest attempt has resumed, None for a fresh run."""
        return parent_of(self.catalogue)

    @property
    def checkpoints(self) -> tuple[CommitName, ...]:
        """All checkpoints, of any branch, oldest first."""
        return tuple(sorted(map(name_of, self.catalogue.checkpoints)))

    def visible(self) -> tuple[CommitName, ...]:
        """The checkpoints in the history of the newest attempt, oldest first."""
        return tuple(map(name_of, visible(self.catalogue)))

    def newest_first(self) -> list[CommitName]:
        return list(self.visible()[::-1])

    def checkpoint(self, id: SnapshotId) -> Checkpoint | None:
        """The checkpoint of a snapshot, visible or not."""
        return next((each for each in self.catalogue.checkpoints if each.id == id), None)

    def has(self, name: CommitName) -> bool:
        found = self.checkpoint(name.id)
        return found is not None and found.step == name.step

    def pending(self) -> list[Folder]:
        """The folders of snapshots that the newest attempt has not committed and still can, oldest first."""
        writer = self.catalogue.writer
        if writer not in writers_in(self.store):  # also a link or a file in its place
            return []
        return [each for each in _folders(self.store, writer) if is_newer(self.catalogue, each.id)]

    @property
    def damaged(self) -> dict[SnapshotId, str]:
        """The checkpoints that failed two verifications, each with host and reason."""
        return dict(self.catalogue.damaged)

    @property
    def bases(self) -> frozenset[Folder]:
        """The folders whose frozen files a new part may name."""
        return bases(self.catalogue)

    def attempts(self) -> list[AttemptName]:
        """The attempts that the catalogue knows, oldest first: it forgets those that left no checkpoint."""
        found = {attempt for attempt, _ in self.catalogue.lineages}
        found |= {each.attempt for _, lineage in self.catalogue.lineages for each in lineage}
        return sorted(found)


def name_of(checkpoint: Checkpoint) -> CommitName:
    return CommitName(checkpoint.step, checkpoint.id.attempt, checkpoint.id.boundary)


def open_run(store: Store, create: bool, run_id: str = "", known: Catalogue = EMPTY) -> View:
    """Return the run in a store. `create`: the caller will train it; if there is no run, make an empty one,
    with this id if one is given. `known`: as of `View.of`.

    Raises NoSuchStepError if there is no run and none is made, UnusableRunError if there are files of
    checkpoints without a catalogue, FormatError for another format, DamagedError, RunError if `create` and
    the storage overwrites.
    """
    if create:
        check_place(store)
        try:
            made = ask(store, HOME.make(run_id or secrets.token_hex(8), known))
        except UnusableRunError as error:
            raise UnusableRunError(f"{store.url}: {error}", path=store.url) from error
        return View(made, store)
    try:
        view = View.of(store, known)
    except NotADirectoryError as error:
        raise NoSuchStepError(
            f"{store.url} is no run: it is a file, or a folder above it is one. Nothing was changed. Name "
            f"the folder that has {CATALOGUE}/ in it.",
            path=store.url,
        ) from error
    if view.catalogue.version:
        return view
    if writers_in(store):
        raise UnusableRunError(f"{store.url}: {files_without_catalogue()}", path=store.url)
    raise NoSuchStepError(
        f"{store.url} is no run: it has no {CATALOGUE}/. Nothing was changed. Check the path.", path=store.url
    )


def has_run(store: Store) -> bool:
    """Whether there is a catalogue, which need not be readable. One listing.
    A temporary file that a killed writer has left does not count."""
    return any(not each.is_folder and not each.name.startswith(".") for each in store.list(CATALOGUE))


def check_writable(store: Store) -> None:
    """RunError if runs in this storage are only read. Sends no request."""
    if store.is_read_only:
        raise read_only(store.url)


def check_place(store: Store) -> None:
    """Raise RunError or OSError if a run cannot be written to this storage."""
    check_writable(store)
    store.check()


def writers_in(store: Store) -> frozenset[AttemptName]:
    """The attempts that have a folder in data/."""
    return ask(store, HOME.writers())


def folders_in(store: Store) -> Iterator[Folder]:
    """Every folder of a snapshot, of each writer, oldest first."""
    for writer in sorted(writers_in(store)):
        yield from _folders(store, writer)


def _folders(store: Store, writer: AttemptName) -> list[Folder]:
    return folders_of(writer, (each.name for each in store.list(f"{DATA}/{writer}") if each.is_folder))

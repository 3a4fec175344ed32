"""The versions of a catalogue on a store: the newest one is read, and the next one is created.

The newest listed version is the truth. It is never deleted, so its number stands for one content for ever. An
old number does not: it can be deleted, and be created again by a process that slept. So a version counts as
read, or as created, only if a listing afterwards shows it as the newest.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt.catalogue.requests import Create, Delete, Files, Read, Steps
from flashckpt.errors import DamagedError, RunError, UnusableRunError
from flashckpt.format.catalogue import (
    CATALOGUE,
    EMPTY,
    MAX_VERSION,
    Catalogue,
    parse_version,
    version_path,
)

KEEP_VERSIONS = 64
"""Versions that stay. A process that sleeps through more of them is noticed."""
_KEPT_IF_FULL = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOST_VANISHED = 3
"""So often in a row a listing may show a version that is gone. After that the run was deleted."""

Change = Callable[[Catalogue], Catalogue]
Number = tuple[int, str]
"""The number and the run of a version. (0, "") stands for a store without versions."""


@dataclass(frozen=True)
class Versions:
    """`store`: the name of the store; see Request."""

    store: str = "home"
    keep_versions: int = KEEP_VERSIONS

    def newest(self, known: Catalogue = EMPTY, at_least: Number = (0, "")) -> Steps[Catalogue]:
        """Return the newest version. Return EMPTY if the store has no version. `known`: a version that the
        caller has. `at_least`: the number of a version that exists. DamagedError if the newest version cannot
        be read; RunError if another run, or an older catalogue, has replaced the one that is known."""
        newest = at_least if at_least[0] else (yield from self._newest_number(known))
        if newest[0] < known.version:
            if (yield Read(self.store, known.path, Catalogue)) is None:
                raise _replaced(known)
            newest = known.version, known.run_id  # the listing was old
        vanished = 0
        while newest[0] != known.version:
            found: Catalogue | None = None
            problem = ""
            try:
                found = yield Read(self.store, version_path(*newest), Catalogue)
            except DamagedError as error:
                problem = str(error).partition(". ")[0]
            listed = yield from self._newest_number(known)
            if listed <= newest and problem:
                raise _unreadable(newest[0], problem)
            if listed <= newest and found is not None:
                if found.version != newest[0] or newest[1] not in ("", found.run_id):
                    raise _unreadable(newest[0], "it is a copy of another version")
                if known.run_id not in ("", found.run_id):
                    raise _replaced(known)
                return found
            vanished = vanished + 1 if found is None and not problem and listed <= newest else 0
            if vanished > _MOST_VANISHED:
                if known.version or not listed < newest:
                    raise _replaced(known)
                newest, vanished = listed, 0  # the run was deleted while it was read
            newest = max(newest, listed)
        return known

    def update(self, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
        """Apply a change to the newest version, and create the next one. Returns a version that contains it.

        The creation proves nothing: if this process slept while others made more versions than are kept, its
        number was free again. The version counts only if it is the newest afterwards. In every other case
        (its number is taken, the creation failed, there are newer versions) the change is applied again to
        the newest version. It does nothing if that version contains it. OSError if the creation failed and
        the newest version does not contain the change.
        """
        catalogue, is_full = (yield from self.newest(known)), False
        while (wanted := change(catalogue)) is not catalogue:
            if wanted.version > MAX_VERSION:
                raise UnusableRunError(
                    f"{CATALOGUE}/ has a version with the highest number, {catalogue.version}. Nothing was "
                    "changed. If another program has written it, remove it."
                )
            created, failure = False, None
            try:
                created = yield Create(self.store, wanted.path, wanted)
            except OSError as error:
                failure = error
            # A listing can be old. A number that was created, or is taken, exists.
            exists = wanted.version if failure is None else catalogue.version
            newest = max((exists, catalogue.run_id), (yield from self._newest_number(catalogue)))
            if created and newest[0] == wanted.version:
                return wanted
            catalogue = yield from self.newest(catalogue, newest)
            if failure is not None and change(catalogue) is not catalogue:
                if is_full or failure.errno not in _FULL:
                    raise failure
                is_full = True
                yield from self.make_room(catalogue)
        return catalogue

    def make_room(self, catalogue: Catalogue) -> Steps[None]:
        """Delete what a version does not need, where a version could not be created on a full disk."""
        yield from self.trim(catalogue, _KEPT_IF_FULL)

    def trim(self, catalogue: Catalogue, kept: int = 0) -> Steps[None]:
        """Delete old versions, and temporary files of creators that died: a living one tries again. `kept`:
        how many versions stay, by default `keep_versions`."""
        first = max(1, catalogue.version - (kept or self.keep_versions) + 1)
        names = yield Files(self.store, CATALOGUE)
        old = tuple(sorted(name for name in names if name < f"{first:09d}"))
        if old:
            yield Delete(self.store, CATALOGUE, old)

    def _newest_number(self, known: Catalogue = EMPTY) -> Steps[Number]:
        return max((yield from self._numbers(known)), default=(0, ""))

    def _numbers(self, known: Catalogue = EMPTY) -> Steps[list[Number]]:
        """The versions that are listed. With a version in hand only those of its run count. UnusableRunError
        if none is in hand, and there are versions of several runs."""
        names = yield Files(self.store, CATALOGUE)
        found = [each for each in map(parse_version, names) if each is not None]
        if known.run_id:
            return [each for each in found if each[1] in ("", known.run_id)]
        runs = sorted({run_id for _, run_id in found} - {""})
        if len(runs) > 1:
            raise UnusableRunError(
                f"{CATALOGUE}/ has versions of several runs ({', '.join(runs)}). Nothing was read or "
                "changed. A run was deleted here while a process of it lived. Remove the files whose names "
                "end with the id of the deleted run."
            )
        return found


def _replaced(known: Catalogue) -> RunError:
    return RunError(
        f"The catalogue of run {known.run_id} was deleted, or was replaced by another one. Nothing was "
        "changed, and this process commits nothing more. Start again: what is whole in the same run is "
        "adopted."
    )


def _unreadable(number: int, why: str) -> DamagedError:
    return DamagedError(
        f"Version {number} of the catalogue, the newest one, cannot be read: {why}. Nothing was used or "
        "changed. If it is no file, remove it; else `flashckpt recover` makes another version from the one "
        "before and from the checkpoints that are whole.",
        path=CATALOGUE,
    )

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
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.catalogue import CATALOGUE, EMPTY, Catalogue, parse_version, version_path

KEEP_VERSIONS = 64
"""Versions that stay. A process that sleeps through more of them is noticed."""
_KEPT_IF_FULL = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Change = Callable[[Catalogue], Catalogue]


@dataclass(frozen=True)
class Versions:
    """`store`: the name of the store; see Request."""

    store: str = "home"
    keep_versions: int = KEEP_VERSIONS

    def newest(self, known: Catalogue = EMPTY, at_least: tuple[int, str] = (0, "")) -> Steps[Catalogue]:
        """Return the newest version, EMPTY if there is none. `known`: one that the caller has. `at_least`:
        number and run of one that is known to exist. DamagedError if it cannot be read; RunError if another
        run, or an older catalogue, is here now."""
        number, run_id = at_least if at_least[0] else (yield from self._listed(known))
        if number < known.version:
            if (yield Read(self.store, known.path, Catalogue)) is None:
                raise RunError(
                    f"The catalogue of run {known.run_id} was replaced by an older one, or was deleted. "
                    "Nothing was changed, and this process commits nothing more. Start again: what is whole "
                    "is adopted."
                )
            number = known.version  # the listing was old
        while number != known.version:
            found: Catalogue | None = None
            problem = None
            try:
                found = yield Read(self.store, version_path(number, run_id), Catalogue)
            except DamagedError as error:
                problem = error
            listed, run_id = yield from self._listed(known)
            if listed <= number and problem is not None:
                raise _unreadable(number, str(problem).partition(". ")[0])
            if listed <= number and found is not None:
                if found.version != number:
                    raise _unreadable(number, "it is a copy of another version")
                if known.run_id not in ("", found.run_id):
                    raise _replaced(known.run_id, found.run_id)
                return found
            number = max(number, listed)
        return known

    def update(self, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
        """Apply a change to the newest version, and create the next one. Returns a version that contains it.

        The creation proves nothing: if this process slept while others made more versions than are kept, its
        number was free again. The version counts only if it is the newest afterwards. In every other case
        (its number is taken, the creation failed, there are newer versions) the change is applied again to
        the newest version. It does nothing there if it is contained. OSError if the creation failed and it is
        not.
        """
        catalogue, is_full = (yield from self.newest(known)), False
        while (wanted := change(catalogue)) is not catalogue:
            created, failure = False, None
            try:
                created = yield Create(self.store, wanted.path, wanted)
            except OSError as error:
                failure = error
            # A listing can be old. A number that was created, or is taken, exists.
            exists = wanted.version if failure is None else catalogue.version
            newest = max((exists, catalogue.run_id), (yield from self._listed(catalogue)))
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

    def trim(self, catalogue: Catalogue, keep_versions: int = 0) -> Steps[None]:
        """Delete old versions, and temporary files of creators that died: a living one tries again."""
        first = max(1, catalogue.version - (keep_versions or self.keep_versions) + 1)
        names = yield Files(self.store, CATALOGUE)
        old = tuple(sorted(name for name in names if name < f"{first:09d}"))
        if old:
            yield Delete(self.store, CATALOGUE, old)

    def _listed(self, known: Catalogue) -> Steps[tuple[int, str]]:
        """The number of the newest version that is listed, and its run. 0 if there is none. RunError if there
        are versions of another run than that of `known`."""
        names = yield Files(self.store, CATALOGUE)
        versions = [each for each in map(parse_version, names) if each is not None]
        number, run_id = max(versions, default=(0, ""))
        for other in sorted({run for _, run in versions} - {"", known.run_id or run_id}):
            raise _replaced(known.run_id or run_id, other)
        return number, run_id


def _replaced(run_id: str, other: str) -> RunError:
    return RunError(
        f"Run {run_id} was replaced by run {other}. Nothing was changed, and this process commits nothing "
        "more. End it, and start again in a folder of its own."
    )


def _unreadable(number: int, why: str) -> DamagedError:
    return DamagedError(
        f"Version {number} of the catalogue, the newest one, cannot be read: {why}. Nothing was used or "
        "changed. `flashckpt recover` makes another version from the one before and from the checkpoints "
        "that are whole.",
        path=CATALOGUE,
    )

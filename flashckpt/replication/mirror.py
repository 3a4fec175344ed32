"""The mirror of a run: a second store that gets committed steps of the home.

Owns the mirror while a keeper lives: the check that no other job trains it, retention. Sends each request
once and raises errors; the keeper decides when to try again. At a start it is compared with the home:
commit/choice.py decides which of the two is ahead, and a resume reads a step where it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

from flashckpt import _native
from flashckpt.catalogue.changes import highest_number
from flashckpt.commit import attempts
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.choice import Stored, choose
from flashckpt.commit.steps import is_whole
from flashckpt.commit.tidying import tidy
from flashckpt.commit.view import View, check_writable, open_run, writers_in
from flashckpt.errors import FlashckptError, NoSuchStepError, UnusableRunError
from flashckpt.format.catalogue import EMPTY
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.options import Remote
from flashckpt.persist.ledger import Event, lines_of
from flashckpt.replication.run_copy import Copied, Outcome, StepCopier, check_same_run
from flashckpt.store import open_store
from flashckpt.store.base import Store

# ---- at a start: what is refused before an attempt is named

# Of a URL in the ledger, and of the attempts whose ledger is read.
_MOST_CHARS, _MOST_ATTEMPTS = 4096, 4


def prepare(local: Store, remote: Store, run_id: str) -> tuple[View, int]:
    """Make the run in the remote if it has none. Returns it, and the highest number of an attempt there.
    `run_id`: that of the local store, empty if it has no run.

    Raises, and changes nothing: OSError if the remote does not answer (see `check_unanswered`), RunError if
    it cannot be used or holds another run.
    """
    check_writable(remote)
    # A read fails soon if no server answers: writes are retried more often.
    known = View.of(remote).catalogue
    found = open_run(remote, create=True, run_id=run_id, known=known)
    if run_id not in ("", found.run_id):
        raise UnusableRunError(
            f"{local.url} and the mirror (remote={remote.url}) hold different runs ({run_id} and "
            f"{found.run_id}). Nothing was loaded or changed. To resume the mirror's run, name a home that "
            "is empty; to resume the run that is here, name a mirror of its own.",
            path=local.url,
        )
    return found, highest_number(found.catalogue, writers_in(remote))


def check_unanswered(local: Store, remote: Store, run_id: str, problem: str) -> None:
    """RunError if the remote does not answer and there is no run here: a new run would have another id, and
    the remote could never be used with it."""
    refusal = choose((), Stored(EMPTY, local), Stored(EMPTY, remote, problem=problem)).refusal
    if not run_id and refusal is not None:
        raise refusal


def known_remote(store: Store) -> str:
    """The URL of the newest attempt's remote by its ledger; empty if it had none, or the ledger is gone. For
    display: a resume gets the remote from its caller."""
    for name in View.of(store).attempts()[: -_MOST_ATTEMPTS - 1 : -1]:
        for line in lines_of(store, str(name)):
            if line["event"] == Event.ATTACH.value:
                url = line.get("remote")
                return url if isinstance(url, str) and url.isprintable() and len(url) <= _MOST_CHARS else ""
    return ""


# ---- while the run is trained

log = logging.getLogger(__name__)

_TRIES = 4

IsDue = Callable[[int | None, int], bool]
"""Whether a step is to be copied, given the newest step number of the remote (None: no step) and its own."""


class Mirror:
    """Copies steps to the remote. `follows`: the newest attempt here, which the remote follows; `newest`: the
    newest step of the remote. For one thread, except these, `copying`, the step that is being copied, and
    `progress_bytes`."""

    def __init__(self, source: Store, remote: Remote) -> None:
        self._source, self._remote = source, remote
        self.copying: CommitName | None = None
        self._progress = array("Q", [0])
        self._target: Store | None = None
        self.newest: CommitName | None = None
        self.follows: AttemptName | None = None
        self._has_assets = False

    @property
    def progress_bytes(self) -> int:
        return int(_native.load(_native.address_of(self._progress)))

    def bring(self, is_due: IsDue) -> Copied | None:
        """Copy the newest step, if `is_due`; the steps that the remote keeps no longer go with it. None if
        nothing was due.

        OSError if a store fails; RunError if the remote holds another run, or another job trains it;
        DamagedError if the step is damaged here. Then the remote has whole steps only.
        """
        here = open_run(self._source, create=False)
        target = self._opened(here.run_id)
        if here.attempt is None:
            return None
        copier = StepCopier(
            self._source,
            target,
            progress=_native.address_of(self._progress),
            compress=self._remote.compress,
            keep=self._remote.keep,
            may_supersede=lambda: attempts.check_not_held(target, attempts.local_owner()),
        )
        if self.follows != here.attempt:
            there = copier.follow()
            tidy(there, here.attempt)
            self.follows = here.attempt
            self.newest = there.newest_first()[0] if there.visible() else None
        try:
            return self._copied(copier, target, is_due)
        finally:
            self.copying = None

    def _opened(self, run_id: str) -> Store:
        """The remote. Makes the run there if it has none. RunError if it holds another one."""
        target = self._target or open_store(self._remote.url, self._remote.options)
        try:
            found = open_run(target, create=False)
        except NoSuchStepError:
            # Another process may have deleted it all: a store does not make a folder again that has vanished.
            target = open_store(self._remote.url, self._remote.options)
            found = open_run(target, create=True, run_id=run_id)
            self.follows, self._has_assets = None, False
        self._target = target
        check_same_run(run_id, self._source, found)
        return target

    def _copied(self, copier: StepCopier, target: Store, is_due: IsDue) -> Copied | None:
        for _ in range(_TRIES):
            each = self._chosen(is_due)
            if each is None:
                return None
            # From here on retention keeps it. If retention was faster, there is a newer step.
            self.copying = each
            self._copy_assets(target)
            try:
                copied = copier.copy(each)
            except NoSuchStepError:
                self.copying = None
                continue
            before = self.newest
            if copied.outcome is not Outcome.DELETED and (before is None or before <= each):
                self.newest = each
            return copied
        return None

    def _copy_assets(self, target: Store) -> None:
        """Copy the assets before a step: the trainer writes them after its attempt has started."""
        if self._has_assets:
            return
        try:
            self._has_assets = copy_assets(self._source, target)
        except (FlashckptError, OSError) as error:
            # Steps matter more than a config. After a failure of storage, retry with the next step.
            log.warning("the assets of the run are not copied to the remote: %s", error)
            self._has_assets = not isinstance(error, OSError)

    def _chosen(self, is_due: IsDue) -> CommitName | None:
        view, last = View.of(self._source), self.newest
        newest = next((each for each in view.newest_first() if is_whole(view, each)), None)
        if newest is None or (last is not None and newest.id <= last.id):
            return None  # the remote may be ahead of all steps here
        return newest if is_due(None if last is None else last.step, newest.step) else None

"""The step that a run resumes from: this rank's offers, and the candidates that were chosen from those of all
ranks (commit/choice.py), read from the nearest tier first: memory of this node, its cache, the run's store,
its remote.

Owns how candidates are tried, and the reports about those that cannot be used. A candidate is tried in two
turns, and all ranks (`Agreement`) vote after each: first its records are read and compared with the live
state; then its bytes are read, into live tensors, too. So nothing live changes before it fits on all ranks.
An older candidate is taken only if a newer one is damaged or missing, or if its disk fails in each retry
while the run's records are readable: one bad sector must not stop a job for a night. A state that does not
fit, any other failure of storage, a newer format or a fault of this node's memory ends the resume: the step
may be intact, and a resume from an older one would abandon it. A run whose steps cannot be used is never
taken for a fresh run."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from flashckpt import crashpoints
from flashckpt.commit import lineage
from flashckpt.commit.choice import Candidate as Agreed
from flashckpt.commit.choice import Choice, Offer, Place, RankOffers, Stored
from flashckpt.commit.lineage import next_start
from flashckpt.commit.steps import StepRecord, read_checkpoint, step_of
from flashckpt.commit.view import HOME, View, ask
from flashckpt.errors import DamagedError, OutOfSpaceError, RunError, UnusableRunError
from flashckpt.format.catalogue import Checkpoint
from flashckpt.format.names import CommitName
from flashckpt.restore import memory_tier
from flashckpt.restore.filling import LiveLayout
from flashckpt.restore.memory_tier import TIERS, Held
from flashckpt.restore.node_copies import fetched
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_reading import StepReading
from flashckpt.store.base import Store
from flashckpt.store.read_plan import MissingShardError, Source, UnreadableShardError

log = logging.getLogger(__name__)

_SHOWN = 20
_PAUSES_S = (0.1, 0.5, 2.0)
"""Before each retry of a failed read: longer than a short failure of a server; a dead disk stays dead."""
TRIES = 1 + len(_PAUSES_S)

Fits = Callable[[Snapshot], None]
"""Raises DamagedError for a malformed snapshot, MismatchError for one of another model; changes nothing."""
Targets = Callable[[Snapshot], Mapping[str, Tensor]]
"""Returns the live tensors that bytes of a snapshot that fits are read into, by the names of its leaves."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Candidate:
    """A snapshot of the lineage in one place: `held` in a slot of this node or its cache, or the `checkpoint`
    in the store, or in the remote."""

    name: CommitName
    place: Place
    held: Held | None = None
    checkpoint: Checkpoint | None = None

    @property
    def step(self) -> int:
        return self.name.step

    def __str__(self) -> str:
        return f"step {self.step} of attempt {self.name.attempt} ({TIERS[self.place]})"


@dataclass(frozen=True)
class Loaded:
    """A snapshot, and the slot that holds it, verified and pinned; or what reads its bytes from storage."""

    snapshot: Snapshot
    held: Held | None = None
    reading: StepReading | None = None

    def drop(self) -> None:
        """Release it: it is not taken."""
        if self.held is not None:
            self.held.unpin()
        self.snapshot.discard()


class Agreement:
    """The ranks that resume this run: this one, and the others if there are any; this class: a rank without
    others. node: the ranks of this node; empty for a rank without others."""

    node: Sequence[int] = ()

    def choose(self, mine: RankOffers, decide: Callable[[Sequence[RankOffers]], Choice]) -> Choice:
        """Return the result of `decide` for the offers of all ranks, called on one rank. Raises its error on
        all ranks."""
        return decide([mine])

    def saved(self) -> None:
        """Report that this node's keeper has saved what it can. Returns when those of all nodes have."""

    def exchange(self, what: str, mine: Any) -> Mapping[int, Any]:
        """Send plain JSON, and return that of each rank of this node."""
        return {}

    def vote(self, reason: str, snapshot: Snapshot | None = None) -> bool:
        """Vote on a candidate that was tried here, and return whether all ranks could load it. reason: why
        this rank could not; "" if it could. snapshot: the one that fits, before its bytes are read."""
        return not reason


class StepChoice:
    """The candidates of one run.

    home: a view of the run's store. survived: the slots in which this node's keeper found sealed snapshots.
    fits: called with each snapshot before its bytes are read. targets: called with those that fit on all
        ranks. agreement: asked for a vote on every candidate that was tried.
    layout: that of the live state.
    save: has the keeper save the snapshots of dead trainers, as far as it can; unsaved: their names, of all
        ranks of this node.
    refused: one sentence for each candidate that could not be used. choice: what was chosen for all ranks, of
        the rank that chose.
    """

    def __init__(
        self,
        home: View,
        survived: list[Held],
        rank: int,
        fits: Fits,
        layout: LiveLayout,
        threads: int,
        agreement: Agreement | None = None,
        save: Callable[[], None] = lambda: None,
        unsaved: Callable[[], Sequence[CommitName]] = tuple,
        remote: Stored | None = None,
        targets: Targets = lambda snapshot: {},
    ) -> None:
        self._home, self._store, self._survived, self._rank = home, home.store, survived, rank
        self._remote = remote
        self._targets = targets
        self._layout, self._save, self._unsaved = layout, save, unsaved
        self._fits, self._threads = fits, threads
        self._agreement = agreement or Agreement()
        stores = [home.store] if remote is None else [home.store, remote.store]
        self._downloads = any(not each.is_folder for each in stores)
        self._mine = RankOffers(rank)
        self.choice = Choice()
        self.refused: list[str] = []

    def choose(self) -> Loaded | None:
        """Return the first candidate that is intact and fits, on all ranks; None for a run without steps.

        Raises UnusableRunError if there are steps and none can be used, or records of attempts are lost;
        MismatchError if the newest intact one does not fit; RunError if storage fails in each retry;
        NoSuchStepError, FormatError, OutOfSpaceError, KeeperError.
        """
        choice = self._agreed(is_saved=False)
        if choice.needs_save:
            self._save()
            self._agreement.saved()
            choice = self._agreed(is_saved=True)
        for each in choice.passed_over:
            self.refused.append(each)
            log.error("passed over: %s", each)
        for warning in choice.warnings:
            log.warning("%s", warning)
        for candidate in choice.candidates:
            if (taken := self._try(list(self._copies(candidate)))) is not None:
                return taken
        if choice.candidates:
            reasons = "\n".join(f"  {reason}" for reason in self.refused)
            raise UnusableRunError(
                f"{self._store.url} has steps and none of them can be used:\n{reasons}\nIt is not taken "
                "for a fresh run. See the output of `flashckpt verify`, restore what is missing, or start in "
                "another folder.",
                path=self._store.url,
            )
        return None

    # ---- offers

    def _agreed(self, *, is_saved: bool) -> Choice:
        offers = [*self._offers(), *(() if is_saved else self._unsaved_offers())]
        self._mine = RankOffers.of(self._rank, offers)
        return self._agreement.choose(self._mine, partial(self._decide, is_saved=is_saved))

    def _decide(self, rows: Sequence[RankOffers], *, is_saved: bool) -> Choice:
        """Decide for all ranks; called on one of them. Raises the refusal of the choice."""

        def decide() -> Choice:
            self._home = View.of(self._store, self._home.catalogue)
            return next_start(self._home, rows, self._remote, is_saved=is_saved)

        self.choice = choice = self._retried("its steps", decide)
        if choice.refusal is not None:
            raise choice.refusal
        return choice

    def _offers(self) -> Iterator[Offer]:
        """Yield this rank's snapshots in memory and cache. problem: what other ranks must know before it is
        loaded."""
        view = self._home
        for held in self._survived:
            problem = ""
            with contextlib.suppress(DamagedError):  # reported when it is loaded
                # A snapshot of memory that may be resumed is of the newest attempt, or it resumed from it.
                is_known = held.name.attempt == view.attempt or held.name.id == view.parent
                leaves = held.slot.metadata(held.sealed).leaves
                if is_known and not self._layout.is_of(view.catalogue.world, leaves):
                    problem = "other ranks or another mesh made it, and it is read from storage alone"
                elif lacks := held.lacks():
                    ranks = ", ".join(map(str, lacks))
                    problem = (
                        f"the slots of ranks {ranks} of this node, which held a part of it for all, are gone"
                    )
            yield Offer(id=held.name.id, step=held.step, place=held.place, problem=problem)

    def _unsaved_offers(self) -> Iterator[Offer]:
        """Yield those of other ranks that this node's keeper can still save."""
        own = {held.name for held in self._survived}
        for name in self._unsaved():
            if name not in own:
                why = "this rank did not capture it on this node"
                yield Offer(id=name.id, step=name.step, problem=why)

    def _copies(self, candidate: Agreed) -> Iterator[Candidate]:
        """Yield the copies of a candidate that this rank may read, in the order in which it tries them."""
        for place in candidate.places(self._mine):
            if place in (Place.MEMORY, Place.CACHE):
                for held in self._survived:
                    if held.place is place and held.name.id == candidate.id:
                        yield Candidate(held.name, place, held)
            else:
                checkpoint = candidate.mirror if place is Place.MIRROR else candidate.home
                yield Candidate(candidate.name, place, checkpoint=checkpoint)

    # ---- one candidate

    def _try(self, copies: Sequence[Candidate]) -> Loaded | None:
        """Load a snapshot from the nearest usable copy; None if a rank could not."""
        begun = None
        for candidate in copies:
            if (begun := self._usable_or_none(candidate, partial(self._begin, candidate))) is not None:
                break
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as undo:
            if begun is not None:
                kept.callback(begun.drop)
            mine = (self.refused[-1], None) if begun is None else ("", begun.snapshot)
            if self._agreement.vote(*mine) and begun is not None:
                # Until the vote, other ranks of the node may use what was fetched here.
                loaded = self._finished(candidate, begun, undo)
                if self._agreement.vote(self.refused[-1] if loaded is None else "") and loaded is not None:
                    kept.pop_all()
                    return loaded
                begun = loaded
        if begun is not None:
            self._pass_over(f"{candidate}: it is whole here, and another rank could not load it")
        return None

    def _finished(self, candidate: Candidate, begun: Loaded, closing: contextlib.ExitStack) -> Loaded | None:
        """Read the bytes of a candidate in storage; None if it cannot be used. closing: releases what was
        fetched for other ranks of the node."""
        reading, store = begun.reading, self._store_of(candidate)
        source: Source = store
        if self._agreement.node and self._downloads:
            files = {} if reading is None or store.is_folder else reading.files
            source = closing.enter_context(
                fetched(store, self._rank, files, self._agreement.exchange, self._threads)
            )
        if reading is None:
            return begun
        # A step that failed verification may fail again, and must not spoil live tensors.
        is_marked = candidate.place is not Place.MIRROR and candidate.name.id in self._home.damaged
        targets = {} if is_marked else self._targets(begun.snapshot)

        def read() -> Loaded:
            nonlocal source
            try:
                reading.read(source, self._threads, targets)
            except (DamagedError, OSError, OutOfSpaceError) as error:
                if source is store or (isinstance(error, TimeoutError) and error.errno is None):
                    raise
                log.warning("%s is read from storage by this rank alone: %s", candidate, error)
                source = store
                closing.close()  # also the memory of the copies
                reading.read(store, self._threads, targets)
            return begun

        loaded = self._usable_or_none(candidate, partial(self._retried, str(candidate), read, store))
        crashpoints.point("resume.read")
        return loaded

    def _begin(self, candidate: Candidate) -> Loaded:
        """Load a candidate in memory or cache, or read the records of one in storage; check that it fits."""
        store = None if candidate.held is not None else self._store_of(candidate)
        begun = self._retried(str(candidate), partial(self._read, candidate), store)
        try:
            if begun.held is not None:
                self._check_layout(begun.snapshot)
            self._fits(begun.snapshot)
        except BaseException:
            begun.drop()
            raise
        return begun

    def _read(self, candidate: Candidate) -> Loaded:
        if candidate.held is not None:
            return Loaded(memory_tier.load(candidate.held, self._threads), candidate.held)
        record = self._record(candidate)
        if self._layout.has(record):
            is_alone = len(self._agreement.node) < 2
            reading = StepReading.of_own(record, self._rank, is_alone=is_alone)
        else:
            reading = self._layout.begin(record)
        return Loaded(replace(reading.snapshot, tier=TIERS[candidate.place]), reading=reading)

    def _check_layout(self, snapshot: Snapshot) -> None:
        """Raise DamagedError for a snapshot in memory of another layout: a rank has only its own part in
        memory, and storage has all. It is passed over; it is neither quarantined nor lost."""
        if not self._layout.is_of(snapshot.world, list(snapshot.leaves.values())):
            raise DamagedError(
                f"it was made by {snapshot.world} ranks, or with another mesh, and of such a step a rank "
                "reads what it needs from storage, not from memory. Keepers save what is in memory once its "
                "trainers have ended.",
                step=snapshot.step,
            )

    def _record(self, candidate: Candidate) -> StepRecord:
        """Read the manifest of a step, and the parts of the rank whose files this one reads and of the
        ranks that wrote for it.

        Rank 0 checks that every file is there, unless the decision has checked it: the other ranks only meet
        the files that they read, and one listing has a name for each rank of the step."""
        assert candidate.checkpoint is not None
        store = self._store_of(candidate)
        is_first = any(each.id == candidate.name.id for each in self.choice.candidates[:1])
        manifest = self.choice.manifests.get(candidate.place) if is_first else None
        is_due = self._rank == 0 and manifest is None
        manifest = manifest or read_checkpoint(store, candidate.checkpoint)
        if is_due and (missing := ask(store, HOME.missing(manifest))):
            names = ", ".join(missing[:_SHOWN])
            raise MissingShardError(
                f"{names}: missing, or of another length than was written", step=candidate.step
            )
        record = step_of(store, manifest)
        rank = self._rank % manifest.world
        for each in {rank, *(writer for writer, _, _ in record.rank(rank).elsewhere())}:
            record.rank(each)
        return record

    def _store_of(self, candidate: Candidate) -> Store:
        if candidate.place is not Place.MIRROR:
            return self._store
        assert self._remote is not None
        return self._remote.store

    # ---- failures

    def _usable_or_none(self, candidate: Candidate, read: Callable[[], _Found]) -> _Found | None:
        """Return the result of `read`; None if the candidate cannot be used, which is logged and noted in
        `refused`. Raises what `choose` does."""
        try:
            return read()
        except UnreadableShardError as error:
            self._check_records(candidate)
            self._leave_behind(candidate, error)
        except (DamagedError, FileNotFoundError) as error:
            self._check_not_deleted(candidate, error)
            self._refuse(candidate, error)
        return None

    def _retried(self, what: str, read: Callable[[], _Found], store: Store | None = None) -> _Found:
        """Call `read`, and retry it if storage fails. Raises RunError if it still fails; if one shard alone
        does, UnreadableShardError. store: the one that bytes of a step are read from, None for other reads.
        Damaged bytes of a step are read once more: memory or a line may have damaged them."""
        url, is_step = (store or self._store).url, store is not None
        for pause_s in (*_PAUSES_S, None):
            try:
                return read()
            except FileNotFoundError:
                raise
            except DamagedError as error:
                if not is_step or pause_s is None:
                    raise
                is_step = False
                log.warning("%s: %s is not as it was written (%s); reading it once more", url, what, error)
            except OSError as error:
                if error.errno is None:
                    raise  # the handler of a signal, as a TimeoutError: storage gives a number
                if pause_s is None and isinstance(error, UnreadableShardError):
                    raise
                if pause_s is None:
                    raise RunError(
                        f"{url}: {what} cannot be read ({error}), in {TRIES} tries. The files may be intact, "
                        "and nothing was quarantined. Start again when the storage answers; to resume from "
                        f"an older step instead, run `flashckpt branch {self._store.url} STEP`.",
                        path=self._store.url,
                    ) from error
                log.warning("%s: %s cannot be read (%s); trying again", url, what, error)
                time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _check_records(self, candidate: Candidate) -> None:
        """Raise RunError if not one file but the storage has failed: the resume waits for the storage
        then."""
        store = self._store_of(candidate)
        self._retried("its catalogue", partial(View.of, store), store)
        self._retried(str(candidate), partial(self._record, candidate), store)

    def _check_not_deleted(self, candidate: Candidate, error: Exception) -> None:
        """Raise RunError if the run has dropped the step meanwhile: newer ones exist then."""
        store = self._store_of(candidate)
        if candidate.held is None and not View.of(store).has(candidate.name):
            raise RunError(
                f"{store.url}: {candidate} was deleted there while it was read: another job continues this "
                "run, and keeps newer steps. Nothing was loaded or changed. Stop that job, or wait until it "
                "has ended, then start again.",
                step=candidate.step,
                path=store.url,
            ) from error

    def _leave_behind(self, candidate: Candidate, error: Exception) -> None:
        """Pass over a step without a quarantine: the fault may be this host's. The log names the way back: an
        attempt that resumes from an older step is another branch, in which this step is not visible."""
        reason = f"{candidate}: {error}, in {TRIES} tries"
        self.refused.append(reason)
        log.error(
            "CANNOT READ %s. The copy in the remote is taken, or else an older step, from which the run "
            "continues as another branch. This step is not quarantined and nothing of it is deleted, but it "
            "is not visible in that branch. If a disk or a host has failed and can be repaired, get the step "
            "back: end this run, then `flashckpt branch %s %s`.",
            reason, self._store.url, candidate.name,
        )  # fmt: skip

    def _pass_over(self, reason: str) -> None:
        self.refused.append(reason)
        log.error("cannot resume from %s", reason)

    def _refuse(self, candidate: Candidate, error: Exception) -> None:
        self._pass_over(f"{candidate}: {error}")
        is_missing = isinstance(error, MissingShardError)
        if candidate.place is Place.HOME and isinstance(error, DamagedError) and not is_missing:
            try:
                lineage.quarantine(self._store, candidate.name, lineage.this_host(), str(error))
            except OSError as failure:
                # It is passed over all the same; without the note the next start tries it again.
                log.warning("%s could not be quarantined: %s", candidate, failure)

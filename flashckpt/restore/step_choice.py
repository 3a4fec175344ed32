"""Where a run goes on from: the visible steps, newest first, at each the nearest tier first: memory of this
node, the run's store, its remote.

Owns the order of candidates and what is said of those that cannot be used. All who are asked (`Voter`)
must be able to load one before it is taken; nothing live changes here. An older one is taken only where a
newer is damaged, missing or, again and again, not given by the disk while the run's records are: one lost
sector must not keep a job down for the night. A state that does not fit, storage that fails otherwise, a
newer format or a fault of this node's memory stops the resume: the step may be whole, and going on from an
older one would leave it behind. A run whose steps cannot be used is never taken for a fresh one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flashckpt import crashpoints
from flashckpt.commit import attempts, lineage
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.steps import StepRecord, read_manifest, read_step
from flashckpt.errors import DamagedError, NoSuchStepError, OutOfRoomError, RunError, UnusableRunError
from flashckpt.format.layout import Leaf
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Manifest
from flashckpt.format.replicas import in_words
from flashckpt.restore import memory_tier, patience
from flashckpt.restore.box_gathering import Source
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.node_chunks import NodeChunks
from flashckpt.restore.patience import patiently
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_image import EarlyRead, UnreadableShardError, read_image
from flashckpt.restore.step_reading import StepReading
from flashckpt.store.base import Store

if TYPE_CHECKING:
    from flashckpt.tiers.nearest import RemoteRun

log = logging.getLogger(__name__)

Fits = Callable[[Snapshot], None]
"""Raises DamagedError for a snapshot that is none, MismatchError for one that is of another model; changes
nothing."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Candidate:
    """A visible step in one tier: `held` in a slot of this node, or committed in the store, or in the remote.
    `is_marked`: this machine could not verify it once."""

    step: int
    attempt: AttemptName
    held: Held | None = None
    is_marked: bool = False
    is_remote: bool = False

    @property
    def tier(self) -> str:
        return "memory" if self.held is not None else "remote" if self.is_remote else "local"

    @property
    def boundary(self) -> int | None:
        """Which boundary of the attempt it is, where that is known before it is read: in memory."""
        return None if self.held is None or self.held.sealed is None else self.held.sealed.boundary


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot, and the slot that holds it, pinned; None for one that was read from disk."""

    snapshot: Snapshot
    held: Held | None

    def drop(self) -> None:
        """It is not taken after all."""
        if self.held is not None:
            self.held.unpin()
        self.snapshot.discard()


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What this rank says of a candidate: which boundary it has loaded of it, by which ranks see that theirs
    is one content; or None and the reason. `ends`: this rank raises over it, and nobody need wait for another
    word of it; there may be no candidate yet. `untaken`: leaves of it that have no place on this rank, of
    which another must have `elsewhere`; `names`: those that it has here."""

    candidate: Candidate | None
    boundary: int | None = None
    reason: str = ""
    ends: bool = False
    untaken: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def could(self) -> bool:
        return self.boundary is not None


class Voter(Protocol):
    """Who goes on with this run: this rank, and the others where there are any."""

    def common(
        self, own: Sequence[Candidate], *, has_more: bool, is_saved: bool
    ) -> Sequence[Sequence[Candidate]] | None:
        """Takes what this rank can read, in its order. What all can, in the order in which all try it: of
        each content the candidates that this rank has of it, nearest first.

        `has_more`: this node's memory has snapshots that are no use there, but would be in storage. None
        where some node has such, unless keepers have saved what they can (`is_saved`): once they have, all
        are asked again."""

    def saved(self) -> None:
        """This node's keeper has saved what it can. Returns when those of all nodes have."""

    @property
    def node(self) -> Sequence[int]:
        """The ranks of this node; none where there are no others anywhere."""

    def beside(self, what: str, mine: Any) -> Mapping[int, Any]:
        """Say something (plain JSON), and hear what each rank of this node has said."""

    def vote(self, ballot: Ballot) -> bool:
        """Told of each content that was tried here; whether all could load it."""


class AloneVoter:
    """A rank that has no others."""

    node: Sequence[int] = ()

    def common(
        self, own: Sequence[Candidate], *, has_more: bool, is_saved: bool
    ) -> Sequence[Sequence[Candidate]] | None:
        return None if has_more and not is_saved else [[each] for each in own]

    def saved(self) -> None:
        pass

    def beside(self, what: str, mine: Any) -> Mapping[int, Any]:
        return {}

    def vote(self, ballot: Ballot) -> bool:
        return ballot.could


class Layouts(Protocol):
    """How the live state is divided among ranks."""

    def is_of(self, world: int, leaves: Sequence[Leaf]) -> bool:
        """Whether what a rank of `world` ranks has, these leaves, is what this one needs."""

    def has(self, record: StepRecord) -> bool:
        """Whether what this rank has of a step is what it needs now."""

    def begin(self, record: StepRecord, threads: int) -> StepReading:
        """Begin to put a step of another layout together for this rank. `record` may lack parts. Raises as
        `read_image` does, and MismatchError."""


class AsItWas:
    """The layout of whatever step it is."""

    def is_of(self, world: int, leaves: Sequence[Leaf]) -> bool:
        return True

    def has(self, record: StepRecord) -> bool:
        return True

    def begin(self, record: StepRecord, threads: int) -> StepReading:
        raise AssertionError("it has that of every step")


class StepChoice:
    """The candidates of one run, and the reasons why some were passed over.

    `survived` are the slots in which this node's keeper found sealed snapshots. `refused` gathers one
    sentence for each candidate that could not be used. `fits` is asked of each that is whole, `voter` of
    every content that was tried. `early` may have read a step already. `layout` is that of the live state.
    `save` has the keeper save what dead trainers left in memory, as far as it can; `is_unsaved` is whether
    there is something newer of that than what survived. `remote`: what the run has in its remote, if it has
    one; the store knows the newest attempt of either.
    """

    def __init__(
        self,
        store: Store,
        survived: list[Held],
        rank: int,
        fits: Fits,
        threads: int,
        voter: Voter | None = None,
        early: EarlyRead | None = None,
        layout: Layouts | None = None,
        save: Callable[[], None] = lambda: None,
        is_unsaved: Callable[[], bool] = lambda: False,
        remote: RemoteRun | None = None,
    ) -> None:
        self._store, self._survived, self._rank, self._remote = store, survived, rank, remote
        self._layout, self._save, self._is_unsaved = layout or AsItWas(), save, is_unsaved
        self._fits, self._threads, self._early = fits, threads, early
        self._voter = voter or AloneVoter()
        self._tried: Candidate | None = None
        # Attempts by whether they have some ranks in this folder alone, and steps without this rank.
        self._divided: dict[AttemptName, bool] = {}
        self._others: list[VisibleStep] = []
        self._has_any = False
        self._lacking: dict[str, tuple[Held, tuple[int, ...]]] = {}
        self.refused: list[str] = []

    def choose(self) -> Loaded | None:
        """The first candidate that is whole and fits, for all who vote. None for a run that has no step.

        Raises UnusableRunError where there are steps and none can be used, or records of attempts are
        lost; MismatchError where the newest that is whole does not fit; RunError where storage fails
        again and again; NoSuchStepError, FormatError, OutOfRoomError, KeeperError. Whatever is raised, the
        others were told.
        """
        try:
            return self._choose()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._voter.vote(Ballot(candidate=self._tried, reason=str(error), ends=True))
            raise

    def _choose(self) -> Loaded | None:
        self._patiently("its attempts", partial(lineage.check_records, self._store))
        contents = self._contents(is_saved=False)
        if contents is None:
            self._save()
            self._voter.saved()
            contents = self._contents(is_saved=True) or ()
        self._check_others(contents)
        for content in contents:
            if (taken := self._try(content)) is not None:
                return taken
        self._tell_lacking()
        if contents:
            reasons = "\n".join(f"  {reason}" for reason in self.refused)
            raise UnusableRunError(
                f"{self._store.url} has steps and none of them can be used:\n{reasons}\nNothing was loaded "
                "and nothing was changed: it is not taken for a fresh run. See what `flashckpt verify` says, "
                "put back what is missing, or start in another folder.",
                path=self._store.url,
            )
        self._patiently("its steps", partial(lineage.check_usable, self._store))
        self._patiently("its steps", self._check_none_came)
        return None

    def _check_none_came(self) -> None:
        """RunError where there is a step now, and none was when they were looked for: some of those who vote
        may have seen it, and a fresh start would leave it behind."""
        newest = None if self._has_any else next(lineage.newest_first(self._store), None)
        if newest is not None:
            raise RunError(
                f"{self._store.url}: step {newest.step} of attempt {newest.attempt} was committed while "
                "steps were looked for, by a keeper of who trained before. Nothing was loaded or changed, "
                "and it is not taken for a fresh run. Start again.",
                path=self._store.url,
            )

    def _check_others(self, contents: Sequence[Sequence[Candidate]]) -> None:
        """UnusableRunError where this folder has a newer step without this rank than all that can be tried:
        it is another node's disk, and an older step or a fresh start is not what its user wants."""
        newest = self._others[0] if self._others else None
        if newest is None or any(each.step >= newest.step for content in contents for each in content):
            return
        manifest = read_manifest(self._store, newest.step, newest.attempt)
        has = ""
        if isinstance(manifest, Manifest) and manifest.ranks is not None:
            has = f", made by {manifest.world} ranks, it has {in_words(manifest.ranks)} and"
        raise UnusableRunError(
            f"{self._store.url} is a disk of this node's own: of step {newest.step}{has} not "
            f"rank {self._rank}, which runs here. Nothing was loaded or changed, and nothing older is "
            "taken instead. Start as many ranks as before, each where its folder is (torchrun --node-rank "
            f"gives each node its place), or bring back the folder that this node had.{self._instead()}",
            path=self._store.url,
            step=newest.step,
        )

    def _contents(self, *, is_saved: bool) -> Sequence[Sequence[Candidate]] | None:
        own = self._patiently("its steps", self.candidates)
        self._has_any = bool(own or self._others)
        has_more = not is_saved and (len(self._usable) < len(self._survived) or self._is_unsaved())
        return self._voter.common(own, has_more=has_more, is_saved=is_saved)

    @cached_property
    def _usable(self) -> list[Held]:
        """The snapshots in memory of which this rank needs nothing but what it has of them itself."""
        return [each for each in self._survived if each.sealed is not None and self._is_of_layout(each)]

    def _is_whole(self, held: Held) -> bool:
        """Whether the other ranks of this node have what this one has left to them of a snapshot. Where they
        do not, it is no candidate, here or for them."""
        try:
            lacks = held.lacks()
        except DamagedError:
            return True  # it is passed over, and said, when it is loaded
        if lacks:
            self._lacking[held.slot.name] = held, lacks
        return not lacks

    def _tell_lacking(self, step: int = -1) -> None:
        """What is newer than the step that is taken, and lacks what other ranks of this node held of it: they
        do not list it either, so nobody else can tell."""
        survived = {name: VisibleStep(held.step, held.attempt) for name, (held, _) in self._lacking.items()}
        find = partial(lineage.sources, self._store, survived)
        for each in self._patiently("its steps", find) if survived else ():
            if each.slot is not None and each.step > step:
                ranks = ", ".join(map(str, self._lacking[each.slot][1]))
                reason = (
                    f"step {each.step} of attempt {each.attempt} (memory): the slots of ranks {ranks} of "
                    "this node, which held a part of it for all, do not have it"
                )
                self.refused.append(reason)
                log.warning("cannot resume from %s", reason)

    def _is_of_layout(self, held: Held) -> bool:
        assert held.sealed is not None
        try:
            start = attempts.read_start(self._store, held.attempt)
            leaves = held.slot.metadata(held.sealed).leaves
        except DamagedError:
            return True  # it is passed over, and said, when it is loaded
        return start is None or self._layout.is_of(start.world, leaves)

    def _try(self, content: Sequence[Candidate]) -> Loaded | None:
        """Load one content, from the nearest tier that can give it. None where one who votes could not."""
        begun = None
        for candidate in content:
            self._tried = candidate
            if (begun := self._usable_or_none(candidate, partial(self._begin, candidate))) is not None:
                break
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as undo:
            if begun is not None:
                undo.callback(begun.drop)
            reading = begun if isinstance(begun, StepReading) else None
            # Until the vote others of the node may take from what is read here.
            source = ends.enter_context(self._source(reading))
            loaded = begun if isinstance(begun, Loaded) else None
            if reading is not None:
                finish = partial(self._finish, candidate, reading, source)
                loaded = self._usable_or_none(candidate, finish)
            if self._voter.vote(self._ballot(candidate, loaded)) and loaded is not None:
                self._tell_incomplete(candidate.step)
                self._tell_lacking(candidate.step)
                undo.pop_all()
                return loaded
        if loaded is not None:
            self._pass_over(f"{_named(candidate)}: it is whole here, and another rank could not load it")
        return None

    @contextlib.contextmanager
    def _source(self, reading: StepReading | None) -> Iterator[Source]:
        """Where what is left of a step is read from."""
        store = self._store if reading is None else reading.record.store
        if not self._voter.node:
            yield store
            return
        chunks = NodeChunks(store, self._rank)
        try:
            chunks.exchange(reading if self._shares else None, self._voter.beside, self._threads)
            yield chunks
        finally:
            chunks.close()

    @property
    def _shares(self) -> bool:
        return len(self._voter.node) > 1

    def _ballot(self, candidate: Candidate, loaded: Loaded | None) -> Ballot:
        if loaded is None:
            return Ballot(candidate=candidate, reason=self.refused[-1])
        snapshot = loaded.snapshot
        return Ballot(
            candidate=candidate,
            boundary=snapshot.boundary,
            untaken=snapshot.untaken,
            elsewhere=snapshot.elsewhere,
            names=snapshot.names,
        )

    def candidates(self) -> list[Candidate]:
        """Newest step first, memory before local before remote; steps that this machine has marked come
        last."""
        # Of two snapshots of one step, the later one is of the end of the epoch that this step ends.
        by_age = sorted(filter(self._is_whole, self._usable), key=lambda e: e.age, reverse=True)
        held = {each.slot.name: each for each in by_age}
        survived = {name: VisibleStep(each.step, each.attempt) for name, each in held.items()}
        found = lineage.sources(self._store, survived)
        self._others = [VisibleStep(r.step, r.attempt) for r in found if r.slot is None and not self._has(r)]
        own = [
            Candidate(r.step, r.attempt, None if r.slot is None else held[r.slot], r.is_marked)
            for r in found
            if r.slot is not None or VisibleStep(r.step, r.attempt) not in self._others
        ]
        near = [each for each in own if not each.is_marked] + self._remotely()
        near.sort(key=lambda each: (each.step, each.attempt.number), reverse=True)
        return near + [each for each in own if each.is_marked]

    def _remotely(self) -> list[Candidate]:
        there = [] if self._remote is None else self._remote.visible_in(self._store)
        return [Candidate(each.step, each.attempt, is_remote=True) for each in there]

    def _store_of(self, candidate: Candidate) -> Store:
        if not candidate.is_remote:
            return self._store
        assert self._remote is not None
        return self._remote.store

    def _has(self, source: lineage.StepSource) -> bool:
        """Whether this folder, which may be one node's own disk, has what this rank saved of a step."""
        if source.attempt not in self._divided:
            self._divided[source.attempt] = attempts.ranks_here(self._store, source.attempt) is not None
        if not self._divided[source.attempt]:
            return True
        try:
            manifest = read_manifest(self._store, source.step, source.attempt)
        except DamagedError:
            return True  # it is passed over, and said, when it is loaded
        return not isinstance(manifest, Manifest) or manifest.has(self._rank)

    def _is_partly_here(self, candidate: Candidate) -> bool:
        """Whether this folder, a node's own disk, has some ranks of a step alone, and the remote all of it:
        what is not here, as for another number of ranks, is read there."""
        each = VisibleStep(candidate.step, candidate.attempt)
        if candidate.tier != "local" or self._remote is None or each not in self._remote.steps:
            return False
        manifest = read_manifest(self._store, each.step, each.attempt)
        return isinstance(manifest, Manifest) and manifest.ranks is not None

    def _usable_or_none(self, candidate: Candidate, read: Callable[[], _Found]) -> _Found | None:
        """What `read` gives of a candidate. None, said and noted in `refused`, where it cannot be used.
        Raises what `choose` does."""
        try:
            return read()
        except UnreadableShardError as error:
            self._see_that_records_are_there(candidate)
            self._leave_behind(candidate, error)
        except (DamagedError, FileNotFoundError, NoSuchStepError) as error:
            self._see_that_it_is_there(candidate, error)
            self._refuse(candidate, error)
        return None

    def _begin(self, candidate: Candidate) -> Loaded | StepReading:
        """A candidate in memory, verified and known to fit; of one at rest what needs no other rank."""
        store = None if candidate.held is not None else self._store_of(candidate)
        begun = self._patiently(_named(candidate), partial(self._read, candidate), store)
        if isinstance(begun, Loaded):
            self._check(begun)
        return begun

    def _finish(self, candidate: Candidate, reading: StepReading, source: Source) -> Loaded:
        """The same of one at rest: all of it."""
        finish = partial(reading.finish, source, self._threads)
        snapshot = self._patiently(_named(candidate), finish, self._store_of(candidate))
        loaded = Loaded(replace(snapshot, tier=candidate.tier), None)
        self._check(loaded)
        return loaded

    def _read(self, candidate: Candidate) -> Loaded | StepReading:
        if candidate.held is not None:
            if self._early is not None:
                self._early.close()
            loaded = Loaded(memory_tier.load(candidate.held, self._threads), candidate.held)
            try:
                self._check_layout(loaded.snapshot)
            except BaseException:
                loaded.drop()
                raise
            return loaded
        record = self._record(candidate)
        if not self._layout.has(record):
            if self._early is not None:
                self._early.close()
            return self._roomy(lambda: self._layout.begin(record, self._threads))
        image = self._early.take(record) if self._early is not None else None
        if image is None:
            read = partial(read_image, record, self._rank, self._threads, own_alone=self._shares)
            image = self._roomy(read)
        crashpoints.point("resume.read")
        try:
            return StepReading.of_own(image)
        except BaseException:
            image.discard()
            raise

    def _record(self, candidate: Candidate) -> StepRecord:
        """Of the records of a step the manifest, and the parts of the rank whose things this one takes and of
        those that wrote for it."""
        store = self._store_of(candidate)
        manifest = read_manifest(store, candidate.step, candidate.attempt)
        world = manifest.world if isinstance(manifest, Manifest) else 1
        ranks = {self._rank % world}
        return read_step(store, candidate.step, candidate.attempt, ranks, with_writers=True)

    def _roomy(self, read: Callable[[], _Found]) -> _Found:
        """What `read` gives; where there is no memory for it, also said what takes some."""
        try:
            return read()
        except OutOfRoomError as error:
            num_bytes = sum(held.slot.header.num_bytes for held in self._survived)
            if not num_bytes:
                raise
            raise OutOfRoomError(
                f"{error} Snapshots of this run in memory, which are not to be gone on from or could not be "
                f"used, take {num_bytes:,} bytes: `flashckpt keepers --end {self._store.url}` saves what is "
                "saved nowhere and frees them.",
                needed=error.needed,
                available=error.available,
            ) from error

    def _check_layout(self, snapshot: Snapshot) -> None:
        """DamagedError for a snapshot in memory that is no use alone: it is passed over, and neither marked
        nor lost. Of another layout a rank has only its own part in memory; storage has all."""
        if not self._layout.is_of(snapshot.world, snapshot.layout.leaves):
            raise DamagedError(
                f"it was made by {snapshot.world} ranks, or with another mesh, and of such a step a rank "
                "reads what it needs from storage, not from memory. Keepers save what is in memory once its "
                "trainers have ended.",
                step=snapshot.step,
            )

    def _check(self, loaded: Loaded) -> None:
        try:
            self._fits(loaded.snapshot)
        except BaseException:
            loaded.drop()
            raise

    def _patiently(self, what: str, read: Callable[[], _Found], store: Store | None = None) -> _Found:
        """As `patiently`. `store`: where bytes of a step are read, None where others are."""
        over_line = store is not None and store.capabilities.part_bytes > 0
        return patiently(read, what, (store or self._store).url, self._store.url, over_line=over_line)

    def _see_that_records_are_there(self, candidate: Candidate) -> None:
        """RunError where the fault is not one file's but the storage's: then the resume waits for that."""
        store = self._store_of(candidate)
        self._patiently("its attempts", partial(lineage.check_records, store), store)
        self._patiently(_named(candidate), partial(self._record, candidate), store)

    def _see_that_it_is_there(self, candidate: Candidate, error: Exception) -> None:
        """RunError where the remote has deleted the step: then newer ones came, and no older one is taken."""
        store, each = self._store_of(candidate), VisibleStep(candidate.step, candidate.attempt)
        if candidate.is_remote and not lineage.has_manifest(store, each):
            raise RunError(
                f"{store.url}: {_named(candidate)} was deleted there while it was read: another job goes on "
                "with this run, and keeps newer steps. Nothing was loaded or changed. Stop that job, or wait "
                "until it has ended, then start again.",
                step=candidate.step,
                path=store.url,
            ) from error
        if isinstance(error, NoSuchStepError) and not self._is_partly_here(candidate):
            raise NoSuchStepError(f"{error}{self._instead()}", step=error.step, path=error.path) from error

    def _instead(self) -> str:
        return "" if self._remote is None else self._remote.instead(self._store)

    def _leave_behind(self, candidate: Candidate, error: Exception) -> None:
        """Not marked: the fault may be this host's. Said with the way back: what goes on from an older step
        is another branch, and this step is visible no more."""
        reason = f"{_named(candidate)}: {error}, in {patience.TRIES} tries"
        self.refused.append(reason)
        log.error(
            "CANNOT READ %s. What the remote has of it is taken, or an older step, if there is one: from an "
            "older one the run goes on as another branch. This step is not marked, nothing of it is deleted, "
            "and then it is seen no more. If a disk or a host was at fault and can be mended, get it back: "
            "end this run, then `flashckpt branch %s %d@%s`.",
            reason, self._store.url, candidate.step, candidate.attempt,
        )  # fmt: skip

    def _tell_incomplete(self, step: int) -> None:
        """Steps that are no candidates, though they are newer: nobody may go back without being told."""
        find = partial(lineage.incomplete, self._store, step)
        for each, reason in self._patiently("its steps", find):
            self._pass_over(f"step {each.step} of attempt {each.attempt} (local): {reason}")

    def _pass_over(self, reason: str) -> None:
        self.refused.append(reason)
        log.error("cannot resume from %s", reason)

    def _refuse(self, candidate: Candidate, error: Exception) -> None:
        self._pass_over(f"{_named(candidate)}: {error}")
        if candidate.tier == "local" and isinstance(error, DamagedError):
            try:
                lineage.mark(self._store, candidate.step, candidate.attempt, lineage.this_host(), str(error))
            except OSError as failure:
                # It is passed over now all the same; without the mark it is only tried again.
                log.warning("%s could not be marked: %s", _named(candidate), failure)


def _named(candidate: Candidate) -> str:
    return f"step {candidate.step} of attempt {candidate.attempt} ({candidate.tier})"

"""Which snapshot a start resumes from: a pure function of the offers of all ranks, of the home and of the
mirror.

Owns the order of the candidates, where each rank reads them, which snapshots are passed over and why, and
which starts are refused. Reads no store, no memory and no clock, so that thousands of ranks can be simulated.
The bytes of a candidate are verified when they are read, never here.

The order is that of the lineage: the newest attempt first, and of one attempt the newest boundary. The step
number is metadata. A snapshot that some rank can read only where its host has quarantined it comes last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice, takewhile
from typing import Any

from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId

MOST_OFFERS = 64
"""Of one rank, the newest ones. A node's memory holds far fewer."""
MOST_CANDIDATES = 64
"""Of one choice. A start that cannot read any of them fails."""
MOST_PROBLEM_CHARS = 200
_MOST_HOST_CHARS = 255
_MOST_UNREADABLE, _MOST_REASONS, _MOST_NAMED = 8, 4, 8


class Place(IntEnum):
    """Where a rank reads a snapshot, nearest first."""

    MEMORY = 0
    CACHE = 1
    HOME = 2
    MIRROR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A snapshot of one rank in a slot of its node's memory or cache.

    `world` is the number of ranks that made the snapshot. `is_quarantined`: this host failed to verify it
    there. `problem`: why the rank cannot use it as it is, although it can be saved: it is of another mesh,
    the rank runs on another node now, or other ranks of the node have lost their copies.
    """

    id: SnapshotId
    step: int
    world: int
    place: Place = Place.MEMORY
    is_quarantined: bool = False
    problem: str = ""

    def serves(self, world: int | None) -> bool:
        """Whether a rank of a job of `world` ranks (None: of as many as made it) can read it."""
        return not self.problem and world in (None, self.world)


@dataclass(frozen=True, slots=True)
class RankOffers:
    """The offers for one rank of the new job, which runs on `host`. Make it with `of`, which bounds it."""

    rank: int
    host: str
    offers: tuple[Offer, ...] = ()

    @classmethod
    def of(cls, rank: int, host: str, offers: Iterable[Offer]) -> RankOffers:
        """The newest `MOST_OFFERS`: of one snapshot those that can be read before the others."""
        newest = sorted(offers, key=lambda e: (e.id, not e.problem, not e.is_quarantined, -e.place, e.world))
        return cls(rank, host[:_MOST_HOST_CHARS], tuple(newest[: -MOST_OFFERS - 1 : -1]))

    def to_json(self) -> list[Any]:
        """In plain JSON, for rank 0."""
        return [self.rank, self.host, [_offer_json(each) for each in self.offers]]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> RankOffers:
        rank, host, offers = row
        return cls(rank, host, tuple(map(_offer_of, offers)))


@dataclass(frozen=True, kw_only=True)
class History:
    """What one store, the home or the mirror, has of the run.

    `lineage` has each attempt of it with its last boundary, and begins with the newest that started. `known`
    are the attempts that its catalogue knows. `commits` gives the step of each checkpoint, of any branch.
    `broken` are those that are known not to be whole, each with the reason; `quarantined` the hosts that
    failed to verify a commit in this store. `read_from`: the URL of the other store from which the newest
    attempt read the snapshot that it began with; empty if it read none there. `problem`: why nothing here can
    be relied on, because the store does not answer or has lost records.
    """

    url: str
    lineage: tuple[SnapshotId, ...] = ()
    known: frozenset[AttemptName] = frozenset()
    commits: Mapping[SnapshotId, int] = field(default_factory=dict)
    broken: Mapping[SnapshotId, str] = field(default_factory=dict)
    quarantined: Mapping[SnapshotId, frozenset[str]] = field(default_factory=dict)
    read_from: str = ""
    problem: str = ""

    def has(self, id: SnapshotId) -> bool:
        """Whether it is committed here and not known to be broken."""
        return id in self.commits and id not in self.broken

    @property
    def newest(self) -> AttemptName | None:
        return self.lineage[0].attempt if self.lineage else None

    def knows(self, attempt: AttemptName) -> bool:
        """Whether the attempt has started here, or is in the lineage."""
        return attempt in self.known or any(attempt == each.attempt for each in self.lineage)

    def is_visible(self, id: SnapshotId) -> bool:
        """Whether the newest started attempt descends from this snapshot."""
        return any(id.attempt == each.attempt and id.boundary <= each.boundary for each in self.lineage)

    def alone(self, other: History, offered: Iterable[SnapshotId] = ()) -> set[SnapshotId]:
        """The commits of the lineage, and what nodes offer of it, that another store of the run does not
        know: there they are neither committed nor in the lineage."""
        mine = filter(self.is_visible, (*self.commits, *offered))
        return {id for id in mine if id not in other.commits and not other.is_visible(id)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A snapshot that every rank can read. `quarantined_on`: the hosts of this job that failed to verify it
    in the home. `from_mirror`: a second try of the same snapshot, for which all ranks read the mirror: a
    rank that finds late that what it reads is damaged cannot change to the mirror alone."""

    id: SnapshotId
    step: int
    in_home: bool = False
    in_mirror: bool = False
    quarantined_on: frozenset[str] = frozenset()
    from_mirror: bool = False

    @property
    def name(self) -> CommitName:
        """The name that its commit has, or would have."""
        return CommitName(self.step, self.id.attempt, self.id.boundary)

    def places(self, row: RankOffers, world: int | None) -> tuple[Place, ...]:
        """Where this rank reads it, in the order in which it tries: the nearest first, quarantined copies
        last."""
        return tuple(dict.fromkeys(place for _, place in sorted(self._copies(row, world))))

    def _copies(self, row: RankOffers, world: int | None) -> Iterator[tuple[bool, Place]]:
        """Each copy that the rank can read: whether it is quarantined, and where."""
        if not self.from_mirror:
            for each in row.offers:
                if each.id == self.id and each.serves(world):
                    yield each.is_quarantined, each.place
            if self.in_home:
                yield row.host in self.quarantined_on, Place.HOME
        if self.in_mirror:
            yield False, Place.MIRROR

    def to_json(self) -> list[Any]:
        """In plain JSON, for the other ranks."""
        hosts = sorted(self.quarantined_on)
        return [*_id_json(self.id), self.step, self.in_home, self.in_mirror, hosts, self.from_mirror]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Candidate:
        attempt, boundary, step, in_home, in_mirror, hosts, from_mirror = row
        return cls(
            id=_id_of(attempt, boundary), step=step, in_home=in_home, in_mirror=in_mirror,
            quarantined_on=frozenset(hosts), from_mirror=from_mirror,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A snapshot that is newer than the first candidate and is not resumed from, with the reasons."""

    id: SnapshotId
    step: int
    why: str

    def __str__(self) -> str:
        return f"step {self.step} of attempt {self.id.attempt} (boundary {self.id.boundary}): {self.why}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What all ranks do. `candidates` in the order in which they are tried; none, without a refusal and
    without `needs_save`, is a fresh run. `lineage` is the one that holds: the mirror's, if `mirror_is_ahead`.

    `needs_save`: memory or cache of some node has something newer than every rank can read. The keepers save
    what they can; then the ranks offer and choose again. `passed_over` and `warnings` are for the log.
    `refusal`: the start ends with this error, and nothing is loaded.
    """

    candidates: tuple[Candidate, ...] = ()
    lineage: tuple[SnapshotId, ...] = ()
    mirror_is_ahead: bool = False
    needs_save: bool = False
    passed_over: tuple[PassedOver, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: RunError | None = None

    def to_json(self) -> list[Any]:
        """What the other ranks need, in plain JSON. A refusal is raised instead."""
        passed_over = [[*_id_json(each.id), each.step, each.why] for each in self.passed_over]
        candidates = [each.to_json() for each in self.candidates]
        return [candidates, self.needs_save, passed_over, list(self.warnings)]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Choice:
        candidates, needs_save, passed_over, warnings = row
        return cls(
            candidates=tuple(map(Candidate.from_json, candidates)),
            needs_save=needs_save,
            passed_over=tuple(PassedOver(_id_of(*id), step, why) for *id, step, why in passed_over),
            warnings=tuple(warnings),
        )


def choose(
    offers: Iterable[RankOffers],
    home: History,
    mirror: History | None = None,
    *,
    world: int | None = None,
    is_saved: bool = False,
) -> Choice:
    """Decide what the ranks that offer resume from. The order of the rows does not matter.

    world: the number of ranks of the new job. Memory and cache serve only a snapshot of as many ranks,
    home and mirror serve any. None, where the new job is not known yet: as many as made the snapshot.
    is_saved: the keepers of all nodes have saved what they can.
    """
    rows = sorted(offers, key=lambda row: row.rank)
    if home.problem:
        return Choice(refusal=UnusableRunError(home.problem, path=home.url))
    answers = mirror if mirror is not None and not mirror.problem else None
    is_ahead = False
    if answers is not None:
        try:
            is_ahead = mirror_is_ahead(home, answers, (each.id for row in rows for each in row.offers))
        except UnusableRunError as error:
            return Choice(refusal=error)
    lineage = answers.lineage if answers is not None and is_ahead else home.lineage
    table = _Table(rows, home, answers, lineage, world)
    candidates = table.candidates()
    if not is_saved and table.node_is_newer(candidates):
        return Choice(lineage=lineage, mirror_is_ahead=is_ahead, needs_save=True)
    passed_over = tuple(table.passed_over(candidates))
    refusal, warnings = None, tuple[str, ...]()
    if not candidates:
        refusal = _without_candidates(home, answers, lineage)
    if refusal is None and answers is not None and is_ahead:
        warnings = _hidden(home, answers) if candidates else (_trained_elsewhere(home, answers),)
    elif refusal is None:
        refusal, warnings = _behind_start(home, mirror, candidates)
    return Choice(
        candidates=() if refusal is not None else tuple(candidates),
        lineage=lineage,
        mirror_is_ahead=is_ahead,
        passed_over=passed_over,
        warnings=warnings,
        refusal=refusal,
    )


def mirror_is_ahead(home: History, mirror: History, offered: Iterable[SnapshotId] = ()) -> bool:
    """Whether the run was trained further in the mirror, by an attempt that the home does not know.

    Only snapshots count that are committed, or `offered` by a node, in the lineage of one store, and that the
    other does not know. An attempt without any yields. Those of an attempt that the other does not know
    count more than later ones of an attempt that both know. If neither store has any, the attempt with
    the higher number is newer. Raises UnusableRunError where both have some.
    """
    if mirror.newest is None or home.knows(mirror.newest):
        return False
    ours, theirs = home.alone(mirror, offered), mirror.alone(home)
    # Commits of other branches of the home: after a take-over these must not belong to its newest attempt.
    later = {id for id in home.commits if id.attempt.number >= mirror.newest.number}
    foreign = [{id for id in ours | later if not mirror.knows(id.attempt)}]
    foreign += [{id for id in theirs if not home.knows(id.attempt)}]
    ours, theirs = foreign if any(foreign) else (ours, theirs)
    if ours and theirs:
        raise _diverged(home, mirror, max(ours), max(theirs))
    if ours or theirs:
        return bool(theirs)
    return home.newest is None or home.newest.number <= mirror.newest.number


def _diverged(home: History, mirror: History, ours: SnapshotId, theirs: SnapshotId) -> UnusableRunError:
    return UnusableRunError(
        f"{home.url} and the mirror (remote={mirror.url}) have diverged: {_named(home, ours)} is known to "
        f"the home alone, and {_named(mirror, theirs)} to the mirror alone. Each was trained where the other "
        "was not known. Nothing was loaded, and the steps of both stay where they are. To resume from the "
        f"mirror, start with an empty home. To resume from {home.url}, name another mirror.",
        path=home.url,
    )


def _named(history: History, id: SnapshotId) -> str:
    what = f"step {history.commits[id]}" if id in history.commits else "a snapshot in memory"
    return f"{what} of attempt {id.attempt}"


@dataclass(slots=True)
class _Known:
    """The offers of one snapshot: `readers` are the rows that can read it in memory or cache, `sound` those
    of them with a copy that is not quarantined. `is_on_node`: a keeper has it and can still save it."""

    step: int
    readers: set[int] = field(default_factory=set)
    sound: set[int] = field(default_factory=set)
    is_on_node: bool = False


class _Table:
    """What is known of each snapshot of the lineage."""

    def __init__(
        self,
        rows: Sequence[RankOffers],
        home: History,
        mirror: History | None,
        lineage: Sequence[SnapshotId],
        world: int | None,
    ) -> None:
        self._rows, self._home, self._world = rows, home, world
        self._mirror = mirror or History(url="")
        self._places = {each.attempt: (index, each.boundary) for index, each in enumerate(lineage)}
        self._on_host: dict[str, set[int]] = {}
        known: dict[SnapshotId, _Known] = {}
        for index, row in enumerate(rows):
            self._on_host.setdefault(row.host, set()).add(index)
            for each in row.offers:
                if (found := known.get(each.id)) is None:
                    found = known[each.id] = _Known(each.step)
                found.is_on_node |= each.place in (Place.MEMORY, Place.CACHE)
                if each.serves(world):
                    found.readers.add(index)
                    if not each.is_quarantined:
                        found.sound.add(index)
        for store in (self._mirror, home):
            for id, step in store.commits.items():
                known.setdefault(id, _Known(step)).step = step
        self._known = {id: known[id] for id in sorted(filter(self.is_in_lineage, known), key=self.age)[::-1]}

    def is_in_lineage(self, id: SnapshotId) -> bool:
        _, last_boundary = self._places.get(id.attempt, (0, -1))
        return id.boundary <= last_boundary

    def age(self, id: SnapshotId) -> tuple[int, int]:
        """Sorts snapshots of the lineage, the newest last."""
        return -self._places[id.attempt][0], id.boundary

    def candidates(self) -> list[Candidate]:
        """What every rank can read, in order, `MOST_CANDIDATES` at most."""
        sound, quarantined = list[Candidate](), list[Candidate]()
        for id, known in self._known.items():
            in_home, in_mirror = self._home.has(id), self._mirror.has(id)
            if not (in_home or in_mirror or self._is_with_all(known.readers)):
                continue
            marked = self._home.quarantined.get(id, frozenset()) if in_home else frozenset[str]()
            hosts = frozenset(marked & self._on_host.keys())
            found = Candidate(
                id=id, step=known.step, in_home=in_home, in_mirror=in_mirror, quarantined_on=hosts
            )
            (sound if self._is_sound(found) else quarantined).append(found)
            if in_mirror and (in_home or known.readers):
                sound.append(Candidate(id=id, step=known.step, in_mirror=True, from_mirror=True))
        return (sound + quarantined)[:MOST_CANDIDATES]

    def _is_with_all(self, rows: Collection[int]) -> bool:
        return bool(self._rows) and len(rows) == len(self._rows)

    def _is_sound(self, found: Candidate) -> bool:
        """Whether each rank has a copy that is not quarantined there."""
        sound = self._known[found.id].sound
        if found.in_home and not found.in_mirror:
            return all(self._on_host[host] <= sound for host in found.quarantined_on)
        return found.in_mirror or self._is_with_all(sound)

    def node_is_newer(self, candidates: Sequence[Candidate]) -> bool:
        """Whether some node has a snapshot, which its keeper can still save, that is newer than every rank
        can read without quarantine."""
        first = next((each for each in candidates if self._is_sound(each)), None)
        newer = self._newer_than(first)
        return any(self._known[id].is_on_node and not self._home.has(id) for id in newer)

    def _newer_than(self, candidate: Candidate | None) -> Iterator[SnapshotId]:
        return takewhile(lambda id: candidate is None or id != candidate.id, self._known)

    def passed_over(self, candidates: Sequence[Candidate]) -> Iterator[PassedOver]:
        """The snapshots that are newer than the first candidate, newest first, as many as are shown."""
        first = candidates[0] if candidates else None
        by_id = {each.id: each for each in candidates}
        for id in islice(self._newer_than(first), _MOST_UNREADABLE):
            why = self._quarantine(by_id[id]) if id in by_id else self._unreadable(id)
            yield PassedOver(id, self._known[id].step, why)

    def _quarantine(self, each: Candidate) -> str:
        sound = self._known[each.id].sound
        without = {
            row.host
            for index, row in enumerate(self._rows)
            if index not in sound and (not each.in_home or row.host in each.quarantined_on)
        }
        hosts = _shown(sorted(without))
        return (
            f"it failed verification on {hosts} and is tried last. If its files are whole again, `flashckpt "
            "recover` says so in the catalogue."
        )

    def _unreadable(self, id: SnapshotId) -> str:
        found = [f"in {s.url}: {s.broken[id]}" for s in (self._home, self._mirror) if id in s.broken]
        without: dict[str, list[str]] = {}
        readers = self._known[id].readers
        for row in (row for index, row in enumerate(self._rows) if index not in readers):
            offered = next((each for each in row.offers if each.id == id), None)
            why = self._why(offered, is_committed=bool(found))
            without.setdefault(why, []).append(str(row.rank))
        shown = [f"rank {_shown(ranks)} cannot read it: {why}" for why, ranks in without.items()]
        more = f"{len(shown) - _MOST_REASONS} more reasons"
        shown[_MOST_REASONS:] = [more] if len(shown) > _MOST_REASONS else []
        return "; ".join(found + shown)

    def _why(self, offered: Offer | None, *, is_committed: bool) -> str:
        if offered is None:
            return "its node does not have it" + ("" if is_committed else ", and it is not committed")
        if offered.problem:
            return offered.problem
        return f"{offered.world} ranks made it, and a job of {self._world} reads such a snapshot from storage"


def _without_candidates(
    home: History, mirror: History | None, lineage: Sequence[SnapshotId]
) -> RunError | None:
    """Why a run without a candidate is not a fresh one; None if it is."""
    stores = [each for each in (home, mirror) if each is not None and each.commits]
    if not stores:
        return None
    url, of = stores[0].url, History(url="", lineage=tuple(lineage))
    if any(map(of.is_visible, (id for each in stores for id in each.commits))):
        return UnusableRunError(
            f"{url} has committed steps, and files of every one are missing, cut short or damaged. Nothing "
            "was loaded or changed, and it is not taken for a fresh run. Run `flashckpt verify` on it, put "
            "the files back, or use another path.",
            path=url,
        )
    newest = sorted({(step, id) for each in stores for id, step in each.commits.items()}, reverse=True)
    names = [f"{step}@{id}" for step, id in newest]
    return UnusableRunError(
        f"{url} has committed steps ({_shown(names)}), and its newest attempt began from none of them. "
        "Nothing was loaded or changed, and it is not taken for a fresh run. Name the step to resume from "
        f"with `flashckpt branch {url} STEP@ATTEMPT:BOUNDARY`, or use another path.",
        path=url,
    )


def _hidden(home: History, mirror: History) -> tuple[str, ...]:
    """A warning if the newest commit of the home is not in the lineage of a mirror that is ahead."""
    newest = max(filter(home.is_visible, home.commits), default=None)
    if newest is None or mirror.is_visible(newest):
        return ()
    return (
        f"the run was trained further in the mirror (remote={mirror.url}), as attempt {mirror.newest}, from "
        f"before step {home.commits[newest]} of attempt {newest.attempt} in {home.url}: that step stays as "
        f"another branch, and `flashckpt branch {home.url} {home.commits[newest]}@{newest}` resumes from it",
    )


def _trained_elsewhere(home: History, mirror: History) -> str:
    return (
        f"the run was trained elsewhere, as attempt {mirror.newest}, and neither {home.url} nor the mirror "
        f"(remote={mirror.url}) has a step of it: it begins anew. If the home that it was trained in still "
        "exists, stop, and start there"
    )


def _behind_start(
    home: History, mirror: History | None, candidates: Sequence[Candidate]
) -> tuple[RunError | None, tuple[str, ...]]:
    """Why a start would lose steps in a mirror that does not answer or was not named, and warnings if it
    loses no known step."""
    problem = mirror.problem if mirror is not None else ""
    first = candidates[0] if candidates else None
    places = {each.attempt: index for index, each in enumerate(home.lineage)}
    begun_from = home.lineage[1] if len(home.lineage) > 1 else None
    is_behind = begun_from is not None and (
        first is None or (-places[first.id.attempt], first.id.boundary) < (-1, begun_from.boundary)
    )
    began = "" if begun_from is None else f"{begun_from.attempt}:{begun_from.boundary}"
    if mirror is not None and problem:
        if first is None or is_behind:
            here = "has no step" if first is None else f"has step {first.step}, which is older than {began}"
            return _unreached(home, mirror, f"{home.url} {here}"), ()
        step = f"step {first.step}"
        return None, (
            f"the mirror (remote={mirror.url}) cannot be read ({problem}): {step} is resumed from. If the "
            "run was trained further elsewhere, stop and start again when the mirror answers",
        )
    if home.read_from and is_behind and (mirror is None or first is None):
        return UnusableRunError(
            f"{home.url}: the run began its newest attempt from {began}, which it read in {home.read_from}, "
            "its mirror, and which is not here. Nothing was loaded or changed. Start with remote= that names "
            "this mirror, or put back what it had. To resume from what is here, name a step with `flashckpt "
            f"branch {home.url} STEP`.",
            path=home.url,
        ), ()
    return None, ()


def _unreached(home: History, mirror: History, why: str) -> RunError:
    return RunError(
        f"{why}, and the mirror (remote={mirror.url}) cannot be read ({mirror.problem}). The mirror may have "
        "newer steps. Nothing was loaded or changed, and this is not taken for a fresh run. Start again when "
        "the mirror answers; to start without it, leave remote= away.",
        path=home.url,
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _offer_json(each: Offer) -> list[Any]:
    problem = each.problem[:MOST_PROBLEM_CHARS]
    return [*_id_json(each.id), each.step, each.world, int(each.place), each.is_quarantined, problem]


def _offer_of(row: Sequence[Any]) -> Offer:
    attempt, boundary, step, world, place, is_quarantined, problem = row
    return Offer(
        id=_id_of(attempt, boundary), step=step, world=world, place=Place(place),
        is_quarantined=is_quarantined, problem=problem,
    )  # fmt: skip


def _id_json(id: SnapshotId) -> list[Any]:
    return [str(id.attempt), id.boundary]


def _id_of(attempt: str, boundary: int) -> SnapshotId:
    name = AttemptName.parse(attempt)
    assert name is not None, attempt
    return SnapshotId(name, boundary)

"""Which snapshot a start resumes from: a pure function of the offers of all ranks, and of the catalogues of
the home and of the mirror.

Owns the order of the candidates, where each rank reads them, which snapshots are passed over and why, and
which starts are refused. Reads no store, no memory and no clock, so that thousands of ranks can be simulated.
The bytes of a candidate are verified when they are read, never here. So a checkpoint that is marked as
damaged is tried as any other: the mark may come from a host whose memory is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice, takewhile

from flashckpt.catalogue.changes import is_visible, relate, visibility
from flashckpt.commit.view import View
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format import forms
from flashckpt.format.catalogue import CHECKPOINT, EMPTY, Catalogue, Checkpoint
from flashckpt.format.forms import FLAG, ID, Form
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import CommitName, SnapshotId
from flashckpt.printable import listed

MOST_OFFERS = 64
"""Of one rank, the newest ones. A node's memory holds far fewer."""
MOST_CANDIDATES = 64
"""Of one choice. A start that cannot read any of them fails."""
MOST_PROBLEM_CHARS = 200
_MOST_UNREADABLE, _MOST_REASONS = 8, 4


class Place(IntEnum):
    """Where a rank reads a snapshot, nearest first."""

    MEMORY = 0
    CACHE = 1
    HOME = 2
    MIRROR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A snapshot of one rank in a slot of its node's memory or cache.

    `problem`: why the rank cannot use it as it is, although it can be saved: other ranks made it, the rank
    runs on another node now, or other ranks of the node have lost their copies.
    """

    id: SnapshotId
    step: int
    place: Place = Place.MEMORY
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RankOffers:
    """The offers for one rank of the new job. Make it with `of`, which bounds it."""

    rank: int
    offers: tuple[Offer, ...] = ()

    @classmethod
    def of(cls, rank: int, offers: Iterable[Offer]) -> RankOffers:
        """The newest `MOST_OFFERS`: of one snapshot those that can be read before the others."""
        newest = sorted(offers, key=lambda each: (each.id, not each.problem, -each.place))
        return cls(rank, tuple(newest[: -MOST_OFFERS - 1 : -1]))


@dataclass(frozen=True)
class Stored(View):
    """What a store, the home or the mirror, has of the run. `broken`: checkpoints that are not whole, each
    with the reason. `problem`: why the mirror does not answer; empty if it does."""

    broken: Mapping[SnapshotId, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def url(self) -> str:
        return self.store.url


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A snapshot that every rank can read. `home`, `mirror`: its checkpoint in these stores, None if it is
    not there. `from_mirror`: a second try of the same snapshot, for which all ranks read the mirror: a rank
    that finds late that what it reads is damaged cannot change to the mirror alone."""

    id: SnapshotId
    step: int
    home: Checkpoint | None = None
    mirror: Checkpoint | None = None
    from_mirror: bool = False

    @property
    def name(self) -> CommitName:
        """The name that its commit has, or would have."""
        return CommitName(self.step, self.id.attempt, self.id.boundary)

    def places(self, row: RankOffers) -> tuple[Place, ...]:
        """Where this rank reads it, the nearest first."""
        places = {Place.MIRROR} if self.mirror is not None else set()
        if not self.from_mirror:
            places |= {each.place for each in row.offers if each.id == self.id and not each.problem}
            places |= {Place.HOME} if self.home is not None else set()
        return tuple(sorted(places))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What all ranks do. `candidates` in the order in which they are tried; none, without a refusal and
    without `needs_save`, is a fresh run.

    `needs_save`: memory or cache of some node has something newer than every rank can read. The keepers save
    what they can; then the ranks offer and choose again. `passed_over`: the snapshots that are newer than the
    first candidate, each with the reasons. It and `warnings` are for the log.
    `refusal`: the start ends with this error, and nothing is loaded.

    `home`: the version of the home's catalogue that was chosen from; `lead`: the same, or the mirror's if the
    mirror is ahead. `manifests`: those of the first candidate, by the stores in which all its files are
    there. Only the rank that chose has these.
    """

    candidates: tuple[Candidate, ...] = ()
    needs_save: bool = False
    passed_over: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: RunError | None = None
    home: Catalogue = field(default=EMPTY, compare=False, repr=False)
    lead: Catalogue = field(default=EMPTY, compare=False, repr=False)
    manifests: Mapping[Place, Manifest] = field(default_factory=dict, compare=False, repr=False)


_PROBLEM: Form[str] = Form(lambda problem: problem[:MOST_PROBLEM_CHARS], forms.text().load)
_OFFER = forms.row(Offer, id=ID, step=forms.integer(), place=Form(int, Place), problem=_PROBLEM)
_CANDIDATE = forms.row(
    Candidate,
    id=ID,
    step=forms.integer(),
    home=forms.optional(CHECKPOINT),
    mirror=forms.optional(CHECKPOINT),
    from_mirror=FLAG,
)
_TEXTS = forms.items(forms.of_type(str, "a text"))
OFFERS: Form[RankOffers] = forms.row(RankOffers, rank=forms.integer(), offers=forms.items(_OFFER))
"""What each rank sends to rank 0."""
CHOICE: Form[Choice] = forms.row(
    Choice, candidates=forms.items(_CANDIDATE), needs_save=FLAG, passed_over=_TEXTS, warnings=_TEXTS
)
"""What the other ranks need. A refusal is raised instead."""


def choose(
    offers: Iterable[RankOffers],
    home: Stored,
    mirror: Stored | None = None,
    *,
    is_saved: bool = False,
    is_start: bool = True,
) -> Choice:
    """Decide what the ranks that offer resume from. The order of the rows does not matter. `is_saved`: the
    keepers of all nodes have saved what they can. `is_start`: a job begins; else a command reads the home,
    which may have a job."""
    rows = sorted(offers, key=lambda row: row.rank)
    answers = mirror if mirror is not None and not mirror.problem else None
    lead = home
    if answers is not None:
        try:
            lead = home if relate(home.catalogue, answers.catalogue) is home.catalogue else answers
        except UnusableRunError as error:
            text = f"{home.url} and its mirror (remote={answers.url}): {error}"
            return Choice(refusal=UnusableRunError(text, path=home.url))
    table = _Table(rows, home, answers, lead.catalogue)
    candidates = table.candidates()
    needs_save = not is_saved and table.node_is_newer(candidates)
    if needs_save:
        return Choice(needs_save=True, home=home.catalogue, lead=lead.catalogue)
    refusal, warnings = None, tuple[str, ...]()
    if not candidates:
        refusal = _without_candidates(home, answers, lead.catalogue)
    if refusal is None and lead is home:
        refusal, warnings = _behind_start(home, mirror, candidates, is_start)
    elif refusal is None:
        warnings = _left_behind(rows, home, lead)
        warnings += () if candidates else (_trained_elsewhere(home, lead),)
    return Choice(
        candidates=() if refusal is not None else tuple(candidates),
        passed_over=tuple(table.passed_over(candidates)),
        warnings=warnings,
        refusal=refusal,
        home=home.catalogue,
        lead=lead.catalogue,
    )


@dataclass(slots=True)
class _Known:
    """What is known of a snapshot: `readers` are the rows that can read it in memory or cache; `is_offered`:
    a keeper has it, and can still save it. `home`, `mirror`: as of Candidate."""

    step: int
    readers: set[int] = field(default_factory=set)
    is_offered: bool = False
    home: Checkpoint | None = None
    mirror: Checkpoint | None = None


class _Table:
    """What is known of each snapshot in the history of `lead`, newest first."""

    def __init__(
        self, rows: Sequence[RankOffers], home: Stored, mirror: Stored | None, lead: Catalogue
    ) -> None:
        self._rows, self._stores = rows, [each for each in (home, mirror) if each is not None]
        known: dict[SnapshotId, _Known] = {}
        for index, row in enumerate(rows):
            for each in row.offers:
                if (found := known.get(each.id)) is None:
                    found = known[each.id] = _Known(each.step)
                found.is_offered = True
                if not each.problem:
                    found.readers.add(index)
        for store in self._stores:
            for checkpoint in store.catalogue.checkpoints:
                entry = known.setdefault(checkpoint.id, _Known(checkpoint.step))
                entry.step = checkpoint.step
                if checkpoint.id not in store.broken:
                    entry.home, entry.mirror = (
                        (checkpoint, entry.mirror) if store is home else (entry.home, checkpoint)
                    )
        is_seen = visibility(lead)
        self._known = {id: known[id] for id in sorted(filter(is_seen, known), reverse=True)}

    def candidates(self) -> list[Candidate]:
        """What every rank can read, in order, `MOST_CANDIDATES` at most."""
        found = list[Candidate]()
        for id, known in self._known.items():
            is_with_all = bool(self._rows) and len(known.readers) == len(self._rows)
            if known.home or known.mirror or is_with_all:
                found.append(Candidate(id=id, step=known.step, home=known.home, mirror=known.mirror))
            if known.mirror and (known.home or known.readers):
                found.append(Candidate(id=id, step=known.step, mirror=known.mirror, from_mirror=True))
        return found[:MOST_CANDIDATES]

    def node_is_newer(self, candidates: Sequence[Candidate]) -> bool:
        """Whether some node has a snapshot, which its keeper can still save, that is newer than every rank
        can read."""
        newer = (self._known[id] for id in self._newer_than(candidates))
        return any(each.is_offered and each.home is None for each in newer)

    def _newer_than(self, candidates: Sequence[Candidate]) -> Iterator[SnapshotId]:
        first = candidates[0].id if candidates else None
        return takewhile(lambda id: id != first, self._known)

    def passed_over(self, candidates: Sequence[Candidate]) -> Iterator[str]:
        """The snapshots that are newer than the first candidate, newest first, as many as are shown."""
        for id in islice(self._newer_than(candidates), _MOST_UNREADABLE):
            what = f"step {self._known[id].step} of attempt {id.attempt} (boundary {id.boundary})"
            yield f"{what}: {self._unreadable(id)}"

    def _unreadable(self, id: SnapshotId) -> str:
        found = [f"in {store.url}: {store.broken[id]}" for store in self._stores if id in store.broken]
        without: dict[str, list[str]] = {}
        for index, row in enumerate(self._rows):
            if index not in self._known[id].readers:
                offered = next((each for each in row.offers if each.id == id), None)
                absent = "its node does not have it" + ("" if found else ", and it is not committed")
                why = absent if offered is None else offered.problem
                without.setdefault(why, []).append(str(row.rank))
        shown = [f"rank {listed(ranks)} cannot read it: {why}" for why, ranks in without.items()]
        more = f"{len(shown) - _MOST_REASONS} more reasons"
        shown[_MOST_REASONS:] = [more] if len(shown) > _MOST_REASONS else []
        return "; ".join(found + shown)


def _without_candidates(home: Stored, mirror: Stored | None, lead: Catalogue) -> RunError | None:
    """Why a run without a candidate is not a fresh one; None if it is."""
    stores = [each for each in (home, mirror) if each is not None and each.catalogue.checkpoints]
    if not stores:
        return None
    url = stores[0].url
    checkpoints = [each for store in stores for each in store.catalogue.checkpoints]
    if any(is_visible(lead, each.id) for each in checkpoints):
        return UnusableRunError(
            f"{url} has committed steps, and files of every one are missing, cut short or damaged. Nothing "
            "was loaded or changed, and it is not taken for a fresh run. Run `flashckpt verify` on it, and "
            "put the files back. If its catalogue was restored from a backup, `flashckpt recover` finds "
            "newer steps. To train anew, use another path.",
            path=url,
        )
    newest = sorted({(each.step, each.id) for each in checkpoints}, reverse=True)
    names = [f"{step}@{id}" for step, id in newest]
    return UnusableRunError(
        f"{url} has committed steps ({listed(names)}), and its newest attempt began from none of them. "
        "Nothing was loaded or changed, and it is not taken for a fresh run. Name the step to resume from "
        f"with `flashckpt branch {url} STEP@ATTEMPT:BOUNDARY`, or use another path.",
        path=url,
    )


def _left_behind(rows: Iterable[RankOffers], home: Stored, mirror: Stored) -> tuple[str, ...]:
    """A warning of a snapshot in memory that the history of a mirror that leads does not have."""
    ours, theirs = visibility(home.catalogue), visibility(mirror.catalogue)
    offered = (each for row in rows for each in row.offers if ours(each.id) and not theirs(each.id))
    newest = max(offered, key=lambda each: each.id, default=None)
    if newest is None:
        return ()
    return (
        f"memory or cache has step {newest.step} of attempt {newest.id.attempt}, and the mirror "
        f"(remote={mirror.url}), where the run was trained further, does not: that snapshot is not resumed "
        "from, and is freed once this attempt has committed. To resume from it, stop now, and start without "
        "remote=",
    )


def _trained_elsewhere(home: Stored, mirror: Stored) -> str:
    return (
        f"the run was trained elsewhere, as attempt {mirror.catalogue.attempt}, and neither {home.url} nor "
        f"the mirror (remote={mirror.url}) has a step of it: it begins anew. If the home that it was trained "
        "in still exists, stop, and start there"
    )


def _behind_start(
    home: Stored, mirror: Stored | None, candidates: Sequence[Candidate], is_start: bool
) -> tuple[RunError | None, tuple[str, ...]]:
    """Why a start would lose steps in a mirror that does not answer or was not named, and warnings if it
    loses no known step."""
    first, parent, read_from = candidates[0] if candidates else None, home.parent, ""
    is_behind = parent is not None and (first is None or first.id < parent)
    if parent is not None and not home.catalogue.has(parent):
        read_from = home.catalogue.parent_url
    if mirror is not None and mirror.problem:
        if first is None or is_behind:
            here = "has no step" if first is None else f"has step {first.step}, which is older than {parent}"
            return RunError(
                f"{home.url} {here}, and the mirror (remote={mirror.url}) cannot be read ({mirror.problem}). "
                "The mirror may have newer steps. Nothing was loaded or changed, and this is not taken for a "
                "fresh run. Start again when the mirror answers; to start without it, leave remote= away.",
                path=home.url,
            ), ()
        return None, (
            f"the mirror (remote={mirror.url}) cannot be read ({mirror.problem}): step {first.step} is "
            "resumed from. If the run was trained further elsewhere, stop and start again when the mirror "
            "answers",
        )
    is_named = mirror is not None and mirror.url == read_from
    if is_start and read_from and is_behind and (first is None or not is_named):
        return UnusableRunError(
            f"{home.url}: the run began its newest attempt from {parent}, which it read in {read_from}, its "
            "mirror, and which is not here. Nothing was loaded or changed. Start with remote= that names "
            "this mirror, or put back what it had. To resume from what is here, name a step with `flashckpt "
            f"branch {home.url} STEP`.",
            path=home.url,
        ), ()
    return None, ()

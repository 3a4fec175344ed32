"""Which snapshot a start resumes from: each rule, and all of them against a plain model of what they say."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.commit.choice import (
    CHOICE,
    MOST_CANDIDATES,
    MOST_OFFERS,
    OFFERS,
    Choice,
    Offer,
    Place,
    RankOffers,
    Stored,
    choose,
)
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.catalogue import EMPTY, Catalogue, Checkpoint, Lineage
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.store.base import Store

A, B, C, D = (AttemptName(number, nonce * 8) for number, nonce in zip((1, 2, 3, 3), "abcd", strict=True))
MEMORY, CACHE, HOME, MIRROR = Place
URL, THERE, OTHER = "/runs/gpt", "s3://bucket/gpt", "s3://bucket/other"
AT = {url: cast(Store, SimpleNamespace(url=url)) for url in (URL, THERE, OTHER)}
RUN = "5" * 16


def id_of(boundary: int, attempt: AttemptName = A) -> SnapshotId:
    return SnapshotId(attempt, boundary)


def offer(boundary: int, attempt: AttemptName = A, **more: Any) -> Offer:
    return Offer(**{"id": id_of(boundary, attempt), "step": 10 * boundary} | more)


def row(rank: int, *offers: Offer) -> RankOffers:
    return RankOffers.of(rank, offers)


def committed(*boundaries: int, attempt: AttemptName = A) -> tuple[SnapshotId, ...]:
    return tuple(id_of(each, attempt) for each in boundaries)


def catalogue_of(*ids: SnapshotId, attempt: AttemptName = A, lineage: Lineage = (), **more: Any) -> Catalogue:
    checkpoints = tuple(
        Checkpoint(id=id, step=10 * id.boundary, writer=id.attempt, manifest="0" * 16) for id in ids
    )
    return Catalogue(
        run_id=RUN, version=1, writer=attempt, attempt=attempt, lineages=((attempt, lineage),),
        checkpoints=checkpoints, **more,
    )  # fmt: skip


def home(*ids: SnapshotId, broken: Any = None, **more: Any) -> Stored:
    return Stored(catalogue_of(*ids, **more), AT[URL], broken or {})


def mirror(*ids: SnapshotId, problem: str = "", **more: Any) -> Stored:
    return Stored(catalogue_of(*ids, **more), AT[THERE], problem=problem)


def boundaries(choice: Choice) -> list[int]:
    assert choice.refusal is None
    assert not choice.needs_save
    return [each.id.boundary for each in choice.candidates]


# ---- what a start says (what it takes: the model below)


def test_each_rank_reads_the_nearest_and_is_told_why_newer_ones_do_not_count() -> None:
    rows = row(0, offer(7), offer(6), offer(6, place=CACHE)), row(1, offer(6), offer(5))
    choice = choose(rows, home(*committed(6, 4)), is_saved=True)
    assert boundaries(choice) == [6, 4]
    found = [[each.places(row) for row in rows] for each in choice.candidates]
    assert found == [[(MEMORY, CACHE, HOME), (MEMORY, HOME)], [(HOME,), (HOME,)]]
    assert list(choice.passed_over) == [
        f"step 70 of attempt {A} (boundary 7): rank 1 cannot read it: its node does not have it, and it is "
        "not committed"
    ]
    rows = row(0, offer(7)), row(1, offer(7, problem="rank 3 has lost its part"))
    choice = choose(rows, home(*committed(6)), is_saved=True)
    assert boundaries(choice) == [6]
    assert "rank 1 cannot read it: rank 3 has lost its part" in choice.passed_over[0]


def test_what_is_marked_as_damaged_is_tried_as_any_other() -> None:
    ours = home(*committed(6, 5), damaged=((id_of(6), "host1: chunk 3"),))
    assert boundaries(choose([row(0)], ours)) == [6, 5]


AT_5: dict[str, Any] = {"attempt": B, "lineage": (id_of(5),)}
READ_THERE: dict[str, Any] = {**AT_5, "parent_url": THERE}
BROKEN = home(*committed(3), broken={id_of(3): "shard-00000 is missing"})
AWAY = mirror(problem="timeout")
FAR = committed(9, attempt=C)
_BRANCHES_ALONE = f"has committed steps (90@{C}:9), and its newest attempt began from none"


@pytest.mark.parametrize(
    ("offers", "ours", "theirs", "text"),
    [
        ([], home(*committed(4, attempt=B), attempt=B, lineage=(id_of(3),)),
         mirror(*committed(3, attempt=C), attempt=C, lineage=(id_of(2),)),
         f"{URL} and its mirror (remote={THERE}): The home and the mirror have diverged: step 40 of attempt "
         f"{B} is in the history of the home alone, and step 30 of attempt {C} in that of the mirror alone"),
        ([], Stored(EMPTY, AT[URL]), AWAY,
         f"has no step, and the mirror (remote={THERE}) cannot be read (timeout)"),
        ([], home(*committed(3), **AT_5), AWAY, f"has step 30, which is older than {A}:5"),
        ([offer(3)], home(*committed(3), **AT_5), AWAY, f"has step 30, which is older than {A}:5"),
        ([], home(*committed(3), **READ_THERE), None, f"which it read in {THERE}, its mirror"),
        ([], home(**READ_THERE), None, "which it read in"),
        ([], home(**READ_THERE), mirror(), "which it read in"),
        ([], home(*committed(3), **READ_THERE), replace(mirror(), store=AT[OTHER]), "which it read"),
        ([], BROKEN, None, "files of every one are missing"),
        ([], home(*FAR), mirror(), _BRANCHES_ALONE),
        ([], home(), mirror(*FAR), _BRANCHES_ALONE),
    ],
)  # fmt: skip
def test_no_start_guesses(offers: list[Offer], ours: Stored, theirs: Stored | None, text: str) -> None:
    choice = choose([row(0, *offers)], ours, theirs, is_saved=True)
    assert type(choice.refusal) is (RunError if theirs is AWAY else UnusableRunError)
    assert text in str(choice.refusal)
    assert choice.candidates == ()


def test_a_command_reads_what_is_here_and_a_start_also_what_only_memory_has() -> None:
    command = choose([row(0)], home(*committed(3), **READ_THERE), is_start=False)
    assert boundaries(command) == [3]
    assert boundaries(choose([row(0, offer(3))], BROKEN)) == [3]


@pytest.mark.parametrize(
    ("offers", "ours", "theirs", "taken", "text"),
    [
        ([], home(*committed(3)), AWAY, [3], "step 30 is resumed from"),
        ([], Stored(EMPTY, AT[URL]), mirror(), [], f"the run was trained elsewhere, as attempt {A}"),
        ([offer(7)], home(*committed(3)),
         mirror(*committed(3), *committed(4, attempt=B), attempt=B, lineage=(id_of(3),)), [4, 3, 3],
         f"memory or cache has step 70 of attempt {A}"),
    ],
)  # fmt: skip
def test_what_may_be_lost_is_a_warning(
    offers: list[Offer], ours: Stored, theirs: Stored, taken: list[int], text: str
) -> None:
    choice = choose([row(0, *offers)], ours, theirs)
    assert boundaries(choice) == taken
    assert text in choice.warnings[0]


# ---- bounds


def test_messages_are_bounded_and_come_back_as_they_were() -> None:
    offers = [offer(each, problem="x" * 1000, place=Place(each % 2)) for each in range(1, 500)]
    mine = RankOffers.of(123456, offers)
    assert [each.id.boundary for each in mine.offers] == list(range(499, 499 - MOST_OFFERS, -1))
    assert len(json.dumps(OFFERS.dump(mine))) < 20_000
    short = RankOffers.of(3, [offer(2), offer(1, place=CACHE)])
    assert OFFERS.load(json.loads(json.dumps(OFFERS.dump(short)))) == short
    choice = choose([short], home(*committed(*range(1, 5000))), mirror(*committed(4000)))
    assert len(choice.candidates) == MOST_CANDIDATES
    assert CHOICE.load(json.loads(json.dumps(CHOICE.dump(choice)))) == choice


def test_a_bounded_message_keeps_of_a_snapshot_what_can_be_read() -> None:
    near = [offer(each) for each in range(1, MOST_OFFERS)]
    mine = RankOffers.of(0, [offer(1, problem="x"), offer(1, place=CACHE), *near[1:], offer(64)])
    assert [(each.id.boundary, each.place) for each in mine.offers][-1] == (1, CACHE)


def test_what_is_passed_over_is_bounded() -> None:
    rows = [row(rank, *(offer(b, problem=f"{rank}") for b in range(50))) for rank in range(100)]
    choice = choose(rows, home(), is_saved=True)
    assert all(f"boundary {b}" in each for b, each in zip(range(49, 41, -1), choice.passed_over, strict=True))
    assert choice.passed_over[0].endswith("rank 3 cannot read it: 3; 96 more reasons")


# ---- all rules, against a model

_ATTEMPTS = (A, B, C, D)
_IDS = st.builds(SnapshotId, st.sampled_from(_ATTEMPTS), st.integers(1, 3))
_OFFERS = st.builds(
    Offer,
    id=_IDS,
    step=st.just(0),
    place=st.sampled_from([MEMORY, CACHE]),
    problem=st.sampled_from(["", "", "lost"]),
)
_ROWS = st.lists(st.lists(_OFFERS, max_size=6), max_size=4).map(
    lambda rows: [RankOffers.of(rank, offers) for rank, offers in enumerate(rows)]
)
_HISTORIES: list[tuple[AttemptName, Lineage]] = [
    (A, ()),
    (B, (id_of(2),)),
    (C, (id_of(2, B), id_of(2))),
    (D, (id_of(1),)),
]


@st.composite
def stores(draw: st.DrawFn, url: str) -> Stored:
    ids = sorted(draw(st.sets(_IDS, max_size=6)))
    some = st.sets(st.sampled_from(ids), max_size=3) if ids else st.just(set())
    attempt, lineage = draw(st.sampled_from(_HISTORIES))
    parent_url = draw(st.sampled_from(["", "", THERE])) if url == URL else ""
    catalogue = catalogue_of(*ids, attempt=attempt, lineage=lineage, parent_url=parent_url)
    return Stored(
        draw(st.sampled_from([catalogue, catalogue, catalogue, EMPTY])),
        AT[url],
        broken=dict.fromkeys(draw(some), "cut short"),
        problem=draw(st.sampled_from(["", "", "", "away"])) if url == THERE else "",
    )


class Model:
    """The rules, each said once over all snapshots and all ranks, at whatever cost."""

    def __init__(self, rows: list[RankOffers], ours: Stored, theirs: Stored | None) -> None:
        self.rows = rows or [RankOffers(0)]
        self.ours = ours
        self.theirs = None if theirs is None or theirs.problem else theirs
        self.is_silent = theirs is not None and bool(theirs.problem)
        self.leads = self._leads()
        lead = ours if self.leads == "home" or self.theirs is None else self.theirs
        self.order = sorted(self._history(lead), reverse=True)

    @staticmethod
    def _history(stored: Stored) -> set[SnapshotId]:
        catalogue = stored.catalogue
        bounds = [(catalogue.attempt, 3)]
        bounds += [(each.attempt, each.boundary) for _, lineage in catalogue.lineages for each in lineage]
        return {SnapshotId(attempt, b) for attempt, last in bounds for b in (1, 2, 3) if b <= last}

    @staticmethod
    def _ids(stored: Stored | None) -> set[SnapshotId]:
        return set() if stored is None else {each.id for each in stored.catalogue.checkpoints}

    def _leads(self) -> str:
        if self.theirs is None:
            return "home"
        pairs = {"home": (self.ours, self.theirs), "mirror": (self.theirs, self.ours)}
        leading = []
        for name, (one, other) in pairs.items():
            last = max(self._ids(other) & self._history(other), default=None)
            if last is None or last in self._history(one) | self._ids(one):
                leading.append(name)
        if len(leading) == 2:
            ours, theirs = self.ours.catalogue.attempt, self.theirs.catalogue.attempt
            return "home" if ours >= theirs else "mirror"
        return leading[0] if leading else "neither"

    def copies(self, row: RankOffers, id: SnapshotId) -> set[Place]:
        found = {each.place for each in row.offers if each.id == id and not each.problem}
        if id in self._ids(self.ours) - set(self.ours.broken):
            found.add(HOME)
        if self._in_mirror(id):
            found.add(MIRROR)
        return found

    def _in_mirror(self, id: SnapshotId) -> bool:
        return self.theirs is not None and id in self._ids(self.theirs) - set(self.theirs.broken)

    def tried(self) -> Iterator[tuple[SnapshotId, bool]]:
        for id in self.order:
            if all(self.copies(row, id) for row in self.rows):
                yield id, False
                others = {place for row in self.rows for place in self.copies(row, id)} - {MIRROR}
                if self._in_mirror(id) and others:
                    yield id, True

    def needs_save(self) -> bool:
        newer = (
            self.order[: self.order.index(first[0])] if (first := next(self.tried(), None)) else self.order
        )
        offered = {each.id for row in self.rows for each in row.offers}
        return any(id in offered - (self._ids(self.ours) - set(self.ours.broken)) for id in newer)

    def is_refused(self) -> bool:
        if self.leads == "neither":
            return True
        first = next(self.tried(), None)
        if first is None and self._ids(self.ours) | self._ids(self.theirs):
            return True
        if self.leads == "mirror":
            return False
        lineage = next((lineage for _, lineage in self.ours.catalogue.lineages), ())
        start = lineage[0] if lineage else None
        is_behind = start is not None and (first is None or first[0] < start)
        if self.is_silent:
            return first is None or is_behind
        read_from = self.ours.catalogue.parent_url if start not in self._ids(self.ours) else ""
        is_named = self.theirs is not None and self.theirs.url == read_from
        return is_behind and bool(read_from) and (first is None or not is_named)


@given(_ROWS, stores(URL), st.none() | stores(THERE), st.randoms())
def test_the_choice_is_that_of_the_model(
    rows: list[RankOffers], ours: Stored, theirs: Stored | None, order: random.Random
) -> None:
    model = Model(rows, ours, theirs)
    mixed = list(rows)
    order.shuffle(mixed)
    early, choice = choose(mixed, ours, theirs), choose(rows, ours, theirs, is_saved=True)
    if model.leads == "neither":
        assert str(early.refusal) == str(choice.refusal)
        return
    assert (choice.lead is ours.catalogue) == (model.leads == "home")
    assert early.needs_save == model.needs_save()
    if not early.needs_save:
        assert str(replace(early, refusal=None)) == str(replace(choice, refusal=None))
        assert str(early.refusal) == str(choice.refusal)
    assert (choice.refusal is not None) == model.is_refused()
    if choice.refusal is None:
        assert [(each.id, each.from_mirror) for each in choice.candidates] == list(model.tried())
    for each in choice.candidates:
        for row in rows:
            expected = tuple(sorted(model.copies(row, each.id)))
            assert each.places(row) == ((MIRROR,) if each.from_mirror else expected)

"""Which snapshot a start resumes from: each rule, and all of them against a plain model of what they say."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.commit.choice import (
    MOST_CANDIDATES,
    MOST_OFFERS,
    Candidate,
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

A, B, C, D = (AttemptName(number, nonce * 8) for number, nonce in zip((1, 2, 3, 3), "abcd", strict=True))
MEMORY, CACHE, HOME, MIRROR = Place
URL, THERE = "/runs/gpt", "s3://bucket/gpt"
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
    return Stored(url=URL, catalogue=catalogue_of(*ids, **more), broken=broken or {})


def mirror(*ids: SnapshotId, problem: str = "", **more: Any) -> Stored:
    return Stored(url=THERE, catalogue=catalogue_of(*ids, **more), problem=problem)


def boundaries(choice: Choice) -> list[int]:
    assert choice.refusal is None
    assert not choice.needs_save
    return [each.id.boundary for each in choice.candidates]


def places(choice: Choice, *rows: RankOffers) -> list[list[tuple[Place, ...]]]:
    return [[each.places(row) for row in rows] for each in choice.candidates]


def refusal(choice: Choice) -> str:
    assert choice.refusal is not None
    assert choice.candidates == ()
    return str(choice.refusal)


# ---- what all ranks can read


def test_the_newest_that_every_rank_can_read_comes_first_and_each_reads_the_nearest() -> None:
    rows = row(0, offer(7), offer(6), offer(6, place=CACHE)), row(1, offer(6), offer(5))
    choice = choose(rows, home(*committed(6, 4)), is_saved=True)
    assert boundaries(choice) == [6, 4]
    assert places(choice, *rows) == [[(MEMORY, CACHE, HOME), (MEMORY, HOME)], [(HOME,), (HOME,)]]
    assert [str(each) for each in choice.passed_over] == [
        f"step 70 of attempt {A} (boundary 7): rank 1 cannot read it: its node does not have it, and it is "
        "not committed"
    ]


def test_memory_of_one_rank_and_cache_of_another_make_a_candidate_without_a_commit() -> None:
    rows = row(0, offer(7)), row(1, offer(7, place=CACHE))
    choice = choose(rows, home())
    assert boundaries(choice) == [7]
    assert places(choice, *rows) == [[(MEMORY,), (CACHE,)]]


def test_boundaries_of_one_step_are_two_snapshots() -> None:
    rows = row(0, offer(7, step=60)), row(1, offer(6))
    assert boundaries(choose(rows, home(), is_saved=True)) == []


def test_an_offer_with_a_problem_is_not_read_and_its_reason_is_given() -> None:
    rows = row(0, offer(7)), row(1, offer(7, problem="rank 3 has lost its part"))
    choice = choose(rows, home(*committed(6)), is_saved=True)
    assert boundaries(choice) == [6]
    assert "rank 1 cannot read it: rank 3 has lost its part" in choice.passed_over[0].why


def test_the_lineage_bounds_what_counts_and_orders_it() -> None:
    ids = committed(4, 5, 6) + committed(1, attempt=B) + committed(9, attempt=C)
    rows = row(0, offer(8), offer(2, B)), row(1, offer(8), offer(2, B))
    choice = choose(rows, home(*ids, attempt=B, lineage=(id_of(5),)))
    assert [each.id for each in choice.candidates] == [id_of(2, B), id_of(1, B), id_of(5), id_of(4)]
    assert choice.home is choice.lead


def test_no_rank_at_all_reads_storage_alone() -> None:
    assert boundaries(choose([], home(*committed(4, 5)))) == [5, 4]
    assert choose([], home()) == Choice()


def test_what_is_marked_as_damaged_is_tried_as_any_other() -> None:
    ours = home(*committed(6, 5), damaged=((id_of(6), "host1: chunk 3"),))
    assert boundaries(choose([row(0)], ours)) == [6, 5]


# ---- the mirror


def test_the_mirror_is_read_last_and_then_once_more_by_all() -> None:
    rows = row(0, offer(6)), row(1)
    choice = choose(rows, home(*committed(6)), mirror(*committed(5, 6)))
    assert [(each.id.boundary, each.from_mirror) for each in choice.candidates] == [
        (6, False), (6, True), (5, False),
    ]  # fmt: skip
    assert places(choice, *rows) == [
        [(MEMORY, HOME, MIRROR), (HOME, MIRROR)], [(MIRROR,), (MIRROR,)], [(MIRROR,), (MIRROR,)],
    ]  # fmt: skip


def test_a_mirror_that_was_trained_further_gives_the_history() -> None:
    there = mirror(*committed(3), *committed(4, 5, attempt=B), attempt=B, lineage=(id_of(3),))
    choice = choose([row(0, offer(7))], home(*committed(3)), there)
    assert choice.lead is there.catalogue
    assert [str(each.id) for each in choice.candidates] == [f"{B}:5", f"{B}:4", f"{A}:3", f"{A}:3"]


def test_an_empty_home_takes_the_runs_mirror() -> None:
    choice = choose([row(0)], Stored(url=URL), mirror(*committed(3)))
    assert choice.lead is not EMPTY
    assert boundaries(choice) == [3]
    assert choice.warnings == ()


def test_home_and_mirror_that_were_both_trained_further_are_refused() -> None:
    ours = home(*committed(4, attempt=B), attempt=B, lineage=(id_of(3),))
    choice = choose([row(0)], ours, mirror(*committed(3, attempt=C), attempt=C, lineage=(id_of(2),)))
    assert isinstance(choice.refusal, UnusableRunError)
    assert f"{URL} and its mirror (remote={THERE}): " in refusal(choice)
    assert "have diverged" in refusal(choice)
    assert not choice.needs_save


def test_an_attempt_without_a_checkpoint_yields() -> None:
    ours = home(*committed(2), attempt=B, lineage=(id_of(2),))
    there = mirror(*committed(2), *committed(3, attempt=C), attempt=C, lineage=(id_of(2),))
    assert choose([row(0)], ours, there).lead is there.catalogue
    assert choose([row(0)], replace(there, url=URL), replace(ours, url=THERE)).lead is there.catalogue


def test_a_run_without_a_step_that_was_trained_elsewhere_begins_with_a_warning() -> None:
    choice = choose([row(0)], Stored(url=URL), mirror())
    assert boundaries(choice) == []
    assert f"the run was trained elsewhere, as attempt {A}" in choice.warnings[0]


def test_a_mirror_that_does_not_answer_beside_an_empty_home_is_refused() -> None:
    silent = mirror(problem="connection refused")
    choice = choose([row(0)], Stored(url=URL), silent)
    assert type(choice.refusal) is RunError
    text = f"has no step, and the mirror (remote={THERE}) cannot be read (connection refused)"
    assert text in refusal(choice)
    choice = choose([row(0)], home(*committed(3)), silent)
    assert boundaries(choice) == [3]
    assert "step 30 is resumed from" in choice.warnings[0]


@pytest.mark.parametrize("offers", [[], [offer(3)]])
def test_a_mirror_that_does_not_answer_beside_what_is_older_than_the_newest_start_is_refused(
    offers: list[Offer],
) -> None:
    ours = home(*committed(3), attempt=B, lineage=(id_of(5),))
    choice = choose([row(0, *offers)], ours, mirror(problem="timeout"))
    assert f"has step 30, which is older than {A}:5" in refusal(choice)
    at_start = home(*committed(5), attempt=B, lineage=(id_of(5),))
    assert boundaries(choose([row(0)], at_start, mirror(problem="timeout"))) == [5]


def test_a_mirror_that_was_read_from_and_is_not_named_is_refused() -> None:
    begun: dict[str, Any] = {"attempt": B, "lineage": (id_of(5),)}
    ours = home(*committed(3), **begun, parent_url=THERE)
    assert f"which it read in {THERE}, its mirror" in refusal(choose([row(0)], ours))
    assert boundaries(choose([row(0)], ours, mirror(*committed(3)))) == [3, 3]
    assert boundaries(choose([row(0)], home(*committed(3), **begun))) == [3], "memory had it, and is lost"
    nothing = home(**begun, parent_url=THERE)
    assert "which it read in" in refusal(choose([row(0)], nothing))
    assert "which it read in" in refusal(choose([row(0)], nothing, mirror()))
    newer = home(*committed(1, attempt=B), **begun, parent_url=THERE)
    assert boundaries(choose([row(0)], newer)) == [1]


def test_another_mirror_than_the_one_that_was_read_from_is_refused() -> None:
    ours = home(*committed(3), attempt=B, lineage=(id_of(5),), parent_url=THERE)
    other = replace(mirror(), url="s3://bucket/other")
    assert "which it read in" in refusal(choose([row(0)], ours, other))
    assert boundaries(choose([row(0)], ours, is_start=False)) == [3], "a command reads what is there"


def test_memory_that_the_history_of_a_leading_mirror_lacks_is_told() -> None:
    there = mirror(*committed(3), *committed(4, attempt=B), attempt=B, lineage=(id_of(3),))
    choice = choose([row(0, offer(7))], home(*committed(3)), there)
    assert choice.candidates[0].id == id_of(4, B)
    assert f"memory or cache has step 70 of attempt {A}" in choice.warnings[0]


# ---- refusals


def test_committed_steps_of_which_none_is_whole_are_no_fresh_run() -> None:
    broken = {id_of(3): "shard-00000 is missing"}
    choice = choose([row(0)], home(*committed(3), broken=broken), is_saved=True)
    assert "files of every one are missing" in refusal(choice)
    assert choice.passed_over[0].why == (
        f"in {URL}: shard-00000 is missing; rank 0 cannot read it: its node does not have it"
    )
    assert boundaries(choose([row(0, offer(3))], home(*committed(3), broken=broken))) == [3]


@pytest.mark.parametrize("where", ["home", "mirror"])
def test_committed_steps_of_other_branches_alone_are_no_fresh_run(where: str) -> None:
    far = committed(9, attempt=C)
    here, there = (far, ()) if where == "home" else ((), far)
    choice = choose([row(0)], home(*here), mirror(*there))
    assert f"has committed steps (90@{C}:9), and its newest attempt began from none" in refusal(choice)


def test_memory_that_not_all_ranks_have_is_a_fresh_run_once_it_could_not_be_saved() -> None:
    rows = row(0, offer(1)), row(1)
    assert choose(rows, home()).needs_save
    choice = choose(rows, home(), is_saved=True)
    assert boundaries(choice) == []
    assert "rank 1" in choice.passed_over[0].why


# ---- a round in which keepers save


def needs_save(*offers: tuple[Offer, ...], commits: Sequence[int] = (4,)) -> bool:
    rows = [row(rank, *each) for rank, each in enumerate(offers)]
    return choose(rows, home(*committed(*commits))).needs_save


def test_keepers_save_first_where_memory_is_newer_than_all_can_read() -> None:
    assert needs_save((offer(7),), ())
    assert needs_save((offer(7, problem="its rank runs elsewhere"),), ())
    assert not needs_save((offer(7),), (offer(7),))
    assert not needs_save((offer(7), offer(6)), (offer(7),)), "older than what all can read"
    assert needs_save((offer(7, place=CACHE),), ()), "its keeper saves what is in the cache, too"
    assert not needs_save((offer(7),), (), commits=(7,))
    assert not needs_save((offer(7, C),), ()), "of another branch"


# ---- bounds


def test_messages_are_bounded_and_come_back_as_they_were() -> None:
    offers = [offer(each, problem="x" * 1000, place=Place(each % 2)) for each in range(1, 500)]
    mine = RankOffers.of(123456, offers)
    assert [each.id.boundary for each in mine.offers] == list(range(499, 499 - MOST_OFFERS, -1))
    assert len(json.dumps(mine.to_json())) < 20_000
    short = RankOffers.of(3, [offer(2), offer(1, place=CACHE)])
    assert RankOffers.from_json(json.loads(json.dumps(short.to_json()))) == short
    choice = choose([short], home(*committed(*range(1, 5000))), mirror(*committed(4000)))
    assert len(choice.candidates) == MOST_CANDIDATES
    rows = json.loads(json.dumps([each.to_json() for each in choice.candidates]))
    assert tuple(map(Candidate.from_json, rows)) == choice.candidates


def test_a_bounded_message_keeps_of_a_snapshot_what_can_be_read() -> None:
    near = [offer(each) for each in range(1, MOST_OFFERS)]
    mine = RankOffers.of(0, [offer(1, problem="x"), offer(1, place=CACHE), *near[1:], offer(64)])
    assert [(each.id.boundary, each.place) for each in mine.offers][-1] == (1, CACHE)


def test_what_is_passed_over_is_bounded() -> None:
    rows = [row(rank, *(offer(b, problem=f"{rank}") for b in range(50))) for rank in range(100)]
    choice = choose(rows, home(), is_saved=True)
    assert [each.id.boundary for each in choice.passed_over] == list(range(49, 41, -1))
    assert choice.passed_over[0].why.endswith("rank 3 cannot read it: 3; 96 more reasons")


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
        url=url,
        catalogue=draw(st.sampled_from([catalogue, catalogue, catalogue, EMPTY])),
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

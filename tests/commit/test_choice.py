"""Which snapshot a start resumes from: each rule, and all of them against a plain model of what they say."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
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
    History,
    Offer,
    Place,
    RankOffers,
    choose,
)
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.names import AttemptName, SnapshotId

A, B, C, D = (AttemptName(number, nonce * 8) for number, nonce in zip((1, 2, 3, 3), "abcd", strict=True))
ALL = 10**9
MEMORY, CACHE, HOME, MIRROR = Place
URL, THERE = "/runs/gpt", "s3://bucket/gpt"


def id_of(boundary: int, attempt: AttemptName = A) -> SnapshotId:
    return SnapshotId(attempt, boundary)


def offer(boundary: int, attempt: AttemptName = A, **more: Any) -> Offer:
    return Offer(**{"id": id_of(boundary, attempt), "step": 10 * boundary, "world": 2} | more)


def row(rank: int, *offers: Offer, host: str | None = None) -> RankOffers:
    return RankOffers.of(rank, host or f"host{rank}", offers)


def committed(*boundaries: int, attempt: AttemptName = A) -> dict[SnapshotId, int]:
    return {id_of(each, attempt): 10 * each for each in boundaries}


def home(commits: Mapping[SnapshotId, int] | None = None, **more: Any) -> History:
    return History(**{"url": URL, "lineage": (SnapshotId(A, ALL),), "commits": commits or {}} | more)


def mirror(commits: Mapping[SnapshotId, int] | None = None, **more: Any) -> History:
    return home(commits, **{"url": THERE} | more)


def boundaries(choice: Choice) -> list[int]:
    assert choice.refusal is None
    assert not choice.needs_save
    return [each.id.boundary for each in choice.candidates]


def places(choice: Choice, *rows: RankOffers, world: int = 2) -> list[list[tuple[Place, ...]]]:
    return [[each.places(row, world) for row in rows] for each in choice.candidates]


def refusal(choice: Choice) -> str:
    assert choice.refusal is not None
    assert choice.candidates == ()
    return str(choice.refusal)


# ---- what all ranks can read


def test_the_newest_that_every_rank_can_read_comes_first_and_each_reads_the_nearest() -> None:
    rows = row(0, offer(7), offer(6), offer(6, place=CACHE)), row(1, offer(6), offer(5))
    choice = choose(rows, home(committed(6, 4)), world=2, is_saved=True)
    assert boundaries(choice) == [6, 4]
    assert places(choice, *rows) == [[(MEMORY, CACHE, HOME), (MEMORY, HOME)], [(HOME,), (HOME,)]]
    assert [str(each) for each in choice.passed_over] == [
        f"step 70 of attempt {A} (boundary 7): rank 1 cannot read it: its node does not have it, and it is "
        "not committed"
    ]


def test_memory_of_one_rank_and_cache_of_another_make_a_candidate_without_a_commit() -> None:
    rows = row(0, offer(7)), row(1, offer(7, place=CACHE))
    choice = choose(rows, home(), world=2)
    assert boundaries(choice) == [7]
    assert places(choice, *rows) == [[(MEMORY,), (CACHE,)]]


def test_boundaries_of_one_step_are_two_snapshots() -> None:
    rows = row(0, offer(7, step=60)), row(1, offer(6))
    assert boundaries(choose(rows, home(), world=2, is_saved=True)) == []


def test_memory_of_another_number_of_ranks_is_no_use_and_storage_is() -> None:
    rows = row(0, offer(7, world=4), offer(6, world=4)), row(1, offer(7, world=4))
    choice = choose(rows, home(committed(6)), world=2, is_saved=True)
    assert boundaries(choice) == [6]
    assert places(choice, *rows) == [[(HOME,), (HOME,)]]
    assert "rank 0, 1 cannot read it: 4 ranks made it" in choice.passed_over[0].why
    assert boundaries(choose(rows, home(committed(6)), is_saved=True)) == [7, 6]


def test_an_offer_with_a_problem_is_not_read_and_its_reason_is_given() -> None:
    rows = row(0, offer(7)), row(1, offer(7, problem="rank 3 has lost its part"))
    choice = choose(rows, home(committed(6)), world=2, is_saved=True)
    assert boundaries(choice) == [6]
    assert "rank 1 cannot read it: rank 3 has lost its part" in choice.passed_over[0].why


def test_the_lineage_bounds_what_counts_and_orders_it() -> None:
    lineage = SnapshotId(B, ALL), SnapshotId(A, 5)
    commits = committed(4, 5, 6) | committed(1, attempt=B) | committed(9, attempt=C)
    rows = row(0, offer(8), offer(2, B)), row(1, offer(8), offer(2, B))
    choice = choose(rows, home(commits, lineage=lineage), world=2)
    assert [each.id for each in choice.candidates] == [id_of(2, B), id_of(1, B), id_of(5), id_of(4)]
    assert choice.lineage == lineage


def test_no_rank_at_all_reads_storage_alone() -> None:
    assert boundaries(choose([], home(committed(4, 5)))) == [5, 4]
    assert choose([], home()) == Choice(lineage=(SnapshotId(A, ALL),))


# ---- the mirror


def test_the_mirror_is_read_last_and_then_once_more_by_all() -> None:
    rows = row(0, offer(6)), row(1)
    choice = choose(rows, home(committed(6)), mirror(committed(6, 5)), world=2)
    assert [(each.id.boundary, each.from_mirror) for each in choice.candidates] == [
        (6, False), (6, True), (5, False),
    ]  # fmt: skip
    assert places(choice, *rows) == [
        [(MEMORY, HOME, MIRROR), (HOME, MIRROR)], [(MIRROR,), (MIRROR,)], [(MIRROR,), (MIRROR,)],
    ]  # fmt: skip


def test_a_mirror_that_was_trained_further_gives_the_lineage() -> None:
    there = mirror(committed(3) | committed(4, 5, attempt=B), lineage=(SnapshotId(B, ALL), SnapshotId(A, 3)))
    choice = choose([row(0, offer(7))], home(committed(3, 6)), there, world=1)
    assert choice.mirror_is_ahead
    assert choice.lineage == there.lineage
    assert [str(each.id) for each in choice.candidates] == [f"{B}:5", f"{B}:4", f"{A}:3", f"{A}:3"]
    assert "from before step 60" in choice.warnings[0]
    assert f"flashckpt branch {URL} 60@{A}:6" in choice.warnings[0]


def test_an_empty_home_takes_the_runs_mirror() -> None:
    choice = choose([row(0)], History(url=URL), mirror(committed(3)))
    assert choice.mirror_is_ahead
    assert boundaries(choice) == [3]
    assert choice.warnings == ()


def test_a_home_that_knows_the_newest_attempt_of_its_mirror_keeps_its_lineage() -> None:
    ours = home(committed(3), lineage=(SnapshotId(B, ALL), SnapshotId(A, 3)))
    assert not choose([row(0)], ours, mirror(committed(3, 4))).mirror_is_ahead
    swept = home(committed(3), known=frozenset({A, B}))
    assert not choose([row(0)], swept, mirror(lineage=(SnapshotId(B, ALL), SnapshotId(A, 2)))).mirror_is_ahead


HOME_B = {"lineage": (SnapshotId(B, ALL), SnapshotId(A, 3)), "known": frozenset({A, B})}
MIRROR_C = {"lineage": (SnapshotId(C, ALL), SnapshotId(A, 2)), "known": frozenset({A, C})}


def test_home_and_mirror_that_were_both_trained_further_are_refused() -> None:
    ours, theirs = committed(4, attempt=B), committed(3, attempt=C)
    choice = choose([row(0)], home(ours, **HOME_B), mirror(theirs, **MIRROR_C))
    assert isinstance(choice.refusal, UnusableRunError)
    text = f"have diverged: step 40 of attempt {B} is known to the home alone, and step 30 of attempt {C} to"
    assert text in refusal(choice)
    assert f"the mirror (remote={THERE})" in refusal(choice)
    choice = choose([row(0, offer(4, B))], home(**HOME_B), mirror(theirs, **MIRROR_C))
    assert f"a snapshot in memory of attempt {B} is known to the home alone" in refusal(choice)
    assert not choice.needs_save


@pytest.mark.parametrize(
    ("ours", "offers", "theirs", "is_ahead"),
    [
        ({}, [], committed(3, attempt=C), True),
        ({}, [offer(4, B)], committed(3, attempt=C), None),
        (committed(4, attempt=B), [], {}, False),
        ({}, [offer(4, B)], {}, False),
        ({}, [], {}, True),
    ],
)
def test_an_attempt_without_work_yields(
    ours: Any, offers: list[Offer], theirs: Any, is_ahead: bool | None
) -> None:
    choice = choose([row(0, *offers)], home(ours, **HOME_B), mirror(theirs, **MIRROR_C), is_saved=True)
    assert (choice.refusal is not None) == (is_ahead is None)
    assert choice.mirror_is_ahead == bool(is_ahead)


@pytest.mark.parametrize(
    ("ours", "theirs", "newest", "is_ahead"),
    [(6, 2, C, False), (2, 6, A, True), (2, 2, C, True), (2, 2, B, True), (2, 2, A, False)],
)
def test_of_attempts_that_both_know_the_later_snapshot_counts_and_then_the_later_attempt(
    ours: int, theirs: int, newest: AttemptName, is_ahead: bool
) -> None:
    """The newest attempts, of different nonces, have no commit. Both began from one attempt, from `ours` and
    `theirs`."""
    first, mine = AttemptName(1, "0" * 8), AttemptName(2, "1" * 8)

    def history(url: str, name: AttemptName, last: int) -> History:
        lineage = SnapshotId(name, ALL), SnapshotId(first, last)
        return History(url=url, lineage=lineage, commits=committed(last, attempt=first))

    here, there = history(URL, mine, ours), history(THERE, newest, theirs)
    assert choose([row(0)], here, there).mirror_is_ahead == is_ahead


def test_a_later_branch_of_the_home_with_a_commit_is_not_left_behind() -> None:
    """It is not in the lineage; but the mirror's newest attempt is older, and could not become the newest."""
    lineage = (SnapshotId(AttemptName(4, "e" * 8), ALL), SnapshotId(A, 3))
    here = home(committed(3) | committed(7, attempt=D), lineage=lineage)
    there = mirror(committed(3) | committed(4, attempt=B), lineage=(SnapshotId(B, ALL), SnapshotId(A, 3)))
    assert f"step 70 of attempt {D} is known to the home alone" in refusal(choose([row(0)], here, there))


def test_a_run_without_a_step_that_was_trained_elsewhere_begins_with_a_warning() -> None:
    choice = choose([row(0)], History(url=URL), mirror())
    assert boundaries(choice) == []
    assert f"the run was trained elsewhere, as attempt {A}" in choice.warnings[0]


def test_a_mirror_that_does_not_answer_beside_an_empty_home_is_refused() -> None:
    silent = mirror(problem="connection refused")
    choice = choose([row(0)], History(url=URL), silent)
    assert type(choice.refusal) is RunError
    text = f"has no step, and the mirror (remote={THERE}) cannot be read (connection refused)"
    assert text in refusal(choice)
    choice = choose([row(0)], home(committed(3)), silent)
    assert boundaries(choice) == [3]
    assert "step 30 is resumed from" in choice.warnings[0]


@pytest.mark.parametrize("offers", [[], [offer(3)]])
def test_a_mirror_that_does_not_answer_beside_what_is_older_than_the_newest_start_is_refused(
    offers: list[Offer],
) -> None:
    ours = home(committed(3), lineage=(SnapshotId(B, ALL), SnapshotId(A, 5)))
    choice = choose([row(0, *offers)], ours, mirror(problem="timeout"), world=2)
    assert f"has step 30, which is older than {A}:5" in refusal(choice)
    at_start = home(committed(5), lineage=ours.lineage)
    assert boundaries(choose([row(0)], at_start, mirror(problem="timeout"))) == [5]


def test_a_mirror_that_was_read_from_and_is_not_named_is_refused() -> None:
    ours = home(committed(3), lineage=(SnapshotId(B, ALL), SnapshotId(A, 5)), read_from=THERE)
    assert f"which it read in {THERE}, its mirror" in refusal(choose([row(0)], ours))
    assert boundaries(choose([row(0)], ours, mirror(committed(3)))) == [3, 3]
    assert boundaries(choose([row(0)], replace(ours, read_from=""))) == [3]
    nothing = replace(ours, commits={})
    assert "which it read in" in refusal(choose([row(0)], nothing, mirror()))
    newer = replace(ours, commits=committed(1, attempt=B))
    assert boundaries(choose([row(0)], newer)) == [1]


# ---- refusals


def test_lost_records_are_refused() -> None:
    choice = choose([row(0, offer(7))], home(committed(3), problem="has lost records"))
    assert refusal(choice) == "has lost records"


def test_committed_steps_of_which_none_is_whole_are_no_fresh_run() -> None:
    broken = {id_of(3): "shard-00000 is missing"}
    choice = choose([row(0)], home(committed(3), broken=broken), is_saved=True)
    assert "files of every one are missing" in refusal(choice)
    assert choice.passed_over[0].why == (
        f"in {URL}: shard-00000 is missing; rank 0 cannot read it: its node does not have it"
    )
    assert boundaries(choose([row(0, offer(3))], home(committed(3), broken=broken))) == [3]


@pytest.mark.parametrize("where", ["home", "mirror"])
def test_committed_steps_of_other_branches_alone_are_no_fresh_run(where: str) -> None:
    far = committed(9, attempt=C)
    choice = choose([row(0)], home(far if where == "home" else {}), mirror({} if where == "home" else far))
    assert f"has committed steps (90@{C}:9), and its newest attempt began from none" in refusal(choice)


def test_memory_that_not_all_ranks_have_is_a_fresh_run_once_it_could_not_be_saved() -> None:
    rows = row(0, offer(1)), row(1)
    assert choose(rows, home(), world=2).needs_save
    choice = choose(rows, home(), world=2, is_saved=True)
    assert boundaries(choice) == []
    assert "rank 1" in choice.passed_over[0].why


# ---- a round in which keepers save


def needs_save(*offers: tuple[Offer, ...], commits: Sequence[int] = (4,), **more: Any) -> bool:
    rows = [row(rank, *each) for rank, each in enumerate(offers)]
    return choose(rows, home(committed(*commits), **more), world=2).needs_save


def test_keepers_save_first_where_memory_is_newer_than_all_can_read() -> None:
    assert needs_save((offer(7),), ())
    assert needs_save((offer(7, world=4),), (offer(7, world=4),))
    assert needs_save((offer(7, problem="its rank runs elsewhere"),), ())
    assert not needs_save((offer(7),), (offer(7),))
    assert not needs_save((offer(7), offer(6)), (offer(7),)), "older than what all can read"
    assert needs_save((offer(7, place=CACHE),), ()), "its keeper saves what is in the cache, too"
    assert not needs_save((offer(7, world=4),), (), commits=(7,))
    assert not needs_save((offer(7, C),), ()), "of another branch"
    assert needs_save((offer(7),), (), commits=(8,), quarantined={id_of(8): frozenset({"host1"})})


# ---- quarantine


def test_a_snapshot_that_a_host_has_quarantined_comes_last() -> None:
    rows = row(0), row(1)
    ours = home(committed(6, 5), quarantined={id_of(6): frozenset({"host1", "elsewhere"})})
    choice = choose(rows, ours, world=2)
    assert boundaries(choice) == [5, 6]
    assert "it failed verification on host1 and is tried last" in choice.passed_over[0].why
    assert choice.candidates[1].quarantined_on == {"host1"}
    assert boundaries(choose(rows[:1], ours, world=2)) == [6, 5], "another host's quarantine does not count"


def test_a_quarantine_of_storage_says_nothing_of_memory() -> None:
    rows = row(0), row(1, offer(6))
    ours = home(committed(6, 5), quarantined={id_of(6): frozenset({"host1"})})
    choice = choose(rows, ours, world=2)
    assert boundaries(choice) == [6, 5]
    assert places(choice, *rows)[0] == [(HOME,), (MEMORY, HOME)]


def test_the_mirror_is_read_in_the_place_of_a_quarantined_home() -> None:
    rows = row(0), row(1)
    ours = home(committed(6, 5), quarantined={id_of(6): frozenset({"host1"})})
    choice = choose(rows, ours, mirror(committed(6)), world=2)
    assert boundaries(choice) == [6, 6, 5]
    assert places(choice, *rows)[0] == [(HOME, MIRROR), (MIRROR, HOME)]


def test_a_quarantined_cache_is_read_last() -> None:
    rows = row(0, offer(6, place=CACHE, is_quarantined=True)), row(1, offer(6))
    choice = choose(rows, home(committed(5)), world=2, is_saved=True)
    assert boundaries(choice) == [5, 6]
    choice = choose(rows, home(committed(6)), world=2)
    assert places(choice, *rows) == [[(HOME, CACHE), (MEMORY, HOME)]]


# ---- bounds


def test_messages_are_bounded_and_come_back_as_they_were() -> None:
    offers = [offer(each, problem="x" * 1000, place=Place(each % 2)) for each in range(1, 500)]
    mine = RankOffers.of(123456, "h" * 1000, offers)
    assert [each.id.boundary for each in mine.offers] == list(range(499, 499 - MOST_OFFERS, -1))
    said = json.dumps(mine.to_json())
    assert len(said) < 20_000
    short = RankOffers.of(3, "host", [offer(2), offer(1, place=CACHE, is_quarantined=True)])
    assert RankOffers.from_json(json.loads(json.dumps(short.to_json()))) == short
    choice = choose([mine], home(committed(*range(1, 5000))), mirror(committed(4000)), world=2)
    assert len(choice.candidates) == MOST_CANDIDATES
    rows = json.loads(json.dumps([each.to_json() for each in choice.candidates]))
    assert tuple(map(Candidate.from_json, rows)) == choice.candidates


def test_a_bounded_message_keeps_of_a_snapshot_what_can_be_read() -> None:
    near = [offer(each) for each in range(1, MOST_OFFERS)]
    mine = RankOffers.of(0, "host", [offer(1, problem="x"), offer(1, place=CACHE), *near[1:], offer(64)])
    assert [(each.id.boundary, each.place) for each in mine.offers][-1] == (1, CACHE)


def test_what_is_passed_over_is_bounded() -> None:
    rows = [row(rank, *(offer(b, problem=f"{rank}") for b in range(50))) for rank in range(100)]
    choice = choose(rows, home(), world=2, is_saved=True)
    assert [each.id.boundary for each in choice.passed_over] == list(range(49, 41, -1))
    assert choice.passed_over[0].why.endswith("rank 3 cannot read it: 3; 96 more reasons")


# ---- all rules, against a model

_ATTEMPTS = (A, B, C, D)
_IDS = st.builds(SnapshotId, st.sampled_from(_ATTEMPTS), st.integers(1, 3))
_OFFERS = st.builds(
    Offer,
    id=_IDS,
    step=st.just(0),
    world=st.sampled_from([2, 3]),
    place=st.sampled_from([MEMORY, CACHE]),
    is_quarantined=st.booleans(),
    problem=st.sampled_from(["", "", "lost"]),
)
_HOSTS = ("x", "y", "z")
_ROWS = st.lists(st.tuples(st.sampled_from(_HOSTS), st.lists(_OFFERS, max_size=6)), max_size=4).map(
    lambda rows: [RankOffers.of(rank, host, offers) for rank, (host, offers) in enumerate(rows)]
)
_LINEAGES = st.sampled_from(
    [
        (),
        (SnapshotId(A, ALL),),
        (SnapshotId(B, ALL), SnapshotId(A, 2)),
        (SnapshotId(C, ALL), SnapshotId(B, 2), SnapshotId(A, 2)),
        (SnapshotId(D, ALL), SnapshotId(A, 1)),
    ]
)


@st.composite
def histories(draw: st.DrawFn, url: str) -> History:
    ids = draw(st.sets(_IDS, max_size=6))
    some = st.sets(st.sampled_from(sorted(ids)), max_size=3) if ids else st.just(set())
    hosts = st.frozensets(st.sampled_from(_HOSTS), min_size=1)
    return History(
        url=url,
        lineage=draw(_LINEAGES),
        known=draw(st.frozensets(st.sampled_from(_ATTEMPTS), max_size=2)),
        commits=dict.fromkeys(ids, 0),
        broken=dict.fromkeys(draw(some), "cut short"),
        quarantined={id: draw(hosts) for id in sorted(draw(some))} if url == URL else {},
        read_from=draw(st.sampled_from(["", "", THERE])) if url == URL else "",
        problem=draw(st.sampled_from(["", "", "", "away"])) if url == THERE else "",
    )


class Model:
    """The rules, each said once over all snapshots and all ranks, at whatever cost."""

    def __init__(self, rows: list[RankOffers], ours: History, theirs: History | None) -> None:
        self.rows = rows or [RankOffers(0, "nowhere")]
        self.ours = ours
        self.theirs = None if theirs is None or theirs.problem else theirs
        self.silent = theirs is not None and bool(theirs.problem)
        self.ahead = self._ahead()
        lineage = ours.lineage if not self.ahead or self.theirs is None else self.theirs.lineage
        self.order = [
            SnapshotId(bound.attempt, boundary)
            for bound in lineage
            for boundary in (3, 2, 1)
            if boundary <= bound.boundary
        ]
        self.lineage = lineage

    def _ahead(self) -> bool | str:
        ours, theirs = self.ours, self.theirs
        if theirs is None or not theirs.lineage or self._is_known(theirs.lineage[0].attempt, ours):
            return False
        offered = {offer.id for row in self.rows for offer in row.offers}
        mine, its = self._alone(ours, theirs, offered), self._alone(theirs, ours, set())
        later = [id.attempt for id in ours.commits if id.attempt.number >= theirs.lineage[0].attempt.number]
        mine_foreign = any(
            not self._is_known(each, theirs) for each in [*later, *(id.attempt for id in mine)]
        )
        its_foreign = any(not self._is_known(id.attempt, ours) for id in its)
        for first, second in ((mine_foreign, its_foreign), (bool(mine), bool(its))):
            if first or second:
                return "both" if first and second else second
        return not ours.lineage or ours.lineage[0].attempt.number <= theirs.lineage[0].attempt.number

    @staticmethod
    def _is_known(attempt: AttemptName, history: History) -> bool:
        return attempt in history.known or attempt in [each.attempt for each in history.lineage]

    @staticmethod
    def _alone(history: History, other: History, offered: set[SnapshotId]) -> list[SnapshotId]:
        def seen_by(of: History) -> set[SnapshotId]:
            return {
                SnapshotId(bound.attempt, b) for bound in of.lineage for b in (1, 2, 3) if b <= bound.boundary
            }

        return sorted(
            ((set(history.commits) | offered) & seen_by(history)) - set(other.commits) - seen_by(other)
        )

    def copies(self, row: RankOffers, id: SnapshotId) -> set[tuple[bool, Place]]:
        found = {
            (each.is_quarantined, each.place)
            for each in row.offers
            if each.id == id and each.world == 2 and not each.problem
        }
        if id in self.ours.commits and id not in self.ours.broken:
            found.add((row.host in self.ours.quarantined.get(id, ()), HOME))
        if self._in_mirror(id):
            found.add((False, MIRROR))
        return found

    def _in_mirror(self, id: SnapshotId) -> bool:
        return self.theirs is not None and id in self.theirs.commits and id not in self.theirs.broken

    def is_sound(self, id: SnapshotId) -> bool:
        return all(any(not q for q, _ in self.copies(row, id)) for row in self.rows)

    def tried(self) -> Iterator[tuple[SnapshotId, bool]]:
        readable = [id for id in self.order if all(self.copies(row, id) for row in self.rows)]
        for id in filter(self.is_sound, readable):
            yield id, False
            others = {place for row in self.rows for _, place in self.copies(row, id)} - {MIRROR}
            if self._in_mirror(id) and others:
                yield id, True
        yield from ((id, False) for id in readable if not self.is_sound(id))

    def needs_save(self) -> bool:
        first = next((index for index, id in enumerate(self.order) if self.is_sound(id)), len(self.order))
        on_node = {e.id for row in self.rows for e in row.offers}
        kept = set(self.ours.commits) - set(self.ours.broken)
        return any(id in on_node - kept for id in self.order[:first])

    def is_refused(self) -> bool:
        if self.ahead == "both":
            return True
        first = next(self.tried(), None)
        commits = set(self.ours.commits) | set(self.theirs.commits if self.theirs is not None else ())
        if first is None and commits:
            return True
        if self.ahead:
            return False
        begun = self.lineage[1] if len(self.lineage) > 1 else None
        start = None if begun is None else SnapshotId(begun.attempt, min(begun.boundary, 3))
        is_behind = start is not None and (
            first is None or self.order.index(first[0]) > self.order.index(start)
        )
        if self.silent:
            return first is None or is_behind
        return is_behind and bool(self.ours.read_from) and (self.theirs is None or first is None)


@given(_ROWS, histories(URL), st.none() | histories(THERE), st.randoms())
def test_the_choice_is_that_of_the_model(
    rows: list[RankOffers], ours: History, theirs: History | None, order: random.Random
) -> None:
    model = Model(rows, ours, theirs)
    mixed = list(rows)
    order.shuffle(mixed)
    early, choice = choose(mixed, ours, theirs, world=2), choose(rows, ours, theirs, world=2, is_saved=True)
    assert (choice.refusal is not None) == model.is_refused()
    if model.ahead == "both":
        assert str(early.refusal) == str(choice.refusal)
        return
    assert choice.mirror_is_ahead == model.ahead
    assert choice.lineage == model.lineage
    assert early.needs_save == model.needs_save()
    if not early.needs_save:
        assert str(replace(early, refusal=None)) == str(replace(choice, refusal=None))
        assert str(early.refusal) == str(choice.refusal)
    if choice.refusal is None:
        assert [(each.id, each.from_mirror) for each in choice.candidates] == list(model.tried())
    for each in choice.candidates:
        for row in rows:
            expected = dict.fromkeys(place for _, place in sorted(model.copies(row, each.id)))
            assert each.places(row, 2) == ((MIRROR,) if each.from_mirror else tuple(expected))

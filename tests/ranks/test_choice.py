"""Starts of a run, one after the other, played through for many ranks: kills, other numbers of ranks, nodes
that lost their memory, nodes that were replaced. What ranks have in memory is what the simulated job left."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from flashckpt.commit.choice import (
    Candidate,
    Choice,
    Offer,
    Place,
    RankOffers,
    Stored,
    choose,
)
from flashckpt.format.catalogue import EMPTY, Catalogue, Checkpoint
from flashckpt.format.names import AttemptName, SnapshotId

from .simulated import Conditions, SimulatedJob

NEWEST = 10**10 - 1


@dataclass(frozen=True)
class Held:
    """A sealed snapshot of one rank in the memory of a node."""

    id: SnapshotId
    rank: int
    world: int


class PlayedRun:
    """A run in a home and a mirror. `memory` is what each node holds, by its name. `complete`: the newest
    snapshot that all ranks of the last job (`world`) have sealed; None where a node has lost its memory."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lineage: list[SnapshotId] = []
        self.memory: dict[str, set[Held]] = {}
        self.home: dict[SnapshotId, int] = {}
        self.mirror: dict[SnapshotId, int] = {}
        self.damaged: set[tuple[SnapshotId, Place, str]] = set()
        self.complete: SnapshotId | None = None
        self.world = 0
        self.saves = 0

    def age(self, id: SnapshotId) -> tuple[int, int]:
        return id.attempt.number, id.boundary

    # ---- a start

    def start(self, nodes: Sequence[str], ranks: int) -> SnapshotId | None:
        """All ranks of a new job resume; `ranks` of them on each node. Gives what they resumed from."""
        rows = list(self.rows(nodes, ranks))
        choice = self.choice(rows, is_saved=False)
        if choice.needs_save:
            self.saves += 1
            self.save(nodes)
            choice = self.choice(list(self.rows(nodes, ranks)), is_saved=True)
        assert choice.refusal is None
        assert not choice.needs_save
        hosts = [node for node in nodes for _ in range(ranks)]
        taken = next((each for each in choice.candidates if self.is_loaded(each, rows, hosts)), None)
        self.check(taken, nodes)
        self.begin(None if taken is None else taken.id)
        return None if taken is None else taken.id

    def choice(self, rows: list[RankOffers], *, is_saved: bool) -> Choice:
        home = Stored(url="/run", catalogue=self.catalogue_of(self.home))
        mirror = Stored(url="s3://run", catalogue=self.catalogue_of(self.mirror))
        found = choose(rows, home, mirror, is_saved=is_saved)
        self.random.shuffle(rows)
        said = [RankOffers.from_json(each.to_json()) for each in rows]
        again = choose(said, home, mirror, is_saved=is_saved)
        assert again.candidates == found.candidates, "it depends on the order of the ranks"
        return found

    def catalogue_of(self, steps: dict[SnapshotId, int]) -> Catalogue:
        if not self.lineage:
            return EMPTY
        attempt = self.lineage[0].attempt
        return Catalogue(
            run_id="5" * 16,
            version=1,
            writer=attempt,
            attempt=attempt,
            lineages=((attempt, tuple(self.lineage[1:])),),
            checkpoints=tuple(
                Checkpoint(id=id, step=step, writer=id.attempt, manifest="0" * 16)
                for id, step in steps.items()
            ),
        )

    def rows(self, nodes: Sequence[str], ranks: int) -> Iterator[RankOffers]:
        """What each rank offers: its own snapshots, and the first rank of a node also those of others."""
        for index, node in enumerate(nodes):
            here = range(index * ranks, (index + 1) * ranks)
            for rank in here:
                offers = [
                    Offer(
                        id=held.id,
                        step=held.id.boundary,
                        problem=self.problem(held, rank, len(nodes) * ranks),
                    )
                    for held in self.memory.get(node, ())
                    if held.rank == rank or (rank == here[0] and held.rank not in here)
                ]
                yield RankOffers.of(rank, offers)

    def problem(self, held: Held, rank: int, world: int) -> str:
        if held.rank != rank:
            return f"it is of rank {held.rank}"
        return "" if held.world == world else f"{held.world} ranks made it"

    def save(self, nodes: Sequence[str]) -> None:
        """The keepers of these nodes commit what is whole over them."""
        found: dict[tuple[SnapshotId, int], set[int]] = {}
        for held in set[Held]().union(*(self.memory.get(node, ()) for node in nodes)):
            found.setdefault((held.id, held.world), set()).add(held.rank)
        self.home |= {id: id.boundary for (id, world), ranks in found.items() if len(ranks) == world}

    def is_loaded(self, candidate: Candidate, rows: list[RankOffers], hosts: Sequence[str]) -> bool:
        """Whether each rank can load it from one of its places."""
        loaded = True
        for row in rows:
            places, host = candidate.places(row), hosts[row.rank]
            assert places
            assert Place.MEMORY not in places or any(
                held == Held(candidate.id, row.rank, len(rows)) for held in self.memory[host]
            )
            assert Place.HOME not in places or candidate.id in self.home
            assert Place.MIRROR not in places or candidate.id in self.mirror
            bad = [place for place in places if (candidate.id, place, host) in self.damaged]
            loaded = loaded and len(bad) < len(places)
        return loaded

    def check(self, taken: Candidate | None, nodes: Sequence[str]) -> None:
        """Nothing is left behind that is committed and whole, or that these nodes have all of in memory."""
        bound = {each.attempt: each.boundary for each in self.lineage}
        held = {each.rank for node in nodes for each in self.memory.get(node, ()) if each.id == self.complete}
        listed = [*self.home, *self.mirror]
        if self.complete is not None and len(held) == self.world:
            listed.append(self.complete)
        whole = {id for id in listed if id.boundary <= bound.get(id.attempt, -1)}
        whole -= {id for id, _, _ in self.damaged}
        newest = max(whole, key=self.age, default=None)
        if newest is not None:
            assert taken is not None
            assert self.age(taken.id) >= self.age(newest)

    def begin(self, taken: SnapshotId | None) -> None:
        number = self.lineage[0].attempt.number + 1 if self.lineage else 1
        attempt = AttemptName(number, f"{self.random.getrandbits(32):08x}")
        before = []
        if taken is not None:
            index = next(i for i, each in enumerate(self.lineage) if each.attempt == taken.attempt)
            before = [SnapshotId(taken.attempt, taken.boundary), *self.lineage[index + 1 :]]
        self.lineage = [SnapshotId(attempt, NEWEST), *before]

    # ---- training

    def train(self, nodes: Sequence[str], ranks: int, until_s: float, **conditions: object) -> None:
        """Play a job until it is killed: what was sealed stays in memory, and what all persisted is
        committed. The mirror has some of that."""
        job = SimulatedJob(
            self.random.getrandbits(32),
            Conditions(**{"nodes": len(nodes), "ranks": ranks, "persist_every": 10} | conditions),  # type: ignore[arg-type]
        )
        job.run(until_s)
        attempt, world = self.lineage[0].attempt, len(job.by_rank)
        self.world = world
        for index, node in enumerate(nodes):
            self.memory[node] = {
                Held(SnapshotId(attempt, boundary), rank.rank, world)
                for rank in job.by_rank[index * ranks : (index + 1) * ranks]
                for boundary in rank.ring.held()
            }
        for boundary, by in job.persisted.items():
            if len(by) == world:
                self.home[SnapshotId(attempt, boundary)] = boundary
        self.mirror |= {id: step for id, step in self.home.items() if self.random.random() < 0.5}
        everywhere = set[int].intersection(*(rank.ring.held() for rank in job.by_rank))
        assert not job.complete or max(everywhere) >= job.complete[-1]
        # The nodes of this job have overwritten what they held before.
        self.complete = SnapshotId(attempt, max(everywhere)) if everywhere else None

    def lose(self, node: str) -> None:
        """A node reboots, or is replaced by another one of that name."""
        if self.memory.pop(node, None):
            self.complete = None

    def damage(self, hosts: Sequence[str]) -> None:
        """Some host cannot read what is committed newest in the home."""
        newest = max(self.home, key=self.age, default=None)
        if newest is not None:
            self.damaged.add((newest, Place.HOME, self.random.choice(hosts)))


def test_a_run_that_loses_nothing_resumes_from_its_newest_complete_snapshot() -> None:
    run = PlayedRun(1)
    nodes = ["a", "b"]
    assert run.start(nodes, 4) is None
    for _ in range(3):
        run.train(nodes, 4, 20.0)
        assert run.complete is not None
        assert run.start(nodes, 4) == run.complete
    assert run.saves == 0


def test_ranks_on_other_nodes_than_before_read_what_the_keepers_save() -> None:
    run = PlayedRun(2)
    run.start(["a", "b"], 2)
    run.train(["a", "b"], 2, 20.0, persist_every=None)
    assert run.start(["b", "a"], 2) == run.complete
    assert run.saves == 1
    run.train(["b", "a"], 2, 20.0)
    assert run.start(["b", "a", "c"], 2) == run.complete, "more ranks"
    assert run.saves == 2


@pytest.mark.parametrize("seed", range(12))
def test_no_start_leaves_behind_what_is_whole(seed: int) -> None:
    run = PlayedRun(seed)
    names = ["a", "b", "c", "d"]
    for _ in range(8):
        nodes = run.random.sample(names, run.random.randint(1, 3))
        ranks = run.random.choice([1, 2])
        run.start(nodes, ranks)
        run.train(nodes, ranks, run.random.uniform(1.0, 15.0), misses=run.random.choice([0.0, 0.05]))
        for name in names:
            if run.random.random() < 0.3:
                run.lose(name)
        if run.random.random() < 0.3:
            run.damage(names)
    assert run.home

"""Ranks, keepers and whole nodes of one job killed at random; after each kill everything must hold.

`python -m tests.crash.torture --nodes 2 --ranks 2 --kills 500 --seed 1`. What is trained is no model: each
rank fills slots natively (`tests.crash.ranks`), so that a life costs a tenth of a second a rank.
"""

import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.ranks import Dead, RanksJob

# Where ranks, and keepers, of this job can be killed at a point of their own.
_RANK_POINTS = ("seal.submitted", "start.written")
_KEEPER_POINTS = (
    "memory.reserved", "slots.taken", "memory.made", "memory.given", "adopt.taken", "adopt.reclaimed",
    "adopt.done", "rescue.asked", "audit.begun", "audit.pinned", "write.begun", "write.written",
    "part.checked", "part.linked", "manifest.checked", "manifest.written", "version.created",
    "commit.marked", "prune.begun", "prune.done", "end.marking",
)  # fmt: skip
_STEPS_A_RUN = 400
_VICTIMS = ("rank", "ranks", "node", "job", "node and memory", "power")


@dataclass
class Kills:
    """How often what was killed, in how many lives of how many runs, and what was wrong afterwards."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    runs: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return sum(self.kills.values())

    def to_dict(self) -> dict[str, object]:
        counted = {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items()}
        return {"killed": self.killed, **counted}


@dataclass
class Tally(Kills):
    tiers: Counter[str] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    incomplete: int = 0


class RanksTorture:
    """Run after run of `nodes` × `each` ranks, until there are kills enough. Stops at the first fault."""

    def __init__(self, folder: Path, seed: int, *, nodes: int, each: int) -> None:
        self._folder, self._luck, self._nodes, self._each = folder, random.Random(seed), nodes, each
        self.tally = Tally(seed)

    def kill(self, kills: int) -> Tally:
        began = time.monotonic()
        while self.tally.killed < kills and not self.tally.faults:
            self.tally.runs += 1
            folder = self._folder / f"run-{self.tally.runs}"
            folder.mkdir()
            job = RanksJob(folder, self._nodes, self._each)
            try:
                while self.tally.killed < kills and not self.tally.faults and job.step < _STEPS_A_RUN:
                    self._one_life(job)
            except AssertionError as error:
                self._fault(job, [str(error)])
            finally:
                job.close()
            self.tally.lives += job.lives
            if not self.tally.faults:
                shutil.rmtree(folder)
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def _one_life(self, job: RanksJob) -> None:
        luck, tally, before = self._luck, self.tally, job.complete
        victim, lost = "at a point", set[int]()
        try:
            self._fault(job, job.start(self._armed(job)))
            tally.tiers.update("memory" if tier else "storage" for tier in job.resumed_tiers)
            if job.floor == before:
                tally.lost[before - job.step] += 1
            self._train(job)
            victim = luck.choices(_VICTIMS, [4, 2, 3, 2, 2, 1])[0]
            lost = self._strike(job, victim)
        except Dead:
            pass
        time.sleep(luck.choice([0, luck.randrange(5_000) / 1e6]))
        job.stop_all()
        tally.kills[victim] += 1
        for node in lost:
            job.kill_keeper(node)
            job.forget(node)
        job.expect(lost=lost)
        self._fault(job, job.faults())
        pause = luck.random()
        if pause < 0.25:
            time.sleep(luck.randrange(300_000) / 1e6)
        elif pause < 0.4 and victim in ("rank", "ranks"):
            job.settle()

    def _train(self, job: RanksJob) -> None:
        """Some steps, keepers killed meanwhile."""
        luck = self._luck
        for _ in range(luck.randrange(1, 14)):
            self._step(job)
            if luck.random() < 0.12:
                time.sleep(luck.randrange(8_000) / 1e6)
                job.kill_keeper(luck.randrange(self._nodes))
                self.tally.kills["keeper"] += 1
            if luck.random() < 0.3:
                job.look()

    def _step(self, job: RanksJob, strike: Callable[[], None] = lambda: None) -> None:
        luck = self._luck
        missing = [luck.randrange(job.world)] if luck.random() < 0.1 else []
        late = luck.sample(range(job.world), luck.randrange(1, job.world)) if luck.random() < 0.4 else []
        ahead = luck.randrange(1, 4) if luck.random() < 0.4 else 0
        self.tally.steps += 1
        self.tally.incomplete += bool(missing)
        persist = luck.random() < 0.4
        job.train(persist=persist, missing=missing, late=late, ahead=ahead, strike=strike)

    def _strike(self, job: RanksJob, victim: str) -> set[int]:
        """Somewhere in a step. The nodes whose memory is gone. Raises Dead where a rank had died before."""
        luck, node = self._luck, self._luck.randrange(self._nodes)
        nodes = range(self._nodes) if victim in ("job", "power") else [node]
        after_s = luck.choice([0, luck.randrange(4_000) / 1e6])

        def strike() -> None:
            time.sleep(after_s)
            if victim == "rank":
                job.kill_ranks([luck.randrange(job.world)])
            elif victim == "ranks":
                job.stop_all()
            else:
                for each in nodes:
                    for operation in luck.sample([job.kill_keeper, job.kill_node_ranks], 2):
                        operation(each)

        with contextlib.suppress(Dead):
            self._step(job, strike)
        return set(nodes) if victim in ("node and memory", "power") else set()

    def _armed(self, job: RanksJob) -> dict[int, tuple[str, str]]:
        """Now and then a rank, or the keepers that it starts, with a point to be killed at."""
        luck = self._luck
        rank, count = luck.randrange(job.world), luck.randrange(1, 4)
        kind = luck.choices(["", "rank", "keeper"], [6, 1, 3])[0]
        if kind == "rank":
            return {rank: (f"{luck.choice(_RANK_POINTS)}:{count}", "")}
        return {rank: ("", f"{luck.choice(_KEEPER_POINTS)}:{count}")} if kind else {}

    def _fault(self, job: RanksJob, faults: list[str]) -> None:
        where = f"run {self.tally.runs}, life {job.lives}, kill {self.tally.killed} of seed {self.tally.seed}"
        self.tally.faults += [f"{where}: {fault}" for fault in faults]


def reported(tally: Kills, out: Path | None) -> int:
    """Print what happened, and write it as JSON. Return the exit status: 1 where something did not hold."""
    for name, value in tally.to_dict().items():
        if name != "faults":
            print(f"{name}: {value}")
    for fault in tally.faults:
        print(fault, file=sys.stderr)
    if out is not None:
        out.write_text(json.dumps(tally.to_dict(), indent=1) + "\n")
    return 1 if tally.faults else 0


def main(nodes: int, each: int, kills: int, seed: int, out: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="flashckpt-torture-") as folder:
        return reported(RanksTorture(Path(folder), seed, nodes=nodes, each=each).kill(kills), out)


if __name__ == "__main__":
    # Without torch in it, as the torture of a model has.
    kills, seed, written = sys.argv[1:]
    sys.exit(main(2, 2, int(kills), int(seed), Path(written)))

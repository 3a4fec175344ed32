"""Kills at random moments, with random restarts, as many as one likes; after each, everything must hold.

A program of its own: `python -m tests.crash.torture --kills 1000 --seed 1 --json out.json`. The moments
are drawn from the seed as a number of events and microseconds: as reproducible as two processes are.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import flashckpt
from flashckpt.errors import NoSuchStepError
from tests import run_view
from tests.crash import ranks_torture
from tests.crash.job import Job, reference_of
from tests.crash.tiny import TIERS
from tests.folders import let_folders_go
from tests.processes import end, keepers_of
from tests.zygote import Zygote

STEPS = 500
# What must not be passed, however long a run is killed.
LIMITS = {"files": 150, "names in memory": 48, "keepers": 2, "keeper descriptors": 48}


@dataclass(frozen=True)
class Kill:
    """victim: who dies ("node": both, and memory with them). after, count, micros: so many boundaries,
    or new entries among the steps, or nothing but time since the start, and microseconds. gap_micros:
    between the two where both die. before_restart: what is waited for, or done, before the next life."""

    victim: str
    after: str
    count: int
    micros: int
    gap_micros: int
    keeper_first: bool
    before_restart: str
    wait_slots: bool


def drawn(luck: random.Random) -> Kill:
    after = luck.choices(["start", "boundaries", "entries"], [2, 5, 3])[0]
    return Kill(
        victim=luck.choices(["trainer", "keeper", "both", "node"], [40, 25, 25, 10])[0],
        after=after,
        count=luck.randrange(1, 16 if after == "boundaries" else 4),
        micros=luck.randrange(150_000) if after == "start" else luck.randrange(6_000),
        gap_micros=luck.choice([0, luck.randrange(20_000)]),
        keeper_first=luck.random() < 0.5,
        before_restart=luck.choices(["nothing", "a pause", "a commit", "a branch"], [60, 20, 15, 5])[0],
        wait_slots=luck.random() < 0.85,
    )


@dataclass
class Tally(ranks_torture.Kills):
    moments: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    steps_lost: Counter[int] = field(default_factory=Counter)
    most: dict[str, int] = field(default_factory=dict)
    branches: int = 0
    looks: int = 0


class Torture:
    """Runs one after the other, each killed until it is done or there are kills enough."""

    def __init__(
        self, zygote: Zygote, folder: Path, seed: int, *, steps: int = STEPS, has_cache: bool = False
    ) -> None:
        self._zygote, self._folder, self._luck = zygote, folder, random.Random(seed)
        self._has_cache = has_cache
        self._reference = reference_of(zygote, steps)
        self.tally = Tally(seed)
        self._counted = (0, 0)

    def kill(self, kills: int) -> Tally:
        """At least so many kills, and the last run finished. Stops at the first fault."""
        began = time.monotonic()
        while self.tally.killed < kills and not self.tally.faults:
            self.tally.runs += 1
            folder = self._folder / f"run-{self.tally.runs}"
            folder.mkdir()
            runtime = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
            # In shared memory, too: never the disk of the run.
            made = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm") if self._has_cache else None
            cache = None if made is None else Path(made)
            try:
                job = Job(self._zygote, folder, runtime, self._reference, cache=cache)
                self._one_run(job, kills)
            finally:
                end(keepers_of(runtime))
                for each in [runtime] if cache is None else [runtime, cache]:
                    shutil.rmtree(each, ignore_errors=True)
            if not self.tally.faults:
                shutil.rmtree(folder)
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def _one_run(self, job: Job, kills: int) -> None:
        try:
            while self.tally.killed < kills and not self.tally.faults:
                if not self._one_kill(job, drawn(self._luck)):
                    break
            if not self.tally.faults:
                self._look(job, None, job.finish())
        except AssertionError as error:
            self._look(job, None, [str(error)])
        finally:
            if job.trainer >= 0:
                job.kill_trainer()
        self.tally.lives += job.lives

    def _one_kill(self, job: Job, kill: Kill) -> bool:
        """False where the run came to its end before the moment."""
        if job.trainer < 0:
            job.start(wait_slots=kill.wait_slots)
        if not job.await_(self._moment(job, kill)) or job.ended(kill.micros / 1e6):
            status = job.status()
            if status:
                self._look(job, kill, [f"a trainer ended with status {status}: {job.said[-2000:]}"])
            return False
        died = self._strike(job, kill)
        if died:
            self.tally.kills[kill.victim] += 1
            self.tally.moments[kill.after] += 1
        # Of a killed trainer, what it left is looked at before the next life may change it.
        self._look(job, kill, job.faults())
        if job.trainer < 0:
            self._between(job, kill)
        return True

    def _moment(self, job: Job, kill: Kill) -> Callable[[], bool]:
        if kill.after == "start":
            return lambda: True
        if kill.after == "boundaries":
            goal = job.boundaries() + kill.count
            return lambda: job.boundaries() >= goal
        seen = self._entries(job)
        return lambda: len(self._entries(job) - seen) >= kill.count or job.boundaries() > 100

    @staticmethod
    def _entries(job: Job) -> set[str]:
        found = set[str]()
        for writer in job.run.glob("data/*"):
            with contextlib.suppress(FileNotFoundError):  # a keeper deletes beside this
                found |= {f"{writer.name}/{name}" for name in os.listdir(writer)}
        return found

    @staticmethod
    def _strike(job: Job, kill: Kill) -> bool:
        if kill.victim == "trainer":
            job.kill_trainer()
            return True
        if kill.victim == "keeper":
            return job.kill_keepers()
        if kill.keeper_first:
            job.kill_keepers()
            job.ended(kill.gap_micros / 1e6)
            job.kill_trainer()
        else:
            job.kill_trainer()
            time.sleep(kill.gap_micros / 1e6)
        while job.kill_keepers():
            pass
        return True

    def _between(self, job: Job, kill: Kill) -> None:
        """The trainer is dead: what its next life must find is written down."""
        memory = kill.victim != "node"
        if not memory:
            job.forget_memory()
        job.expect(memory=memory)
        if kill.before_restart == "a pause":
            time.sleep(kill.gap_micros / 1e6)
        elif kill.before_restart == "a commit" and kill.victim == "trainer":
            job.settle()
        elif kill.before_restart == "a branch" and memory:
            self._branch(job)

    def _branch(self, job: Job) -> None:
        while visible := job.visible():
            step = self._luck.choice(visible)
            try:
                # On the job's own node the lock decides, and `branch` watches no counter.
                with mock.patch.dict(os.environ, FLASHCKPT_RUNTIME=str(job.runtime)):
                    flashckpt.branch(job.run, step)
            except NoSuchStepError:
                # The keeper may have pruned it before the claim.
                assert step not in job.visible()
                continue
            self.tally.branches += 1
            job.expect_exactly(step)
            return

    def _look(self, job: Job, kill: Kill | None, faults: list[str]) -> None:
        tally, resumed = self.tally, job.resumed()
        tally.looks += 1
        if resumed is not None and (tally.runs, job.lives) != self._counted:
            self._counted = (tally.runs, job.lives)
            tally.resumed[TIERS[resumed.sealed]] += 1
            lost = job.lost()
            if lost is not None:
                tally.steps_lost[lost] += 1
        for name, size in job.sizes().items():
            tally.most[name] = max(size, tally.most.get(name, 0))
            # A process that has just been started, or a file that is about to go, is there for a moment, and
            # for longer on a busy machine. What has grown stays.
            if size > LIMITS[name] and not job.comes_down(name, LIMITS[name]):
                faults.append(f"{size} {name}, more than {LIMITS[name]}, and it stays so: {job.told()}")
        where = f"run {tally.runs}, life {job.lives}, kill {tally.killed} of seed {tally.seed} ({kill})"
        tally.faults += [f"{where}: {fault}" for fault in faults]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--steps", type=int, default=STEPS, help="length of each run")
    parser.add_argument("--json", type=Path, default=None, help="write what happened here")
    parser.add_argument("--nodes", type=int, default=1, help="a job on so many nodes, without a model")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each node of it")
    parser.add_argument("--cache", action="store_true", help="a cache for each run, which outlives a node")
    chosen = parser.parse_args(arguments)
    run_view.watch_for(5.0)  # a tenth of the kills remove the memory, and each recovery then waits
    if chosen.nodes * chosen.ranks > 1:
        return ranks_torture.main(chosen.nodes, chosen.ranks, chosen.kills, chosen.seed, chosen.json)
    zygote = Zygote()
    with tempfile.TemporaryDirectory(prefix="flashckpt-torture-") as folder:
        torture = Torture(zygote, Path(folder), chosen.seed, steps=chosen.steps, has_cache=chosen.cache)
        tally = torture.kill(chosen.kills)
    zygote.close()
    return ranks_torture.reported(tally, chosen.json)


if __name__ == "__main__":
    let_folders_go()
    sys.exit(main())

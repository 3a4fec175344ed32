"""A job of several ranks on several nodes, without torch, that is killed and started again; what must hold.

Keepers, slots, queue, parts, records and retention are the real ones. A rank is a process that fills slots
natively (`tests.keeper.fake`); this process stands for the launcher and for what ranks agree on: which step
all can read, which is complete, which is void. Each rank's state at each step is its own, known to the byte.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import FlashckptError
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.store import open_store
from flashckpt.store.base import Store
from tests import run_view
from tests.commit.runs import half_steps
from tests.descriptors import readable
from tests.events import ledger
from tests.keeper import fake
from tests.keeper.fake import keeper_pid, open_runtime
from tests.persist.node import is_whole
from tests.processes import end
from tests.waiting import until

LIMIT_S = 120.0
_LINES = 80


class Dead(Exception):
    """A rank ended while its answer was waited for."""


class Rank:
    """A forked `FakeTrainer`. `armed`: a crash point for it, and for the keepers that it starts."""

    def __init__(self, base: Path, said: Path, armed: str, keeper_armed: str) -> None:
        asked, self._asking = os.pipe()
        self._answering, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._live(asked, answers, base, said, armed, keeper_armed)
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answers)
        self._read = b""

    def _live(self, asked: int, answers: int, base: Path, said: Path, armed: str, keeper_armed: str) -> None:
        os.setsid()
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in (asked, answers):
                with contextlib.suppress(OSError):
                    os.close(number)
        log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target, source in ((0, asked), (1, answers), (2, log)):
            os.dup2(source, target)
        os.environ |= {"FLASHCKPT_RUNTIME": str(base), "FLASHCKPT_CRASH_AT": keeper_armed}
        if armed:
            crashpoints.arm(armed)
        with open(0, encoding="utf-8", closefd=False) as lines, open(1, "w", closefd=False) as out:
            fake.main(lines, out)

    def ask(self, *command: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asking, (json.dumps(command) + "\n").encode())

    def answer(self) -> Any:
        until_s = time.monotonic() + LIMIT_S
        while b"\n" not in self._read:
            if not readable(self._answering, timeout_s=max(0.0, until_s - time.monotonic())):
                raise AssertionError(f"rank process {self.pid} does not answer")
            if not (more := os.read(self._answering, 1 << 16)):
                raise Dead
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._answering)
        os.close(self._asking)


class RanksJob:
    """`nodes` × `each` ranks. `complete` is the newest step that all ranks sealed, `committed` the newest
    that a keeper told of; `sealed` the newest that any rank may have."""

    def __init__(self, folder: Path, nodes: int, each: int) -> None:
        self.run, self.said = folder / "run", folder / "stderr"
        self.world = nodes * each
        self.bases = [Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")) for _ in range(nodes)]
        self.node_ranks = [list(range(n * each, (n + 1) * each)) for n in range(nodes)]
        self.ranks: dict[int, Rank] = {}
        self.step = self.complete = self.committed = self.sealed = 0
        self.floor = self.ceiling = 0
        self.attempt, self.number, self.lives = "", 0, 0
        self.resumed_tiers: list[str] = []
        self.incomplete: set[int] = set()
        # Steps that are not known to be complete, of any life: its keepers may outlive it.
        self.lacking: set[int] = set()
        self.readable: list[Any] = []

    # ---- lives

    def start(self, armed: dict[int, tuple[str, str]]) -> list[str]:
        """A new life from the newest content that all can read. Faults where that is older than what was
        safe. Raises Dead."""
        assert not self.ranks
        self.lives += 1
        for node, ranks in enumerate(self.node_ranks):
            for rank in ranks:
                self.ranks[rank] = Rank(self.bases[node], self.said, *armed.get(rank, ("", "")))
        about = {"world": self.world, "keep": 2, "linger_s": 600}
        for base, ranks in zip(self.bases, self.node_ranks, strict=True):
            for rank in ranks:
                options = {**about, "kib": 16 + rank, "rank": rank, "ranks": ranks}
                join = {"join": self.attempt} if rank else {}
                self.ranks[rank].ask("attach", str(self.run), str(base), {**options, **join})
                if rank == 0:
                    self.attempt = self.ranks[0].answer()
                    self.number = int(self.attempt.partition("-")[0])
        self._answers(range(1, self.world))
        found = self._chosen()
        faults = self._judge(found)
        step, parent, tiers = found
        self.resumed_tiers = tiers
        for some in (range(1), range(1, self.world)):
            for rank in some:
                self.ranks[rank].ask("start", parent, step, tiers[rank] or None)
            self._answers(some)
        self.step = self.complete = self.sealed = step
        self.incomplete.clear()
        self._all("slots", 0)
        return faults

    def _chosen(self) -> tuple[int, str | None, list[str]]:
        """The newest (attempt's number, step) that each rank can read, with the tier of each."""
        mine: list[dict[tuple[int, int, str], str]] = []
        self.readable = self._all("candidates")
        for rows in self.readable:
            mine.append({(row[0], row[1], row[2]): row[3] for row in reversed(rows)})
        common = set.intersection(*(set(each) for each in mine))
        if not common:
            return 0, None, [""] * self.world
        best = max(common)
        return best[0], best[2], [each[best] for each in mine]

    def _judge(self, found: tuple[int, str | None, list[str]]) -> list[str]:
        if self.floor <= found[0] <= self.ceiling:
            return []
        where = f"life {self.lives} goes on from {found}, where {self.floor} to {self.ceiling} were there"
        return [f"{where}; each rank could read {self.readable}; {self.told()}"]

    def told(self) -> str:
        """The newest lines of the ledger, and the last words of ranks and keepers."""
        logs = [path for base in self.bases for path in base.rglob("keeper.log")]
        words = []
        for each in [self.said, *logs]:
            with contextlib.suppress(FileNotFoundError):
                words.append(f"{each.name}: {each.read_text(errors='replace')[-3000:]}")
        lines = sorted(ledger(self.run), key=lambda line: float(line["time"]))
        return "\n".join([*words, *map(json.dumps, lines[-_LINES:])])

    def _answers(self, ranks: Collection[int]) -> list[Any]:
        if not all(rank in self.ranks for rank in ranks):
            raise Dead
        return [self.ranks[rank].answer() for rank in ranks]

    def _all(self, *command: Any, but: Collection[int] = ()) -> list[Any]:
        ranks = [rank for rank in range(self.world) if rank not in but]
        for rank in ranks:
            if rank in self.ranks:
                self.ranks[rank].ask(*command)
        return self._answers(ranks)

    # ---- training

    def train(
        self,
        *,
        persist: bool,
        missing: Collection[int] = (),
        late: Collection[int] = (),
        ahead: int = 0,
        strike: Callable[[], None] = lambda: None,
    ) -> None:
        """One step, and so many more that are taken `ahead` of what is known to be complete. Ranks that are
        `missing` take no snapshot of the first, which is to be persisted or not; `late` ones take theirs once
        all others have taken all of theirs. `strike` is called while these are at it. Raises Dead."""
        steps = range(self.step + 1, self.step + 2 + ahead)
        self.sealed = steps[-1]
        has = {(rank, steps[0]): False for rank in missing}
        self.lacking |= {*steps}
        first = [rank for rank in range(self.world) if rank not in late]
        for some in (first, late):
            asked = [(rank, step) for step in steps for rank in some if (rank, step) not in has]
            for rank, step in asked:
                if rank in self.ranks:
                    self.ranks[rank].ask("try", step, persist and step == steps[0])
            if some is first:
                strike()
            for rank, step in asked:
                [has[rank, step]] = self._answers([rank])
        for self.step in steps:
            if all(has[rank, self.step] for rank in range(self.world)):
                self.complete = self.step
                self.lacking.discard(self.step)
                self._all("complete", self.number, self.step)
            else:
                self.incomplete.add(self.step)
                self._all("incomplete", self.step)

    def look(self) -> None:
        """What keepers tell of commits. Raises Dead."""
        for status in self._all("status"):
            self.committed = max([self.committed, *status["committed"]])
            # Of what is older than what is committed nobody needs more.
            passed = self.incomplete | self.lacking | set(range(self.committed))
            failed = [each for each in status["failures"] if each["step"] not in passed]
            if failed:
                # What is pruned was committed, and a newer one is: another node's keeper may have told of it.
                newest = max((each.step for each in run_view.visible(open_store(str(self.run)))), default=0)
                failed = [each for each in failed if each["step"] >= newest]
            if failed:
                why = f"what nothing is wrong with could not be saved: {failed}"
                raise AssertionError(f"{why}; {self.told()}")

    # ---- deaths

    def keepers(self, node: int) -> list[int]:
        """The elected keeper of a node."""
        with contextlib.suppress(FlashckptError, OSError):
            _, identity = open_runtime(self.run, self.bases[node])
            folder = RuntimeFolder.open(str(self.bases[node]), identity, create=False)
            with contextlib.closing(folder):
                pid = keeper_pid(folder)
                return [] if pid is None else [pid]
        return []

    def kill_keeper(self, node: int) -> None:
        while pids := self.keepers(node):
            end(pids)

    def kill_ranks(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.ranks.pop(rank).kill()

    def kill_node_ranks(self, node: int) -> None:
        self.kill_ranks(self.node_ranks[node])

    def stop_all(self) -> None:
        """As a launcher does once one rank is dead."""
        self.kill_ranks(list(self.ranks))

    def expect(self, *, lost: Collection[int] = ()) -> None:
        """All ranks are dead; nodes that are `lost` have nothing in memory any more."""
        if lost:
            self.complete = self.committed
        self.floor, self.ceiling = self.complete, max(self.sealed, self.complete)

    def forget(self, node: int) -> None:
        """A node's memory is gone, its keeper is dead."""
        for entry in self.bases[node].iterdir():
            shutil.rmtree(entry)

    def settle(self) -> None:
        """Wait until the keepers, if each node has one, have saved what all ranks that died had."""
        store = open_store(str(self.run))

        def newest() -> int:
            return max((each.step for each in run_view.visible(store)), default=0)

        def is_saved() -> bool:
            return newest() >= self.floor or not all(map(self.keepers, range(len(self.bases))))

        try:
            until(is_saved, f"step {self.floor} to be committed", LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.told()}") from error

    # ---- what must hold

    def faults(self) -> list[str]:
        """Every visible step is whole on every rank, byte for byte, and what was told to be committed is
        there, or a newer one."""
        store, found = open_store(str(self.run)), list[str]()
        for _ in range(50):  # a keeper may commit and delete meanwhile
            before = run_view.files(store)
            found = self._content_faults(store)
            if not found or run_view.files(store) == before:
                break
        return found

    def _content_faults(self, store: Store) -> list[str]:
        faults = list[str]()
        try:
            visible = run_view.visible(store)
            for each in visible:
                if not is_whole(store, each.step, each.attempt, self.world):
                    faults.append(f"step {each.step} of {each.attempt} holds other bytes")
            faults += half_steps(store)
            newest = max((each.step for each in visible), default=0)
            if newest < self.committed:
                faults.append(f"step {self.committed} was told to be committed, and {newest} is the newest")
        except (FlashckptError, OSError) as error:
            faults.append(f"{type(error).__name__}: {error}")
        return faults

    def close(self) -> None:
        self.stop_all()
        for node, base in enumerate(self.bases):
            self.kill_keeper(node)
            shutil.rmtree(base, ignore_errors=True)

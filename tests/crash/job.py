"""One run that is killed and started again, and everything that must hold whenever one looks.

Owns the processes of its run: a trainer at a time, forked by the zygote, and the keepers that serve its
runtime folder. A fault is a sentence; none is raised, so that one look finds all of them.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load

from flashckpt.errors import FlashckptError
from flashckpt.format.names import SnapshotId
from flashckpt.memory.cache_folder import open_cached
from flashckpt.memory.region import is_region_name
from flashckpt.store import open_store
from flashckpt.store.base import Store
from tests import run_view
from tests.commit.runs import half_steps
from tests.crash import tiny
from tests.crash.tiny import RESUMED, STEP, Record
from tests.descriptors import readable
from tests.processes import end, is_stopped, keepers_of
from tests.waiting import pause_s, until
from tests.zygote import DEVNULL, Zygote

LIMIT_S = 240.0
# Slots of a rank and the larger ones that they are about to replace, one that a resume may have read into
# beside them; and what slots share: the region that they name, and one that is about to be filled.
MOST_SLOTS, MOST_SHARED = 7, 2
# The step in flight and the one being copied.
MOST_LOST = 2


class Job:
    """`start` and the strikes change it, `faults` looks at it. `lives` is how often it was started. `url`:
    where the run is, unless in a folder. `cache`: a folder on another device, which no strike touches."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        runtime: Path,
        reference: list[int],
        url: str = "",
        cache: Path | None = None,
    ) -> None:
        self.zygote, self.runtime, self.reference = zygote, runtime, reference
        self.run, self._folder, self._cache = folder / "run", folder, cache
        self.url = url or str(self.run)
        self.lives = 0
        # The process id of the trainer; -1 if no trainer lives.
        self.trainer = self._pidfd = -1
        # What the next life must go on from at least, and at most.
        self._floor = self._ceiling = 0
        self._expected_life = 1
        self._keeper_struck = 0
        self._done, self._steady = 0, False

    # ---- lives

    @property
    def log(self) -> Path:
        return self._folder / f"log-{self.lives}"

    @property
    def said(self) -> str:
        """What the trainers wrote to their standard error."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "stderr").read_text()
        return ""

    def keepers(self) -> list[int]:
        return keepers_of(self.runtime)

    def start(self, *, armed: str = "", **how: object) -> None:
        """A new life. armed: a crash point, for it and for the keepers that it starts."""
        assert self.trainer < 0
        self.lives += 1
        environment = {
            **os.environ,
            "FLASHCKPT_RUNTIME": str(self.runtime),
            "FLASHCKPT_CRASH_AT": armed,
            # The scheduler says that this is a restart: who finds another runtime folder need not watch.
            "SLURM_JOB_ID": "1",
            "SLURM_RESTART_COUNT": str(self.lives),
        }
        steps = len(self.reference) - 1
        cached = {} if self._cache is None else {"cache": str(self._cache)}
        arguments = {"run": self.url, "log": str(self.log), "steps": steps, **cached, **how}
        program = ["tests.crash.trainer", "train", json.dumps(arguments)]
        with open(self._folder / "stderr", "ab") as said:
            self._process = self.zygote.start(
                program, stdin=DEVNULL, stdout=said, stderr=said, env=environment
            )
        self.trainer = self._process.pid
        self._pidfd = os.pidfd_open(self.trainer)

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether the trainer has ended by now, or does within the time."""
        return bool(readable(self._pidfd, timeout_s=timeout_s))

    def status(self) -> int:
        """The exit status of the trainer that has ended; its life is over with it."""
        status = self._process.wait()
        os.close(self._pidfd)
        self.trainer = self._pidfd = -1
        return status

    def lives_on(self) -> bool:
        return self.trainer > 0 and not self.ended()

    def kill_trainer_if_alive(self) -> None:
        if self.trainer > 0:
            self.kill_trainer()

    def stands_at(self, step: int) -> bool:
        """Whether all bodies up to a step's are done: a trainer that is held in it stands there."""
        return any(each.kind == STEP and each.step >= step for each in tiny.records(str(self.log)))

    def kill_trainer(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        assert self.ended(LIMIT_S)
        self.status()

    def stopped(self) -> int | None:
        """The pid of a process of this run that has stopped itself, None where none has."""
        return next((pid for pid in (self.trainer, *self.keepers()) if pid > 0 and is_stopped(pid)), None)

    def let_go_on(self) -> None:
        """Whoever has stopped itself goes on: a keeper that a trainer starts anew is armed as well."""
        pid = self.stopped()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill_keepers(self) -> bool:
        """Whether there was one."""
        found = self.keepers()
        end(found)
        self._keeper_struck = self.lives if found else self._keeper_struck
        return bool(found)

    def forget_memory(self) -> None:
        """What lay in memory is gone, as after the loss of a node. Nobody may live."""
        for entry in self.runtime.iterdir():
            shutil.rmtree(entry)

    def boundaries(self) -> int:
        """Records of this life so far: its own start, and each body that was done."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.log).st_size // tiny.RECORD_BYTES
        return 0

    def await_(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
        """Look until it is so (True) or the trainer has ended (False). The moment counts: no long sleeps."""
        end_s = time.monotonic() + limit_s
        while True:
            began_s = time.monotonic()
            if condition():
                return True
            if self.ended(pause_s(time.monotonic() - began_s)):
                return False
            assert time.monotonic() < end_s, f"nothing happened for {limit_s:.0f} s: {self.said}"

    # ---- what must hold

    def faults(self) -> list[str]:
        """Everything that is wrong now, whoever lives meanwhile."""
        found = self._log_faults()
        if self._has_version():
            found += self._run_faults(open_store(self.url))
        for kind, most in (("slot", MOST_SLOTS), ("constants", MOST_SHARED)):
            names = [name for name in self.names() if is_region_name(name) and name.startswith(f"{kind}-")]
            if len(names) > most:
                found.append(f"{len(names)} regions of the kind {kind} lie in memory: {names}")
        return found

    def expect(self, *, memory: bool) -> None:
        """The trainer is dead: remember what its next life must go on from. memory: whether slots, or a
        keeper that holds them, are still there."""
        resumed = self.resumed()
        if resumed is not None:
            steps = [each for each in tiny.records(str(self.log)) if each.kind == STEP]
            self._done = self._ceiling = max((each.step for each in steps), default=resumed.step)
            self._floor = max([resumed.step, *(each.sealed for each in steps)])
            self._steady = _is_steady(steps)
        if not memory:
            self.expect_exactly(max(self.resumable(), default=0))
            self._expect_cached()
        self._expected_life = self.lives + 1

    def expect_exactly(self, step: int) -> None:
        """The next life goes on from this step: memory is gone, or the run was branched there."""
        self._floor = self._ceiling = step
        self._steady = False

    def _expect_cached(self) -> None:
        """What the cache has of the newest attempt that has started, and what that one began from, is not
        lost with memory. Of older attempts only their common history with it counts."""
        if self._cache is None or not self._has_version():
            return
        store, found = open_store(self.url), cached_in(self._cache)
        newest = run_view.newest_attempt(store)
        parent = None if newest is None else run_view.parent_of(store, newest)
        sure = [step for id, step in found.items() if id.attempt == newest or id == parent]
        self._floor = max([self._floor, *sure])
        self._ceiling = max([self._ceiling, *found.values()])

    def settle(self) -> None:
        """Wait until the keeper has committed what the dead trainer had sealed."""

        def is_settled() -> bool:
            return not self.keepers() or max(self.visible(), default=0) >= self._floor

        until(is_settled, f"step {self._floor}, which was sealed, to be committed", LIMIT_S)

    def visible(self) -> list[int]:
        return [each.step for each in run_view.visible(open_store(self.url))] if self._has_version() else []

    def _has_version(self) -> bool:
        """A start that was killed may have left the temporary file of the first version, and no more."""
        return any(entry.name[0].isdigit() for entry in open_store(self.url).list("catalogue"))

    def resumable(self) -> list[int]:
        """The visible steps, and that which the next start commits: a keeper died before its manifest."""
        found = self.visible()
        return [*found, *(each.step for each in run_view.committed_next(open_store(self.url)))]

    def resumed(self) -> Record | None:
        """How the newest life began, None while it has not."""
        return next((record for record in tiny.records(str(self.log)) if record.kind == RESUMED), None)

    def lost(self) -> int | None:
        """Steps that were done before this life and are done again. None where that says nothing: memory
        was lost, snapshots had not begun or were skipped, or this life has not begun."""
        resumed = self.resumed()
        if resumed is None or self.lives != self._expected_life or not self._steady:
            return None
        return self._done - resumed.step

    def _log_faults(self) -> list[str]:
        known, faults = tiny.records(str(self.log)), []
        for record in known:
            if record.digest != self.reference[record.step]:
                faults.append(f"life {self.lives}: the weights of step {record.step} are others")
        resumed = self.resumed() if self.lives == self._expected_life else None
        if resumed is not None and not self._floor <= resumed.step <= self._ceiling:
            faults.append(
                f"life {self.lives} went on from step {resumed.step} ({tiny.TIERS[resumed.sealed]}), where "
                f"{self._floor} to {self._ceiling} were there"
            )
        if (self.lost() or 0) > MOST_LOST:
            faults.append(f"life {self.lives} lost {self.lost()} steps")
        return faults

    def _run_faults(self, store: Store) -> list[str]:
        """A keeper may commit and prune meanwhile: what is wrong must be so while nothing changes."""
        found: list[str] = []
        for _ in range(50):
            before = run_view.files(store)
            found = self._content_faults(store) + half_steps(store)
            if not found or run_view.files(store) == before:
                return found
        return [f"the run never stands still: {found}"]

    def _content_faults(self, store: Store) -> list[str]:
        faults = []
        try:
            faults += [
                f"{row.file} of step {row.step}: {row.status}" for row in run_view.verify(store).damaged
            ]
            for each in run_view.visible(store):
                found = run_view.read(store, each)
                leaves = load(store.read(found.shard_path(0), 1 << 30))
                for constants, _ in found.files(0)[1:]:
                    leaves |= load(store.read(constants, 1 << 30))
                if tiny.digest_of(leaves) != self.reference[each.step]:
                    faults.append(f"step {each.step} of {each.attempt} holds other weights")
        except (FlashckptError, OSError) as error:
            faults.append(f"{type(error).__name__}: {error}")
        return faults

    # ---- the end

    def finish(self) -> list[str]:
        """Train to the end, wait until the keeper has left, and look at what remains. After the end of a
        life whose keeper was killed nobody may be there to clear up: the next life's keeper does."""
        if self.trainer < 0:
            self.start()
        until(self._has_ended, "the end of the last life", LIMIT_S)
        status = self.status()
        if status:
            return [f"the last life ended with status {status}: {self.said[-2000:]}"]
        if self._keeper_struck == self.lives:
            return self.faults() + self.finish()
        found = self.faults()
        last = len(self.reference) - 1
        if self.visible()[-1:] != [last]:
            found.append(f"the run ends at {self.visible()}, not at {last}")
        return found + self._left_behind()

    def _has_ended(self) -> bool:
        self.let_go_on()
        return not self.lives_on()

    def _left_behind(self) -> list[str]:
        end_s = time.monotonic() + LIMIT_S
        # Both until there is nothing: a folder is listed name by name, and a keeper may be leaving meanwhile.
        while left := [*self.keepers(), *self.names(), *self._cached_files()]:
            if time.monotonic() > end_s:
                return [f"{left} stay after the end: {self.told()}"]
            self.let_go_on()
            time.sleep(0.02)
        return []

    def _cached_files(self) -> list[str]:
        return [] if self._cache is None else [str(path) for path in self._cache.rglob("*") if path.is_file()]

    def comes_down(self, name: str, most: int) -> bool:
        """Whether a size that is too large is not, within the limit."""
        end_s = time.monotonic() + LIMIT_S
        while self.sizes()[name] > most:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def told(self) -> str:
        """All that says why: what lies in memory, who lives, and the last words of trainers and keepers."""
        words = [f"in memory {self.names()}", f"keepers {self.keepers()}", f"trainers: {self.said[-3000:]}"]
        for path in self.runtime.rglob("keeper.log"):
            with contextlib.suppress(OSError):
                words.append(f"{path.name}: {path.read_text(errors='replace')[-3000:]}")
        store = open_store(self.url)
        for entry in store.list("events")[-4:]:
            with contextlib.suppress(OSError):
                said = store.read(f"events/{entry.name}", 1 << 30).decode(errors="replace")
                words.append(f"{entry.name}: {said[-3000:]}")
        return "\n".join(words)

    def names(self) -> list[str]:
        """What lies in the runtime folder."""
        found = [name for _, _, names in os.walk(self.runtime) for name in names]
        return sorted(name for name in found if name != "memory_budget.lock")

    def sizes(self) -> dict[str, int]:
        """What must not grow: files of the run but for its ledger, names in memory, descriptors."""
        # A keeper deletes beside this: `os.walk` passes over what is gone.
        found = [(folder, name) for folder, _, names in os.walk(self.run) for name in names]
        files = [name for folder, name in found if os.path.basename(folder) != "events"]
        keepers = self.keepers()
        descriptors = [0]
        for pid in keepers:
            with contextlib.suppress(OSError):
                descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
        return {
            "files": len(files),
            "names in memory": len(self.names()),
            "keepers": len(keepers),
            "keeper descriptors": max(descriptors),
        }


def cached_in(cache: Path) -> dict[SnapshotId, int]:
    """The snapshots in a cache, with their steps."""
    found = {}
    for path in cache.rglob("slot-*"):
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(open_cached(str(path))) as slot:
            if (sealed := slot.sealed()) is not None:
                found[sealed.id] = sealed.step
    return found


def none(faults: list[str]) -> None:
    """Fail with all of them, whole: pytest shortens what an assertion compares."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def reference_of(zygote: Zygote, steps: int) -> list[int]:
    """The digests after 0, 1, … steps of a loop that nothing of this library has touched."""
    done = zygote.run(["tests.crash.trainer", "reference", str(steps)])
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


def _is_steady(steps: list[Record]) -> bool:
    """Whether the last boundaries of a life each had a snapshot."""
    last = steps[-4:]
    return len(last) == 4 and last[0].sealed >= 0 and last[0].skipped == last[-1].skipped

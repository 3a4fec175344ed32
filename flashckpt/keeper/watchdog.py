"""The watchdog: trainers that live and pass no boundaries any more.

Owns the judgement that a trainer is stuck, what is told of it (its Python stacks, what the kernel says of its
process) and, where its options say so, its end. It reads the heartbeats on the control pages, and counts only
the time that it has seen pass itself: neither a suspended machine nor a keeper that was stopped makes a
trainer stuck. One that is stopped by a signal or a debugger is told as that, and never ended. Signals go to
nobody but the process that holds the trainer's life lock; that for stacks only if it has a handler for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from flashckpt.errors import KeeperError
from flashckpt.keeper.trainers import Roster, Trainer
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import RuntimeFolder, holder_of, stacks_name
from flashckpt.memory.slot import Heartbeat, Slot
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.worker import Worker

log = logging.getLogger(__name__)

# More than this between two looks is time in which this process did not run itself.
_LONGEST_GAP_S = 2.0
# A process is looked at once its boundary is so late: most never are.
_LATE_S = 1.0
# What is sealed outlives the trainer: an end does not wait for storage that hangs.
_PERSIST_LIMIT_S = 300.0
# How long stacks are waited for, and how long they must have stood still to be whole.
_SIGNAL_LIMIT_S = 10.0
_SETTLED_S = 0.5
_LOOK_S = 0.05
_PY_SPY_LIMIT_S = 30.0
_MOST_READ_BYTES = 256 << 10
# A ledger's line has 32 KiB.
_MOST_TOLD_BYTES = 20 << 10
_MOST_LINE = 500


@dataclass
class Silence:
    """How long one trainer has passed no boundary: `quiet_s` are seconds in which it ran, `still_s` those in
    which it was held still. `told` is the event that was written of it, if one was."""

    trainer: Trainer
    heartbeat: Heartbeat
    looked_s: float
    quiet_s: float = 0.0
    still_s: float = 0.0
    told: Event | None = None
    told_s: float = 0.0
    asking: bool = False
    ended: bool = False


class Watchdog:
    """`look` is called several times a second, by the keeper's loop."""

    def __init__(
        self,
        folder: RuntimeFolder,
        regions: Regions,
        roster: Roster,
        ledger: Ledger,
        queue: Queue,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._regions, self._roster, self._ledger = folder, regions, roster, ledger
        self._queue, self._worker, self._clock = queue, worker, clock
        self._silences: dict[str, Silence] = {}

    def look(self) -> None:
        heartbeats = self._heartbeats()
        watched = {
            each.lock: each for each in self._roster.all() if not each.closing and each.lock in heartbeats
        }
        for lock in self._silences.keys() - watched.keys():
            silence = self._silences.pop(lock)
            # It may have gone on and come to its end since the last look.
            if _differ(silence.heartbeat, heartbeats.get(lock, silence.heartbeat)):
                self._moved(silence.trainer, silence, heartbeats[lock])
        now = self._clock()
        for lock, trainer in watched.items():
            if lock not in self._silences:
                self._silences[lock] = self._begun(trainer, heartbeats[lock], now)
                continue
            silence = self._silences[lock]
            gap_s = min(now - silence.looked_s, _LONGEST_GAP_S)
            silence.trainer, silence.looked_s = trainer, now
            if _differ(silence.heartbeat, heartbeats[lock]):
                self._moved(trainer, silence, heartbeats[lock])
            elif silence.heartbeat.patience_ns:
                self._waited(trainer, silence, gap_s)

    def _heartbeats(self) -> dict[str, Heartbeat]:
        """The newest heartbeat of each trainer, by the life lock of who wrote it."""
        heartbeats: dict[str, Heartbeat] = {}
        for each in self._regions.slots():
            heartbeat, lock = each.slot.heartbeat, self._lock_of(each.slot)
            if lock is not None:
                known = heartbeats.get(lock, heartbeat)
                heartbeats[lock] = max(known, heartbeat, key=lambda beat: beat.beat_ns)
        return heartbeats

    def _lock_of(self, slot: Slot) -> str | None:
        owner = slot.owner(slot.heartbeat.owner)
        return None if owner is None else owner[1]

    def _remember(self, trainer: Trainer, boundaries: int, beat_ns: int) -> None:
        """On the slots, where the next keeper finds it."""
        for each in self._regions.slots():
            if self._lock_of(each.slot) == trainer.lock:
                each.slot.set_stuck(boundaries, beat_ns)

    def _begun(self, trainer: Trainer, heartbeat: Heartbeat, now: float) -> Silence:
        """A hang that the keeper before has told of is not told again, but its end is."""
        silence = Silence(trainer, heartbeat, now)
        told = {each.slot.stuck for each in self._regions.slots() if self._lock_of(each.slot) == trainer.lock}
        boundaries, since = max(told, key=lambda stuck: stuck[1], default=(0, 0))
        if since:
            silence.told, silence.told_s = Event.STUCK, now
            before = heartbeat._replace(boundaries=boundaries, beat_ns=since, patience_ns=1)
            if _differ(before, heartbeat):
                silence.heartbeat = before
                self._moved(trainer, silence, heartbeat)
            else:
                self._queue.rescue(trainer.rank)
        return silence

    # What a look comes to

    def _moved(self, trainer: Trainer, silence: Silence, heartbeat: Heartbeat) -> None:
        before, told = silence.heartbeat, silence.told
        silence.heartbeat, silence.quiet_s, silence.still_s = heartbeat, 0.0, 0.0
        silence.told, silence.ended = None, False
        if told is not None:
            self._goes_on(trainer, before, heartbeat)

    def _goes_on(self, trainer: Trainer, before: Heartbeat, heartbeat: Heartbeat) -> None:
        end_ns = heartbeat.beat_ns if heartbeat.beat_ns > before.beat_ns else time.monotonic_ns()
        seconds = round((end_ns - before.beat_ns) / 1e9, 1)
        log.warning("trainer %d goes on: it had passed no boundary for %.1f s", trainer.pid, seconds)
        self._tell(trainer, Event.GOES_ON, before, seconds=seconds)
        self._remember(trainer, 0, 0)

    def _waited(self, trainer: Trainer, silence: Silence, gap_s: float) -> None:
        silence.quiet_s += gap_s
        if silence.quiet_s + silence.still_s < min(_LATE_S, silence.heartbeat.patience_ns / 2e9):
            return
        if condition(trainer.pid).held_still:
            self._held_still(trainer, silence, gap_s)
            return
        silence.still_s = 0.0
        if silence.quiet_s * 1e9 < silence.heartbeat.patience_ns:
            return
        if silence.told is not Event.STUCK:
            self._ask(trainer, silence)
        elif trainer.kill_when_stuck and not silence.ended:
            self._end(trainer, silence)

    def _held_still(self, trainer: Trainer, silence: Silence, gap_s: float) -> None:
        """Whoever stopped it will continue it: from then on it has all of its time again."""
        silence.still_s, silence.quiet_s = silence.still_s + gap_s, 0.0
        if silence.told is None and silence.still_s * 1e9 >= silence.heartbeat.patience_ns:
            silence.told = Event.STOPPED
            log.warning("trainer %d is stopped, by a signal or a debugger; it is left alone", trainer.pid)
            self._tell(trainer, Event.STOPPED, silence.heartbeat, seconds=round(silence.still_s, 1))
            self._queue.rescue(trainer.rank)

    # A trainer that is stuck

    def _ask(self, trainer: Trainer, silence: Silence) -> None:
        """Its newest snapshot is persisted while its stacks are fetched."""
        if silence.asking or self._worker.busy:
            return
        silence.asking, asked = True, replace(silence)
        self._queue.rescue(trainer.rank)

        def done(evidence: Evidence | BaseException) -> None:
            silence.asking = False
            if isinstance(evidence, BaseException):
                log.error("the stacks of trainer %d were not had", trainer.pid, exc_info=evidence)
                evidence = Evidence((), "", repr(evidence))
            moved = _differ(silence.heartbeat, asked.heartbeat)
            if not moved and not evidence.stacks and condition(trainer.pid).held_still:
                return
            self._stuck(trainer, asked, evidence)
            if moved:
                self._goes_on(trainer, asked.heartbeat, silence.heartbeat)
            else:
                silence.told, silence.told_s = Event.STUCK, self._clock()

        self._worker.submit(partial(collect, self._folder, trainer.lock, trainer.stacks_signal), done)

    def _stuck(self, trainer: Trainer, asked: Silence, evidence: Evidence) -> None:
        heartbeat, seconds = asked.heartbeat, round(asked.quiet_s, 1)
        log.error(
            "trainer %d passes no boundaries for %.1f s: its newest snapshot is persisted%s",
            trainer.pid, seconds,
            "".join(f"\n    {line}" for line in evidence.stacks) or f" ({evidence.reason})",
        )  # fmt: skip
        self._tell(
            trainer,
            Event.STUCK,
            heartbeat,
            seconds=seconds,
            limit_seconds=round(heartbeat.patience_ns / 1e9, 1),
            state=condition(trainer.pid).state,
            stacks=list(evidence.stacks),
            source=evidence.source,
            reason=evidence.reason,
        )
        self._remember(trainer, heartbeat.boundaries, heartbeat.beat_ns)

    def _end(self, trainer: Trainer, silence: Silence) -> None:
        """SIGKILL: a handler of any other signal may itself wait for the boundary that does not come."""
        waited_s = self._clock() - silence.told_s
        if not self._queue.is_settled(trainer.rank) and waited_s < _PERSIST_LIMIT_S:
            return
        silence.ended = True
        try:
            with held(self._folder, trainer.lock) as process:
                if process is None:
                    raise ProcessLookupError("its process is gone, or of another pid namespace")
                if _differ(silence.heartbeat, self._heartbeats().get(trainer.lock, silence.heartbeat)):
                    silence.ended = False
                    return
                log.error("trainer %d is ended with SIGKILL, as its options say", trainer.pid)
                self._tell(trainer, Event.KILL, silence.heartbeat, saved=self._queue.is_saved(trainer.rank))
                signal.pidfd_send_signal(process[1], signal.SIGKILL)
        except (OSError, KeeperError) as error:
            log.error("trainer %d cannot be ended: %s", trainer.pid, error)
            self._tell(trainer, Event.ERROR, silence.heartbeat, what="kill", message=str(error))

    def _tell(self, trainer: Trainer, event: Event, heartbeat: Heartbeat, **fields: object) -> None:
        attempt = str(trainer.attempt) if trainer.attempt else None
        named = {"rank": trainer.rank, "pid": trainer.pid, "boundaries": heartbeat.boundaries}
        self._ledger.add(attempt, event, **named, **fields)


def _differ(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether a boundary was passed, or is no longer awaited, between the two."""
    seen = (one.boundaries, one.beat_ns, one.patience_ns == 0)
    return seen != (other.boundaries, other.beat_ns, other.patience_ns == 0)


# ---- what a process is doing


@dataclass(frozen=True)
class Evidence:
    """`stacks` are lines of text, `source` is "faulthandler" or "py-spy", "" where nothing could be read:
    then `reason` says why."""

    stacks: tuple[str, ...]
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Condition:
    """What the kernel says of a process. `held_still`: stopped by a signal, or by a debugger."""

    state: str = ""
    held_still: bool = False
    caught: int = 0


def condition(pid: int) -> Condition:
    """All empty for a process that is gone or cannot be seen."""
    state, tracer, caught = "", 0, 0
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key == "State":
                    state = value.strip()[:1]
                elif key == "TracerPid":
                    tracer = int(value)
                elif key == "SigCgt":
                    caught = int(value, 16)
    except (OSError, ValueError):
        return Condition()
    return Condition(state, state in ("T", "t") or tracer != 0, caught)


@contextlib.contextmanager
def held(folder: RuntimeFolder, lock: str) -> Iterator[tuple[int, int] | None]:
    """(pid, pidfd) of the process that holds a life lock, None where it is gone or not to be named. The
    descriptor means that very process: it held the lock before and after it was opened."""
    pid, descriptor = holder_of(folder, lock), -1
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid) if pid and pid != os.getpid() else -1
    if not pid or descriptor < 0:
        yield None
        return
    try:
        yield (pid, descriptor) if holder_of(folder, lock) == pid else None
    finally:
        os.close(descriptor)


def collect(folder: RuntimeFolder, lock: str, signal_number: int) -> Evidence:
    """The stacks of the holder of a life lock: by its own signal handler, else by py-spy."""
    try:
        with held(folder, lock) as process:
            if process is None:
                return Evidence((), "", "its process is gone, or of another pid namespace")
            pid, pidfd = process
            text, reason = _by_signal(folder, lock, pid, pidfd, signal_number)
            if text:
                return Evidence(_bounded(text), "faulthandler")
            text, why = _by_py_spy(pid)
            if text and holder_of(folder, lock) == pid:
                return Evidence(_bounded(text), "py-spy")
            return Evidence((), "", f"{reason}; {why}")
    except (OSError, KeeperError) as error:
        return Evidence((), "", str(error))


def _by_signal(folder: RuntimeFolder, lock: str, pid: int, pidfd: int, signal_number: int) -> tuple[str, str]:
    """The text, or why there is none."""
    # Without a handler a real-time signal is the process's end.
    if not signal_number or not condition(pid).caught >> (signal_number - 1) & 1:
        return "", "it has no signal handler for stacks"
    try:
        descriptor = folder.open_file(stacks_name(lock), os.O_RDWR)
    except (OSError, KeeperError) as error:
        return "", f"its file for stacks cannot be opened: {error}"
    try:
        os.ftruncate(descriptor, 0)
        signal.pidfd_send_signal(pidfd, signal_number)
        _settle(descriptor)
        text = os.pread(descriptor, _MOST_READ_BYTES, 0).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        return text, "its signal handler wrote nothing"
    finally:
        os.close(descriptor)


def _settle(descriptor: int) -> None:
    """Wait until stacks are written and no more come."""
    now = time.monotonic()
    until, size, grown = now + _SIGNAL_LIMIT_S, 0, now
    while now < until and (size == 0 or now - grown < _SETTLED_S):
        time.sleep(_LOOK_S)
        now = time.monotonic()
        found = os.fstat(descriptor).st_size
        if found != size:
            size, grown = found, now


def _by_py_spy(pid: int) -> tuple[str, str]:
    """The text, or why there is none. It reads the process from outside, without pausing it."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PY_SPY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode != 0:
        return "", f"py-spy: {done.stderr[:_MOST_LINE].decode(errors='replace').strip()}"
    return done.stdout[:_MOST_READ_BYTES].decode(errors="replace"), ""


def _bounded(text: str) -> tuple[str, ...]:
    """As many threads as a line of the ledger holds: who answered, the main one, the others."""
    threads = [block for block in text.replace("\nThread ", "\n\nThread ").split("\n\n") if block.strip()]
    last = threads[-1:]
    current = [block for block in threads[:-1] if block.startswith("Current thread")]
    rest = [block for block in threads[:-1] if block not in current]
    lines: list[str] = []
    num_bytes = 0
    for index, block in enumerate(current + last + rest):
        added = [line[:_MOST_LINE] for line in block.strip("\n").split("\n")]
        num_bytes += sum(len(json.dumps(line)) + 1 for line in added)
        if num_bytes > _MOST_TOLD_BYTES and lines:
            lines.append(f"… {len(threads) - index} more threads")
            break
        lines += added
    return tuple(lines)

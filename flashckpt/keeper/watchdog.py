"""The watchdog: finds trainers that live and pass no boundaries any more.

Owns the decision that a trainer is stuck, the report (its Python stacks, its process state) and, if its
options say so, its kill. Reads the heartbeats on the control pages, and counts only time in which it ran
itself: neither a suspended machine nor a stopped keeper makes a trainer stuck. Reports a trainer that a
signal or a debugger has stopped as stopped, and never kills it. Signals only the process that holds the
trainer's life lock, and for stacks only if it has a handler. A keeper that replaces another during a hang
reports it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from flashckpt.errors import KeeperError
from flashckpt.keeper.liveness import TrainerRegistry
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import RuntimeFolder, holder_of, stacks_name
from flashckpt.memory.slot import Heartbeat
from flashckpt.persist.job import Trainer
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_MAX_GAP_S = 2.0  # between two checks; during the rest this process did not run
_LATE_S = 1.0  # the process state is read once a boundary is so late
_PERSIST_TIMEOUT_S = 300.0  # a kill waits so long for storage: sealed snapshots outlive the trainer
_STACKS_TIMEOUT_S = 10.0
_SETTLED_S = 0.5  # stacks are complete once their file has not grown for so long
_POLL_S = 0.05
_MAX_READ_BYTES = 256 << 10
_MAX_REPORT_BYTES = 20 << 10  # of the 32 KiB of a line in the ledger
_MAX_LINE = 500
_GONE = "its process is gone, or of another pid namespace"


@dataclass
class Silence:
    """The time in which a trainer has passed no boundary: `quiet_s` while it ran, `still_s` while it was
    stopped. `reported`: the event that was written of it."""

    trainer: Trainer
    heartbeat: Heartbeat
    checked_s: float
    quiet_s: float = 0.0
    still_s: float = 0.0
    reported: Event | None = None
    reported_s: float = 0.0
    is_killed: bool = False


class Watchdog:
    """The keeper's loop calls `check` several times a second."""

    def __init__(
        self,
        folder: RuntimeFolder,
        regions: Regions,
        registry: TrainerRegistry,
        ledger: Ledger,
        queue: Queue,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._regions, self._registry, self._ledger = folder, regions, registry, ledger
        self._queue, self._worker, self._clock = queue, worker, clock
        self._silences: dict[str, Silence] = {}

    def check(self) -> None:
        heartbeats = self._heartbeats()
        watched = {
            each.lock: each for each in self._registry.all() if not each.closing and each.lock in heartbeats
        }
        for lock in self._silences.keys() - watched.keys():
            silence = self._silences.pop(lock)
            # It may have passed a boundary and ended since the last check.
            if _differ(silence.heartbeat, heartbeats.get(lock, silence.heartbeat)):
                self._passed(silence.trainer, silence, heartbeats[lock])
        now = self._clock()
        for lock, trainer in watched.items():
            if lock not in self._silences:
                self._silences[lock] = Silence(trainer, heartbeats[lock], now)
                continue
            silence = self._silences[lock]
            gap_s = min(now - silence.checked_s, _MAX_GAP_S)
            silence.trainer, silence.checked_s = trainer, now
            if _differ(silence.heartbeat, heartbeats[lock]):
                self._passed(trainer, silence, heartbeats[lock])
            elif silence.heartbeat.timeout_ns:
                self._waited(trainer, silence, gap_s)

    def _heartbeats(self) -> dict[str, Heartbeat]:
        """The newest heartbeat of each trainer, by its life lock."""
        heartbeats: dict[str, Heartbeat] = {}
        for each in self._regions.slots():
            heartbeat = each.slot.heartbeat
            if (owner := each.slot.owner(heartbeat.owner)) is not None:
                known = heartbeats.get(owner[1], heartbeat)
                heartbeats[owner[1]] = max(known, heartbeat, key=lambda beat: beat.beat_ns)
        return heartbeats

    # ---- boundaries

    def _passed(self, trainer: Trainer, silence: Silence, heartbeat: Heartbeat) -> None:
        before, reported = silence.heartbeat, silence.reported
        silence.heartbeat, silence.quiet_s, silence.still_s = heartbeat, 0.0, 0.0
        silence.reported, silence.is_killed = None, False
        if reported is not None:
            self._report_end(trainer, before, heartbeat)

    def _report_end(self, trainer: Trainer, before: Heartbeat, heartbeat: Heartbeat) -> None:
        end_ns = heartbeat.beat_ns if heartbeat.beat_ns > before.beat_ns else time.monotonic_ns()
        seconds = round((end_ns - before.beat_ns) / 1e9, 1)
        log.warning("trainer %d continues after %.1f s without a boundary", trainer.pid, seconds)
        self._note(trainer, Event.GOES_ON, before, seconds=seconds)

    def _waited(self, trainer: Trainer, silence: Silence, gap_s: float) -> None:
        silence.quiet_s += gap_s
        if silence.quiet_s + silence.still_s < min(_LATE_S, silence.heartbeat.timeout_ns / 2e9):
            return
        if condition(trainer.pid).is_stopped:
            self._report_stopped(trainer, silence, gap_s)
            return
        silence.still_s = 0.0
        if silence.quiet_s * 1e9 < silence.heartbeat.timeout_ns:
            return
        if silence.reported is not Event.STUCK:
            self._collect(trainer, silence)
        elif trainer.kill_when_stuck and not silence.is_killed:
            self._kill(trainer, silence)

    def _report_stopped(self, trainer: Trainer, silence: Silence, gap_s: float) -> None:
        """Report a stopped trainer. Its timeout begins again once it is continued."""
        silence.still_s, silence.quiet_s = silence.still_s + gap_s, 0.0
        if silence.reported is None and silence.still_s * 1e9 >= silence.heartbeat.timeout_ns:
            silence.reported = Event.STOPPED
            log.warning("trainer %d is stopped, by a signal or a debugger; it is left alone", trainer.pid)
            self._note(trainer, Event.STOPPED, silence.heartbeat, seconds=round(silence.still_s, 1))
            self._queue.rescue(trainer.rank)

    # ---- stuck trainers

    def _collect(self, trainer: Trainer, silence: Silence) -> None:
        """Collect its stacks, while its newest snapshot is persisted."""
        if self._worker.busy:
            return
        before = replace(silence)
        self._queue.rescue(trainer.rank)

        def done(evidence: Evidence | BaseException) -> None:
            if isinstance(evidence, BaseException):
                log.error("the stacks of trainer %d could not be read", trainer.pid, exc_info=evidence)
                evidence = Evidence((), repr(evidence))
            moved = _differ(silence.heartbeat, before.heartbeat)
            if not moved and not evidence.stacks and condition(trainer.pid).is_stopped:
                return
            self._report_stuck(trainer, before, evidence)
            if moved:
                self._report_end(trainer, before.heartbeat, silence.heartbeat)
            else:
                silence.reported, silence.reported_s = Event.STUCK, self._clock()

        self._worker.submit(partial(collect, self._folder, trainer.lock, trainer.stacks_signal), done)

    def _report_stuck(self, trainer: Trainer, silence: Silence, evidence: Evidence) -> None:
        heartbeat, seconds = silence.heartbeat, round(silence.quiet_s, 1)
        log.error(
            "trainer %d passes no boundaries for %.1f s: its newest snapshot is persisted%s",
            trainer.pid, seconds,
            "".join(f"\n    {line}" for line in evidence.stacks) or f" ({evidence.reason})",
        )  # fmt: skip
        self._note(
            trainer,
            Event.STUCK,
            heartbeat,
            seconds=seconds,
            limit_seconds=round(heartbeat.timeout_ns / 1e9, 1),
            state=condition(trainer.pid).state,
            stacks=list(evidence.stacks),
            reason=evidence.reason,
        )

    def _kill(self, trainer: Trainer, silence: Silence) -> None:
        """Send SIGKILL: the handler of any other signal may wait for a boundary, too."""
        waited_s = self._clock() - silence.reported_s
        if not self._queue.is_settled(trainer.rank) and waited_s < _PERSIST_TIMEOUT_S:
            return
        silence.is_killed = True
        try:
            with held(self._folder, trainer.lock) as process:
                if process is None:
                    raise ProcessLookupError(_GONE)
                if _differ(silence.heartbeat, self._heartbeats().get(trainer.lock, silence.heartbeat)):
                    silence.is_killed = False
                    return
                log.error("trainer %d is killed, as its options say", trainer.pid)
                self._note(trainer, Event.KILL, silence.heartbeat, saved=self._queue.is_saved(trainer.rank))
                signal.pidfd_send_signal(process[1], signal.SIGKILL)
        except (OSError, KeeperError) as error:
            log.error("trainer %d cannot be killed: %s", trainer.pid, error)
            self._note(trainer, Event.ERROR, silence.heartbeat, what="kill", message=str(error))

    def _note(self, trainer: Trainer, event: Event, heartbeat: Heartbeat, **fields: object) -> None:
        attempt = str(trainer.attempt) if trainer.attempt else None
        named = {"rank": trainer.rank, "pid": trainer.pid, "boundaries": heartbeat.boundaries}
        self._ledger.add(attempt, event, **named, **fields)


def _differ(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether a boundary was passed, or is no longer expected, between the two."""
    before = (one.boundaries, one.beat_ns, one.timeout_ns == 0)
    return before != (other.boundaries, other.beat_ns, other.timeout_ns == 0)


# ---- the state of a process


@dataclass(frozen=True)
class Evidence:
    """The stacks of a process, in lines, or the `reason` why they are missing."""

    stacks: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Condition:
    """The state of a process. `is_stopped`: by a signal, or by a debugger. `caught`: a mask of handled
    signals."""

    state: str = ""
    is_stopped: bool = False
    caught: int = 0


def condition(pid: int) -> Condition:
    """The state of a process; empty if it is gone or hidden."""
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
    """(pid, pidfd) of the process that holds a life lock, or None. The pidfd is of that process, which held
    the lock before and after it was opened."""
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
    """The stacks of the holder of a life lock, by its signal handler."""
    try:
        with held(folder, lock) as process:
            if process is None:
                return Evidence((), _GONE)
            pid, pidfd = process
            text, reason = _by_signal(folder, lock, pid, pidfd, signal_number)
            return Evidence(_bounded(text)) if text else Evidence((), reason)
    except (OSError, KeeperError) as error:
        return Evidence((), str(error))


def _by_signal(folder: RuntimeFolder, lock: str, pid: int, pidfd: int, signal_number: int) -> tuple[str, str]:
    """The text, or why there is none."""
    # Without a handler the signal would kill the process.
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
        text = os.pread(descriptor, _MAX_READ_BYTES, 0).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        return text, "its signal handler wrote nothing"
    finally:
        os.close(descriptor)


def _settle(descriptor: int) -> None:
    """Wait until the stacks are complete."""
    now = time.monotonic()
    until, size, grown = now + _STACKS_TIMEOUT_S, 0, now
    while now < until and (size == 0 or now - grown < _SETTLED_S):
        time.sleep(_POLL_S)
        now = time.monotonic()
        found = os.fstat(descriptor).st_size
        if found != size:
            size, grown = found, now


def _bounded(text: str) -> tuple[str, ...]:
    """As many threads as a line of the ledger holds: the one that answered, the main one, the others."""
    threads = [block for block in text.replace("\nThread ", "\n\nThread ").split("\n\n") if block.strip()]
    last = threads[-1:]
    current = [block for block in threads[:-1] if block.startswith("Current thread")]
    rest = [block for block in threads[:-1] if block not in current]
    lines: list[str] = []
    num_bytes = 0
    for index, block in enumerate(current + last + rest):
        added = [line[:_MAX_LINE] for line in block.strip("\n").split("\n")]
        num_bytes += sum(len(json.dumps(line)) + 1 for line in added)
        if num_bytes > _MAX_REPORT_BYTES and lines:
            lines.append(f"… {len(threads) - index} more threads")
            break
        lines += added
    return tuple(lines)

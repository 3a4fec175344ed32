"""The Checkpointer: what a training script holds. Owns the order of things at a boundary.

At a boundary the training thread counts the step and hands the capture a way to encode what is not a
tensor; it does no I/O, waits for no storage and takes no lock that another thread keeps. Everything
slow is the attendant's (its own thread) and the keeper's (its own process). Only `.wait()`, `.close()`,
the normal end of a loop and a `.save()` outside of one wait for storage, because they say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashckpt.capture.plan import bytes_of, local
from flashckpt.capture.ways import SMALL_BYTES
from flashckpt.checkpointer.batches import Batches, Epochs
from flashckpt.checkpointer.ending import stop_at_marked, watch_exit
from flashckpt.checkpointer.environment import describe_environment
from flashckpt.checkpointer.resumed import Resumed as Resumed
from flashckpt.errors import BoundaryError, FlashckptError, StateError, SupersededError
from flashckpt.events import Event, log
from flashckpt.format.typed import check_roundtrip, encode_json
from flashckpt.state import rng

if TYPE_CHECKING:
    from flashckpt.capture import Capture
    from flashckpt.checkpointer.attendant import Attendant
    from flashckpt.checkpointer.progress import Progress
    from flashckpt.checkpointer.read_ahead import Use
    from flashckpt.checkpointer.session import Session
    from flashckpt.checkpointer.signals import Signals
    from flashckpt.state.tree import Tree

# Captures of one boundary that are found torn before it is given up: each finds a safer way.
_TRIES = 4


class Checkpointer:
    """One run, attached to the live state. Made by `flashckpt.attach` and `flashckpt.loop`.

    `resumed` is None on a fresh run. All methods are called from the training thread.
    """

    resumed: Resumed | None

    def __init__(
        self,
        *,
        tree: Tree,
        progress: Progress,
        capture: Capture,
        session: Session,
        attendant: Attendant,
        use: Use,
        signals: Signals,
        resumed: Resumed | None,
    ) -> None:
        self._tree, self._progress, self._capture = tree, progress, capture
        self._session, self._attendant, self._use, self._signals = session, attendant, use, signals
        self.resumed = resumed
        self._environment = describe_environment()
        self._in_iteration = self._marked = self._stopping = self._closed = False
        # What is drawn between here and the loop is no part of the run: put back once more there.
        self._due_rng = rng.capture() if resumed is not None else None
        self._looped: list[object] = []
        self._unsaved: FlashckptError | None = None  # why the newest boundary that was due is not captured
        self._ordered_at: int | None = None
        self._process = os.getpid()
        self._began_s = time.perf_counter()
        self._last_report: dict[str, float] | None = None
        watch_exit(self)

    # ---- what a training script calls

    @property
    def completed(self) -> int:
        """The step: boundaries done since the run began. It goes on over restarts; counters of one's
        own do not."""
        return self._progress.step

    def batches(self, loader: Iterable[Any]) -> Batches:
        """An iterator over the loader's batches, from where the run stands, with a boundary after each.

        Going over one loader again and again is what `.epochs` is for: outside of it a second call with
        the same loader raises BoundaryError.
        """
        self._check_open()
        if not self._progress.manages_epochs:
            if any(each is loader for each in self._looped):
                raise BoundaryError(
                    "This loader was looped over before, and not inside Checkpointer.epochs: a resumed run "
                    "could not tell which of the code between the loops has run. Nothing was captured since "
                    "the last boundary. Write `for epoch in checkpointer.epochs(n):` around "
                    "`for batch in checkpointer.batches(loader):`.",
                    step=self.completed,
                )
            self._looped.append(loader)
        return Batches(self, loader)

    def epochs(self, epochs: int) -> Epochs:
        """Epoch numbers from the one the run stands in. What follows the batches of an epoch runs once."""
        self._check_open()
        return Epochs(self, epochs)

    def step(self) -> None:
        """Mark a boundary: all of this iteration is done. Inside `.batches` it marks the end of this
        iteration early, and is not counted again when the next batch is drawn."""
        self._check_open()
        if self._marked:
            return
        self._marked = self._in_iteration
        self._boundary()
        if not self._in_iteration:
            stop_at_marked(self)
        self._capture.pulse.expect()

    def save(self) -> None:
        """Take a snapshot that is persisted: of the next boundary when called in an iteration of
        `.batches`, at once anywhere else. There it is a boundary of its own, with a step of its own,
        unless the state is bit for bit what was captured last."""
        self._check_open()
        if self._in_iteration and not self._marked:
            self._ordered_at = self.completed
            self._capture.order()
            return
        with self._capture.pulse.resting():
            self._capture.wait()
            captured = self._attendant.newest_sealed_step() == self.completed
            if self._use.since_boundary() or (captured and not self._is_as_captured()):
                self._progress.step += 1
            self._capture_now(persist=True)

    def wait(self) -> None:
        """Wait until what is captured is committed. Raises PersistError if it could not be, and whatever
        kept a boundary that was due from being captured (StateError, OutOfRoomError)."""
        self._check_open()
        with self._capture.pulse.resting():
            self._capture.wait()
            self._attendant.wait_committed()
        if self._unsaved is not None:
            raise self._unsaved
        if self._ordered_at is not None and not self._in_iteration:
            raise self._attendant.not_captured(
                self._ordered_at + 1, "the iteration in which save() was called was left before its boundary"
            )

    def stop(self) -> None:
        """End the loop at the next boundary; that boundary is captured and committed."""
        self._stopping = True
        self._capture.order()

    @property
    def stopping(self) -> bool:
        """Whether the loop ends at its next boundary: code between epochs asks it after a stop."""
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the loop ends at its next boundary, or has: a signal's name, "notice file", "stop"; or None."""
        return self._signals.reason or ("stop" if self._stopping else None)

    def close(self) -> None:
        """Wait until what is captured is committed, then let the run go. Raises PersistError if it could
        not be; the run is let go all the same. A second call does nothing."""
        if self._closed or self._is_forked:
            return
        try:
            self.wait()
        finally:
            self._release(closed=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def report(self) -> dict[str, float]:
        """What checkpoints cost so far: seconds of the loop and of the captures in it, snapshots taken
        and skipped, age in seconds of the newest sealed and of the newest committed snapshot. After the
        run was let go: as it stood then."""
        if self._last_report is not None:
            return dict(self._last_report)
        self._check_process()
        return {
            "loop_seconds": time.perf_counter() - self._began_s,
            **self._capture.report(),
            **self._attendant.report(),
        }

    # ---- what the iterators call

    def _before_boundary(self, *, holds_one: bool) -> None:
        """Before the boundary, not after it: one that is a lie must not have been captured."""
        self._use.before_batch(holds_one=holds_one)
        self._restore_rng()

    def _restore_rng(self) -> None:
        due, self._due_rng = self._due_rng, None
        if due is not None:
            rng.restore(due)

    def _begin_iteration(self) -> None:
        self._in_iteration, self._marked = True, False
        self._capture.pulse.expect()

    def _end_of_iteration(self) -> None:
        self._in_iteration = False
        if self._marked:
            self._marked = False
            return
        self._boundary()

    def _epoch_complete(self) -> bool:
        return not self._progress.phase_is_open

    def _end_of_epoch(self, *, last: bool) -> None:
        """The code after an epoch's batches is done: a boundary, and the last one is to be kept."""
        self._boundary(ordered=True)
        if last:
            self._capture_now(persist=True)

    def _abandon_iteration(self) -> None:
        """An iteration was left by `break` or an exception: what follows is in none."""
        if self._is_forked:
            return
        self._in_iteration = self._marked = False
        self._capture.pulse.rest()

    def _end_of_batches(self) -> None:
        """A loader has given its last batch. Inside `.epochs` the epoch's own end is captured; elsewhere
        nobody may come after, and what follows is no part of this boundary."""
        if self._progress.manages_epochs or self.completed == 0:
            return
        try:
            self._capture_now(persist=False)
        except FlashckptError as error:
            self._not_saved(error)

    def _finish(self) -> None:
        """The normal end of a whole run: its last boundary is captured and committed, then the run is
        let go."""
        if self._closed:
            return
        try:
            if self._progress.step > 0:
                self._capture_now(persist=True)
            self.wait()
        finally:
            self._release(closed=True)

    # ---- boundaries

    def _boundary(self, *, ordered: bool = False) -> None:
        """Count the step and let the capture decide whether this boundary is taken, or order it. Whatever
        goes wrong with the capture does not stop training: it is raised where the user waits."""
        self._check_open()
        newer = self._attendant.superseded_by
        if newer is not None:
            self._release()
            raise SupersededError(
                f"Attempt {newer} has claimed this run while this process was training it. Nothing is "
                f"lost: what was committed until step {self.completed} stands, and the newer attempt goes "
                "on from it. This process must end; start only one job on a run.",
                step=self.completed,
            )
        self._check_slots()
        if self._signals.reason is not None and not self._stopping:
            self.stop()
        self._progress.step += 1
        self._adopt_slots()
        try:
            if self._capture.boundary(self.completed, self._values, ordered=ordered).captured:
                self._saved()
        except Exception as error:
            self._not_saved(error)
        self._ask_for_slots()
        self._use.at_boundary()

    def _saved(self) -> None:
        self._unsaved = self._ordered_at = None
        self._attendant.fits()

    def _not_saved(self, error: Exception) -> None:
        """Said once; the next boundary tries again."""
        if self._unsaved is None:
            log.error("step %d is not saved, and training goes on: %s", self.completed, error)
        if not isinstance(error, FlashckptError):
            # Code of the user's own (a state_dict), or ours: the loop must not pay for either.
            found = StateError(f"The state of step {self.completed} could not be read: {error!r}.")
            found.__cause__ = error
            self._unsaved = found
        else:
            self._unsaved = error

    def _ask_for_slots(self, *, ordered: bool = False) -> None:
        """Once the size of the state is known, and again when it has outgrown its slots."""
        if not self._attendant.preparing:
            wanted = self._capture.room_wanted(ordered=ordered)
            if wanted is not None:
                self._attendant.prepare(*wanted)

    def _check_slots(self) -> None:
        """A run that cannot hold a single snapshot is stopped in its first steps, not found out about
        after a crash. Later shortages are skips and warnings: training has snapshots to fall back on."""
        error = self._attendant.slots_error
        if error is not None and not self._attendant.has_slots:
            self._release()
            raise error

    def _adopt_slots(self) -> None:
        ready = self._attendant.take_ready()
        if ready is not None:
            self._capture.set_slots(*ready)
            self._attendant.taken_up()

    def _capture_now(self, *, persist: bool) -> None:
        """Capture the present boundary, whatever the pace, and see it sealed, unless it is already.

        Raises PersistError where it cannot be sealed, OutOfRoomError where there is no memory for it,
        StateError where it holds what cannot be saved.
        """
        self._capture.wait()
        step, attendant, outgrown = self.completed, self._attendant, False
        tries, until_s = 0, min(time.monotonic() + attendant.patience_s, attendant.deadline_s())
        while attendant.newest_sealed_step() != step:
            if outgrown or not attendant.has_slots:
                self._ask_for_slots(ordered=True)
                attendant.ensure_slots()
            self._adopt_slots()
            outcome = self._capture.boundary(step, self._values, ordered=True)
            outgrown = self._capture.room_wanted() is not None
            if outcome.captured:
                self._capture.wait()
                tries += 1
            elif not outgrown:
                attendant.wait_for_room()
            if attendant.newest_sealed_step() != step and (tries >= _TRIES or time.monotonic() > until_s):
                raise attendant.not_captured(step, outcome.reason or "its copies were torn, each time")
        self._saved()
        self._use.at_boundary()
        if persist:
            attendant.request_persist()

    def _is_as_captured(self) -> bool:
        """Whether the newest sealed snapshot holds exactly the state as it is now."""
        found = self._attendant.newest_content()
        if found is None:
            return False
        metadata, image = found
        then = {leaf.name: digest for leaf, digest in zip(metadata.leaves, metadata.digests, strict=True)}
        values = json.loads(encode_json(self._tree.values(self._capture.hooks.used_up)))
        if self._use.digests() != then or json.loads(metadata.values)["state"] != values:
            return False
        # A short mask or table may change and keep its digest: of small leaves the bytes are compared.
        live = {each.name: local(each.tensor) for each in self._tree.walk(self._capture.hooks.used_up).leaves}
        return all(
            bytes(image[start : start + leaf.num_bytes]) == bytes_of(live[leaf.name])
            for leaf, start in zip(metadata.image.leaves, metadata.image.starts(), strict=True)
            if leaf.num_bytes < SMALL_BYTES
        )

    def _values(self) -> bytes:
        """What is not a tensor, as it is now, in typed JSON. Raises StateError with the path in the state."""
        state = self._tree.values(self._capture.hooks.used_up)
        try:
            return encode_json(
                {
                    "state": state,
                    "rng": rng.capture(),
                    "progress": self._progress.value(),
                    "environment": self._environment,
                }
            )
        except StateError:
            for name, value in state["entries"].items():
                check_roundtrip(value, name)
            raise

    def _release(self, *, closed: bool = False) -> None:
        """Let the run go. What is sealed stays with the keeper, which persists it."""
        if self._closed:
            return
        self._closed = True
        if self._is_forked:
            return  # a forked child unwinds: the run, its lock and its slots are the parent's
        with contextlib.ExitStack() as ends:  # each of them, whatever the others raise; last in, first out
            ends.callback(self._progress.close)
            ends.callback(self._session.close)
            ends.callback(self._attendant.close, closed=closed)
            ends.callback(self._attendant.event, Event.CLOSE, step=self.completed, normal=closed)
            ends.callback(self._capture.close)
            ends.callback(self._use.close)
            ends.callback(self._signals.close)
            # Slots are unmapped by these: nothing may look into them afterwards.
            self._last_report = self.report()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child of the process that attached: it has neither slots nor threads."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_forked:
            raise BoundaryError(
                "This is a forked child of the process that trains. Nothing was captured or changed: the run "
                "and its snapshots are the parent's. Let the child end without the Checkpointer."
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise BoundaryError(
                "This checkpointer has let its run go (its loop ended, or it was closed). Nothing was "
                "changed. Call flashckpt.attach or flashckpt.loop again to go on with the run."
            )

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._release()

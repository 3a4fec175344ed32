"""The Checkpointer: what a training script holds. Owns the order of things at a boundary.

At a boundary the training thread counts the step and hands the capture a way to encode what is not a
tensor; it does no I/O, waits for no storage and takes no lock that another thread keeps. Everything
slow is the attendant's (its own thread) and the keeper's (its own process). Only `.wait()`, `.close()`,
the normal end of a loop and a `.save()` outside of one wait for storage, because they say so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashckpt.checkpointer.batches import Batches, Epochs
from flashckpt.checkpointer.environment import describe_environment
from flashckpt.errors import BoundaryError, SupersededError
from flashckpt.events import Event
from flashckpt.format.typed import encode_json
from flashckpt.state import rng

if TYPE_CHECKING:
    from flashckpt.capture import Capture
    from flashckpt.checkpointer.attendant import Attendant
    from flashckpt.checkpointer.progress import Progress
    from flashckpt.checkpointer.read_ahead import Use
    from flashckpt.checkpointer.session import Session
    from flashckpt.state.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run went on from: the step, where it was read ("memory" or "local"), the attempt that made
    it, and the seconds from the call of `attach` until the live state was whole and verified."""

    step: int
    tier: str
    attempt: str
    seconds: float


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
        resumed: Resumed | None,
    ) -> None:
        self._tree, self._progress, self._capture = tree, progress, capture
        self._session, self._attendant, self._use = session, attendant, use
        self.resumed = resumed
        self._environment = describe_environment()
        self._in_iteration = self._marked = self._stopping = self._closed = False
        self._began_s = time.perf_counter()
        self._last_report: dict[str, float] | None = None

    # ---- what a training script calls

    @property
    def completed(self) -> int:
        """The step: boundaries done since the run began. It goes on over restarts; counters of one's
        own do not."""
        return self._progress.step

    def batches(self, loader: Iterable[Any]) -> Batches:
        """An iterator over the loader's batches, from where the run stands, with a boundary after each."""
        self._check_open()
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

    def save(self) -> None:
        """Take a snapshot that is persisted: of the next boundary when called in an iteration of
        `.batches`, at once anywhere else, where it marks a boundary if the state was used since the
        last one."""
        self._check_open()
        if self._in_iteration and not self._marked:
            self._capture.order()
            return
        if not self._in_iteration and self._use.since_boundary():
            self._progress.step += 1
        self._capture_now(persist=True)

    def wait(self) -> None:
        """Wait until what is captured is committed. Raises PersistError if it could not be."""
        self._check_open()
        self._capture.wait()
        self._attendant.wait_committed()

    def stop(self) -> None:
        """End the loop at the next boundary; that boundary is captured and committed."""
        self._stopping = True
        self._capture.order()

    @property
    def stopping(self) -> bool:
        """Whether the loop ends at its next boundary: code between epochs asks it after a stop."""
        return self._stopping

    def close(self) -> None:
        """Wait until what is captured is committed, then let the run go. Raises PersistError if it could
        not be; the run is let go all the same. A second call does nothing."""
        if self._closed:
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
        return {
            "loop_seconds": time.perf_counter() - self._began_s,
            **self._capture.report(),
            **self._attendant.report(),
        }

    # ---- what the iterators call

    def _before_batch(self, *, holds_one: bool) -> None:
        self._use.before_batch(holds_one=holds_one)

    def _begin_iteration(self) -> None:
        self._in_iteration, self._marked = True, False

    def _end_of_iteration(self) -> None:
        self._in_iteration = False
        if self._marked:
            self._marked = False
            return
        self._boundary()

    def _epoch_complete(self) -> bool:
        return not self._progress.phase_is_open

    def _end_of_epoch(self, *, last: bool) -> None:
        """The code after an epoch's batches is done: a boundary, and of the last epoch one to keep."""
        self._boundary()
        self._capture_now(persist=last)

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

    def _boundary(self) -> None:
        """Count the step and let the capture decide whether this boundary is taken."""
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
        self._progress.step += 1
        self._adopt_slots()
        self._capture.boundary(self._progress.step, self._values)
        self._ask_for_slots()
        self._use.at_boundary()

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

    def _capture_now(self, *, persist: bool) -> None:
        """Capture the present boundary, whatever the pace, unless it has been captured already."""
        self._capture.wait()
        if self._attendant.newest_sealed_step() != self._progress.step:
            self._ask_for_slots(ordered=True)
            self._attendant.ensure_slots()
            self._adopt_slots()
            while not self._capture.boundary(self._progress.step, self._values, ordered=True).captured:
                self._ask_for_slots(ordered=True)
                self._attendant.wait_for_room()
                self._adopt_slots()
            self._capture.wait()
            self._use.at_boundary()
        if persist:
            self._attendant.request_persist()

    def _values(self) -> bytes:
        """What is not a tensor, as it is now, in typed JSON."""
        return encode_json(
            {
                "state": self._tree.values(self._capture.hooks.used_up),
                "rng": rng.capture(),
                "progress": self._progress.value(),
                "environment": self._environment,
            }
        )

    def _release(self, *, closed: bool = False) -> None:
        """Let the run go. What is sealed stays with the keeper, which persists it."""
        if self._closed:
            return
        # Slots are unmapped below: nothing may look into them afterwards.
        self._last_report = self.report()
        self._closed = True
        self._use.close()
        self._capture.close()
        self._attendant.event(Event.CLOSE, step=self.completed, normal=closed)
        self._attendant.close(closed=closed)
        self._session.close()
        self._progress.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BoundaryError(
                "This checkpointer has let its run go (its loop ended, or it was closed). Nothing was "
                "changed. Call flashckpt.attach or flashckpt.loop again to go on with the run."
            )

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._release()

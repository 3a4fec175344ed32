"""The boundaries of an attached run: each is counted, captured if it is due or ordered, and its outcome is
kept.

`CaptureLoop` decides nothing about where a loop ends (`StopPolicy`); `Growth` requests memory. The training
thread waits for storage and memory only in `capture_now`, `capture_outside` and for the first slots.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from flashckpt import crashpoints
from flashckpt.capture import Verdict
from flashckpt.errors import DamagedError, FlashckptError, OutOfSpaceError, StateError
from flashckpt.format.typed import check_roundtrip, encode_json, too_large
from flashckpt.persist.ledger import Event
from flashckpt.state import rng

if TYPE_CHECKING:
    from flashckpt.capture import Capture
    from flashckpt.capture.engine import BoundaryResult
    from flashckpt.checkpointer.keeper_link import KeeperLink
    from flashckpt.checkpointer.progress import Progress, Use
    from flashckpt.memory.slot import Sealed, Slot
    from flashckpt.ranks.coordination import Coordination, StopPolicy
    from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)

# Captures of one boundary that are found torn before it is given up: each uses a safer way.
_TRIES = 4
# In the first steps of a run, little is lost with it.
_FIRST_BOUNDARIES = 32


class SaveOrder(Enum):
    """What save() has ordered and no boundary has fulfilled yet."""

    NONE = "nothing"
    NEXT = "the next boundary"
    PUT_OFF = "the next boundary; outside of an iteration, wait() captures at once instead"


class CaptureLoop:
    """Called from the training thread only.

    unsaved: why the newest boundary that was due is not captured. order: what save() has ordered, after the
    step `ordered_at`.
    """

    def __init__(
        self,
        tree: Tree,
        progress: Progress,
        capture: Capture,
        keeper_link: KeeperLink,
        use: Use,
        surroundings: Callable[[], dict[str, Any]],
        stop: StopPolicy,
        coordination: Coordination,
    ) -> None:
        self._tree, self._progress, self._capture = tree, progress, capture
        self._keeper_link, self._use, self._stop, self._coordination = keeper_link, use, stop, coordination
        self._slots, self._surroundings = keeper_link.slots, surroundings
        self._growth = Growth(capture, keeper_link)
        self._is_begun = self._has_required = False
        self.unsaved: FlashckptError | None = None
        self.order, self.ordered_at = SaveOrder.NONE, 0
        self._fulfilled = SaveOrder.NONE  # by the snapshot of the present boundary
        self._too_large: StateError | None = None
        self._left_iterations = 0  # 1 once an iteration was left by `break` in which something was trained
        self._left_at = -1  # the boundary index at which the newest iteration was left

    # ---- entering a boundary

    def begin(self) -> None:
        """Digest the constants before the first iteration or boundary. The first capture reports a
        failure."""
        if not self._is_begun:
            self._is_begun = True
            with contextlib.suppress(Exception):
                self._capture.digest_candidates()

    def enter(self) -> bool:
        """Enter the next boundary; return whether the loop ends at it. Among ranks, wait
        where they may all have to end.

        Raises what must end this run now: SupersededError if a newer attempt has begun, and the error
        for its first slots. A run that cannot hold a single snapshot is stopped in its first steps; later
        shortages are skips and warnings.
        """
        if self._keeper_link.superseded_by is not None:
            self._keeper_link.check_not_superseded(self._progress.step)
        slots, error = self._slots, self._slots.error
        has_slots = slots.ring is not None or slots.ready or slots.newest_own() is not None
        is_first = not slots.were_had or self._capture.heartbeat.boundaries <= _FIRST_BOUNDARIES
        if error is not None and not has_slots and not self._growth.keeps_region() and is_first:
            raise error
        index = self._capture.boundary_index + 1
        self._stop.enter(index)
        if self.order is SaveOrder.PUT_OFF:
            self.order = SaveOrder.NEXT
        if self._stop.begins_at(index):
            self._capture.order()
        return self._stop.stops_at(index)

    def settle(self) -> None:
        """The program continues: all that is captured from now on is of a later boundary."""
        self._capture.confirm()
        self._coordination.settle(self._capture.boundary_index)

    def order_next(self, *, put_off: bool = False) -> None:
        """Order that the next boundary is captured and persisted. put_off: see `SaveOrder`."""
        self.order, self.ordered_at = SaveOrder.PUT_OFF if put_off else SaveOrder.NEXT, self._progress.step
        self._capture.order()
        self._coordination.request_save(self._capture.boundary_index + 1)

    # ---- the boundaries of a loop

    def pass_boundary(self, *, held: bool = False, provisional: bool = False) -> None:
        """Count the step, and capture the boundary if it is due. A failure does not stop training: `wait()`
        raises it. held: the boundary of an epoch's last batch, in whose place the epoch's end is captured.
        provisional: whether a batch follows is unknown. Its snapshot is sealed by `settle`, or dropped by
        `withdraw`."""
        self._count()
        self._capture.boundary_index += 1
        if provisional:
            self._fulfilled = SaveOrder.NONE
            self._capture.begin_provisional()
        if held:
            self._slots.adopt()
            self._capture.pass_by(self._progress.step)
            self._request_slots()
            self._use.at_boundary()
        else:
            self._capture_if_due()

    def withdraw(self) -> None:
        """Drop the snapshot of a provisional boundary: no batch follows it. A resume there would begin in the
        code after the loop, whose variables the last batch has made."""
        if self._capture.withdraw() and self.order is SaveOrder.NONE:
            self.order = self._fulfilled

    def end_epoch(self, *, last: bool) -> None:
        """Pass the boundary of an epoch's end, with the step number of the epoch's last batch. last: no
        boundary follows, so this one is committed."""
        self.withdraw()  # what step() has marked, if the iterator was left and is still referenced
        if self._left_iterations or not self._progress.iterated:
            self._count(0)  # an epoch without batches counts as an iteration
        self._progress.next_epoch()
        self._capture.boundary_index += 1
        self._capture.wait()
        self._slots.adopt()  # first: what the smaller slots hold is persisted as they change hands
        if not last and self.order is SaveOrder.NONE:
            self._capture_if_due(ordered=True)
            return
        try:
            self.capture_now(persist=True)
        except FlashckptError as error:
            if last:
                raise
            self.not_saved(error)

    def leave_iteration(self) -> None:
        """An iteration of an epoch was left by `break`. It counts if something was trained in it, since what
        follows must not have the number of the boundary before it."""
        self._left_iterations |= self._use.trained_since_boundary

    def note_left(self) -> None:
        """Note that an iteration was left before its boundary."""
        self._left_at = self._capture.boundary_index

    def report_left(self, *, is_late: bool, raised: bool) -> None:
        """Log, as the run is released, what is not captured because no boundary followed it: a snapshot that
        save() ordered (is_late: in a call that did not end), or an iteration that was left. raised: an error
        is reported elsewhere."""
        step = self._progress.step
        if is_late or self.order is not SaveOrder.NONE:
            log.warning(
                "the snapshot that save() ordered after step %d was not taken: no boundary followed it. "
                "Call .stop() in the place of `break`: it ends a loop at a boundary",
                step if is_late else self.ordered_at,
            )
        elif self._left_at == self._capture.boundary_index and not raised:
            newest = self._slots.newest_own()
            captured = self._capture.captured_step or (0 if newest is None else newest.step)
            if captured == step and not self._use.may_have_trained:
                return
            log.warning(
                "the loop was left by `break` or an exception in the iteration after step %d, before its "
                "boundary: %s is not captured. To end a loop early, call .stop() in the place of `break`, or "
                "pass steps=: both capture the last iteration",
                step,
                f"what was trained after step {captured}, the newest captured one," if captured
                else "what was trained in this process",
            )  # fmt: skip

    def _count(self, iterations: int = 1) -> None:
        self._progress.count(iterations + self._left_iterations or 1)
        self._left_iterations = 0

    def _capture_if_due(self, *, ordered: bool = False) -> None:
        every_step = self._capture.schedule.every_step and not self._capture.hooks.is_undecided
        is_wanted = every_step or ordered or self._capture.is_ordered
        if is_wanted and self._slots.ring is None and not self._has_required:
            # Once: a keeper that gives no slots must not hold up every boundary after this one.
            self._has_required = True
            try:
                self._growth.require()
            except FlashckptError as error:
                self.not_saved(error)
        self._slots.adopt()
        is_ordered = self._capture.is_ordered
        try:
            outcome = self._capture.boundary(self._progress.step, self.values, ordered=ordered)
            self._growth.note(outcome)
            if outcome.captured:
                self._note_saved()
            elif (ordered or is_ordered) and self._coordination.order_binds:
                # The other ranks may capture it now too. It is persisted once all ranks have it.
                self.capture_now(persist=False)
        except Exception as error:
            self.not_saved(error)
        self._request_slots()
        self._use.at_boundary()

    def _request_slots(self) -> None:
        """Request slots if the next capture needs others. Reads the state for its size."""
        try:
            self._growth.ask()
        except RuntimeError as error:  # of a device, or of a state_dict
            self.not_saved(error)

    # ---- captures that the program waits for

    def capture_outside(self) -> None:
        """Capture a boundary of its own outside of an iteration, and persist it. If nothing has happened
        since the present boundary and it is captured, persist it. The step number is the next
        one, unless nothing has happened since the present step or an epoch's own code is running.

        Among ranks, all must call this. Raises BoundaryError if they do not, and as `capture_now`."""
        progress, coordination = self._progress, self._coordination
        with self._capture.heartbeat.resting():
            self._capture.confirm()  # the caller asks to save the present place
            self._capture.wait()
            index = self._capture.boundary_index
            coordination.save_outside(index + 1, self._keeper_link.deadline_s)
            is_unchanged = coordination.is_unchanged(not (index or progress.step), self._is_unchanged)
            if is_unchanged and self.is_captured:
                self._note_saved()
                self._use.at_boundary()
                self._slots.request_persist()
                return
            progress.step += not (is_unchanged or progress.is_after_batches)
            self._begin_another()
            self.capture_now(persist=True)
        self.settle()

    def capture_now(self, *, persist: bool) -> None:
        """Capture the present boundary, independent of the schedule, and wait until it is sealed.

        Raises PersistError if it cannot be sealed, OutOfSpaceError if there is no memory for it, StateError
        if the state cannot be saved.
        """
        self._capture.wait()
        if not self._is_to_capture(persist=persist):
            return
        # The background thread may not have set it yet, and without it this boundary would be incomplete too.
        if self._coordination.holds_whole:
            self._capture.hold_whole()
        slots, keeper_link, step = self._slots, self._keeper_link, self._progress.step
        tries, is_outgrown = 0, False
        until_s = min(time.monotonic() + keeper_link.timeout_s, keeper_link.deadline_s)
        while not self.is_captured:
            if is_outgrown or (slots.ring is None and not slots.ready):
                self._growth.require()
            slots.adopt()
            outcome = self._capture.boundary(step, self.values, ordered=True)
            is_outgrown = self._capture.memory_wanted() is not None
            if outcome.captured:
                self._capture.wait()
                tries += 1
            elif not is_outgrown:
                keeper_link.wait_for_free_slot()
            if not self.is_captured and (tries >= _TRIES or time.monotonic() > until_s):
                raise keeper_link.not_captured(step, outcome.reason or self._capture.lost_reason)
        self._note_saved()
        self._use.at_boundary()
        if persist:
            if self._capture.has_provisional:
                self._capture.confirm()
                self._capture.wait()
            slots.request_persist()

    @property
    def is_captured(self) -> bool:
        """Whether the newest snapshot of this attempt, sealed or provisional, is of the present boundary."""
        newest = self._slots.newest_own()
        is_sealed = newest is not None and newest.boundary == self._capture.boundary_index
        return is_sealed or self._capture.has_provisional

    def _is_to_capture(self, *, persist: bool) -> bool:
        """Among ranks, return whether the present boundary is still to be captured. If it is settled and not
        all ranks have it, which they all know, another boundary of the same step is."""
        index = self._capture.boundary_index
        if not self._coordination.is_settled(index):
            return True
        if index == 0:
            return False  # nothing has happened since the resume
        if self._coordination.outcome(index, self._keeper_link.deadline_s) == index:
            found = self._slots.of_boundary(index) if persist else None
            if found is not None:
                self._slots.request_persist_of(found)
            return False
        self._begin_another()
        return True

    def _begin_another(self) -> None:
        """Begin a boundary that no iteration ends. A stop is obeyed at the next one that does."""
        index = self._capture.boundary_index + 1
        self._stop.enter(index)
        self._capture.boundary_index = index

    def _is_unchanged(self) -> bool:
        """Whether nothing has happened since the present boundary: no use of the state was noticed and, if
        the boundary is captured, the state is bit for bit the captured one."""
        if self._use.used_since_boundary:
            return False
        return not self.is_captured or self._is_as_captured()

    def _is_as_captured(self) -> bool:
        newest = self._slots.newest_sealed()
        try:
            metadata = newest[0].metadata(newest[1]) if newest is not None else None
        except DamagedError:
            metadata = None
        if metadata is None:
            return False
        captured = {leaf.name: (leaf.dtype, leaf.shape, digest) for leaf, digest in metadata.counted()}
        try:
            values = json.loads(encode_json(self._tree.values(self._capture.hooks.used_up)))
        except StateError:  # the capture raises it, with the path in the state
            return False
        return self._use.digests() == captured and json.loads(metadata.values)["state"] == values

    # ---- what is captured, and its outcome

    def values(self) -> bytes:
        """Return all that is not a tensor, as it is now, in typed JSON. Raises StateError with the path in
        the state."""
        hooks, tree = self._capture.hooks, self._tree
        state, habits = tree.values(hooks.used_up), hooks.habits
        values = {
            "state": state,
            "gradients": {name: habits[id(each)] for name, each in tree.named_optimizers.items()},
            "rng": rng.capture(),
            "progress": self._progress.value(),
            "environment": self._surroundings(),
        }
        try:
            data = encode_json(values)
        except StateError:
            for name, value in state["entries"].items():
                check_roundtrip(value, name)
            raise
        if len(data) <= tree.most_values_bytes:
            self._too_large = None
            return data
        if self._too_large is None:  # once: to find the largest values costs as much as to encode them
            parts = {**tree.plain_values(state), "loaders": values["progress"]}
            self._too_large = too_large(parts, len(data), tree.most_values_bytes)
        raise self._too_large

    def not_saved(self, error: Exception) -> None:
        """Note why a boundary is not captured, and log it once. The next boundary tries again."""
        step = self._progress.step
        if self.unsaved is None:
            log.error("step %d is not saved, and training continues: %s", step, error)
            self._keeper_link.event(Event.ERROR, what="capture", step=step, message=str(error))
        if isinstance(error, FlashckptError):
            self.unsaved = error
        else:  # user code (a state_dict), or a bug here: the loop continues in both cases
            self.unsaved = StateError(f"The state of step {step} could not be read: {error!r}.")
            self.unsaved.__cause__ = error

    def _note_saved(self) -> None:
        self._fulfilled = self._fulfilled if self.order is SaveOrder.NONE else self.order
        self.unsaved, self.order, self._left_at = None, SaveOrder.NONE, -1
        self._slots.fits()


class Growth:
    """Slots for a state that grows: they are requested once its size is known, and again when it has outgrown
    them. Boundaries are skipped until larger slots are there. Owns the order in which scarce memory changes
    hands."""

    def __init__(self, capture: Capture, keeper_link: KeeperLink) -> None:
        self._capture, self._keeper_link, self._slots = capture, keeper_link, keeper_link.slots
        self._skipped, self._is_reported = 0, False

    def ask(self, *, ordered: bool = False) -> None:
        """Request slots if the next capture needs others than there are. If there is no memory for them
        beside the present ones, release what is not needed."""
        slots, capture = self._slots, self._capture
        is_refused = slots.error is not None
        if slots.preparing and slots.ring is None and not (is_refused and ordered):
            self._report()
            return  # they are coming: do not walk the state at each boundary for its size
        wanted = capture.memory_wanted(ordered=ordered)
        if wanted is None:
            if is_refused:
                slots.fits()
        elif not slots.ready:
            slots.ask(wanted, capture.region_wanted())
            is_short = isinstance(slots.error, OutOfSpaceError) and not ordered
            if is_short and not self._has_made_room():
                self._report()

    def require(self) -> None:
        """Request slots, and wait for them. Raises OutOfSpaceError or KeeperError if none can be had."""
        self.ask(ordered=True)
        while True:
            try:
                return self._keeper_link.wait_for_slots()
            except OutOfSpaceError:
                if not self._has_made_room(waits=True):
                    raise

    def note(self, outcome: BoundaryResult) -> None:
        """Note the outcome of a boundary."""
        if outcome.captured:
            if self._skipped:
                log.info("step %d fits its slots again, after %d skipped", outcome.step, self._skipped)
            self._skipped, self._is_reported = 0, False
        elif outcome.verdict is Verdict.SKIPPED and self._slots.ring is not None:
            is_outgrown = self._capture.memory_wanted() is not None
            if is_outgrown and not self._skipped:
                log.info(
                    "step %d is not captured: the state needs larger slots, which are requested", outcome.step
                )
            self._skipped += is_outgrown

    def keeps_region(self) -> bool:
        """If there is no memory for another region of constants, keep the former one, and request slots that
        hold the rest. Return False if there is no former one."""
        slots = self._slots
        is_short = isinstance(slots.error, OutOfSpaceError) and slots.empty_region is None
        if not is_short or not self._capture.keep_region():
            return False
        wanted = self._capture.memory_wanted(ordered=True)
        if wanted is not None:
            slots.ask(wanted)
        slots.ask_again()
        return True

    def _report(self) -> None:
        """Warn once that there is no memory for larger slots."""
        error, newest = self._slots.error, self._slots.newest_own()
        is_short = isinstance(error, OutOfSpaceError) and self._slots.were_had
        if is_short and not self._is_reported:
            self._is_reported = True
            log.warning(
                "boundaries are not captured, and training continues: %s The newest snapshot in memory is of "
                "%s. Slots are requested again every few seconds.",
                error, "no step" if newest is None else f"step {newest.step}",
            )  # fmt: skip

    def _has_made_room(self, *, waits: bool = False) -> bool:
        """If larger slots do not fit beside the present ones, persist the newest snapshot, then release
        another slot so that a larger one can be made. Return False if only the newest is left. waits: until
        the newest is persisted; otherwise a later boundary releases the slot."""
        slots = self._slots
        if self.keeps_region():
            return True
        if slots.ring is None or (slots.is_for_one and len(slots.ring.slots) == 1 and not slots.is_single):
            return False
        self._capture.wait()  # the newest may be in flight
        newest = slots.newest_sealed()
        others = [slot for slot in slots.ring.slots if newest is None or slot is not newest[0]]
        if slots.complete[0]:
            others = [slot for slot in others if not slots.is_needed(slot)]
        elif others or slots.is_single:
            if waits:
                self._keeper_link.wait_at_rest()
            elif not slots.is_at_rest():
                return True
            crashpoints.point("growth.persisted")
        if slots.is_single and newest is not None:
            slot, generation = newest[0], newest[1].generation
            if generation in (slot.persisted, slot.cached):
                others = [slot]
        if not others and slots.is_for_one:
            return False
        if others:
            self._capture.let_go(oldest := min(others, key=_age))
            slots.give_up(oldest)
        slots.ask_for_one()
        return True


def _age(slot: Slot) -> tuple[int, int, int]:
    """A sort key: empty slots first, then the oldest snapshot."""
    sealed: Sealed | None = None
    with contextlib.suppress(DamagedError):
        sealed = slot.sealed()
    return (-1, 0, 0) if sealed is None else sealed.age

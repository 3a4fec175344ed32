"""The boundaries of an attached run: counted, captured when the pace says so or at once, and what kept one
that was due from being captured. `StopPolicy` says where the loop ends, `Growth` which waits for slots."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashckpt import crashpoints
from flashckpt.capture import Verdict
from flashckpt.errors import DamagedError, FlashckptError, OutOfRoomError, StateError
from flashckpt.format.typed import check_roundtrip, encode_json, too_large
from flashckpt.persist.ledger import Event
from flashckpt.state import rng

if TYPE_CHECKING:
    from torch import Tensor

    from flashckpt.capture import Capture
    from flashckpt.capture.engine import BoundaryResult
    from flashckpt.checkpointer.attendant import Attendant
    from flashckpt.checkpointer.progress import Progress, Use
    from flashckpt.memory.slot import Sealed, Slot
    from flashckpt.ranks.pacing import Pacing
    from flashckpt.ranks.stop import StopPolicy
    from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)

# Captures of one boundary that are found torn before it is given up: each finds a safer way.
_TRIES = 4
# The first steps of a run, in which little is lost with it.
_FIRST_BOUNDARIES = 32

# So many boundaries in a row are skipped for want of room before one waits: larger slots are usually there by
# then, and a state that grows in every step would outgrow those, too, if none ever waited.
_SKIPPED = 2


class Boundaries:
    """Called from the training thread only. `unsaved` is why the newest boundary that was due is not
    captured; `ordered_at` the step after which a capture was ordered that no boundary has answered yet;
    `waited` counts the boundaries that waited for larger slots."""

    def __init__(
        self,
        tree: Tree,
        progress: Progress,
        capture: Capture,
        attendant: Attendant,
        use: Use,
        surroundings: Callable[[], dict[str, Any]],
        stop: StopPolicy,
        pacing: Pacing,
    ) -> None:
        self._tree, self._progress, self._capture = tree, progress, capture
        self._attendant, self._use, self._stop, self._pacing = attendant, use, stop, pacing
        self._slots, self._surroundings = attendant.slots, surroundings
        self._growth = Growth(capture, attendant, stop)
        self.waited = 0
        self._asked_first = self._has_begun = False
        self.unsaved: FlashckptError | None = None
        self.ordered_at: int | None = None
        self._too_large: StateError | None = None
        self._in_code = False  # the newest capture was made in the code after an epoch's batches
        self._next_ordered = False
        self._left = False  # an iteration was left by `break` after something was trained in it
        # Whose number a snapshot may have had, on any rank: that of the step that the run goes on from is
        # one.
        self._taken_step = progress.step or -1

    def check(self) -> None:
        """Raises what must end this run now: SupersededError where a newer attempt has claimed it, and what
        kept its first slots from being had. A run that cannot hold a single snapshot is stopped in its first
        steps, not found out about after a crash; later shortages are skips and warnings, also that of a state
        which has outgrown its slots before a snapshot was due."""
        self._attendant.check_not_superseded(self._progress.step)
        slots, error = self._slots, self._slots.error
        if error is None or slots.ring is not None or slots.ready or slots.newest_own() is not None:
            return
        if self._growth.keeps_region():
            return
        if not slots.were_had or self._capture.heartbeat.boundaries <= _FIRST_BOUNDARIES:
            raise error

    def begin(self) -> None:
        """The first iteration begins, or the first boundary: what is constant is to be as it is now. A
        failure is one of the state's, which the first capture tells."""
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(Exception):
                self._capture.look()

    def enter(self, step: int) -> int:
        """The next boundary is entered, after that many steps: its ordinal. Waits, among ranks, where they
        may all have to end."""
        ordinal = self._capture.ordinal + 1
        self._stop.enter(ordinal, step)
        return ordinal

    def settle(self) -> None:
        """The program goes on: what is captured from now on is of a boundary to come."""
        self._pacing.settle(self._capture.ordinal)

    def order(self) -> None:
        """The next boundary is to be captured and persisted."""
        self.ordered_at = self._progress.step
        self._capture.order()
        self._pacing.save_inside(self._capture.ordinal + 1)

    def pass_one(self, *, held: bool) -> None:
        """Count the step and let the capture decide whether this boundary is taken. Whatever goes wrong with
        the capture does not stop training: it is raised where the user waits.

        `held`: the boundary of an epoch's last batch. It is captured at the end of the epoch, once the
        epoch's own code is done: a snapshot from before it and one from after it would have one number."""
        self._count()
        self._capture.ordinal += 1
        ordered, self._next_ordered, self._in_code = self._next_ordered, False, False
        if held:
            self._slots.adopt()
            self._capture.pass_by(self._progress.step)
            self._ask()
            self._use.at_boundary()
        else:
            self._capture_here(ordered=ordered)

    def end_epoch(self, *, last: bool) -> None:
        """The code after an epoch's batches is done. Its state is that of the step of the epoch's last batch,
        unless that number was given away: then, where nothing goes on from here or what has it holds a part
        of this epoch's code, it is a step of its own. `last`: no boundary follows; it is committed."""
        if self._left or not self._progress.iterated:
            self._count(0)  # an epoch that takes no batches here is an iteration itself
        self._progress.next_epoch()
        self._capture.ordinal += 1  # it may have the step of the boundary before, and is another
        self._capture.wait()
        self._slots.adopt()  # first: what the smaller ones hold is asked for as they change hands
        if self._is_given_away(last):
            if self._in_code or (last and not (self._pacing.is_alone and self._is_as_captured())):
                self._progress.step += 1
            elif last:
                self._saved()
                self._slots.request_persist()
                return
            else:
                self._next_ordered = True
                return
        self._in_code = False
        is_saved = last or self.ordered_at is not None  # by save(), in the epoch's code
        if not is_saved and self._newest_here() is None:
            self._capture_here(ordered=True)
            return
        try:
            self._supersede(persist=is_saved)
        except FlashckptError as error:
            if last:
                raise
            self.not_saved(error)

    def _supersede(self, *, persist: bool) -> None:
        """Capture the present boundary anew; what was captured of it before is let go once that is sealed,
        and before anybody asks for the new one: two that are to be persisted under one number would leave
        either on disk."""
        before = self._newest_here()
        if not self.capture_now(persist=False, anew=True, may_count=persist):
            self._next_ordered = True
            return
        if before is not None and before.step == self._progress.step and not self._slots.free(before):
            self._progress.step += 1
            self.capture_now(persist=persist)
        elif persist:
            self._slots.request_persist()

    def leave_iteration(self) -> None:
        """An iteration of an epoch was left by `break`. It counts if something was trained in it: the epoch
        goes on, and what comes after it must not have the number of the boundary before it."""
        self._left = self._left or self._use.trained_since_boundary

    def _count(self, iterations: int = 1) -> None:
        self._progress.count(iterations + self._left or 1)
        self._left = False

    def _is_given_away(self, last: bool) -> bool:
        """Whether another snapshot of this attempt has the number of the present step, on disk or on its way
        there. One that is nowhere but in memory, and that nobody asked for, is superseded by a newer one.
        Among ranks what one has, or has not, decides nothing: all give the same answer."""
        if not self._pacing.is_alone:
            return self._taken_step == self._progress.step
        newest = self._newest_here()
        if newest is not None:
            return self._slots.is_asked_for(newest)
        return not self._attendant.may_name(self._progress.step, wait=last)

    def _newest_here(self) -> Sealed | None:
        """The newest sealed snapshot of this attempt, if it is one of the present step."""
        newest = self._slots.newest_own()
        return newest if newest is not None and newest.step == self._progress.step else None

    def _capture_here(self, *, ordered: bool) -> None:
        self._taken_step = self._progress.step
        every_step = self._capture.schedule.every_step and not self._capture.hooks.is_undecided
        is_wanted = every_step or ordered or self._capture.is_ordered
        if is_wanted and self._slots.ring is None and not self._asked_first:
            # Every step is to be captured, so the first one is; or save() has asked for this one. Waited for
            # once: a keeper that does not give slots must not hold up every boundary after it.
            self._asked_first = True
            try:
                self._growth.require()
            except FlashckptError as error:
                self.not_saved(error)
        self._slots.adopt()
        is_ordered = self._capture.is_ordered
        try:
            outcome = self._capture.boundary(self._progress.step, self.values, ordered=ordered)
            if self._growth.waits_after(outcome):
                outcome = self._in_larger_slots(outcome, ordered)
            self._growth.saw(outcome)
            if outcome.captured:
                self._saved()
            elif (ordered or is_ordered) and not self._pacing.is_alone:
                # Here or never: the other ranks take it.
                self.capture_now(persist=is_ordered)
            if is_ordered:
                self._pacing.expect(self._capture.ordinal)
        except Exception as error:
            self.not_saved(error)
        self._ask()
        self._use.at_boundary()

    def _ask(self) -> None:
        """Ask for slots where the next capture needs others. Reads the state for its size."""
        try:
            self._growth.ask()
        except RuntimeError as error:  # the device's, or of a state_dict
            self.not_saved(error)

    def _in_larger_slots(self, outcome: BoundaryResult, ordered: bool) -> BoundaryResult:
        """A state that grows would go on without a snapshot for ever if no boundary waited for slots."""
        self.waited += 1
        with self._capture.heartbeat.resting():
            for _ in range(_TRIES):
                if not self._growth.larger_come(outcome.step):
                    break
                self._slots.adopt()
                outcome = self._capture.boundary(outcome.step, self.values, due=True, ordered=ordered)
                if not self._growth.waits_after(outcome):
                    break
        return outcome

    def capture_outside(self) -> None:
        """A snapshot outside of an iteration, persisted. It is a boundary of its own, with a step of its own,
        unless it is the present one: nothing has come since, or that one is still to be captured. Raises as
        `capture_now`."""
        if not self._pacing.is_alone:
            self._capture_apart()
            return
        self._capture.ordinal += 1
        with self._capture.heartbeat.resting():
            self._capture.wait()
            captured = self._newest_here() is not None
            held = self._progress.is_after_batches and not captured
            is_same = held or self._is_unchanged()
            if not (is_same and (captured or self._attendant.may_name(self._progress.step, wait=True))):
                self._progress.step += 1
            self.capture_now(persist=True)
            self._in_code = self._progress.is_after_batches

    def _capture_apart(self) -> None:
        """The same where all ranks do it: a boundary of its own on each of them, or on none. Its step is
        one of its own unless no snapshot can have had the number. Raises BoundaryError where not all ranks
        come."""
        with self._capture.heartbeat.resting():
            self._capture.wait()
            self._pacing.save_outside(self._capture.ordinal + 1, self._attendant.deadline_s)
            self._progress.step += self._taken_step == self._progress.step
            self._capture.ordinal = self.enter(self._progress.step)
            self.capture_now(persist=True)
            self._in_code = self._progress.is_after_batches
        self.settle()

    def _is_to_capture(self, *, persist: bool) -> bool:
        """Among ranks, whether the present boundary is still to be captured. One that is over is, as another
        boundary of the same step, where not all have it: which they all know, and not what each of them has.
        The step's number is free: a snapshot that not all ranks have is never persisted."""
        ordinal = self._capture.ordinal
        if not self._pacing.is_settled(ordinal):
            return True
        if ordinal == 0:
            return False  # nothing has come since the step that the run goes on from
        if self._pacing.outcome(ordinal, self._attendant.deadline_s).newest == ordinal:
            found = self._slots.of_boundary(ordinal) if persist else None
            if found is not None:
                self._slots.request_persist_of(found)
            return False
        self._capture.ordinal = self.enter(self._progress.step)
        return True

    def capture_now(self, *, persist: bool, anew: bool = False, may_count: bool = True) -> bool:
        """Capture the present boundary, whatever the pace, and see it sealed, unless it is already. `anew`:
        also where a snapshot of it is: the state has changed since. Where that one has to be persisted, so
        that larger slots can be had, this is a step of its own; not `may_count`: it is left, and False.

        Raises PersistError where it cannot be sealed, OutOfRoomError where there is no memory for it,
        StateError where it holds what cannot be saved.
        """
        self._capture.wait()
        if not self._is_to_capture(persist=persist):
            return True
        # The attendant may not have said it yet: this one would be void, too.
        self._capture.hold_whole(self._pacing.held_whole)
        self._taken_step = self._progress.step
        step, slots, attendant, outgrown = self._progress.step, self._slots, self._attendant, False
        before = slots.newest_own() if anew else None

        def is_sealed() -> bool:
            newest = slots.newest_own()
            if newest is None or newest.step != step or (before is not None and newest.age <= before.age):
                return False
            # Among ranks an earlier boundary of this step may stand in a slot that not all of them have.
            return self._pacing.is_alone or newest.boundary == self._capture.ordinal

        tries, until_s = 0, min(time.monotonic() + attendant.patience_s, attendant.deadline_s)
        while not is_sealed():
            if outgrown or (slots.ring is None and not slots.ready):
                self._growth.require()
            slots.adopt()
            if before is not None and before.step == step and slots.is_asked_for(before):
                if not may_count:
                    return False
                step = self._progress.step = step + 1
            outcome = self._capture.boundary(step, self.values, ordered=True)
            outgrown = self._capture.room_wanted() is not None
            if outcome.captured:
                self._capture.wait()
                tries += 1
            elif not outgrown:
                attendant.wait_for_room()
            if not is_sealed() and (tries >= _TRIES or time.monotonic() > until_s):
                raise attendant.not_captured(step, outcome.reason or self._capture.lost_reason)
        self._saved()
        self._use.at_boundary()
        if persist:
            slots.request_persist()
        return True

    def _is_unchanged(self) -> bool:
        """Whether nothing has come since the present boundary: no use of the state was seen and, where it is
        captured, the state is bit for bit what was captured."""
        if self._use.used_since_boundary:
            return False
        return self._newest_here() is None or self._is_as_captured()

    def _is_as_captured(self) -> bool:
        """Whether the newest sealed snapshot holds exactly the state as it is now."""
        newest = self._slots.newest_sealed()
        try:
            metadata = newest[0].metadata(newest[1]) if newest is not None else None
        except DamagedError:
            metadata = None
        if metadata is None:
            return False
        then = {leaf.name: (leaf.dtype, leaf.shape, digest) for leaf, digest in metadata.counted()}
        try:
            values = json.loads(encode_json(self._tree.values(self._capture.hooks.used_up)))
        except StateError:  # the capture of it raises the error, with the path in the state
            return False
        return self._use.digests() == then and json.loads(metadata.values)["state"] == values

    def values(self) -> bytes:
        """What is not a tensor, as it is now, in typed JSON. Raises StateError with the path in the state."""
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
        if self._too_large is None:  # to find what takes most is as dear as to encode it: it is done once
            parts = {**tree.plain_values(state), "loaders": values["progress"]}
            self._too_large = too_large(parts, len(data), tree.most_values_bytes)
        raise self._too_large

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Those of the state, each once, with their names."""
        return self._tree.parameters()

    def not_saved(self, error: Exception) -> None:
        """Said once; the next boundary tries again."""
        step = self._progress.step
        if self.unsaved is None:
            log.error("step %d is not saved, and training goes on: %s", step, error)
            self._attendant.event(Event.ERROR, what="capture", step=step, message=str(error))
        if not isinstance(error, FlashckptError):
            # Code of the user's own (a state_dict), or ours: the loop must not pay for either.
            found = StateError(f"The state of step {step} could not be read: {error!r}.")
            found.__cause__ = error
            self.unsaved = found
        else:
            self.unsaved = error

    def _saved(self) -> None:
        self.unsaved = self.ordered_at = None
        self._slots.fits()


class Growth:
    """Memory for captures: slots are asked for once the size of the state is known, and again when it has
    outgrown them. When a boundary waits for larger ones, and in which order memory changes hands where there
    is little of it. Asks the keeper nothing itself."""

    def __init__(self, capture: Capture, attendant: Attendant, stop: StopPolicy) -> None:
        self._capture, self._attendant, self._slots = capture, attendant, attendant.slots
        self._stop = stop
        self._skipped = 0
        self._is_refused = False

    def ask(self, *, ordered: bool = False) -> None:
        """Ask for slots where the next capture needs others than there are."""
        slots, capture = self._slots, self._capture
        is_refused = slots.error is not None
        if slots.preparing and slots.ring is None and not (is_refused and ordered):
            return  # they are on their way: not at each boundary is the state walked for their size
        wanted = capture.room_wanted(ordered=ordered)
        if wanted is not None and not slots.ready:
            slots.ask(wanted, capture.region_wanted())
        elif wanted is None and is_refused:
            slots.fits()

    def require(self) -> None:
        """Ask for slots, and wait for them. Raises OutOfRoomError or KeeperError where none can be had."""
        self.ask(ordered=True)
        self._wait(lambda: self._slots.asked is None, lambda: False)

    def larger_come(self, step: int) -> bool:
        """Wait for larger slots. False once a stop is asked, or where there is no memory for them: then no
        boundary waits until one was captured again."""
        slots, stop = self._slots, self._stop
        self.ask()
        try:
            self._wait(
                lambda: slots.ready or stop.is_asked or not (slots.asked or slots.completing),
                lambda: stop.is_asked,
            )
        except FlashckptError as error:
            self._is_refused = True
            newest = slots.newest_own()
            log.warning(
                "step %d is not captured, and training goes on without waiting: %s The newest snapshot in "
                "memory is of %s. Slots are asked for again every few seconds.",
                step, error, "no step" if newest is None else f"step {newest.step}",
            )  # fmt: skip
        return slots.ready

    def _wait(self, come: Callable[[], bool], stopped: Callable[[], bool]) -> None:
        while True:
            try:
                return self._attendant.await_slots(come)
            except OutOfRoomError:
                if not (self.keeps_region() or self._give_way(stopped)):
                    raise

    def keeps_region(self) -> bool:
        """Where there is no memory for another region of constants, that of before goes on: slots are asked
        for that hold the rest."""
        slots = self._slots
        is_short = isinstance(slots.error, OutOfRoomError) and slots.empty_region is None
        if not is_short or not self._capture.keep_region():
            return False
        wanted = self._capture.room_wanted(ordered=True)
        if wanted is not None:
            slots.ask(wanted)
        slots.ask_again()
        return True

    def _give_way(self, stopped: Callable[[], bool]) -> bool:
        """Where larger slots do not fit beside those there are: persist the newest snapshot, then let another
        slot go, so that one can be made. False where only the newest is left, or once `stopped`."""
        slots = self._slots
        if slots.ring is None:
            return False
        self._capture.wait()  # the newest may be on its way
        newest = slots.newest_sealed()
        others = [slot for slot in slots.ring.slots if newest is None or slot is not newest[0]]
        if slots.complete[0]:
            others = [slot for slot in others if not slots.is_needed(slot)]
        elif others or slots.is_single:
            self._attendant.persist_newest(stopped)
            crashpoints.point("growth.persisted")
        if slots.is_single and newest is not None and newest[0].persisted == newest[1].generation:
            others = [newest[0]]  # it is on disk, and nobody asked for more
        if stopped() or (not others and slots.is_for_one):
            return False
        if others:
            self._capture.let_go(oldest := min(others, key=_age))
            slots.give_up(oldest)
        slots.ask_for_one()
        return True

    def saw(self, outcome: BoundaryResult) -> None:
        """What became of a boundary in the end."""
        if outcome.captured:
            if self._skipped:
                log.info("step %d fits its slots again, after %d skipped", outcome.step, self._skipped)
            self._skipped, self._is_refused = 0, False
        elif self._is_for_want_of_room(outcome):
            self._skipped += 1
            if self._skipped == 1:
                log.info("step %d is not captured: the state needs larger slots, which come", outcome.step)

    def waits_after(self, outcome: BoundaryResult) -> bool:
        """Whether this boundary, which was due, is to wait for slots and to be tried again."""
        is_due = self._skipped >= _SKIPPED and not self._is_refused and not self._stop.is_asked
        return is_due and self._is_for_want_of_room(outcome)

    def _is_for_want_of_room(self, outcome: BoundaryResult) -> bool:
        slots = self._slots
        if outcome.verdict is not Verdict.SKIPPED or (slots.ring is None and not slots.is_for_one):
            return False
        return self._capture.room_wanted() is not None or slots.completing


def _age(slot: Slot) -> tuple[int, int, int]:
    """Empty ones first, then the oldest snapshot."""
    try:
        sealed = slot.sealed()
    except DamagedError:
        sealed = None
    return (-1, 0, 0) if sealed is None else sealed.age

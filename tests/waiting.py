"""Standing still until something is so. Never a sleep that hopes: each has a condition and a limit.

A limit is for what never comes, and long: on a machine that does ten other things, seconds say nothing.
"""

import time
from collections.abc import Callable

import flashckpt
from flashckpt.memory.slot import SlotState

_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def until(condition: Callable[[], object], what: str, limit_s: float = 240.0) -> None:
    """Wait until the condition holds; fail with `what` if it does not within the limit."""
    end = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        if condition():
            return
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}"
        time.sleep(pause_s(time.monotonic() - began))


def pause_s(looked_s: float) -> float:
    """How long to wait before the next look, after one that took so long. Looking through all processes of
    the machine takes milliseconds: without a longer pause, a core is kept from what is waited for."""
    return min(max(_PAUSE_S, 3 * looked_s), _LONGEST_PAUSE_S)


def newest_sealed(checkpointer: flashckpt.Checkpointer) -> int:
    """The step of the newest sealed snapshot of this attempt, -1 where there is none."""
    return int(checkpointer.report()["newest_sealed_step"])


def abandon(checkpointer: flashckpt.Checkpointer) -> None:
    """Leave its `with` by an exception: nothing more is captured, what is sealed is the keeper's to save."""
    checkpointer.__exit__(RuntimeError, RuntimeError("left"), None)


def until_slots(checkpointer: flashckpt.Checkpointer) -> None:
    """Stand still in an iteration until slots are ready: from the next boundary on snapshots are taken.
    They are asked for at the first boundary after the first step, so that one passes at once."""
    keeper_link = checkpointer._keeper_link
    if keeper_link.slots.preparing:
        until(lambda: keeper_link.slots.ready, "slots")


def until_room(checkpointer: flashckpt.Checkpointer) -> None:
    """Stand still until what was captured is sealed and there is a slot for the next boundary. A loop of
    short iterations passes several boundaries while a busy machine seals and persists."""
    ring = checkpointer._keeper_link.slots.ring
    if ring is not None:
        until(lambda: all(slot.state().state is not SlotState.WRITING for slot in ring.slots), "a seal")
        until(lambda: ring.take() is not None, "a slot that can be written")

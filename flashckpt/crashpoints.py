"""Named points at which a test kills or stops this process. Owns their table.

A point does nothing unless the environment (`FLASHCKPT_CRASH_AT`) or a test arms it, and never changes the
behaviour of the code around it. No point is inside a loop over leaves.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable

from flashckpt.errors import OptionError
from flashckpt.options import crash_at

# Every point, and the state that a death there leaves. tests/crash kills at each.
POINTS = {
    "attempt.reserved": "a counter of an attempt that never begins",
    "resume.read": "a step from storage in the trainer's own memory",
    "resume.verified": "a whole snapshot that fits; the live state is unchanged",
    "resume.filled": "a filled model, but no attempt has begun",
    "start.written": "an attempt that has begun and that no keeper knows",
    "memory.reserved": "a memory request, nothing allocated",
    "slots.taken": "a region without a control page",
    "memory.made": "regions that no trainer has",
    "memory.given": "regions that were granted and are not written yet",
    "growth.persisted": "the newest snapshot in storage, before its slot is released",
    "growth.given-up": "a slot that the trainer no longer writes and has not released",
    "growth.taken-up": "larger slots without a snapshot, the newest in an old slot",
    "growth.done": "larger slots with the newest snapshot, no old slots",
    "capture.begun": "a WRITING slot with the bytes of an older snapshot",
    "capture.copied": "a WRITING slot with all bytes",
    "seal.submitting": "a written record without a seal",
    "seal.submitted": "a seal in progress",
    "share.filled": "a WRITING region of constants with all bytes",
    "share.sealed": "a sealed region that no snapshot refers to",
    "adopt.taken": "slots opened by a keeper that served no request",
    "adopt.reclaimed": "slots of dead owners freed, no snapshot queued",
    "adopt.done": "the newest snapshot of dead owners queued",
    "rescue.asked": "a trainer's death noted, its newest snapshot queued",
    "cache.pinned": "a pinned slot, nothing in the cache",
    "cache.written": "a durable snapshot in the cache under a temporary name",
    "cache.named": "a snapshot in the cache, its slot still pinned",
    "audit.begun": "an idle audit of the newest snapshot",
    "audit.pinned": "a pinned slot, nothing written",
    "write.begun": "an empty data folder",
    "write.written": "a shard that no part names",
    "part.checked": "a durable shard that no part names",
    "part.linked": "a part that no manifest names",
    "manifest.checked": "all parts, but no manifest",
    "manifest.written": "a manifest that no version names",
    "version.created": "a committed step that no slot records",
    "commit.marked": "a committed step whose slot is still pinned",
    "prune.begun": "a version without older steps, whose files are there",
    "prune.done": "a version and its files",
    "copy.written": "a durable copied file under a temporary name",
    "copy.files": "copied files that no part names",
    "copy.part": "a copied part that no manifest names",
    "import.written": "a shard that no part names, and no catalogue",
    "end.marking": "an ended attempt without a record of its end",
    "leave.begun": "an idle keeper and its slots",
    "leave.emptied": "a runtime folder with a socket and locks, but no slots",
    "leave.closed": "a runtime folder with locks only",
}  # fmt: skip

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


# Implemented in C, so an unarmed point costs almost nothing.
_unarmed: Callable[[str], object] = dict[str, None]().get

# Call it as `crashpoints.point(...)`, because `arm` replaces it.
point: Callable[[str], object] = _unarmed


def arm(text: str) -> None:
    """Arm one point of this process: "NAME[:COUNT[:ACTION]]". The COUNT-th time that it is reached (1), the
    process kills itself or, with the action "stop", stops itself. Empty text disarms. Raises OptionError."""
    global point
    wanted, _, rest = text.partition(":")
    count, _, action = rest.partition(":")
    if text and (
        wanted not in POINTS or (count and not count.isdigit()) or (action or "kill") not in _ACTIONS
    ):
        raise OptionError(
            f"FLASHCKPT_CRASH_AT={text!r} names no point. Nothing was started. Unset it: it is for tests of "
            "this library."
        )
    passed = itertools.count(1)

    def strike(name: str) -> None:
        if name == wanted and next(passed) == int(count or 1):
            # To this thread: another thread could receive a signal to the process, and later.
            signal.pthread_kill(threading.get_ident(), _ACTIONS[action or "kill"])

    point = strike if text else _unarmed


arm(crash_at())

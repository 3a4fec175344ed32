"""Named points at which a test kills this process, or stops it to kill another. Owns the table of them.

A point does nothing unless the environment arms one before the process starts (`FLASHCKPT_CRASH_AT`), or
a test does; it never changes what the code around it does. None stands in a loop over leaves.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable

from flashckpt.errors import OptionError
from flashckpt.options import crash_at

# Every point, and what a death there leaves. tests/crash kills at each; none may be missing here.
POINTS = {
    "claim.taken": "an attempt that is claimed and never started",
    "resume.read": "a step from disk in memory of the trainer's own",
    "resume.verified": "a snapshot that is whole and fits; the live state is untouched",
    "resume.filled": "a filled model, and no start.json",
    "start.written": "an attempt that started and of which no keeper was told",
    "memory.reserved": "a request for memory of which nothing was taken",
    "slots.taken": "a region without a control page",
    "memory.made": "regions that nobody was given",
    "memory.given": "regions that a trainer was given and does not write yet",
    "growth.persisted": "the newest snapshot on disk, before a slot goes to make room",
    "growth.given-up": "a slot that the trainer writes no more, and has not released",
    "growth.taken-up": "larger slots without a snapshot, and the newest in one of before",
    "growth.done": "larger slots with the newest snapshot, and none of before",
    "capture.begun": "a slot WRITING, its bytes those of an older snapshot",
    "capture.copied": "a slot WRITING, its bytes whole",
    "seal.submitting": "a record written, and nobody to seal it",
    "seal.submitted": "a seal under way",
    "share.filled": "a region of constants WRITING, its bytes whole",
    "share.sealed": "a sealed region that no snapshot names",
    "adopt.taken": "slots opened by a keeper that served nobody",
    "adopt.reclaimed": "slots freed of the dead, and no snapshot asked for",
    "adopt.done": "the newest snapshot of the dead asked for",
    "rescue.asked": "a trainer's death noted, its newest snapshot asked for",
    "audit.begun": "an idle look at the newest snapshot",
    "audit.pinned": "a pinned slot, nothing written",
    "write.begun": "a step's folder, empty",
    "write.written": "a shard that nothing names",
    "part.checked": "a shard that is durable and that nothing names",
    "part.linked": "a part without a manifest",
    "manifest.checked": "all parts, and no manifest",
    "manifest.linked": "a committed step that no slot knows of",
    "commit.marked": "a committed step whose slot is still pinned",
    "prune.begun": "a commit after which nothing was deleted",
    "prune.buried": "a tombstone, and all files of its step",
    "prune.removed": "a tombstone, and some files of its step",
    "prune.swept": "a claim whose attempt's folder is gone",
    "copy.begun": "a step that is begun in the remote, and nothing of it",
    "copy.written": "a copied file that is durable, under a name that nobody reads",
    "copy.files": "copied files that nothing names",
    "copy.part": "a copied part without a manifest",
    "copy.records": "copied attempts, and no manifest of the step that was to come with them",
    "import.begun": "an attempt without a run.json, and nothing of its step",
    "import.written": "a shard that nothing names, and no run.json",
    "import.committed": "a committed step without a run.json",
    "end.marking": "an attempt that ended and does not say so",
    "leave.begun": "a keeper with nothing left to do, and its slots",
    "leave.emptied": "a runtime folder with a socket and locks, and no slots",
    "leave.closed": "a runtime folder with locks alone",
}  # fmt: skip

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


# In C: what is not armed costs a boundary next to nothing.
_unarmed: Callable[[str], object] = dict[str, None]().get

# Call it as `crashpoints.point(...)`: arming replaces it.
point: Callable[[str], object] = _unarmed


def arm(text: str) -> None:
    """Arm one point of this process: "NAME[:COUNT[:ACTION]]". At its COUNT-th passing (1) the process kills
    itself, or with the action "stop" stops itself, once. An empty text disarms. Raises OptionError."""
    global point
    wanted, _, rest = text.partition(":")
    count, _, action = rest.partition(":")
    if text and (
        wanted not in POINTS or (count and not count.isdigit()) or (action or "kill") not in _ACTIONS
    ):
        raise OptionError(
            f"FLASHCKPT_CRASH_AT={text!r} names no point. It is for tests of this library; unset it. "
            "Nothing was started."
        )
    passed = itertools.count(1)

    def strike(name: str) -> None:
        if name == wanted and next(passed) == int(count or 1):
            # At this thread: of a signal to the process, another one may take notice, a little later.
            signal.pthread_kill(threading.get_ident(), _ACTIONS[action or "kill"])

    point = strike if text else _unarmed


arm(crash_at())

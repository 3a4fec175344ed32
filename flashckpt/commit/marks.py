"""Marks of steps that failed a verification. A mark puts its step last; it hides and deletes nothing.

The fault may be the host's, so a mark names it: on that host its step comes last, on any other it comes
in its turn.
"""

from __future__ import annotations

import secrets
import socket

from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import DamagedError
from flashckpt.format.names import MARK, AttemptName, step_attempt_folder
from flashckpt.format.records import Mark
from flashckpt.store.base import Store

_MAX_MARKS = 64
_MAX_HOST_CHARS = 255
_MAX_REASON_CHARS = 2000


def this_host() -> str:
    """This machine's name, as marks have it."""
    return socket.gethostname()[:_MAX_HOST_CHARS]


def mark(store: Store, step: int, attempt: AttemptName, host: str, reason: str) -> None:
    """Note that the step could not be verified on `host`. Beyond 64 marks of a step nothing is added."""
    folder = step_attempt_folder(step, attempt)
    if sum(MARK.fullmatch(entry.name) is not None for entry in store.list(folder)) >= _MAX_MARKS:
        return
    record = Mark(step=step, attempt=attempt, host=host[:_MAX_HOST_CHARS], reason=reason[:_MAX_REASON_CHARS])
    store.create(f"{folder}/mark-{secrets.token_hex(4)}.json", record.to_bytes())


def marks(store: Store, step: int, attempt: AttemptName) -> list[Mark]:
    """The marks of a step that can be read."""
    folder = step_attempt_folder(step, attempt)
    found: list[Mark] = []
    for entry in store.list(folder):
        if MARK.fullmatch(entry.name) is not None and not entry.is_folder and len(found) < _MAX_MARKS:
            path = f"{folder}/{entry.name}"
            try:
                found.append(Mark.from_bytes(store.read(path, Mark.MAX_BYTES), path))
            except (DamagedError, FileNotFoundError):
                continue
    return found


def is_marked(store: Store, each: VisibleStep) -> bool:
    """Whether a verification of this step failed somewhere."""
    return bool(marks(store, each.step, each.attempt))


def marked_here(store: Store, each: VisibleStep) -> Mark | None:
    """The first mark that this machine put on the step, None where it put none."""
    found = marks(store, each.step, each.attempt)
    return next((mark for mark in found if mark.host == this_host()), None)

"""Who trains a run: the process that has begun the newest attempt, and the counter that shows that it lives.
Owns their types and encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashckpt.format.checked_json import JsonRecord
from flashckpt.format.forms import Form, fields, integer, record, text

_PHASE = re.compile(r"training|saving|closed|dead")
_MAX_RESTARTS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that begins an attempt: the place of its trainer's lock, and its launch.

    `runtime`: path of the runtime folder. `runtime_id`: its device and inode, since containers of one machine
    may have the same path for different folders. `lock`: empty for an operation that holds no lock.
    """

    boot_id: str
    runtime: str
    runtime_id: str
    lock: str
    host: str
    pid: int
    job_id: str = ""
    restart_count: int = 0


OWNER: Form[Owner] = record(
    Owner,
    boot_id=text(max_chars=64),
    runtime=text(),
    runtime_id=text(max_chars=64),
    lock=text(max_chars=255),
    host=text(max_chars=255),
    pid=integer(),
    job_id=text(),
    restart_count=integer(0, _MAX_RESTARTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(JsonRecord):
    """A counter that grows while a trainer lives, and after that while keepers save what it has left.
    `phase`: "training", "saving", or how it has ended, "closed" or "dead"."""

    KIND = "alive"
    FORMS = fields(count=integer(), phase=text(_PHASE))

    count: int
    phase: str = "training"

    @property
    def ended(self) -> str:
        """How it has ended, "closed" or "dead"; empty if it has not."""
        return self.phase if self.phase in ("closed", "dead") else ""

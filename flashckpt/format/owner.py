"""Who trains a run: the process that has begun the newest attempt, and the counter that shows that it lives.
Owns their types and encoding.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.format.checked_json import Fields, JsonRecord

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

    @classmethod
    def of(cls, fields: Fields) -> Owner:
        return cls(
            boot_id=fields.text("boot_id", max_chars=64),
            runtime=fields.text("runtime"),
            runtime_id=fields.text("runtime_id", max_chars=64),
            lock=fields.text("lock", max_chars=255),
            host=fields.text("host", max_chars=255),
            pid=fields.integer("pid"),
            job_id=fields.text("job_id"),
            restart_count=fields.integer("restart_count", 0, _MAX_RESTARTS),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(JsonRecord):
    """A counter that grows while a trainer lives, and after that while keepers save what it has left.
    `phase`: "training", "saving", or how it has ended, "closed" or "dead"."""

    KIND = "alive"
    count: int
    phase: str = "training"

    @property
    def ended(self) -> str:
        """How it has ended, "closed" or "dead"; empty if it has not."""
        return self.phase if self.phase in ("closed", "dead") else ""

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "phase": self.phase}

    @classmethod
    def from_fields(cls, fields: Fields) -> Alive:
        return cls(count=fields.integer("count"), phase=fields.text("phase", pattern=_PHASE))

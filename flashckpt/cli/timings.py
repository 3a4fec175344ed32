"""How long a step took to be saved and to be loaded again, as the run's ledger has it.

Nothing hangs on it: a ledger that is gone, or lies, changes what is shown and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashckpt.commit.attempts import attempts
from flashckpt.events import Event
from flashckpt.format.names import AttemptName
from flashckpt.persist.ledger import lines_of
from flashckpt.store.base import Store

_MOST_ATTEMPTS = 64
_MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistTiming:
    """One write of a step. `direct` is whether the page cache was bypassed."""

    seconds: float
    num_bytes: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTiming:
    """One resume from a step: by which attempt, from "memory" or "local"."""

    attempt: str
    seconds: float
    tier: str


def persisted(store: Store, step: int, attempt: AttemptName) -> list[PersistTiming]:
    """The writes of a step, one a rank; none where the ledger does not have them."""
    found = []
    for line in lines_of(store, str(attempt)):
        seconds, num_bytes = _number(line, "seconds"), _number(line, "num_bytes")
        if (
            line["event"] == Event.PERSIST.value
            and line.get("step") == step
            and None not in (seconds, num_bytes)
        ):
            assert seconds is not None
            assert num_bytes is not None
            direct = line.get("direct") is True
            found.append(PersistTiming(seconds=seconds, num_bytes=int(num_bytes), direct=direct))
    return found


def resumed(store: Store, step: int, attempt: AttemptName) -> list[ResumeTiming]:
    """The resumes from a step, by the newest attempts."""
    found = []
    for info in attempts(store)[-_MOST_ATTEMPTS:]:
        for line in lines_of(store, str(info.name)):
            seconds = _number(line, "seconds")
            is_resume = line["event"] == Event.RESUME.value and line.get("step") == step
            if is_resume and seconds is not None and line.get("from_attempt") == str(attempt):
                tier = str(line.get("tier", ""))[:20]
                found.append(ResumeTiming(attempt=str(info.name), seconds=seconds, tier=tier))
    return found


def _number(line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= _MOST else None

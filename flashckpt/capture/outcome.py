"""What became of one boundary. Owns nothing but the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    CAPTURED = "captured"
    NOT_DUE = "not due"
    NOT_QUALIFIED = "not qualified"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """reason says why nothing was captured, in words for a log; slot and generation name the snapshot
    that was begun: it exists once its slot is sealed."""

    verdict: Verdict
    step: int
    reason: str = ""
    slot: int = -1
    generation: int = -1
    persist: bool = False

    @property
    def captured(self) -> bool:
        return self.verdict is Verdict.CAPTURED

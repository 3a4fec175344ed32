"""What a run went on from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run went on from: the step, where it was read ("memory" or "local"), the attempt that made
    it, and the seconds from the call of `attach` until the live state was whole and verified."""

    step: int
    tier: str
    attempt: str
    seconds: float

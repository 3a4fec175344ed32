"""Capture: from live tensors to sealed slots, at boundaries, with nothing waiting. See docs/capture.md."""

from flashckpt.capture.engine import Capture
from flashckpt.capture.outcome import Outcome, Verdict

__all__ = ["Capture", "Outcome", "Verdict"]

"""Capture: from live tensors to sealed slots, at boundaries, with nothing waiting. See docs/capture.md."""

from flashckpt.capture.engine import BoundaryResult, Capture, Verdict

__all__ = ["Capture", "BoundaryResult", "Verdict"]

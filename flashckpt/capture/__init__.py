"""The capture of live tensors into sealed slots at boundaries, without waiting. See docs/capture.md."""

from flashckpt.capture.engine import BoundaryResult, Capture, Verdict

__all__ = ["Capture", "BoundaryResult", "Verdict"]

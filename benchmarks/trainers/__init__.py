"""What checkpoints cost inside HF Trainer and Lightning: their own, flashckpt's, and none."""

from __future__ import annotations

FRAMEWORKS = ("transformers", "lightning")
# The trainer's own checkpoints every N steps; flashckpt's default; a snapshot at every step.
VARIANTS = ("plain", "own", "auto", "every step")

"""A program that stands still until it is killed."""

from __future__ import annotations

import signal

print("stands", flush=True)
signal.pause()

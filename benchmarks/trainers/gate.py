"""Where a training stands still between two steps and asks what is next: a block of steps, or its death.

Owns the words between a trainer's process and the benchmark's, one JSON object a line. A step begins where
the boundary, the save and everything else of the step before it is done, so that a block of steps holds all
that its checkpoints cost the loop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

STARTED_S = time.monotonic()


class Gate:
    """`sync` waits for the device. The first answer says how long the start took, and at which step."""

    def __init__(self, answers: TextIO, sync: Callable[[], None]) -> None:
        self._answers, self._sync = answers, sync
        self._imported_s = time.monotonic()
        self._began_s = 0.0
        self._first_step: int | None = None
        self._left = 1  # the first step, after which a start has come to its end
        self._dies = False

    def step(self, step: int) -> None:
        """Step number `step` (of the steps done so far) is about to begin."""
        if self._first_step is None:
            self._first_step = step
            self._begin()
            return
        self._left -= 1
        if self._left:
            return
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self._sync()
        now = time.monotonic()
        self._answer(step=step, seconds=now - self._began_s)
        order = json.loads(sys.stdin.readline() or '{"steps": 0}')
        if not order["steps"]:
            os._exit(0)  # nothing of the end is measured, and what it left is removed
        self._left, self._dies = order["steps"], order.get("dies", False)
        self._begin()

    def _begin(self) -> None:
        self._sync()
        self._began_s = time.monotonic()

    def _answer(self, **fields: Any) -> None:
        start = {"first_step": self._first_step, "started_s": STARTED_S, "imported_s": self._imported_s}
        self._answers.write(json.dumps({**start, **fields, "now_s": time.monotonic()}) + "\n")
        self._answers.flush()

"""The trainer's sign of life on its slots' control pages, for the keeper's watchdog.

Owns the counting of boundaries and when one is expected; decides no limit and reads no page. What it costs
a boundary are a few words written. The lengths of steps are left for another thread to judge.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping

from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.memory.slot import Heartbeat

# Half a second of steps of a tenth of a millisecond: beyond that the oldest are not judged.
_LENGTHS_KEPT = 5000


class HeartbeatWriter:
    """`patience_s` is how long a boundary may be missing before it is a hang, 0 for ever; any thread sets
    it, and the next boundary takes it up. `lengths` are (step, seconds) of the steps since they were last
    taken out. All else is the training thread's."""

    def __init__(self, writers: Mapping[str, SlotWriter]) -> None:
        self._writers = writers
        self.boundaries = 0
        self.patience_s = 0.0
        self.lengths: deque[tuple[int, float]] = deque(maxlen=_LENGTHS_KEPT)
        self._expecting = False
        self._begun_ns = 0

    def boundary(self, step: int) -> None:
        now = time.monotonic_ns()
        if self._expecting and self._begun_ns:
            self.lengths.append((step, (now - self._begun_ns) / 1e9))
        self.boundaries += 1
        self._begun_ns = now
        self._beat()

    def expect(self) -> None:
        """From now on a boundary is due: the loop has begun, or goes on."""
        if not self._expecting:
            self._expecting, self._begun_ns = True, time.monotonic_ns()
            self._beat()

    def rest(self) -> None:
        """No boundary is due until `expect`: the loop has ended, or waits for storage because it was
        told to."""
        if self._expecting:
            self._expecting = False
            self._beat()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """What is done here may wait for storage as long as it likes: it is no hang of the loop."""
        expecting = self._expecting
        self.rest()
        try:
            yield
        finally:
            if expecting:
                self.expect()

    def _beat(self) -> None:
        patience_ns = int(self.patience_s * 1e9) if self._expecting else 0
        for each in self._writers.values():
            each.slot.beat(Heartbeat(self.boundaries, self._begun_ns, each.owner, patience_ns))

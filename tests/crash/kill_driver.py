"""Storage whose process kills itself at its n-th system call."""

from __future__ import annotations

import os
import signal

from tests.crash.mortal import MortalSystem


class Mortal(MortalSystem):
    """Kills its process at the call number `last`: before it, or half way through a write."""

    def __init__(self, last: int) -> None:
        self.last, self.calls = last, 0

    def live(self) -> None:
        self.calls += 1
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: int, data: memoryview) -> int:
        if self.calls + 1 == self.last:
            super(MortalSystem, self).write(file, data[: len(data) // 2])
        return super().write(file, data)

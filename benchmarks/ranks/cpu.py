"""CPU seconds of all processes that carry a word in their environment."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME, _CSTIME = 11, 15  # in what follows a process's name in /proc/PID/stat: see proc(5)


def seconds_of(word: str) -> float:
    """What they and their children that have ended have used since they were started. One that ended and
    whose parent does not carry the word is not counted."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc", pid)
        try:
            if word.encode() in (folder / "environ").read_bytes().split(b"\0"):
                total += sum(
                    map(int, (folder / "stat").read_text().rpartition(")")[2].split()[_UTIME:_CSTIME])
                )
        except OSError:
            continue
    return total / _TICKS

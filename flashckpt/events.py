"""The names of what can happen to a run, as the ledger writes them, and the library's one logger."""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger("flashckpt")


class Event(str, Enum):
    """One line of the ledger each."""

    ATTACH = "attach"
    PLAN = "plan"
    SNAPSHOT = "snapshot"
    SKIP = "skip"
    TORN = "torn"
    PERSIST = "persist"
    COMMIT = "commit"
    PRUNE = "prune"
    DEATH = "death"
    ADOPT = "adopt"
    RESUME = "resume"
    ERROR = "error"
    RECOVER = "recover"
    TIMES = "times"
    SLOW = "slow"
    STUCK = "stuck"
    STOPPED = "stopped"
    GOES_ON = "goes-on"
    KILL = "kill"
    STOP = "stop"
    CLOSE = "close"

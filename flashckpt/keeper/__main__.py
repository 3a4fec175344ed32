"""The keeper as a program. Owns what a process of its own needs: streams, niceness, affinity, signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys

from flashckpt.events import log
from flashckpt.keeper.daemon import Keeper
from flashckpt.memory.runtime import RuntimeFolder

_NICENESS = 5
_MOST_CPUS = 4096


def run(run_path: str, runtime_path: str) -> None:
    """Be the keeper of a run until it is time to go; return at once if the run has one."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    keeper = Keeper.elected(run_path, RuntimeFolder.at(runtime_path))
    if keeper is None:
        return
    _settle(keeper)
    log.info("keeper %s of %s", keeper.nonce, run_path)
    try:
        keeper.run()
    except BaseException:
        log.exception("the keeper ends")
        os._exit(1)
    # A worker may hang in storage for ever: whatever must be written has been.
    log.info("keeper %s leaves", keeper.nonce)
    sys.stderr.flush()
    os._exit(0)


def _settle(keeper: Keeper) -> None:
    """Own niceness and affinity: a trainer that was pinned to cores must not share them with us."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(_MOST_CPUS))
    # A scheduler signals every process of a job before it kills them. What is being written is worth more
    # than an early end: it is finished, then the keeper goes without lingering.
    signal.signal(signal.SIGTERM, lambda number, frame: keeper.ask_to_go())
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m flashckpt.keeper RUN RUNTIME_FOLDER (started by a trainer)")
    run(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()

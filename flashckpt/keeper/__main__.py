"""The keeper as a program. Owns the way from a trainer's child to a daemon, and its streams, niceness,
affinity and signals.

A trainer starts it as a script, `python -I __main__.py RUN`, with its orders on stdin. It imports the library
after it has set the trainer's import path.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import site
import sys
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("flashckpt.keeper")
_NICENESS = 5
_MOST_CPUS = 4096


def run(run_path: str, runtime_path: str, starter: int = 0, storage: Mapping[str, Any] | None = None) -> None:
    """Run as the keeper of a run; return at once if the run has one. starter: the trainer's process. storage:
    the options of its store."""
    from flashckpt.keeper.daemon import Keeper
    from flashckpt.memory.runtime import RuntimeFolder
    from flashckpt.store import give_options

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    if storage:
        give_options(run_path, storage)
    keeper = Keeper.elected(run_path, RuntimeFolder.at(runtime_path), starter)
    if keeper is None:
        return
    # A trainer that is pinned to cores must not share them with its keeper.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(_MOST_CPUS))
    # A scheduler signals every process of a job before it kills them: finish the writes, and do not linger.
    signal.signal(signal.SIGTERM, lambda number, frame: keeper.exit.ask())
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    log.info("keeper %s of %s", keeper.nonce, run_path)
    try:
        keeper.run()
    except BaseException:
        log.exception("the keeper ends")
        os._exit(1)
    # All is written, but a worker may hang in storage for ever.
    log.info("keeper %s leaves", keeper.nonce)
    sys.stderr.flush()
    os._exit(0)


def _ordered() -> tuple[str, str, int, dict[str, Any]]:
    """Read the trainer's orders (the arguments of `run`), and leave its session."""
    orders = json.load(sys.stdin)
    # The trainer's child ends here and is reaped at once. Its child, which does not lead its session, belongs
    # to init: no launcher waits for it, and no terminal's hang-up reaches it.
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Under a limit of file lengths Python writes truncated bytecode, which every process would import.
    sys.dont_write_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    paths = [str(path) for path in orders["paths"]]
    for path in paths:
        # User and editable installations are found by .pth files.
        if path not in sys.path and os.path.basename(path) in ("site-packages", "dist-packages"):
            site.addsitedir(path)
    sys.path[:] = paths + [path for path in sys.path if path not in paths]
    return str(orders["run"]), str(orders["runtime"]), int(orders["starter"]), dict(orders["storage"])


def main() -> None:
    match sys.argv[1:]:
        case [_]:
            run(*_ordered())
        case [run_path, runtime_path]:
            run(run_path, runtime_path)
        case _:
            raise SystemExit("usage: python -m flashckpt.keeper RUN RUNTIME_FOLDER (started by a trainer)")


if __name__ == "__main__":
    main()

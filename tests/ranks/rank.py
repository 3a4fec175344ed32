"""One rank of a test: `python -m tests.ranks.rank PROGRAM ARGUMENT...` runs that module, with a file of its
own for what it prints, for its log, and for how it ended. To be started by `launch` alone."""

import ctypes
import itertools
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from tests import run_view

_PR_SET_PDEATHSIG = 1
FOLDER, LAUNCH = "FLASHCKPT_TEST_FOLDER", "FLASHCKPT_TEST_LAUNCH"


def stem(folder: Path) -> Path:
    """Of the files of this rank's process: its launcher may have started it before. Not by the launcher's own
    count, which stands still where another node's rank had died."""
    launch, rank = os.environ[LAUNCH], os.environ["RANK"]
    for restart in itertools.count():
        found = folder / f"{launch}-rank-{rank}-restart-{restart}"
        if not found.with_suffix(".out").exists():
            return found
    raise AssertionError


def end_with_parent() -> None:
    """Its launcher is what ends it, and that may be killed: as when a run of the tests is cut short."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() == 1:
        sys.exit(1)


def main() -> None:
    end_with_parent()
    files = stem(Path(os.environ[FOLDER]))
    for number, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(files.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = sys.argv[1:]
    run_view.watch_for(5.0)  # where a node is lost for good
    status = 1
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Not there for one that was killed.
        files.with_suffix(".status").write_text(str(status))


if __name__ == "__main__":
    main()

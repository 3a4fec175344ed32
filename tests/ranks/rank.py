"""One rank of a test: `python -m tests.ranks.rank PROGRAM ARGUMENT...` runs that module, with a file of its
own for what it prints, for its log, and for how it ended. To be started by `launch` alone."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

FOLDER, LAUNCH = "FLASHCKPT_TEST_FOLDER", "FLASHCKPT_TEST_LAUNCH"


def stem() -> str:
    """Of this rank's files in this incarnation of the group."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{os.environ[LAUNCH]}-rank-{os.environ['RANK']}-restart-{restart}"


def main() -> None:
    folder = Path(os.environ[FOLDER])
    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{stem()}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = sys.argv[1:]
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
        (folder / f"{stem()}.status").write_text(str(status))


if __name__ == "__main__":
    main()

"""An import that kills itself: `python -m tests.importing.killed SRC RUN POINT`."""

from __future__ import annotations

import sys

from flashckpt import crashpoints
from flashckpt.importing.run import import_checkpoint

if __name__ == "__main__":
    source, run, point = sys.argv[1:]
    crashpoints.arm(point)
    import_checkpoint(source, run)

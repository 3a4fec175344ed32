"""The first lines of a keeper's process, run as a script: `python -I boot.py`, its orders on stdin.

Owns nothing but the way from the trainer's child to a process that is nobody's. It imports the library
only after it has the trainer's own import path.
"""

from __future__ import annotations

import json
import os
import site
import sys


def main() -> None:
    orders = json.load(sys.stdin)
    # The trainer's child ends here and is reaped at once; its child, in a session of its own and not
    # its leader, belongs to init: no launcher waits for it, no terminal's hang-up reaches it.
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    paths = [str(path) for path in orders["paths"]]
    for path in paths:
        # An installation for one user, or an editable one, is found through its folder's .pth files.
        if path not in sys.path and os.path.basename(path) in ("site-packages", "dist-packages"):
            site.addsitedir(path)
    sys.path[:] = paths + [path for path in sys.path if path not in paths]

    from flashckpt.keeper.__main__ import run

    run(str(orders["run"]), str(orders["runtime"]))


if __name__ == "__main__":
    main()

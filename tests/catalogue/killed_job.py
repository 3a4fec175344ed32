"""A job of test_killed.py: it starts, and saves one snapshot after the other until it is killed. It prints
what is committed. `python -m tests.catalogue.killed_job FOLDER`"""

from __future__ import annotations

import sys

from flashckpt.catalogue.changes import Keep, parent_of
from flashckpt.errors import FlashckptError
from flashckpt.store.local import LocalStore
from tests.catalogue.snapshots import HOME, Job


def main(folder: str) -> None:
    home = HOME
    job = Job(LocalStore(folder), home)
    parent = parent_of(job.catalogue)
    print("started", parent.boundary if parent else 0, flush=True)
    job.run(home.collect(job.catalogue))
    boundary = parent.boundary if parent else 0
    while True:
        boundary += 1
        job.save(boundary, Keep(last=2))
        print("committed", boundary, job.name, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except FlashckptError as error:
        print("ended", type(error).__name__, flush=True)

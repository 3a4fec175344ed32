"""A training process that forks a child in an iteration, which leaves the loop in its own way.

`python -m tests.checkpointer.forking RUN WAY`: prints how the child ended, then "after STEP".
"""

import os
import sys

import torch

import flashckpt
from tests.checkpointer.test_loop import Job
from tests.waiting import until_slots

FORK_AT, REFUSED = 3, 7


def leave(way: str, checkpointer: flashckpt.Checkpointer) -> None:
    if way == "raise":
        raise KeyError("of the child's own")
    try:
        {"wait": checkpointer.wait, "report": checkpointer.report}[way]()
    except flashckpt.BoundaryError:
        os._exit(REFUSED)


def train(run: str, way: str) -> int:
    job = Job()
    with flashckpt.attach(run, every=1, persist_every=None, **job.named) as checkpointer:
        for x in checkpointer.batches([torch.ones(2, 4)] * 6):
            until_slots(checkpointer)
            job.train(x)
            if checkpointer.completed == FORK_AT:
                child = os.fork()
                if child == 0:
                    if way == "break":
                        break
                    leave(way, checkpointer)
                _, status = os.waitpid(child, 0)
                print(f"child {os.waitstatus_to_exitcode(status)}", flush=True)
    return checkpointer.completed


def main() -> None:
    parent = os.getpid()
    try:
        completed = train(sys.argv[1], sys.argv[2])
    except KeyError:
        sys.exit(6)
    if os.getpid() != parent:
        sys.exit(4)
    print(f"after {completed}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

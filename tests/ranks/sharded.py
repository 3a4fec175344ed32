"""What the ranks of these tests train in parts, under one of the cases of tests/ranks/parallelisms.py.

`python -m tests.ranks.rank tests.ranks.sharded RUN ORDERS-JSON`. Prints as tests/ranks/ddp.py does. Orders:
`case`; optional are `options` of the loop, `hold_at`, `save_at` and `seed`.
"""

import hashlib
import json
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import flashckpt
from flashckpt.state.tree import Tree
from tests.ranks.parallelisms import CASES
from tests.state.image import all_used_up, contents
from tests.waiting import until_room, until_slots

STEPS = 8


def state_of(tree: Tree) -> str:
    """A hash over all that this rank holds of the state."""
    rows = sorted((name, repr(held)) for name, held in contents(tree, all_used_up).items())
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def train(run: str, orders: dict[str, Any]) -> None:
    job = CASES[orders["case"]](orders.get("seed", 0))
    tree = Tree(job.state)
    options = {"every": 1, "persist_every": None} | orders.get("options", {})
    looped = flashckpt.loop(range(STEPS), run, state=job.state, **options)
    resumed = looped.checkpointer.resumed
    print(f"resumed {resumed.step} {resumed.tier}" if resumed is not None else "began", flush=True)
    for number in looped:
        if options.get("enabled", True):
            until_slots(looped.checkpointer)
            until_room(looped.checkpointer)
        if looped.completed == orders.get("hold_at"):
            print(f"held {looped.completed}", flush=True)
            signal.pause()
        if looped.completed + 1 == orders.get("save_at"):
            looped.checkpointer.save()
        job.step(number)
        print(f"step {looped.completed + 1} {state_of(tree)}", flush=True)
    print(f"state {state_of(tree)}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        train(sys.argv[1], json.loads(sys.argv[2]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

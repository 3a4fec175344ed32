"""A trainer whose keeper can make no slot, in a process of its own.

`python -m tests.checkpointer.slotless RUN HOW STEPS`

HOW is what becomes of the keeper once the run is attached. Prints the steps that were completed when the run
ended, and with which error.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch import nn

import flashckpt
from tests.processes import keepers_of

# Longer than any answer of a keeper takes: a run that has no slot after so long trains on without snapshots.
_LIMIT_S = 120.0


def spoil(how: str) -> None:
    runtime = Path(os.environ["FLASHCKPT_RUNTIME"])
    (pid,) = keepers_of(runtime)
    match how:
        case "small files":
            limit = 1 << 20
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        case "no descriptors":
            used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1, used + 1))


def main() -> None:
    run, how, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    first = model.weight[0, 0].item()
    began = time.monotonic()
    try:
        checkpointer = flashckpt.attach(run, every=1, model=model)
        spoil(how)
        while checkpointer.completed < steps and time.monotonic() - began < _LIMIT_S:
            with torch.no_grad():
                model.weight += 1
            checkpointer.step()
            time.sleep(0.001)  # a step of a training takes some time
    except flashckpt.FlashckptError as error:
        print(model.weight[0, 0].sub(first).int().item(), type(error).__name__, error, flush=True)
    else:
        print(checkpointer.completed, "no error", checkpointer.report(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

"""A trainer whose state grows in every step, in a process of its own.

`python -m tests.checkpointer.growing RUN LOG EVERY STEPS HOLD_AT [CGROUP]`

Each step is one line of LOG: the steps completed, the loss's bits, and a checksum of what has grown. Once
HOLD_AT steps are completed it prints what `report` says, as JSON, and stands still: the parent kills it
there. With CGROUP, the run's keeper, which takes the memory of the slots, is put into that cgroup.
"""

import json
import logging
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashckpt
from tests.processes import keepers_of
from tests.waiting import until

STEP_BYTES = 2 << 20


class Replay:
    """A list of what was seen, 2 MB more in every step."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def add(self) -> None:
        self.items.append(torch.rand(STEP_BYTES // 4))

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = list(state["items"])

    def checksum(self) -> int:
        return zlib.crc32(b"".join(item.numpy().tobytes()[:64] for item in self.items))


def train(run: str, log: Any, every: int, steps: int, hold_at: int, cgroup: list[str]) -> None:
    model, seen = nn.Linear(16, 16), Replay()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": seen}
    checkpointer = flashckpt.attach(run, every=every, persist_every=None, **named)
    for folder in cgroup:
        (keeper,) = keepers_of(Path(os.environ["FLASHCKPT_RUNTIME"]))
        Path(folder, "cgroup.procs").write_text(str(keeper))
    slots = checkpointer._keeper_link.slots
    while checkpointer.completed < steps:
        optimizer.zero_grad()
        loss = model(torch.rand(4, 16)).square().sum()
        loss.backward()
        optimizer.step()
        seen.add()
        bits = int.from_bytes(loss.detach().numpy().tobytes(), "little")
        print(json.dumps([checkpointer.completed + 1, bits, seen.checksum()]), file=log, flush=True)
        checkpointer.step()
        # No boundary waits for memory: how many are skipped would depend on load.
        until(lambda: slots.asked is None or (slots.error and slots.is_at_rest()), "an answer")
        if checkpointer.completed == hold_at:
            print(json.dumps(checkpointer.report()), flush=True)
            signal.pause()
    print(json.dumps(checkpointer.report()), flush=True)
    checkpointer.close()


def main() -> None:
    run, log_path, every, steps, hold_at = sys.argv[1:6]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    logging.getLogger("flashckpt").setLevel("INFO")
    with open(log_path, "a", buffering=1) as log:
        train(run, log, int(every), int(steps), int(hold_at), sys.argv[6:])


if __name__ == "__main__":
    main()

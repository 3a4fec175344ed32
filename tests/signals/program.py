"""Runs one recipe in a process of its own, and stands still where a signal is to come.

`python -m tests.signals.program RECIPE RUN LOG ORDERS-JSON`; orders:

hold_at: the step in whose iteration (in its backward pass, or between epochs) the recipe prints "held" and
stands still until the file `go` exists. leaves: where the script puts a handler that ends it, "before" the
loop or "in" that iteration. options: of flashckpt.loop; signals: of flashckpt.Options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import flashckpt
from tests.resume.recipes import RECIPES, seed
from tests.signals.conduct import expect_interrupts, leave_by_signal, say, stand_still
from tests.waiting import until_slots


def main() -> None:
    recipe, run, log_path, text = sys.argv[1:5]
    orders = json.loads(text)
    hold_at, leaves = orders.get("hold_at", -1), orders.get("leaves", "")
    options = flashckpt.Options(**orders.get("signals", {}))
    expect_interrupts()
    torch.set_num_threads(1)
    seed()
    looped: list[Any] = []

    def hold(step: int) -> None:
        if step == hold_at:
            if leaves == "in":
                leave_by_signal()
            if orders.get("raise"):
                raise ValueError("of the user's own")
            say(f"held {step}")
            stand_still(Path(orders["go"]))

    if leaves == "before":
        leave_by_signal()
    with open(log_path, "a", buffering=1) as log:

        def record(run: Any, value: object) -> None:
            looped.append(run)
            until_slots(getattr(run, "checkpointer", run))
            print(json.dumps([run.completed, value]), file=log, flush=True)

        given = {"every": 1, "persist_every": None, **orders.get("options", {})}
        RECIPES[recipe](record, hold, run, {**given, "options": options})
    checkpointer = getattr(looped[-1], "checkpointer", looped[-1])
    say(f"after {checkpointer.completed} {checkpointer.stop_reason}")


if __name__ == "__main__":
    main()

"""Runs one recipe in a process of its own, and stands still where a signal is to come.

`python -m tests.signals.program RECIPE RUN LOG ORDERS-JSON`; orders:

hold_at: the step in whose iteration (in its backward pass, or between epochs) the recipe prints "held" and
stands still until the file `go` exists. handler: what the script itself does about SIGTERM and SIGUSR1,
"before" the loop or "in" its first iteration. options: of flashckpt.loop; signals: of flashckpt.Options.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import flashckpt
from tests.resume.recipes import RECIPES, seed
from tests.signals.conduct import expect_interrupts, install, say, stand_still
from tests.waiting import until_slots


def main() -> None:
    recipe, run, log_path, text = sys.argv[1:5]
    orders = json.loads(text)
    hold_at, handler, where = orders.get("hold_at", -1), orders.get("handler", ""), orders.get("where", "")
    options = flashckpt.Options(**orders.get("signals", {}))
    expect_interrupts()
    torch.set_num_threads(1)
    seed()
    looped: list[Any] = []

    def hold(step: int) -> None:
        if step == hold_at:
            if where == "in":
                install(handler, lambda: looped[-1])
            if orders.get("raise"):
                raise ValueError("of the user's own")
            say(f"held {step}")
            stand_still(Path(orders["go"]))

    if where == "before":
        install(handler, lambda: looped[-1])
    with open(log_path, "a", buffering=1) as log:

        def record(run: Any, value: object) -> None:
            looped.append(run)
            until_slots(getattr(run, "checkpointer", run))
            print(json.dumps([run.completed, value]), file=log, flush=True)

        given = {"every": 1, "persist_every": None, **orders.get("options", {})}
        RECIPES[recipe](record, hold, run, {**given, "options": options})
    checkpointer = getattr(looped[-1], "checkpointer", looped[-1])
    say(f"after {checkpointer.completed} {checkpointer.stop_reason}")
    say(f"handlers {[str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGUSR1)]}")


if __name__ == "__main__":
    main()

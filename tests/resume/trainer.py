"""Runs one recipe in a process of its own, which is killed or signalled in one of its steps.

`python -m tests.resume.trainer RECIPE RUN LOG [HOLD_AT] [OPTIONS-JSON]`

Each record is one line of LOG, flushed before the next instruction. In iteration HOLD_AT (in its backward
pass, or between epochs) the recipe prints "held STEP" and stands still. The options are those of the loop,
and `options` those of `flashckpt.Options`. Further ones: `release`, a file that lets the recipe continue;
`leaves`, where the program installs a handler that ends it, "before" the loop or "in" that iteration;
`raises`, for an error in that iteration; `copies`: a step is read into new tensors, and copied from them.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import flashckpt
from flashckpt.state.tree import Tree
from tests.resume import gradients, loaders, modules
from tests.resume.recipes import RECIPES, seed
from tests.signals.conduct import expect_interrupts, leave_by_signal, say, stand_still
from tests.waiting import until_room, until_slots


def main() -> None:
    recipe, run, log_path, hold_at = sys.argv[1:5]
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    names = ("release", "leaves", "raises", "copies")
    release, leaves, raises, copies = (options.pop(name, "") for name in names)
    if copies:
        Tree.targets = lambda tree, saved: {}  # type: ignore[method-assign]
    if "options" in options:
        options["options"] = flashckpt.Options(**options["options"])
    expect_interrupts()
    torch.set_num_threads(1)
    seed()
    looped: list[Any] = []

    def hold(step: int) -> None:
        if step != int(hold_at):
            return
        if leaves == "in":
            leave_by_signal()
        if raises:
            raise ValueError("of the user's own")
        say(f"held {step}")
        if release:
            stand_still(Path(release))
        else:
            signal.pause()

    if leaves == "before":
        leave_by_signal()
    with open(log_path, "a", buffering=1) as log:

        def record(run: Any, value: object) -> None:
            looped[:] = [getattr(run, "checkpointer", run)]
            until_slots(looped[0])
            until_room(looped[0])
            print(json.dumps([run.completed, value]), file=log, flush=True)

        recipes = {**RECIPES, **loaders.RECIPES, **modules.RECIPES, **gradients.RECIPES}
        recipes[recipe](record, hold, run, options)
    for checkpointer in looped:
        say(f"after {checkpointer.completed} {checkpointer.stop_reason}")
    say("finished")


if __name__ == "__main__":
    main()

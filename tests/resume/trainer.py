"""Runs one recipe in a process of its own.

`python -m tests.resume.trainer RECIPE RUN LOG [HOLD_AT] [OPTIONS-JSON]`

Each record is one line of LOG, flushed before the next instruction. In iteration HOLD_AT the recipe
prints "held STEP" and stands still: the parent kills it there. Of the options `release` is a file that lets
it go on, and `grace` that of `Options`; all others are those of the loop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

import flashckpt
from tests.resume import gradients, loaders, modules, values
from tests.resume.recipes import RECIPES, seed
from tests.waiting import until, until_room, until_slots


def main() -> None:
    recipe, run, log_path, hold_at = sys.argv[1:5]
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    release = options.pop("release", "")
    if "grace" in options:
        options["options"] = flashckpt.Options(grace=options.pop("grace"))
    torch.set_num_threads(1)
    seed()

    def hold(step: int) -> None:
        if step == int(hold_at):
            print(f"held {step}", flush=True)
            if release:
                until(lambda: os.path.exists(release), "being let go")
            else:
                signal.pause()

    with open(log_path, "a", buffering=1) as log:

        def record(looped: Any, value: object) -> None:
            checkpointer = getattr(looped, "checkpointer", looped)
            until_slots(checkpointer)
            until_room(checkpointer)
            print(json.dumps([looped.completed, value]), file=log, flush=True)

        recipes = {**RECIPES, **loaders.RECIPES, **modules.RECIPES, **gradients.RECIPES, **values.RECIPES}
        recipes[recipe](record, hold, run, options)
    print("finished", flush=True)


if __name__ == "__main__":
    main()

"""Runs an example as it is, and stands still in one of its iterations, to be killed there:

python -m tests.ranks.rank tests.ranks.held SCRIPT STEP ARGUMENT...    (STEP 0: nowhere)
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

import flashckpt

SAVED_BEFORE = 3
"""So many steps before the one that it stands still in, a step is persisted."""


class Held:
    """The batches of a loop; those of one step are never given."""

    def __init__(self, batches: Any, step: int) -> None:
        self._batches, self._step = batches, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self.completed + SAVED_BEFORE == self._step:
                self.checkpointer.save()
            if self.completed == self._step:
                print(f"held {self._step}", flush=True)
                signal.pause()
            yield batch


def main() -> None:
    script, step = sys.argv[1], int(sys.argv[2])
    sys.argv = [script, *sys.argv[3:]]
    # As a shell has it that runs a script.
    sys.path[0] = os.path.dirname(script)
    if step:
        loop = flashckpt.loop
        flashckpt.loop = lambda *arguments, **named: Held(loop(*arguments, **named), step)  # type: ignore[assignment]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

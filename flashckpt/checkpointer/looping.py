"""`loop`: the one line that changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from flashckpt.capture.pace import Every
from flashckpt.checkpointer.attaching import attach
from flashckpt.checkpointer.batches import Batches
from flashckpt.errors import OptionError
from flashckpt.options import Keep, Options
from flashckpt.state.loader import check_loader

_KEEP, _OPTIONS = Keep(last=3), Options()


def loop(
    loader: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    every: Every = "auto",
    persist_every: int | str | None = "5min",
    keep: Keep = _KEEP,
    options: Options = _OPTIONS,
    state: Mapping[str, object] | None = None,
    **named: object,
) -> Batches:
    """Iterate over a loader with checkpoints, from where the run in `path` stands.

        for batch in flashckpt.loop(loader, "runs/gpt", model=model, optimizer=optimizer):
            ...

    epochs: how often the loader is gone through; 1 unless `steps` is given. steps: the step that ends
    the run, the loader being repeated until then; with both, whichever is first. Everything else is as
    in `attach`, with its errors. The iterator has `.completed` (the step: the counter to use for `% k`,
    since counters of one's own restart at zero), `.stop()` and `.checkpointer`.

    The normal end captures the last boundary and waits until it is committed (PersistError if it could
    not be). `break` and exceptions capture nothing; what was sealed before is persisted.
    """
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name}={value!r}: a number of {name}, 0 or more. Nothing was started.")
    if epochs is None and steps is None:
        epochs = 1
    check_loader(loader)
    checkpointer = attach(
        path, every=every, persist_every=persist_every, keep=keep, options=options, state=state, **named
    )
    try:
        return Batches(checkpointer, loader, epochs=epochs, steps=steps, whole_run=True)
    except BaseException:
        checkpointer._release()
        raise

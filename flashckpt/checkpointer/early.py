"""What a new process begins while it imports the rest of this library: the keeper of a run that is there.

Changes nothing of the run, and raises nothing: whatever is wrong, `attach` finds and says.
"""

from __future__ import annotations

import os
from contextlib import suppress

from flashckpt.commit.run import open_run
from flashckpt.errors import FlashckptError
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.keeper.start import start_early
from flashckpt.memory.runtime import RuntimeFolder, base_folder, identity_of, is_alive
from flashckpt.options import Environment
from flashckpt.store.base import open_store


def start_keeper(path: str | os.PathLike[str]) -> None:
    """Start the run's keeper if none lives on this node. Where no trainer comes after all, it leaves soon."""
    environment = Environment.read()
    if environment.world > 1:
        return
    with suppress(FlashckptError, OSError):
        store = open_store(path)
        identity = identity_of(open_run(store, create=False).run_id, store.place())
        runtime = RuntimeFolder.open(base_folder(environment.runtime_folder), identity)
        if is_alive(runtime, ELECTION_LOCK):
            runtime.close()
        else:
            start_early(store.url, runtime)
